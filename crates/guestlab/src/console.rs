//! A guest as a process of the host: starts it, watches its console, and always ends it.

use crate::options::GuestOptions;
use crate::report::{GuestReport, Reader};
use crate::tools;
use anyhow::{Context, Result, anyhow};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};
use std::collections::VecDeque;
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::{Duration, Instant};

/// How many lines of the console an error quotes.
const QUOTED_LINES: usize = 30;
/// How long a guest may take to power off after its last message.
const POWER_OFF: Duration = Duration::from_secs(20);
/// How long to read on after a guest's process has ended: other processes may hold its console open.
const LAST_WORDS: Duration = Duration::from_secs(2);
/// QEMU's messages when the host's KVM fails. The machine then stands still, and its process stays.
const KVM_FAILURES: [&str; 2] = ["KVM internal error", "kvm run failed"];
/// How often to check whether to stop, and whether the guest's process has ended.
const GLANCE: Duration = Duration::from_millis(100);

/// Called first by the thread that starts a guest; the guest inherits the effect.
pub(crate) type Prepare = fn() -> Result<()>;

/// QEMU stopped the machine because the host's KVM failed.
#[derive(Debug)]
struct KvmFailed;

impl std::fmt::Display for KvmFailed {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("KVM failed on this host and QEMU stopped the guest")
    }
}

impl std::error::Error for KvmFailed {}

/// Why a guest did not do its work, and what it said last.
#[derive(Debug)]
struct Failed {
    why: anyhow::Error,
    last_lines: VecDeque<String>,
}

impl std::fmt::Display for Failed {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{:#}", self.why)?;
        if self.last_lines.is_empty() {
            return Ok(());
        }
        formatter.write_str("\nThe guest's last lines:")?;
        self.last_lines.iter().try_for_each(|line| write!(formatter, "\n    {line}"))
    }
}

impl std::error::Error for Failed {}

/// Whether [`run`] failed because KVM did.
pub(crate) fn is_by_kvm(error: &anyhow::Error) -> bool {
    error.downcast_ref::<Failed>().is_some_and(|failed| failed.why.is::<KvmFailed>())
}

/// Makes a command that becomes `program`. The kernel kills the program when the thread that starts it ends, for
/// whatever reason: util-linux' setpriv arranges that. Without setpriv (every Debian has it) a guest outlives us if we
/// are killed.
pub(crate) fn command(program: &Path) -> Command {
    let Ok(setpriv) = tools::find("setpriv", "util-linux") else { return Command::new(program) };
    let mut command = Command::new(setpriv);
    command.args(["--pdeathsig", "KILL", "--"]).arg(program);
    command
}

/// Runs `command` until the guest has ended, and reads its console from both outputs.
pub(crate) fn run(
    mut command: Command,
    prepare: Prepare,
    options: &GuestOptions,
    progress: &mut dyn FnMut(&str),
) -> Result<GuestReport> {
    let mut log = match &options.log {
        Some(path) => Some(File::create(path).with_context(|| format!("cannot write the log {}", path.display()))?),
        None => None,
    };
    let start = Instant::now();
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
    let mut guest = Guest::start(command, prepare)?;
    let lines = guest.lines();
    let mut reader = Reader::default();
    let mut quoted = VecDeque::new();
    let ended = watch(options, start + options.time_limit, &lines, &guest, |line| {
        if let Some(log) = &mut log {
            writeln!(log, "{line}").context("cannot write the log")?;
        }
        if quoted.len() == QUOTED_LINES {
            quoted.pop_front();
        }
        quoted.push_back(line.to_owned());
        if KVM_FAILURES.iter().any(|failure| line.contains(failure)) {
            return Err(KvmFailed.into());
        }
        if let Some(step) = reader.line(line)? {
            progress(&step);
        }
        Ok(reader.is_complete())
    });
    drop(guest);
    ended.and_then(|()| reader.finish(start.elapsed())).map_err(|why| Failed { why, last_lines: quoted }.into())
}

/// Gives each line to `line` until the console is closed or the guest has died. `line` returns whether only the
/// power-off is left.
fn watch(
    options: &GuestOptions,
    end: Instant,
    lines: &Receiver<String>,
    guest: &Guest,
    mut line: impl FnMut(&str) -> Result<bool>,
) -> Result<()> {
    let mut end = end;
    let mut complete = false;
    let mut died: Option<Instant> = None;
    loop {
        match lines.recv_timeout(GLANCE) {
            Ok(text) => {
                if line(&text)? && !complete {
                    complete = true;
                    end = Instant::now() + POWER_OFF;
                }
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return Ok(()),
        }
        if died.is_none() && guest.has_ended() {
            died = Some(Instant::now());
        }
        if died.is_some_and(|died| died.elapsed() > LAST_WORDS) {
            return Ok(());
        }
        if options.stop.load(Ordering::Relaxed) {
            return Err(anyhow!("stopped"));
        }
        if Instant::now() > end {
            let limit = options.time_limit.as_secs();
            let what = if complete { "did not power off".into() } else { format!("was not done within {limit} s") };
            return Err(anyhow!("the guest {what}"));
        }
    }
}

/// A running guest. Dropping it kills it with all its processes.
struct Guest {
    child: Child,
    /// Lets the thread that started the guest end: the kernel then kills the guest.
    _starter: SyncSender<()>,
}

impl Guest {
    fn start(mut command: Command, prepare: Prepare) -> Result<Self> {
        let (started, starting) = sync_channel(1);
        let (starter, kept) = sync_channel::<()>(0);
        std::thread::spawn(move || {
            let name = command.get_program().to_string_lossy().into_owned();
            let child = prepare().and_then(|()| command.spawn().with_context(|| format!("cannot start {name}")));
            if started.send(child).is_ok() {
                let _ = kept.recv();
            }
        });
        let child = starting.recv().context("the guest's thread ended")??;
        Ok(Self { child, _starter: starter })
    }

    /// Whether the guest's first process has ended. That process is not reaped yet, so its number remains the group's.
    fn has_ended(&self) -> bool {
        let look = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        matches!(waitid(WaitId::Pid(Pid::from_child(&self.child)), look), Ok(Some(_)))
    }

    /// Returns the lines that the guest prints from now on, on both outputs.
    fn lines(&mut self) -> Receiver<String> {
        let (sender, receiver) = sync_channel(1024);
        for stream in [self.child.stdout.take().map(boxed), self.child.stderr.take().map(boxed)].into_iter().flatten() {
            let sender = sender.clone();
            std::thread::spawn(move || read_lines(stream, &sender));
        }
        receiver
    }
}

fn boxed(stream: impl Read + Send + 'static) -> Box<dyn Read + Send> {
    Box::new(stream)
}

fn read_lines(stream: Box<dyn Read + Send>, sender: &SyncSender<String>) {
    for line in BufReader::new(stream).split(b'\n') {
        let Ok(line) = line else { return };
        let line = String::from_utf8_lossy(&line).trim_end_matches('\r').to_owned();
        if sender.send(line).is_err() {
            return;
        }
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        // The group is the guest's own, and lives until its first process is reaped.
        let _ = kill_process_group(Pid::from_child(&self.child), Signal::KILL);
        let _ = self.child.wait();
    }
}
