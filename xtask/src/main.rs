//! The project's own commands, run as `cargo xtask`: `ci` is the only definition of the tests, `bench` compares Ringdisk
//! with its peers, `deb` builds the Debian package.

#![forbid(unsafe_code)]

mod arrows;
mod bench;
mod ci;
mod command;
mod counts;
mod documents;
mod folder_arrows;
mod packages;
mod packaging;
mod tidy;
mod workspace;

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "cargo xtask", about = "The project's own commands")]
struct Arguments {
    #[command(subcommand)]
    command: Subcommands,
}

#[derive(Subcommand)]
enum Subcommands {
    /// Every check and test of the project, in order, with a summary.
    Ci(ci::CiArguments),
    /// Ringdisk beside qemu-storage-daemon and fio, in one run; writes docs/benchmarks-fast-path.md.
    Bench(bench::BenchArguments),
    /// The Debian package: the program, its manual pages, the completion for shells, the units of systemd.
    Deb,
}

fn main() -> anyhow::Result<()> {
    match Arguments::parse().command {
        Subcommands::Ci(arguments) => ci::run(&arguments),
        Subcommands::Bench(arguments) => bench::run(&arguments),
        Subcommands::Deb => packaging::deb(),
    }
}
