//! Numbered items of bytes, like firmware tables: the guest writes an item's number, then reads its bytes.

use crate::{Device, Direction, Link, Region, Width, Window};

/// The number of ports: one takes an item's number, one gives its bytes.
pub const SHELF_PORTS: u16 = 2;
const NUMBER: u16 = 0;
const BYTES: u16 = 1;

/// Returns the regions of a shelf: the number at `base`, the bytes at the next port. Both ports take any width.
#[must_use]
pub fn shelf_region(base: u16) -> [Region; 2] {
    let one = |base| Region { base, ports: 1, wide: Some(0) };
    [one(base), one(base.saturating_add(1))]
}

/// A device with items that a guest reads in order, in accesses of any width. Behind the end of an item come zeros.
/// Choosing an item again starts at its first byte.
#[derive(Debug)]
pub struct Shelf {
    /// The items. The item of an open window is empty here: the window has its bytes.
    items: Vec<Vec<u8>>,
    chosen: usize,
    /// The window of the chosen item if the bus does not have it.
    own: Option<Window>,
}

impl Shelf {
    /// Makes a shelf with these items, numbered from 0.
    #[must_use]
    pub fn new(items: Vec<Vec<u8>>) -> Self {
        Self { items, chosen: 0, own: None }
    }

    /// Takes the chosen item's bytes back from its window.
    fn put_back(&mut self, window: Option<Window>) {
        if let (Some(window), Some(item)) = (window, self.items.get_mut(self.chosen)) {
            *item = window.into_data();
        }
    }

    fn choose(&mut self, number: u32, link: &mut Link) {
        let shown = link.close_window().or_else(|| self.own.take());
        self.put_back(shown);
        self.chosen = usize::try_from(number).unwrap_or(usize::MAX);
        let data = self.items.get_mut(self.chosen).map(std::mem::take).unwrap_or_default();
        let whole = 0..data.len();
        self.own = Window::new(BYTES, Direction::In, Width::Byte, data, whole)
            .and_then(|window| link.open_window(window).err());
    }

    fn next_byte(&mut self, link: &mut Link) -> u32 {
        let Some(window) = &mut self.own else { return 0 };
        let byte = window.take_unit();
        if window.is_done()
            && let Some(window) = self.own.take()
        {
            self.window_ended(window, link);
        }
        byte
    }
}

impl Device for Shelf {
    fn read(&mut self, offset: u16, width: Width, link: &mut Link) -> u32 {
        if offset != BYTES {
            return u32::try_from(self.chosen).unwrap_or(u32::MAX);
        }
        (0..width.bytes()).fold(0, |value, index| value | Width::Byte.as_part(self.next_byte(link), index))
    }

    fn write(&mut self, offset: u16, _: Width, value: u32, link: &mut Link) {
        if offset == NUMBER {
            self.choose(value, link);
        }
    }

    fn window_ended(&mut self, window: Window, _: &mut Link) {
        self.put_back(Some(window));
    }

    fn reset(&mut self, window: Option<Window>, _: &mut Link) {
        let own = self.own.take();
        self.put_back(window.or(own));
        self.chosen = usize::MAX;
    }
}
