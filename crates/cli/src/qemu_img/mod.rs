//! The program under the name `qemu-img`: that program's words, output and exit codes.
//!
//! The commands are the same as under the program's own name. Three things differ: the options before the verb, the
//! messages for wrong usage, and `bench`, which is a different command.

mod bench;
mod usage;
mod words;

pub(crate) use words::with_words;

use crate::arguments;
use crate::commands::ImageVerb;
use crate::compat::VERSION;
use crate::images::{LOCK_TIMEOUT_VARIABLE, set_lock_timeout};
use crate::output::program::QEMU_IMG;
use crate::output::{self, logging};
use anyhow::{Context, bail};
use clap::{CommandFactory, FromArgMatches, Parser};
use std::ffi::OsString;

/// The only warning that qemu-img has, too: an image to be written was only guessed to be raw. And that it waits, and for
/// what.
const FILTER: &str = "error,ringdisk_image::open=warn,ringdisk::waiting=warn";

#[derive(Parser)]
#[command(name = QEMU_IMG, disable_help_subcommand = true, infer_long_args = true, args_override_self = true)]
struct QemuImg {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(clap::Subcommand)]
enum Verb {
    #[command(flatten)]
    Image(ImageVerb),
    Bench(bench::Args),
}

/// Returns the parser of verbs and flags.
pub(crate) fn command() -> clap::Command {
    QemuImg::command()
}

pub(crate) fn main() -> anyhow::Result<()> {
    let mut arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
    let trace = match global_options(&mut arguments)? {
        Global::Done => return Ok(()),
        Global::GoOn { trace } => trace,
    };
    logging::start(if trace { Some("trace") } else { None }, FILTER)?;
    if let Ok(seconds) = std::env::var(LOCK_TIMEOUT_VARIABLE) {
        let seconds = arguments::integer(0..=u64::from(drive::LOCK_TIMEOUT_MAX_S))(&seconds);
        set_lock_timeout(seconds.context(LOCK_TIMEOUT_VARIABLE)?);
    }
    let verb = arguments.first().map(|verb| verb.to_string_lossy().into_owned()).unwrap_or_default();
    if verb.is_empty() {
        return Err(usage::error("Not enough arguments"));
    }
    usage::refuse_objects(&arguments)?;
    let words = std::iter::once(OsString::from(QEMU_IMG)).chain(arguments);
    let parsed = command().try_get_matches_from(words).and_then(|matches| QemuImg::from_arg_matches(&matches));
    match parsed {
        Ok(QemuImg { verb: Verb::Image(verb) }) => verb.run(),
        Ok(QemuImg { verb: Verb::Bench(args) }) => bench::run(&args),
        Err(error) => usage::explain(&verb, &error),
    }
}

/// The options before the verb.
enum Global {
    Done,
    GoOn { trace: bool },
}

fn global_options(arguments: &mut Vec<OsString>) -> anyhow::Result<Global> {
    let mut trace = false;
    while let Some(word) = arguments.first().map(|word| word.to_string_lossy().into_owned()) {
        let (name, attached) = match word.split_once('=') {
            Some((name, value)) if name.starts_with("--") => (name.to_owned(), Some(value.to_owned())),
            _ if word.starts_with("-T") && word.len() > 2 => ("-T".to_owned(), Some(word[2..].to_owned())),
            _ => (word.clone(), None),
        };
        match name.as_str() {
            "-h" | "--help" => {
                output::print(&usage::help())?;
                return Ok(Global::Done);
            }
            "-V" | "--version" => {
                let own = env!("CARGO_PKG_VERSION");
                output::print(&format!("qemu-img version {VERSION} (Ringdisk {own})\n"))?;
                return Ok(Global::Done);
            }
            "-T" | "--trace" => {
                arguments.remove(0);
                let value = match attached {
                    Some(value) => value,
                    None if arguments.is_empty() => bail!("option requires an argument -- 'T'"),
                    None => arguments.remove(0).to_string_lossy().into_owned(),
                };
                refuse_trace_files(&value)?;
                trace = true;
            }
            _ if name.starts_with('-') => return Err(usage::error(&format!("unrecognized option '{word}'"))),
            _ => break,
        }
    }
    Ok(Global::GoOn { trace })
}

/// Trace events are Ringdisk's own and go to standard error, so only the pattern has an effect.
fn refuse_trace_files(value: &str) -> anyhow::Result<()> {
    match value.split(',').find(|part| part.starts_with("file=") || part.starts_with("events=")) {
        Some(part) => bail!("--trace: '{part}' is not supported: events go to standard error"),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests;
