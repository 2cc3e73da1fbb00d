//! The modules of a crate, as its source declares them, and the paths by which each names others.
//!
//! A path begins with `crate`, `self`, `super` or the name of a module that is declared in the same one. Code that is
//! compiled for tests only is left out.

use anyhow::{Context, Result, bail};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// The parts of a path, from the crate's root.
pub(crate) type Parts = Vec<String>;

/// One file of a crate.
pub(crate) struct SourceFile {
    /// Its place below `src`.
    pub(crate) place: PathBuf,
    /// Its module.
    pub(crate) module: Parts,
    pub(crate) text: SourceText,
}

/// What the text of a file says about names.
#[derive(Debug, Default)]
pub(crate) struct SourceText {
    pub(crate) named: Vec<Named>,
    /// The modules that other files hold.
    pub(crate) declared: Vec<Parts>,
    /// What the file's own module imports, and by which name.
    pub(crate) imports: BTreeMap<String, Parts>,
    /// The modules from which it imports everything.
    pub(crate) globs: Vec<Parts>,
    /// The items that it defines.
    pub(crate) items: BTreeSet<String>,
}

/// A path that a text names, and its line.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Named {
    pub(crate) line: usize,
    pub(crate) path: Parts,
    /// It only says who may see an item: `pub(in path)`.
    pub(crate) is_visibility: bool,
}

/// Returns the files of a crate: its root, and those whose modules are declared outside of tests.
pub(crate) fn files_of(source: &Path) -> Result<Vec<SourceFile>> {
    let roots = ["lib.rs", "main.rs"].map(PathBuf::from);
    let root = roots.into_iter().find(|root| source.join(root).is_file());
    let mut files = Vec::new();
    let mut left = vec![(root.with_context(|| format!("no crate in {}", source.display()))?, Parts::new())];
    while let Some((place, module)) = left.pop() {
        let path = source.join(&place);
        let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let text = read(&text, &module);
        for declared in &text.declared {
            let folder: PathBuf = declared.iter().collect();
            let places = [folder.with_extension("rs"), folder.join("mod.rs")];
            let Some(place) = places.into_iter().find(|place| source.join(place).is_file()) else {
                bail!("{}: no file for the module {}", path.display(), declared.join("::"));
            };
            left.push((place, declared.clone()));
        }
        files.push(SourceFile { place, module, text });
    }
    files.sort_by(|one, other| one.place.cmp(&other.place));
    Ok(files)
}

/// Returns what the text of a module says about names.
pub(crate) fn read(text: &str, module: &[String]) -> SourceText {
    let tokens = tokens(text);
    let read = |declared| {
        let said = SourceText { declared, ..SourceText::default() };
        let mut reader = Reader { tokens: &tokens, at: 0, own: module, module: module.to_vec(), is_use: false, said };
        reader.items(None);
        reader.said
    };
    // A module may be named above its declaration.
    let declared = read(Vec::new()).declared;
    let mut said = read(declared);
    said.declared.sort();
    said.declared.dedup();
    said
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

/// Words before the name of an item.
const ITEMS: [&str; 8] = ["struct", "enum", "union", "trait", "fn", "type", "const", "static"];

/// Walks the tokens of a file.
struct Reader<'a> {
    tokens: &'a [Token],
    at: usize,
    /// The file's module.
    own: &'a [String],
    /// The module that the token at `at` is in.
    module: Parts,
    /// A path of a `use` is read, in the file's own module.
    is_use: bool,
    said: SourceText,
}

