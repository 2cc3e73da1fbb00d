//! Changes one operator or return value of the code that guards data at a time, and runs the tests on each change: a thin
//! wrapper of cargo-mutants. A sample, drawn by a seed, because all of them take days.
//!
//! All tests of the crates that rest on the changed code run on each change, or with `--unit` the unit tests of its crate.

use crate::command::Program;
use crate::workspace;
use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Code that guards data: its room, files there, and the crates whose tests must notice a change.
type Guard = (&'static str, &'static [&'static str], &'static [&'static str]);

const GUARDS: [Guard; 6] = [
    (
        "format-qcow2",
        &[
            "live/allocator.rs",
            "live/deferred_free.rs",
            "live/flush.rs",
            "live/free_runs.rs",
            "live/lookup.rs",
            "live/overlap_guard.rs",
            "live/packing.rs",
            "live/part_write.rs",
            "live/refcounts.rs",
            "live/write.rs",
            "live/zero.rs",
            "check/*.rs",
            "edit/header_switch.rs",
            "edit/mod.rs",
            "edit/refcounts.rs",
        ],
        &["ringdisk-format-qcow2"],
    ),
    (
        "format-scratch",
        &["free_pages.rs", "kept.rs", "state.rs", "unwritten.rs", "write.rs"],
        &["ringdisk-format-scratch", "ringdisk-image"],
    ),
    ("image", &["chain/copy_up.rs", "chain/slow_path.rs", "chain/queue.rs"], &["ringdisk-image"]),
    (
        "virtio",
        &["device_ring.rs", "packed_device_ring.rs", "request.rs", "ring_access.rs", "ring_access/*.rs"],
        &["ringdisk-virtio", "ringdisk-virtio-blk", "ringdisk-driver"],
    ),
    ("virtio-blk", &["queue.rs", "queue/*.rs"], &["ringdisk-virtio-blk", "ringdisk-driver"]),
    (
        "memory",
        &["guest.rs", "mapping.rs", "placement.rs", "share.rs", "fault.rs", "fault/*.rs"],
        &["ringdisk-memory", "ringdisk-export-vhost-user"],
    ),
];
/// So long may all of a run take.
const LIMIT: Duration = Duration::from_secs(48 * 3600);

#[derive(clap::Args)]
pub(crate) struct MutantsArguments {
    /// Only changes in this file, from the root of the tree. May be repeated [default: the code that guards data].
    #[arg(long, value_name = "FILE")]
    file: Vec<PathBuf>,
    /// About how many changes; all of them if there are fewer.
    #[arg(long, value_name = "N", default_value_t = 50)]
    sample: usize,
    /// Which ones.
    #[arg(long, value_name = "SEED", default_value_t = 1)]
    seed: u64,
    /// How long the tests of one change may take, in seconds.
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    timeout: u64,
    /// Run only the unit tests of the crate that is changed, which is quick.
    #[arg(long)]
    unit: bool,
    /// Change the tree itself, and put it back afterwards. What is built there is used. Nobody may work in it meanwhile.
    #[arg(long)]
    in_place: bool,
    /// Only say which changes would be tried.
    #[arg(long)]
    list: bool,
    /// Where the logs go.
    #[arg(long, value_name = "DIRECTORY", default_value = "target/mutants")]
    output: PathBuf,
}

/// Which of the changes met which end.
#[derive(Debug, Default)]
struct Ends {
    caught: Vec<String>,
    timed_out: Vec<String>,
    unviable: Vec<String>,
    missed: Vec<String>,
}

/// A part of the changes: cargo-mutants takes every `of`th one, beginning with number `index`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Shard {
    index: u64,
    of: u64,
}

impl Shard {
    /// A part that has about `sample` of `total` changes.
    fn of_seed(total: usize, sample: usize, seed: u64) -> Self {
        let of = (total / sample.max(1)).max(1) as u64;
        Self { index: seed % of, of }
    }
}

pub(crate) fn run(arguments: &MutantsArguments) -> Result<()> {
    if !Program::cargo().args(["mutants", "--version"]).succeeds() {
        bail!("cargo-mutants is not there: cargo install cargo-mutants");
    }
    let guards: Vec<(&Guard, Vec<PathBuf>)> =
        GUARDS.iter().map(|guard| (guard, files(guard, &arguments.file))).collect();
    let mut total = 0;
    for (guard, files) in guards.iter().filter(|(_, files)| !files.is_empty()) {
        total += list(guard, files, None)?.lines().count();
    }
    if total == 0 {
        bail!("there is nothing to change in these files, or they lie in no room that is known here");
    }
    let shard = Shard::of_seed(total, arguments.sample, arguments.seed);
    println!("one of {} of {total} changes, by seed {}", shard.of, arguments.seed);
    let mut ends = Ends::default();
    for (guard, files) in guards.iter().filter(|(_, files)| !files.is_empty()) {
        match arguments.list {
            true => print!("{}", list(guard, files, Some(shard))?),
            false => {
                ends.take(try_all(arguments, guard, files, shard)?);
                // A long run that is stopped has said something.
                ends.print();
            }
        }
    }
    match ends.missed.is_empty() {
        true => Ok(()),
        false => bail!("no test notices {} of the changes", ends.missed.len()),
    }
}

/// The files of a room that are to be changed.
fn files((room, guarded, _): &Guard, only: &[PathBuf]) -> Vec<PathBuf> {
    let source = Path::new("crates").join(room).join("src");
    match only {
        [] => guarded.iter().map(|file| source.join(file)).collect(),
        only => only.iter().filter(|file| file.starts_with(&source)).cloned().collect(),
    }
}

fn words((room, ..): &Guard, files: &[PathBuf], shard: Option<Shard>) -> Vec<String> {
    let mut words = vec!["mutants".to_owned(), format!("--package=ringdisk-{room}")];
    words.extend(files.iter().map(|file| format!("--file={}", file.display())));
    words.extend(
        shard
            .into_iter()
            .flat_map(|Shard { index, of }| [format!("--shard={index}/{of}"), "--sharding=round-robin".to_owned()]),
    );
    words
}

/// The changes, a line each.
fn list(guard: &Guard, files: &[PathBuf], shard: Option<Shard>) -> Result<String> {
    let mut words = words(guard, files, shard);
    words.push("--list".to_owned());
    Program::cargo().args(words).output_text()
}

/// Runs the tests on each change of a part of those of one room.
fn try_all(arguments: &MutantsArguments, guard: &Guard, files: &[PathBuf], shard: Shard) -> Result<Ends> {
    let (room, _, packages) = guard;
    let output = workspace::root().join(&arguments.output).join(room);
    std::fs::create_dir_all(&output).with_context(|| format!("cannot make '{}'", output.display()))?;
    let own = [format!("ringdisk-{room}")];
    let packages: Vec<&str> = match arguments.unit {
        true => own.iter().map(String::as_str).collect(),
        false => packages.to_vec(),
    };
    let mut words = words(guard, files, Some(shard));
    words.extend(["--baseline=skip", "--colors=never"].map(str::to_owned));
    words.push(format!("--timeout={}", arguments.timeout));
    words.push(format!("--output={}", output.display()));
    words.extend(arguments.in_place.then(|| "--in-place".to_owned()));
    words.extend(packages.iter().map(|package| format!("--test-package={package}")));
    if arguments.unit {
        words.extend(["--", "--lib"].map(str::to_owned));
    }
    // Its status only says whether some were missed.
    Program::cargo().args(words).limit(LIMIT).watch()?;
    Ends::read(&output.join("mutants.out"))
}

impl Ends {
    fn read(output: &Path) -> Result<Self> {
        let lines = |name: &str| -> Result<Vec<String>> {
            let path = output.join(name);
            let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read '{}'", path.display()))?;
            Ok(text.lines().map(str::to_owned).collect())
        };
        Ok(Self {
            caught: lines("caught.txt")?,
            timed_out: lines("timeout.txt")?,
            unviable: lines("unviable.txt")?,
            missed: lines("missed.txt")?,
        })
    }

    fn take(&mut self, more: Self) {
        self.caught.extend(more.caught);
        self.timed_out.extend(more.timed_out);
        self.unviable.extend(more.unviable);
        self.missed.extend(more.missed);
    }

    fn print(&self) {
        let Self { caught, timed_out, unviable, missed } = self;
        println!("| caught | timed out | missed | not compiled |\n|---|---|---|---|");
        println!("| {} | {} | {} | {} |", caught.len(), timed_out.len(), missed.len(), unviable.len());
        missed.iter().for_each(|name| println!("missed: {name}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_chooses_a_part_of_about_the_size_that_was_asked_for() {
        assert_eq!(Shard::of_seed(1000, 50, 1), Shard { index: 1, of: 20 });
        assert_eq!(Shard::of_seed(1000, 50, 21), Shard { index: 1, of: 20 });
        assert_eq!(Shard::of_seed(5, 50, 3), Shard { index: 0, of: 1 });
        assert_eq!(Shard::of_seed(5, 0, 3), Shard { index: 3, of: 5 });
    }
}
