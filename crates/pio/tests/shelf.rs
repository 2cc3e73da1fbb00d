//! The window belongs to the bus: a device of another kind than a disk, with windows and without.

use proptest::prelude::*;
use ringdisk_pio::{AttachError, Bus, Device, Region, Shelf, Width, shelf_region};

const BASE: u16 = 0x510;

#[derive(Debug, Clone)]
enum Access {
    Choose(Width, u32),
    In(u16, Width),
    InString(u16, Width, usize),
    Out(u16, Width, u32),
    OutString(u16, Width, Vec<u8>),
    Reset,
}

fn width() -> impl Strategy<Value = Width> {
    prop_oneof![Just(Width::Byte), Just(Width::Word), Just(Width::Dword)]
}

fn access() -> impl Strategy<Value = Access> {
    // Also the ports beside the shelf's.
    let port = BASE - 2..BASE + 4;
    prop_oneof![
        4 => (width(), 0_u32..6).prop_map(|(width, number)| Access::Choose(width, number)),
        4 => (port.clone(), width()).prop_map(|(port, width)| Access::In(port, width)),
        4 => (Just(BASE + 1), width(), 0_usize..40).prop_map(|(port, width, bytes)| Access::InString(port, width, bytes)),
        1 => (port.clone(), width(), 0_u32..6).prop_map(|(port, width, value)| Access::Out(port, width, value)),
        1 => (port, width(), prop::collection::vec(0_u8..6, 0..9))
            .prop_map(|(port, width, bytes)| Access::OutString(port, width, bytes)),
        1 => Just(Access::Reset),
    ]
}

fn items() -> Vec<Vec<u8>> {
    let item = |length: u8| (1..=length).collect::<Vec<_>>();
    vec![item(1), item(2), Vec::new(), item(7), item(64)]
}

fn bus(windows: bool) -> (Bus, ringdisk_pio::DeviceId) {
    let mut bus = Bus::new();
    bus.set_windows(windows);
    let id = bus.attach(Box::new(Shelf::new(items())), &shelf_region(BASE)).unwrap();
    (bus, id)
}

fn carry_out(bus: &mut Bus, access: &Access) -> Vec<u8> {
    match access {
        Access::Choose(width, number) => bus.write(BASE, *width, *number),
        Access::In(port, width) => return bus.read(*port, *width).to_le_bytes().to_vec(),
        Access::InString(port, width, length) => {
            let mut bytes = vec![0xee; *length];
            bus.read_string(*port, *width, &mut bytes);
            return bytes;
        }
        Access::Out(port, width, value) => bus.write(*port, *width, *value),
        Access::OutString(port, width, bytes) => bus.write_string(*port, *width, bytes),
        Access::Reset => bus.reset(),
    }
    Vec::new()
}

proptest! {
    #[test]
    fn a_guest_sees_no_difference_between_windows_and_calls(accesses in prop::collection::vec(access(), 1..60)) {
        let ((mut with, _), (mut without, _)) = (bus(true), bus(false));
        for access in &accesses {
            prop_assert_eq!(carry_out(&mut with, access), carry_out(&mut without, access), "{:?}", access);
        }
    }
}

#[test]
fn an_item_is_read_in_accesses_of_any_width_and_zeros_follow() {
    let (mut bus, _) = bus(true);
    bus.write(BASE, Width::Word, 3);
    assert_eq!(bus.read(BASE + 1, Width::Byte), 1);
    assert_eq!(bus.read(BASE + 1, Width::Dword), 0x0504_0302);
    assert_eq!(bus.read(BASE + 1, Width::Dword), 0x0000_0706, "the item ends within the access");
    assert_eq!(bus.read(BASE + 1, Width::Word), 0);
    bus.write(BASE, Width::Word, 9);
    assert_eq!(bus.read(BASE + 1, Width::Byte), 0, "there is no such item");
}

#[test]
fn a_window_costs_its_device_two_calls() {
    let calls = |windows| {
        let (mut bus, id) = bus(windows);
        bus.write(BASE, Width::Word, 4);
        let mut bytes = [0; 64];
        bus.read_string(BASE + 1, Width::Byte, &mut bytes);
        assert_eq!(bytes.to_vec(), items()[4]);
        bus.device_calls(id)
    };
    assert_eq!((calls(true), calls(false)), (2, 65));
}

#[test]
fn a_bus_refuses_ports_that_are_taken_or_do_not_exist() {
    let (mut bus, _) = bus(true);
    let shelf = || Box::new(Shelf::new(Vec::new())) as Box<dyn Device>;
    let region = |base, ports| Region { base, ports, wide: None };
    assert_eq!(bus.attach(shelf(), &[region(BASE - 1, 2)]), Err(AttachError::Taken(BASE)));
    assert_eq!(bus.attach(shelf(), &[region(0xffff, 2)]), Err(AttachError::BadRegion(region(0xffff, 2))));
    assert_eq!(bus.attach(shelf(), &[region(5, 0)]), Err(AttachError::BadRegion(region(5, 0))));
    assert_eq!(bus.attach(shelf(), &[region(5, 3), region(7, 2)]), Err(AttachError::Taken(7)), "twice in one call");
    assert!(bus.attach(shelf(), &[region(0xffff, 1), region(5, 2), region(7, 2)]).is_ok());
}
