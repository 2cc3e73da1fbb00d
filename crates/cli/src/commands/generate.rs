//! `ringdisk generate`: files that a package installs beside the program, made from the definition of the command line:
//! manual pages and shell completion.

use anyhow::Context;
use clap::Command;
use clap_complete::Shell;
use std::path::{Path, PathBuf};

/// Write the manual pages and the shell completions to a directory, for packages.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The directory: DIR/man and DIR/completions are created.
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

/// Every command has a page of its own, so `help` needs no page for each command.
fn without_help(command: Command) -> Command {
    let inner = command.disable_help_subcommand(true);
    inner.mut_subcommands(without_help)
}

fn cannot_write(directory: &Path) -> String {
    format!("cannot write to '{}'", directory.display())
}
