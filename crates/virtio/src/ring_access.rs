//! Access to ring memory that another process changes at the same time: the only module of this crate with `unsafe`.
//!
//! [`SplitAreas`] and [`PackedAreas`] resolve a ring's three areas once and keep the pointers. Every access is an
//! atomic of the field's own size, because the other side may write at any moment. Indices into the areas are masked by
//! the queue size, so no value that the other side chooses leads outside. Loads and stores are relaxed except where the
//! specification orders them. An index is loaded with acquire before the entries that it announces are read, and stored
//! with release after they were written (virtio 1.2, 2.7.13). [`full_fence`] is the barrier between publishing and the
//! question whether the other side wants a notification (2.7.13.4.1, 2.7.14).
//!
//! [`ChainMemory`] holds the buffers that descriptors name.
//!
//! Safe code can use all of it: each value holds its [`GuestMemory`], so the mapping outlives the pointers.

mod areas;
mod chain;
mod packed;
#[cfg(test)]
mod tests;

pub use areas::{RingAreas, RingLayout};
pub use chain::{ChainMemory, MAX_CHAIN_BYTES, MAX_CHAIN_SEGMENTS};
pub use packed::{
    EventWish, MAX_PACKED_SIZE, PackedAreas, PackedDescriptor, PackedPosition, check_packed_size, written_flag,
};

use memory::{GuestMemory, MemoryError};
use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering, fence};
use thiserror::Error;

/// Bytes of a descriptor.
pub const DESCRIPTOR_BYTES: usize = 16;

/// The largest split ring (2.7).
pub const MAX_SPLIT_SIZE: u16 = 32768;

/// Descriptor flags (2.7.5).
pub mod descriptor_flags {
    /// The chain goes on at `next`.
    pub const NEXT: u16 = 1;
    /// The device writes this buffer. Without the flag, it reads the buffer.
    pub const WRITE: u16 = 2;
    /// The buffer is a table of descriptors.
    pub const INDIRECT: u16 = 4;
}

/// `avail.flags`: the driver does not want interrupts (2.7.7). Only without EVENT_IDX.
pub const AVAIL_NO_INTERRUPT: u16 = 1;

/// `used.flags`: the device does not want notifications (2.7.10). Only without EVENT_IDX.
pub const USED_NO_NOTIFY: u16 = 1;

/// A descriptor, copied out of or into the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Descriptor {
    /// Guest physical address.
    pub address: u64,
    /// Length in bytes.
    pub length_bytes: u32,
    /// See [`descriptor_flags`].
    pub flags: u16,
    /// The next descriptor, if the flags say so.
    pub next: u16,
}

impl Descriptor {
    /// Whether `flag` (one of [`descriptor_flags`]) is set.
    #[must_use]
    pub fn has(&self, flag: u16) -> bool {
        self.flags & flag != 0
    }

    /// Returns the little-endian bytes, for indirect tables that a driver writes.
    #[must_use]
    pub fn to_bytes(self) -> [u8; DESCRIPTOR_BYTES] {
        let mut bytes = [0; DESCRIPTOR_BYTES];
        let (low, high) = bytes.split_at_mut(8);
        low.copy_from_slice(&self.address.to_le_bytes());
        high.copy_from_slice(&self.second_word().to_le_bytes());
        bytes
    }

    fn second_word(self) -> u64 {
        u64::from(self.length_bytes) | u64::from(self.flags) << 32 | u64::from(self.next) << 48
    }

    fn from_words(first: u64, second: u64) -> Self {
        // The truncations pick the fields apart.
        Self { address: first, length_bytes: second as u32, flags: (second >> 32) as u16, next: (second >> 48) as u16 }
    }
}

/// Whether the side that waits for `event` must be notified when the index moves from `old` to `new` (2.7.10, the
/// specification's `vring_need_event`).
#[must_use]
pub fn crossed_event(event: u16, old: u16, new: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

/// Makes all earlier writes visible to the other side before anything is read from it later.
pub fn full_fence() {
    fence(Ordering::SeqCst);
}

/// The reason why a ring's areas cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum LayoutError {
    /// The size is not a power of two, is zero, or is too large for a split ring.
    #[error("a queue of {size} entries: it must be a power of two, at most {MAX_SPLIT_SIZE}")]
    Size {
        /// Entries asked for.
        size: u32,
    },
    /// The size is zero, or too large for a packed ring.
    #[error("a packed queue of {size} entries: it must have 1 to {MAX_PACKED_SIZE}")]
    PackedSize {
        /// Entries asked for.
        size: u32,
    },
    /// A packed ring cannot go on at the position that its front end names.
    #[error("a packed ring of {size} descriptors cannot go on at {base:#x}")]
    Base {
        /// The position, as in vhost-user's messages.
        base: u32,
        /// The number of descriptors.
        size: u16,
    },
    /// An area is not aligned as 2.7 or 2.8 demands.
    #[error("the ring's {area} at {address:#x} is not aligned to {alignment_bytes} bytes")]
    Alignment {
        /// The name of the area.
        area: &'static str,
        /// Its address.
        address: u64,
        /// The required alignment.
        alignment_bytes: u64,
    },
    /// An area is not in guest memory.
    #[error("the ring's {area}: {source}")]
    Memory {
        /// The name of the area.
        area: &'static str,
        /// The reason.
        source: MemoryError,
    },
}

