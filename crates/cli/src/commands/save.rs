//! `ringdisk save`: saves a running machine and its disks as a pair that can be restored.

use crate::machine::MachineArgs;
use crate::output;
use crate::signals;
use save::{Moment, SaveOptions};
use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

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
    /// Print nothing except errors.
    #[arg(short, long)]
    quiet: bool,
    /// Show progress even if standard error is not a terminal.
    #[arg(short = 'p')]
    show: bool,
    /// Write progress to standard error, as lines of JSON; without a value as -p does.
    #[arg(long, value_enum, value_name = "FORM", num_args = 0..=1, require_equals = true, default_missing_value = "text")]
    progress: Option<Form>,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Form {
    Text,
    Json,
}

/// Shows the progress.
struct Shown {
    form: Option<Form>,
    last: Option<(Instant, Moment)>,
}

const EVERY: Duration = Duration::from_millis(200);

impl Shown {
    fn of(args: &Args) -> Self {
        let form = match args.progress {
            Some(form) => Some(form),
            None if args.quiet => None,
            None if args.show || std::io::stderr().is_terminal() => Some(Form::Text),
            None => None,
        };
        Self { form, last: None }
    }

    fn show(&mut self, moment: Moment) {
        let is_next = self.last.is_none_or(|(_, last)| last.step != moment.step);
        let is_due = self.last.is_none_or(|(at, _)| at.elapsed() >= EVERY);
        if !(is_next || is_due || moment.whole >= 1.0) {
            return;
        }
        self.last = Some((Instant::now(), moment));
        let Moment { step, done_bytes, total_bytes, whole, .. } = moment;
        let line = match self.form {
            None => return,
            Some(Form::Text) => format!("{:>3.0}% {}", whole * 100.0, step.name()),
            Some(Form::Json) => serde_json::json!({
                "step": step.name(),
                "done-bytes": done_bytes,
                "total-bytes": total_bytes,
                "whole": whole,
            })
            .to_string(),
        };
        // If standard error is gone, the message is lost.
        let _ = writeln!(std::io::stderr(), "{line}");
    }
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let machine = args.machine.machine(&["qmp", "control", "state"])?;
    let cancel = signals::interrupted()?;
    let mut shown = Shown::of(args);
    let mut options = SaveOptions::new(args.keep);
    options.into_image.clone_from(&args.into_image);
    let saved = save::save(&machine, &options, &cancel, &mut |moment| shown.show(moment))?;
    saved.notes.iter().for_each(|note| output::warn(&format!("warning: {note}")));
    if args.quiet {
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
