//! Parses `key=value,key=value` as QEMU writes it: a doubled comma stands for a comma in a value.

use block::{Error, ErrorKind, Result};

/// One `key=value`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyValue {
    /// The text left of the first `=`.
    pub key: String,
    /// The text right of the first `=`.
    pub value: String,
}

/// Splits an option string. A key without a value, an empty key and a key given twice are errors.
pub fn parse(text: &str) -> Result<Vec<KeyValue>> {
    parse_with_repeats(text, &[])
}

/// As [`parse`], but some keys may be repeated.
pub fn parse_with_repeats(text: &str, repeats: &[&str]) -> Result<Vec<KeyValue>> {
    let mut pairs: Vec<KeyValue> = Vec::new();
    for part in split_at_single_commas(text) {
        let Some((key, value)) = part.split_once('=') else {
            let part = image::shown(&part);
            return Err(bad(format!("'{part}' is not of the form key=value (a comma in a value is written ',,')")));
        };
        if key.is_empty() {
            return Err(bad(format!("'{}' has no key before its '='", image::shown(&part))));
        }
        if !repeats.contains(&key) && pairs.iter().any(|pair| pair.key == key) {
            return Err(bad(format!("'{key}' is given twice")));
        }
        pairs.push(KeyValue { key: key.to_owned(), value: value.to_owned() });
    }
    Ok(pairs)
}

/// Splits the argument of `-o`. A key alone means `on`; with `no` in front of it, `off`. If a key is repeated, all
/// pairs are returned, and the last one counts.
pub fn parse_options(text: &str) -> Result<Vec<KeyValue>> {
    let pair = |part: String| match part.split_once('=') {
        Some(("", _)) => Err(bad(format!("'{}' has no key before its '='", image::shown(&part)))),
        Some((key, value)) => Ok(KeyValue { key: key.to_owned(), value: value.to_owned() }),
        None if part.is_empty() => {
            Err(bad(format!("'{}' has nothing between two commas, or beside one", image::shown(text))))
        }
        None => {
            let (key, value) = part.strip_prefix("no").map_or((part.as_str(), "on"), |key| (key, "off"));
            Ok(KeyValue { key: key.to_owned(), value: value.to_owned() })
        }
    };
    split_at_single_commas(text).into_iter().map(pair).collect()
}

/// Whether `help` or `?` is an item of an option string.
#[must_use]
pub fn asks_for_help(text: &str) -> bool {
    split_at_single_commas(text).iter().any(|part| matches!(part.as_str(), "help" | "?"))
}

/// Escapes a value so that [`parse`] (and QEMU) read it back.
#[must_use]
pub fn escape(value: &str) -> String {
    value.replace(',', ",,")
}

fn split_at_single_commas(text: &str) -> Vec<String> {
    let mut parts = vec![String::new()];
    let mut chars = text.chars().peekable();
    while let Some(char) = chars.next() {
        let last = parts.len() - 1;
        match char {
            ',' if chars.peek() == Some(&',') => {
                chars.next();
                parts[last].push(',');
            }
            ',' => parts.push(String::new()),
            other => parts[last].push(other),
        }
    }
    parts
}

/// Makes an error for a word that is not in `valid`: "unknown key 'formt': did you mean 'format'? Valid keys: file,
/// format".
#[must_use]
pub fn unknown(what: &str, word: &str, valid: &[&str]) -> Error {
    let guess = closest(word, valid).map(|close| format!(", did you mean '{close}'?")).unwrap_or_default();
    bad(format!("unknown {what} '{}'{guess} (valid: {})", image::shown(word), valid.join(", ")))
}

fn bad(message: String) -> Error {
    Error::new(ErrorKind::BadOption, message)
}

/// Returns the word of `valid` that was most likely meant by `word`.
fn closest<'a>(word: &str, valid: &[&'a str]) -> Option<&'a str> {
    let lower = word.to_lowercase().replace('-', "_");
    let scored = valid.iter().map(|name| (strsim::osa_distance(&lower, &name.replace('-', "_")), *name));
    let (edits, name) = scored.min_by_key(|(edits, _)| *edits)?;
    let close = edits <= 2 && edits * 2 < name.len().max(2) || !lower.is_empty() && name.starts_with(&lower);
    close.then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn doubled_commas_are_commas_and_the_first_equals_sign_splits() {
        let pairs = parse("file=a,,b=c.img,serial=,format=raw").unwrap();
        let read: Vec<_> = pairs.iter().map(|pair| (pair.key.as_str(), pair.value.as_str())).collect();
        assert_eq!(read, [("file", "a,b=c.img"), ("serial", ""), ("format", "raw")]);
        assert_eq!(parse(&format!("file={}", escape("x,,y,"))).unwrap()[0].value, "x,,y,");
    }

    #[test]
    fn malformed_options_are_refused() {
        for text in ["", "file", "=x", "file=a,", "file=a,,,format=raw=,x", "file=a,file=b"] {
            assert!(parse(text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn a_word_that_is_refused_is_shown_without_secrets() {
        let given = [
            "https://me:secret@h/a",
            "=https://me:secret@h/a",
            "rbd:p/i:key=secret",
            "https://h/a?sig=secret",
            "nbd://me:secret@h/a",
        ];
        for text in given {
            let mut errors: Vec<Error> = [parse(text).err(), parse_options(text).err()].into_iter().flatten().collect();
            errors.extend(parse_options(&format!("{text},,,")).err());
            errors.push(unknown("key", text, &["file"]));
            errors.extend(crate::DriveOptions::parse(&format!("{text},file=/a")).err());
            errors.extend(crate::DriveOptions::parse(&format!("engine={text},file=/a")).err());
            for error in errors {
                assert!(!error.to_string().contains("secret"), "{error}");
            }
        }
    }

    #[test]
    fn an_option_alone_is_a_switch_and_may_come_again() {
        let pairs = parse_options("lazy,size=1,nolazy,size=a,,b=c").unwrap();
        let read: Vec<_> = pairs.iter().map(|pair| (pair.key.as_str(), pair.value.as_str())).collect();
        assert_eq!(read, [("lazy", "on"), ("size", "1"), ("lazy", "off"), ("size", "a,b=c")]);
        for text in ["", ",", "a,", ",a", "=x"] {
            assert!(parse_options(text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn help_is_asked_for_by_a_word_of_its_own() {
        for text in ["help", "?", "a=b,help", "?,a=b"] {
            assert!(asks_for_help(text), "{text:?}");
        }
        for text in ["", "file=help", "helper", "file=a,,help", "a=?"] {
            assert!(!asks_for_help(text), "{text:?}");
        }
    }

    #[test]
    fn a_misspelt_word_is_guessed_and_a_strange_one_is_not() {
        let valid = ["file", "format", "queue-size", "none"];
        for (word, meant) in [("fromat", "format"), ("queue_size", "queue-size"), ("File", "file"), ("form", "format")]
        {
            let message = unknown("key", word, &valid).to_string();
            assert!(message.contains(&format!("did you mean '{meant}'?")), "{message}");
        }
        let message = unknown("key", "xyzzy", &valid).to_string();
        assert!(!message.contains("did you mean"), "{message}");
        assert!(message.contains("valid: file, format, queue-size, none"), "{message}");
    }
}
