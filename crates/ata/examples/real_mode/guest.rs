//! The guest's code, in bytes.

use ringdisk_ata::command;

/// Where the sector is kept in the guest's memory.
pub(crate) const BUFFER: u16 = 0x2000;

/// Code that reads sector `from` with `rep insw`, writes it to sector `to` with `rep outsd`, flushes, and halts.
pub(crate) fn copy_sector(from: u8, to: u8) -> Vec<u8> {
    let [low, high] = BUFFER.to_le_bytes();
    let mut code = Vec::new();
    code.extend(begin(command::READ_SECTORS, from));
    code.extend([0xba, 0xf0, 0x01]); // mov dx, 0x1f0
    code.extend([0xbf, low, high]); // mov di, BUFFER
    code.extend([0xb9, 0x00, 0x01]); // mov cx, 256
    code.extend([0xf3, 0x6d]); // rep insw
    code.extend(begin(command::WRITE_SECTORS, to));
    code.extend([0xba, 0xf0, 0x01]); // mov dx, 0x1f0
    code.extend([0xbe, low, high]); // mov si, BUFFER
    code.extend([0xb9, 0x80, 0x00]); // mov cx, 128
    code.extend([0xf3, 0x66, 0x6f]); // rep outsd
    code.extend([0xba, 0xf7, 0x01]); // mov dx, 0x1f7
    code.extend([0xb0, command::FLUSH_CACHE, 0xee]); // mov al, FLUSH CACHE; out dx, al
    code.extend([0xf4]); // hlt
    code
}

/// Code that begins a command for one sector of the first drive, and waits until data may move.
fn begin(command: u8, lba: u8) -> Vec<u8> {
    let mut code = vec![0xba, 0xf2, 0x01]; // mov dx, 0x1f2
    for value in [1, lba, 0, 0, 0xe0, command] {
        code.extend([0xb0, value, 0xee, 0x42]); // mov al, value; out dx, al; inc dx
    }
    code.extend([0x4a]); // dec dx
    code.extend([0xec, 0xa8, 0x08, 0x74, 0xfb]); // wait: in al, dx; test al, DRQ; jz wait
    code
}
