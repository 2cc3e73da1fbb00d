//! What answers at ports.

use crate::{Link, Width, Window};

/// A device at some ports of a bus.
///
/// Offsets count the device's ports through its regions, in the order in which they were given: a device with regions of
/// eight and of one port has the offsets 0 to 8.
pub trait Device: Send {
    /// The guest reads. Bits above `width` are ignored.
    fn read(&mut self, offset: u16, width: Width, link: &mut Link) -> u32;

    /// The guest writes. Bits above `width` are zero.
    fn write(&mut self, offset: u16, width: Width, value: u32, link: &mut Link);

    /// The last byte of the window has moved. The device gets its data back, and may open the next window at once.
    fn window_ended(&mut self, window: Window, link: &mut Link);

    /// The machine is reset. The link has no window and no interrupt any more; the data of the window come along.
    fn reset(&mut self, window: Option<Window>, link: &mut Link);
}
