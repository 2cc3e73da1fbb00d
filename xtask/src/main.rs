//! The project's own commands, run as `cargo xtask`: `ci` is the only definition of the tests, `bench` compares
//! Ringdisk with its peers, `deb` builds and tries the Debian package, `mutants` looks for code that no test would
//! notice.

#![forbid(unsafe_code)]

mod arrows;
mod bench;
mod ci;
mod command;
mod counts;
mod documents;
mod file_circles;
mod folder_arrows;
mod format_names;
mod mutants;
mod packages;
mod packaging;
mod source_paths;
mod tidy;
mod try_package;
mod workspace;

use clap::{Parser, Subcommand};
use std::path::PathBuf;

#[derive(Parser)]
#[command(name = "cargo xtask", about = "The project's own commands")]
struct Arguments {
    #[command(subcommand)]
    command: Subcommands,
}

#[derive(Subcommand)]
enum Subcommands {
    /// Run every check and test of the project, in order, with a summary.
    Ci(ci::CiArguments),
    /// Measure Ringdisk beside qemu-storage-daemon and fio, in one run; writes docs/benchmarks-fast-path.md.
    Bench(bench::BenchArguments),
    /// Build the Debian package: the program, its manual pages, the shell completion, the units of systemd.
    Deb(DebArguments),
    /// Changes the code that guards data, one place at a time, and says which changes no test notices. Needs cargo-mutants.
    Mutants(mutants::MutantsArguments),
}

#[derive(clap::Args)]
struct DebArguments {
    /// Then install it in a new Debian in a temporary directory, and try all of its parts. Needs root and debootstrap.
    #[arg(long = "try")]
    try_it: bool,
    /// Try this package instead of building one.
    #[arg(long, value_name = "FILE", requires = "try_it")]
    package: Option<PathBuf>,
    /// Pack this build of the program, and make none.
    #[arg(long, value_name = "PATH", conflicts_with = "package")]
    binary: Option<PathBuf>,
}

fn deb(arguments: &DebArguments) -> anyhow::Result<()> {
    let build = || packaging::deb(arguments.binary.as_deref());
    let package = arguments.package.clone().map_or_else(build, Ok)?;
    println!("{}", package.display());
    if arguments.try_it { try_package::run(&package) } else { Ok(()) }
}

fn main() -> anyhow::Result<()> {
    match Arguments::parse().command {
        Subcommands::Ci(arguments) => ci::run(&arguments),
        Subcommands::Bench(arguments) => bench::run(&arguments),
        Subcommands::Deb(arguments) => deb(&arguments),
        Subcommands::Mutants(arguments) => mutants::run(&arguments),
    }
}
