//! Registers, commands and bits of ATA/ATAPI-6, clauses 7 and 8.

/// Bits of the Status register (7.15).
pub mod status {
    /// The drive is busy.
    pub const BSY: u8 = 0x80;
    /// The drive is ready.
    pub const DRDY: u8 = 0x40;
    /// Device fault: the write failed for good.
    pub const DF: u8 = 0x20;
    /// Depends on the command. Drives have always set it, and old guests check it.
    pub const DSC: u8 = 0x10;
    /// Data are ready to be moved.
    pub const DRQ: u8 = 0x08;
    /// The Error register is valid.
    pub const ERR: u8 = 0x01;
}

/// Bits of the Error register (7.9).
pub(crate) mod error {
    /// Data cannot be read.
    pub(crate) const UNC: u8 = 0x40;
    /// The sector does not exist.
    pub(crate) const IDNF: u8 = 0x10;
    /// The command is not supported, or failed.
    pub(crate) const ABRT: u8 = 0x04;
    /// After a diagnostic: no error.
    pub(crate) const PASSED: u8 = 0x01;
}

/// Commands (clause 8).
pub mod command {
    /// READ SECTOR(S).
    pub const READ_SECTORS: u8 = 0x20;
    /// READ SECTOR(S) EXT.
    pub const READ_SECTORS_EXT: u8 = 0x24;
    /// READ MULTIPLE.
    pub const READ_MULTIPLE: u8 = 0xc4;
    /// READ MULTIPLE EXT.
    pub const READ_MULTIPLE_EXT: u8 = 0x29;
    /// WRITE SECTOR(S).
    pub const WRITE_SECTORS: u8 = 0x30;
    /// WRITE SECTOR(S) EXT.
    pub const WRITE_SECTORS_EXT: u8 = 0x34;
    /// WRITE MULTIPLE.
    pub const WRITE_MULTIPLE: u8 = 0xc5;
    /// WRITE MULTIPLE EXT.
    pub const WRITE_MULTIPLE_EXT: u8 = 0x39;
    /// READ VERIFY SECTOR(S).
    pub const READ_VERIFY: u8 = 0x40;
    /// READ VERIFY SECTOR(S) EXT.
    pub const READ_VERIFY_EXT: u8 = 0x42;
    /// EXECUTE DEVICE DIAGNOSTIC.
    pub const DIAGNOSTIC: u8 = 0x90;
    /// SET MULTIPLE MODE.
    pub const SET_MULTIPLE: u8 = 0xc6;
    /// STANDBY IMMEDIATE.
    pub const STANDBY_IMMEDIATE: u8 = 0xe0;
    /// IDLE IMMEDIATE.
    pub const IDLE_IMMEDIATE: u8 = 0xe1;
    /// STANDBY.
    pub const STANDBY: u8 = 0xe2;
    /// IDLE.
    pub const IDLE: u8 = 0xe3;
    /// CHECK POWER MODE.
    pub const CHECK_POWER: u8 = 0xe5;
    /// SLEEP.
    pub const SLEEP: u8 = 0xe6;
    /// FLUSH CACHE.
    pub const FLUSH_CACHE: u8 = 0xe7;
    /// FLUSH CACHE EXT.
    pub const FLUSH_CACHE_EXT: u8 = 0xea;
    /// IDENTIFY DEVICE.
    pub const IDENTIFY: u8 = 0xec;
    /// SET FEATURES.
    pub const SET_FEATURES: u8 = 0xef;
}

/// A register with its previous value: 48-bit commands use both (6.20).
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Deep {
    pub(crate) recent: u8,
    pub(crate) previous: u8,
}

impl Deep {
    pub(crate) fn push(&mut self, value: u8) {
        self.previous = self.recent;
        self.recent = value;
    }

    /// Returns the value that a read gets, according to the HOB bit of the Device Control register.
    pub(crate) fn shown(self, high_order: bool) -> u8 {
        if high_order { self.previous } else { self.recent }
    }
}

/// The registers that make up a command.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct TaskFile {
    pub(crate) features: Deep,
    pub(crate) count: Deep,
    pub(crate) low: Deep,
    pub(crate) mid: Deep,
    pub(crate) high: Deep,
    pub(crate) device: u8,
}

/// In the Device register: the address is an LBA, not a cylinder.
const LBA: u8 = 0x40;
/// In the Device register: selects the second drive.
const DEV: u8 = 0x10;

impl TaskFile {
    /// Returns the registers after a reset or a diagnostic (9.12): the signature of a drive without packet commands.
    pub(crate) fn signature() -> Self {
        let one = Deep { recent: 1, previous: 0 };
        Self { count: one, low: one, ..Self::default() }
    }

    /// Returns the drive that the Device register selects.
    pub(crate) fn chosen(device: u8) -> usize {
        usize::from(device & DEV != 0)
    }

    /// Whether the address is an LBA.
    pub(crate) fn is_lba(&self) -> bool {
        self.device & LBA != 0
    }

    /// Returns the first sector and the number of sectors of a command.
    pub(crate) fn range(&self, extended: bool) -> (u64, u64) {
        let Self { count, low, mid, high, .. } = *self;
        if extended {
            let lba = [low.recent, mid.recent, high.recent, low.previous, mid.previous, high.previous, 0, 0];
            let count = u64::from(u16::from_le_bytes([count.recent, count.previous]));
            return (u64::from_le_bytes(lba), if count == 0 { 1 << 16 } else { count });
        }
        let lba = u32::from_le_bytes([low.recent, mid.recent, high.recent, self.device & 0x0f]);
        let count = u64::from(count.recent);
        (lba.into(), if count == 0 { 1 << 8 } else { count })
    }

    /// Sets the address of the sector at which a command failed.
    pub(crate) fn set_lba(&mut self, lba: u64, extended: bool) {
        let [low, mid, high, fourth, fifth, sixth, ..] = lba.to_le_bytes();
        (self.low.recent, self.mid.recent, self.high.recent) = (low, mid, high);
        if extended {
            (self.low.previous, self.mid.previous, self.high.previous) = (fourth, fifth, sixth);
        } else {
            self.device = self.device & 0xf0 | fourth & 0x0f;
        }
    }
}
