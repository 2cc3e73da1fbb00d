//! virtio-blk's layouts, as virtio 1.2 section 5.2 gives them: features, configuration space, request header, discard
//! and write-zeroes segments, status. Plain values in and out of little-endian bytes; no memory is touched here.

/// Virtio's device type of a block device (5.2.1).
pub const DEVICE_ID: u32 = 2;

/// Sectors of the protocol: 512 bytes, whatever the block size.
pub const SECTOR_SHIFT: u32 = 9;

/// The most bytes that `GET_ID` answers (5.2.6: a string, padded with zeros, without an end mark if it is full).
pub const ID_BYTES: usize = 20;

/// Feature bits as masks (5.2.3 and chapter 6).
pub mod features {
    /// `size_max` is valid: no segment is longer.
    pub const SIZE_MAX: u64 = 1 << 1;
    /// `seg_max` is valid: no request has more data segments.
    pub const SEG_MAX: u64 = 1 << 2;
    /// `geometry` is valid.
    pub const GEOMETRY: u64 = 1 << 4;
    /// The disk is read-only.
    pub const RO: u64 = 1 << 5;
    /// `blk_size` is valid.
    pub const BLK_SIZE: u64 = 1 << 6;
    /// Legacy: SCSI packet commands. Never offered; such requests are answered UNSUPP.
    pub const SCSI: u64 = 1 << 7;
    /// Flush requests are served, and needed: the cache is volatile.
    pub const FLUSH: u64 = 1 << 9;
    /// `topology` is valid.
    pub const TOPOLOGY: u64 = 1 << 10;
    /// `writeback` can be read and written.
    pub const CONFIG_WCE: u64 = 1 << 11;
    /// Several queues; `num_queues` is valid.
    pub const MQ: u64 = 1 << 12;
    /// Discard requests are served.
    pub const DISCARD: u64 = 1 << 13;
    /// Write-zeroes requests are served.
    pub const WRITE_ZEROES: u64 = 1 << 14;
    /// The wear of the storage can be asked for.
    pub const LIFETIME: u64 = 1 << 15;
    /// Secure erases are served.
    pub const SECURE_ERASE: u64 = 1 << 16;
    /// Legacy: notify when the ring runs empty.
    pub const NOTIFY_ON_EMPTY: u64 = 1 << 24;
    /// Legacy: header and status need no descriptor of their own.
    pub const ANY_LAYOUT: u64 = 1 << 27;
    /// Descriptors may point to tables of descriptors.
    pub const INDIRECT_DESC: u64 = 1 << 28;
    /// Notifications are asked for by index rather than by flag.
    pub const EVENT_IDX: u64 = 1 << 29;
    /// Virtio 1.0 or newer.
    pub const VERSION_1: u64 = 1 << 32;
    /// Packed rings.
    pub const RING_PACKED: u64 = 1 << 34;
}

/// The result of a request: the last byte that the device writes (5.2.6).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Status {
    /// Success.
    Ok = 0,
    /// The device or the driver made an error.
    IoErr = 1,
    /// The device does not serve such requests.
    Unsupported = 2,
}

impl Status {
    /// Reads a status byte, as a driver does. Everything unknown is an error.
    #[must_use]
    pub fn from_byte(byte: u8) -> Self {
        match byte {
            0 => Self::Ok,
            2 => Self::Unsupported,
            _ => Self::IoErr,
        }
    }
}

/// Request types (5.2.6).
pub mod request_type {
    /// A read: data go from device to driver.
    pub const IN: u32 = 0;
    /// A write: data go from driver to device.
    pub const OUT: u32 = 1;
    /// Legacy: a SCSI packet command.
    pub const SCSI_CMD: u32 = 2;
    /// As [`SCSI_CMD`], by its other legacy number.
    pub const SCSI_CMD_OUT: u32 = 3;
    /// Make completed writes durable.
    pub const FLUSH: u32 = 4;
    /// As [`FLUSH`], by its other legacy number.
    pub const FLUSH_OUT: u32 = 5;
    /// The device's serial string.
    pub const GET_ID: u32 = 8;
    /// The wear of the storage.
    pub const GET_LIFETIME: u32 = 10;
    /// Drop ranges.
    pub const DISCARD: u32 = 11;
    /// Zero ranges.
    pub const WRITE_ZEROES: u32 = 13;
    /// Drop ranges so that their data cannot be restored.
    pub const SECURE_ERASE: u32 = 14;
}

