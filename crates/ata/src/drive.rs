//! A drive: its registers, and the execution of commands.

use crate::identify::{self, IDENTIFY_BYTES, Identity, LBA28_SECTORS, MOST_MULTIPLE};
use crate::registers::{TaskFile, command, error, status};
use crate::sectors::Sectors;
use crate::transfer::{Buffer, Transfer, bytes_of};
use block::{Error, ErrorKind, Result, SECTOR_BYTES};
use pio::{Direction, Window};

const READY: u8 = status::DRDY | status::DSC;

/// The data of the present window.
#[derive(Debug, Clone, Copy)]
enum Moving {
    /// The answer of IDENTIFY DEVICE.
    Identity,
    /// Sectors.
    Sectors(Transfer),
}

/// The block size of a command.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Blocks {
    /// One sector.
    Single,
    /// The number of sectors set by SET MULTIPLE MODE.
    Multiple,
}

/// A drive that stores its sectors on a disk.
pub struct Drive {
    disk: Box<dyn Sectors>,
    sectors: u64,
    read_only: bool,
    /// Whether there was a cache at the start. If not, it cannot be switched on.
    can_cache: bool,
    caches: bool,
    serial: String,
    multiple: u8,
    pub(crate) registers: TaskFile,
    pub(crate) error: u8,
    pub(crate) status: u8,
    /// Whether the drive asserts its interrupt (INTRQ).
    pub(crate) interrupt: bool,
    moving: Option<Moving>,
    buffer: Buffer,
    /// The window to give to the bus.
    pub(crate) window: Option<Window>,
}

impl Drive {
    /// Makes a drive over `disk`. Its sectors have 512 bytes, so the disk's blocks must not be larger.
    pub fn new(disk: impl Sectors + 'static) -> Result<Self> {
        let info = disk.info();
        if u64::from(info.logical_block_bytes) > SECTOR_BYTES {
            let message = format!(
                "the disk has blocks of {} bytes, and an ATA drive reads and writes {SECTOR_BYTES}; use another device",
                info.logical_block_bytes
            );
            return Err(Error::new(ErrorKind::Unsupported, message));
        }
        let mut drive = Self {
            disk: Box::new(disk),
            sectors: (info.size_bytes / SECTOR_BYTES).min(1 << 48),
            read_only: info.read_only,
            can_cache: info.volatile_cache,
            caches: info.volatile_cache,
            serial: info.serial,
            multiple: 0,
            registers: TaskFile::default(),
            error: 0,
            status: 0,
            interrupt: false,
            moving: None,
            buffer: Buffer::default(),
            window: None,
        };
        drive.reset();
        Ok(drive)
    }

    /// Whether a command is moving data.
    pub(crate) fn is_moving(&self) -> bool {
        self.moving.is_some()
    }

    /// Takes the window back and drops its data.
    pub(crate) fn abandon(&mut self, window: Option<Window>) {
        if let Some(window) = window.or_else(|| self.window.take()) {
            self.buffer.put_back(window);
        }
        self.moving = None;
        self.buffer.forget();
    }

    /// Software and hardware reset (9.2, 9.3): ends transfers and resets all settings. A block that has come only
    /// partly is not written. Reads the size of the disk again, because it may have grown.
    pub(crate) fn reset(&mut self) {
        self.abandon(None);
        self.sectors = (self.disk.info().size_bytes / SECTOR_BYTES).min(1 << 48);
        self.multiple = 0;
        self.interrupt = false;
        self.set_cache(self.can_cache);
        self.diagnose();
    }

    /// Sets the registers as after a reset or a diagnostic.
    pub(crate) fn diagnose(&mut self) {
        self.abandon(None);
        self.registers = TaskFile::signature();
        (self.error, self.status) = (error::PASSED, READY);
    }

    /// Executes a command from the Command register. No other command is under way.
    pub(crate) fn execute(&mut self, number: u8) {
        use Blocks::{Multiple, Single};
        use Direction::{In, Out};
        (self.error, self.status, self.interrupt) = (0, READY, false);
        match number {
            command::IDENTIFY => self.identify(),
            command::READ_SECTORS | 0x21 => self.begin(In, Single, false),
            command::READ_SECTORS_EXT => self.begin(In, Single, true),
            command::READ_MULTIPLE => self.begin(In, Multiple, false),
            command::READ_MULTIPLE_EXT => self.begin(In, Multiple, true),
            command::WRITE_SECTORS | 0x31 => self.begin(Out, Single, false),
            command::WRITE_SECTORS_EXT => self.begin(Out, Single, true),
            command::WRITE_MULTIPLE => self.begin(Out, Multiple, false),
            command::WRITE_MULTIPLE_EXT => self.begin(Out, Multiple, true),
            command::READ_VERIFY | 0x41 => self.verify(false),
            command::READ_VERIFY_EXT => self.verify(true),
            command::FLUSH_CACHE | command::FLUSH_CACHE_EXT => {
                let flushed = self.disk.flush();
                self.end_or_abort(flushed.is_ok());
            }
            command::SET_MULTIPLE => self.set_multiple(),
            command::SET_FEATURES => self.set_features(),
            command::CHECK_POWER => {
                // Active or idle.
                self.registers.count.recent = 0xff;
                self.end();
            }
            command::STANDBY_IMMEDIATE | command::STANDBY | command::SLEEP => {
                // A drive in standby has written its cache. One that sleeps has to wake up at a reset, and this one is awake.
                let flushed = self.disk.flush();
                self.end_or_abort(flushed.is_ok());
            }
            command::IDLE_IMMEDIATE | command::IDLE => self.end(),
            _ => self.fail(error::ABRT),
        }
    }

