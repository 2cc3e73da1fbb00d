//! What a driver may rely on, by ATA/ATAPI-6.

mod common;

use common::{DATA, Guest, MemorySectors, PORTS};
use pio::Width;
use ringdisk_ata::{Drive, command, status};

const READY: u8 = status::DRDY | status::DSC;
const ABRT: u8 = 0x04;

fn stamped(sectors: usize) -> Vec<u8> {
    let mut bytes = vec![0; sectors * 512];
    testkit::fill_seeded(99, &mut bytes);
    bytes
}

#[test]
fn identify_tells_the_size_the_serial_and_a_valid_sum() {
    let mut guest = Guest::of(&MemorySectors::new(1000, 1));
    guest.command(command::IDENTIFY, 0, 0);
    assert!(guest.interrupt() && guest.wants_data() && !guest.interrupt(), "reading the status acknowledges");
    let answer = guest.read(512);
    let word = |index: usize| u16::from_le_bytes([answer[2 * index], answer[2 * index + 1]]);
    let text = |words: std::ops::Range<usize>| {
        let bytes = words.flat_map(|index| word(index).to_be_bytes()).collect();
        String::from_utf8(bytes).unwrap().trim().to_owned()
    };
    assert_eq!((text(10..20).as_str(), text(27..47).as_str()), ("RD-0007", "Ringdisk"));
    assert_eq!((word(60), word(61), word(100), word(101)), (1000, 0, 1000, 0));
    assert_eq!((word(83) & 0xc400, word(49) & 0x200), (0x4400, 0x200), "48-bit addresses, and LBA");
    assert_eq!(answer.iter().fold(0_u8, |sum, byte| sum.wrapping_add(*byte)), 0);
    assert!(guest.is_idle() && !guest.interrupt());
}

#[test]
fn sectors_are_read_and_written_with_both_kinds_of_address() {
    let disk = MemorySectors::new(300, 2);
    let mut guest = Guest::of(&disk);
    // A count of zero is 256 sectors.
    guest.command(command::READ_SECTORS, 7, 0);
    for lba in 7..7 + 256 {
        assert!(guest.interrupt() && guest.wants_data(), "sector {lba}");
        assert_eq!(guest.read(512), disk.sector(lba), "sector {lba}");
    }
    assert!(guest.is_idle());
    assert!(disk.memory.lock().unwrap().reads < 10, "it reads ahead within a command");
    let bytes = stamped(3);
    guest.command_ext(command::WRITE_SECTORS_EXT, 290, 3);
    assert!(!guest.interrupt(), "the first block is asked for without an interrupt");
    for sector in bytes.chunks(512) {
        assert!(guest.wants_data());
        guest.write(sector);
        assert!(guest.interrupt());
    }
    assert!(guest.is_idle());
    assert_eq!([disk.sector(290), disk.sector(291), disk.sector(292)].concat(), bytes);
    guest.command_ext(command::READ_SECTORS_EXT, 290, 3);
    assert_eq!(guest.read(3 * 512), bytes, "a string may run through several windows");
    guest.command(command::FLUSH_CACHE, 0, 0);
    assert!(guest.is_idle() && disk.memory.lock().unwrap().flushes == 1);
}

#[test]
fn multiple_moves_blocks_and_the_last_may_be_shorter() {
    let disk = MemorySectors::new(64, 3);
    let mut guest = Guest::of(&disk);
    guest.command(command::READ_MULTIPLE, 0, 4);
    assert_eq!((guest.status(), guest.register(1)), (READY | status::ERR, ABRT), "no block size is set");
    guest.command(command::SET_MULTIPLE, 0, 3);
    assert_eq!((guest.status(), guest.register(1)), (READY | status::ERR, ABRT), "3 is no power of two");
    guest.command(command::SET_MULTIPLE, 0, 4);
    assert!(guest.is_idle());
    guest.command(command::READ_MULTIPLE, 5, 6);
    for (lba, sectors) in [(5, 4), (9, 2)] {
        assert!(guest.interrupt() && guest.wants_data());
        let expected: Vec<u8> = (lba..lba + sectors).flat_map(|lba| disk.sector(lba)).collect();
        let read = guest.read(sectors * 512);
        assert_eq!(read, expected);
    }
    assert!(guest.is_idle());
    let bytes = stamped(6);
    guest.command_ext(command::WRITE_MULTIPLE_EXT, 20, 6);
    guest.write(&bytes[..4 * 512 - 4]);
    assert!(!guest.interrupt() && disk.sector(20) != bytes[..512], "the block is not whole");
    guest.write(&bytes[4 * 512 - 4..4 * 512]);
    assert!(guest.interrupt() && guest.wants_data() && disk.sector(23) == bytes[3 * 512..4 * 512]);
    guest.write(&bytes[4 * 512..]);
    assert!(guest.is_idle() && disk.sector(25) == bytes[5 * 512..]);
}

