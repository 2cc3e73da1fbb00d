//! The commands of qemu-storage-daemon's monitor that a comparison needs.

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

/// A monitor, whose events are kept until somebody asks for them.
pub(super) struct Qmp {
    reader: BufReader<UnixStream>,
    /// A line that has not come to its end.
    line: String,
    events: Vec<Value>,
}

/// How long it may take to answer.
const PATIENCE: Duration = Duration::from_secs(30);
/// How long one read waits.
const READ: Duration = Duration::from_millis(20);

impl Qmp {
    pub(super) fn connect(socket: &Path) -> Result<Self> {
        let stream = UnixStream::connect(socket).context("cannot reach the monitor")?;
        stream.set_read_timeout(Some(READ))?;
        let mut qmp = Self { reader: BufReader::new(stream), line: String::new(), events: Vec::new() };
        let deadline = Instant::now() + PATIENCE;
        while qmp.next(deadline)?.context("the monitor does not greet")?.get("QMP").is_none() {}
        qmp.call("qmp_capabilities", &json!({}))?;
        Ok(qmp)
    }

    /// What it says next; nothing if it says nothing in time.
    fn next(&mut self, deadline: Instant) -> Result<Option<Value>> {
        loop {
            match self.reader.read_line(&mut self.line) {
                Ok(0) => bail!("the monitor closed its connection"),
                Ok(_) if self.line.ends_with('\n') => {
                    return Ok(Some(serde_json::from_str(&std::mem::take(&mut self.line))?));
                }
                Ok(_) => {}
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
                Err(error) => return Err(error.into()),
            }
            if Instant::now() >= deadline {
                return Ok(None);
            }
        }
    }

    pub(super) fn call(&mut self, command: &str, arguments: &Value) -> Result<Value> {
        let call = json!({ "execute": command, "arguments": arguments });
        self.reader.get_mut().write_all(format!("{call}\n").as_bytes())?;
        let deadline = Instant::now() + PATIENCE;
        loop {
            let said = self.next(deadline)?.with_context(|| format!("{command}: no answer"))?;
            if let Some(value) = said.get("return") {
                return Ok(value.clone());
            }
            if let Some(error) = said.get("error") {
                bail!("{command}: {error}");
            }
            self.events.push(said);
        }
    }

    /// Waits for one of these events of a job. Nothing if none comes in time.
    pub(super) fn wait_for(&mut self, job: &str, events: &[&str], deadline: Instant) -> Result<Option<Value>> {
        let is_meant = |said: &Value| {
            let is_one = said["event"].as_str().is_some_and(|event| events.contains(&event));
            is_one && said["data"]["device"].as_str() == Some(job)
        };
        if let Some(index) = self.events.iter().position(is_meant) {
            return Ok(Some(self.events.remove(index)));
        }
        while let Some(said) = self.next(deadline)? {
            if is_meant(&said) {
                return Ok(Some(said));
            }
            self.events.push(said);
        }
        Ok(None)
    }
}
