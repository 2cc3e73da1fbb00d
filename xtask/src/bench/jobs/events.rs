//! The events of a daemon, as `ringdisk ctl watch` prints them.
//!
//! They say when a job ends, as QMP's events do. To ask for the job again and again would start a program each time, on
//! a processor that the guest or the server needs.

use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Instant;

pub(super) struct Events {
    child: Child,
    lines: Receiver<String>,
}

/// How a job has ended.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum JobEnd {
    Done,
    Failed(String),
}

impl Events {
    /// Starts a `watch` of this daemon. Events that come from then on are kept until somebody asks for them.
    pub(super) fn begin(mut watch: Command) -> Result<Self> {
        watch.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = watch.spawn().with_context(|| format!("cannot run {watch:?}"))?;
        let stdout = child.stdout.take().context("no output to read events from")?;
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        Ok(Self { child, lines })
    }

    /// Waits for the end of a job; `None` if it does not end in time.
    pub(super) fn wait_for(&self, job: u64, deadline: Instant) -> Result<Option<JobEnd>> {
        loop {
            let line = match self.lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(line) => line,
                Err(RecvTimeoutError::Timeout) => return Ok(None),
                Err(RecvTimeoutError::Disconnected) => bail!("the events have ended before the job"),
            };
            if let Some(end) = end_of(job, &line)? {
                return Ok(Some(end));
            }
        }
    }
}

/// What a line says of the end of a job.
fn end_of(job: u64, line: &str) -> Result<Option<JobEnd>> {
    let event: Value = serde_json::from_str(line).with_context(|| format!("this is no event: {line}"))?;
    if event["kind"] != "job-ended" || event["id"] != job {
        return Ok(None);
    }
    Ok(Some(match event["message"].as_str() {
        None => JobEnd::Done,
        Some(message) => JobEnd::Failed(message.to_owned()),
    }))
}

impl Drop for Events {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn printed(lines: &str) -> Events {
        let mut command = Command::new("sh");
        command.args(["-c", "printf '%s\\n' \"$0\"; exec sleep 60", lines]);
        Events::begin(command).unwrap()
    }

    #[test]
    fn the_end_of_the_job_is_found_among_other_events() {
        let events = printed(
            "{\"number\":1,\"time_ms\":1,\"kind\":\"job-started\",\"disk\":\"disk\",\"id\":7}\n\
             {\"number\":2,\"time_ms\":2,\"kind\":\"job-ended\",\"disk\":\"disk\",\"id\":6,\"message\":\"no space\"}\n\
             {\"number\":3,\"time_ms\":3,\"kind\":\"layers-changed\",\"disk\":\"disk\"}\n\
             {\"number\":4,\"time_ms\":4,\"kind\":\"job-ended\",\"disk\":\"disk\",\"id\":7}",
        );
        let deadline = Instant::now() + Duration::from_secs(30);
        assert_eq!(events.wait_for(7, deadline).unwrap(), Some(JobEnd::Done));
        assert_eq!(events.wait_for(7, Instant::now()).unwrap(), None);
        let events = printed("{\"number\":1,\"time_ms\":2,\"kind\":\"job-ended\",\"id\":6,\"message\":\"no space\"}");
        assert_eq!(events.wait_for(6, deadline).unwrap(), Some(JobEnd::Failed("no space".to_owned())));
    }

    #[test]
    fn events_that_end_are_no_job_that_goes_on() {
        let events = Events::begin(Command::new("true")).unwrap();
        assert!(events.wait_for(1, Instant::now() + Duration::from_secs(30)).is_err());
        assert!(printed("no event").wait_for(1, Instant::now() + Duration::from_secs(30)).is_err());
    }
}
