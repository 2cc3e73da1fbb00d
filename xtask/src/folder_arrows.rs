//! The folders inside a crate and their arrows: which folder may name which, read from the paths in the source.
//!
//! Code that is compiled for tests only may name everything, and so may the crate's root.

use crate::source_paths::{Named, SourceText, files_of};
use anyhow::Result;

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
        apart: &[],
    },
    House {
        name: "daemon",
        folders: &[
            Folder { name: "calls", below: &["daemon", "jobs", "hang", "table", "fronts", "state"] },
            Folder { name: "daemon", below: &["jobs", "hang", "table", "fronts", "state"] },
            Folder { name: "jobs", below: &["hang", "table", "state"] },
            Folder { name: "hang", below: &["table", "fronts", "state"] },
            Folder { name: "table", below: &["fronts", "state"] },
            Folder { name: "fronts", below: &["state"] },
            Folder { name: "state", below: &[] },
            Folder { name: "notify", below: &[] },
            Folder { name: "pidfile", below: &[] },
        ],
        apart: &["calls"],
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
        apart: &["commands"],
    },
];

/// Complains about every arrow between folders that the table does not have.
pub(crate) fn check() -> Result<Vec<String>> {
    let mut complaints = Vec::new();
    for house in HOUSES {
        let source = crate::workspace::root().join("crates").join(house.name).join("src");
        for file in files_of(&source)? {
            let name = format!("crates/{}/src/{}", house.name, file.place.display());
            complaints.extend(complaints_of(house, &file.module, &file.text).map(|what| format!("{name}:{what}")));
        }
    }
    Ok(complaints)
}

/// Returns the complaints about the arrows of one file, each with its line.
fn complaints_of(house: &House, module: &[String], text: &SourceText) -> impl Iterator<Item = String> {
    let from = module.first().cloned();
    let row = from.as_ref().and_then(|from| house.folders.iter().find(|folder| folder.name == from));
    let mut complaints = Vec::new();
    match (&from, row) {
        (Some(from), None) => complaints.push(format!("1: {from} is in no row of the table of folders")),
        (Some(from), Some(row)) => {
            for Named { line, path, .. } in &text.named {
                let Some(name) = path.first() else { continue };
                let (own, inside) = (module.get(1), path.get(1));
                let is_sibling = own.is_some() && inside.is_some() && own != inside;
                if name == from && is_sibling && house.apart.contains(&row.name) {
                    let [own, other] = [own, inside].map(|name| name.map_or("", String::as_str));
                    complaints.push(format!("{line}: {own} names {other}: what both need lies beneath {from}"));
                }
                if name == from || row.below.contains(&name.as_str()) {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source_paths::{Parts, read};

    fn house(name: &str) -> &'static House {
        HOUSES.iter().find(|house| house.name == name).unwrap()
    }

    fn complaints_in(name: &str, file: &str, text: &str) -> Vec<String> {
        let names = file.trim_end_matches(".rs").split('/').filter(|name| !["lib", "main", "mod"].contains(name));
        let module: Parts = names.map(str::to_owned).collect();
        complaints_of(house(name), &module, &read(text, &module)).collect()
    }

    fn complaints(file: &str, text: &str) -> Vec<String> {
        complaints_in("format-qcow2", file, text)
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
    }

    #[test]
    fn a_command_that_names_another_one_is_found() {
        let of = |file: &str, text: &str| complaints_in("cli", file, text);
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