/// The addresses of a ring's areas, in the address space that the constructor names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RingAddresses {
    /// Descriptor table, or the ring of a packed one.
    pub table: u64,
    /// Driver area: available ring, or a packed ring's driver event structure.
    pub avail: u64,
    /// Device area: used ring, or a packed ring's device event structure.
    pub used: u64,
}

/// A split ring's areas. Fields behave as in virtio 1.2, section 2.7. Each half writes only its own fields.
#[derive(Debug)]
pub struct SplitAreas {
    table: NonNull<u8>,
    avail: NonNull<u8>,
    used: NonNull<u8>,
    size: u16,
    /// Keeps the three areas mapped.
    memory: Arc<GuestMemory>,
}

// SAFETY: the pointers name shared memory that `memory` (which is Send) keeps mapped; all access is atomic, so the thread
// that holds the value makes no difference.
unsafe impl Send for SplitAreas {}

const TABLE: (&str, usize) = ("descriptor table", 16);
const AVAIL: (&str, usize) = ("available ring", 2);
const USED: (&str, usize) = ("used ring", 4);

/// Returns the bytes of a ring's three areas for `size` entries: table, available ring, used ring. The event fields
/// always count.
#[must_use]
pub fn area_bytes(size: u16) -> (usize, usize, usize) {
    let size = usize::from(size);
    (size.wrapping_mul(16), size.wrapping_mul(2).wrapping_add(6), size.wrapping_mul(8).wrapping_add(6))
}

/// Checks a queue size that a peer names.
pub fn check_size(size: u32) -> Result<u16, LayoutError> {
    match u16::try_from(size) {
        Ok(short) if short.is_power_of_two() && short <= MAX_SPLIT_SIZE => Ok(short),
        _ => Err(LayoutError::Size { size }),
    }
}

