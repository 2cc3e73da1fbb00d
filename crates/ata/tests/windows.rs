//! A guest sees no difference between windows and calls, whatever it does to the ports.

mod common;

use common::{DATA, Guest, MemorySectors, PORTS};
use pio::Width;
use proptest::prelude::*;
use ringdisk_ata::Drive;

#[derive(Debug, Clone)]
enum Access {
    In(u16, Width),
    Out(u16, Width, u32),
    InString(Width, usize),
    OutString(Width, Vec<u8>),
    Command { number: u8, lba: u8, count: u8, second: bool },
    Multiple(u8),
    Control(u8),
    Reset,
}

const SECTORS: usize = 24;
const COMMANDS: &[u8] =
    &[0x20, 0x24, 0x29, 0x30, 0x34, 0x39, 0x40, 0x42, 0x82, 0x90, 0xc4, 0xc5, 0xc6, 0xe5, 0xe7, 0xec, 0xef];

fn width() -> impl Strategy<Value = Width> {
    prop_oneof![Just(Width::Byte), Just(Width::Word), Just(Width::Dword)]
}

fn port() -> impl Strategy<Value = u16> {
    prop_oneof![Just(DATA), PORTS.command..PORTS.command + 9, PORTS.control - 1..PORTS.control + 2]
}

fn access() -> impl Strategy<Value = Access> {
    let length = prop_oneof![0_usize..20, 500_usize..530, 1000_usize..1100];
    let bytes = (length.clone(), any::<u64>()).prop_map(|(length, seed)| {
        let mut bytes = vec![0; length];
        testkit::fill_seeded(seed, &mut bytes);
        bytes
    });
    prop_oneof![
        3 => (port(), width()).prop_map(|(port, width)| Access::In(port, width)),
        2 => (port(), width(), any::<u32>()).prop_map(|(port, width, value)| Access::Out(port, width, value)),
        6 => (width(), length).prop_map(|(width, length)| Access::InString(width, length)),
        6 => (width(), bytes).prop_map(|(width, bytes)| Access::OutString(width, bytes)),
        6 => (prop::sample::select(COMMANDS), 0..SECTORS as u8 + 1, 0_u8..6, any::<bool>())
            .prop_map(|(number, lba, count, second)| Access::Command { number, lba, count, second }),
        1 => prop::sample::select(&[0_u8, 1, 2, 4, 16][..]).prop_map(Access::Multiple),
        1 => any::<u8>().prop_map(Access::Control),
        1 => Just(Access::Reset),
    ]
}

/// What the guest sees of it: the bytes, the alternate status, the interrupt.
fn carry_out(guest: &mut Guest, access: &Access) -> (Vec<u8>, u32, bool) {
    let mut seen = Vec::new();
    match access {
        Access::In(port, width) => seen.extend(guest.bus.read(*port, *width).to_le_bytes()),
        Access::Out(port, width, value) => guest.bus.write(*port, *width, *value),
        Access::InString(width, length) => {
            seen.resize(*length, 0xee);
            guest.bus.read_string(DATA, *width, &mut seen);
        }
        Access::OutString(width, bytes) => guest.bus.write_string(DATA, *width, bytes),
        Access::Command { number, lba, count, second } => {
            for (register, value) in [(2, *count), (3, *lba), (4, 0), (5, 0), (6, 0xe0 | u8::from(*second) << 4)] {
                // Both values of each register, so that 48-bit addresses are small too.
                guest.out(register, 0);
                guest.out(register, value);
            }
            guest.out(7, *number);
        }
        Access::Multiple(count) => {
            guest.out(2, *count);
            guest.out(7, 0xc6);
        }
        Access::Control(value) => guest.control(*value & 0x86),
        Access::Reset => guest.bus.reset(),
    }
    (seen, guest.bus.read(PORTS.control, Width::Byte), guest.interrupt())
}

struct Machine {
    guest: Guest,
    disks: [MemorySectors; 2],
}

fn machine(windows: bool, bad: u64) -> Machine {
    let disks = [MemorySectors::new(SECTORS, 1), MemorySectors::new(SECTORS / 2, 2)];
    disks[0].memory.lock().unwrap().bad = bad * 512..bad * 512 + 512;
    let drive = |disk: &MemorySectors| Some(Drive::new(disk.clone()).unwrap());
    Machine { guest: Guest::new(drive(&disks[0]), drive(&disks[1]), windows), disks }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn windows_change_nothing_but_the_calls(
        bad in 0..SECTORS as u64 * 2,
        accesses in prop::collection::vec(access(), 1..80),
    ) {
        let (mut with, mut without) = (machine(true, bad), machine(false, bad));
        for access in &accesses {
            prop_assert_eq!(carry_out(&mut with.guest, access), carry_out(&mut without.guest, access), "{:?}", access);
        }
        for (with, without) in with.disks.iter().zip(&without.disks) {
            prop_assert_eq!(&with.memory.lock().unwrap().bytes, &without.memory.lock().unwrap().bytes);
        }
    }
}
