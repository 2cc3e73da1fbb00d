//! Checks the documents: their links lead somewhere, the files and commands that they show exist, and no room and no
//! decision is left out.

use crate::command::{Program, built_with_tests};
use crate::workspace;
use anyhow::Result;
use std::collections::BTreeMap;
use std::path::{Component, Path, PathBuf};

/// The page with the table of rooms.
const ROOMS_PAGE: &str = "ARCHITECTURE.md";
/// The pages of decisions, and the page that lists them.
const DECISIONS: &str = "docs/decisions/";
const DECISIONS_INDEX: &str = "docs/decisions/README.md";

/// Complains about local links that lead nowhere, commands that the program does not have, and pages that leave a room or
/// a decision out.
pub(crate) fn check() -> Result<Vec<String>> {
    let texts = workspace::tracked_texts()?;
    let documents: Vec<_> =
        texts.iter().filter(|(path, _)| path.extension().is_some_and(|extension| extension == "md")).collect();
    let mut complaints: Vec<String> = documents.iter().flat_map(|(path, text)| broken_links(path, text)).collect();
    complaints.extend(documents.iter().flat_map(|(path, text)| missing_files(path, text)));
    complaints.extend(left_out(&texts));
    let mut helps = Helps { ringdisk: built_with_tests("ringdisk")?, texts: BTreeMap::new() };
    for (path, text) in documents {
        for shown in commands(text) {
            complaints.extend(helps.check(path, &shown));
        }
    }
    Ok(complaints)
}

/// Complains about rooms that the architecture's table does not name, and decisions that the index does not list.
fn left_out(texts: &[(PathBuf, String)]) -> Vec<String> {
    let text_of = |name: &str| texts.iter().find(|(path, _)| path == Path::new(name)).map_or("", |(_, text)| text);
    let (rooms_page, index) = (text_of(ROOMS_PAGE), text_of(DECISIONS_INDEX));
    texts
        .iter()
        .filter_map(|(path, _)| {
            let path = path.to_str()?;
            if let Some(room) = path.strip_prefix("crates/").and_then(|rest| rest.strip_suffix("/Cargo.toml")) {
                let is_named = rooms_page
                    .lines()
                    .filter_map(|line| line.strip_prefix('|')?.split('|').next())
                    .any(|names| names.contains(&format!("`{room}`")));
                return (!is_named).then(|| format!("{ROOMS_PAGE}: the table of rooms lacks {room}"));
            }
            let decision = path.strip_prefix(DECISIONS).filter(|_| path != DECISIONS_INDEX)?;
            (!index.contains(&format!("({decision})"))).then(|| format!("{DECISIONS_INDEX}: lacks {decision}"))
        })
        .collect()
}

fn broken_links(path: &Path, text: &str) -> Vec<String> {
    let directory = path.parent().unwrap_or(Path::new(""));
    text.split("](")
        .skip(1)
        .filter_map(|rest| rest.split(')').next())
        .filter(|link| !link.contains("://") && !link.starts_with('#') && !link.starts_with("mailto:"))
        .filter_map(|link| link.split(['#', ' ']).next())
        .filter(|link| !exists(&directory.join(link)))
        .map(|link| format!("{}: the link {link} leads nowhere", path.display()))
        .collect()
}

/// Folders of the tree. A name in backticks that begins with one of them is a file or a folder.
const FOLDERS: &[&str] = &["crates/", "dist/", "docs/", "fuzz/", "tests/", "xtask/"];

fn missing_files(path: &Path, text: &str) -> Vec<String> {
    text.split('`')
        .skip(1)
        .step_by(2)
        .filter(|name| FOLDERS.iter().any(|folder| name.starts_with(folder)))
        .filter(|name| !name.contains(['*', ' ', '\n']) && !exists(Path::new(name)))
        .map(|name| format!("{}: there is no {name}", path.display()))
        .collect()
}

/// Whether a path exists, and lies in the tree.
fn exists(path: &Path) -> bool {
    let mut inside = PathBuf::new();
    for component in path.components() {
        match component {
            Component::Normal(name) => inside.push(name),
            Component::ParentDir if !inside.pop() => return false,
            Component::RootDir | Component::Prefix(_) => return false,
            Component::ParentDir | Component::CurDir => {}
        }
    }
    workspace::root().join(inside).exists()
}

/// One of our commands as a document shows it: the program (`ringdisk` or `xtask`), the command, and its long options.
#[derive(Debug, PartialEq, Eq)]
struct Shown {
    program: &'static str,
    command: String,
    options: Vec<String>,
}

/// Returns the commands in the fenced blocks of a document.
fn commands(text: &str) -> Vec<Shown> {
    let blocks = text.split("```").skip(1).step_by(2);
    let lines = blocks.flat_map(|block| {
        let joined = block.replace("\\\n", " ");
        joined.lines().map(str::to_owned).collect::<Vec<_>>()
    });
    lines.filter_map(|line| shown(&line)).collect()
}

/// Commands of `ringdisk` with subcommands, each with its own options.
const WITH_COMMANDS: &[&str] = &["ctl", "state"];

