//! `cargo xtask ci`: the only definition of the tests.

use crate::command::{Program, built_with_tests};
use crate::counts::Counts;
use crate::{arrows, documents, file_circles, folder_arrows, packages, packaging, tidy, try_package, workspace};
use anyhow::{Result, bail};
use std::time::{Duration, Instant};

/// The arguments of `cargo xtask ci`.
#[derive(clap::Args)]
pub(crate) struct CiArguments {
    /// Run only this step (may be given several times).
    #[arg(long, value_name = "STEP")]
    only: Vec<String>,
    /// Name the steps and what they do.
    #[arg(long)]
    list: bool,
}

struct Step {
    name: &'static str,
    about: &'static str,
    run: fn() -> Result<Counts>,
}

const STEPS: &[Step] = &[
    Step { name: "packages", about: "the Debian packages that the tests need", run: || list(packages::install()?) },
    Step { name: "format", about: "rustfmt has nothing to change", run: || cargo(&["fmt", "--all", "--check"]) },
    Step { name: "clippy", about: "no warning of the compiler or of clippy", run: clippy },
    Step { name: "arrows", about: "dependencies between rooms, folders and files point down", run: arrows },
    Step { name: "tidy", about: "rules of the house that no compiler checks", run: || list(tidy::check()?) },
    Step { name: "rustdoc", about: "the crates' documentation builds without a warning", run: rustdoc },
    Step { name: "tests", about: "every test but guests and long forms", run: tests },
    Step {
        name: "doctests",
        about: "the examples in the documentation",
        run: || count(Program::cargo().args(["test", "--workspace", "--doc"])),
    },
    Step { name: "documents", about: "links and commands in the documents exist", run: || list(documents::check()?) },
    Step {
        name: "units",
        about: "systemd understands the units, and they allow no more than they need",
        run: || list(packaging::check_units()?),
    },
    Step { name: "simulator", about: "power cuts, faults and random requests with other seeds", run: simulator },
    Step { name: "schedules", about: "seeded schedules of what queues share, under shuttle", run: schedules },
    Step { name: "fuzz", about: "a few seconds of each fuzzer, always with the same inputs", run: fuzz },
    Step { name: "guests", about: "real Linux guests under User Mode Linux and QEMU", run: guests },
];

/// Steps that run only if they are named: what they show seldom changes, and they take minutes.
const BY_HAND: &[Step] = &[
    Step {
        name: "again",
        about: "disks changed a hundred times, daemons killed at fifty moments, and verbs stopped at ten",
        run: again,
    },
    Step {
        name: "machines",
        about: "a guest is saved ten times while it writes, one is reset 20 times, and guests copy a tree on overlays",
        run: machines,
    },
    Step { name: "package", about: "the Debian package, installed and tried in a new Debian", run: package },
];

/// How long a build and all its tests may take on a slow or loaded machine.
const TESTS_LIMIT: Duration = Duration::from_secs(60 * 60);
const GUESTS_LIMIT: Duration = Duration::from_secs(30 * 60);

struct Outcome {
    name: &'static str,
    counts: Counts,
    time: Duration,
}

/// Runs the steps and fails if one did.
pub(crate) fn run(arguments: &CiArguments) -> Result<()> {
    if arguments.list {
        for step in STEPS {
            println!("{:<10} {}", step.name, step.about);
        }
        println!("\nOnly if they are named (--only):");
        for step in BY_HAND {
            println!("{:<10} {}", step.name, step.about);
        }
        return Ok(());
    }
    if let Some(unknown) = arguments.only.iter().find(|name| !all().any(|step| step.name == **name)) {
        let names: Vec<_> = all().map(|step| step.name).collect();
        bail!("there is no step {unknown}; the steps are {}", names.join(", "));
    }
    let is_named = |step: &&Step| arguments.only.iter().any(|name| name == step.name);
    let outcomes: Vec<Outcome> = match arguments.only.is_empty() {
        true => STEPS.iter().map(run_step).collect(),
        false => all().filter(is_named).map(run_step).collect(),
    };
    let total = summary(&outcomes);
    if total.failed > 0 {
        std::process::exit(1);
    }
    Ok(())
}

fn all() -> impl Iterator<Item = &'static Step> {
    STEPS.iter().chain(BY_HAND)
}

fn run_step(step: &Step) -> Outcome {
    println!("\n=== {}: {}", step.name, step.about);
    let start = Instant::now();
    let counts = (step.run)().unwrap_or_else(|error| {
        println!("{error:#}");
        Counts::one(false)
    });
    let time = start.elapsed();
    let end = if counts.failed == 0 { "passed" } else { "FAILED" };
    println!("=== {} {end} in {:.1} s", step.name, time.as_secs_f64());
    Outcome { name: step.name, counts, time }
}

