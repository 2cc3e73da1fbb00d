//! `ringdisk restore`: says which saved pair is whole, and resumes its machine.

use crate::machine::MachineArgs;
use crate::output;
use crate::output::steps::{Shown, StepsArgs};
use anyhow::Context;
use save::{Machine, Restore};
use std::fmt::Write as _;

/// Say which saved pair is whole, and how to resume the machine; with --run resume it.
///
/// With --run, the daemon at the control socket serves the saved disks, and the machine's command is started and takes
/// the state. The daemon must be running; disks that it serves under the same names are closed first.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    machine: MachineArgs,
    /// Resume the machine, and wait for its end.
    #[arg(long)]
    run: bool,
    /// Accept the disks although a save was interrupted while it took layers back: only if the machine has not run
    /// since.
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    steps: StepsArgs,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let needs: &[&str] = if args.run { &["qmp", "control", "state"] } else { &["state"] };
    let machine = args.machine.machine(needs)?;
    if !args.run {
        let restore = save::find(&machine, args.force, &mut |_| {})?;
        return output::print(&described(&machine, &restore)?);
    }
    let mut shown = Shown::of(&args.steps);
    let mut restore = save::find(&machine, args.force, &mut |moment| shown.show(moment))?;
    if !args.steps.quiet {
        output::print(&described(&machine, &restore)?)?;
    }
    let child = save::run(&machine, &mut restore, &mut |moment| shown.show(moment));
    let status = child?.wait().context("cannot wait for the machine's end")?;
    if status.success() { Ok(()) } else { Err(anyhow::anyhow!("the machine ended with {status}")) }
}

fn described(machine: &Machine, restore: &Restore) -> anyhow::Result<String> {
    let record = &restore.record;
    let when = i64::try_from(record.saved_at_ms).ok().and_then(chrono::DateTime::from_timestamp_millis);
    let when = when.map(|when| when.format("%Y-%m-%d %H:%M:%S UTC").to_string()).unwrap_or_default();
    let mut text = format!("Number {} of {when} is whole.\n", record.number);
    if restore.was_broken_off {
        writeln!(text, "A save that was begun was broken off: this pair counts. Save again, or resume it.")?;
    }
    let size = drive::human_size(restore.state.stream_bytes);
    writeln!(text, "state: '{}' ({size}, its checksum is right)", restore.state_path.display())?;
    for disk in &record.disks {
        writeln!(text, "disk {}: {} '{}'", disk.name, disk.format, disk.file.display())?;
    }
    if machine.qemu.is_empty() {
        return Ok(text);
    }
    let program = std::env::current_exe().context("cannot find out the name of this program")?;
    let words = restore.command(machine, &program);
    writeln!(text, "resume it by 'restore --run', or serve the disks and start:\n{}", in_shell(&words))?;
    Ok(text)
}

/// Quotes words for a shell.
fn in_shell(words: &[String]) -> String {
    let is_plain = |char: char| char.is_ascii_alphanumeric() || "-_./=,:@%+".contains(char);
    let quoted = |word: &String| match !word.is_empty() && word.chars().all(is_plain) {
        true => word.clone(),
        false => format!("'{}'", word.replace('\'', "'\\''")),
    };
    words.iter().map(quoted).collect::<Vec<_>>().join(" ")
}