/// Bytes of a [`RequestHeader`].
pub const HEADER_BYTES: usize = 16;

/// The header of every request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RequestHeader {
    /// One of [`request_type`].
    pub kind: u32,
    /// Reserved since 1.0. Legacy drivers put the request's priority here, and Linux still does.
    pub priority: u32,
    /// First sector of a read or write, else zero.
    pub sector: u64,
}

impl RequestHeader {
    /// Returns the little-endian bytes.
    #[must_use]
    pub fn to_bytes(self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        let mut out = Writer { bytes: &mut bytes };
        out.u32(self.kind);
        out.u32(self.priority);
        out.u64(self.sector);
        bytes
    }

    /// Reads little-endian bytes.
    #[must_use]
    pub fn from_bytes(bytes: [u8; HEADER_BYTES]) -> Self {
        let mut input = Reader { bytes: &bytes };
        Self { kind: input.u32(), priority: input.u32(), sector: input.u64() }
    }
}

/// Bytes of the answer to `GET_LIFETIME`: the reserve that is left and two estimates of wear, each two little-endian
/// bytes (5.2.6).
pub const LIFETIME_BYTES: usize = 6;

/// Bytes of a [`RangeSegment`].
pub const RANGE_SEGMENT_BYTES: usize = 16;

/// One range of a discard or write-zeroes request (`virtio_blk_discard_write_zeroes`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RangeSegment {
    /// First sector.
    pub sector: u64,
    /// The number of sectors.
    pub sector_count: u32,
    /// [`RangeSegment::UNMAP`]; the other bits are reserved.
    pub flags: u32,
}

impl RangeSegment {
    /// Write-zeroes may give the space back. Reserved in a discard.
    pub const UNMAP: u32 = 1;

    /// Returns the little-endian bytes.
    #[must_use]
    pub fn to_bytes(self) -> [u8; RANGE_SEGMENT_BYTES] {
        let mut bytes = [0; RANGE_SEGMENT_BYTES];
        let mut out = Writer { bytes: &mut bytes };
        out.u64(self.sector);
        out.u32(self.sector_count);
        out.u32(self.flags);
        bytes
    }

    /// Reads little-endian bytes.
    #[must_use]
    pub fn from_bytes(bytes: [u8; RANGE_SEGMENT_BYTES]) -> Self {
        let mut input = Reader { bytes: &bytes };
        Self { sector: input.u64(), sector_count: input.u32(), flags: input.u32() }
    }
}

/// Bytes of the configuration space in virtio 1.2. Older devices have fewer, newer ones more. Missing bytes count as
/// zero.
pub const CONFIG_BYTES: usize = 72;

/// The offset of the `writeback` byte in the configuration space: the only field that a driver may write.
pub const CONFIG_WRITEBACK_OFFSET: usize = 32;

/// The configuration space (`virtio_blk_config`, 5.2.4). Fields are valid with the feature that names them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct BlkConfig {
    /// Size of the disk in 512-byte sectors.
    pub capacity_sectors: u64,
    /// Longest data segment in bytes.
    pub size_max_bytes: u32,
    /// Most data segments in a request.
    pub seg_max: u32,
    /// Legacy geometry.
    pub geometry: Geometry,
    /// Logical block in bytes.
    pub blk_size_bytes: u32,
    /// Logical blocks in a physical one, as a power of two.
    pub physical_block_exp: u8,
    /// The first aligned logical block.
    pub alignment_offset: u8,
    /// Suggested smallest I/O, in logical blocks.
    pub min_io_blocks: u16,
    /// Suggested best I/O, in logical blocks.
    pub opt_io_blocks: u32,
    /// 1 for write-back, 0 for write-through.
    pub writeback: u8,
    /// Queues.
    pub num_queues: u16,
    /// Most sectors in one range of a discard.
    pub max_discard_sectors: u32,
    /// Most ranges in a discard.
    pub max_discard_seg: u32,
    /// Alignment of discards in sectors.
    pub discard_sector_alignment: u32,
    /// Most sectors in one range of a write-zeroes.
    pub max_write_zeroes_sectors: u32,
    /// Most ranges in a write-zeroes.
    pub max_write_zeroes_seg: u32,
    /// Whether write-zeroes with the unmap flag may give space back.
    pub write_zeroes_may_unmap: u8,
    /// Most sectors in one range of a secure erase.
    pub max_secure_erase_sectors: u32,
    /// Most ranges in a secure erase.
    pub max_secure_erase_seg: u32,
    /// Alignment of secure erases in sectors.
    pub secure_erase_sector_alignment: u32,
}