/// Finds an area, given its name and alignment.
fn resolve_area(
    find: impl Fn(u64, u64) -> Result<NonNull<u8>, MemoryError>,
    (area, alignment): (&'static str, usize),
    address: u64,
    length_bytes: usize,
) -> Result<NonNull<u8>, LayoutError> {
    let ptr = find(address, length_bytes as u64).map_err(|source| LayoutError::Memory { area, source })?;
    // Both addresses are checked: ours for the atomics, and theirs because the specification demands it. Theirs implies
    // ours only if the file offsets are aligned too.
    match ptr.as_ptr().addr().is_multiple_of(alignment) && address.is_multiple_of(alignment as u64) {
        true => Ok(ptr),
        false => Err(LayoutError::Alignment { area, address, alignment_bytes: alignment as u64 }),
    }
}

impl SplitAreas {
    /// Finds a ring whose areas are named in the peer's own address space (vhost-user).
    pub fn at_user_addresses(memory: Arc<GuestMemory>, at: RingAddresses, size: u16) -> Result<Self, LayoutError> {
        let find = |address, length| memory.translate_user(address, length);
        let [table, avail, used] = Self::resolve(find, at, size)?;
        Ok(Self { table, avail, used, size, memory })
    }

    /// Finds a ring whose areas are named by guest physical address (a driver's own ring).
    pub fn at_guest_addresses(memory: Arc<GuestMemory>, at: RingAddresses, size: u16) -> Result<Self, LayoutError> {
        let find = |address, length| memory.translate(address, length, &mut 0);
        let [table, avail, used] = Self::resolve(find, at, size)?;
        Ok(Self { table, avail, used, size, memory })
    }

    fn resolve(
        find: impl Fn(u64, u64) -> Result<NonNull<u8>, MemoryError>,
        at: RingAddresses,
        size: u16,
    ) -> Result<[NonNull<u8>; 3], LayoutError> {
        check_size(u32::from(size))?;
        let (table_bytes, avail_bytes, used_bytes) = area_bytes(size);
        Ok([
            resolve_area(&find, TABLE, at.table, table_bytes)?,
            resolve_area(&find, AVAIL, at.avail, avail_bytes)?,
            resolve_area(&find, USED, at.used, used_bytes)?,
        ])
    }

    /// Returns the number of entries.
    #[must_use]
    pub fn size(&self) -> u16 {
        self.size
    }

    /// Returns the memory that the areas, and the buffers that descriptors name, lie in.
    #[must_use]
    pub fn memory(&self) -> &Arc<GuestMemory> {
        &self.memory
    }

    /// Returns `position` modulo the queue size. All indexing goes through here.
    fn slot(&self, position: u16) -> usize {
        usize::from(position & self.size.wrapping_sub(1))
    }

    fn table_word(&self, index: u16, word: usize) -> &AtomicU64 {
        let offset = self.slot(index).wrapping_mul(DESCRIPTOR_BYTES).wrapping_add(word.wrapping_mul(8));
        // SAFETY: the slot is below the queue size and `word` is 0 or 1, so the eight bytes lie in the table, which is
        // 16-byte aligned and stays mapped while `self.memory` lives. Both sides access them atomically.
        unsafe { AtomicU64::from_ptr(self.table.as_ptr().add(offset).cast()) }
    }

    fn avail_field(&self, offset: usize) -> &AtomicU16 {
        // SAFETY: callers pass an even offset inside the area's `6 + 2 * size` bytes; the area is 2-byte aligned and
        // stays mapped while `self.memory` lives.
        unsafe { AtomicU16::from_ptr(self.avail.as_ptr().add(offset).cast()) }
    }

    fn used_field(&self, offset: usize) -> &AtomicU16 {
        // SAFETY: callers pass an even offset inside the area's `6 + 8 * size` bytes; the area is 4-byte aligned and
        // stays mapped while `self.memory` lives.
        unsafe { AtomicU16::from_ptr(self.used.as_ptr().add(offset).cast()) }
    }

    fn used_word(&self, position: u16, word: usize) -> &AtomicU32 {
        let offset = self.slot(position).wrapping_mul(8).wrapping_add(4).wrapping_add(word.wrapping_mul(4));
        // SAFETY: the slot is below the queue size and `word` is 0 or 1, so the four bytes lie in the area, which is
        // 4-byte aligned and stays mapped while `self.memory` lives.
        unsafe { AtomicU32::from_ptr(self.used.as_ptr().add(offset).cast()) }
    }

    /// Returns the offset of the event field at the end of the available ring.
    fn used_event_offset(&self) -> usize {
        usize::from(self.size).wrapping_mul(2).wrapping_add(4)
    }

    /// Returns the offset of the event field at the end of the used ring.
    fn avail_event_offset(&self) -> usize {
        usize::from(self.size).wrapping_mul(8).wrapping_add(4)
    }

    /// Copies a descriptor out. `index` counts modulo the queue size: check it first if an index outside is a fault.
    #[inline]
    #[must_use]
    pub fn descriptor(&self, index: u16) -> Descriptor {
        let first = u64::from_le(self.table_word(index, 0).load(Ordering::Relaxed));
        let second = u64::from_le(self.table_word(index, 1).load(Ordering::Relaxed));
        Descriptor::from_words(first, second)
    }

    /// Writes a descriptor (driver).
    #[inline]
    pub fn set_descriptor(&self, index: u16, descriptor: Descriptor) {
        self.table_word(index, 0).store(descriptor.address.to_le(), Ordering::Relaxed);
        self.table_word(index, 1).store(descriptor.second_word().to_le(), Ordering::Relaxed);
    }

    /// Returns `avail.flags`.
    #[must_use]
    pub fn avail_flags(&self) -> u16 {
        u16::from_le(self.avail_field(0).load(Ordering::Relaxed))
    }

    /// Sets `avail.flags` (driver).
    pub fn set_avail_flags(&self, flags: u16) {
        self.avail_field(0).store(flags.to_le(), Ordering::Relaxed);
    }

    /// Returns `avail.idx`. The entries that it announces can be read afterwards.
    #[inline]
    #[must_use]
    pub fn avail_index(&self) -> u16 {
        u16::from_le(self.avail_field(2).load(Ordering::Acquire))
    }

    /// Publishes available entries (driver): everything written before is visible to a device that sees the index.
    #[inline]
    pub fn publish_avail_index(&self, index: u16) {
        self.avail_field(2).store(index.to_le(), Ordering::Release);
    }

    /// Returns the head in the available ring at `position` (modulo the size), unchecked.
    #[inline]
    #[must_use]
    pub fn avail_entry(&self, position: u16) -> u16 {
        let offset = self.slot(position).wrapping_mul(2).wrapping_add(4);
        u16::from_le(self.avail_field(offset).load(Ordering::Relaxed))
    }

    /// Puts a head into the available ring (driver).
    #[inline]
    pub fn set_avail_entry(&self, position: u16, head: u16) {
        let offset = self.slot(position).wrapping_mul(2).wrapping_add(4);
        self.avail_field(offset).store(head.to_le(), Ordering::Relaxed);
    }

    /// Returns where in the used ring the driver wants its next interrupt (EVENT_IDX).
    #[must_use]
    pub fn used_event(&self) -> u16 {
        u16::from_le(self.avail_field(self.used_event_offset()).load(Ordering::Relaxed))
    }

    /// Asks for an interrupt when the used ring passes `event` (driver, EVENT_IDX).
    pub fn set_used_event(&self, event: u16) {
        self.avail_field(self.used_event_offset()).store(event.to_le(), Ordering::Relaxed);
    }

    /// Returns `used.flags`.
    #[must_use]
    pub fn used_flags(&self) -> u16 {
        u16::from_le(self.used_field(0).load(Ordering::Relaxed))
    }

    /// Sets `used.flags` (device).
    pub fn set_used_flags(&self, flags: u16) {
        self.used_field(0).store(flags.to_le(), Ordering::Relaxed);
    }

    /// Returns `used.idx`. The entries that it announces can be read afterwards.
    #[inline]
    #[must_use]
    pub fn used_index(&self) -> u16 {
        u16::from_le(self.used_field(2).load(Ordering::Acquire))
    }

    /// Publishes used entries (device): everything written before, data included, is visible to a driver that sees the
    /// index.
    #[inline]
    pub fn publish_used_index(&self, index: u16) {
        self.used_field(2).store(index.to_le(), Ordering::Release);
    }

    /// Returns head and written bytes in the used ring at `position` (modulo the size), unchecked.
    #[inline]
    #[must_use]
    pub fn used_entry(&self, position: u16) -> (u32, u32) {
        let head = u32::from_le(self.used_word(position, 0).load(Ordering::Relaxed));
        let written_bytes = u32::from_le(self.used_word(position, 1).load(Ordering::Relaxed));
        (head, written_bytes)
    }

    /// Puts an entry into the used ring (device).
    #[inline]
    pub fn set_used_entry(&self, position: u16, head: u32, written_bytes: u32) {
        self.used_word(position, 0).store(head.to_le(), Ordering::Relaxed);
        self.used_word(position, 1).store(written_bytes.to_le(), Ordering::Relaxed);
    }

    /// Returns where in the available ring the device wants its next notification (EVENT_IDX).
    #[must_use]
    pub fn avail_event(&self) -> u16 {
        u16::from_le(self.used_field(self.avail_event_offset()).load(Ordering::Relaxed))
    }

    /// Asks for a notification when the available ring passes `event` (device, EVENT_IDX).
    pub fn set_avail_event(&self, event: u16) {
        self.used_field(self.avail_event_offset()).store(event.to_le(), Ordering::Relaxed);
    }
}

/// Finds the table at guest physical `address` that an indirect descriptor names. `hint` is the region found last.
#[inline]
pub fn indirect_table<'a>(
    memory: &'a GuestMemory,
    address: u64,
    count: u16,
    hint: &mut usize,
) -> Result<IndirectTable<'a>, MemoryError> {
    let length_bytes = u64::from(count).wrapping_mul(DESCRIPTOR_BYTES as u64);
    let ptr = memory.translate(address, length_bytes, hint)?;
    Ok(IndirectTable { ptr, count, memory: PhantomData })
}

