//! JSON that people and programs wrote. What is wrong with it is said in their words, with the place.

use serde::de::DeserializeOwned;
use std::fmt;

/// What is wrong with a text.
#[derive(Debug)]
pub(crate) struct Wrong {
    /// The field, if it is known: `disks[0].name`.
    pub(crate) field: Option<String>,
    pub(crate) what: String,
}

impl fmt::Display for Wrong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.field {
            Some(field) => write!(f, "{field}: {}", self.what),
            None => f.write_str(&self.what),
        }
    }
}

/// Reads an object of JSON, and nothing behind it.
pub(crate) fn object<T: DeserializeOwned>(text: &[u8]) -> Result<T, Wrong> {
    // A list would be taken as the values of the fields in their order.
    if text.trim_ascii_start().first() != Some(&b'{') {
        return Err(Wrong { field: None, what: "it is not an object of JSON".to_owned() });
    }
    let mut deserializer = serde_json::Deserializer::from_slice(text);
    let value = serde_path_to_error::deserialize(&mut deserializer).map_err(|error| {
        let path = error.path().to_string();
        let field = Some(path).filter(|path| path != ".");
        Wrong { field, what: block::in_plain_words(&error.inner().to_string()) }
    })?;
    deserializer.end().map_err(|error| Wrong { field: None, what: error.to_string() })?;
    Ok(value)
}
