//! The protocol's numbers, under its own names.

/// The beginning of a server's greeting: "NBDMAGIC".
pub const INIT_MAGIC: u64 = 0x4e42_444d_4147_4943;
/// "IHAVEOPT": the second word of a server's greeting, and the beginning of an option.
pub const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
/// The beginning of an answer to an option.
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// The beginning of a request with a compact header.
pub const REQUEST_MAGIC: u32 = 0x2560_9513;
/// The beginning of a request with an extended header.
pub const EXTENDED_REQUEST_MAGIC: u32 = 0x21e4_1c71;
/// The beginning of a simple reply.
pub const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
/// The beginning of a chunk of a structured reply.
pub const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;
/// The beginning of a chunk of a reply with an extended header.
pub const EXTENDED_REPLY_MAGIC: u32 = 0x6e8a_278c;

/// Handshake flags, the same from both sides.
pub mod handshake {
    /// The fixed newstyle handshake.
    pub const FIXED_NEWSTYLE: u16 = 1 << 0;
    /// No zeros behind the answer to `EXPORT_NAME`.
    pub const NO_ZEROES: u16 = 1 << 1;
}

/// Transmission flags: the abilities of an export.
pub mod export {
    /// The flags count.
    pub const HAS_FLAGS: u16 = 1 << 0;
    /// Writes are refused.
    pub const READ_ONLY: u16 = 1 << 1;
    /// Knows `FLUSH`.
    pub const SEND_FLUSH: u16 = 1 << 2;
    /// Knows the flag `FUA`.
    pub const SEND_FUA: u16 = 1 << 3;
    /// Knows `TRIM`.
    pub const SEND_TRIM: u16 = 1 << 5;
    /// Knows `WRITE_ZEROES`.
    pub const SEND_WRITE_ZEROES: u16 = 1 << 6;
    /// Knows the flag `DF`.
    pub const SEND_DF: u16 = 1 << 7;
    /// A flush on one connection covers completed writes on all.
    pub const CAN_MULTI_CONN: u16 = 1 << 8;
    /// Knows `CACHE`.
    pub const SEND_CACHE: u16 = 1 << 10;
    /// Knows the flag `FAST_ZERO`.
    pub const SEND_FAST_ZERO: u16 = 1 << 11;
}

/// Options of the handshake.
pub mod option {
    /// Choose an export and begin, without a way to fail.
    pub const EXPORT_NAME: u32 = 1;
    /// Give up.
    pub const ABORT: u32 = 2;
    /// List the exports.
    pub const LIST: u32 = 3;
    /// Go on with TLS.
    pub const STARTTLS: u32 = 5;
    /// Tell about an export.
    pub const INFO: u32 = 6;
    /// Choose an export and begin.
    pub const GO: u32 = 7;
    /// Use structured replies.
    pub const STRUCTURED_REPLY: u32 = 8;
    /// List metadata contexts.
    pub const LIST_META_CONTEXT: u32 = 9;
    /// Choose metadata contexts.
    pub const SET_META_CONTEXT: u32 = 10;
    /// Use extended headers.
    pub const EXTENDED_HEADERS: u32 = 11;
}

/// Answers to options. Numbers with the top bit are errors.
pub mod answer {
    /// The option is done.
    pub const ACK: u32 = 1;
    /// An export.
    pub const SERVER: u32 = 2;
    /// Information about an export.
    pub const INFO: u32 = 3;
    /// A metadata context.
    pub const META_CONTEXT: u32 = 4;
    /// The bit that marks errors.
    pub const ERROR: u32 = 1 << 31;
    /// Unknown, or not here.
    pub const ERR_UNSUP: u32 = ERROR | 1;
    /// Forbidden.
    pub const ERR_POLICY: u32 = ERROR | 2;
    /// The option makes no sense.
    pub const ERR_INVALID: u32 = ERROR | 3;
    /// TLS is required.
    pub const ERR_TLS_REQD: u32 = ERROR | 5;
    /// There is no such export.
    pub const ERR_UNKNOWN: u32 = ERROR | 6;
    /// The option contradicts extended headers, which were chosen before.
    pub const ERR_EXT_HEADER_REQD: u32 = ERROR | 10;
    /// The option is too long.
    pub const ERR_TOO_BIG: u32 = ERROR | 9;
}

