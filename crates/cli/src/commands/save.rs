//! `ringdisk save`: a running machine and its disks become a pair that can be restored.

use crate::machine::MachineArgs;
use crate::output;
use crate::output::steps::{Shown, StepsArgs};
use crate::signals;
use save::SaveOptions;

/// Save a running machine: its state and its disks, as one pair that 'restore' resumes.
///
/// The machine (QEMU) stops, its state is written with a checksum, its disks are frozen, and it goes on. What the guest
/// wrote since the last save goes into the images meanwhile. Whatever breaks it off, the pair of before or the new one is
/// whole.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    machine: MachineArgs,
    /// Leave what the guest wrote in a layer of its own, instead of taking it into the image: a shorter pause.
    #[arg(long)]
    keep: bool,
    /// Put everything into an internal snapshot of this name of each disk's qcow2 image instead. That of the first disk keeps
    /// the machine's state, as QEMU's savevm does ('state extract -l' takes it out).
    #[arg(long, value_name = "SNAPSHOT", conflicts_with = "keep")]
    into_image: Option<String>,
    #[command(flatten)]
    steps: StepsArgs,
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
    let (number, state) = (saved.record.number, drive::human_size(saved.state_bytes));
    let paused = saved.paused.as_secs_f64();
    if let Some(snapshot) = &args.into_image {
        return output::print(&format!(
            "Saved as snapshot '{snapshot}' of each image: state {state}, paused for {paused:.2} s.\n"
        ));
    }
    let directory = machine.state.display();
    output::print(&format!("Saved as number {number} in '{directory}': state {state}, paused for {paused:.2} s.\n"))
}
