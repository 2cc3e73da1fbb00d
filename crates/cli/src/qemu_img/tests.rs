//! Compares the table of flags with the real program's `--help`, and our own parser with the table.

use super::command;
use crate::compat::{FLAGS, Flag, OTHERS, VERSION, Verb};
use std::fmt::Write as _;

/// A verb as `--help` shows it.
struct Shown {
    name: String,
    flags: Vec<(String, Option<String>)>,
    operands: String,
}

fn tokens(line: &str) -> Vec<(usize, &str)> {
    let (mut found, mut start) = (Vec::new(), None);
    for (at, char) in line.char_indices() {
        let is_mark = matches!(char, '[' | ']' | '(' | ')' | '|');
        if is_mark || char.is_whitespace() {
            found.extend(start.take().map(|from| (from, &line[from..at])));
        } else if start.is_none() {
            start = Some(at);
        }
        if is_mark {
            found.push((at, &line[at..at + 1]));
        }
    }
    found.extend(start.map(|from| (from, &line[from..])));
    found
}

fn is_flag(token: &str) -> bool {
    token.trim_start_matches('-').starts_with(|first: char| first.is_ascii_alphabetic()) && token.starts_with('-')
}

fn is_word(token: &str) -> bool {
    token.starts_with(|first: char| first.is_ascii_alphanumeric())
}

/// Reads a line such as `check [-q] [-r [leaks | all]] filename`.
fn parse(line: &str) -> Shown {
    let line = line.trim();
    let (name, rest) = line.split_once(' ').expect("a verb with something behind it");
    let tokens = tokens(rest);
    let mut shown = Shown { name: name.to_owned(), flags: Vec::new(), operands: String::new() };
    let mut end = 0;
    for (index, (at, token)) in tokens.iter().enumerate().filter(|(_, (_, token))| is_flag(token)) {
        let token = token.trim_end_matches('.');
        end = at + token.len();
        let next = |skip: usize| tokens.get(index + skip).map_or("", |(_, token)| *token);
        let (flag, value) = match token.split_once('=') {
            Some((flag, value)) => (flag, Some(value.to_owned())),
            None if is_word(next(1)) => {
                end = tokens[index + 1].0 + next(1).len();
                (token, Some(next(1).to_owned()))
            }
            None if next(1) == "[" && is_word(next(2)) => {
                let inside = tokens[index + 2..].iter().take_while(|(_, token)| *token != "]");
                let words: Vec<&str> = inside
                    .map(|(at, token)| {
                        end = at + token.len();
                        *token
                    })
                    .collect();
                (token, Some(words.concat()))
            }
            None => (token, None),
        };
        shown.flags.push((flag.to_owned(), value));
    }
    let operands = rest[end..].trim_start_matches([']', ')', '.', ' ']);
    let open = operands.matches('[').count();
    let closed = operands.matches(']').count();
    shown.operands = operands[..operands.len() - closed.saturating_sub(open)].to_owned();
    shown
}

fn table(verbs: &[Shown]) -> String {
    let mut text = String::from(
        "//! The verbs and flags of qemu-img, made from its `--help` by the tests of this module: do not edit.\n\n\
         /// A verb.\npub(crate) struct Verb {\n    pub(crate) name: &'static str,\n    \
         pub(crate) flags: &'static [Flag],\n    pub(crate) operands: &'static str,\n}\n\n\
         /// A flag, and the name of its value if it takes one.\npub(crate) struct Flag {\n    \
         pub(crate) name: &'static str,\n    pub(crate) value: Option<&'static str>,\n}\n\n\
         const fn flag(name: &'static str) -> Flag {\n    Flag { name, value: None }\n}\n\n\
         const fn with(name: &'static str, value: &'static str) -> Flag {\n    Flag { name, value: Some(value) }\n}\n\n\
         #[rustfmt::skip]\npub(crate) const FLAGS: &[Verb] = &[\n",
    );
    for verb in verbs {
        let _ = writeln!(text, "    Verb {{ name: {:?}, operands: {:?}, flags: &[", verb.name, verb.operands);
        for (name, value) in &verb.flags {
            let _ = match value {
                Some(value) => writeln!(text, "        with({name:?}, {value:?}),"),
                None => writeln!(text, "        flag({name:?}),"),
            };
        }
        text.push_str("    ] },\n");
    }
    text.push_str("];\n");
    text
}

