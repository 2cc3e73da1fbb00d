//! Differences that are known and still to be removed: `known.txt`, in which nothing may be added without a look.

use super::judge::missing_words;
use super::{Finding, Kind};
use std::collections::BTreeSet;
use std::path::Path;

/// The list, one difference a line.
pub(crate) struct Known(BTreeSet<String>);

impl Known {
    pub(crate) fn read() -> Self {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/generated_lines/known.txt");
        let text = std::fs::read_to_string(path).expect("a list");
        Self(text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')).map(str::to_owned).collect())
    }

    pub(crate) fn has(&self, finding: &Finding) -> bool {
        self.0.contains(&entry(finding))
    }
}

/// A finding as the list names it. Missing words are named by the verb and the words, wherever they are missing; all
/// else by its whole command line.
pub(crate) fn entry(finding: &Finding) -> String {
    match finding.kind {
        Kind::Words => {
            let missing = missing_words(&finding.ours, &finding.theirs);
            let missing: Vec<String> = missing.into_iter().map(without_values).collect();
            format!("Words: {}: {}", finding.line[0], missing.join(": "))
        }
        kind => format!("{kind:?}: {}", finding.line.join(" ")),
    }
}

/// A message with `'...'` for what stands between quotes, and `N` for numbers.
fn without_values(message: &str) -> String {
    let parts = message.split('\'').enumerate();
    let quoted: Vec<&str> = parts.map(|(index, part)| if index % 2 == 1 { "..." } else { part }).collect();
    let mut text = String::new();
    for char in quoted.join("'").chars() {
        match char.is_ascii_digit() {
            true if text.ends_with('N') => {}
            true => text.push('N'),
            false => text.push(char),
        }
    }
    text
}
