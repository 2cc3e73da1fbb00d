//! Rules of the project that no compiler checks.

use crate::{format_names, workspace};
use anyhow::Result;
use std::path::Path;

/// A source file longer than this tells more than one story.
const LONGEST_FILE_LINES: usize = 600;

/// Files that may be longer, with the reason.
const LONG_FILES: &[(&str, &str)] = &[];

/// Crates with `unsafe`; every other one forbids it.
const UNSAFE_CRATES: &[&str] = &["crates/memory", "crates/engine", "crates/virtio"];

/// Crates that call foreign libraries: each denies `unsafe`, and allows it for this one module.
const FOREIGN_CALLS: &[(&str, &str)] =
    &[("crates/file-rbd/", "crates/file-rbd/src/ffi.rs"), ("crates/nbd-tls/", "crates/nbd-tls/src/ffi.rs")];

/// Crates that parse bytes of guests, images or the wire, and the lints that keep those bytes from causing panics.
const PARSING_CRATES: &[&str] = &[
    "crates/virtio",
    "crates/export-",
    "crates/nbd-wire",
    "crates/format-",
    "crates/image",
    "crates/pio",
    "crates/ata",
];
const PARSING_LINTS: &[&str] = &["unwrap_used", "expect_used", "indexing_slicing", "arithmetic_side_effects"];

/// Files of a thread's own idle contexts: taking one and putting it back touches no shared memory and no atomic.
const THREAD_LOCAL_FILES: &[&str] = &["crates/memory/src/pool/list.rs", "crates/memory/src/pool/magazine.rs"];
const SHARED_WORDS: &[&str] = &["atomic::", "Atomic", "fence(", "Mutex", "RwLock", "Arc<"];

/// Pages that a reader takes in at one sitting, and their highest number of lines.
const PAGES: &[(&str, usize)] = &[("ARCHITECTURE.md", 249), ("README.md", 150), ("docs/decisions/", 80)];

/// Words that date a text, or tell who worked when. Documents and comments speak of the product, for readers of any
/// year.
const DATED_WORDS: &[&str] = &["today", "yesterday", "this day"];
/// Words that, before a number, count somebody's work.
const COUNTED_WORDS: &[&str] = &["issue", "session"];
/// Words that do so before "session". A vhost-user session is a term of the field, and may be a first or a second.
const ORDINALS: &[&str] = &[
    "fourth",
    "fifth",
    "sixth",
    "seventh",
    "eighth",
    "ninth",
    "tenth",
    "eleventh",
    "twelfth",
    "thirteenth",
    "fourteenth",
    "fifteenth",
    "sixteenth",
    "seventeenth",
    "eighteenth",
    "nineteenth",
    "twentieth",
];

/// Ends of the names of structs that gain fields in time.
const OPTION_STRUCTS: &[&str] = &["Options", "Limits", "Setup", "Config", "Rates"];

/// Where every third-party crate comes from.
const CRATES_IO: &str = "registry+https://github.com/rust-lang/crates.io-index";

/// Returns complaints about the tree.
pub(crate) fn check() -> Result<Vec<String>> {
    let texts = workspace::tracked_texts()?;
    let mut complaints = Vec::new();
    for (path, text) in &texts {
        complaints.extend(check_file(path, text));
    }
    complaints.extend(format_names::check(&texts));
    Ok(complaints)
}

fn check_file(path: &Path, text: &str) -> Vec<String> {
    let name = path.to_string_lossy().replace('\\', "/");
    let mut complaints = Vec::new();
    if name.ends_with(".rs") {
        complaints.extend(check_length(&name, text));
        complaints.extend(check_crate_root(&name, text));
        complaints.extend(check_unsafe(&name, text));
        complaints.extend(check_thread_local(&name, text));
        complaints.extend(check_option_structs(&name, text));
    }
    if name == "Cargo.lock" {
        complaints.extend(check_sources(text));
    }
    complaints.extend(check_page(&name, text));
    complaints.extend(check_words(&name, text));
    complaints.extend(check_machine_paths(&name, text));
    complaints
}

