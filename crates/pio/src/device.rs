//! Devices on the bus.

use crate::{Link, Width, Window};

/// A device at some ports of a bus.
///
/// Offsets count the device's ports through its regions in their order. A device with regions of eight ports and of one
/// port has the offsets 0 to 8.
pub trait Device: Send {
    /// Returns the value that the guest reads. Bits above `width` are ignored.
    fn read(&mut self, offset: u16, width: Width, link: &mut Link) -> u32;

    /// Takes the value that the guest writes. Bits above `width` are zero.
    fn write(&mut self, offset: u16, width: Width, value: u32, link: &mut Link);

    /// Called when the last byte of the window has moved. The device gets its data back, and may open the next window
    /// at once.
    fn window_ended(&mut self, window: Window, link: &mut Link);

    /// Resets the device. The link has no window and no interrupt any more; `window` holds the open window's data.
    fn reset(&mut self, window: Option<Window>, link: &mut Link);
}
