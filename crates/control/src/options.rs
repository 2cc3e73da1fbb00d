//! The options of a drive as JSON: an object whose keys are those of `--drive`.

use block::{Error, ErrorKind, Result};
use drive::{DriveOptions, KeyValue, ParsedDrive, parse_key_values};
use serde::de::{Error as _, MapAccess, Visitor};
use serde::ser::SerializeMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;
use std::path::{Path, PathBuf};
use utoipa::openapi::RefOr;
use utoipa::openapi::schema::{AdditionalProperties, AnyOfBuilder, ArrayBuilder, ObjectBuilder, Schema, Type};
use utoipa::{PartialSchema, ToSchema};

/// Options of a drive, in the order in which they were given. In JSON they are an object whose values are strings.
/// Numbers are accepted, too, and `true` and `false` for `on` and `off`. A key that may be repeated (`filter`) takes a
/// list.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Options(Vec<(String, String)>);

impl Options {
    /// Reads `key=value,...`.
    pub fn parse(text: &str) -> Result<Self> {
        // The drive's own parser knows which keys may be repeated, and reports errors in the others.
        match DriveOptions::parse(text)? {
            ParsedDrive::Drive(_) => Ok(Self(split(text))),
            ParsedDrive::Help(help) => Err(Error::new(ErrorKind::BadOption, help)),
        }
    }

    /// Writes `key=value,...`, as [`Options::parse`] reads it.
    #[must_use]
    pub fn to_text(&self) -> String {
        let pairs: Vec<String> = self.0.iter().map(|(key, value)| format!("{key}={}", drive::escape(value))).collect();
        pairs.join(",")
    }

    /// Returns the drive that these options describe.
    pub fn to_drive(&self) -> Result<DriveOptions> {
        match DriveOptions::parse(&self.to_text())? {
            ParsedDrive::Drive(drive) => Ok(*drive),
            ParsedDrive::Help(help) => Err(Error::new(ErrorKind::BadOption, help)),
        }
    }

    /// Takes pairs as they are. [`Options::to_drive`] checks whether they describe a drive.
    pub(crate) fn of_pairs(pairs: impl IntoIterator<Item = (String, String)>) -> Self {
        Self(pairs.into_iter().collect())
    }

    /// Whether nothing is given.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the value of `key`, if it is given.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&str> {
        self.0.iter().find(|(other, _)| other == key).map(|(_, value)| value.as_str())
    }

    /// Returns all pairs, in the order in which they were given.
    pub fn pairs(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(key, value)| (key.as_str(), value.as_str()))
    }

    /// Replaces the value of the first `key` whose value `is_meant`.
    pub(crate) fn replace(&mut self, key: &str, is_meant: impl Fn(&str) -> bool, new: &str) {
        if let Some(value) = self.values_mut(key).find(|value| is_meant(value)) {
            new.clone_into(value);
        }
    }

    /// Replaces all values of `key` that are `is_meant`.
    pub(crate) fn replace_all(&mut self, key: &str, is_meant: impl Fn(&str) -> bool, new: &str) {
        self.values_mut(key).filter(|value| is_meant(value)).for_each(|value| new.clone_into(value));
    }

    /// Makes all paths in the values absolute, by `whole`: whoever opens the drive may have another working directory.
    pub fn make_paths_whole(&mut self, whole: impl Fn(&Path) -> PathBuf) -> Result<()> {
        for (key, value) in &mut self.0 {
            if let Some(path) = drive::with_whole_path(key, value, &whole)? {
                *value = path;
            }
        }
        Ok(())
    }

    fn values_mut(&mut self, key: &str) -> impl Iterator<Item = &mut String> {
        self.0.iter_mut().filter(move |(other, _)| other == key).map(|(_, value)| value)
    }

    /// Replaces all values of `key` with this one.
    pub fn set(&mut self, key: &str, value: impl Into<String>) {
        match self.0.iter_mut().find(|(other, _)| other == key) {
            Some((_, old)) => *old = value.into(),
            None => self.0.push((key.to_owned(), value.into())),
        }
    }

    /// Drops every value of these keys.
    pub fn remove(&mut self, keys: &[&str]) {
        self.0.retain(|(key, _)| !keys.contains(&key.as_str()));
    }
}

/// Other names of keys.
const OTHER_KEYS: [(&str, &str); 2] = [("id", "the same as `name`"), ("num-queues", "the same as `queues`")];

