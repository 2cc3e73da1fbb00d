//! A packed ring's memory (virtio 1.2, 2.8): one ring of descriptors that both sides write, and two event structures.

use super::{DESCRIPTOR_BYTES, LayoutError, RingAddresses, crossed_event, descriptor_flags, resolve_area};
use memory::{GuestMemory, MemoryError};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering};

/// The largest packed ring (2.8.10). Its size need not be a power of two.
pub const MAX_PACKED_SIZE: u16 = 32768;

/// Set to the driver's wrap counter when a descriptor is made available (2.8.1).
const AVAIL: u16 = 1 << 7;

/// Set to the inverse of the wrap counter when a descriptor is made available, to the wrap counter when it is used.
const USED: u16 = 1 << 15;

/// The changes that a side wants to be notified of: the `flags` of its event structure (2.8.10).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EventWish {
    /// Notify of every change.
    Always,
    /// Notify of nothing.
    Never,
    /// Notify of the change of the descriptor that these bits name ([`PackedPosition::from_bits`]). Only with
    /// EVENT_IDX.
    At(u16),
}

impl EventWish {
    fn from_fields(flags: u16, position: u16) -> Self {
        match flags & 3 {
            0 => Self::Always,
            1 => Self::Never,
            2 => Self::At(position),
            // Reserved. A needless notification does no harm.
            _ => Self::Always,
        }
    }

    /// Whether the side with this wish must be notified when `moved` descriptors up to `new` have changed.
    #[must_use]
    pub fn is_due(self, new: PackedPosition, moved: u16, size: u16) -> bool {
        match self {
            Self::Always => true,
            Self::Never => false,
            // The batch moved more than a whole turn, so it passed the event.
            Self::At(_) if moved > size => true,
            Self::At(bits) => {
                let event = PackedPosition::from_bits(bits);
                let turn_back = if event.wrap == new.wrap { 0 } else { size };
                crossed_event(event.index.wrapping_sub(turn_back), new.index.wrapping_sub(moved), new.index)
            }
        }
    }
}

/// A place in a packed ring: the index of a descriptor, and the wrap counter of the turn (2.8.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PackedPosition {
    /// Index of the descriptor.
    pub index: u16,
    /// True in the first turn, and in every second one from there.
    pub wrap: bool,
}

impl PackedPosition {
    /// The position of a new ring.
    pub const START: Self = Self { index: 0, wrap: true };

    /// Reads fifteen bits of index and one of wrap counter.
    #[must_use]
    pub fn from_bits(bits: u16) -> Self {
        Self { index: bits & 0x7fff, wrap: bits & 0x8000 != 0 }
    }

    /// Returns the bits that [`PackedPosition::from_bits`] reads.
    #[must_use]
    pub fn to_bits(self) -> u16 {
        self.index & 0x7fff | u16::from(self.wrap) << 15
    }

    /// Returns the position `count` descriptors on; at most the ring's `size`.
    #[inline]
    #[must_use]
    pub fn advance(self, count: u16, size: u16) -> Self {
        let index = self.index.wrapping_add(count);
        match index >= size {
            true => Self { index: index.wrapping_sub(size), wrap: !self.wrap },
            false => Self { index, wrap: self.wrap },
        }
    }

    /// Returns the position `count` descriptors back; at most the ring's `size`.
    #[must_use]
    pub fn back(self, count: u16, size: u16) -> Self {
        match self.index.checked_sub(count) {
            Some(index) => Self { index, wrap: self.wrap },
            None => Self { index: self.index.wrapping_sub(count).wrapping_add(size), wrap: !self.wrap },
        }
    }

    /// Returns the number of descriptors from here to `later`; `None` if that is not at most a turn ahead.
    #[must_use]
    pub fn distance_to(self, later: Self, size: u16) -> Option<u16> {
        match self.wrap == later.wrap {
            true => later.index.checked_sub(self.index),
            false => later.index.checked_add(size)?.checked_sub(self.index).filter(|distance| *distance <= size),
        }
    }

    /// Whether a descriptor here with `flags` was made available in this turn.
    #[inline]
    #[must_use]
    pub fn is_available(self, flags: u16) -> bool {
        flags & (AVAIL | USED) == self.available_flags()
    }

    /// Whether a descriptor here with `flags` was used in this turn.
    #[inline]
    #[must_use]
    pub fn is_used(self, flags: u16) -> bool {
        flags & (AVAIL | USED) == self.used_flags()
    }