/// The Data register has 16 bits: a byte access moves a word, of which the guest sees the lower half.
#[test]
fn widths_may_be_mixed_also_over_the_end_of_a_window() {
    let disk = MemorySectors::new(8, 4);
    let mut guest = Guest::of(&disk);
    let both = [disk.sector(1), disk.sector(2)].concat();
    guest.command(command::READ_SECTORS, 1, 2);
    assert_eq!(guest.bus.read(DATA, Width::Byte), both[0].into());
    assert_eq!(guest.bus.read(DATA, Width::Dword).to_le_bytes(), both[2..6]);
    let mut rest = vec![0; 504];
    guest.bus.read_string(DATA, Width::Dword, &mut rest);
    assert_eq!(rest, both[6..510]);
    // Two bytes are left in this window, and two come from the next.
    assert_eq!(guest.bus.read(DATA, Width::Dword).to_le_bytes(), both[510..514]);
    let mut bytes = vec![0; 255];
    guest.bus.read_string(DATA, Width::Byte, &mut bytes);
    let lower: Vec<u8> = both[514..].iter().copied().step_by(2).collect();
    assert_eq!(bytes, lower);
    assert!(guest.is_idle());
    assert_eq!(guest.bus.read(DATA, Width::Word), 0, "no data wait");
    // An odd string: the byte behind the last whole access is not touched.
    guest.command(command::READ_SECTORS, 1, 1);
    let mut odd = [0xee; 7];
    guest.bus.read_string(DATA, Width::Word, &mut odd);
    assert_eq!((&odd[..6], odd[6]), (&both[..6], 0xee));
    assert!(guest.wants_data());
}

#[test]
fn a_reset_in_mid_window_drops_what_is_not_a_whole_block() {
    let disk = MemorySectors::new(8, 5);
    let before = [disk.sector(3), disk.sector(4)];
    let mut guest = Guest::of(&disk);
    let bytes = stamped(2);
    guest.command(command::WRITE_SECTORS, 3, 2);
    guest.write(&bytes[..512 + 100]);
    guest.control(0x04);
    assert_eq!(guest.status(), status::BSY);
    guest.control(0x00);
    assert_eq!((guest.status(), guest.register(1)), (READY, 1));
    let signature: Vec<u8> = (2..7).map(|register| guest.register(register)).collect();
    assert_eq!(signature, [1, 1, 0, 0, 0]);
    guest.write(&bytes[512 + 100..]);
    assert_eq!(disk.sector(3), bytes[..512]);
    assert_eq!(disk.sector(4), before[1], "the second sector had not come whole");
    guest.command(command::READ_SECTORS, 4, 1);
    assert_eq!(guest.read(512), before[1]);
    // The machine's reset line does the same.
    guest.command(command::READ_SECTORS, 0, 1);
    let _ = guest.read(10);
    guest.bus.reset();
    assert_eq!((guest.status(), guest.interrupt(), guest.bus.read(DATA, Width::Word)), (READY, false, 0));
}

#[test]
fn two_drives_keep_their_data_and_their_registers_apart() {
    let (first, second) = (MemorySectors::new(8, 6), MemorySectors::new(16, 7));
    let drive = |disk: &MemorySectors| Some(Drive::new(disk.clone()).unwrap());
    let mut guest = Guest::new(drive(&first), drive(&second), true);
    guest.command(command::READ_SECTORS, 2, 1);
    let begun = guest.read(100);
    // The second drive is chosen while the first one has data.
    guest.out(6, 0xf0);
    assert_eq!((guest.status(), guest.bus.read(DATA, Width::Word)), (READY, 0));
    guest.out(3, 12);
    guest.out(2, 1);
    guest.out(7, command::READ_SECTORS);
    assert_eq!(guest.read(512), second.sector(12));
    guest.out(6, 0xe0);
    assert!(guest.wants_data());
    assert_eq!([begun, guest.read(412)].concat(), first.sector(2));
    guest.out(7, command::DIAGNOSTIC);
    assert!(guest.interrupt());
    assert_eq!((guest.status(), guest.register(1), guest.register(2)), (READY, 1, 1));
}

#[test]
fn the_first_drive_answers_for_a_second_that_is_not_there() {
    let mut guest = Guest::of(&MemorySectors::new(8, 8));
    guest.out(6, 0xf0);
    assert_eq!((guest.status(), guest.bus.read(PORTS.control, Width::Byte)), (0, 0));
    guest.out(7, command::IDENTIFY);
    assert_eq!((guest.status(), guest.interrupt()), (0, false));
    let mut nobody = Guest::new(None, None, true);
    assert_eq!(nobody.status(), 0x7f);
}