/// Cylinders, heads, sectors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Geometry {
    /// Cylinders.
    pub cylinders: u16,
    /// Heads.
    pub heads: u8,
    /// Sectors in a track.
    pub sectors: u8,
}

impl BlkConfig {
    /// Changes some of the fields: `BlkConfig::default().with(|config| ...)`.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }

    /// Returns the little-endian bytes, as the specification lays them out.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; CONFIG_BYTES] {
        let mut bytes = [0; CONFIG_BYTES];
        let mut out = Writer { bytes: &mut bytes };
        out.u64(self.capacity_sectors);
        out.u32(self.size_max_bytes);
        out.u32(self.seg_max);
        out.u16(self.geometry.cylinders);
        out.u8(self.geometry.heads);
        out.u8(self.geometry.sectors);
        out.u32(self.blk_size_bytes);
        out.u8(self.physical_block_exp);
        out.u8(self.alignment_offset);
        out.u16(self.min_io_blocks);
        out.u32(self.opt_io_blocks);
        out.u8(self.writeback);
        out.u8(0);
        out.u16(self.num_queues);
        out.u32(self.max_discard_sectors);
        out.u32(self.max_discard_seg);
        out.u32(self.discard_sector_alignment);
        out.u32(self.max_write_zeroes_sectors);
        out.u32(self.max_write_zeroes_seg);
        out.u8(self.write_zeroes_may_unmap);
        out.put(&[0; 3]);
        out.u32(self.max_secure_erase_sectors);
        out.u32(self.max_secure_erase_seg);
        out.u32(self.secure_erase_sector_alignment);
        bytes
    }

    /// Reads little-endian bytes. Missing bytes at the end are zero, and further ones are ignored.
    #[must_use]
    pub fn from_bytes(bytes: &[u8]) -> Self {
        let mut input = Reader { bytes };
        let mut config = Self {
            capacity_sectors: input.u64(),
            size_max_bytes: input.u32(),
            seg_max: input.u32(),
            geometry: Geometry { cylinders: input.u16(), heads: input.u8(), sectors: input.u8() },
            blk_size_bytes: input.u32(),
            physical_block_exp: input.u8(),
            alignment_offset: input.u8(),
            min_io_blocks: input.u16(),
            opt_io_blocks: input.u32(),
            writeback: input.u8(),
            ..Self::default()
        };
        input.u8();
        config.num_queues = input.u16();
        config.max_discard_sectors = input.u32();
        config.max_discard_seg = input.u32();
        config.discard_sector_alignment = input.u32();
        config.max_write_zeroes_sectors = input.u32();
        config.max_write_zeroes_seg = input.u32();
        config.write_zeroes_may_unmap = input.u8();
        input.take::<3>();
        config.max_secure_erase_sectors = input.u32();
        config.max_secure_erase_seg = input.u32();
        config.secure_erase_sector_alignment = input.u32();
        config
    }
}

/// Fills a buffer from its front. The buffers here are exactly as long as their fields.
struct Writer<'a> {
    bytes: &'a mut [u8],
}

impl Writer<'_> {
    fn put(&mut self, field: &[u8]) {
        let bytes = std::mem::take(&mut self.bytes);
        if let Some((head, rest)) = bytes.split_at_mut_checked(field.len()) {
            head.copy_from_slice(field);
            self.bytes = rest;
        }
    }

    fn u8(&mut self, value: u8) {
        self.put(&[value]);
    }

    fn u16(&mut self, value: u16) {
        self.put(&value.to_le_bytes());
    }

    fn u32(&mut self, value: u32) {
        self.put(&value.to_le_bytes());
    }

    fn u64(&mut self, value: u64) {
        self.put(&value.to_le_bytes());
    }
}