fn check_length(name: &str, text: &str) -> Option<String> {
    let lines = text.lines().count();
    let allowed = lines <= LONGEST_FILE_LINES || LONG_FILES.iter().any(|(long, _)| *long == name);
    (!allowed).then(|| format!("{name}: {lines} lines; split it (at most {LONGEST_FILE_LINES})"))
}

fn check_crate_root(name: &str, text: &str) -> Vec<String> {
    let mut complaints = Vec::new();
    if !name.ends_with("src/lib.rs") && !name.ends_with("src/main.rs") {
        return complaints;
    }
    if !text.starts_with("//!") {
        complaints.push(format!("{name}: does not say what the crate is for"));
    }
    let switch = match FOREIGN_CALLS.iter().any(|(calls, _)| name.starts_with(calls)) {
        true => "#![deny(unsafe_code)]",
        false => "#![forbid(unsafe_code)]",
    };
    if !UNSAFE_CRATES.iter().any(|unsafe_crate| name.starts_with(unsafe_crate)) && !text.contains(switch) {
        complaints.push(format!("{name}: lacks {switch}"));
    }
    if PARSING_CRATES.iter().any(|parsing| name.starts_with(parsing)) {
        let denied: String = text.split("#![deny(").skip(1).filter_map(|rest| rest.split(")]").next()).collect();
        let missing: Vec<_> = PARSING_LINTS.iter().filter(|lint| !denied.contains(*lint)).copied().collect();
        if !missing.is_empty() {
            complaints.push(format!("{name}: parses foreign bytes but does not deny clippy's {}", missing.join(", ")));
        }
    }
    complaints
}

/// Complains about `unsafe` in the wrong place, and about files that switch off clippy's check for SAFETY comments.
fn check_unsafe(name: &str, text: &str) -> Option<String> {
    if let Some((_, module)) = FOREIGN_CALLS.iter().find(|(calls, _)| name.starts_with(calls)) {
        // The root allows it for the one module; `deny` makes the compiler check the rest.
        let allowance = concat!("allow(", "unsafe_code)");
        let for_module = format!("#[{allowance}]\nmod ffi;");
        let rest = if name.ends_with("src/lib.rs") { text.replacen(&for_module, "", 1) } else { text.to_owned() };
        if rest.contains(allowance) {
            return Some(format!("{name}: unsafe is for {module} only"));
        }
    }
    let switched_off = concat!("allow(clippy::", "undocumented_unsafe_blocks");
    text.contains(switched_off).then(|| format!("{name}: every unsafe block needs its SAFETY comment"))
}

fn check_thread_local(name: &str, text: &str) -> Option<String> {
    let word = SHARED_WORDS.iter().find(|word| text.contains(**word))?;
    THREAD_LOCAL_FILES.contains(&name).then(|| format!("{name}: '{word}' where nothing is shared between threads"))
}

/// Complains about public structs of options that other programs can build field by field: the next field would break
/// those programs.
fn check_option_structs(name: &str, text: &str) -> Vec<String> {
    if !name.starts_with("crates/") || !name.contains("/src/") || name.starts_with("crates/testkit/") {
        return Vec::new();
    }
    let lines: Vec<&str> = text.lines().collect();
    let mut complaints = Vec::new();
    for (index, line) in lines.iter().enumerate() {
        let Some(rest) = line.strip_prefix("pub struct ").filter(|_| line.ends_with('{')) else { continue };
        let title = rest.split(|letter: char| !letter.is_alphanumeric()).next().unwrap_or(rest);
        let has_public_fields =
            lines[index + 1..].iter().take_while(|line| **line != "}").any(|line| line.starts_with("    pub "));
        if !has_public_fields || !OPTION_STRUCTS.iter().any(|end| title.ends_with(end)) {
            continue;
        }
        let mut above = lines[..index].iter().rev().take_while(|line| !line.is_empty());
        if !above.any(|line| *line == "#[non_exhaustive]") {
            complaints.push(format!(
                "{name}:{}: {title} may gain fields: make it #[non_exhaustive], with a constructor or Default",
                index + 1
            ));
        }
    }
    complaints
}

fn check_sources(lock: &str) -> Vec<String> {
    lock.lines()
        .filter_map(|line| line.strip_prefix("source = "))
        .filter(|source| source.trim_matches('"') != CRATES_IO)
        .map(|source| format!("Cargo.lock: a crate from {source}; all come from crates.io"))
        .collect()
}

