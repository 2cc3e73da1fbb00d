//! What a device can do to the bus while it is called.

use crate::{Direction, Window};

/// No window is open. No port and direction have this key.
const CLOSED: u32 = u32::MAX;

/// Combines port and direction in one word, so that a plain access checks for windows with one comparison.
#[inline]
pub(crate) fn key(offset: u16, direction: Direction) -> u32 {
    let bit = match direction {
        Direction::In => 0,
        Direction::Out => 1 << 16,
    };
    u32::from(offset) | bit
}

/// Lets a device act on the bus while it is called.
#[derive(Debug)]
pub struct Link {
    pub(crate) window: Option<Window>,
    /// The key of the open window, or `CLOSED`.
    pub(crate) open_at: u32,
    pub(crate) takes_windows: bool,
    pub(crate) interrupt: bool,
}

impl Link {
    pub(crate) fn new(takes_windows: bool) -> Self {
        Self { window: None, open_at: CLOSED, takes_windows, interrupt: false }
    }

    /// Lends a window to the bus. Fails and returns it if windows are off, or if the device has one open. Then the
    /// device serves the accesses itself, with [`Window::take_unit`] and [`Window::put_unit`].
    pub fn open_window(&mut self, window: Window) -> Result<(), Window> {
        if !self.takes_windows || self.window.is_some() || window.is_done() {
            return Err(window);
        }
        self.open_at = key(window.offset(), window.direction());
        self.window = Some(window);
        Ok(())
    }

    /// Takes the window back, even in the middle.
    pub fn close_window(&mut self) -> Option<Window> {
        self.open_at = CLOSED;
        self.window.take()
    }

    /// Sets the level of the device's interrupt line. The monitor reads it with [`crate::Bus::interrupt`].
    pub fn set_interrupt(&mut self, raised: bool) {
        self.interrupt = raised;
    }

    pub(crate) fn interrupt(&self) -> bool {
        self.interrupt
    }

    pub(crate) fn take_windows(&mut self, on: bool) {
        self.takes_windows = on;
    }
}
