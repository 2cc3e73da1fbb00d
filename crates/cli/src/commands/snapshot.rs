//! `ringdisk snapshot`: internal snapshots of a disk that nobody uses, with qemu-img's output and exit codes.

use crate::image_name::ImageName;
use crate::output::{self, printable};
use crate::tool::{ProgressArgs, Watch};
use anyhow::{Context, bail};
use chrono::{DateTime, Local};
use drive::{EngineOpener, human_size};
use image::{Edit, NewSnapshot, Opener, Role, Snapshot, SnapshotName, inspect};
use std::fmt::Write as _;
use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

/// List, take, apply or delete snapshots inside an image. A power cut leaves the image before or the image after.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// List the snapshots; so does naming the image only.
    #[arg(short, long, action = clap::ArgAction::Count)]
    list: u8,
    /// Take a snapshot.
    #[arg(short, long, value_name = "NAME", action = clap::ArgAction::Append)]
    create: Vec<String>,
    /// Make the disk what it was at a snapshot: an id, or a name. Enabled bitmaps are marked wholly.
    #[arg(short, long, value_name = "SNAPSHOT", action = clap::ArgAction::Append)]
    apply: Vec<String>,
    /// Delete the (first) snapshot with this name.
    #[arg(short, long, value_name = "NAME", action = clap::ArgAction::Append)]
    delete: Vec<String>,
    /// Format of the image; guessed from its contents where not given.
    #[arg(short, long, value_name = "FORMAT")]
    format: Option<String>,
    /// List even if somebody else writes the image; what is shown may be out of date.
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
        return Err(output::usage("Cannot mix '-l', '-a', '-c', '-d'"));
    }
    let ImageName { path, format } = ImageName::of(&args.file, args.format.as_deref(), args.image_opts)?;
    let named = named.map(|names| names.first());
    let reads_only = named.iter().all(|name| name.is_none());
    if args.force_share && !reads_only {
        bail!("Could not open '{}': force-share=on can only be used with read-only images", path.display());
    }
    let opener = EngineOpener::default();
    let opener = if args.force_share { opener.without_locks() } else { opener };
    let role = if reads_only { Role::ReadOnly } else { Role::Writable };
    let file = opener.open(&path, role)?;
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
            let description = inspect(&path, &file, format)?;
            return output::print(&table(&description.snapshots));
        }
    };
    let mut watch = Watch::start(&args.progress)?;
    let done = watch.run(|control| jobs::edit(&path, &file, format, &edit, control));
    done.map_err(anyhow::Error::from).with_context(|| match watch.was_interrupted() {
        true => format!("{failed} (the image is as it was)"),
        false => failed,
    })
}

fn new(name: &str) -> anyhow::Result<NewSnapshot> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).context("the clock is set before 1970")?;
    let date_seconds = u32::try_from(now.as_secs()).context("the clock is set behind 2106")?;
    Ok(NewSnapshot { name: name.to_owned(), date_seconds, date_nanoseconds: now.subsec_nanos() })
}

/// The snapshots as qemu-img 10 shows them: nothing where there are none.
pub(crate) fn table(snapshots: &[Snapshot]) -> String {
    if snapshots.is_empty() {
        return String::new();
    }
    let mut text = format!(
        "Snapshot list:\n{:<7} {:<16} {:>8} {:>19} {:>15} {:>10}\n",
        "ID", "TAG", "VM_SIZE", "DATE", "VM_CLOCK", "ICOUNT"
    );
    for snapshot in snapshots {
        let date = DateTime::from_timestamp(i64::from(snapshot.date_seconds), 0).unwrap_or_default();
        let date = date.with_timezone(&Local).format("%Y-%m-%d %H:%M:%S").to_string();
        let seconds = snapshot.vm_clock_nanoseconds / 1_000_000_000;
        let (hours, minutes) = (seconds / 3600, seconds / 60 % 60);
        let milliseconds = snapshot.vm_clock_nanoseconds / 1_000_000 % 1000;
        let clock = format!("{hours:04}:{minutes:02}:{:02}.{milliseconds:03}", seconds % 60);
        let icount = snapshot.icount.map_or_else(|| "--".to_owned(), |count| count.to_string());
        let size = human_size(snapshot.vm_state_bytes);
        let (id, name) = (printable(&snapshot.id), printable(&snapshot.name));
        // A line that cannot be written to a string does not exist.
        let _ = writeln!(text, "{id:<7} {name:<16} {size:>8} {date:>19} {clock:>15} {icount:>10}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_columns_are_those_of_qemu_img_10() {
        let mut snapshot = Snapshot::default();
        (snapshot.id, snapshot.name) = ("1".to_owned(), "a-name-that-is-longer".to_owned());
        (snapshot.vm_state_bytes, snapshot.vm_clock_nanoseconds) = (3 << 20, 3_723_004_000_000);
        let text = table(&[snapshot]);
        let (head, row) = text.trim_end().rsplit_once('\n').unwrap();
        assert_eq!(
            head,
            "Snapshot list:\nID      TAG               VM_SIZE                DATE        VM_CLOCK     ICOUNT"
        );
        assert!(row.starts_with("1       a-name-that-is-longer    3 MiB "), "{row}");
        assert!(row.ends_with(":00  0001:02:03.004         --"), "{row}");
    }
}