fn check_page(name: &str, text: &str) -> Option<String> {
    // A list of pages may be longer.
    let (_, most) = PAGES.iter().find(|(page, _)| name.starts_with(page) && !name.ends_with("/README.md"))?;
    let lines = text.lines().count();
    (lines > *most).then(|| format!("{name}: {lines} lines; a page has at most {most}"))
}

fn check_words(name: &str, text: &str) -> Vec<String> {
    text.lines()
        .enumerate()
        .filter_map(|(index, line)| Some((index, dated(prose(name, line)?)?)))
        .map(|(index, words)| format!("{name}:{}: \"{words}\" dates the text; speak of the product", index + 1))
        .collect()
}

/// Returns the part of a line that is for people: all of it in a document, a comment elsewhere.
fn prose<'a>(name: &str, line: &'a str) -> Option<&'a str> {
    let comment = |mark| line.split_once(mark).map(|(_, comment)| comment);
    match name.rsplit_once('.')?.1 {
        "md" => Some(line),
        "rs" => comment("//"),
        "toml" | "sh" | "yml" | "yaml" => comment("#"),
        _ => None,
    }
}

/// Returns the words that date a text, if there are any.
fn dated(prose: &str) -> Option<String> {
    let words: Vec<String> = prose
        .split(|letter: char| !letter.is_alphanumeric())
        .filter(|word| !word.is_empty())
        .map(str::to_lowercase)
        .collect();
    let pairs = words.windows(2).find(|pair| {
        let is_number = pair[1].bytes().all(|byte| byte.is_ascii_digit());
        is_number && COUNTED_WORDS.contains(&pair[0].as_str())
            || pair[1].starts_with("session") && ORDINALS.contains(&pair[0].as_str())
    });
    let line = format!(" {} ", words.join(" "));
    let alone = DATED_WORDS.iter().find(|word| line.contains(&format!(" {word} ")));
    pairs.map(|pair| pair.join(" ")).or_else(|| alone.map(|word| (*word).to_owned()))
}

