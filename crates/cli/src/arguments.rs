//! Values on the command line, for clap.

use block::{Error, ErrorKind};
use drive::parse_integer;
use std::ops::RangeInclusive;

/// Reads a whole number within bounds, for the command line.
pub(crate) fn integer<T: TryFrom<u64>>(
    range: RangeInclusive<u64>,
) -> impl Fn(&str) -> block::Result<T> + Clone + Send + Sync + 'static {
    move |text| {
        let number = parse_integer(text)?;
        let fits = T::try_from(number).ok().filter(|_| range.contains(&number));
        let what = || Error::new(ErrorKind::BadOption, format!("takes {} to {}", range.start(), range.end()));
        fits.ok_or_else(what)
    }
}
