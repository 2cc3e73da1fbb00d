//! Parses and prints sizes as QEMU does: binary units, one letter.

use block::{Error, ErrorKind, Result};

const TOO_LARGE: &str = "it is larger than any disk can be";
const UNITS: [char; 7] = ['b', 'k', 'm', 'g', 't', 'p', 'e'];

/// Parses `512`, `64k`, `1.5G`: a number, perhaps with a decimal point, and a binary unit (b, k, M, G, T, P, E); or
/// `0x1000`. Blanks and a plus sign may come before it.
pub fn parse_size(text: &str) -> Result<u64> {
    let said = without_sign(text);
    let fail = |why: &str| {
        let message = format!("'{text}' is not a size: {why} (examples: 512, 64k, 1.5G, 2T; units are binary)");
        Error::new(ErrorKind::BadOption, message)
    };
    let too_large = || fail(TOO_LARGE);
    // File offsets are signed in every system call.
    let possible = |bytes: &u64| *bytes <= i64::MAX as u64;
    if let Some(digits) = hexadecimal(said) {
        if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err(fail("it is no hexadecimal number (those have no unit)"));
        }
        return u64::from_str_radix(digits, 16).ok().filter(possible).ok_or_else(too_large);
    }
    if let Some(meant) = with_one_letter(said) {
        return Err(fail(&format!("write {meant}")));
    }
    if !said.starts_with(|char: char| char.is_ascii_digit() || char == '.') {
        return Err(fail("it has to start with a number"));
    }
    let (number, shift) = match said.char_indices().next_back() {
        Some((at, last)) if last.is_ascii_alphabetic() => {
            let unit = UNITS.iter().position(|unit| *unit == last.to_ascii_lowercase());
            (&said[..at], unit.ok_or_else(|| fail("the unit is none of b, k, M, G, T, P, E"))? * 10)
        }
        _ => (said, 0),
    };
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let digits = |part: &str| part.bytes().all(|byte| byte.is_ascii_digit());
    if (whole.is_empty() && fraction.is_empty()) || !digits(whole) || !digits(fraction) {
        return Err(fail("what stands before the unit is no number"));
    }
    let whole: u64 = if whole.is_empty() { 0 } else { whole.parse().map_err(|_| too_large())? };
    if shift == 0 && fraction.bytes().any(|digit| digit != b'0') {
        return Err(fail("there is no part of a byte"));
    }
    let fraction = &fraction[..fraction.len().min(18)];
    let scale = 10u128.pow(fraction.len() as u32);
    let part: u128 = if fraction.is_empty() { 0 } else { fraction.parse().map_err(|_| too_large())? };
    // Rounded to the nearest byte, as QEMU does.
    let bytes = (u128::from(whole) << shift) + ((part << shift) + scale / 2) / scale;
    u64::try_from(bytes).ok().filter(possible).ok_or_else(too_large)
}

/// Whether this is a number, perhaps with a unit, but negative or larger than any disk.
#[must_use]
pub fn is_size_out_of_range(text: &str) -> bool {
    let said = text.trim_start_matches(|char: char| char.is_ascii_whitespace());
    match said.strip_prefix('-') {
        Some(positive) => positive.starts_with(|char: char| char.is_ascii_digit()) && parse_size(positive).is_ok(),
        None => parse_size(text).is_err_and(|error| error.to_string().contains(TOO_LARGE)),
    }
}

/// Shortens the unit to one letter: `1GB`, `1GiB` and `1 G` become `1G`.
fn with_one_letter(text: &str) -> Option<String> {
    let number = text.trim_end_matches(|char: char| char.is_ascii_alphabetic() || char == ' ');
    let unit = text.get(number.len()..)?.trim_start();
    let letter = unit.chars().next().filter(|letter| UNITS.contains(&letter.to_ascii_lowercase()))?;
    let is_long = ["b", "ib"].contains(&unit.get(1..)?.to_ascii_lowercase().as_str()) && letter != 'b';
    let is_apart = unit.len() == 1 && number.len() + 1 < text.len();
    let letter = match letter.to_ascii_lowercase() {
        small @ ('b' | 'k') => small,
        other => other.to_ascii_uppercase(),
    };
    let meant = format!("{number}{letter}");
    ((is_long || is_apart) && parse_size(&meant).is_ok()).then_some(meant)
}

/// Parses a whole number as C programs do: `16`, `0x10`, and octal `020`.
pub fn parse_integer(text: &str) -> Result<u64> {
    let said = without_sign(text);
    let (digits, base) = match (hexadecimal(said), said.strip_prefix('0')) {
        (Some(digits), _) => (digits, 16),
        (None, Some(digits)) if !digits.is_empty() => (digits, 8),
        _ => (said, 10),
    };
    let is_number = !digits.is_empty() && digits.chars().all(|digit| digit.is_digit(base));
    is_number.then(|| u64::from_str_radix(digits, base).ok()).flatten().ok_or_else(|| {
        let message = format!("'{text}' is not a whole number (examples: 16, 0x10; behind a leading zero it is octal)");
        Error::new(ErrorKind::BadOption, message)
    })
}

