//! Files of a crate that name each other in a circle: none of them can be read, or changed, without all others.
//!
//! A file and those in the folder of its name count as one story: `manager.rs` may name `manager/add.rs`, and be named by
//! it. Whatever else lies on a circle is a complaint, unless it has a reason.

use crate::source_paths::{Parts, SourceFile, files_of};
use anyhow::{Context, Result};
use std::collections::{BTreeMap, BTreeSet};

/// Files that may name each other in a circle: the crate's folder, the files below its `src` in order, and the reason.
const ACCEPTED: &[(&str, &[&str], &str)] = &[];

/// Complains about every circle of files that is not accepted, and about accepted ones that are gone.
pub(crate) fn check() -> Result<Vec<String>> {
    let crates = crate::workspace::root().join("crates");
    let mut complaints = Vec::new();
    let mut unseen = ACCEPTED.to_vec();
    let folders = std::fs::read_dir(&crates).with_context(|| format!("cannot list {}", crates.display()))?;
    let mut folders: Vec<_> = folders.map(|entry| Ok(entry?.path())).collect::<Result<_>>()?;
    folders.sort();
    for folder in folders.iter().filter(|folder| folder.join("src").is_dir()) {
        let name = folder.file_name().unwrap_or_default().to_string_lossy();
        for circle in circles_of(&files_of(&folder.join("src"))?) {
            let files: Vec<&str> = circle.keys().map(String::as_str).collect();
            match unseen.iter().position(|(crate_name, accepted, _)| *crate_name == name && *accepted == files) {
                Some(accepted) => {
                    unseen.swap_remove(accepted);
                }
                None => {
                    let arrows: Vec<&str> = circle.values().map(String::as_str).collect();
                    complaints.push(format!("crates/{name}/src: files name each other: {}", arrows.join("; ")));
                }
            }
        }
    }
    complaints.extend(unseen.into_iter().map(|(name, files, reason)| {
        let files = files.join(", ");
        format!("crates/{name}/src: {files} are no circle any more ({reason}): take it out of the table")
    }));
    Ok(complaints)
}

/// The files of a circle, each with one of its arrows to another.
type Circle = BTreeMap<String, String>;

/// For each file, those that it names, with the first line and path.
type Arrows = BTreeMap<usize, BTreeMap<usize, (usize, String)>>;

fn circles_of(files: &[SourceFile]) -> Vec<Circle> {
    let arrows = arrows_between(files);
    let reached: Vec<BTreeSet<usize>> = (0..files.len()).map(|from| reached_from(from, &arrows)).collect();
    let place = |file: usize| files[file].place.display().to_string();
    let mut circles = Vec::new();
    let mut seen = BTreeSet::new();
    for file in 0..files.len() {
        let circle: BTreeSet<usize> =
            reached[file].iter().copied().filter(|other| reached[*other].contains(&file)).collect();
        if circle.len() < 2 || !seen.insert(circle.clone()) {
            continue;
        }
        let shown = |from: &usize| {
            let to = arrows.get(from).into_iter().flatten().find(|(to, _)| circle.contains(*to));
            let arrow = to.map(|(to, (line, path))| format!("{}:{line} names {} ({path})", place(*from), place(*to)));
            (place(*from), arrow.unwrap_or_default())
        };
        circles.push(circle.iter().map(shown).collect());
    }
    circles
}

fn reached_from(from: usize, arrows: &Arrows) -> BTreeSet<usize> {
    let (mut reached, mut left) = (BTreeSet::new(), vec![from]);
    while let Some(file) = left.pop() {
        left.extend(arrows.get(&file).into_iter().flat_map(BTreeMap::keys).filter(|to| reached.insert(**to)));
    }
    reached
}

fn arrows_between(files: &[SourceFile]) -> Arrows {
    let index: BTreeMap<&[String], usize> = files.iter().enumerate().map(|(at, file)| (&*file.module, at)).collect();
    let crate_files = CrateFiles { files, index };
    let mut arrows = Arrows::new();
    for (from, file) in files.iter().enumerate() {
        for named in file.text.named.iter().filter(|named| !named.is_visibility) {
            let Some(to) = crate_files.owner_of(&named.path, MOST_STEPS) else { continue };
            let is_part = files[to].module.starts_with(&file.module);
            if !is_part {
                let path = || (named.line, named.path.join("::"));
                arrows.entry(from).or_default().entry(to).or_insert_with(path);
            }
        }
    }
    arrows
}

