//! What qemu-img takes, and what differs here: tables that a command prints and the other name answers from.

mod differences;
mod flags;

#[cfg(test)]
pub(crate) use differences::OTHERS;
pub(crate) use differences::{Difference, ON_PURPOSE, Purpose, difference};
pub(crate) use flags::FLAGS;
#[cfg(test)]
pub(crate) use flags::{Flag, Verb};

/// The qemu-img whose behaviour is kept; programs that call it look for features by this.
pub(crate) const VERSION: &str = "7.2.22";
