//! A channel: up to two drives at one set of ports.

use crate::drive::Drive;
use crate::registers::{TaskFile, command, status};
use crate::transfer::DATA;
use pio::{Device, Direction, Link, Region, Width, Window};

/// The ports of a channel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChannelPorts {
    /// The first of eight ports: the Command Block.
    pub command: u16,
    /// The port of the Control Block: Alternate Status and Device Control.
    pub control: u16,
}

impl ChannelPorts {
    /// The first channel of a PC; its interrupt is 14.
    pub const PRIMARY: Self = Self { command: 0x1f0, control: 0x3f6 };
    /// The second channel of a PC; its interrupt is 15.
    pub const SECONDARY: Self = Self { command: 0x170, control: 0x376 };

    /// Returns the regions to attach a channel with.
    #[must_use]
    pub fn regions(self) -> [Region; 2] {
        [Region { base: self.command, ports: 8, wide: Some(DATA) }, Region { base: self.control, ports: 1, wide: None }]
    }
}

// Offsets of the other registers.
const ERROR_FEATURES: u16 = 1;
const COUNT: u16 = 2;
const LOW: u16 = 3;
const MID: u16 = 4;
const HIGH: u16 = 5;
const DEVICE: u16 = 6;
const STATUS_COMMAND: u16 = 7;
const CONTROL: u16 = 8;

// Bits of the Device Control register (7.8).
const NIEN: u8 = 0x02;
const SRST: u8 = 0x04;
const HOB: u8 = 0x80;

/// The value without a drive: nothing drives the lines, and a resistor keeps BSY low.
const NOBODY: u8 = 0x7f;

/// Up to two drives at one set of ports.
///
/// Both drives see all writes of registers. The drive that the Device register selects executes commands, moves data
/// and drives the interrupt line. A first drive that is alone answers for the second with a status of zero.
pub struct Channel {
    drives: [Option<Drive>; 2],
    chosen: usize,
    control: u8,
    /// The drive whose window the bus has.
    lent_by: Option<usize>,
}

impl Channel {
    /// Makes a channel with these drives.
    #[must_use]
    pub fn new(first: Option<Drive>, second: Option<Drive>) -> Self {
        Self { drives: [first, second], chosen: 0, control: 0, lent_by: None }
    }

    fn drive(&mut self) -> Option<&mut Drive> {
        self.drives.get_mut(self.chosen).and_then(Option::as_mut)
    }

    fn all(&mut self) -> impl Iterator<Item = &mut Drive> {
        self.drives.iter_mut().flatten()
    }

    fn in_reset(&self) -> bool {
        self.control & SRST != 0
    }

    /// Updates the bus's window and interrupt line after anything that may change the drives.
    fn settle(&mut self, link: &mut Link) {
        if let Some(lender) = self.lent_by.filter(|lender| *lender != self.chosen) {
            let window = link.close_window();
            self.lent_by = None;
            if let Some(Some(drive)) = self.drives.get_mut(lender) {
                drive.window = window;
            }
        }
        let (chosen, enabled) = (self.chosen, self.control & NIEN == 0);
        let Some(drive) = self.drive() else { return link.set_interrupt(false) };
        let mut lent = false;
        if let Some(window) = drive.window.take() {
            drive.window = link.open_window(window).err();
            lent = drive.window.is_none();
        }
        link.set_interrupt(drive.interrupt && enabled);
        if lent {
            self.lent_by = Some(chosen);
        }
    }

    /// Takes the window back from the bus, before its command is ended.
    fn recall(&mut self, link: &mut Link) {
        if let Some(lender) = self.lent_by.take()
            && let Some(Some(drive)) = self.drives.get_mut(lender)
        {
            drive.window = link.close_window();
        }
    }

    /// Reads a word of the Data register if the bus has no window. Zero if no data wait.
    fn read_word(&mut self, link: &mut Link) -> u32 {
        let Some(window) = self.own_window(Direction::In) else { return 0 };
        let word = window.take_unit();
        self.end_own_window(link);
        word
    }

    fn write_word(&mut self, word: u32, link: &mut Link) {
        if let Some(window) = self.own_window(Direction::Out) {
            window.put_unit(word);
            self.end_own_window(link);
        }
    }

    fn own_window(&mut self, direction: Direction) -> Option<&mut Window> {
        self.drive()?.window.as_mut().filter(|window| window.direction() == direction)
    }

    fn end_own_window(&mut self, link: &mut Link) {
        if let Some(drive) = self.drive()
            && let Some(window) = drive.window.take_if(|window| window.is_done())
        {
            drive.window_ended(window);
            self.settle(link);
        }
    }

