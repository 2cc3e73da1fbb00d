//! Runs other programs, without our standard input and with a time limit, and never leaves them behind.

use crate::workspace;
use anyhow::{Context, Result, bail};
use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// The default time limit of a program.
const DEFAULT_LIMIT: Duration = Duration::from_secs(20 * 60);

/// A program that is about to run, at the root of the tree.
pub(crate) struct Program {
    command: Command,
    limit: Duration,
}

/// How a watched program ended, and the lines of both its outputs.
pub(crate) struct Watched {
    pub(crate) status: ExitStatus,
    pub(crate) lines: Vec<String>,
    pub(crate) timed_out: bool,
}

/// Returns the path of a workspace program as the tests build it: after the tests' step nothing is left to build.
pub(crate) fn built_with_tests(name: &str) -> Result<PathBuf> {
    let build = Program::cargo().args(["test", "--quiet", "--workspace", "--no-run"]).output_text();
    build.context("cannot build the workspace")?;
    Ok(workspace::target().join("debug").join(name))
}

impl Program {
    pub(crate) fn new(name: impl AsRef<OsStr>) -> Self {
        let mut command = Command::new(name);
        command.current_dir(workspace::root()).stdin(Stdio::null());
        Self { command, limit: DEFAULT_LIMIT }
    }

    /// The cargo that runs this program.
    pub(crate) fn cargo() -> Self {
        let mut program = Self::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        // Cargo's variables for this program would only cause rebuilds.
        for name in ["CARGO_MANIFEST_DIR", "CARGO_MANIFEST_PATH", "CARGO_PKG_NAME", "CARGO_PKG_VERSION"] {
            program.command.env_remove(name);
        }
        program.command.env("CARGO_TERM_COLOR", "never");
        program
    }

    pub(crate) fn args<S: AsRef<OsStr>>(mut self, arguments: impl IntoIterator<Item = S>) -> Self {
        self.command.args(arguments);
        self
    }

    pub(crate) fn env(mut self, name: &str, value: impl AsRef<OsStr>) -> Self {
        self.command.env(name, value);
        self
    }

    pub(crate) fn limit(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }

    pub(crate) fn directory(mut self, path: &std::path::Path) -> Self {
        self.command.current_dir(path);
        self
    }

    /// Returns the standard output; fails if the program fails.
    pub(crate) fn output_text(mut self) -> Result<String> {
        let name = self.name();
        let output = self.command.output().with_context(|| format!("cannot run {name}"))?;
        if !output.status.success() {
            bail!("{name} failed ({}): {}", output.status, String::from_utf8_lossy(&output.stderr).trim());
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Whether it can be run and succeeds; its output is dropped.
    pub(crate) fn succeeds(mut self) -> bool {
        self.command.stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok_and(|status| status.success())
    }

    /// Runs it to its end. Shows and keeps its output. Kills it with all its children when its time is up.
    pub(crate) fn watch(mut self) -> Result<Watched> {
        let name = self.name();
        println!("$ {name}");
        self.command.stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
        let mut child = self.command.spawn().with_context(|| format!("cannot run {name}"))?;
        let readers =
            [child.stdout.take().map(|stream| tee(stream, false)), child.stderr.take().map(|stream| tee(stream, true))];
        let (status, timed_out) = wait(&mut child, self.limit)?;
        if timed_out {
            println!("stopped: it took longer than {} s", self.limit.as_secs());
        }
        let mut lines = Vec::new();
        for reader in readers.into_iter().flatten() {
            lines.extend(reader.join().unwrap_or_default());
        }
        Ok(Watched { status, lines, timed_out })
    }

    fn name(&self) -> String {
        let words = std::iter::once(self.command.get_program()).chain(self.command.get_args());
        let words: Vec<_> = words.map(|word| word.to_string_lossy().into_owned()).collect();
        let program = words.first().map_or("", |word| word.rsplit('/').next().unwrap_or(word));
        std::iter::once(program).chain(words.iter().skip(1).map(String::as_str)).collect::<Vec<_>>().join(" ")
    }
}

impl Watched {
    pub(crate) fn success(&self) -> bool {
        self.status.success() && !self.timed_out
    }
}

fn tee(stream: impl Read + Send + 'static, errors: bool) -> std::thread::JoinHandle<Vec<String>> {
    std::thread::spawn(move || {
        let mut lines = Vec::new();
        for line in BufReader::new(stream).split(b'\n') {
            let Ok(line) = line else { break };
            let line = String::from_utf8_lossy(&line).into_owned();
            // Our own reader may be gone. The watched program must still run to its end.
            let _ = if errors { writeln!(std::io::stderr(), "{line}") } else { writeln!(std::io::stdout(), "{line}") };
            lines.push(line);
        }
        lines
    })
}

fn wait(child: &mut Child, limit: Duration) -> Result<(ExitStatus, bool)> {
    let end = Instant::now() + limit;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok((status, false));
        }
        if Instant::now() > end {
            let group = rustix::process::Pid::from_child(child);
            rustix::process::kill_process_group(group, rustix::process::Signal::KILL)?;
            return Ok((child.wait()?, true));
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}
