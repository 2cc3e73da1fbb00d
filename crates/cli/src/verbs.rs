//! The verbs that work on images: the same under the program's own name and under qemu-img's.

use crate::commands;
use clap::Subcommand;

#[derive(Subcommand)]
pub(crate) enum ImageVerb {
    Create(commands::create::Args),
    Info(commands::info::Args),
    Check(commands::check::Args),
    Map(commands::map::Args),
    Measure(commands::measure::Args),
    Convert(Box<commands::convert::Args>),
    Compare(commands::compare::Args),
    Resize(commands::resize::Args),
    Commit(commands::commit::Args),
    Rebase(commands::rebase::Args),
    Dd(commands::dd::Args),
    Bitmap(commands::bitmap::Args),
    Snapshot(commands::snapshot::Args),
    Amend(commands::amend::Args),
}

impl ImageVerb {
    pub(crate) fn run(&self) -> anyhow::Result<()> {
        match self {
            Self::Create(args) => commands::create::run(args),
            Self::Info(args) => commands::info::run(args),
            Self::Check(args) => commands::check::run(args),
            Self::Map(args) => commands::map::run(args),
            Self::Measure(args) => commands::measure::run(args),
            Self::Convert(args) => commands::convert::run(args),
            Self::Compare(args) => commands::compare::run(args),
            Self::Resize(args) => commands::resize::run(args),
            Self::Commit(args) => commands::commit::run(args),
            Self::Rebase(args) => commands::rebase::run(args),
            Self::Dd(args) => commands::dd::run(args),
            Self::Bitmap(args) => commands::bitmap::run(args),
            Self::Snapshot(args) => commands::snapshot::run(args),
            Self::Amend(args) => commands::amend::run(args),
        }
    }
}