    /// Returns the flags that make a descriptor here available.
    #[inline]
    #[must_use]
    pub fn available_flags(self) -> u16 {
        if self.wrap { AVAIL } else { USED }
    }

    /// Returns the flags that mark a descriptor here as used.
    #[inline]
    #[must_use]
    pub fn used_flags(self) -> u16 {
        if self.wrap { AVAIL | USED } else { 0 }
    }
}

/// A descriptor of a packed ring, copied out of or into it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PackedDescriptor {
    /// Guest physical address.
    pub address: u64,
    /// Length in bytes.
    pub length_bytes: u32,
    /// Names the buffer. In a chain, the id of the last descriptor counts.
    pub id: u16,
    /// See [`descriptor_flags`], and [`PackedPosition::available_flags`].
    pub flags: u16,
}

impl PackedDescriptor {
    /// Whether `flag` (one of [`descriptor_flags`]) is set.
    #[must_use]
    pub fn has(&self, flag: u16) -> bool {
        self.flags & flag != 0
    }

    pub(super) fn from_words(first: u64, second: u64) -> Self {
        // The truncations pick the fields apart.
        Self { address: first, length_bytes: second as u32, id: (second >> 32) as u16, flags: (second >> 48) as u16 }
    }

    pub(super) fn second_word(self) -> u64 {
        u64::from(self.length_bytes) | u64::from(self.id) << 32 | u64::from(self.flags) << 48
    }
}

/// A packed ring's areas. Each half writes only its own fields. Every field is accessed at its own size.
#[derive(Debug)]
pub struct PackedAreas {
    ring: NonNull<u8>,
    driver_event: NonNull<u8>,
    device_event: NonNull<u8>,
    size: u16,
    /// Keeps the three areas mapped.
    memory: Arc<GuestMemory>,
}

// SAFETY: as for `SplitAreas`: shared memory that `memory` keeps mapped, and all access is atomic.
unsafe impl Send for PackedAreas {}

const EVENT_BYTES: usize = 4;

/// Offsets in a descriptor.
const LENGTH: usize = 8;
const ID: usize = 12;
const FLAGS: usize = 14;

/// Checks the size of a packed ring that a peer names.
pub fn check_packed_size(size: u32) -> Result<u16, LayoutError> {
    match u16::try_from(size) {
        Ok(short) if (1..=MAX_PACKED_SIZE).contains(&short) => Ok(short),
        _ => Err(LayoutError::PackedSize { size }),
    }
}

impl PackedAreas {
    /// Finds a ring whose areas are named in the peer's own address space (vhost-user).
    pub fn at_user_addresses(memory: Arc<GuestMemory>, at: RingAddresses, size: u16) -> Result<Self, LayoutError> {
        let find = |address, length| memory.translate_user(address, length);
        let [ring, driver_event, device_event] = Self::resolve(find, at, size)?;
        Ok(Self { ring, driver_event, device_event, size, memory })
    }

    /// Finds a ring whose areas are named by guest physical address (a driver's own ring).
    pub fn at_guest_addresses(memory: Arc<GuestMemory>, at: RingAddresses, size: u16) -> Result<Self, LayoutError> {
        let find = |address, length| memory.translate(address, length, &mut 0);
        let [ring, driver_event, device_event] = Self::resolve(find, at, size)?;
        Ok(Self { ring, driver_event, device_event, size, memory })
    }

    fn resolve(
        find: impl Fn(u64, u64) -> Result<NonNull<u8>, MemoryError>,
        at: RingAddresses,
        size: u16,
    ) -> Result<[NonNull<u8>; 3], LayoutError> {
        let ring_bytes = usize::from(check_packed_size(u32::from(size))?).wrapping_mul(DESCRIPTOR_BYTES);
        Ok([
            resolve_area(&find, ("descriptor ring", 16), at.table, ring_bytes)?,
            resolve_area(&find, ("driver event area", 4), at.avail, EVENT_BYTES)?,
            resolve_area(&find, ("device event area", 4), at.used, EVENT_BYTES)?,
        ])
    }

    /// Returns the number of descriptors.
    #[must_use]
    pub fn size(&self) -> u16 {
        self.size
    }

