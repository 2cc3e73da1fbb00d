//! Messages for wrong usage, and `--help`.

use crate::compat::FLAGS;
use crate::output::print;
use crate::output::program::QEMU_IMG;
use anyhow::anyhow;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use std::ffi::OsString;
use std::fmt::Write as _;

/// Makes an error that points to `--help`.
pub(super) fn error(message: &str) -> anyhow::Error {
    anyhow!("{message}\nTry '{QEMU_IMG} --help' for more information")
}

/// As [`error`], but points to the help of a verb.
fn error_of(verb: &str, message: &str) -> anyhow::Error {
    anyhow!("{message}\nTry '{QEMU_IMG} {verb} --help' for more information")
}

/// Refuses `--object`, which defines secrets and similar objects for the whole command line: nothing here can use one.
pub(super) fn refuse_objects(arguments: &[OsString]) -> anyhow::Result<()> {
    let mut words = arguments.iter().map(|word| word.to_string_lossy());
    let is_object = |word: &str| word == "--object" || word.starts_with("--object=");
    match words.by_ref().take_while(|word| word != "--").any(|word| is_object(&word)) {
        true => Err(anyhow!("--object is not supported: encrypted images and other users of objects are not")),
        false => Ok(()),
    }
}

/// Describes the error in a command line as qemu-img does.
pub(super) fn explain(verb: &str, wrong: &clap::Error) -> anyhow::Result<()> {
    let context = |kind| match wrong.get(kind) {
        Some(ContextValue::String(text)) => text.clone(),
        Some(ContextValue::Strings(texts)) => texts.first().cloned().unwrap_or_default(),
        _ => String::new(),
    };
    Err(match wrong.kind() {
        ErrorKind::DisplayHelp => return print(&help()),
        ErrorKind::InvalidSubcommand | ErrorKind::MissingSubcommand => error(&format!("Command not found: {verb}")),
        ErrorKind::UnknownArgument => match context(ContextKind::InvalidArg) {
            option if option.starts_with('-') => error_of(verb, &format!("unrecognized option '{option}'")),
            _ => error(expected(verb)),
        },
        ErrorKind::MissingRequiredArgument => error(expected(verb)),
        ErrorKind::InvalidValue if context(ContextKind::InvalidArg).starts_with("--output") => {
            let value = context(ContextKind::InvalidValue);
            let older = "--output must be used with human or json as argument.";
            error_of(verb, &format!("--output expects 'human' or 'json' not '{value}': {older}"))
        }
        ErrorKind::InvalidValue if context(ContextKind::InvalidValue).is_empty() => {
            let option = context(ContextKind::InvalidArg);
            error(&format!("option '{}' requires an argument", option.split([' ', '=']).next().unwrap_or_default()))
        }
        _ => {
            let text = wrong.render().to_string();
            let first = text.lines().next().unwrap_or_default();
            anyhow!("{}", first.strip_prefix("error: ").unwrap_or(first).to_owned())
        }
    })
}

/// Returns the file names that a verb takes.
fn expected(verb: &str) -> &'static str {
    match verb {
        "compare" => "Expecting two image file names",
        "convert" => "Must specify image file name",
        "dd" => "Must specify both input and output files",
        "measure" => "Either --size N or one filename must be specified.",
        "resize" => "Not enough arguments",
        "bitmap" => "Expecting filename and bitmap name",
        "create" => "Expecting image file name",
        _ => "Expecting one image file name",
    }
}

/// Returns the verbs and their flags, from the table.
pub(super) fn help() -> String {
    let mut text = format!(
        "usage: {QEMU_IMG} [standard options] command [command options]\n\
         Ringdisk's image tool under qemu-img's name\n\n    \
         '-h', '--help'       show this\n    \
         '-V', '--version'    show the version\n    \
         '-T', '--trace'      show what the program does (its own events, not QEMU's)\n\n\
         Command syntax:\n"
    );
    for verb in FLAGS {
        let _ = write!(text, "  {}", verb.name);
        for flag in verb.flags {
            match flag.value {
                Some(value) if flag.name.starts_with("--") => drop(write!(text, " [{}={value}]", flag.name)),
                Some(value) => drop(write!(text, " [{} {value}]", flag.name)),
                None => drop(write!(text, " [{}]", flag.name)),
            }
        }
        let _ = writeln!(text, " {}", verb.operands);
    }
    text.push_str("\nSupported formats: qcow2 raw\n'ringdisk img-compat' lists what differs from qemu-img.\n");
    text
}
