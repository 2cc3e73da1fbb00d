//! Changes one operator or return value of the code that guards data at a time, and runs the tests on each change: a thin
//! wrapper of cargo-mutants. A sample, drawn by a seed, because all of them take days.
//!
//! First the unit tests run on each change, which is quick. Then all tests of the crates that rest on the changed code run on
//! what those have missed.

use crate::command::Program;
use crate::workspace;
use anyhow::{Context, Result, bail};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The code that guards data: files and folders, and the crates whose tests must notice a change.
const GUARDS: [(&str, &[&str], &[&str]); 6] = [
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
        &["free_pages.rs", "kept.rs", "state.rs", "write.rs"],
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
    /// How many changes; all of them if there are fewer.
    #[arg(long, value_name = "N", default_value_t = 50)]
    sample: usize,
    /// Which ones.
    #[arg(long, value_name = "SEED", default_value_t = 1)]
    seed: u64,
    /// How long the tests of one change may take, in seconds.
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    timeout: u64,
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

/// One change, as cargo-mutants names it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Mutant {
    name: String,
    guard: usize,
}

/// Which of the changes met which end.
#[derive(Debug, Default)]
struct Ends {
    caught: Vec<String>,
    timed_out: Vec<String>,
    unviable: Vec<String>,
    missed: Vec<String>,
}

pub(crate) fn run(arguments: &MutantsArguments) -> Result<()> {
    if !Program::cargo().args(["mutants", "--version"]).succeeds() {
        bail!("cargo-mutants is not there: cargo install cargo-mutants");
    }
    let all = mutants(&arguments.file)?;
    let count = all.len();
    let sample = drawn(all, arguments.sample, arguments.seed);
    println!("{} of {count} changes, by seed {}", sample.len(), arguments.seed);
    if arguments.list {
        sample.iter().for_each(|mutant| println!("{}", mutant.name));
        return Ok(());
    }
    let mut by_guard: BTreeMap<usize, Vec<String>> = BTreeMap::new();
    sample.into_iter().for_each(|mutant| by_guard.entry(mutant.guard).or_default().push(mutant.name));
    let mut ends = Ends::default();
    for (guard, names) in by_guard {
        ends.take(try_all(arguments, guard, &names)?);
        // A long run that is stopped has said something.
        ends.print();
    }
    match ends.missed.is_empty() {
        true => Ok(()),
        false => bail!("no test notices {} of the changes", ends.missed.len()),
    }
}

/// All changes in these files, or in the code that guards data.
fn mutants(files: &[PathBuf]) -> Result<Vec<Mutant>> {
    let mut found = Vec::new();
    for (guard, (room, guarded, _)) in GUARDS.iter().enumerate() {
        let source = Path::new("crates").join(room).join("src");
        let wanted: Vec<PathBuf> = match files {
            [] => guarded.iter().map(|file| source.join(file)).collect(),
            files => files.iter().filter(|file| file.starts_with(&source)).cloned().collect(),
        };
        if wanted.is_empty() {
            continue;
        }
        let mut words = vec!["mutants".to_owned(), "--list".to_owned(), format!("--package=ringdisk-{room}")];
        words.extend(wanted.iter().map(|file| format!("--file={}", file.display())));
        let list = Program::cargo().args(words).output_text()?;
        found.extend(list.lines().map(|name| Mutant { name: name.to_owned(), guard }));
    }
    match found.is_empty() {
        true => bail!("there is nothing to change in these files, or they lie in no room that is known here"),
        false => Ok(found),
    }
}

/// `count` of them, in the order that the seed gives.
fn drawn(mut all: Vec<Mutant>, count: usize, seed: u64) -> Vec<Mutant> {
    let mut state = seed;
    let mut next = || {
        // SplitMix64.
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    };
    let count = count.min(all.len());
    for index in 0..count {
        let left = (all.len() - index) as u64;
        all.swap(index, index + (next() % left) as usize);
    }
    all.truncate(count);
    all
}

/// The unit tests on all of these changes of one room, and then the rest of the tests on those that were missed.
fn try_all(arguments: &MutantsArguments, guard: usize, names: &[String]) -> Result<Ends> {
    let (room, _, packages) = GUARDS[guard];
    let own = format!("ringdisk-{room}");
    let mut ends = try_with(arguments, guard, names, "unit", &[own.as_str()], &["--lib"])?;
    let missed = std::mem::take(&mut ends.missed);
    if !missed.is_empty() {
        println!("{} are left for the other tests", missed.len());
        ends.take(try_with(arguments, guard, &missed, "all", packages, &[])?);
    }
    Ok(ends)
}

fn try_with(
    arguments: &MutantsArguments,
    guard: usize,
    names: &[String],
    which: &str,
    packages: &[&str],
    test_words: &[&str],
) -> Result<Ends> {
    let (room, ..) = GUARDS[guard];
    let output = workspace::root().join(&arguments.output).join(format!("{room}-{which}"));
    std::fs::create_dir_all(&output).with_context(|| format!("cannot make '{}'", output.display()))?;
    let mut words: Vec<String> =
        ["mutants", "--no-shuffle", "--baseline=skip", "--colors=never"].map(str::to_owned).to_vec();
    words.push(format!("--package=ringdisk-{room}"));
    words.push(format!("--timeout={}", arguments.timeout));
    words.push(format!("--output={}", output.display()));
    words.extend(arguments.in_place.then(|| "--in-place".to_owned()));
    words.extend(packages.iter().map(|package| format!("--test-package={package}")));
    words.extend(names.iter().map(|name| format!("--re=^{}$", escaped(name))));
    if !test_words.is_empty() {
        words.push("--".to_owned());
        words.extend(test_words.iter().map(|word| (*word).to_owned()));
    }
    // Its status says whether some were missed, too.
    let watched = Program::cargo().args(words).limit(LIMIT).watch()?;
    let ends = Ends::read(&output.join("mutants.out"))?;
    let count = ends.caught.len() + ends.timed_out.len() + ends.unviable.len() + ends.missed.len();
    if count != names.len() {
        bail!("cargo-mutants tried {count} of {} changes ({})", names.len(), watched.status);
    }
    Ok(ends)
}

/// The text as a regular expression that matches it and nothing else.
fn escaped(text: &str) -> String {
    let mut pattern = String::new();
    for char in text.chars() {
        // Before other characters a backslash may mean something.
        if r"\.+*?()|[]{}^$".contains(char) {
            pattern.push('\\');
        }
        pattern.push(char);
    }
    pattern
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

    fn mutants(count: usize) -> Vec<Mutant> {
        (0..count).map(|number| Mutant { name: number.to_string(), guard: 0 }).collect()
    }

    #[test]
    fn a_seed_draws_the_same_sample_again_and_another_one_another() {
        let draw = |seed| drawn(mutants(1000), 20, seed);
        assert_eq!(draw(1), draw(1));
        assert_ne!(draw(1), draw(2));
        let mut names: Vec<String> = draw(3).into_iter().map(|mutant| mutant.name).collect();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), 20);
        assert_eq!(drawn(mutants(5), 20, 1).len(), 5);
    }

    #[test]
    fn a_name_is_matched_as_it_is() {
        assert_eq!(
            escaped("a/b.rs:1:2: replace a || b -> Option<[u64]>"),
            r"a/b\.rs:1:2: replace a \|\| b -> Option<\[u64\]>"
        );
    }
}