    /// Returns the memory that the areas, and the buffers that descriptors name, lie in.
    #[must_use]
    pub fn memory(&self) -> &Arc<GuestMemory> {
        &self.memory
    }

    /// Returns where a field of descriptor `index` lies. All indexing goes through here. An index behind the end counts
    /// as zero.
    #[inline]
    fn field(&self, index: u16, offset: usize) -> *mut u8 {
        let slot = if index < self.size { usize::from(index) } else { 0 };
        // SAFETY: the slot is below the ring's size and callers pass an offset below 16, so the place lies in the ring.
        unsafe { self.ring.as_ptr().add(slot.wrapping_mul(DESCRIPTOR_BYTES).wrapping_add(offset)) }
    }

    #[inline]
    fn address_field(&self, index: u16) -> &AtomicU64 {
        // SAFETY: the first eight bytes of a descriptor, which is 16-byte aligned and mapped while `self.memory` lives.
        unsafe { AtomicU64::from_ptr(self.field(index, 0).cast()) }
    }

    #[inline]
    fn length_field(&self, index: u16) -> &AtomicU32 {
        // SAFETY: as above; the four bytes at 8.
        unsafe { AtomicU32::from_ptr(self.field(index, LENGTH).cast()) }
    }

    #[inline]
    fn id_field(&self, index: u16) -> &AtomicU16 {
        // SAFETY: as above; the two bytes at 12.
        unsafe { AtomicU16::from_ptr(self.field(index, ID).cast()) }
    }

    #[inline]
    fn flags_field(&self, index: u16) -> &AtomicU16 {
        // SAFETY: as above; the last two bytes.
        unsafe { AtomicU16::from_ptr(self.field(index, FLAGS).cast()) }
    }

    /// Returns the flags of descriptor `index`. The fields that they announce can be read afterwards.
    #[inline]
    #[must_use]
    pub fn flags(&self, index: u16) -> u16 {
        u16::from_le(self.flags_field(index).load(Ordering::Acquire))
    }

    /// Whether the driver has reached the last descriptor in a turn whose wrap counter was set.
    #[must_use]
    pub fn was_filled(&self) -> bool {
        self.flags(self.size.saturating_sub(1)) & AVAIL != 0
    }

    /// Writes the flags of descriptor `index`, while an earlier descriptor still hides them from the other side.
    #[inline]
    pub fn set_flags(&self, index: u16, flags: u16) {
        self.flags_field(index).store(flags.to_le(), Ordering::Relaxed);
    }

    /// Writes the flags of descriptor `index`: everything written before is visible to a side that sees them.
    #[inline]
    pub fn publish_flags(&self, index: u16, flags: u16) {
        self.flags_field(index).store(flags.to_le(), Ordering::Release);
    }

    /// Copies descriptor `index` out, whose flags were read before.
    #[inline]
    #[must_use]
    pub fn descriptor(&self, index: u16, flags: u16) -> PackedDescriptor {
        PackedDescriptor {
            address: u64::from_le(self.address_field(index).load(Ordering::Relaxed)),
            length_bytes: u32::from_le(self.length_field(index).load(Ordering::Relaxed)),
            id: u16::from_le(self.id_field(index).load(Ordering::Relaxed)),
            flags,
        }
    }

    /// Writes everything of a descriptor but its flags (driver).
    #[inline]
    pub fn set_descriptor(&self, index: u16, descriptor: PackedDescriptor) {
        self.address_field(index).store(descriptor.address.to_le(), Ordering::Relaxed);
        self.set_used(index, descriptor.id, descriptor.length_bytes);
    }

    /// Returns the id and length of a used descriptor, unchecked.
    #[inline]
    #[must_use]
    pub fn used(&self, index: u16) -> (u16, u32) {
        let id = u16::from_le(self.id_field(index).load(Ordering::Relaxed));
        (id, u32::from_le(self.length_field(index).load(Ordering::Relaxed)))
    }

    /// Writes the id and length of a used descriptor (device).
    #[inline]
    pub fn set_used(&self, index: u16, id: u16, length_bytes: u32) {
        self.length_field(index).store(length_bytes.to_le(), Ordering::Relaxed);
        self.id_field(index).store(id.to_le(), Ordering::Relaxed);
    }

