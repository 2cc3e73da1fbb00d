//! Tests of the access to ring memory.

use super::*;
use memory::{GuestRegion, Mapping, RegionSpec};

const BASE: u64 = 0x4000_0000;

fn memory(length_bytes: usize) -> (Arc<GuestMemory>, Arc<Mapping>) {
    let (_, mapping) = Mapping::anonymous_file(c"ring", length_bytes).unwrap();
    let mapping = Arc::new(mapping);
    let spec = RegionSpec::new(BASE, length_bytes as u64).with(|region| region.user_address = 0x7000);
    let region = GuestRegion::of_mapping(spec, Arc::clone(&mapping), 0).unwrap();
    (Arc::new(GuestMemory::new(vec![region]).unwrap()), mapping)
}

fn bytes(mapping: &Mapping, offset: usize, length: usize) -> Vec<u8> {
    // SAFETY: the tests ask for ranges inside the mapping, and nobody writes meanwhile.
    unsafe { std::slice::from_raw_parts(mapping.as_ptr().as_ptr().add(offset), length) }.to_vec()
}

#[test]
fn fields_lie_where_the_specification_puts_them() {
    let (memory, mapping) = memory(4096);
    let at = RingAddresses { table: BASE, avail: BASE + 64, used: BASE + 128 };
    let ring = SplitAreas::at_guest_addresses(memory, at, 4).unwrap();
    ring.set_descriptor(
        1,
        Descriptor { address: 0x0807_0605_0403_0201, length_bytes: 0x0c0b_0a09, flags: 0x0e0d, next: 0x100f },
    );
    assert_eq!(bytes(&mapping, 16, 16), (1..=16).collect::<Vec<u8>>());
    assert_eq!(ring.descriptor(1).to_bytes().to_vec(), bytes(&mapping, 16, 16));
    ring.set_avail_flags(0x0201);
    ring.publish_avail_index(0x0403);
    ring.set_avail_entry(4, 0x0605);
    ring.set_avail_entry(7, 0x0807);
    ring.set_used_event(0x0a09);
    assert_eq!(bytes(&mapping, 64, 14), [1, 2, 3, 4, 5, 6, 0, 0, 0, 0, 7, 8, 9, 10]);
    ring.set_used_flags(0x0201);
    ring.publish_used_index(0x0403);
    ring.set_used_entry(0xfffd, 0x0807_0605, 0x0c0b_0a09);
    ring.set_avail_event(0x0e0d);
    let used = bytes(&mapping, 128, 38);
    assert_eq!(used[..4], [1, 2, 3, 4]);
    assert_eq!(used[12..20], [5, 6, 7, 8, 9, 10, 11, 12]);
    assert_eq!(used[36..], [13, 14]);
    assert_eq!((ring.used_entry(1), ring.avail_event()), ((0x0807_0605, 0x0c0b_0a09), 0x0e0d));
    assert_eq!((ring.avail_entry(0), ring.used_event()), (0x0605, 0x0a09));
}

#[test]
fn a_ring_that_does_not_fit_its_memory_is_refused() {
    let (memory, _) = memory(4096);
    let at = RingAddresses { table: 0x7000, avail: 0x7400, used: 0x7800 };
    let ring = |at, size| SplitAreas::at_user_addresses(Arc::clone(&memory), at, size).map(|_| ());
    assert_eq!(ring(at, 16), Ok(()));
    assert_eq!(ring(at, 0), Err(LayoutError::Size { size: 0 }));
    assert_eq!(ring(at, 12), Err(LayoutError::Size { size: 12 }));
    assert!(matches!(ring(at, 512), Err(LayoutError::Memory { area: "descriptor table", .. })));
    let odd = RingAddresses { avail: 0x7401, ..at };
    assert!(matches!(ring(odd, 16), Err(LayoutError::Alignment { area: "available ring", .. })));
    // The used ring's last event field falls behind the region by two bytes.
    let late = RingAddresses { used: 0x8000 - 132, ..at };
    assert!(matches!(ring(late, 16), Err(LayoutError::Memory { area: "used ring", .. })));
    let fits = RingAddresses { used: 0x8000 - 136, ..at };
    assert_eq!(ring(fits, 16), Ok(()));
}

#[test]
fn an_event_is_crossed_once_also_around_the_end_of_the_index() {
    assert!(crossed_event(5, 5, 6));
    assert!(!crossed_event(5, 6, 7));
    assert!(!crossed_event(7, 5, 7));
    assert!(crossed_event(0xffff, 0xfffe, 1));
    assert!(!crossed_event(1, 0xfffe, 1));
}

#[test]
fn words_beside_the_ring_are_little_endian_and_end_at_their_end() {
    let (memory, mapping) = memory(4096);
    let words = SharedWords::at_guest_address(Arc::clone(&memory), BASE + 64, 24).unwrap();
    words.set_word(0, 0x0807_0605_0403_0201);
    words.set_descriptor(8, Descriptor { address: 9, length_bytes: 10, flags: 11, next: 12 });
    words.set_word(24, u64::MAX);
    words.set_word(4, u64::MAX);
    words.set_byte(24, 1);
    words.set_byte(5, 0xff);
    let expected = [1, 2, 3, 4, 5, 0xff, 7, 8, 9, 0, 0, 0, 0, 0, 0, 0, 10, 0, 0, 0, 11, 0, 12, 0, 0, 0, 0];
    assert_eq!(bytes(&mapping, 64, 27), expected);
    assert_eq!((words.byte(5), words.byte(24)), (0xff, 0));
    assert!(SharedWords::at_guest_address(Arc::clone(&memory), BASE + 4, 8).is_err());
    assert!(SharedWords::at_guest_address(memory, BASE + 4088, 16).is_err());
}
