//! `ringdisk state`: the saved state of a machine, in a file of its own or in an image.

use crate::images::{files, name_force_share, opened_name, sync_directory};
use crate::output::{self, SparseFile};
use anyhow::{Context, bail};
use image::{Opener, Role};
use save::StateFile;
use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// Check the saved state of a machine, or extract it from its file.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(clap::Subcommand)]
enum Verb {
    /// Compare a state with its checksum.
    Check {
        /// A file of 'save'.
        file: PathBuf,
    },
    /// Extract a state: QEMU's migration stream, as 'qemu -incoming' reads it. Zeros become holes of the new file.
    Extract {
        /// A file of 'save'; with -l, a qcow2 image.
        file: PathBuf,
        /// The file to create, or - for standard output.
        target: PathBuf,
        /// Extract the state of this internal snapshot of the image, as QEMU's savevm stores it.
        #[arg(short = 'l', long, value_name = "SNAPSHOT")]
        snapshot: Option<String>,
        /// Read the image even if another process writes it; the data may be out of date.
        #[arg(short = 'U', long)]
        force_share: bool,
    },
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    match &args.verb {
        Verb::Check { file } => {
            let state = StateFile::open(file)?;
            state.check()?;
            output::print(&format!("{}: its checksum is right.\n", drive::human_size(state.stream_bytes)))
        }
        Verb::Extract { file, target, snapshot: None, .. } => {
            let state = StateFile::open(file)?;
            to_target(target, |target| Ok(state.extract(target)?))
        }
        Verb::Extract { file, target, snapshot: Some(snapshot), force_share } => {
            let name = opened_name(file);
            let opener = if *force_share { files().without_locks() } else { files() };
            let image = opener.open(&name, Role::ReadOnly).map_err(name_force_share)?;
            to_target(target, |target| {
                let mut write = |piece: &[u8]| {
                    let written = target.write_all(piece);
                    written.map_err(|error| block::Error::io("cannot write the machine's state", error))
                };
                Ok(image::read_vm_state(name.clone(), &image, snapshot, &mut write).map(drop)?)
            })
        }
    }
}

/// Fills a new file, with holes instead of zeros, which is removed again after an error; or standard output.
fn to_target(path: &Path, fill: impl FnOnce(&mut dyn Write) -> anyhow::Result<()>) -> anyhow::Result<()> {
    if path == Path::new("-") {
        return fill(&mut std::io::stdout().lock());
    }
    if path.exists() {
        bail!("'{}' exists: remove it first, or choose another name", path.display());
    }
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
    let file = file.as_mut().map_err(|error| std::io::Error::from(error.kind()));
    let file = &*file.with_context(|| format!("cannot make '{}'", path.display()))?;
    let mut sparse = SparseFile::new(file);
    let filled = fill(&mut sparse).and_then(|()| {
        sparse.finish().with_context(|| format!("cannot write '{}'", path.display()))?;
        file.sync_all().with_context(|| format!("cannot make '{}' durable", path.display()))?;
        sync_directory(path)
    });
    filled.inspect_err(|_| drop(std::fs::remove_file(path)))
}