/// Skips blanks and a plus sign, as C's number parsers do.
fn without_sign(text: &str) -> &str {
    let text = text.trim_start_matches(|char: char| char.is_ascii_whitespace());
    text.strip_prefix('+').unwrap_or(text)
}

fn hexadecimal(text: &str) -> Option<&str> {
    text.strip_prefix("0x").or_else(|| text.strip_prefix("0X"))
}

/// Prints `1 GiB`, `1.5 GiB`, `196 KiB`: three significant digits, as qemu-img prints sizes.
#[must_use]
pub fn human_size(bytes: u64) -> String {
    const NAMES: [&str; 7] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    // As in qemu-img, the unit keeps the number below 1000, so that three digits suffice.
    let mut index = 0;
    let mut value = bytes as f64;
    while value >= 1000.0 && index + 1 < NAMES.len() {
        value /= 1024.0;
        index += 1;
    }
    let digits = match value {
        v if v >= 100.0 => 0,
        v if v >= 10.0 => 1,
        v if v >= 1.0 => 2,
        _ => 3,
    };
    let mut number = format!("{value:.digits$}");
    if number.contains('.') {
        number.truncate(number.trim_end_matches('0').trim_end_matches('.').len());
    }
    format!("{number} {}", NAMES[index])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_qemu_reads_them() {
        let good = [
            ("0", 0),
            ("512", 512),
            ("512b", 512),
            ("64k", 65536),
            ("64K", 65536),
            ("1.5G", 1536 << 20),
            ("0.5k", 512),
            (".5k", 512),
            ("4T", 4 << 40),
            ("7E", 7 << 60),
            ("0x1000", 4096),
            ("0X1E", 30),
            ("010", 10),
            ("1.0", 1),
            ("1.k", 1024),
            ("1.9999999999k", 2048),
            ("0.0004k", 0),
            ("+5k", 5120),
            (" \t+0x10", 16),
        ];
        for (text, bytes) in good {
            assert_eq!(parse_size(text).unwrap(), bytes, "{text}");
        }
        for text in [
            "",
            "k",
            "1 G",
            "-1",
            ".k",
            ".5",
            "1.5",
            "1.5b",
            "1.00000000000000000001",
            "++5k",
            "+ 5k",
            "5k ",
            ".",
            "1x",
            "8E",
            "99999999999999999999",
            "1e3",
            "1GB",
            "４G",
            "0x",
            "0x1k",
            "0xffffffffffffffff",
        ] {
            assert!(parse_size(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_unit_of_several_letters_is_answered_with_the_one_to_write() {
        for (text, meant) in [("1GB", "1G"), ("64KiB", "64k"), ("1.5 T", "1.5T"), ("20gb", "20G"), ("1 MiB", "1M")] {
            let message = parse_size(text).unwrap_err().to_string();
            assert!(message.contains(&format!("write {meant} ")), "{text}: {message}");
        }
        for text in ["1Gx", "GB", "1QB", "1bb"] {
            assert!(!parse_size(text).unwrap_err().to_string().contains("write"), "{text}");
        }
    }

    #[test]
    fn what_is_no_number_at_all_is_not_out_of_range() {
        for (text, out) in
            [("-5", true), ("9E", true), ("99999999999999999999", true), ("foo", false), ("-x", false), ("1M", false)]
        {
            assert_eq!(is_size_out_of_range(text), out, "{text}");
        }
    }

    #[test]
    fn whole_numbers_say_their_base_themselves() {
        for (text, number) in [
            ("0", 0),
            ("16", 16),
            ("0x10", 16),
            ("0XfF", 255),
            ("020", 16),
            (" +7", 7),
            ("18446744073709551615", u64::MAX),
        ] {
            assert_eq!(parse_integer(text).unwrap(), number, "{text}");
        }
        for text in ["", "0x", "08", "-1", "5k", "1.5", "0x+1", "++1", "18446744073709551616", "1 ", "0x 1"] {
            assert!(parse_integer(text).is_err(), "{text}");
        }
    }

    #[test]
    fn sizes_are_written_as_qemu_img_writes_them() {
        let pairs = [
            (0, "0 B"),
            (512, "512 B"),
            (1000, "0.977 KiB"),
            (200_704, "196 KiB"),
            (1 << 30, "1 GiB"),
            (1536 << 20, "1.5 GiB"),
            (u64::MAX, "16 EiB"),
        ];
        for (bytes, text) in pairs {
            assert_eq!(human_size(bytes), text);
        }
    }
}
