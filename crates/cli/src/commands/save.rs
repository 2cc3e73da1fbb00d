//! `ringdisk save`: saves a running machine and its disks as a pair that can be restored.

use crate::machine::MachineArgs;
use crate::output;
use crate::output::steps::{Shown, StepsArgs};
use crate::signals;
use save::{Machine, SaveOptions, Saved};

/// Save a running machine: its state and its disks, as one pair that 'restore' resumes.
///
/// The machine (QEMU) stops, its state is written with a checksum, its disks are frozen, and it goes on. Meanwhile, the
/// guest's writes since the last save go into the images. Whatever interrupts a save, the old pair or the new one is
/// whole.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    machine: MachineArgs,
    /// Leave the guest's writes in a layer of their own instead of taking them into the image, for a shorter pause.
    #[arg(long)]
    keep: bool,
    /// Save into an internal snapshot of this name of each disk's qcow2 image instead. The first disk's snapshot holds
    /// the machine's state, as with QEMU's savevm ('state extract -l' extracts it).
    #[arg(long, value_name = "SNAPSHOT", conflicts_with = "keep")]
    into_image: Option<String>,
    /// How to print what was saved: for people, or as JSON for scripts.
    #[arg(long, value_enum, value_name = "FORM", default_value_t = Output::Human)]
    output: Output,
    #[command(flatten)]
    steps: StepsArgs,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Output {
    Human,
    Json,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let machine = args.machine.machine(&["qmp", "control", "state"])?;
    let cancel = signals::interrupted()?;
    let mut shown = Shown::of(&args.steps);
    let mut options = SaveOptions::new(args.keep);
    options.into_image.clone_from(&args.into_image);
    let saved = save::save(&machine, &options, &cancel, &mut |moment| shown.show(moment))?;
    saved.notes.iter().for_each(|note| output::warn(&format!("warning: {note}")));
    if args.steps.quiet {
        return Ok(());
    }
    output::print(&match args.output {
        Output::Human => described(args, &machine, &saved),
        Output::Json => format!("{:#}\n", as_json(args, &machine, &saved)),
    })
}

fn described(args: &Args, machine: &Machine, saved: &Saved) -> String {
    let state = drive::human_size(saved.state_bytes);
    let what = match &args.into_image {
        Some(snapshot) => format!("as snapshot '{snapshot}' of each image"),
        None => format!("as number {} in '{}'", saved.record.number, machine.state.display()),
    };
    let [paused, total] = [saved.paused, saved.total].map(|time| time.as_secs_f64());
    format!("Saved {what}: state {state}, paused for {paused:.2} s of {total:.2} s.\n")
}

fn as_json(args: &Args, machine: &Machine, saved: &Saved) -> serde_json::Value {
    let place = match &args.into_image {
        Some(snapshot) => ("snapshot", serde_json::json!(snapshot)),
        None => ("number", serde_json::json!(saved.record.number)),
    };
    let mut all = serde_json::json!({
        "directory": machine.state,
        "state-bytes": saved.state_bytes,
        "paused-seconds": saved.paused.as_secs_f64(),
        "total-seconds": saved.total.as_secs_f64(),
        "notes": saved.notes,
    });
    all[place.0] = place.1;
    all
}