    /// Returns position and flags of an event structure.
    fn event_fields(event: &NonNull<u8>) -> (&AtomicU16, &AtomicU16) {
        // SAFETY: both callers pass a pointer to the four bytes of an event structure, which are 4-byte aligned and
        // mapped while the areas' memory lives. Both sides access them atomically.
        unsafe { (AtomicU16::from_ptr(event.as_ptr().cast()), AtomicU16::from_ptr(event.as_ptr().add(2).cast())) }
    }

    fn wish((position, flags): (&AtomicU16, &AtomicU16)) -> EventWish {
        // Flags first: a position that was written before them is seen.
        let flags = u16::from_le(flags.load(Ordering::Acquire));
        EventWish::from_fields(flags, u16::from_le(position.load(Ordering::Relaxed)))
    }

    fn set_wish((position, flags): (&AtomicU16, &AtomicU16), wish: EventWish) {
        let value: u16 = match wish {
            EventWish::Always => 0,
            EventWish::Never => 1,
            EventWish::At(bits) => {
                position.store(bits.to_le(), Ordering::Relaxed);
                2
            }
        };
        flags.store(value.to_le(), Ordering::Release);
    }

    /// Returns when the driver wants to be notified of used descriptors.
    #[must_use]
    pub fn driver_wish(&self) -> EventWish {
        Self::wish(Self::event_fields(&self.driver_event))
    }

    /// Sets the notifications that the driver wants.
    pub fn set_driver_wish(&self, wish: EventWish) {
        Self::set_wish(Self::event_fields(&self.driver_event), wish);
    }

    /// Returns when the device wants to be notified of available descriptors.
    #[must_use]
    pub fn device_wish(&self) -> EventWish {
        Self::wish(Self::event_fields(&self.device_event))
    }

    /// Sets the notifications that the device wants.
    pub fn set_device_wish(&self, wish: EventWish) {
        Self::set_wish(Self::event_fields(&self.device_event), wish);
    }
}

/// Returns the flag of a used descriptor that says that something was written (2.8.9): without it the length has no
/// meaning.
#[must_use]
pub fn written_flag(written_bytes: u32) -> u16 {
    if written_bytes > 0 { descriptor_flags::WRITE } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(index: u16, wrap: bool) -> PackedPosition {
        PackedPosition { index, wrap }
    }

    #[test]
    fn positions_turn_at_the_ring_size_which_is_any_number() {
        assert_eq!(PackedPosition::START.advance(4, 5), at(4, true));
        assert_eq!(at(4, true).advance(1, 5), at(0, false));
        assert_eq!(at(3, false).advance(5, 5), at(3, true));
        assert_eq!(at(32767, true).advance(32768, 32768), at(32767, false));
        for (position, count) in [(at(1, false), 3), (at(4, true), 5), (at(0, true), 0)] {
            let back = position.back(count, 5);
            assert_eq!((back.advance(count, 5), back.distance_to(position, 5)), (position, Some(count)));
            assert_eq!(PackedPosition::from_bits(position.to_bits()), position);
        }
        assert_eq!(at(1, true).distance_to(at(0, true), 5), None, "behind");
        assert_eq!(at(1, true).distance_to(at(2, false), 5), None, "more than a turn ahead");
    }

    #[test]
    fn a_descriptor_is_available_or_used_in_one_turn_only() {
        for wrap in [false, true] {
            let (position, other) = (at(3, wrap), at(3, !wrap));
            assert!(position.is_available(position.available_flags() | descriptor_flags::WRITE));
            assert!(position.is_used(position.used_flags()));
            assert!(!position.is_used(position.available_flags()) && !position.is_available(position.used_flags()));
            assert!(!other.is_available(position.available_flags()) && !other.is_available(position.used_flags()));
            assert!(!other.is_used(position.available_flags()) && !other.is_used(position.used_flags()));
        }
    }

    #[test]
    fn an_event_is_due_when_its_descriptor_is_passed_also_around_the_end() {
        let due = |event: PackedPosition, new, moved| EventWish::At(event.to_bits()).is_due(new, moved, 6);
        let (last, first, second) = (at(5, true), at(0, false), at(1, false));
        assert!(due(last, second, 2) && due(first, second, 2) && !due(second, second, 2));
        assert!(!due(at(4, true), second, 2), "passed before");
        assert!(due(at(1, true), second, 6), "a whole turn");
        assert!(!due(at(1, false), at(1, false), 6));
        assert!(EventWish::Always.is_due(second, 1, 6) && !EventWish::Never.is_due(second, 1, 6));
    }
}
