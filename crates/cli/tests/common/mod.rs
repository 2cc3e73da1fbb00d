//! The program as a child process, and the tools that judge it.

#![allow(dead_code, reason = "each test file uses its part")]

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// Whatever these tests wait for takes less time than this, unless it hangs.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// The program under test: the one that was built with the test, or that which `RINGDISK_PROGRAM` names.
pub(crate) fn ringdisk() -> Command {
    let program = std::env::var_os("RINGDISK_PROGRAM").unwrap_or_else(|| env!("CARGO_BIN_EXE_ringdisk").into());
    let mut command = Command::new(program);
    command.env_remove("RUST_LOG").env_remove("NOTIFY_SOCKET").stdin(Stdio::null());
    command
}

/// Runs the program to its end.
pub(crate) fn run(arguments: &[&str]) -> Output {
    ringdisk().args(arguments).output().expect("the program can be started")
}

/// Runs the program and returns its standard output; it must succeed.
pub(crate) fn run_ok(arguments: &[&str]) -> String {
    let output = run(arguments);
    assert!(output.status.success(), "ringdisk {arguments:?}: {}\n{}", output.status, text(&output.stderr));
    text(&output.stdout)
}

/// Runs the program, which must fail with `code`, and returns what it said.
pub(crate) fn run_fails(code: i32, arguments: &[&str]) -> String {
    let output = run(arguments);
    assert_eq!(output.status.code(), Some(code), "ringdisk {arguments:?}: {}", text(&output.stderr));
    text(&output.stderr)
}

/// At how many moments a test kills its daemon, where `RINGDISK_KILL9_MOMENTS` does not say.
pub(crate) fn kill9_moments(usual: u64) -> u64 {
    std::env::var("RINGDISK_KILL9_MOMENTS").map_or(usual, |value| value.parse().expect("a number"))
}

/// What `ringdisk info` says of an image whose server was killed. The kernel lets the locks of such a process go only
/// after it has taken down its io_uring. The program waits for that, but a loaded machine may need longer. The locks of
/// the layers below are waited for, too.
pub(crate) fn info_after_kill(image: &Path) -> String {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let output = run(&["info", "--backing-chain", path_str(image)]);
        if output.status.success() {
            return text(&run(&["info", path_str(image)]).stdout);
        }
        let said = text(&output.stderr);
        assert!(said.contains("in use") && Instant::now() < deadline, "ringdisk info: {}\n{said}", output.status);
    }
}

pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Whether a tool is there. In CI, where a step has installed it, a missing tool is an error. By hand, the caller skips
/// its test.
pub(crate) fn has_tool(name: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path).any(|directory| directory.join(name).is_file());
    assert!(found || std::env::var_os("CI").is_none(), "{name} is missing, and this is CI");
    if !found {
        eprintln!("SKIPPED: {name} is not installed");
    }
    found
}

/// Runs a tool to its end.
pub(crate) fn tool(name: &str, arguments: &[&str]) -> Output {
    Command::new(name).args(arguments).stdin(Stdio::null()).output().expect("the tool can be started")
}

/// Runs a tool, which must succeed, and returns its standard output.
pub(crate) fn tool_ok(name: &str, arguments: &[&str]) -> String {
    let output = tool(name, arguments);
    let said = text(&output.stdout) + &text(&output.stderr);
    assert!(output.status.success(), "{name} {arguments:?}: {}\n{said}", output.status);
    text(&output.stdout)
}

/// `qemu-img check`: whether the image is valid, leaks allowed (exit codes: 0 clean, 3 leaks).
pub(crate) fn assert_valid(image: &Path, leaks_allowed: bool) {
    let output = tool("qemu-img", &["check", path_str(image)]);
    let code = output.status.code();
    let valid = code == Some(0) || leaks_allowed && code == Some(3);
    assert!(valid, "qemu-img check {}: {code:?}\n{}{}", image.display(), text(&output.stdout), text(&output.stderr));
}

pub(crate) fn path_str(path: &Path) -> &str {
    path.to_str().expect("test paths are UTF-8")
}

/// A directory of its own for a test; short enough for sockets.
pub(crate) fn directory() -> tempfile::TempDir {
    tempfile::Builder::new().prefix("rd-").tempdir().expect("a temporary directory")
}

/// `ringdisk serve`, ready.
pub(crate) struct Server {
    child: Child,
    /// What it printed up to "ready" and whatever was printed with it.
    pub(crate) announced: String,
    lines: Receiver<String>,
}

impl Server {
    /// Starts `ringdisk serve ARGUMENTS` and waits until it is ready.
    pub(crate) fn start<S: AsRef<OsStr>>(arguments: &[S]) -> Self {
        let mut command = ringdisk();
        command.arg("serve").args(arguments);
        Self::start_command(command)
    }