/// The kinds of information in the answer `INFO`.
pub mod info {
    /// Size and flags.
    pub const EXPORT: u16 = 0;
    /// The export's name.
    pub const NAME: u16 = 1;
    /// The export's description.
    pub const DESCRIPTION: u16 = 2;
    /// Sizes of requests.
    pub const BLOCK_SIZE: u16 = 3;
}

/// Commands.
pub mod command {
    /// Read.
    pub const READ: u16 = 0;
    /// Write.
    pub const WRITE: u16 = 1;
    /// Disconnect.
    pub const DISC: u16 = 2;
    /// Make durable.
    pub const FLUSH: u16 = 3;
    /// Discard.
    pub const TRIM: u16 = 4;
    /// Read ahead.
    pub const CACHE: u16 = 5;
    /// Write zeros.
    pub const WRITE_ZEROES: u16 = 6;
    /// Report the status of a range.
    pub const BLOCK_STATUS: u16 = 7;
}

/// Flags of commands.
pub mod command_flag {
    /// Durable before the reply.
    pub const FUA: u16 = 1 << 0;
    /// Zeros must take space.
    pub const NO_HOLE: u16 = 1 << 1;
    /// Send the data as one chunk.
    pub const DF: u16 = 1 << 2;
    /// One extent suffices.
    pub const REQ_ONE: u16 = 1 << 3;
    /// Fail if zeros take as long as data.
    pub const FAST_ZERO: u16 = 1 << 4;
    /// The length is that of a payload.
    pub const PAYLOAD_LEN: u16 = 1 << 5;
}

/// Chunks of structured and extended replies.
pub mod chunk {
    /// The flag of the last chunk.
    pub const DONE: u16 = 1 << 0;
    /// Nothing but the end of the reply.
    pub const NONE: u16 = 0;
    /// Data.
    pub const OFFSET_DATA: u16 = 1;
    /// Zeros.
    pub const OFFSET_HOLE: u16 = 2;
    /// Extents of 32 bits.
    pub const BLOCK_STATUS: u16 = 5;
    /// Extents of 64 bits.
    pub const BLOCK_STATUS_EXT: u16 = 6;
    /// The bit of errors.
    pub const ERROR_BIT: u16 = 1 << 15;
    /// An error.
    pub const ERROR: u16 = ERROR_BIT | 1;
    /// An error at an offset.
    pub const ERROR_OFFSET: u16 = ERROR_BIT | 2;
}

/// Error numbers in replies.
pub mod error {
    /// Not permitted.
    pub const EPERM: u32 = 1;
    /// I/O error.
    pub const EIO: u32 = 5;
    /// No memory.
    pub const ENOMEM: u32 = 12;
    /// Invalid.
    pub const EINVAL: u32 = 22;
    /// No space.
    pub const ENOSPC: u32 = 28;
    /// Too large.
    pub const EOVERFLOW: u32 = 75;
    /// Not supported.
    pub const ENOTSUP: u32 = 95;
    /// The server ends.
    pub const ESHUTDOWN: u32 = 108;
}

/// The context that tells holes and zeros.
pub const BASE_ALLOCATION: &str = "base:allocation";
/// The context that tells which layer has the data: 0 none, 1 the top.
pub const ALLOCATION_DEPTH: &str = "qemu:allocation-depth";
/// The prefix of contexts that report a bitmap of written ranges. The bitmap's name follows.
pub const DIRTY_BITMAP: &str = "qemu:dirty-bitmap:";
/// The flag of such a context: the range was written.
pub const DIRTY: u64 = 1 << 0;
/// Flags of `base:allocation`.
pub mod allocation {
    /// Takes no space.
    pub const HOLE: u64 = 1 << 0;
    /// Reads as zeros.
    pub const ZERO: u64 = 1 << 1;
}

/// The longest string, in bytes.
pub const STRING_BYTES_MAX: usize = 4096;
/// The longest payload that every server takes, in bytes.
pub const PAYLOAD_BYTES_MAX: u32 = 32 << 20;
