//! `ringdisk save`: saves a running machine and its disks as a pair that can be restored.

use crate::machine::MachineArgs;
use crate::output;
use crate::output::steps::{Shown, StepsArgs};
use crate::signals;
use save::SaveOptions;

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
