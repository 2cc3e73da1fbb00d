//! The storage of a drive.

use block::{DiskInfo, IoResult};

/// Storage whose calls block. Offsets and lengths are in bytes, multiples of 512.
pub trait Sectors: Send {
    /// Returns the storage's properties.
    fn info(&self) -> DiskInfo;

    /// Fills `into` from `offset` on.
    fn read(&mut self, offset: u64, into: &mut [u8]) -> IoResult;

    /// Stores `from` at `offset`.
    fn write(&mut self, offset: u64, from: &[u8]) -> IoResult;

    /// Makes earlier writes durable.
    fn flush(&mut self) -> IoResult;

    /// Sets whether writes may stay volatile until the next flush.
    fn set_volatile_cache(&mut self, volatile: bool);
}