    /// Starts a prepared command, and waits until it is ready.
    pub(crate) fn start_command(mut command: Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the program starts");
        let stdout = child.stdout.take().expect("piped");
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    break;
                }
            }
        });
        let mut server = Self { child, announced: String::new(), lines };
        server.wait_until_ready();
        server
    }

    fn wait_until_ready(&mut self) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            match self.lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(line) => {
                    self.announced += &line;
                    self.announced.push('\n');
                    if line == "ready" {
                        return;
                    }
                }
                Err(RecvTimeoutError::Timeout) => panic!("not ready in time; it said:\n{}", self.announced),
                Err(RecvTimeoutError::Disconnected) => {
                    let status = self.child.wait().expect("a child");
                    let said = self.stderr();
                    panic!("ended ({status}) before it was ready; it said:\n{}{said}", self.announced);
                }
            }
        }
    }

    fn stderr(&mut self) -> String {
        let mut said = String::new();
        if let Some(mut stderr) = self.child.stderr.take() {
            let _ = stderr.read_to_string(&mut said);
        }
        said
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends a signal by its name ("TERM").
    pub(crate) fn signal(&self, name: &str) {
        tool_ok("kill", &[&format!("-{name}"), &self.pid().to_string()]);
    }

    /// Ends it with SIGTERM; returns how it ended and what it said on standard error.
    pub(crate) fn terminate(self) -> (ExitStatus, String) {
        self.end_by(&["TERM"])
    }

    fn end_by(mut self, signals: &[&str]) -> (ExitStatus, String) {
        signals.iter().for_each(|signal| self.signal(signal));
        let status = self.wait();
        (status, self.stderr())
    }

    /// Ends it with SIGTERM, in good order.
    pub(crate) fn stop(self) {
        self.stop_by(&["TERM"]);
    }

    /// Ends it with these signals, in good order.
    pub(crate) fn stop_by(self, signals: &[&str]) {
        let (status, said) = self.end_by(signals);
        assert!(status.success(), "{signals:?}: {status}\n{said}");
    }

    /// Ends it with SIGKILL.
    pub(crate) fn kill(mut self) {
        self.child.kill().expect("the child can be killed");
        self.child.wait().expect("a child");
    }

    /// Waits for its end.
    pub(crate) fn wait(&mut self) -> ExitStatus {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.child.try_wait().expect("a child") {
                return status;
            }
            assert!(Instant::now() < deadline, "the server does not end");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // This does nothing if the process has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// `name` in `directory`.
pub(crate) fn at(directory: &tempfile::TempDir, name: &str) -> PathBuf {
    directory.path().join(name)
}

/// `length` bytes that are not alike.
pub(crate) fn numbered(length: usize) -> Vec<u8> {
    (0..length).map(|index| (index / 512 % 251) as u8 + 1).collect()
}

/// An image whose second cluster is compressed and cannot be decompressed.
pub(crate) fn with_an_unreadable_cluster() -> Vec<u8> {
    let dir = directory();
    let [raw, image] = ["s.raw", "s.qcow2"].map(|name| at(&dir, name));
    std::fs::write(&raw, numbered(300_000)).unwrap();
    let convert = ["convert", "-c", "-f", "raw", "-O", "qcow2", path_str(&raw), path_str(&image)];
    tool_ok("qemu-img", &convert);
    let mut bytes = std::fs::read(image).unwrap();
    let word = |bytes: &[u8], at: usize| u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap());
    let l1 = word(&bytes, 40) as usize;
    let l2 = (word(&bytes, l1) & 0x00ff_ffff_ffff_fe00) as usize;
    let entry = word(&bytes, l2 + 8);
    assert_eq!(entry >> 62, 1, "compressed");
    // A block of a type that does not exist.
    bytes[(entry & ((1 << 54) - 1)) as usize] = 0xff;
    bytes
}

/// A line of a table of snapshots, without dates and without what newer versions of qemu-img write differently: the
/// width of columns, the hours of a clock, and the count of instructions. Other lines stay as they are.
pub(crate) fn without_columns(line: &str) -> String {
    if line.starts_with("ID ") && line.contains("ICOUNT") {
        return line.replace("VM SIZE", "VM_SIZE").replace("VM CLOCK", "VM_CLOCK").split_whitespace().collect();
    }
    let mut words: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
    let is_date = |word: &String| word.len() == 10 && word.as_bytes()[4] == b'-';
    let is_clock = |word: &&mut String| word.len() >= 12 && word.matches(':').count() == 2;
    let Some(clock) = words.iter_mut().find(is_clock) else { return line.to_owned() };
    *clock = format!("{clock:0>14}");
    if let Some(date) = words.iter().position(is_date) {
        words.drain(date..date + 2);
    }
    words.retain(|word| word != "--");
    words.join(" ")
}
