//! The flags of qemu-img, and the differences: tables for `img-compat` and for the program under the name `qemu-img`.

mod differences;
mod flags;

#[cfg(test)]
pub(crate) use differences::OTHERS;
pub(crate) use differences::{Difference, ON_PURPOSE, Purpose, difference};
pub(crate) use flags::FLAGS;
#[cfg(test)]
pub(crate) use flags::{Flag, Verb};

/// The version of qemu-img that the program follows; callers detect features by it.
pub(crate) const VERSION: &str = "7.2.22";