/// Complains about paths and hosts of the author's machine.
fn check_machine_paths(name: &str, text: &str) -> Vec<String> {
    let foreign = [concat!("/wo", "rk/"), concat!("/ho", "me/"), concat!("/ro", "ot/"), concat!("art", "ifactory")];
    text.lines()
        .enumerate()
        .flat_map(|(index, line)| {
            foreign.iter().filter(move |foreign| line.contains(**foreign)).map(move |foreign| (index, foreign))
        })
        .map(|(index, foreign)| format!("{name}:{}: names this machine ({foreign})", index + 1))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_crate_that_parses_foreign_bytes_denies_panics() {
        let text = "//! x\n#![forbid(unsafe_code)]\n#![deny(clippy::unwrap_used, clippy::expect_used)]\n";
        let complaints = check_crate_root("crates/format-raw/src/lib.rs", text);
        assert_eq!(complaints.len(), 1);
        assert!(complaints[0].contains("indexing_slicing, arithmetic_side_effects"), "{complaints:?}");
    }

    #[test]
    fn unsafe_is_forbidden_but_where_it_lives() {
        assert_eq!(check_crate_root("crates/memory/src/lib.rs", "//! x").len(), 0);
        assert_eq!(check_crate_root("crates/block/src/lib.rs", "//! x").len(), 1);
        assert_eq!(check_crate_root("crates/block/src/lib.rs", "#![forbid(unsafe_code)]").len(), 1);
        let foreign = "//! x\n#![deny(unsafe_code)]\n#[allow(unsafe_code)]\nmod ffi;\n";
        assert!(check_crate_root("crates/file-rbd/src/lib.rs", foreign).is_empty());
        assert_eq!(check_crate_root("crates/block/src/lib.rs", foreign).len(), 1);
        assert!(check_unsafe("crates/file-rbd/src/lib.rs", foreign).is_none());
        let twice = format!("{foreign}#[allow(unsafe_code)]\nmod other;");
        assert!(check_unsafe("crates/file-rbd/src/lib.rs", &twice).is_some());
        assert!(check_unsafe("crates/file-rbd/src/file.rs", "#[allow(unsafe_code)]").is_some());
    }

    #[test]
    fn what_a_thread_has_for_itself_has_no_atomics() {
        let text = "use std::sync::atomic::AtomicU64;";
        assert!(check_thread_local(THREAD_LOCAL_FILES[0], text).is_some());
        assert!(check_thread_local("crates/memory/src/pool/depot.rs", text).is_none());
        assert!(check_thread_local(THREAD_LOCAL_FILES[0], "use super::magazine::Magazine;").is_none());
        assert!(THREAD_LOCAL_FILES.iter().all(|file| crate::workspace::root().join(file).exists()));
    }

    #[test]
    fn options_that_others_build_field_by_field_are_found() {
        let of = |attributes: &str, body: &str| {
            let text = format!("use x;\n\n/// What to do.\n{attributes}{body}\n    pub speed: u32,\n}}\n");
            check_option_structs("crates/image/src/a.rs", &text)
        };
        let found = of("#[derive(Debug)]\n", "pub struct CopyOptions<T> {");
        assert_eq!(found.len(), 1);
        assert!(found[0].starts_with("crates/image/src/a.rs:5: CopyOptions "), "{found:?}");
        assert!(of("#[derive(Debug)]\n#[non_exhaustive]\n", "pub struct CopyOptions {").is_empty());
        assert!(of("", "pub struct CopyResult {").is_empty());
        assert!(of("", "struct CopyOptions {").is_empty());
        assert!(check_option_structs("crates/a/src/a.rs", "pub struct Options {\n    a: u8,\n}\n").is_empty());
        assert!(check_option_structs("crates/a/src/a.rs", "pub struct Options(Vec<u8>);\n    pub a\n").is_empty());
        assert!(check_option_structs("crates/a/tests/a.rs", "pub struct Options {\n    pub a: u8,\n}\n").is_empty());
    }

    #[test]
    fn machine_paths_and_foreign_registries_are_found() {
        assert_eq!(
            check_machine_paths("a", concat!("x\ncd /ho", "me/me\n")),
            ["a:2: names this machine (/ho".to_owned() + "me/)"]
        );
        assert_eq!(check_sources("source = \"registry+https://example.org/index\"").len(), 1);
        assert_eq!(check_sources(&format!("source = \"{CRATES_IO}\"")).len(), 0);
    }

    #[test]
    fn words_that_date_a_text_are_found_in_documents_and_comments() {
        let dated = [
            ("a.md", "as in issue 12."),
            ("a.md", "The Fifteenth session"),
            ("a.rs", concat!("let a = 1; /", "/ measured in session 3")),
            ("a.rs", concat!("    /", "/", "/ Today's limit.")),
            ("a.toml", "# of this day"),
        ];
        for (name, line) in dated {
            assert_eq!(check_words(name, line).len(), 1, "{line}");
        }
        let timeless = [
            ("a.rs", "let issue = session(7); let today = 1;"),
            ("a.rs", "// issues 12 requests. A session of 8 rings, the second session of a peer"),
            ("a.md", "a vhost-user session has a thread; this session ends"),
            ("a.lock", "issue 12"),
        ];
        for (name, line) in timeless {
            assert_eq!(check_words(name, line).len(), 0, "{line}");
        }
    }

    #[test]
    fn long_pages_are_found() {
        assert!(check_page("ARCHITECTURE.md", &"x\n".repeat(249)).is_none());
        assert!(check_page("ARCHITECTURE.md", &"x\n".repeat(250)).is_some());
        assert!(check_page("docs/decisions/0001-a.md", &"x\n".repeat(81)).is_some());
        assert!(check_page("docs/decisions/README.md", &"x\n".repeat(81)).is_none());
        assert!(check_page("CONTRIBUTING.md", &"x\n".repeat(500)).is_none());
    }

    #[test]
    fn long_files_are_found() {
        assert!(check_length("a.rs", &"x\n".repeat(LONGEST_FILE_LINES)).is_none());
        assert!(check_length("a.rs", &"x\n".repeat(LONGEST_FILE_LINES + 1)).is_some());
    }
}
