//! `ringdisk`: gives virtual machines their disks. The commands are thin; the work is in the rooms below.
//!
//! Exit codes: 0 done, 1 failed, 2 wrong usage.

#![forbid(unsafe_code)]

mod commands;
#[allow(dead_code, reason = "tests/guests.rs uses what the commands do not")]
mod guest;
mod load;
mod logging;
mod output;
mod progress;
mod signals;
mod tool;

use clap::{Parser, Subcommand};
use std::process::ExitCode;

/// Disks for virtual machines: create images, look at them, serve them over vhost-user, measure.
#[derive(Parser)]
#[command(name = "ringdisk", version, max_term_width = 100)]
struct Cli {
    /// What to log to standard error: off, error, warn, info, debug, trace, or a filter as in RUST_LOG.
    #[arg(long, global = true, value_name = "LEVEL")]
    log_level: Option<String>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Create(commands::create::Args),
    Info(commands::info::Args),
    Check(commands::check::Args),
    Map(commands::map::Args),
    Measure(commands::measure::Args),
    Convert(Box<commands::convert::Args>),
    Compare(commands::compare::Args),
    Resize(commands::resize::Args),
    Serve(commands::serve::Args),
    Try(commands::try_it::Args),
    Bench(commands::bench::Args),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let done = logging::start(cli.log_level.as_deref()).and_then(|()| match cli.command {
        Command::Create(args) => commands::create::run(&args),
        Command::Info(args) => commands::info::run(&args),
        Command::Check(args) => commands::check::run(&args),
        Command::Map(args) => commands::map::run(&args),
        Command::Measure(args) => commands::measure::run(&args),
        Command::Convert(args) => commands::convert::run(&args),
        Command::Compare(args) => commands::compare::run(&args),
        Command::Resize(args) => commands::resize::run(&args),
        Command::Serve(args) => commands::serve::run(&args),
        Command::Try(args) => commands::try_it::run(&args),
        Command::Bench(args) => commands::bench::run(&args),
    });
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            output::error(&error);
            output::exit_code(&error)
        }
    }
}