    fn read_register(&mut self, offset: u16, link: &mut Link) -> u8 {
        if matches!(offset, STATUS_COMMAND | CONTROL) {
            return self.read_status(offset == STATUS_COMMAND, link);
        }
        let high_order = self.control & HOB != 0;
        // The first drive answers for a missing second one.
        let [first, second] = &self.drives;
        let answers = if self.chosen == 1 { second.as_ref().or(first.as_ref()) } else { first.as_ref() };
        let Some(drive) = answers else { return NOBODY };
        let registers = &drive.registers;
        match offset {
            ERROR_FEATURES => drive.error,
            COUNT => registers.count.shown(high_order),
            LOW => registers.low.shown(high_order),
            MID => registers.mid.shown(high_order),
            HIGH => registers.high.shown(high_order),
            DEVICE => registers.device,
            _ => NOBODY,
        }
    }

    fn read_status(&mut self, acknowledges: bool, link: &mut Link) -> u8 {
        let in_reset = self.in_reset();
        let nobody = if self.chosen == 1 && self.drives.iter().any(Option::is_some) { 0 } else { NOBODY };
        let Some(drive) = self.drive() else { return nobody };
        if in_reset {
            return status::BSY;
        }
        let status = drive.status;
        if acknowledges && drive.interrupt {
            drive.interrupt = false;
            self.settle(link);
        }
        status
    }

    fn write_register(&mut self, offset: u16, value: u8, link: &mut Link) {
        if offset == CONTROL {
            return self.write_control(value, link);
        }
        // A write to the Command Block clears HOB, so that reads show the recent values again (6.20).
        self.control &= !HOB;
        if self.in_reset() {
            return;
        }
        if offset == STATUS_COMMAND {
            return self.write_command(value, link);
        }
        for drive in self.all() {
            let registers = &mut drive.registers;
            match offset {
                ERROR_FEATURES => registers.features.push(value),
                COUNT => registers.count.push(value),
                LOW => registers.low.push(value),
                MID => registers.mid.push(value),
                HIGH => registers.high.push(value),
                _ => registers.device = value,
            }
        }
        if offset == DEVICE {
            self.chosen = TaskFile::chosen(value);
            self.settle(link);
        }
    }

    fn write_command(&mut self, number: u8, link: &mut Link) {
        // While data wait, a new command has no defined result (7.4): it is ignored.
        if self.drive().is_some_and(|drive| drive.is_moving()) {
            return;
        }
        if number == command::DIAGNOSTIC {
            // Both drives execute the command, and the first answers.
            self.recall(link);
            self.all().for_each(Drive::diagnose);
            self.chosen = 0;
            if let Some(first) = self.drive() {
                first.interrupt = true;
            }
        } else if let Some(drive) = self.drive() {
            drive.execute(number);
        }
        self.settle(link);
    }

    fn write_control(&mut self, value: u8, link: &mut Link) {
        let was_in_reset = self.in_reset();
        self.control = value;
        if self.in_reset() && !was_in_reset {
            self.recall(link);
            self.all().for_each(Drive::reset);
            self.chosen = 0;
        }
        self.settle(link);
    }
}

impl Device for Channel {
    fn read(&mut self, offset: u16, width: Width, link: &mut Link) -> u32 {
        if offset != DATA {
            return self.read_register(offset, link).into();
        }
        match width {
            Width::Byte | Width::Word => self.read_word(link),
            // The bridge splits it into two accesses.
            Width::Dword => Width::Word.as_part(self.read_word(link), 0) | Width::Word.as_part(self.read_word(link), 1),
        }
    }

    fn write(&mut self, offset: u16, width: Width, value: u32, link: &mut Link) {
        if offset != DATA {
            // Registers other than Data take bytes: the bus has split wider accesses.
            return self.write_register(offset, value.to_le_bytes()[0], link);
        }
        self.write_word(Width::Word.of_part(value, 0), link);
        if width == Width::Dword {
            self.write_word(Width::Word.of_part(value, 1), link);
        }
    }

    fn window_ended(&mut self, window: Window, link: &mut Link) {
        if let Some(lender) = self.lent_by.take()
            && let Some(Some(drive)) = self.drives.get_mut(lender)
        {
            drive.window_ended(window);
        }
        self.settle(link);
    }

    fn reset(&mut self, window: Option<Window>, link: &mut Link) {
        if let Some(lender) = self.lent_by.take()
            && let Some(Some(drive)) = self.drives.get_mut(lender)
        {
            drive.window = window;
        }
        self.all().for_each(Drive::reset);
        (self.chosen, self.control) = (0, 0);
        self.settle(link);
    }
}
