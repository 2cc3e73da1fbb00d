//! Controls a QEMU guest from the host.

use anyhow::{Context, Result, bail};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// How long QEMU may take to answer.
const PATIENCE: Duration = Duration::from_secs(60);

/// A connection in QEMU's protocol QMP to the socket of [`crate::GuestOptions::monitor`].
#[derive(Debug)]
pub struct Monitor(BufReader<UnixStream>);

impl Monitor {
    /// Connects to a running guest.
    pub fn connect(path: &Path) -> Result<Self> {
        let stream = UnixStream::connect(path).with_context(|| format!("no monitor at {}", path.display()))?;
        stream.set_read_timeout(Some(PATIENCE))?;
        let mut monitor = Self(BufReader::new(stream));
        // QEMU's greeting.
        monitor.line()?;
        monitor.command("qmp_capabilities")?;
        Ok(monitor)
    }

    /// Resets the machine.
    pub fn reset(&mut self) -> Result<()> {
        self.command("system_reset")
    }

    fn command(&mut self, name: &str) -> Result<()> {
        writeln!(self.0.get_mut(), "{{\"execute\": \"{name}\"}}")?;
        loop {
            let line = self.line()?;
            // Events may come before the answer.
            if line.starts_with("{\"return\"") {
                return Ok(());
            }
            if line.starts_with("{\"error\"") {
                bail!("QEMU refuses {name}: {}", line.trim());
            }
        }
    }

    fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        if self.0.read_line(&mut line)? == 0 {
            bail!("QEMU has closed its monitor");
        }
        Ok(line)
    }
}
