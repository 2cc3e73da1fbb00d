//! Keys that both sides have (PSK), from their file.

use block::{Error, ErrorKind, Result};
use std::collections::BTreeMap;
use std::fmt;
use std::io::Read as _;
use std::path::Path;

/// A longer file is refused.
const FILE_BYTES_MAX: u64 = 1 << 20;
/// A longer key is refused.
const KEY_BYTES_MAX: usize = 256;
/// Keys by the names of their users, as `psktool` writes them.
#[derive(Default, Clone, PartialEq, Eq)]
pub struct SharedKeys(pub(crate) BTreeMap<Vec<u8>, Vec<u8>>);

impl fmt::Debug for SharedKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedKeys").field("keys", &self.0.len()).finish()
    }
}

fn unhex(text: &[u8]) -> Option<Vec<u8>> {
    let digits = text.chunks(2).map(|pair| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok());
    let is_key = !text.is_empty() && text.len().is_multiple_of(2) && text.iter().all(u8::is_ascii_hexdigit);
    (is_key && text.len() / 2 <= KEY_BYTES_MAX).then(|| digits.collect())?
}

impl SharedKeys {
    /// Reads keys from a file. Each line is `USER:KEY`, the key in hexadecimal digits.
    pub fn in_file(path: &Path) -> Result<Self> {
        let bad = |why: &str| Error::new(ErrorKind::BadOption, format!("TLS keys '{}': {why}", path.display()));
        let mut text = Vec::new();
        let file = std::fs::File::open(path).map_err(|error| bad(&error.to_string()))?;
        file.take(FILE_BYTES_MAX.saturating_add(1)).read_to_end(&mut text).map_err(|error| bad(&error.to_string()))?;
        if text.len() as u64 > FILE_BYTES_MAX {
            return Err(bad("it is too long for a file of keys"));
        }
        let mut keys = BTreeMap::new();
        for (number, line) in (1_u32..).zip(text.split(|byte| *byte == b'\n')) {
            let line = line.trim_ascii();
            if line.is_empty() || line.starts_with(b"#") {
                continue;
            }
            let colon = line.iter().position(|byte| *byte == b':').filter(|colon| *colon > 0);
            let (user, key) = colon.and_then(|colon| line.split_at_checked(colon)).unwrap_or_default();
            // The message must not show the line, which is a secret.
            let key = key.get(1..).and_then(unhex).filter(|_| !user.contains(&0));
            let key =
                key.ok_or_else(|| bad(&format!("line {number} is not USER:KEY with a key in hexadecimal digits")))?;
            keys.insert(user.to_vec(), key);
        }
        if keys.is_empty() {
            return Err(bad("there is no key in it"));
        }
        Ok(Self(keys))
    }

    pub(crate) fn of(&self, user: &[u8]) -> Option<&[u8]> {
        self.0.get(user).map(Vec::as_slice)
    }
}
