//! Values of which there are a few, each with a name.

use crate::keyval;
use block::{Error, Result};

pub(crate) const SWITCH: [(&str, bool); 2] = [("on", true), ("off", false)];

pub(crate) fn names<'a, T>(choices: &[(&'a str, T)]) -> Vec<&'a str> {
    choices.iter().map(|(name, _)| *name).collect()
}

pub(crate) fn not_a_value(key: &str, value: &str, valid: &[&str]) -> Error {
    keyval::unknown(&format!("value of '{key}':"), value, valid)
}

pub(crate) fn one_of<T: Copy>(key: &str, value: &str, choices: &[(&str, T)]) -> Result<T> {
    let found = choices.iter().find(|(name, _)| *name == value);
    found.map(|(_, choice)| *choice).ok_or_else(|| not_a_value(key, value, &names(choices)))
}

/// Reads a value that is `on` or `off`.
pub fn switch(key: &str, value: &str) -> Result<bool> {
    one_of(key, value, &SWITCH)
}