#[test]
fn the_table_is_what_qemu_img_shows() {
    let Ok(output) = std::process::Command::new("qemu-img").arg("--help").output() else {
        assert!(std::env::var_os("CI").is_none(), "qemu-img is missing (Debian package qemu-utils)");
        return eprintln!("skipped: qemu-img is missing (Debian package qemu-utils)");
    };
    let help = String::from_utf8(output.stdout).unwrap();
    if !help.contains(&format!("version {}", VERSION)) {
        // Other versions may have other flags, and show them elsewhere: only this version's flags have to be known.
        return eprintln!("skipped: this needs qemu-img {}", VERSION);
    }
    let lines = help.lines().skip_while(|line| !line.starts_with("Command syntax")).skip(1);
    let verbs: Vec<Shown> = lines.take_while(|line| line.starts_with("  ")).map(parse).collect();
    assert!(verbs.len() > 10, "{help}");
    let (made, path) = (table(&verbs), concat!(env!("CARGO_MANIFEST_DIR"), "/src/compat/flags.rs"));
    if std::env::var_os("RINGDISK_REGENERATE").is_some() {
        std::fs::write(path, &made).unwrap();
    }
    let kept = std::fs::read_to_string(path).unwrap();
    assert!(made == kept, "flags.rs is out of date: run this test with RINGDISK_REGENERATE=1");
}

fn flags() -> impl Iterator<Item = (&'static Verb, &'static Flag)> {
    FLAGS.iter().flat_map(|verb| verb.flags.iter().map(move |flag| (verb, flag)))
}

/// Whether our parser knows a flag of a verb, with or without a value as it should.
fn is_parsed(verb: &Verb, flag: &Flag) -> bool {
    let command = command();
    let Some(verb) = command.find_subcommand(verb.name) else { return false };
    let known = |argument: &&clap::Arg| match flag.name.strip_prefix("--") {
        Some(long) => {
            argument.get_long() == Some(long) || argument.get_all_aliases().is_some_and(|all| all.contains(&long))
        }
        None => {
            let short = flag.name.chars().nth(1).expect("a letter");
            argument.get_short() == Some(short)
                || argument.get_all_short_aliases().is_some_and(|all| all.contains(&short))
        }
    };
    verb.get_arguments().find(known).is_some_and(|found| found.get_action().takes_values() == flag.value.is_some())
}

#[test]
fn every_flag_is_understood_or_on_the_list() {
    for (verb, flag) in flags() {
        assert!(flag.name == "--object" || is_parsed(verb, flag), "{} {}", verb.name, flag.name);
    }
    for difference in OTHERS {
        assert!(
            flags().any(|(verb, flag)| difference.is_about(verb.name, flag.name)),
            "{} {} is listed and does not exist",
            difference.verb,
            difference.flag
        );
    }
}

/// Flags that may not be on the list under any verb.
const REQUIRED: [&str; 30] = [
    "-f",
    "-F",
    "-O",
    "-o",
    "-p",
    "-q",
    "-U",
    "-n",
    "-c",
    "-W",
    "-m",
    "-S",
    "-t",
    "-T",
    "-b",
    "-u",
    "-l",
    "-r",
    "-a",
    "-d",
    "-s",
    "-i",
    "--image-opts",
    "--target-is-zero",
    "--bitmaps",
    "--backing-format",
    "--force-share",
    "--preallocation",
    "--shrink",
    "--output",
];

#[test]
fn what_people_use_every_day_is_not_on_the_list() {
    for difference in OTHERS {
        assert!(!REQUIRED.contains(&difference.flag), "{} {}", difference.verb, difference.flag);
    }
}

/// Returns a flag's letter, if it has one, and its name, from a verb's own help.
fn listed(line: &str) -> Option<(Option<char>, &str)> {
    let mut words = line.split_whitespace().map(|word| word.trim_end_matches(','));
    let (first, second) = (words.next()?, words.next().unwrap_or_default());
    match (first.strip_prefix("--"), first.strip_prefix('-'), second.strip_prefix("--")) {
        (Some(name), ..) => Some((None, name)),
        (None, Some(letter), Some(name)) => Some((letter.chars().next(), name)),
        _ => None,
    }
}

#[test]
fn the_names_that_newer_versions_have_for_flags_are_understood_too() {
    let command = command();
    for verb in FLAGS {
        let help = std::process::Command::new("qemu-img").args([verb.name, "--help"]).output();
        let help = help.map(|output| String::from_utf8(output.stdout).unwrap()).unwrap_or_default();
        if !help.contains("Arguments:") {
            return eprintln!("skipped: this needs qemu-img 10, whose verbs have a help each");
        }
        let own = command.find_subcommand(verb.name).unwrap();
        let has_letter = |letter| {
            own.get_arguments().any(|one| one.get_short_and_visible_aliases().unwrap_or_default().contains(&letter))
        };
        let has_name = |name: &str| {
            let names = own
                .get_arguments()
                .flat_map(|one| one.get_long().into_iter().chain(one.get_all_aliases().unwrap_or_default()));
            names.into_iter().any(|own| own.starts_with(name))
        };
        for (letter, name) in help.lines().filter_map(listed) {
            let is_known = has_name(name) && letter.is_none_or(has_letter);
            assert!(name == "help" || is_known != (name == "object"), "{} --{name}", verb.name);
        }
    }
}
