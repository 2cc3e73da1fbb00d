//! `ringdisk restore`: says which saved pair is whole, and resumes its machine.

use crate::machine::MachineArgs;
use crate::output;
use crate::output::steps::{Shown, StepsArgs};
use crate::signals;
use anyhow::Context;
use rustix::process::{Pid, Signal, kill_process};
use save::{Machine, Restore};
use std::fmt::Write as _;
use std::path::Path;
use std::process::{Child, ExitStatus};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Say which saved pair is whole, and how to resume the machine; with --run resume it.
///
/// With --run, the daemon at the control socket serves the saved disks, and the machine's command is started and takes
/// the state. With --serve the daemon serves them, and you start the machine. Each disk gets a new layer first, so what
/// was saved stays as it is. The daemon must be running; disks that it serves under the same names are closed first.
///
/// Ctrl-C before the machine runs leaves the saved pair as it is: run the same command again. Later it ends the machine.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    machine: MachineArgs,
    /// Resume the machine, and wait for its end.
    #[arg(long)]
    run: bool,
    /// Serve the saved disks, and print the command that starts the machine.
    #[arg(long, conflicts_with = "run")]
    serve: bool,
    /// Accept the disks although a save was interrupted while it took layers back: only if the machine has not run
    /// since. With --serve and no --qmp, also take disks away from whoever uses them.
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    steps: StepsArgs,
}

/// How often it is looked whether the machine has ended.
const LOOK_EVERY: Duration = Duration::from_millis(100);

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let needs: &[&str] = match (args.run, args.serve) {
        (true, _) => &["qmp", "control", "state"],
        (_, true) => &["control", "state"],
        _ => &["state"],
    };
    let machine = args.machine.machine(needs)?;
    let cancel = signals::interrupted()?;
    let mut shown = if args.run || args.serve { Shown::of(&args.steps) } else { Shown::only_if_asked(&args.steps) };
    let mut restore = save::find(&machine, args.force, &cancel, &mut |moment| shown.show(moment))?;
    if !args.run && !args.serve {
        return output::print(&format!("{}{}", described(&restore)?, by_hand(&machine, &restore, args.force)?));
    }
    if !args.steps.quiet {
        output::print(&described(&restore)?)?;
    }
    if args.serve {
        save::serve(&machine, &mut restore, args.force, &cancel, &mut |moment| shown.show(moment))?;
        warn_of(&restore);
        return if args.steps.quiet { Ok(()) } else { output::print(&start(&machine, &restore)?) };
    }
    let child = save::run(&machine, &mut restore, &cancel, &mut |moment| shown.show(moment));
    warn_of(&restore);
    let status = end_of(child?, &cancel)?;
    if status.success() { Ok(()) } else { Err(anyhow::anyhow!("the machine ended with {status}")) }
}

fn warn_of(restore: &Restore) {
    restore.notes.iter().for_each(|note| output::warn(&format!("note: {note}")));
}

/// Waits for the machine's end. Who interrupts this program ends the machine, as in a terminal.
fn end_of(mut child: Child, cancel: &AtomicBool) -> anyhow::Result<ExitStatus> {
    let mut is_asked = false;
    loop {
        if let Some(status) = child.try_wait().context("cannot wait for the machine's end")? {
            return Ok(status);
        }
        if cancel.load(Ordering::Relaxed) && !is_asked {
            is_asked = true;
            if let Some(pid) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
                // It may have ended by itself.
                let _ = kill_process(pid, Signal::TERM);
            }
        }
        std::thread::sleep(LOOK_EVERY);
    }
}

fn described(restore: &Restore) -> anyhow::Result<String> {
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
    Ok(text)
}

/// How to resume the machine without --run: lines for a shell. Nobody who follows them writes to the files that were saved.
fn by_hand(machine: &Machine, restore: &Restore, force: bool) -> anyhow::Result<String> {
    let mut words = vec![program()?, "restore".to_owned(), "--serve".to_owned()];
    let control = if machine.control.as_os_str().is_empty() { Path::new("CONTROL-SOCKET") } else { &*machine.control };
    for (option, path) in [("--qmp", &*machine.qmp), ("--control", control), ("--state", &*machine.state)] {
        if !path.as_os_str().is_empty() {
            words.extend([option.to_owned(), std::path::absolute(path)?.to_string_lossy().into_owned()]);
        }
    }
    if force {
        words.push("--force".to_owned());
    }
    let serve = in_shell(&words).replace(&*std::path::absolute("CONTROL-SOCKET")?.to_string_lossy(), "CONTROL-SOCKET");
    Ok(format!(
        "\n# Resume it by 'restore --run', or so:\n\
         # 1. Serve its disks, each under a new layer. To serve the files themselves would change what was saved.\n{serve}\n{}",
        start(machine, restore)?
    ))
}

/// How to start the machine when its disks are served.
fn start(machine: &Machine, restore: &Restore) -> anyhow::Result<String> {
    let words = restore.command(machine, Path::new(&program()?));
    let is_known = !machine.qemu.is_empty();
    let what = if is_known { "Start it" } else { "Start QEMU as it was started, with these words at the end" };
    let go_on = if restore.record.was_running { ". Then say 'cont' in its monitor" } else { "" };
    let shown = in_shell(&words);
    Ok(format!("# 2. {what}{go_on}.\n{}{shown}\n", if is_known { "" } else { "# " }))
}

fn program() -> anyhow::Result<String> {
    let program = std::env::current_exe().context("cannot find out the name of this program")?;
    Ok(program.to_string_lossy().into_owned())
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
