//! Real code on a real processor reads and writes sectors: the example's machine.

#[path = "../examples/real_mode/guest.rs"]
mod guest;
#[path = "../examples/real_mode/machine.rs"]
mod machine;

mod common;

use common::{Guest, MemorySectors};
use machine::Machine;
use ringdisk_ata::Drive;

#[test]
fn a_real_mode_guest_copies_a_sector_by_strings() {
    let Some(mut machine) = Machine::new(&guest::copy_sector(5, 9)).unwrap() else {
        // No list of packages brings a processor's virtualization along.
        testkit::skipped("/dev/kvm cannot be opened");
        return;
    };
    let disk = MemorySectors::new(16, 21);
    let Guest { mut bus, channel } = Guest::new(Some(Drive::new(disk.clone()).unwrap()), None, true);
    let exits = machine.run(&mut bus).unwrap();
    assert_eq!(machine.read_memory(guest::BUFFER, 512).unwrap(), disk.sector(5));
    assert_eq!(disk.sector(9), disk.sector(5));
    assert_eq!(disk.memory.lock().unwrap().flushes, 1);
    // Two commands of six registers and a status, a flush, and the end of each window.
    assert_eq!(bus.device_calls(channel), 2 * (6 + 1) + 1 + 2, "{exits} exits");
}