    /// Goes on after all of a window has moved.
    pub(crate) fn window_ended(&mut self, window: Window) {
        self.buffer.put_back(window);
        self.status = READY;
        match self.moving.take() {
            None | Some(Moving::Identity) => self.buffer.forget(),
            Some(Moving::Sectors(transfer)) if transfer.direction == Direction::Out => self.write_block(transfer),
            Some(Moving::Sectors(mut transfer)) => {
                transfer.advance();
                // The last block of a read ends without an interrupt (9.5).
                if transfer.left > 0 {
                    self.show_block(transfer);
                }
            }
        }
    }

    /// Ends the command successfully.
    fn end(&mut self) {
        self.status = READY;
        self.interrupt = true;
    }

    fn end_or_abort(&mut self, done: bool) {
        if done { self.end() } else { self.fail(error::ABRT) }
    }

    fn fail(&mut self, why: u8) {
        self.error = why;
        self.status = READY | status::ERR;
        self.interrupt = true;
    }

    fn fail_at(&mut self, why: u8, lba: u64, extended: bool) {
        self.registers.set_lba(lba, extended);
        self.fail(why);
    }

    /// Returns the sectors of a command; `None` after an error if the drive lacks some.
    fn range(&mut self, extended: bool) -> Option<(u64, u64)> {
        let (lba, count) = self.registers.range(extended);
        if !self.registers.is_lba() {
            // Cylinder and head addresses are obsolete.
            self.fail(error::ABRT);
            return None;
        }
        // With 28 bits, a range may begin below the limit and end behind it. There are no such sectors.
        let limit = if extended { self.sectors } else { self.sectors.min(LBA28_SECTORS.saturating_add(1)) };
        if lba.saturating_add(count) > limit {
            self.fail_at(error::IDNF, lba.max(limit), extended);
            return None;
        }
        Some((lba, count))
    }

    fn begin(&mut self, direction: Direction, blocks: Blocks, extended: bool) {
        let block = if blocks == Blocks::Single { 1 } else { self.multiple.into() };
        if block == 0 || direction == Direction::Out && self.read_only {
            return self.fail(error::ABRT);
        }
        let Some((lba, left)) = self.range(extended) else { return };
        let transfer = Transfer { direction, lba, left, block, extended };
        self.buffer.forget();
        self.show_block(transfer);
        if direction == Direction::Out {
            // The drive asks for the first block without an interrupt (9.6).
            self.interrupt = false;
        }
    }

    /// Makes the window of the next block.
    fn show_block(&mut self, transfer: Transfer) {
        let window = match transfer.direction {
            Direction::In => self.buffer.read_block(&transfer, &mut *self.disk),
            Direction::Out => {
                self.buffer.bytes();
                Ok(self.buffer.window(Direction::Out, bytes_of(transfer.block_sectors())))
            }
        };
        match window {
            Ok(window) => self.show(window, Moving::Sectors(transfer)),
            Err(_) => self.fail_at(error::UNC, transfer.lba, transfer.extended),
        }
    }

    fn show(&mut self, window: Option<Window>, moving: Moving) {
        self.window = window;
        self.moving = Some(moving);
        self.status = READY | status::DRQ;
        self.interrupt = true;
    }

    fn write_block(&mut self, mut transfer: Transfer) {
        let length = bytes_of(transfer.block_sectors());
        let offset = transfer.lba.saturating_mul(SECTOR_BYTES);
        let bytes = self.buffer.bytes().get(..length).unwrap_or_default();
        if self.disk.write(offset, bytes).is_err() {
            self.fail_at(error::ABRT, transfer.lba, transfer.extended);
            self.status |= status::DF;
            return;
        }
        transfer.advance();
        if transfer.left == 0 { self.end() } else { self.show_block(transfer) }
    }

    fn identify(&mut self) {
        let identity = Identity {
            serial: &self.serial,
            sectors: self.sectors,
            multiple: self.multiple,
            can_cache: self.can_cache,
            caches: self.caches,
        };
        identify::fill(&identity, self.buffer.bytes());
        let window = self.buffer.window(Direction::In, IDENTIFY_BYTES);
        self.show(window, Moving::Identity);
    }

    fn verify(&mut self, extended: bool) {
        let Some((mut lba, mut left)) = self.range(extended) else { return };
        while left > 0 {
            let count = left.min(64);
            let bytes = self.buffer.bytes().get_mut(..bytes_of(count)).unwrap_or_default();
            if self.disk.read(lba.saturating_mul(SECTOR_BYTES), bytes).is_err() {
                return self.fail_at(error::UNC, lba, extended);
            }
            (lba, left) = (lba.saturating_add(count), left.saturating_sub(count));
        }
        self.end();
    }

    fn set_multiple(&mut self) {
        let count = self.registers.count.recent;
        let valid = count == 0 || count.is_power_of_two() && count <= MOST_MULTIPLE;
        if valid {
            self.multiple = count;
        }
        self.end_or_abort(valid);
    }

    fn set_features(&mut self) {
        match self.registers.features.recent {
            0x02 if self.can_cache => {
                self.set_cache(true);
                self.end();
            }
            0x82 => {
                // The cache's contents are written before the command ends.
                self.set_cache(false);
                let flushed = self.disk.flush();
                self.end_or_abort(flushed.is_ok());
            }
            // The mode of transfers (8.46, table 44): programmed I/O only, by default or with mode 0 to 4.
            0x03 => self.end_or_abort(matches!(self.registers.count.recent, 0 | 1 | 0x08..=0x0c)),
            _ => self.fail(error::ABRT),
        }
    }

    fn set_cache(&mut self, on: bool) {
        if self.caches != on {
            self.disk.set_volatile_cache(on);
            self.caches = on;
        }
    }
}
