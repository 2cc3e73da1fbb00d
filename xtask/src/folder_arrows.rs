//! The folders inside a crate and their arrows: which folder may name which, read from the paths in the source.
//!
//! A path begins with `crate::`, or with `super::` as often as it takes to leave the folder; other paths stay inside it.
//! Code that is compiled for tests only may name everything, and so may the crate's root.

use anyhow::{Context, Result};
use std::path::Path;

/// One folder (or file) at the top of a crate's `src`, and the folders below that it may name.
struct Folder {
    name: &'static str,
    below: &'static [&'static str],
}

/// A crate whose folders have arrows, top to bottom.
struct House {
    /// Its folder under `crates`.
    name: &'static str,
    folders: &'static [Folder],
    /// Modules at the top that are for tests only.
    for_tests: &'static [&'static str],
    /// Folders in which no module names another one.
    apart: &'static [&'static str],
}

const HOUSES: &[House] = &[
    House {
        name: "format-qcow2",
        folders: &[
            Folder { name: "edit", below: &["live", "check", "layout"] },
            Folder { name: "live", below: &["check", "layout"] },
            Folder { name: "check", below: &["layout"] },
            Folder { name: "layout", below: &[] },
        ],
        for_tests: &["fixture"],
        apart: &[],
    },
    House {
        name: "engine",
        folders: &[
            Folder { name: "reactor", below: &["queue", "uring", "base"] },
            Folder { name: "open", below: &["queue", "uring", "aio", "file", "base"] },
            Folder { name: "queue", below: &["uring", "aio", "workers", "request", "file", "base"] },
            Folder { name: "uring", below: &["workers", "route", "request", "file", "base"] },
            Folder { name: "aio", below: &["workers", "route", "request", "file", "base"] },
            Folder { name: "workers", below: &["route", "request", "file", "base"] },
            Folder { name: "route", below: &["request", "file", "base"] },
            Folder { name: "request", below: &["file", "base"] },
            Folder { name: "file", below: &["base"] },
            Folder { name: "base", below: &[] },
        ],
        for_tests: &[],
        apart: &[],
    },
    House {
        name: "image",
        folders: &[
            Folder { name: "online", below: &["open", "chain", "guess", "file_name"] },
            Folder { name: "offline", below: &["open", "chain", "guess", "file_name"] },
            Folder { name: "open", below: &["chain", "guess", "file_name"] },
            Folder { name: "filters", below: &[] },
            Folder { name: "null", below: &[] },
            Folder { name: "chain", below: &["guess", "file_name"] },
            Folder { name: "guess", below: &["file_name"] },
            Folder { name: "file_name", below: &["nbd_place"] },
            Folder { name: "nbd_place", below: &[] },
        ],
        for_tests: &[],
        apart: &[],
    },
    House {
        name: "cli",
        folders: &[
            Folder { name: "qemu_img", below: &["commands", "images", "output", "compat", "threads", "arguments"] },
            Folder {
                name: "commands",
                below: &[
                    "images",
                    "output",
                    "compat",
                    "threads",
                    "scratch",
                    "signals",
                    "arguments",
                    "machine",
                    "nbd_options",
                ],
            },
            Folder { name: "machine", below: &["output"] },
            Folder { name: "nbd_options", below: &[] },
            Folder { name: "images", below: &["output"] },
            Folder { name: "output", below: &["signals"] },
            Folder { name: "compat", below: &[] },
            Folder { name: "threads", below: &[] },
            Folder { name: "scratch", below: &[] },
            Folder { name: "signals", below: &[] },
            Folder { name: "arguments", below: &[] },
        ],
        for_tests: &[],
        apart: &["commands"],
    },
];

/// Complains about every arrow between folders that the table does not have.
pub(crate) fn check() -> Result<Vec<String>> {
    let mut complaints = Vec::new();
    for house in HOUSES {
        let source = crate::workspace::root().join("crates").join(house.name).join("src");
        // Files of tests lie beside what they test.
        let is_of_tests = |path: &Path| path.file_stem().is_some_and(|stem| stem.to_string_lossy().ends_with("_tests"));
        for path in rust_files(&source)?.into_iter().filter(|path| !is_of_tests(path)) {
            let inside = path.strip_prefix(&source).context("a file outside its folder")?;
            let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
            let file = format!("crates/{}/src/{}", house.name, inside.display());
            complaints.extend(complaints_of(house, &module_of(inside), &text).map(|what| format!("{file}:{what}")));
        }
    }
    Ok(complaints)
}

