//! What the programs say of an image, without where its clusters lie.

use serde_json::{Value, json};

/// What `verb` said, without places. Runs that lie apart in the file only are one run.
pub(super) fn without_places(verb: &str, said: &str) -> String {
    let json: Option<Value> = serde_json::from_str(said).ok();
    match (verb, json) {
        ("check", Some(mut value)) => {
            value.as_object_mut().map(|object| object.remove("fragmented-clusters"));
            format!("{value:#}")
        }
        ("check", None) => said.lines().map(unfragmented).collect::<Vec<_>>().join("\n"),
        ("map", Some(Value::Array(runs))) => format!("{:#}", Value::Array(joined(runs))),
        ("map", None) => joined_rows(said),
        _ => said.to_owned(),
    }
}

/// A line such as `4/32 = 12.50% allocated, 25.00% fragmented, 0.00% compressed clusters`, without its middle.
fn unfragmented(line: &str) -> String {
    let parts = line.split(", ").filter(|part| !part.ends_with("% fragmented"));
    parts.collect::<Vec<_>>().join(", ")
}

fn joined(runs: Vec<Value>) -> Vec<Value> {
    let mut all: Vec<Value> = Vec::new();
    for mut run in runs {
        run["offset"] = json!(run["offset"].is_number());
        let number = |run: &Value, key: &str| run[key].as_u64().unwrap_or(0);
        if let Some(last) = all.last_mut() {
            let end = number(last, "start") + number(last, "length");
            let longer = json!(number(last, "length") + number(&run, "length"));
            let behind = Value::Object(
                run.as_object()
                    .expect("a run")
                    .iter()
                    .map(|(key, value)| match key.as_str() {
                        "start" | "length" => (key.clone(), last[key].clone()),
                        _ => (key.clone(), value.clone()),
                    })
                    .collect(),
            );
            if end == number(&run, "start") && behind == *last {
                last["length"] = longer;
                continue;
            }
        }
        all.push(run);
    }
    all
}

/// Rows of offset, length, place and file.
fn joined_rows(said: &str) -> String {
    let number = |word: &str| u64::from_str_radix(word.trim_start_matches("0x"), 16).ok();
    let mut rows: Vec<(u64, u64, &str)> = Vec::new();
    let mut lines = Vec::new();
    for line in said.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        let row = match words[..] {
            [start, length, place, file] => number(start)
                .zip(number(length))
                .filter(|_| number(place).is_some())
                .map(|(start, length)| (start, length, file)),
            _ => None,
        };
        match (row, rows.last_mut()) {
            (Some((start, length, file)), Some(last)) if last.0 + last.1 == start && last.2 == file => last.1 += length,
            (Some(row), _) => rows.push(row),
            (None, _) => lines.push(line.to_owned()),
        }
    }
    lines.extend(rows.iter().map(|(start, length, file)| format!("{start:#x} {length:#x} {file}")));
    lines.join("\n")
}

#[test]
fn runs_that_lie_apart_in_the_file_only_are_one() {
    let run =
        |start: u64, offset: u64, data: bool| json!({"start": start, "length": 4096, "data": data, "offset": offset});
    let said = json!([run(0, 8192, true), run(4096, 65536, true), run(8192, 0, false)]).to_string();
    let joined: Value = serde_json::from_str(&without_places("map", &said)).unwrap();
    assert_eq!(joined.as_array().map(Vec::len), Some(2), "{joined}");
    assert_eq!(joined[0]["length"], 8192);
    let rows = "Offset Length Mapped to File\n0 0x1000 0x2000 a\n0x1000 0x1000 0x10000 a\n0x2000 0x1000 0x11000 b\n";
    assert_eq!(without_places("map", rows), "Offset Length Mapped to File\n0x0 0x2000 a\n0x2000 0x1000 b");
    let said = "No errors\n4/32 = 12.50% allocated, 25.00% fragmented, 0.00% compressed clusters";
    assert_eq!(without_places("check", said), "No errors\n4/32 = 12.50% allocated, 0.00% compressed clusters");
}