impl PartialSchema for Options {
    fn schema() -> RefOr<Schema> {
        let mut object = ObjectBuilder::new()
            .description(Some(
                "The options of a drive, as `--drive` takes them. A key that may be repeated takes a list.",
            ))
            .additional_properties(Some(AdditionalProperties::FreeForm(false)));
        for (key, takes) in drive::drive_keys().iter().chain(&OTHER_KEYS) {
            let of_type = |kind: Type| ObjectBuilder::new().schema_type(kind);
            let value = AnyOfBuilder::new()
                .description(Some(*takes))
                .item(of_type(Type::String))
                .item(of_type(Type::Integer).minimum(Some(0)))
                .item(of_type(Type::Boolean))
                .item(ArrayBuilder::new().items(of_type(Type::String)));
            object = object.property(*key, value);
        }
        object.into()
    }
}

impl ToSchema for Options {
    fn name() -> std::borrow::Cow<'static, str> {
        "DriveOptions".into()
    }
}

fn split(text: &str) -> Vec<(String, String)> {
    // `parse_key_values` refuses a key that is given twice, so each piece is parsed by itself.
    let mut pairs = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let end = end_of_pair(rest);
        let (pair, after) = rest.split_at(end);
        pairs
            .extend(parse_key_values(pair).unwrap_or_default().into_iter().map(|KeyValue { key, value }| (key, value)));
        rest = after.strip_prefix(',').unwrap_or(after);
    }
    pairs
}

/// Returns the position of the first comma that is not doubled.
fn end_of_pair(text: &str) -> usize {
    let mut commas = text.char_indices().filter(|(_, char)| *char == ',').map(|(at, _)| at).peekable();
    while let Some(at) = commas.next() {
        match commas.peek() {
            Some(next) if *next == at + 1 => drop(commas.next()),
            _ => return at,
        }
    }
    text.len()
}

impl Serialize for Options {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        for (index, (key, value)) in self.0.iter().enumerate() {
            let values: Vec<&str> =
                self.0.iter().filter(|(other, _)| other == key).map(|(_, value)| value.as_str()).collect();
            let is_first = self.0.iter().position(|(other, _)| other == key) == Some(index);
            match values.len() {
                1 => map.serialize_entry(key, value)?,
                _ if is_first => map.serialize_entry(key, &values)?,
                _ => {}
            }
        }
        map.end()
    }
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "an option is a text, a number, true, false or a list of texts")]
enum Value {
    Switch(bool),
    Number(u64),
    Text(String),
    List(Vec<String>),
}

impl<'de> Deserialize<'de> for Options {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(OptionsVisitor)
    }
}

struct OptionsVisitor;

impl<'de> Visitor<'de> for OptionsVisitor {
    type Value = Options;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with the options of a drive")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Options, A::Error> {
        let mut options = Options::default();
        while let Some(key) = map.next_key::<String>()? {
            if options.get(&key).is_some() {
                return Err(A::Error::custom(format!("'{key}' is given twice")));
            }
            if key.contains(['=', ',']) {
                return Err(A::Error::custom(format!("'{key}' is not the name of an option")));
            }
            let values = match map.next_value::<Value>()? {
                Value::Switch(on) => vec![if on { "on" } else { "off" }.to_owned()],
                Value::Number(number) => vec![number.to_string()],
                Value::Text(text) => vec![text],
                Value::List(list) => list,
            };
            options.0.extend(values.into_iter().map(|value| (key.clone(), value)));
        }
        Ok(options)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_survive_json_and_text() {
        let text = "file=/a,,b.qcow2,filter=delay:fixed-ms=1,cache=none,filter=error:every=2,readonly=on";
        let options = Options(split(text));
        assert_eq!(options.to_text(), text);
        let json = serde_json::to_value(&options).unwrap();
        assert_eq!(json["file"], "/a,b.qcow2");
        assert_eq!(json["filter"], serde_json::json!(["delay:fixed-ms=1", "error:every=2"]));
        let back: Options = serde_json::from_value(json).unwrap();
        assert_eq!(back.get("readonly"), Some("on"));
        assert_eq!(back.0.len(), 5);
    }

    #[test]
    fn numbers_and_switches_are_taken_and_repeated_keys_refused() {
        let options: Options = serde_json::from_str(r#"{"readonly": true, "queues": 4, "file": "/x"}"#).unwrap();
        assert_eq!(options.to_text(), "readonly=on,queues=4,file=/x");
        assert!(serde_json::from_str::<Options>(r#"{"file": "/x", "file": "/y"}"#).is_err());
        assert!(serde_json::from_str::<Options>(r#"{"file=/y,cache": "none"}"#).is_err());
    }
}