#[test]
fn errors_name_the_sector_and_what_was_whole_stays() {
    let disk = MemorySectors::new(200, 9);
    disk.memory.lock().unwrap().bad = 103 * 512..104 * 512;
    let mut guest = Guest::of(&disk);
    guest.command(command::READ_SECTORS, 199, 2);
    assert_eq!((guest.status(), guest.register(1), guest.register(3)), (READY | status::ERR, 0x10, 200));
    guest.command_ext(command::READ_SECTORS_EXT, 1 << 40, 1);
    guest.control(0x80);
    assert_eq!((guest.register(1), guest.register(5)), (0x10, 1), "the upper half, with HOB");
    guest.control(0x00);
    // Sectors before the bad one are read, although one request would have fetched all.
    guest.command(command::READ_SECTORS, 101, 5);
    assert_eq!(guest.read(1024), [disk.sector(101), disk.sector(102)].concat());
    assert_eq!((guest.status(), guest.register(1), guest.register(3)), (READY | status::ERR, 0x40, 103));
    guest.command(command::WRITE_SECTORS, 102, 3);
    guest.write(&stamped(2));
    assert_eq!((guest.status(), guest.register(3)), (READY | status::ERR | status::DF, 103));
    assert_eq!(disk.sector(102), stamped(1));
    // Sectors by cylinder are not served, and unknown commands are not.
    guest.out(6, 0xa0);
    for number in [command::READ_SECTORS, 0xff] {
        guest.out(7, number);
        assert_eq!((guest.status(), guest.register(1)), (READY | status::ERR, ABRT));
    }
}

#[test]
fn a_read_only_disk_refuses_writes_and_the_cache_can_be_off() {
    let disk = MemorySectors { read_only: true, ..MemorySectors::new(8, 10) };
    let mut guest = Guest::of(&disk);
    guest.command(command::WRITE_SECTORS, 0, 1);
    assert_eq!((guest.status(), guest.register(1)), (READY | status::ERR, ABRT));
    let feature = |guest: &mut Guest, feature, count| {
        guest.out(1, feature);
        guest.command(command::SET_FEATURES, 0, count);
        guest.is_idle()
    };
    assert!(feature(&mut guest, 0x82, 0) && !disk.memory.lock().unwrap().volatile);
    assert_eq!(disk.memory.lock().unwrap().flushes, 1);
    assert!(feature(&mut guest, 0x02, 0) && disk.memory.lock().unwrap().volatile);
    assert!(feature(&mut guest, 0x03, 0x0c) && !feature(&mut guest, 0x03, 0x42), "no direct memory access");
}

/// IDENTIFY says that the drive has them all.
#[test]
fn commands_of_power_management_end_and_a_drive_that_rests_has_written_its_cache() {
    let disk = MemorySectors::new(8, 13);
    let mut guest = Guest::of(&disk);
    let commands = [
        (command::IDLE, 0),
        (command::IDLE_IMMEDIATE, 0),
        (command::CHECK_POWER, 0),
        (command::STANDBY, 1),
        (command::STANDBY_IMMEDIATE, 2),
        (command::SLEEP, 3),
    ];
    for (number, flushes) in commands {
        guest.command(number, 0, 0);
        assert!(guest.interrupt() && guest.is_idle(), "{number:#x}");
        assert_eq!(disk.memory.lock().unwrap().flushes, flushes, "{number:#x}");
    }
    guest.control(0x04);
    guest.control(0x00);
    guest.command(command::READ_SECTORS, 3, 1);
    assert_eq!(guest.read(512), disk.sector(3));
}

#[test]
fn interrupts_are_off_while_the_driver_says_so() {
    let mut guest = Guest::of(&MemorySectors::new(8, 11));
    guest.control(0x02);
    guest.command(command::READ_SECTORS, 0, 1);
    assert!(!guest.interrupt());
    guest.control(0x00);
    assert!(guest.interrupt(), "it was kept back, not lost");
    assert_eq!(guest.bus.read(PORTS.control, Width::Byte) & 0x08, 0x08);
    assert!(guest.interrupt(), "the alternate status does not acknowledge");
}

#[test]
fn a_sector_costs_two_calls_at_most() {
    let calls = |windows| {
        let mut guest = Guest::new(Some(Drive::new(MemorySectors::new(64, 12)).unwrap()), None, windows);
        guest.command(command::READ_SECTORS, 0, 16);
        let before = guest.bus.device_calls(guest.channel);
        for _ in 0..16 {
            let _ = (guest.status(), guest.read(512));
        }
        guest.bus.device_calls(guest.channel) - before
    };
    assert_eq!((calls(true), calls(false)), (16 * 2, 16 * 257));
}