/// The resolved table of an indirect descriptor.
#[derive(Debug, Clone, Copy)]
pub struct IndirectTable<'a> {
    ptr: NonNull<u8>,
    count: u16,
    /// The memory that keeps it mapped.
    memory: PhantomData<&'a GuestMemory>,
}

impl IndirectTable<'_> {
    /// Copies a descriptor of a split ring out; `None` behind the end. The table may lie at any address.
    #[inline]
    #[must_use]
    pub fn descriptor(&self, index: u16) -> Option<Descriptor> {
        self.words(index).map(|[first, second]| Descriptor::from_words(first, second))
    }

    /// Copies a descriptor of a packed ring out; `None` behind the end.
    #[inline]
    #[must_use]
    pub fn packed_descriptor(&self, index: u16) -> Option<PackedDescriptor> {
        self.words(index).map(|[first, second]| PackedDescriptor::from_words(first, second))
    }

    #[inline]
    fn words(&self, index: u16) -> Option<[u64; 2]> {
        if index >= self.count {
            return None;
        }
        let mut words = [0_u64; 2];
        let offset = usize::from(index).wrapping_mul(DESCRIPTOR_BYTES);
        // SAFETY: the index is below the count, so the sixteen bytes lie in the table, which is mapped while `'a`
        // lasts. A driver that writes meanwhile changes only what is copied.
        unsafe { std::ptr::copy_nonoverlapping(self.ptr.as_ptr().add(offset), words.as_mut_ptr().cast(), 16) }
        Some(words.map(u64::from_le))
    }
}