/// A name that is imported more often in a row leads nowhere.
const MOST_STEPS: usize = 16;

struct CrateFiles<'a> {
    files: &'a [SourceFile],
    index: BTreeMap<&'a [String], usize>,
}

impl CrateFiles<'_> {
    /// Returns the file that defines what a path names. An import leads on to where the item comes from; the other
    /// crates' items have no file here.
    fn owner_of(&self, path: &[String], steps: usize) -> Option<usize> {
        let depth = (0..=path.len()).rev().find(|depth| self.index.contains_key(&path[..*depth]))?;
        let owner = *self.index.get(&path[..depth])?;
        let (Some(name), text) = (path.get(depth), &self.files[owner].text) else { return Some(owner) };
        if text.items.contains(name) || steps == 0 {
            return Some(owner);
        }
        let onward = |to: &Parts, rest: &[String]| self.owner_of(&[&to[..], rest].concat(), steps - 1);
        if let Some(import) = text.imports.get(name).filter(|import| import[..] != path[..=depth]) {
            return onward(import, &path[depth + 1..]);
        }
        let has_name = |glob: &&Parts| {
            let module = self.index.get(&glob[..]).map(|file| &self.files[*file].text);
            module.is_some_and(|text| text.items.contains(name) || text.imports.contains_key(name))
        };
        match text.globs.iter().find(has_name) {
            Some(glob) => onward(glob, &path[depth..]),
            None => Some(owner),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source_paths::read;

    fn circles(files: &[(&str, &str)]) -> Vec<Vec<String>> {
        let file = |(place, text): &(&str, &str)| {
            let names = place.trim_end_matches(".rs").split('/').filter(|name| !["lib", "mod"].contains(name));
            let module: Parts = names.map(str::to_owned).collect();
            SourceFile { place: place.into(), text: read(text, &module), module }
        };
        let files: Vec<SourceFile> = files.iter().map(file).collect();
        circles_of(&files).into_iter().map(|circle| circle.into_keys().collect()).collect()
    }

    #[test]
    fn every_circle_of_files_has_a_reason() {
        assert_eq!(check().unwrap(), Vec::<String>::new());
    }

    #[test]
    fn a_circle_is_found_however_its_arrows_are_written() {
        let root = ("lib.rs", "mod a; mod b; pub use b::B;");
        for (a, b) in [
            ("use crate::b::B;", "use crate::a::A;"),
            ("use super::b;", "fn f() { crate::a::f() }"),
            ("use crate::B;", "use super::a::*; struct B;"),
            ("fn f(x: crate::B) {}", "struct B; use crate::{a::A};"),
        ] {
            assert_eq!(circles(&[root, ("a.rs", a), ("b.rs", b)]), [["a.rs", "b.rs"]], "{a} {b}");
        }
        let long = [("lib.rs", ""), ("a.rs", "use crate::b;"), ("b.rs", "use crate::c;"), ("c.rs", "use crate::a;")];
        assert_eq!(circles(&long), [["a.rs", "b.rs", "c.rs"]]);
    }

    #[test]
    fn no_circle_is_found_where_none_is() {
        let none = Vec::<Vec<String>>::new();
        // One way only, tests, who may see it, and a name of the root that is defined elsewhere.
        let root = ("lib.rs", "mod a; mod b; mod c; pub use c::C;");
        let a = ("a.rs", "use crate::b::B; #[cfg(test)] mod tests { use crate::c::C; }");
        let b = ("b.rs", "pub(in crate::a) struct B; use crate::C;");
        assert_eq!(circles(&[root, a, b, ("c.rs", "pub struct C; #[cfg(test)] use crate::a;")]), none);
        // A file and its own folder.
        let parts = [
            ("lib.rs", "mod a;"),
            ("a.rs", "mod part; use part::P; struct A;"),
            ("a/part.rs", "use super::A; struct P;"),
        ];
        assert_eq!(circles(&parts), none);
    }

    #[test]
    fn files_of_one_folder_make_a_circle_as_others_do() {
        let files = [
            ("lib.rs", "mod a;"),
            ("a/mod.rs", "mod x; mod y;"),
            ("a/x.rs", "use super::y::Y;"),
            ("a/y.rs", "use super::x;"),
        ];
        assert_eq!(circles(&files), [["a/x.rs", "a/y.rs"]]);
    }
}
