//! `ringdisk state`: the saved state of a machine, in a file of its own or in an image.

use crate::images::{files, name_force_share, opened_name, sync_directory};
use crate::output::{self, ProgressArgs, SparseFile, Watch};
use anyhow::{Context, bail};
use block::{Error, ErrorKind, Result};
use image::{Opener, Role};
use jobs::{Control, Progress};
use save::StateFile;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

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
        #[command(flatten)]
        progress: ProgressArgs,
    },
    /// Extract a state: QEMU's migration stream, as 'qemu -incoming' reads it.
    ///
    /// Zeros become holes of the new file. It gets its name when it is whole, so Ctrl-C leaves nothing of it. To
    /// standard output a state goes after it was compared with its checksum; one in an image has none.
    Extract(Extract),
}

#[derive(clap::Args)]
struct Extract {
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
    #[command(flatten)]
    progress: ProgressArgs,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    match &args.verb {
        Verb::Check { file, progress } => {
            let state = StateFile::open(file)?;
            let total_bytes = state.stream_bytes;
            Watch::start(progress)?.run(|control| {
                state.extract_telling(&mut std::io::sink(), &mut |done| moved(control, done, total_bytes))
            })?;
            let size = drive::human_size(total_bytes);
            if progress.quiet { Ok(()) } else { output::print(&format!("{size}: its checksum is right.\n")) }
        }
        Verb::Extract(extract) => {
            let mut watch = Watch::start(&extract.progress)?;
            match &extract.snapshot {
                None => from_state(extract, &mut watch),
                Some(snapshot) => from_image(extract, snapshot, &mut watch),
            }
        }
    }
}

/// Says how far it is, and fails once the user has interrupted it.
fn moved(control: &mut Control<'_>, done_bytes: u64, total_bytes: u64) -> Result<()> {
    (control.progress)(Progress { done_bytes: done_bytes.min(total_bytes), total_bytes });
    match control.cancel.load(Ordering::Relaxed) {
        true => Err(Error::new(ErrorKind::Cancelled, "interrupted")),
        false => Ok(()),
    }
}

fn from_state(extract: &Extract, watch: &mut Watch) -> anyhow::Result<()> {
    let state = StateFile::open(&extract.file)?;
    let length = state.stream_bytes;
    if !is_standard_output(&extract.target) {
        return to_file(&extract.target, |target| {
            Ok(watch.run(|control| state.extract_telling(target, &mut |done| moved(control, done, length)))?)
        });
    }
    // Whoever reads it cannot take back what it has done with a damaged one.
    let total = length.saturating_mul(2);
    Ok(watch.run(|control| {
        state.extract_telling(&mut std::io::sink(), &mut |done| moved(control, done, total))?;
        let mut told = |done: u64| moved(control, length.saturating_add(done), total);
        state.extract_telling(&mut std::io::stdout().lock(), &mut told)
    })?)
}

fn from_image(extract: &Extract, snapshot: &str, watch: &mut Watch) -> anyhow::Result<()> {
    let name = opened_name(&extract.file);
    let opener = if extract.force_share { files().without_locks() } else { files() };
    let image = opener.open(&name, Role::ReadOnly).map_err(name_force_share)?;
    let mut fill = |target: &mut dyn Write| -> anyhow::Result<()> {
        Ok(watch.run(|control| {
            let mut done = 0;
            let mut write = |piece: &[u8], total: u64| {
                target.write_all(piece).map_err(|error| Error::io("cannot write the machine's state", error))?;
                done += piece.len() as u64;
                moved(control, done, total)
            };
            image::read_vm_state(name.clone(), &image, snapshot, &mut write).map(drop)
        })?)
    };
    match is_standard_output(&extract.target) {
        true => fill(&mut std::io::stdout().lock()),
        false => to_file(&extract.target, fill),
    }
}

fn is_standard_output(target: &Path) -> bool {
    target == Path::new("-")
}

/// Fills a new file, with holes instead of zeros. It gets its name when it is whole and durable.
fn to_file(path: &Path, fill: impl FnOnce(&mut dyn Write) -> anyhow::Result<()>) -> anyhow::Result<()> {
    let exists = || format!("'{}' exists: remove it first, or choose another name", path.display());
    // A dangling link, too.
    if path.symlink_metadata().is_ok() {
        bail!(exists());
    }
    let name = path.file_name().with_context(|| format!("'{}' names no file", path.display()))?;
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut prefix = std::ffi::OsString::from(".");
    prefix.push(name);
    let new = tempfile::Builder::new().prefix(&prefix).suffix(".new").tempfile_in(directory);
    let new = new.with_context(|| format!("cannot make a file beside '{}'", path.display()))?;
    let mut sparse = SparseFile::new(new.as_file());
    fill(&mut sparse)?;
    sparse.finish().with_context(|| format!("cannot write '{}'", path.display()))?;
    new.as_file().sync_all().with_context(|| format!("cannot make '{}' durable", path.display()))?;
    let named = new.persist_noclobber(path).map_err(|error| error.error);
    named.with_context(|| match path.exists() {
        true => exists(),
        false => format!("cannot make '{}'", path.display()),
    })?;
    sync_directory(path)
}