/// Takes fields from the front of a buffer. Behind its end everything is zero.
struct Reader<'a> {
    bytes: &'a [u8],
}

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> [u8; N] {
        match self.bytes.split_first_chunk::<N>() {
            Some((head, rest)) => {
                self.bytes = rest;
                *head
            }
            None => {
                self.bytes = &[];
                [0; N]
            }
        }
    }

    fn u8(&mut self) -> u8 {
        u8::from_le_bytes(self.take())
    }

    fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.take())
    }

    fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.take())
    }

    fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.take())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn configuration_fields_lie_where_the_specification_puts_them() {
        let config = BlkConfig {
            capacity_sectors: 0x0807_0605_0403_0201,
            size_max_bytes: 0x1111_1111,
            seg_max: 0x2222_2222,
            geometry: Geometry { cylinders: 0x3334, heads: 0x35, sectors: 0x36 },
            blk_size_bytes: 0x4444_4444,
            physical_block_exp: 0x51,
            alignment_offset: 0x52,
            min_io_blocks: 0x5354,
            opt_io_blocks: 0x5555_5555,
            writeback: 0x66,
            num_queues: 0x7778,
            max_discard_sectors: 0x8888_8881,
            max_discard_seg: 0x8888_8882,
            discard_sector_alignment: 0x8888_8883,
            max_write_zeroes_sectors: 0x9999_9991,
            max_write_zeroes_seg: 0x9999_9992,
            write_zeroes_may_unmap: 0x93,
            max_secure_erase_sectors: 0xaaaa_aaa1,
            max_secure_erase_seg: 0xaaaa_aaa2,
            secure_erase_sector_alignment: 0xaaaa_aaa3,
        };
        let bytes = config.to_bytes();
        let at = |offset: usize, length: usize| bytes[offset..offset + length].to_vec();
        assert_eq!(at(0, 8), [1, 2, 3, 4, 5, 6, 7, 8]);
        assert_eq!(at(8, 4), [0x11; 4]);
        assert_eq!(at(12, 4), [0x22; 4]);
        assert_eq!(at(16, 4), [0x34, 0x33, 0x35, 0x36]);
        assert_eq!(at(20, 4), [0x44; 4]);
        assert_eq!(at(24, 8), [0x51, 0x52, 0x54, 0x53, 0x55, 0x55, 0x55, 0x55]);
        assert_eq!(at(CONFIG_WRITEBACK_OFFSET, 4), [0x66, 0, 0x78, 0x77]);
        assert_eq!(at(36, 4), [0x81, 0x88, 0x88, 0x88]);
        assert_eq!(at(40, 4), [0x82, 0x88, 0x88, 0x88]);
        assert_eq!(at(44, 4), [0x83, 0x88, 0x88, 0x88]);
        assert_eq!(at(48, 4), [0x91, 0x99, 0x99, 0x99]);
        assert_eq!(at(52, 4), [0x92, 0x99, 0x99, 0x99]);
        assert_eq!(at(56, 4), [0x93, 0, 0, 0]);
        assert_eq!(at(60, 4), [0xa1, 0xaa, 0xaa, 0xaa]);
        assert_eq!(at(64, 4), [0xa2, 0xaa, 0xaa, 0xaa]);
        assert_eq!(at(68, 4), [0xa3, 0xaa, 0xaa, 0xaa]);
        assert_eq!(BlkConfig::from_bytes(&bytes), config);
    }

    #[test]
    fn a_short_configuration_space_reads_as_zeros_behind_its_end() {
        let full = BlkConfig { capacity_sectors: 77, num_queues: 4, max_discard_seg: 9, ..BlkConfig::default() };
        let short = BlkConfig::from_bytes(&full.to_bytes()[..36]);
        assert_eq!((short.capacity_sectors, short.num_queues, short.max_discard_seg), (77, 4, 0));
    }

    #[test]
    fn header_and_range_are_little_endian_in_field_order() {
        let header = RequestHeader { kind: 0x0403_0201, priority: 0x0807_0605, sector: 0x100f_0e0d_0c0b_0a09 };
        assert_eq!(header.to_bytes(), [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]);
        assert_eq!(RequestHeader::from_bytes(header.to_bytes()), header);
        let range = RangeSegment { sector: 0x0807_0605_0403_0201, sector_count: 0x0c0b_0a09, flags: 0x100f_0e0d };
        assert_eq!(range.to_bytes(), [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]);
        assert_eq!(RangeSegment::from_bytes(range.to_bytes()), range);
    }
}
