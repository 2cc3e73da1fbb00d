//! Names of files in headers: bytes, which need not be text.
//!
//! Everything above treats names as text. A byte that is not part of valid text becomes a character of Unicode's last
//! private area: U+10FF00 plus the byte. A name may contain such a character itself: then its bytes are escaped. So
//! every name has a unique text, and can be restored from it.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;

const FIRST: u32 = 0x10_ff00;

/// Returns the byte that an escape character stands for; `None` for other characters.
#[must_use]
pub fn escaped_byte(char: char) -> Option<u8> {
    u8::try_from(u32::from(char).checked_sub(FIRST)?).ok().filter(|byte| !byte.is_ascii())
}

/// Converts a file's name, from a header or a user, to text.
#[must_use]
pub fn name_text(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len());
    let escape = |text: &mut String, bytes: &[u8]| {
        text.extend(bytes.iter().filter_map(|byte| char::from_u32(FIRST.saturating_add(u32::from(*byte)))));
    };
    for chunk in bytes.utf8_chunks() {
        for char in chunk.valid().chars() {
            match escaped_byte(char) {
                None => text.push(char),
                Some(_) => escape(&mut text, char.encode_utf8(&mut [0; 4]).as_bytes()),
            }
        }
        escape(&mut text, chunk.invalid());
    }
    text
}

/// Converts a text back to the name in the host's file system.
#[must_use]
pub fn os_name(text: &str) -> OsString {
    let mut bytes = Vec::with_capacity(text.len());
    for char in text.chars() {
        match escaped_byte(char) {
            Some(byte) => bytes.push(byte),
            None => bytes.extend(char.encode_utf8(&mut [0; 4]).as_bytes()),
        }
    }
    OsString::from_vec(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_comes_back_from_its_text_and_text_stays_as_it_is() {
        for name in ["base.raw", "täglich/база.qcow2", "\u{10fffd}", "\u{10ff80}x", ""] {
            assert_eq!(os_name(&name_text(name.as_bytes())), name);
        }
        assert_eq!(name_text("täglich".as_bytes()), "täglich");
        for bytes in [&b"b\xff\xfe.raw"[..], b"\xc3", b"\xf4\x8f\xbe\x80\xff", b"\x80\xc3\xa4"] {
            let text = name_text(bytes);
            assert_eq!(os_name(&text).into_vec(), bytes);
            assert!(text.chars().any(|char| escaped_byte(char).is_some()), "{text:?}");
        }
    }
}
