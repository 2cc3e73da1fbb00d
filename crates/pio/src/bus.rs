//! The bus: maps ports to devices.

use crate::slot::Slot;
use crate::{Device, Link, Width};
use std::fmt;

/// The number of ports: all 16-bit values.
const PORTS: usize = 1 << 16;
/// There is no device at the port.
const NOBODY: u16 = u16::MAX;

/// Contiguous ports of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Region {
    /// The first port.
    pub base: u16,
    /// The number of ports.
    pub ports: u16,
    /// The port, counted from the base, that takes accesses of any width. At all other ports, a wider access is split
    /// into bytes at neighbouring ports, as on a bus with 8-bit registers.
    pub wide: Option<u16>,
}

/// A device's name on its bus.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceId(u16);

/// Why a device cannot be attached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttachError {
    /// Another device is at this port, or another of the regions has it, too.
    Taken(u16),
    /// The region is empty, or ends behind the last port.
    BadRegion(Region),
    /// The bus cannot have more devices.
    Full,
}

impl fmt::Display for AttachError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Taken(port) => write!(f, "port {port:#x} is taken already; choose another base"),
            Self::BadRegion(Region { base, ports, .. }) => {
                write!(f, "{ports} ports at {base:#x}: a region has at least one port and ends at 0xffff at most")
            }
            Self::Full => write!(f, "the bus is full: it takes {NOBODY} devices"),
        }
    }
}

impl std::error::Error for AttachError {}

#[derive(Clone, Copy)]
struct Entry {
    slot: u16,
    offset: u16,
    wide: bool,
}

/// A bus of I/O ports. A monitor passes it every `in` and `out` of its guest.
///
/// One thread at a time may use it. If several processors of a guest reach it, put it behind a lock.
pub struct Bus {
    entries: Box<[Entry]>,
    slots: Vec<Slot>,
    windows: bool,
}

impl Default for Bus {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for Bus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Bus").field("devices", &self.slots.len()).field("windows", &self.windows).finish()
    }
}

impl Bus {
    /// Makes a bus without devices, with windows enabled.
    #[must_use]
    pub fn new() -> Self {
        let nobody = Entry { slot: NOBODY, offset: 0, wide: false };
        Self { entries: vec![nobody; PORTS].into(), slots: Vec::new(), windows: true }
    }

    /// Sets whether devices may open windows from here on. A guest sees no difference except in speed.
    pub fn set_windows(&mut self, on: bool) {
        self.windows = on;
        self.slots.iter_mut().for_each(|slot| slot.link_mut().take_windows(on));
    }

    /// Attaches a device at its ports.
    pub fn attach(&mut self, device: Box<dyn Device>, regions: &[Region]) -> Result<DeviceId, AttachError> {
        let id = u16::try_from(self.slots.len()).ok().filter(|id| *id != NOBODY).ok_or(AttachError::Full)?;
        for (index, region) in regions.iter().enumerate() {
            let mut ports = ports_of(region).ok_or(AttachError::BadRegion(*region))?;
            let before = || regions.iter().take(index).filter_map(ports_of);
            let is_taken = |port: &u16| self.entry(*port).slot != NOBODY || before().any(|other| other.contains(port));
            if let Some(taken) = ports.find(is_taken) {
                return Err(AttachError::Taken(taken));
            }
        }
        let mut offset: u16 = 0;
        for region in regions {
            for (index, port) in (0..region.ports).zip(ports_of(region).into_iter().flatten()) {
                if let Some(entry) = self.entries.get_mut(usize::from(port)) {
                    *entry = Entry { slot: id, offset, wide: region.wide == Some(index) };
                }
                offset = offset.saturating_add(1);
            }
        }
        self.slots.push(Slot::new(device, Link::new(self.windows)));
        Ok(DeviceId(id))
    }

    /// Returns the level of a device's interrupt line. It changes only during a guest's access or a reset.
    #[must_use]
    pub fn interrupt(&self, device: DeviceId) -> bool {
        self.slots.get(usize::from(device.0)).is_some_and(|slot| slot.link().interrupt())
    }

    /// Returns how often a device was called for accesses and for ends of windows.
    #[must_use]
    pub fn device_calls(&self, device: DeviceId) -> u64 {
        self.slots.get(usize::from(device.0)).map_or(0, Slot::calls)
    }

