//! `ringdisk save`: a running machine and its disks become a pair that can be restored.

use crate::output::{self, usage};
use crate::signals;
use save::{Machine, Moment, SaveOptions};
use std::io::{IsTerminal, Write};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Which machine is meant: a file that describes it, options, or both.
#[derive(clap::Args)]
pub(crate) struct MachineArgs {
    /// A description of the machine: qmp, control, state, disks, qemu. The options here come before what it says.
    #[arg(value_name = "MACHINE.toml")]
    machine: Option<PathBuf>,
    /// The socket of QEMU's monitor (-qmp unix:SOCKET,server=on,wait=off).
    #[arg(long, value_name = "SOCKET")]
    qmp: Option<PathBuf>,
    /// The control socket of the daemon that serves the disks.
    #[arg(long, value_name = "SOCKET", env = "RINGDISK_CONTROL")]
    control: Option<PathBuf>,
    /// The directory in which the machine is saved.
    #[arg(long, value_name = "DIRECTORY")]
    state: Option<PathBuf>,
    /// A disk of the machine, by its name in the daemon. May be given several times [default: all disks].
    #[arg(long = "disk", value_name = "NAME")]
    disks: Vec<String>,
}

impl MachineArgs {
    /// The machine. What `needs` names must be known.
    pub(crate) fn machine(&self, needs: &[&str]) -> anyhow::Result<Machine> {
        let mut said = Machine::nothing();
        said.qmp = self.qmp.clone().unwrap_or_default();
        said.control = self.control.clone().unwrap_or_default();
        said.state = self.state.clone().unwrap_or_default();
        said.disks.clone_from(&self.disks);
        let machine = match &self.machine {
            Some(file) => said.or(Machine::read(file)?),
            None => said,
        };
        let known = [("qmp", &machine.qmp), ("control", &machine.control), ("state", &machine.state)];
        for (key, path) in known {
            if needs.contains(&key) && path.as_os_str().is_empty() {
                return Err(usage(format!("--{key} is missing: give it here, or '{key}' in the machine's description")));
            }
        }
        Ok(machine)
    }
}

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
    /// Say nothing but errors.
    #[arg(short, long)]
    quiet: bool,
    /// Show progress even where standard error is not a terminal.
    #[arg(short = 'p')]
    show: bool,
    /// Write progress to standard error as lines of JSON; without a form as -p does.
    #[arg(long, value_enum, value_name = "FORM", num_args = 0..=1, require_equals = true, default_missing_value = "text")]
    progress: Option<Form>,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Form {
    Text,
    Json,
}

/// Shows how far it is.
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
        // Nobody can be told that standard error is gone.
        let _ = writeln!(std::io::stderr(), "{line}");
    }
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let machine = args.machine.machine(&["qmp", "control", "state"])?;
    let cancel = signals::interrupted()?;
    let mut shown = Shown::of(args);
    let saved = save::save(&machine, &SaveOptions::new(args.keep), &cancel, &mut |moment| shown.show(moment))?;
    saved.notes.iter().for_each(|note| output::warn(&format!("warning: {note}")));
    if args.quiet {
        return Ok(());
    }
    let (number, state) = (saved.record.number, drive::human_size(saved.state_bytes));
    let paused = saved.paused.as_secs_f64();
    let directory = machine.state.display();
    output::print(&format!("Saved as number {number} in '{directory}': state {state}, paused for {paused:.2} s.\n"))
}