/// Prints the table of steps, and as the last line the sums of its columns.
fn summary(outcomes: &[Outcome]) -> Counts {
    let mut total = Counts::default();
    println!("\n{:<12} {:>8} {:>8} {:>8} {:>9}", "step", "passed", "failed", "skipped", "seconds");
    for Outcome { name, counts, time } in outcomes {
        let Counts { passed, failed, skipped, .. } = counts;
        println!("{name:<12} {passed:>8} {failed:>8} {skipped:>8} {:>9.1}", time.as_secs_f64());
        total.add(*counts);
    }
    if total.flaky > 0 {
        println!("\n{} passed only when they ran again, and are named above: each is a fault", total.flaky);
    }
    println!("\n{} passed, {} failed", total.passed, total.failed);
    total
}

/// Prints the complaints of a check, and counts the check as one.
fn list(complaints: Vec<String>) -> Result<Counts> {
    for complaint in &complaints {
        println!("{complaint}");
    }
    Ok(Counts::one(complaints.is_empty()))
}

/// Runs a cargo command that passes or fails as a whole.
fn cargo(arguments: &[&str]) -> Result<Counts> {
    Ok(Counts::one(Program::cargo().args(arguments).watch()?.success()))
}

fn arrows() -> Result<Counts> {
    let mut complaints = arrows::check()?;
    complaints.extend(folder_arrows::check()?);
    complaints.extend(file_circles::check()?);
    list(complaints)
}

fn clippy() -> Result<Counts> {
    cargo(&["clippy", "--workspace", "--all-targets", "--keep-going", "--", "-D", "warnings"])
}

fn rustdoc() -> Result<Counts> {
    let program =
        Program::cargo().args(["doc", "--workspace", "--no-deps", "--keep-going"]).env("RUSTDOCFLAGS", "-D warnings");
    Ok(Counts::one(program.watch()?.success()))
}

/// Ignored tests that the step `tests` leaves out, by parts of their names: parts of other tests, which change limits of
/// their whole process; guests, which have a step of their own; and long forms that are run by hand.
const NOT_IN_TESTS: [&str; 9] = [
    "part_of_another",
    "uml_on_",
    "uml_with_",
    "qemu_with_",
    "qemu_on_",
    "qemu_is_",
    "killed_at_fifty_moments",
    "a_guest_copies_a_tree",
    "a_guest_that_reads_compressed",
];

/// Runs all tests, also those that are too slow for a run by hand and so are ignored, except [`NOT_IN_TESTS`]. One of
/// them waits for a minute: beside the others that costs nothing.
fn tests() -> Result<Counts> {
    let program = if has_nextest() {
        let chosen = format!("not test(/{}/)", NOT_IN_TESTS.join("|"));
        nextest(&["--run-ignored", "all", "-E", &chosen])
    } else {
        let arguments =
            ["test", "--workspace", "--lib", "--bins", "--tests", "--no-fail-fast", "--", "--include-ignored"];
        let left_out = NOT_IN_TESTS.into_iter().flat_map(|name| ["--skip", name]);
        Program::cargo().args(arguments).args(left_out)
    };
    count(program.limit(TESTS_LIMIT))
}

/// Tests of the whole workspace, whatever is chosen: nothing is rebuilt with other features. A test that fails runs once
/// more, so that one race with a loaded machine does not hide what all the others say. It is named as flaky at the end.
fn nextest(more: &[&str]) -> Program {
    Program::cargo().args(["nextest", "run", "--workspace", "--no-fail-fast", "--retries", "1"]).args(more)
}

/// The tests of chains that draw what they do from a seed.
const SEEDED: [&str; 10] =
    ["conformance", "ends", "exchange", "faults", "filters", "kept", "mirror_sim", "power_cut", "random", "scratch"];

/// Runs the tests of chains over simulated storage again, with other seeds.
fn simulator() -> Result<Counts> {
    let program = if has_nextest() {
        let chosen = format!("package(ringdisk-image) & binary(/^({})$/)", SEEDED.join("|"));
        nextest(&["-E", &chosen])
    } else {
        let chosen = SEEDED.into_iter().flat_map(|name| ["--test", name]);
        Program::cargo().args(["test", "--package", "ringdisk-image", "--no-fail-fast"]).args(chosen)
    };
    count(program.env("RINGDISK_SEED", "1000"))
}

/// Tests the parts of an image that queues share, compiled with shuttle's locks and atomics: the allocator, the slice
/// cache, the epochs, and the merged map of a chain.
fn schedules() -> Result<Counts> {
    // The program is named because it needs nearly all crates of others, with the features that they have in the other
    // steps: so they are not built again. It has no such tests itself.
    let explored = |package: &str, chosen: &[&str]| {
        let features = format!("{package}/explore");
        let packages = ["test", "--package", "ringdisk", "--package", package, "--features", &features];
        count(Program::cargo().args(packages).args(chosen))
    };
    let mut counts = explored("ringdisk-format-qcow2", &["--test", "explore"])?;
    counts.add(explored("ringdisk-image", &["--lib", "explored"])?);
    Ok(counts)
}

