//! Values on the command line, for clap.

use block::{Error, ErrorKind};
use clap::builder::{OsStringValueParser, TypedValueParser};
use drive::parse_integer;
use std::ops::RangeInclusive;
use std::os::unix::ffi::OsStrExt;

/// Reads a file name that will be written into an image, or options with such a name. The text can also hold bytes that
/// are not UTF-8 (see [`image::name_text`]).
pub(crate) fn name_text() -> impl TypedValueParser<Value = String> {
    OsStringValueParser::new().map(|word| image::name_text(word.as_bytes()))
}

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

/// Reads an amount of memory.
pub(crate) fn memory_size(text: &str) -> Result<usize, String> {
    let bytes = drive::parse_size(text).map_err(|error| error.to_string())?;
    usize::try_from(bytes).map_err(|_| "it is more than any memory".to_owned())
}

/// With less memory, one large request would fill it.
const BUFFER_MEMORY_MIN: u64 = 1 << 20;

/// Reads how much memory requests may take for their buffers.
pub(crate) fn buffer_memory(text: &str) -> Result<usize, String> {
    match memory_size(text)? {
        size if size as u64 >= BUFFER_MEMORY_MIN => Ok(size),
        _ => Err("it is less than 1M, which one request may need".to_owned()),
    }
}