/// Returns all Rust files below a folder, in order.
fn rust_files(folder: &Path) -> Result<Vec<std::path::PathBuf>> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).with_context(|| format!("cannot list {}", folder.display()))? {
        let path = entry?.path();
        if path.is_dir() {
            files.extend(rust_files(&path)?);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

/// Returns the module of a file below `src`: `live/load.rs` is `live::load`, `live/mod.rs` is `live`, `lib.rs` and
/// `main.rs` are the root.
fn module_of(file: &Path) -> Vec<String> {
    let names = file.with_extension("");
    let mut module: Vec<String> = names.iter().map(|name| name.to_string_lossy().into_owned()).collect();
    if module.last().is_some_and(|last| last == "mod" || module.len() == 1 && (last == "lib" || last == "main")) {
        module.pop();
    }
    module
}

/// Returns the complaints about the arrows of one file, each with its line.
fn complaints_of(house: &House, module: &[String], text: &str) -> impl Iterator<Item = String> {
    let from = module.first().cloned();
    let row = from.as_ref().and_then(|from| house.folders.iter().find(|folder| folder.name == from));
    let mut complaints = Vec::new();
    match (&from, row) {
        (Some(from), None) if !house.for_tests.contains(&from.as_str()) => {
            complaints.push(format!("1: {from} is in no row of the table of folders"));
        }
        (Some(from), Some(row)) => {
            for Named { line, name, inside } in names_in(text, module) {
                let own = module.get(1);
                let is_sibling = own.is_some() && inside.is_some() && own != inside.as_ref();
                if name == *from && is_sibling && house.apart.contains(&row.name) {
                    let [own, other] = [own, inside.as_ref()].map(|name| name.map_or("", String::as_str));
                    complaints.push(format!("{line}: {own} names {other}: what both need lies beneath {from}"));
                }
                if name == *from || row.below.contains(&name.as_str()) {
                    continue;
                }
                complaints.push(match house.folders.iter().any(|folder| folder.name == name) {
                    true => format!("{line}: {from} names {name}: no such arrow in the table of folders"),
                    false => format!("{line}: {from} takes {name} from the crate's root: name the folder it is in"),
                });
            }
        }
        _ => {}
    }
    complaints.into_iter()
}

/// The first two parts of a path, from the crate's root, and its line.
#[derive(Debug, PartialEq, Eq)]
struct Named {
    line: usize,
    name: String,
    inside: Option<String>,
}

/// Returns what the code in a module names by paths that begin with `crate::` or `super::`.
fn names_in(text: &str, module: &[String]) -> Vec<Named> {
    let tokens = tokens(text);
    let mut reader = Reader { tokens: &tokens, at: 0, module: module.to_vec(), found: Vec::new() };
    reader.items(None);
    reader.found
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Token {
    line: usize,
    text: String,
}

/// Splits a text into names, `::` and single characters, without comments and literals.
fn tokens(text: &str) -> Vec<Token> {
    let mut tokens = Vec::new();
    let (mut rest, mut line) = (text, 1);
    while let Some(first) = rest.chars().next() {
        let is_name = |c: char| c.is_alphanumeric() || c == '_';
        let raw = raw_string_bytes(rest);
        let length = if rest.starts_with("//") {
            rest.find('\n').unwrap_or(rest.len())
        } else if rest.starts_with("/*") {
            block_comment_bytes(rest)
        } else if raw > 0 {
            raw
        } else if first == '"' {
            quoted_bytes(rest)
        } else if first == '\'' {
            char_bytes(rest)
        } else {
            let length = match first {
                _ if is_name(first) => rest.find(|c| !is_name(c)).unwrap_or(rest.len()),
                ':' if rest.starts_with("::") => 2,
                _ => first.len_utf8(),
            };
            if !first.is_whitespace() {
                tokens.push(Token { line, text: rest[..length].to_owned() });
            }
            length
        };
        line += rest[..length].matches('\n').count();
        rest = &rest[length..];
    }
    tokens
}

/// Returns the length of the block comment at the beginning of a text; they nest.
fn block_comment_bytes(text: &str) -> usize {
    let (mut depth, mut at) = (0, 0);
    while at < text.len() {
        let (step, change) = match &text.as_bytes()[at..] {
            [b'/', b'*', ..] => (2, 1),
            [b'*', b'/', ..] => (2, -1),
            _ => (1, 0),
        };
        at += step;
        depth += change;
        if depth == 0 {
            break;
        }
    }
    at
}

/// Returns the length of the raw string at the beginning of a text, or 0.
fn raw_string_bytes(text: &str) -> usize {
    let after = text.strip_prefix("br").or_else(|| text.strip_prefix('r'));
    let Some(after) = after else { return 0 };
    let hashes = after.len() - after.trim_start_matches('#').len();
    if !after[hashes..].starts_with('"') {
        return 0;
    }
    let end = format!("\"{}", "#".repeat(hashes));
    let start = text.len() - after.len() + hashes + 1;
    text[start..].find(&end).map_or(text.len(), |found| start + found + end.len())
}

/// Returns the length of the string at the beginning of a text.
fn quoted_bytes(text: &str) -> usize {
    let mut escaped = true;
    for (at, c) in text.char_indices() {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            '"' => return at + 1,
            _ => {}
        }
    }
    text.len()
}

/// Returns the length of the character literal at the beginning of a text; for a lifetime, only its tick counts.
fn char_bytes(text: &str) -> usize {
    let mut chars = text.char_indices().skip(1);
    match (chars.next(), chars.next()) {
        (Some((_, '\\')), _) => text[2..].char_indices().skip(1).find(|(_, c)| *c == '\'').map_or(1, |(at, _)| at + 3),
        (Some(_), Some((at, '\''))) => at + 1,
        _ => 1,
    }
}

/// Walks the tokens of a file.
struct Reader<'a> {
    tokens: &'a [Token],
    at: usize,
    /// The module that the token at `at` is in.
    module: Vec<String>,
    found: Vec<Named>,
}

impl Reader<'_> {
    fn text(&self, ahead: usize) -> &str {
        self.tokens.get(self.at + ahead).map_or("", |token| token.text.as_str())
    }

    fn line(&self) -> usize {
        self.tokens.get(self.at).map_or(0, |token| token.line)
    }

    /// Reads to the end of a block, or of the file; `inside` is the block's module.
    fn items(&mut self, inside: Option<String>) {
        let opened = inside.is_some();
        self.module.extend(inside);
        let mut depth = 0;
        while self.at < self.tokens.len() {
            match (self.text(0), self.text(1)) {
                ("#", "[") if self.is_for_tests() => self.skip_item(),
                ("mod", name) if self.text(2) == "{" => {
                    let name = name.to_owned();
                    self.at += 3;
                    self.items(Some(name));
                }
                ("crate" | "super", "::") => self.path(),
                ("{", _) => (self.at, depth) = (self.at + 1, depth + 1),
                ("}", _) if depth == 0 => {
                    self.at += 1;
                    break;
                }
                ("}", _) => (self.at, depth) = (self.at + 1, depth - 1),
                _ => self.at += 1,
            }
        }
        if opened {
            self.module.pop();
        }
    }

    /// Whether the attribute here marks an item for tests only.
    fn is_for_tests(&self) -> bool {
        let texts = || self.tokens[self.at..].iter().map(|token| token.text.as_str()).take_while(|text| *text != "]");
        texts().nth(2) == Some("cfg") && texts().any(|text| text == "test") && !texts().any(|text| text == "not")
    }

    /// Skips an attribute and its item: up to a semicolon, or to the end of a block.
    fn skip_item(&mut self) {
        let mut depth = 0;
        while self.at < self.tokens.len() {
            let text = self.text(0).to_owned();
            self.at += 1;
            match text.as_str() {
                "{" | "(" | "[" => depth += 1,
                "}" if depth == 1 => break,
                "}" | ")" | "]" => depth -= 1,
                ";" if depth == 0 => break,
                _ => {}
            }
        }
    }

    /// Reads the path that begins here.
    fn path(&mut self) {
        let mut base = Vec::new();
        if self.text(0) == "crate" {
            self.at += 2;
        } else {
            base.clone_from(&self.module);
            while self.text(0) == "super" && self.text(1) == "::" {
                base.pop();
                self.at += 2;
            }
        }
        self.tree(&base);
    }

    /// Reads the rest of a path, which may end in a group of paths.
    fn tree(&mut self, base: &[String]) {
        let line = self.line();
        if self.text(0) == "{" {
            self.at += 1;
            while !matches!(self.text(0), "}" | "") {
                self.tree(base);
                if self.text(0) == "," {
                    self.at += 1;
                }
            }
            self.at += 1;
            return;
        }
        let name = self.text(0).to_owned();
        self.at += 1;
        let is_name = !matches!(name.as_str(), "*" | "self");
        let mut parts = base.iter().cloned().chain(is_name.then(|| name.clone()));
        let (first, inside) = (parts.next(), parts.next());
        if self.text(0) == "::" {
            self.at += 1;
            if self.text(0) != "<" {
                return self.tree(&[base, &[name]].concat());
            }
        }
        if self.text(0) == "as" {
            self.at += 2;
        }
        self.found.extend(first.map(|name| Named { line, name, inside }));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn house(name: &str) -> &'static House {
        HOUSES.iter().find(|house| house.name == name).unwrap()
    }

    fn complaints(file: &str, text: &str) -> Vec<String> {
        complaints_of(house("format-qcow2"), &module_of(Path::new(file)), text).collect()
    }

    #[test]
    fn every_arrow_between_folders_is_in_the_table() {
        assert_eq!(check().unwrap(), Vec::<String>::new());
    }

    #[test]
    fn arrows_in_the_table_are_allowed_and_all_arrows_inside_a_folder() {
        let text =
            "use crate::layout::{entry::COPIED, header::*};\nuse super::walk::Walk;\nfn f() { crate::check::x() }";
        assert_eq!(complaints("check/repair.rs", text), Vec::<String>::new());
        assert_eq!(complaints("lib.rs", "pub use crate::live::image::Qcow2;"), Vec::<String>::new());
    }

    #[test]
    fn a_wrong_arrow_is_found_however_it_is_written() {
        let wrong = [
            "use crate::live::state::Inner;",
            "use crate::{layout::entry, live::state};",
            "use crate::{\n    layout::{entry::{COPIED, ZERO}, header},\n    live,\n};",
            "use super::super::live::state::Inner;",
            "use super::super::{layout::entry, live::state as s};",
            "fn f() -> crate::live::Inner { todo!() }",
            "fn f() { let x = vec![super::super::live::image::open()]; }",
            "mod inner { use super::super::super::live::state::Inner; }",
            "mod inner { mod more { fn f() {} } } use super::super::live::x;",
            "pub(in crate::live) fn f() {}",
            "const A: char = '\"'; use crate::live::x; const B: &str = \"\";",
            "fn f<'a>(x: &'a u8) { crate::live::x(x) }",
        ];
        for text in wrong {
            let found = complaints("check/repair.rs", text);
            assert_eq!(found.len(), 1, "{text}: {found:?}");
            assert!(found[0].contains("check names live"), "{text}: {found:?}");
        }
        let found = complaints("layout/mod.rs", "\n\nuse super::check::walk;");
        assert_eq!(found, ["3: layout names check: no such arrow in the table of folders"]);
        assert_eq!(complaints("check/repair.rs", "use crate::{live::a, live::b};").len(), 2);
    }

    #[test]
    fn what_is_no_code_or_for_tests_only_is_no_arrow() {
        let fine = [
            "// use crate::live::x;",
            "/* use crate::live::x; /* nested */ use crate::live::y; */",
            "/// [`crate::live::x`]\nfn f() {}",
            "const A: &str = \"crate::live::x\\\"crate::live::y\";",
            "const A: &str = r#\"a\" crate::live::x\"#;",
            "#[cfg(test)]\nmod tests { use crate::live::x; }",
            "#[cfg(test)]\n#[allow(dead_code)]\nfn f() { if a { crate::live::x() } }",
            "#[cfg(all(test, unix))]\nuse crate::live::x;",
            "pub(super) fn f() { self::live::x() }",
        ];
        for text in fine {
            assert_eq!(complaints("check/repair.rs", text), Vec::<String>::new(), "{text}");
        }
        assert_eq!(complaints("check/repair.rs", "#[cfg(test)]\nuse crate::live::x;\nuse crate::live::y;").len(), 1);
        assert_eq!(complaints("check/repair.rs", "#[cfg(not(test))]\nuse crate::live::x;").len(), 1);
        assert_eq!(complaints("fixture.rs", "use crate::live::x;"), Vec::<String>::new());
    }

    #[test]
    fn a_command_that_names_another_one_is_found() {
        let of = |file: &str, text: &str| -> Vec<String> {
            complaints_of(house("cli"), &module_of(Path::new(file)), text).collect()
        };
        let complaint = ["1: dd names convert: what both need lies beneath commands"];
        for text in ["use super::convert::copy;", "fn f() { crate::commands::convert::copy() }"] {
            assert_eq!(of("commands/dd.rs", text), complaint, "{text}");
        }
        for (file, text) in [
            ("commands/dd.rs", "use crate::images::target;"),
            ("commands/mod.rs", "use crate::commands::convert::Args;"),
            ("commands/bench/text.rs", "use super::series::Series;"),
            ("main.rs", "use crate::commands::convert::Args;"),
        ] {
            assert_eq!(of(file, text), Vec::<String>::new(), "{file}: {text}");
        }
    }

    #[test]
    fn names_from_the_root_and_files_without_a_row_are_found() {
        let found = complaints("check/repair.rs", "use crate::Qcow2;");
        assert_eq!(found, ["1: check takes Qcow2 from the crate's root: name the folder it is in"]);
        assert_eq!(complaints("stray.rs", ""), ["1: stray is in no row of the table of folders"]);
    }

    /// The table itself only points down, so that no two folders can depend on each other.
    #[test]
    fn the_table_points_down() {
        for house in HOUSES {
            for (place, folder) in house.folders.iter().enumerate() {
                for below in folder.below {
                    let target = house.folders.iter().position(|other| other.name == *below).unwrap();
                    assert!(target > place, "{}: {} above {below}", house.name, folder.name);
                }
            }
        }
    }
}
