//! The flags and the priority of a request: how durable and how urgent it is.

use std::fmt;
use std::ops::{BitOr, BitOrAssign};

/// The durability of a write. A disk without a volatile cache does what both flags ask for anyway.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub struct OpFlags(u8);

impl OpFlags {
    /// A plain write.
    pub const NONE: Self = Self(0);
    /// The write completes only when it is durable, metadata included.
    pub const FUA: Self = Self(1);
    /// Before its data are sent, the write does what a flush submitted in its place would do. If that fails the request
    /// fails, and its data are not sent.
    pub const PREFLUSH: Self = Self(2);

    /// Returns [`Self::FUA`] if `fua` is set, else no flags.
    #[must_use]
    pub const fn from_fua(fua: bool) -> Self {
        if fua { Self::FUA } else { Self::NONE }
    }

    /// Whether all flags of `other` are set.
    #[inline]
    #[must_use]
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// Whether [`Self::FUA`] is set.
    #[inline]
    #[must_use]
    pub const fn is_fua(self) -> bool {
        self.contains(Self::FUA)
    }

    /// Whether [`Self::PREFLUSH`] is set.
    #[inline]
    #[must_use]
    pub const fn is_preflush(self) -> bool {
        self.contains(Self::PREFLUSH)
    }

    /// Returns these flags and those of `other`.
    #[must_use]
    pub const fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Returns these flags without those of `other`.
    #[must_use]
    pub const fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }
}

impl BitOr for OpFlags {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        self.with(other)
    }
}

impl BitOrAssign for OpFlags {
    fn bitor_assign(&mut self, other: Self) {
        *self = *self | other;
    }
}

impl fmt::Debug for OpFlags {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = |flag, name| if self.contains(flag) { name } else { "" };
        write!(f, "OpFlags({}{})", name(Self::PREFLUSH, "P"), name(Self::FUA, "F"))
    }
}

/// The urgency of a transfer: an I/O priority as in Linux (`ioprio_set(2)`), of a kind that any process may ask for.
///
/// It is a hint that only some of the host's schedulers follow (BFQ, mq-deadline). It orders nothing.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub struct Priority(u16);

const CLASS_SHIFT: u32 = 13;
const CLASS_REALTIME: u16 = 1;
const CLASS_BEST_EFFORT: u16 = 2;
const CLASS_IDLE: u16 = 3;
const LEVEL_MASK: u16 = 7;

impl Priority {
    /// The priority of the thread that carries the transfer out.
    pub const NONE: Self = Self(0);
    /// Only when the storage has nothing else to do.
    pub const IDLE: Self = Self(CLASS_IDLE << CLASS_SHIFT);

    /// Makes a best-effort priority. Level 0 is the most urgent, 7 the least. Higher levels count as 7.
    #[must_use]
    pub const fn best_effort(level: u16) -> Self {
        Self(CLASS_BEST_EFFORT << CLASS_SHIFT | if level > LEVEL_MASK { LEVEL_MASK } else { level })
    }

    /// Converts the priority that a guest or a peer named. The real-time class becomes the most urgent best effort: it
    /// would put a guest before the host's own processes, and the kernel refuses it to most. Unknown classes become
    /// [`Self::NONE`], and hints are left out. So the kernel accepts every result.
    #[inline]
    #[must_use]
    pub const fn from_ioprio(ioprio: u16) -> Self {
        match ioprio >> CLASS_SHIFT {
            CLASS_REALTIME => Self::best_effort(0),
            CLASS_BEST_EFFORT => Self::best_effort(ioprio & LEVEL_MASK),
            CLASS_IDLE => Self::IDLE,
            _ => Self::NONE,
        }
    }

    /// Returns the kernel's form: the class in bits 13 and up, the level below; zero means no priority.
    #[inline]
    #[must_use]
    pub const fn ioprio(self) -> u16 {
        self.0
    }
}

impl fmt::Debug for Priority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 >> CLASS_SHIFT {
            CLASS_BEST_EFFORT => write!(f, "best effort {}", self.0 & LEVEL_MASK),
            CLASS_IDLE => f.write_str("idle"),
            _ => f.write_str("no priority"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_gets_no_priority_that_the_kernel_refuses() {
        let given = |class: u16, data: u16| Priority::from_ioprio(class << 13 | data).ioprio();
        assert_eq!(given(0, 5), 0, "no class has no level");
        assert_eq!(given(1, 3), 2 << 13, "real time is not the guest's to take");
        assert_eq!((given(2, 6), given(2, 6 | 8)), (2 << 13 | 6, 2 << 13 | 6), "hints are left out");
        assert_eq!(given(3, 7), 3 << 13);
        assert_eq!((given(4, 0), given(7, 0x1fff)), (0, 0), "unknown classes");
    }
}