impl<'a> Reader<'a> {
    fn text(&self, ahead: usize) -> &'a str {
        self.tokens.get(self.at + ahead).map_or("", |token| token.text.as_str())
    }

    /// The text of the token this far back.
    fn before(&self, back: usize) -> &'a str {
        self.at.checked_sub(back).and_then(|at| self.tokens.get(at)).map_or("", |token| token.text.as_str())
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
            let is_outermost = depth == 0 && self.module == self.own;
            match (self.text(0), self.text(1)) {
                ("#", "[") if self.is_for_tests() => self.skip_item(),
                ("mod", name) if self.text(2) == "{" => {
                    let name = name.to_owned();
                    self.at += 3;
                    self.items(Some(name));
                }
                ("mod", name) if self.text(2) == ";" => {
                    let name = name.to_owned();
                    self.said.declared.push([&self.module[..], &[name]].concat());
                    self.at += 3;
                }
                // `use<..>` says what a type captures.
                ("use", next) if next != "<" => self.import(is_outermost),
                _ if self.begins_path() => self.path(),
                ("{", _) => (self.at, depth) = (self.at + 1, depth + 1),
                ("}", _) if depth == 0 => {
                    self.at += 1;
                    break;
                }
                ("}", _) => (self.at, depth) = (self.at + 1, depth - 1),
                ("macro_rules", "!") => {
                    let name = self.text(2).to_owned();
                    self.said.items.insert(name);
                    self.at += 3;
                }
                (word, name) => {
                    if is_outermost && ITEMS.contains(&word) {
                        self.said.items.insert(name.to_owned());
                    }
                    self.at += 1;
                }
            }
        }
        if opened {
            self.module.pop();
        }
    }

    /// Whether the attribute here marks an item for tests only.
    fn is_for_tests(&self) -> bool {
        let texts = self.tokens[self.at..].iter().map(|token| token.text.as_str()).take_while(|text| *text != "]");
        let texts: Vec<&str> = texts.collect();
        let is_test = |at: usize| texts[at] == "test" && texts[at - 2] != "not";
        texts.get(2) == Some(&"cfg") && !texts.contains(&"any") && (3..texts.len()).any(is_test)
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

    /// Reads a `use`. One of another crate is skipped.
    fn import(&mut self, is_outermost: bool) {
        self.at += 1;
        if self.begins_path() {
            self.is_use = is_outermost;
            self.path();
            self.is_use = false;
        } else {
            while !matches!(self.text(0), ";" | "") {
                self.at += 1;
            }
        }
    }

    /// Whether a path of this crate begins here.
    fn begins_path(&self) -> bool {
        if self.text(1) != "::" || matches!(self.before(1), "::" | ".") {
            return false;
        }
        matches!(self.text(0), "crate" | "self" | "super") || self.is_declared(self.text(0))
    }

    /// Whether the module here declares one of this name.
    fn is_declared(&self, name: &str) -> bool {
        let is_it =
            |declared: &Parts| declared.split_last().is_some_and(|(last, path)| last == name && path == self.module);
        self.said.declared.iter().any(is_it)
    }

    /// Reads the path that begins here.
    fn path(&mut self) {
        let is_visibility = (self.before(1), self.before(2), self.before(3)) == ("in", "(", "pub");
        let mut base = Parts::new();
        if self.text(0) == "crate" {
            self.at += 2;
        } else {
            base.clone_from(&self.module);
            while matches!(self.text(0), "self" | "super") && self.text(1) == "::" {
                if self.text(0) == "super" {
                    base.pop();
                }
                self.at += 2;
            }
        }
        self.tree(&base, is_visibility);
    }

    /// Reads the rest of a path, which may end in a group of paths.
    fn tree(&mut self, base: &[String], is_visibility: bool) {
        let line = self.line();
        if self.text(0) == "{" {
            self.at += 1;
            while !matches!(self.text(0), "}" | "") {
                self.tree(base, is_visibility);
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
        let path: Parts = base.iter().cloned().chain(is_name.then(|| name.clone())).collect();
        if self.text(0) == "::" {
            self.at += 1;
            if self.text(0) != "<" {
                return self.tree(&path, is_visibility);
            }
        }
        let mut alias = path.last().cloned().unwrap_or_default();
        if self.text(0) == "as" {
            self.text(1).clone_into(&mut alias);
            self.at += 2;
        }
        match (self.is_use, name.as_str()) {
            (true, "*") => self.said.globs.push(path.clone()),
            (true, _) => drop(self.said.imports.insert(alias, path.clone())),
            (false, _) => {}
        }
        self.said.named.push(Named { line, path, is_visibility });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(path: &str) -> Parts {
        path.split("::").filter(|part| !part.is_empty()).map(str::to_owned).collect()
    }

    fn names(module: &str, text: &str) -> Vec<String> {
        read(text, &parts(module)).named.iter().map(|named| named.path.join("::")).collect()
    }

    #[test]
    fn paths_are_read_from_the_root() {
        for (text, expected) in [
            ("use crate::a::{b, c::D as E, f::*};", vec!["a::b", "a::c::D", "a::f"]),
            ("use super::x::{self, Y};", vec!["one::x", "one::x::Y"]),
            ("fn f() { self::x(); super::super::y() }", vec!["one::two::x", "y"]),
            (
                "use child::X; mod child; fn f() { child::y(self.child::<u8>()) }",
                vec!["one::two::child::X", "one::two::child::y"],
            ),
            ("mod inner { use super::x; mod deep {} } use super::z;", vec!["one::two::x", "one::z"]),
            ("use std::{fs::File, io}; use other::child::x; mod child;", vec![]),
            ("fn f() -> impl Fn() + use<> { crate::a::b() }", vec!["a::b"]),
            ("#[cfg(test)] use crate::a; #[cfg(all(test, not(feature = \"x\")))] mod tests { use crate::b; }", vec![]),
            ("#[cfg(not(test))] use crate::a;", vec!["a"]),
            ("#[cfg(any(test, feature = \"x\"))] use crate::a;", vec!["a"]),
        ] {
            assert_eq!(names("one::two", text), expected, "{text}");
        }
    }

    #[test]
    fn what_a_file_defines_declares_and_imports_is_known() {
        let text = "mod child; #[cfg(test)] mod tests; pub use child::A as B; use super::c::*; pub(in crate::one) const fn f() {} \
                    struct S; impl S { fn inside() {} } mod inner { use super::X; fn deep() {} } macro_rules! m { () => {} }";
        let said = read(text, &parts("one"));
        assert_eq!(said.declared, [parts("one::child")]);
        assert_eq!(said.imports, BTreeMap::from([("B".to_owned(), parts("one::child::A"))]));
        assert_eq!(said.globs, [parts("c")]);
        assert!(["f", "S", "m"].iter().all(|item| said.items.contains(*item)), "{:?}", said.items);
        assert!(["inside", "deep", "X"].iter().all(|item| !said.items.contains(*item)), "{:?}", said.items);
        let visibility = said.named.iter().filter(|named| named.is_visibility).count();
        assert_eq!(visibility, 1);
    }

    #[test]
    fn the_files_of_a_crate_are_found_but_for_those_of_tests() {
        let source = crate::workspace::root().join("crates/format-qcow2/src");
        let files = files_of(&source).unwrap();
        let has = |place: &str| files.iter().any(|file| file.place == Path::new(place));
        assert!(has("lib.rs") && has("live/mod.rs") && has("live/image.rs"));
        assert!(!has("fixture.rs") && !has("live/compaction_tests.rs"));
    }
}
