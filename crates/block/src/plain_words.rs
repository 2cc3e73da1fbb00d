//! What serde says of a value of the wrong form, in words for a person.
//!
//! Whoever wrote a file or a request knows objects, lists, texts and numbers. Serde names the types of the program that
//! reads them: a `struct`, a `sequence`, a `u16`.

/// Returns the message of an error of serde's, as its readers of JSON and TOML word it, without the names of Rust's
/// types.
#[must_use]
pub fn in_plain_words(message: &str) -> String {
    let (what, place) = split_place(message);
    let said = wrong_value(what).or_else(|| wrong_length(what)).or_else(|| unknown_name(what));
    format!("{}{place}", said.unwrap_or_else(|| what.to_owned()))
}

/// Splits off where the readers found it: ` at line 3 column 14`.
fn split_place(message: &str) -> (&str, &str) {
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let is_place = |place: &str| {
        let numbers = place.strip_prefix(" at line ").and_then(|rest| rest.split_once(" column "));
        numbers.is_some_and(|(line, column)| is_number(line) && is_number(column))
    };
    let at = message.rfind(" at line ").unwrap_or(message.len());
    message.split_at_checked(at).filter(|(_, place)| is_place(place)).unwrap_or((message, ""))
}

fn wrong_value(what: &str) -> Option<String> {
    let rest = what.strip_prefix("invalid type: ").or_else(|| what.strip_prefix("invalid value: "))?;
    // What was found may hold any text.
    let (found, wanted) = rest.rsplit_once(", expected ")?;
    Some(format!("{} stands where {} belongs", found_in(found), wanted_in(wanted)))
}

fn wrong_length(what: &str) -> Option<String> {
    let (count, wanted) = what.strip_prefix("invalid length ")?.split_once(", expected ")?;
    Some(format!("a list of {count} values stands where {} belongs", wanted_in(wanted)))
}

fn unknown_name(what: &str) -> Option<String> {
    if let Some(rest) = what.strip_prefix("unknown variant ") {
        return Some(format!("unknown value {rest}"));
    }
    what.starts_with("data did not match any variant").then(|| "the value has a form that is not known here".to_owned())
}

/// What serde calls an unexpected value.
fn found_in(found: &str) -> String {
    let value = |kind: &str| found.strip_prefix(kind);
    if let Some(value) = value("boolean ") {
        return value.to_owned();
    }
    if let Some(value) = value("integer ").or_else(|| value("floating point ")) {
        return format!("the number {value}");
    }
    if let Some(value) = value("string ").or_else(|| value("character ")) {
        return format!("the text {value}");
    }
    match found {
        "sequence" => "a list".to_owned(),
        "map" | "newtype variant" | "struct variant" | "tuple variant" | "enum" => "an object".to_owned(),
        "unit variant" => "a text".to_owned(),
        "unit value" | "Option value" => "null".to_owned(),
        other => other.to_owned(),
    }
}

/// What serde calls a type, with its article.
fn wanted_in(wanted: &str) -> String {
    let is_a = |kinds: &[&str]| kinds.iter().any(|kind| wanted.starts_with(kind));
    if is_a(&["struct ", "tuple struct ", "internally tagged enum ", "adjacently tagged enum "]) {
        return "an object".to_owned();
    }
    if is_a(&["enum ", "variant identifier", "field identifier"]) {
        return "a name that is known here".to_owned();
    }
    let plain = match wanted {
        "a map" | "map" => "an object",
        "a sequence" | "sequence" => "a list",
        "a string" | "string" | "a borrowed string" | "str" => "a text",
        "path string" => "a path",
        "string or map" => "a text or an object",
        "a boolean" | "bool" => "true or false",
        "u8" => "a whole number up to 255",
        "u16" => "a whole number up to 65535",
        "u32" => "a whole number up to 4294967295",
        "u64" | "u128" | "usize" => "a whole number that is not negative",
        "i8" | "i16" | "i32" | "i64" | "i128" | "isize" => "a whole number",
        "f32" | "f64" => "a number",
        "unit" => "null",
        "option" => "a value or null",
        other if other.starts_with("a nonzero ") => "a whole number above zero",
        other => other,
    };
    plain.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_serde_says_is_said_in_plain_words() {
        for (said, plain) in [
            (
                "invalid type: sequence, expected struct Record at line 1 column 0",
                "a list stands where an object belongs at line 1 column 0",
            ),
            (
                "invalid length 0, expected struct Record with 3 elements at line 1 column 2",
                "a list of 0 values stands where an object belongs at line 1 column 2",
            ),
            (
                "invalid value: integer `70000`, expected u16",
                "the number `70000` stands where a whole number up to 65535 belongs",
            ),
            (
                "invalid type: floating point `1.5`, expected u64",
                "the number `1.5` stands where a whole number that is not negative belongs",
            ),
            ("invalid type: boolean `true`, expected a string", "`true` stands where a text belongs"),
            ("invalid type: map, expected a sequence", "an object stands where a list belongs"),
            ("invalid type: null, expected string or map", "null stands where a text or an object belongs"),
            (
                r#"invalid type: string "x, expected struct Y", expected a boolean"#,
                r#"the text "x, expected struct Y" stands where true or false belongs"#,
            ),
            ("unknown variant `a`, expected `b` or `c`", "unknown value `a`, expected `b` or `c`"),
            (
                "data did not match any variant of untagged enum Value at line 1 column 9",
                "the value has a form that is not known here at line 1 column 9",
            ),
        ] {
            assert_eq!(in_plain_words(said), plain);
        }
    }

    #[test]
    fn other_messages_stay() {
        for said in [
            "missing field `name` at line 1 column 2",
            "unknown field `map`, expected one of `struct`, `enum`",
            "EOF while parsing an object at line 1 column 1",
            "expected value at line one column two",
            "'queues' is given twice",
            "",
        ] {
            assert_eq!(in_plain_words(said), said);
        }
    }
}