    /// Resets the machine: closes all windows and resets all devices.
    pub fn reset(&mut self) {
        self.slots.iter_mut().for_each(Slot::reset);
    }

    /// Carries out `in`. Ports without a device read as ones.
    #[inline]
    pub fn read(&mut self, port: u16, width: Width) -> u32 {
        let entry = self.entry(port);
        if !entry.wide && width != Width::Byte {
            return self.read_bytes(port, width);
        }
        match self.slots.get_mut(usize::from(entry.slot)) {
            Some(slot) => slot.read(entry.offset, width),
            None => width.mask(),
        }
    }

    /// Carries out `out`. Ports without a device ignore it.
    #[inline]
    pub fn write(&mut self, port: u16, width: Width, value: u32) {
        let entry = self.entry(port);
        if !entry.wide && width != Width::Byte {
            return self.write_bytes(port, width, value);
        }
        if let Some(slot) = self.slots.get_mut(usize::from(entry.slot)) {
            slot.write(entry.offset, width, value);
        }
    }

    /// Carries out `rep ins`: fills `into` by accesses of `width`, all at one port. Bytes at the end that are fewer
    /// than an access stay unchanged.
    pub fn read_string(&mut self, port: u16, width: Width, mut into: &mut [u8]) {
        let entry = self.entry(port);
        while into.len() >= width.bytes() {
            let moved = match self.slots.get_mut(usize::from(entry.slot)) {
                Some(slot) if entry.wide || width == Width::Byte => slot.read_string(entry.offset, width, into),
                _ => 0,
            };
            if moved == 0 {
                let bytes = self.read(port, width).to_le_bytes();
                let (target, source) = (into.get_mut(..width.bytes()), bytes.get(..width.bytes()));
                if let (Some(target), Some(source)) = (target, source) {
                    target.copy_from_slice(source);
                }
            }
            let done = if moved == 0 { width.bytes() } else { moved };
            into = into.get_mut(done..).unwrap_or_default();
        }
    }

    /// Carries out `rep outs`, in the same way.
    pub fn write_string(&mut self, port: u16, width: Width, mut from: &[u8]) {
        let entry = self.entry(port);
        while from.len() >= width.bytes() {
            let moved = match self.slots.get_mut(usize::from(entry.slot)) {
                Some(slot) if entry.wide || width == Width::Byte => slot.write_string(entry.offset, width, from),
                _ => 0,
            };
            if moved == 0 {
                let mut bytes = [0; 4];
                bytes.iter_mut().zip(from).take(width.bytes()).for_each(|(byte, source)| *byte = *source);
                self.write(port, width, u32::from_le_bytes(bytes));
            }
            let done = if moved == 0 { width.bytes() } else { moved };
            from = from.get(done..).unwrap_or_default();
        }
    }

    #[inline]
    fn entry(&self, port: u16) -> Entry {
        let nobody = Entry { slot: NOBODY, offset: 0, wide: false };
        self.entries.get(usize::from(port)).copied().unwrap_or(nobody)
    }

    /// Carries out a wide access at narrow ports.
    #[cold]
    fn read_bytes(&mut self, port: u16, width: Width) -> u32 {
        let bytes = neighbours(port, width);
        bytes.fold(0, |value, (index, port)| value | Width::Byte.as_part(self.read(port, Width::Byte), index))
    }

    #[cold]
    fn write_bytes(&mut self, port: u16, width: Width, value: u32) {
        for (index, port) in neighbours(port, width) {
            self.write(port, Width::Byte, Width::Byte.of_part(value, index));
        }
    }
}

/// Returns the ports of a region; `None` if it is invalid.
fn ports_of(region: &Region) -> Option<std::ops::RangeInclusive<u16>> {
    let last = region.base.checked_add(region.ports.checked_sub(1)?)?;
    Some(region.base..=last)
}

/// Returns the ports of the bytes of a wide access. Behind the last port comes the first.
fn neighbours(port: u16, width: Width) -> impl Iterator<Item = (usize, u16)> {
    (0..width.bytes()).zip((0_u16..4).map(move |step| port.wrapping_add(step)))
}
