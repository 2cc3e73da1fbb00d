//! A slot of the bus: a device, and its open window.

use crate::link::key;
use crate::{Device, Direction, Link, Width, Window};

pub(crate) struct Slot {
    device: Box<dyn Device>,
    link: Link,
    calls: u64,
}

impl Slot {
    pub(crate) fn new(device: Box<dyn Device>, link: Link) -> Self {
        Self { device, link, calls: 0 }
    }

    pub(crate) fn link(&self) -> &Link {
        &self.link
    }

    pub(crate) fn link_mut(&mut self) -> &mut Link {
        &mut self.link
    }

    pub(crate) fn calls(&self) -> u64 {
        self.calls
    }

    #[inline]
    pub(crate) fn read(&mut self, offset: u16, width: Width) -> u32 {
        if self.link.open_at == key(offset, Direction::In) {
            return self.read_window(offset, width);
        }
        self.calls = self.calls.wrapping_add(1);
        self.device.read(offset, width, &mut self.link) & width.mask()
    }

    #[inline]
    pub(crate) fn write(&mut self, offset: u16, width: Width, value: u32) {
        let value = value & width.mask();
        if self.link.open_at == key(offset, Direction::Out) {
            return self.write_window(offset, width, value);
        }
        self.calls = self.calls.wrapping_add(1);
        self.device.write(offset, width, value, &mut self.link);
    }

    /// Copies as much of a string as the window has. Returns the number of bytes; zero if no window is open for it.
    #[inline]
    pub(crate) fn read_string(&mut self, offset: u16, width: Width, into: &mut [u8]) -> usize {
        if self.link.open_at != key(offset, Direction::In) {
            return 0;
        }
        let moved = self.link.window.as_mut().map_or(0, |window| window.copy_to(width, into));
        self.end_if_done();
        moved
    }

    /// As [`Slot::read_string`], for `out`.
    #[inline]
    pub(crate) fn write_string(&mut self, offset: u16, width: Width, from: &[u8]) -> usize {
        if self.link.open_at != key(offset, Direction::Out) {
            return 0;
        }
        let moved = self.link.window.as_mut().map_or(0, |window| window.copy_from(width, from));
        self.end_if_done();
        moved
    }

    pub(crate) fn reset(&mut self) {
        let window = self.link.close_window();
        self.link.interrupt = false;
        self.device.reset(window, &mut self.link);
    }

    /// Not inlined: what it keeps in registers would be saved and restored by each plain access.
    #[inline(never)]
    fn read_window(&mut self, offset: u16, width: Width) -> u32 {
        if let Some(value) = self.link.window.as_mut().and_then(|window| window.take(width)) {
            self.end_if_done();
            return value;
        }
        // The window ends within the access. The rest comes from the next window, or from the device.
        let unit = self.link.window.as_ref().map_or(width, Window::unit);
        let parts = 0..width.bytes().checked_div(unit.bytes()).unwrap_or(0);
        parts.fold(0, |value, index| value | unit.as_part(self.read(offset, unit), index))
    }

    /// Not inlined, as [`Slot::read_window`].
    #[inline(never)]
    fn write_window(&mut self, offset: u16, width: Width, value: u32) {
        if self.link.window.as_mut().is_some_and(|window| window.put(width, value).is_some()) {
            return self.end_if_done();
        }
        let unit = self.link.window.as_ref().map_or(width, Window::unit);
        for index in 0..width.bytes().checked_div(unit.bytes()).unwrap_or(0) {
            self.write(offset, unit, unit.of_part(value, index));
        }
    }

    #[inline]
    fn end_if_done(&mut self) {
        if self.link.window.as_ref().is_some_and(Window::is_done)
            && let Some(window) = self.link.close_window()
        {
            self.calls = self.calls.wrapping_add(1);
            self.device.window_ended(window, &mut self.link);
        }
    }
}
