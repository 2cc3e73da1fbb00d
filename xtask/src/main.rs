//! The project's own commands, run as `cargo xtask`: `ci` is the only definition of the tests.

#![forbid(unsafe_code)]

mod arrows;
mod ci;
mod command;
mod counts;
mod documents;
mod packages;
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
}

fn main() -> anyhow::Result<()> {
    match Arguments::parse().command {
        Subcommands::Ci(arguments) => ci::run(&arguments),
    }
}