fn shown(line: &str) -> Option<Shown> {
    let line = line.split(" #").next().unwrap_or(line);
    let words: Vec<&str> = line.split_whitespace().skip_while(|word| matches!(*word, "$" | "#" | "sudo")).collect();
    let (program, rest) = match words.as_slice() {
        ["cargo", "xtask", rest @ ..] => ("xtask", rest),
        ["cargo", "run", rest @ ..] => {
            let start = rest.iter().position(|word| *word == "--").map_or(rest.len(), |at| at + 1);
            let package = rest.iter().take(start).skip_while(|word| !matches!(**word, "-p" | "--package")).nth(1);
            if package.is_some_and(|package| *package != "ringdisk") {
                return None;
            }
            ("ringdisk", rest.get(start..).unwrap_or_default())
        }
        [first, rest @ ..] if first.rsplit('/').next() == Some("ringdisk") => ("ringdisk", rest),
        _ => return None,
    };
    let depth = if rest.first().is_some_and(|word| WITH_COMMANDS.contains(word)) { 2 } else { 1 };
    let command: Vec<&str> = rest.iter().take(depth).take_while(|word| !word.starts_with('-')).copied().collect();
    let command = command.join(" ");
    let options = rest
        .iter()
        .take_while(|word| !matches!(**word, "|" | "&&" | "&" | ">" | ";"))
        .filter(|word| word.len() > 2 && word.starts_with("--"))
        .map(|word| word.split('=').next().unwrap_or(word).to_owned())
        .collect();
    Some(Shown { program, command, options })
}

/// The `--help` of each command, asked for only once.
struct Helps {
    ringdisk: PathBuf,
    texts: BTreeMap<(&'static str, String), Option<String>>,
}

impl Helps {
    fn check(&mut self, path: &Path, shown: &Shown) -> Vec<String> {
        let key = (shown.program, shown.command.clone());
        if !self.texts.contains_key(&key) {
            let own = std::env::current_exe().unwrap_or_default();
            let program = if shown.program == "xtask" { &own } else { &self.ringdisk };
            let help = help(program, &shown.command);
            self.texts.insert(key.clone(), help);
        }
        let Some(Some(help)) = self.texts.get(&key) else {
            let path = path.display();
            return vec![format!("{path}: {} has no command \"{}\"", shown.program, shown.command)];
        };
        let known: Vec<&str> = help.split(|letter: char| !letter.is_alphanumeric() && letter != '-').collect();
        shown
            .options
            .iter()
            .filter(|option| !known.contains(&option.as_str()))
            .map(|option| format!("{}: {} {} has no {option}", path.display(), shown.program, shown.command))
            .collect()
    }
}

/// Returns the help of one command; `None` if there is no such command.
fn help(program: &Path, command: &str) -> Option<String> {
    Program::new(program).args(command.split_whitespace().chain(["--help"])).output_text().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_found_in_fenced_blocks() {
        let text = "x `ringdisk no`\n```sh\n$ ringdisk serve disk.qcow2 --socket /run/x.sock # why\ncargo run --release \\\n  -- try --guest=uml\ncargo run -p other -- no\nringdisk ctl add x --no-export\nls\n```\nringdisk not\n```\ncargo xtask ci\n```\n";
        let expected = [
            ("ringdisk", "serve", vec!["--socket"]),
            ("ringdisk", "try", vec!["--guest"]),
            ("ringdisk", "ctl add", vec!["--no-export"]),
            ("xtask", "ci", vec![]),
        ];
        let expected = expected.map(|(program, command, options)| Shown {
            program,
            command: command.to_owned(),
            options: options.into_iter().map(str::to_owned).collect(),
        });
        assert_eq!(commands(text), expected);
    }

    #[test]
    fn a_room_without_a_row_and_a_decision_that_is_not_listed_are_found() {
        let text = |path: &str, text: &str| (PathBuf::from(path), text.to_owned());
        let mut texts = vec![
            text("ARCHITECTURE.md", "`b` is a room\n| `a` | `b` |\n"),
            text("crates/a/Cargo.toml", ""),
            text("docs/decisions/README.md", "* [0001](0001-x.md)"),
            text("docs/decisions/0001-x.md", ""),
        ];
        assert_eq!(left_out(&texts), Vec::<String>::new());
        texts.extend([text("crates/b/Cargo.toml", ""), text("docs/decisions/0002-y.md", "")]);
        let complaints = left_out(&texts);
        assert_eq!(complaints.len(), 2);
        assert!(complaints[0].ends_with("lacks b") && complaints[1].ends_with("lacks 0002-y.md"), "{complaints:?}");
    }

    #[test]
    fn files_that_are_gone_are_found() {
        let text = "`xtask/src/documents.rs` and `crates/` and `crates/none/src/lib.rs`, no `tests/*.rs`";
        let complaints = missing_files(Path::new("a.md"), text);
        assert_eq!(complaints, ["a.md: there is no crates/none/src/lib.rs"]);
    }

    #[test]
    fn links_out_of_the_tree_or_to_nothing_are_broken() {
        let text =
            "[a](Cargo.toml) [b](https://example.org/) [c](#part) [d](crates/cli/Cargo.toml#x) [e](none.md) [f](../x)";
        assert_eq!(broken_links(Path::new("README.md"), text).len(), 2);
    }
}
