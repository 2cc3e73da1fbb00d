//! One module for each command, and the list of commands that work on images.

mod amend;
pub(crate) mod bench;
mod bitmap;
mod check;
mod commit;
mod compare;
mod convert;
mod create;
pub(crate) mod ctl;
mod dd;
pub(crate) mod generate;
pub(crate) mod img_compat;
mod info;
mod map;
mod measure;
pub(crate) mod nbd;
mod rebase;
pub(crate) mod replay;
mod resize;
pub(crate) mod restore;
pub(crate) mod save;
pub(crate) mod serve;
mod snapshot;
pub(crate) mod state;
pub(crate) mod try_it;

use clap::Subcommand;

/// The commands that work on images: the same under the program's own name and under qemu-img's.
#[derive(Subcommand)]
pub(crate) enum ImageVerb {
    Create(create::Args),
    Info(info::Args),
    Check(check::Args),
    Map(map::Args),
    Measure(measure::Args),
    Convert(Box<convert::Args>),
    Compare(compare::Args),
    Resize(resize::Args),
    Commit(commit::Args),
    Rebase(rebase::Args),
    Dd(dd::Args),
    Bitmap(bitmap::Args),
    Snapshot(snapshot::Args),
    Amend(amend::Args),
}

impl ImageVerb {
    pub(crate) fn run(&self) -> anyhow::Result<()> {
        match self {
            Self::Create(args) => create::run(args),
            Self::Info(args) => info::run(args),
            Self::Check(args) => check::run(args),
            Self::Map(args) => map::run(args),
            Self::Measure(args) => measure::run(args),
            Self::Convert(args) => convert::run(args),
            Self::Compare(args) => compare::run(args),
            Self::Resize(args) => resize::run(args),
            Self::Commit(args) => commit::run(args),
            Self::Rebase(args) => rebase::run(args),
            Self::Dd(args) => dd::run(args),
            Self::Bitmap(args) => bitmap::run(args),
            Self::Snapshot(args) => snapshot::run(args),
            Self::Amend(args) => amend::run(args),
        }
    }
}
