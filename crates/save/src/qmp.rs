//! QEMU's monitor protocol: a line of JSON a message.

use block::{Error, ErrorKind, Result};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The longest message that is read.
const MESSAGE_MAX_BYTES: u64 = 16 << 20;
/// How long a command may take. QEMU answers longer commands at once, and their progress is polled.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);

/// A connection to a monitor.
#[derive(Debug)]
pub struct Qmp {
    socket: PathBuf,
    stream: UnixStream,
    reader: BufReader<UnixStream>,
}

impl Qmp {
    /// Connects to the monitor at `socket`. Tries for up to `patience`, because a starting QEMU has no socket yet.
    pub fn connect(socket: &Path, patience: Duration) -> Result<Self> {
        let failed = |error| Error::io(format!("cannot reach a machine at '{}' (qmp)", socket.display()), error);
        let begun = Instant::now();
        let stream = loop {
            match UnixStream::connect(socket) {
                Ok(stream) => break stream,
                Err(error) if begun.elapsed() >= patience => return Err(failed(error)),
                Err(_) => std::thread::sleep(Duration::from_millis(20)),
            }
        };
        stream.set_read_timeout(Some(ANSWER_TIMEOUT)).map_err(failed)?;
        stream.set_write_timeout(Some(ANSWER_TIMEOUT)).map_err(failed)?;
        let reader = BufReader::new(stream.try_clone().map_err(failed)?);
        let mut qmp = Self { socket: socket.to_owned(), stream, reader };
        if qmp.message()?.get("QMP").is_none() {
            return Err(qmp.wrong("it does not greet as QEMU's monitor protocol does"));
        }
        qmp.run("qmp_capabilities", json!({}))?;
        Ok(qmp)
    }

    /// Carries a command out and returns its answer.
    pub fn run(&mut self, command: &str, arguments: Value) -> Result<Value> {
        self.send(command, arguments, None)?;
        self.answer(command)
    }

    /// Passes a descriptor, under a name that later commands use.
    pub fn pass(&mut self, name: &str, descriptor: BorrowedFd<'_>) -> Result<()> {
        self.send("getfd", json!({ "fdname": name }), Some(descriptor))?;
        self.answer("getfd").map(drop)
    }

    /// Whether the machine runs.
    pub fn is_running(&mut self) -> Result<bool> {
        let status = self.run("query-status", json!({}))?;
        status.get("running").and_then(Value::as_bool).ok_or_else(|| self.wrong("it does not say whether it runs"))
    }

    /// Returns the state of the machine: `running`, `paused`, `inmigrate`...
    pub fn status(&mut self) -> Result<String> {
        let status = self.run("query-status", json!({}))?;
        let status = status.get("status").and_then(Value::as_str).map(str::to_owned);
        status.ok_or_else(|| self.wrong("it does not say what it is doing"))
    }

    pub(crate) fn wrong(&self, what: &str) -> Error {
        Error::new(ErrorKind::Protocol, format!("the machine at '{}': {what}", self.socket.display()))
    }

    fn io(&self, what: &str, error: std::io::Error) -> Error {
        Error::io(format!("the machine at '{}': {what}", self.socket.display()), error)
    }

    fn send(&mut self, command: &str, arguments: Value, descriptor: Option<BorrowedFd<'_>>) -> Result<()> {
        let text = format!("{}\n", json!({ "execute": command, "arguments": arguments }));
        let mut bytes = text.as_bytes();
        if let Some(descriptor) = descriptor {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            let fds = [descriptor];
            if !control.push(SendAncillaryMessage::ScmRights(&fds)) {
                return Err(self.wrong("no descriptor can be passed to it"));
            }
            let slices = [IoSlice::new(bytes)];
            let sent = sendmsg(self.stream.as_fd(), &slices, &mut control, SendFlags::NOSIGNAL);
            let sent = sent.map_err(|errno| self.io("cannot pass it a descriptor", errno.into()))?;
            bytes = bytes.get(sent..).unwrap_or_default();
        }
        self.stream.write_all(bytes).map_err(|error| self.io("cannot send it a command", error))
    }

    fn message(&mut self) -> Result<Value> {
        let mut line = Vec::new();
        let read = (&mut self.reader).take(MESSAGE_MAX_BYTES).read_until(b'\n', &mut line);
        match read {
            Ok(0) => Err(self.wrong("it has closed the connection")),
            Ok(_) => {
                serde_json::from_slice(&line).map_err(|error| self.wrong(&format!("its answer is no JSON: {error}")))
            }
            Err(error) => Err(self.io("it does not answer", error)),
        }
    }

    /// Returns the answer to the last command. Skips events in between.
    fn answer(&mut self, command: &str) -> Result<Value> {
        loop {
            let mut message = self.message()?;
            if let Some(error) = message.get("error") {
                let why = error.get("desc").and_then(Value::as_str).unwrap_or("it does not say why").to_owned();
                return Err(self.wrong(&format!("'{command}' failed: {why}")));
            }
            if let Some(answer) = message.get_mut("return") {
                return Ok(answer.take());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    /// A monitor that says these lines, one for each that it is sent.
    fn monitor(socket: &Path, lines: &'static [&'static str]) -> std::thread::JoinHandle<Vec<String>> {
        let listener = UnixListener::bind(socket).unwrap();
        std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut reader = BufReader::new(stream.try_clone().unwrap());
            let mut heard = Vec::new();
            stream.write_all(b"{\"QMP\": {\"version\": {}}}\n").unwrap();
            for line in lines {
                let mut said = String::new();
                reader.read_line(&mut said).unwrap();
                heard.push(said);
                stream.write_all(line.as_bytes()).unwrap();
            }
            heard
        })
    }

    #[test]
    fn events_are_passed_over_and_errors_name_the_command_and_the_reason() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("qmp");
        let answers: &[&str] = &[
            "{\"return\": {}}\n",
            "{\"event\": \"STOP\"}\n{\"return\": {\"running\": true, \"status\": \"running\"}}\n",
            "{\"error\": {\"class\": \"GenericError\", \"desc\": \"no such thing\"}}\n",
            "not json\n",
        ];
        let monitor = monitor(&socket, answers);
        let mut qmp = Qmp::connect(&socket, Duration::from_secs(10)).unwrap();
        assert!(qmp.is_running().unwrap());
        let error = qmp.run("frob", json!({ "a": 1 })).unwrap_err().to_string();
        assert!(error.contains("'frob' failed: no such thing"), "{error}");
        assert!(qmp.run("stop", json!({})).unwrap_err().to_string().contains("no JSON"));
        drop(qmp);
        assert!(monitor.join().unwrap()[2].contains("\"execute\":\"frob\""));
        let missing = Qmp::connect(&dir.path().join("none"), Duration::ZERO).unwrap_err().to_string();
        assert!(missing.contains("cannot reach a machine"), "{missing}");
    }
}
