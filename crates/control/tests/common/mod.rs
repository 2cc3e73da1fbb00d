//! A control socket over a manager of its own.

#![allow(dead_code, reason = "each test file uses its part")]

use daemon::DaemonConfig;
use ringdisk_control::{ControlServer, Manager};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tempfile::TempDir;

/// How long anything may take on a machine that is busy.
pub(crate) const PATIENCE: Duration = Duration::from_secs(120);

pub(crate) struct Served {
    pub(crate) dir: TempDir,
    pub(crate) socket: PathBuf,
    pub(crate) manager: Arc<Manager>,
    pub(crate) server: ControlServer,
}

/// The answer to a call.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) head: String,
    pub(crate) body: String,
}

impl Served {
    pub(crate) fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("control");
        let state = dir.path().join("state");
        let manager = Arc::new(Manager::start(DaemonConfig::default(), Some(&state)).unwrap());
        let server = ControlServer::listen(&socket, Arc::clone(&manager)).unwrap();
        Self { dir, socket, manager, server }
    }

    pub(crate) fn connect(&self) -> UnixStream {
        let stream = UnixStream::connect(&self.socket).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream
    }

    /// Sends these bytes and returns all that comes back until the server closes.
    pub(crate) fn raw(&self, bytes: &[u8]) -> String {
        let mut stream = self.connect();
        // The server may close before it has read everything.
        let _ = stream.write_all(bytes);
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        String::from_utf8_lossy(&answer).into_owned()
    }

    pub(crate) fn ask(&self, method: &str, path: &str, body: &str) -> Answer {
        let length = body.len();
        let request = format!(
            "{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n{body}"
        );
        let answer = self.raw(request.as_bytes());
        let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no answer: {answer}"));
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        Answer { status, head: head.to_lowercase(), body: body.to_owned() }
    }

    /// Ends the server and the manager.
    pub(crate) fn stop(self) {
        self.server.stop().unwrap();
        Arc::into_inner(self.manager).expect("nobody else has it").shutdown().unwrap();
    }
}
