//! `ringdisk snapshot`: internal snapshots of a disk that nobody uses, with qemu-img's output and exit codes.

use crate::images::{files, image_name, name_force_share};
use crate::output::{self, ProgressArgs, Watch, snapshot_table};
use anyhow::{Context, bail};
use image::{Edit, NewSnapshot, Opener, Role, SnapshotName, inspect};
use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

/// List, take, apply or delete snapshots inside an image.
///
/// A power cut leaves the old image or the new one.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// List the snapshots; this is the default.
    #[arg(short, long, action = clap::ArgAction::Count)]
    list: u8,
    /// Take a snapshot.
    #[arg(short, long, value_name = "NAME", action = clap::ArgAction::Append)]
    create: Vec<String>,
    /// Return the disk to a snapshot: an id, or a name. Enabled bitmaps are marked dirty everywhere.
    #[arg(short, long, value_name = "SNAPSHOT", action = clap::ArgAction::Append)]
    apply: Vec<String>,
    /// Delete the (first) snapshot with this name.
    #[arg(short, long, value_name = "NAME", action = clap::ArgAction::Append)]
    delete: Vec<String>,
    /// Format of the image; by default guessed from its contents.
    #[arg(short, long, value_name = "FORMAT")]
    format: Option<String>,
    /// List even if another process writes the image; the output may be out of date.
    #[arg(short = 'U', long)]
    force_share: bool,
    /// FILE is a description of an image: driver=FORMAT,file.filename=FILE.
    #[arg(long)]
    image_opts: bool,
    #[command(flatten)]
    progress: ProgressArgs,
    /// The image.
    file: PathBuf,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let named = [&args.create, &args.apply, &args.delete];
    if named.iter().map(|names| names.len()).sum::<usize>() + usize::from(args.list) > 1 {
        return Err(output::usage_of("snapshot", "Cannot mix '-l', '-a', '-c', '-d'"));
    }
    let (name, format) = image_name(&args.file, args.format.as_deref(), args.image_opts)?.whole()?;
    let named = named.map(|names| names.first());
    let reads_only = named.iter().all(|name| name.is_none());
    if args.force_share && !reads_only {
        bail!("Could not open '{}': force-share=on can only be used with read-only images", name);
    }
    let opener = files();
    let opener = if args.force_share { opener.without_locks() } else { opener };
    let role = if reads_only { Role::ReadOnly } else { Role::Writable };
    let file = opener.open(&name, role);
    let file = file.map_err(|error| if reads_only { name_force_share(error) } else { error })?;
    let (edit, failed) = match named {
        [Some(name), ..] => (Edit::CreateSnapshot(new(name)?), format!("Could not create snapshot '{name}'")),
        [_, Some(which), _] => {
            let edit = Edit::ApplySnapshot(SnapshotName::Any(which.to_owned()));
            (edit, format!("Could not apply snapshot '{which}'"))
        }
        [.., Some(name)] => {
            (Edit::DeleteSnapshot(SnapshotName::named(name)), format!("Could not delete snapshot '{name}'"))
        }
        _ => {
            let description = inspect(name, &file, format)?;
            return output::print(&snapshot_table(&description.snapshots));
        }
    };
    let mut watch = Watch::start(&args.progress)?;
    let done = watch.run(|control| jobs::edit(&name.to_string(), &file, format, &edit, control));
    done.map_err(anyhow::Error::from).with_context(|| match watch.was_interrupted() {
        true => format!("{failed} (the image is as it was)"),
        false => failed,
    })
}

fn new(name: &str) -> anyhow::Result<NewSnapshot> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).context("the clock is set before 1970")?;
    let date_seconds = u32::try_from(now.as_secs()).context("the clock is set behind 2106")?;
    Ok(NewSnapshot::new(name).with(|new| {
        new.date_seconds = date_seconds;
        new.date_nanoseconds = now.subsec_nanos();
    }))
}
