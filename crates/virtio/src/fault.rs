//! Reasons why a queue stopped: faults of the driver.

use memory::MemoryError;
use std::fmt;
use thiserror::Error;

/// A driver broke the ring's rules. The queue takes no requests until it is reset; requests in flight still end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RingFault {
    /// The chain that the fault is in, if it is in one.
    pub head: Option<u16>,
    /// The fault.
    pub reason: FaultReason,
}

impl fmt::Display for RingFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.head {
            Some(head) => write!(f, "descriptor chain {head}: {}", self.reason),
            None => write!(f, "{}", self.reason),
        }
    }
}

impl std::error::Error for RingFault {}

/// A kind of fault.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum FaultReason {
    /// The driver announced more than the ring holds.
    #[error("the available index jumped from {from} to {to}, more than the ring's {size} entries")]
    AvailIndexJump {
        /// Next entry to take.
        from: u16,
        /// The end that the driver announced.
        to: u16,
        /// Entries.
        size: u16,
    },
    /// The head lies outside the descriptor table.
    #[error("the head lies outside the table of {size} descriptors")]
    HeadOutside {
        /// Entries.
        size: u16,
    },
    /// The id of a buffer in a packed ring is not below the ring's size.
    #[error("the buffer id {id} is not below the ring's {size} descriptors")]
    IdOutside {
        /// The id.
        id: u16,
        /// Descriptors.
        size: u16,
    },
    /// More descriptors of a packed ring are available or in flight than it has.
    #[error("more descriptors are available than the ring's {size}")]
    TooManyInFlight {
        /// The number of the ring's descriptors.
        size: u16,
    },
    /// The head was made available again before it was used.
    #[error("the head is in flight already")]
    HeadInFlight,
    /// A link leads out of its table.
    #[error("a descriptor links to {next}, outside its table of {size}")]
    NextOutside {
        /// The link.
        next: u16,
        /// Descriptors in the table.
        size: u32,
    },
    /// The chain has a loop, or is longer than allowed.
    #[error("the chain loops or has more than {limit} descriptors")]
    ChainTooLong {
        /// The limit.
        limit: u32,
    },
    /// An indirect descriptor appeared without the negotiated feature.
    #[error("an indirect descriptor, which was not negotiated")]
    IndirectNotNegotiated,
    /// A descriptor has both INDIRECT and NEXT.
    #[error("an indirect descriptor that also has a next one")]
    IndirectWithNext,
    /// An indirect table has an indirect descriptor.
    #[error("an indirect descriptor inside an indirect table")]
    NestedIndirect,
    /// The length of an indirect table is impossible.
    #[error("an indirect table of {length_bytes} bytes: it must be 1 to {limit} descriptors of 16 bytes")]
    IndirectLength {
        /// The length in bytes.
        length_bytes: u32,
        /// The most descriptors in a table.
        limit: u32,
    },
    /// An address lies outside guest memory.
    #[error("{0}")]
    Memory(#[from] MemoryError),
    /// A descriptor has no bytes.
    #[error("a descriptor of zero bytes")]
    ZeroLength,
    /// A buffer that the device reads follows one that it writes.
    #[error("a readable descriptor behind a writable one")]
    WrongOrder,
    /// A request has too many bytes.
    #[error("more than {limit} bytes in one request")]
    TooManyBytes {
        /// The limit.
        limit: u32,
    },
    /// The request header is not whole.
    #[error("{readable_bytes} readable bytes are too few for a request header")]
    HeaderTooShort {
        /// Readable bytes of the chain.
        readable_bytes: u32,
    },
    /// There is no writable byte for the status.
    #[error("no writable byte for the status")]
    NoStatusByte,
}

impl FaultReason {
    /// Makes the fault, in the chain of `head`.
    #[must_use]
    pub fn in_chain(self, head: u16) -> RingFault {
        RingFault { head: Some(head), reason: self }
    }
}
