//! What a drive stores its bytes in.

use block::{DiskInfo, IoResult};

/// Storage that is read and written by whoever calls, who waits. Offsets and lengths are bytes, multiples of 512.
pub trait Sectors: Send {
    /// Its properties.
    fn info(&self) -> DiskInfo;

    /// Fills `into`.
    fn read(&mut self, offset: u64, into: &mut [u8]) -> IoResult;

    /// Stores `from`.
    fn write(&mut self, offset: u64, from: &[u8]) -> IoResult;

    /// Makes what was written durable.
    fn flush(&mut self) -> IoResult;

    /// Whether what was written may stay volatile until the next flush.
    fn set_volatile_cache(&mut self, volatile: bool);
}