/// Runs the fuzzers in the tests' own build: its arithmetic checks and assertions matter more here than speed.
fn fuzz() -> Result<Counts> {
    let program = Program::new(built_with_tests("fuzz")?).args(["all", "3", "1"]);
    Ok(Counts::one(program.watch()?.success()))
}

/// Runs tests that change running disks, or stop what is under way, in their long form.
fn again() -> Result<Counts> {
    let program = if has_nextest() {
        let changed = "binary(running) & test(/again_and_again|killed_at_any_moment/)";
        nextest(&["-E", &format!("package(ringdisk) & ({changed} | binary(/^(kill9|long_verbs)$/))")])
    } else {
        let files = ["--test", "running", "--test", "kill9", "--test", "long_verbs"];
        let chosen = ["again_and_again", "killed_at_any_moment", "what_was_flushed", "can_be_stopped"];
        Program::cargo().args(["test", "--workspace", "--no-fail-fast"]).args(files).args(["--"]).args(chosen)
    };
    let program = program.env("RINGDISK_CHANGES", "100").env("RINGDISK_KILL9_MOMENTS", "50");
    count(program.env("RINGDISK_VERB_MOMENTS", "10").limit(TESTS_LIMIT))
}

/// Packs the tests' own build of the program, and tries the package. This is skipped where it cannot be done.
fn package() -> Result<Counts> {
    if let Some(missing) = packaging::missing_for_a_trial() {
        println!("SKIPPED: {missing}");
        return Ok(Counts { skipped: 1, ..Counts::default() });
    }
    if !packaging::has_builder() && !Program::cargo().args(["install", "--locked", "cargo-deb"]).watch()?.success() {
        bail!("cargo-deb, which builds the package, cannot be installed");
    }
    let package = packaging::deb(Some(&built_with_tests("ringdisk")?))?;
    try_package::run(&package)?;
    Ok(Counts::one(true))
}

/// Whether cargo-nextest is installed, which runs each test in a process of its own, with a time limit.
fn has_nextest() -> bool {
    Program::cargo().args(["nextest", "--version"]).succeeds()
}

/// Runs tests and counts them from their output.
fn count(program: Program) -> Result<Counts> {
    // The step before installed the packages, so a test whose tool is missing must not skip.
    let mut program = program.env("CI", "true");
    if std::env::var_os("CI").is_some() {
        // In continuous integration, root, loop devices, FUSE and a swap file must be available, too.
        program = program.env("RINGDISK_REQUIRE_ALL", "1");
    }
    // Tests that return because this host lacks something count as passed for those who run them.
    let skips = workspace::target().join("skips");
    let _ = std::fs::remove_file(&skips);
    let watched = program.env("RINGDISK_SKIPS_FILE", &skips).watch()?;
    let mut counts = Counts::parse(watched.lines.iter().map(String::as_str));
    let skipped = std::fs::read_to_string(&skips).unwrap_or_default();
    skipped.lines().for_each(|line| println!("skipped: {line}"));
    counts.skip(skipped.lines().count() as u64);
    if !watched.success() && counts.failed == 0 {
        // The run failed before its first test, or died in one.
        counts.failed = 1;
    }
    Ok(counts)
}

fn guests() -> Result<Counts> {
    let kernel = packages::guest_kernel()?;
    let program = if has_nextest() {
        // A guest waits for its host now and then, so there are more than processors.
        let chosen = "package(ringdisk) & binary(/^guests(_rbd)?$/)";
        nextest(&["--run-ignored", "all", "--test-threads", "3", "--success-output", "immediate", "-E", chosen])
    } else {
        let files = ["--test", "guests", "--test", "guests_rbd"];
        let arguments = ["--", "--ignored", "--test-threads=2", "--nocapture"];
        Program::cargo().args(["test", "--workspace"]).args(files).args(arguments)
    };
    count(program.env("RINGDISK_GUEST_KERNEL", kernel).env("RINGDISK_RESETS", "3").limit(GUESTS_LIMIT))
}

fn machines() -> Result<Counts> {
    let kernel = packages::guest_kernel()?;
    let files = ["--test", "save_guest", "--test", "tree_copy", "--test", "guests"];
    let chosen = ["that_is_saved", "copies_a_tree", "survives_resets"];
    count(
        Program::cargo()
            .args(["test", "--workspace"])
            .args(files)
            .args(["--", "--ignored", "--test-threads=1", "--nocapture"])
            .args(chosen)
            .env("RINGDISK_GUEST_KERNEL", kernel)
            .env("RINGDISK_SAVE_GUEST_ROUNDS", "10")
            .limit(GUESTS_LIMIT),
    )
}