/// A run of eight-byte words in guest memory, for a driver's data beside its ring: request headers, status bytes,
/// indirect tables. As with the ring, the other side may read or write at any moment. Words behind the end are not
/// written and read as zero.
#[derive(Debug)]
pub struct SharedWords {
    start: NonNull<u8>,
    length_bytes: usize,
    address: u64,
    /// Keeps the words mapped.
    _memory: Arc<GuestMemory>,
}

// SAFETY: as for `SplitAreas`.
unsafe impl Send for SharedWords {}

impl SharedWords {
    /// Finds the words at guest physical `address`, which must be a multiple of 8 in the guest and in our address
    /// space.
    pub fn at_guest_address(memory: Arc<GuestMemory>, address: u64, length_bytes: usize) -> Result<Self, LayoutError> {
        const AREA: &str = "request area";
        let start = memory
            .translate(address, length_bytes as u64, &mut 0)
            .map_err(|source| LayoutError::Memory { area: AREA, source })?;
        if !start.as_ptr().addr().is_multiple_of(8) || !address.is_multiple_of(8) {
            return Err(LayoutError::Alignment { area: AREA, address, alignment_bytes: 8 });
        }
        Ok(Self { start, length_bytes: length_bytes & !7, address, _memory: memory })
    }

    /// Returns the guest physical address of the first word.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.address
    }

    fn word(&self, offset_bytes: usize) -> Option<&AtomicU64> {
        let inside = offset_bytes & 7 == 0 && offset_bytes < self.length_bytes;
        // SAFETY: the offset is a multiple of 8 below a length that is a multiple of 8, so the word lies in the range
        // that was translated; the start is 8-byte aligned and stays mapped while `_memory` lives.
        inside.then(|| unsafe { AtomicU64::from_ptr(self.start.as_ptr().add(offset_bytes).cast()) })
    }

    /// Writes the little-endian word at `offset_bytes` (a multiple of 8).
    #[inline]
    pub fn set_word(&self, offset_bytes: usize, value: u64) {
        if let Some(word) = self.word(offset_bytes) {
            word.store(value.to_le(), Ordering::Relaxed);
        }
    }

    /// Writes a descriptor of an indirect table at `offset_bytes` (a multiple of 8).
    #[inline]
    pub fn set_descriptor(&self, offset_bytes: usize, descriptor: Descriptor) {
        self.set_word(offset_bytes, descriptor.address);
        self.set_word(offset_bytes.wrapping_add(8), descriptor.second_word());
    }

    /// Writes a descriptor of a packed ring's indirect table at `offset_bytes` (a multiple of 8).
    #[inline]
    pub fn set_packed_descriptor(&self, offset_bytes: usize, descriptor: PackedDescriptor) {
        self.set_word(offset_bytes, descriptor.address);
        self.set_word(offset_bytes.wrapping_add(8), descriptor.second_word());
    }

    fn shared_byte(&self, offset_bytes: usize) -> Option<&AtomicU8> {
        // SAFETY: the offset lies in the range that was translated, which stays mapped while `_memory` lives.
        (offset_bytes < self.length_bytes)
            .then(|| unsafe { AtomicU8::from_ptr(self.start.as_ptr().add(offset_bytes).cast()) })
    }

    /// Returns the byte at `offset_bytes`.
    #[inline]
    #[must_use]
    pub fn byte(&self, offset_bytes: usize) -> u8 {
        self.shared_byte(offset_bytes).map_or(0, |byte| byte.load(Ordering::Relaxed))
    }

    /// Writes the byte at `offset_bytes`.
    #[inline]
    pub fn set_byte(&self, offset_bytes: usize, value: u8) {
        if let Some(byte) = self.shared_byte(offset_bytes) {
            byte.store(value, Ordering::Relaxed);
        }
    }
}
