//! `ringdisk`: gives virtual machines their disks. The commands are thin; the work is in the rooms below.
//!
//! Exit codes: 0 done, 1 failed, 2 wrong usage. A command that is interrupted ends by the signal. Called by the name
//! `qemu-img`, the program works as qemu-img, with its exit codes.

#![forbid(unsafe_code)]

mod arguments;
mod commands;
mod compat;
mod images;
mod machine;
mod nbd_options;
mod output;
mod qemu_img;
mod scratch;
mod signals;
mod threads;

use clap::{CommandFactory, Parser, Subcommand};
use output::{logging, program};
use std::process::ExitCode;

/// Disks for virtual machines: create images, look at them, serve them over vhost-user, measure.
#[derive(Parser)]
#[command(name = "ringdisk", version, max_term_width = 100)]
struct Cli {
    /// What to log to standard error: off, error, warn, info, debug, trace, or a filter as in RUST_LOG.
    #[arg(long, global = true, value_name = "LEVEL")]
    log_level: Option<String>,
    /// How long to wait for a locked image that no living process seems to use: a process that was killed keeps its
    /// lock until its last write has landed. In seconds [default: 30 for served disks, 5 for other commands].
    #[arg(long, global = true, value_name = "SECONDS", env = images::LOCK_TIMEOUT_VARIABLE)]
    #[arg(value_parser = arguments::integer::<u32>(0..=u64::from(drive::LOCK_TIMEOUT_MAX_S)))]
    lock_timeout_s: Option<u32>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    #[command(flatten)]
    Image(commands::ImageVerb),
    Serve(commands::serve::Args),
    Nbd(commands::nbd::Args),
    Ctl(commands::ctl::Args),
    Try(commands::try_it::Args),
    Save(commands::save::Args),
    Restore(commands::restore::Args),
    State(commands::state::Args),
    Replay(commands::replay::Args),
    Bench(commands::bench::Args),
    ImgCompat(commands::img_compat::Args),
    #[command(hide = true)]
    Generate(commands::generate::Args),
}

fn main() -> ExitCode {
    let done = if program::is_qemu_img() { qemu_img::main() } else { ringdisk() };
    if let Err(error) = &done {
        match program::is_qemu_img().then(|| as_qemu_img(error)).flatten() {
            Some(said) => output::error(&anyhow::anyhow!(said)),
            None => output::error(error),
        }
    }
    // A cluster may keep it waiting.
    file_rbd::wait_for_closes();
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            signals::end_if_interrupted();
            output::exit_code(&error)
        }
    }
}

/// Returns the error in qemu-img's words, which scripts look for, if they differ from ours.
fn as_qemu_img(error: &anyhow::Error) -> Option<String> {
    let arguments: Vec<String> = std::env::args_os().skip(1).map(|word| word.to_string_lossy().into_owned()).collect();
    let is_about_the_image = !signals::has_interrupted() && !output::is_locked(error);
    is_about_the_image.then(|| qemu_img::with_words(&format!("{error:#}"), &arguments)).flatten()
}

fn ringdisk() -> anyhow::Result<()> {
    let cli = Cli::parse();
    logging::start(cli.log_level.as_deref(), logging::DEFAULT_FILTER)?;
    cli.lock_timeout_s.into_iter().for_each(images::set_lock_timeout);
    match cli.command {
        Command::Image(verb) => verb.run(),
        Command::Serve(args) => commands::serve::run(&args, cli.lock_timeout_s),
        Command::Nbd(args) => commands::nbd::run(&args, cli.lock_timeout_s),
        Command::Ctl(args) => commands::ctl::run(&args),
        Command::Try(args) => commands::try_it::run(&args),
        Command::Save(args) => commands::save::run(&args),
        Command::Restore(args) => commands::restore::run(&args),
        Command::State(args) => commands::state::run(&args),
        Command::Replay(args) => commands::replay::run(&args),
        Command::Bench(args) => commands::bench::run(&args),
        Command::ImgCompat(args) => commands::img_compat::run(&args),
        Command::Generate(args) => commands::generate::run(&args, Cli::command()),
    }
}
