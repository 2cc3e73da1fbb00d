//! `ringdisk generate`: what a package installs beside the program and what is made from the command line's definition:
//! manual pages, and the completion of words in shells.

use anyhow::Context;
use clap::Command;
use clap_complete::Shell;
use std::path::{Path, PathBuf};

/// Write the manual pages and the shells' completions to a directory, for packages.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Where to: DIR/man and DIR/completions are made.
    #[arg(value_name = "DIR")]
    directory: PathBuf,
}

pub(crate) fn run(args: &Args, mut command: Command) -> anyhow::Result<()> {
    let (man, completions) = (args.directory.join("man"), args.directory.join("completions"));
    for directory in [&man, &completions] {
        std::fs::create_dir_all(directory).with_context(|| cannot_write(directory))?;
    }
    let pages = without_help(command.clone());
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        let name = command.get_name().to_owned();
        clap_complete::generate_to(shell, &mut command, name, &completions)
            .with_context(|| cannot_write(&completions))?;
    }
    clap_mangen::generate_to(pages, &man).with_context(|| cannot_write(&man))
}

/// Every command has a page of its own, so `help` needs none for each.
fn without_help(command: Command) -> Command {
    let inner = command.disable_help_subcommand(true);
    inner.mut_subcommands(without_help)
}

fn cannot_write(directory: &Path) -> String {
    format!("cannot write to '{}'", directory.display())
}
