//! A client of the control interface that blocks: for `ringdisk ctl`, for tests and for programs.

use crate::api::{ErrorBody, ErrorDetail, Event, EventKind};
use block::{Error, ErrorKind, Result};
use http_body_util::{BodyExt as _, Full};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1;
use hyper::{Method, Request, Response, header};
use hyper_util::rt::TokioIo;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::net::UnixStream;
use tokio::runtime::Runtime;

/// How long to wait for a place among those that connect.
const CONNECT_PATIENCE: Duration = Duration::from_secs(10);
/// How often to try.
const CONNECT_PERIOD: Duration = Duration::from_millis(20);

/// Why a call failed.
#[derive(Debug)]
#[non_exhaustive]
pub enum CallError {
    /// The daemon refused it, or could not carry it out.
    Refused(ErrorDetail),
    /// The daemon cannot be reached, or does not answer as it should.
    NoAnswer(Error),
    /// There is no daemon any more: it ended before it answered, or nobody is at its socket.
    Ended(Error),
}

impl fmt::Display for CallError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused(detail) => f.write_str(&detail.message),
            Self::NoAnswer(error) | Self::Ended(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for CallError {}

impl From<Error> for CallError {
    fn from(error: Error) -> Self {
        Self::NoAnswer(error)
    }
}

/// Returns a name as a part of a path: other characters than its plain ones become `%XX`.
#[must_use]
pub fn path_segment(name: &str) -> String {
    let escape = |byte: u8| match byte {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' => char::from(byte).to_string(),
        other => format!("%{other:02X}"),
    };
    name.bytes().map(escape).collect()
}

/// Calls a daemon at its control socket.
#[derive(Debug)]
pub struct Client {
    socket: PathBuf,
    runtime: Runtime,
}

impl Client {
    /// Makes a client of the daemon at `socket`. It connects with each call.
    pub fn new(socket: &Path) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(|error| Error::io("cannot start a client", error))?;
        Ok(Self { socket: socket.to_owned(), runtime })
    }

    /// Sends `GET path`.
    pub fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, CallError> {
        self.call(Method::GET, path, None::<&()>)
    }

    /// Sends `GET path`, and returns the answer as text.
    pub fn get_text(&self, path: &str) -> Result<String, CallError> {
        self.runtime.block_on(async {
            let bytes = self.send(Method::GET, path, Bytes::new()).await?;
            Ok(String::from_utf8_lossy(&bytes).into_owned())
        })
    }

    /// Sends `POST path` with a body.
    pub fn post<T: DeserializeOwned>(&self, path: &str, body: &impl Serialize) -> Result<T, CallError> {
        self.call(Method::POST, path, Some(body))
    }

    /// Sends `PATCH path` with a body.
    pub fn patch<T: DeserializeOwned>(&self, path: &str, body: &impl Serialize) -> Result<T, CallError> {
        self.call(Method::PATCH, path, Some(body))
    }

    /// Sends `POST path` without a body.
    pub fn post_nothing<T: DeserializeOwned>(&self, path: &str) -> Result<T, CallError> {
        self.call(Method::POST, path, None::<&()>)
    }

    /// Sends `DELETE path`.
    pub fn delete(&self, path: &str) -> Result<(), CallError> {
        self.call(Method::DELETE, path, None::<&()>)
    }

    fn call<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: Option<&impl Serialize>,
    ) -> Result<T, CallError> {
        let body = body.map(serde_json::to_vec).transpose().map_err(|error| self.no_answer(error))?;
        let bytes = self.runtime.block_on(self.send(method, path, Bytes::from(body.unwrap_or_default())))?;
        let text: &[u8] = if bytes.is_empty() { b"null" } else { &bytes };
        serde_json::from_slice(text).map_err(|error| self.wrong_answer(&error))
    }

    /// Calls `each` with every event until it returns false or the daemon ends. A daemon that does not say first that it
    /// ends is an error.
    pub fn watch(&self, mut each: impl FnMut(Event) -> bool) -> Result<(), CallError> {
        self.runtime.block_on(async {
            let mut body = self.request(Method::GET, "/v1/events", Bytes::new()).await?.into_body();
            let (mut text, mut is_ending) = (Vec::new(), false);
            while let Some(frame) = body.frame().await {
                // The daemon's end ends the stream.
                let Ok(frame) = frame else { break };
                let Ok(data) = frame.into_data() else { continue };
                text.extend_from_slice(&data);
                while let Some(end) = text.iter().position(|byte| *byte == b'\n') {
                    let line: Vec<u8> = text.drain(..=end).collect();
                    let Some(data) = line.strip_prefix(b"data:") else { continue };
                    let event: Event = serde_json::from_slice(data).map_err(|error| self.wrong_answer(&error))?;
                    is_ending |= event.kind == EventKind::ShuttingDown;
                    if !each(event) {
                        return Ok(());
                    }
                }
            }
            match is_ending {
                true => Ok(()),
                false => Err(self.no_answer("the events ended, and the daemon did not say that it ends")),
            }
        })
    }

    async fn send(&self, method: Method, path: &str, body: Bytes) -> Result<Bytes, CallError> {
        let response = self.request(method, path, body).await?;
        let bytes = response.into_body().collect().await.map_err(|error| self.hung_up(error))?;
        Ok(bytes.to_bytes())
    }

    /// Returns the answer to a call; an error if the daemon refused it.
    async fn request(&self, method: Method, path: &str, body: Bytes) -> Result<Response<Incoming>, CallError> {
        let stream = self.connect().await.map_err(|error| self.no_connection(error))?;
        let (mut sender, connection) =
            http1::handshake(TokioIo::new(stream)).await.map_err(|error| self.hung_up(error))?;
        tokio::spawn(async move {
            // The answer says what is wrong with the request.
            let _ = connection.await;
        });
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header(header::HOST, "ringdisk")
            .header(header::CONTENT_TYPE, "application/json")
            .body(Full::new(body))
            .map_err(|error| self.no_answer(error))?;
        let response = sender.send_request(request).await.map_err(|error| match self.is_of_another_user() {
            // It hangs up on them.
            true => CallError::NoAnswer(Error::with_source(ErrorKind::Denied, self.not_for_this_user(), error)),
            false => self.hung_up(error),
        })?;
        if response.status().is_success() {
            return Ok(response);
        }
        let status = response.status();
        let bytes = response.into_body().collect().await.map_err(|error| self.hung_up(error))?.to_bytes();
        match serde_json::from_slice::<ErrorBody>(&bytes) {
            Ok(body) => Err(CallError::Refused(body.error)),
            Err(_) => Err(self.no_answer(format!("status {status}"))),
        }
    }

    /// Connects. A daemon that has too many connections waiting is asked again for a while.
    async fn connect(&self) -> std::io::Result<UnixStream> {
        let deadline = tokio::time::Instant::now() + CONNECT_PATIENCE;
        loop {
            match UnixStream::connect(&self.socket).await {
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock && deadline.elapsed().is_zero() => {
                    tokio::time::sleep(CONNECT_PERIOD).await;
                }
                result => return result,
            }
        }
    }

    fn no_connection(&self, error: std::io::Error) -> CallError {
        use std::io::ErrorKind as Why;
        let why = error.kind();
        let what = format!("cannot reach a daemon at '{}' (is it served with --control?)", self.socket.display());
        match why {
            Why::PermissionDenied => CallError::NoAnswer(Error::io(self.not_for_this_user(), error)),
            Why::NotFound | Why::ConnectionRefused => CallError::Ended(Error::io(what, error)),
            _ => CallError::NoAnswer(Error::io(what, error)),
        }
    }

    /// Returns the error of a connection that the daemon closed, or on which it sent nonsense.
    fn hung_up(&self, error: hyper::Error) -> CallError {
        if error.is_parse() || error.is_user() {
            return self.no_answer(error);
        }
        let what = format!("the daemon at '{}' ended before it answered", self.socket.display());
        CallError::Ended(Error::new(ErrorKind::Protocol, what))
    }

    /// Whether the socket belongs to somebody who does not answer this user.
    fn is_of_another_user(&self) -> bool {
        let own = rustix::process::geteuid();
        !own.is_root() && rustix::fs::stat(&self.socket).is_ok_and(|socket| socket.st_uid != own.as_raw())
    }

    fn not_for_this_user(&self) -> String {
        format!("the daemon at '{}' answers only its own user and root", self.socket.display())
    }

    fn wrong_answer(&self, error: &serde_json::Error) -> CallError {
        self.no_answer(block::in_plain_words(&error.to_string()))
    }

    fn no_answer(&self, source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> CallError {
        let message = format!("the daemon at '{}' does not answer as it should", self.socket.display());
        CallError::NoAnswer(Error::with_source(ErrorKind::Protocol, message, source))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_fit_into_paths() {
        assert_eq!(path_segment("disk-1_a.b"), "disk-1_a.b");
        assert_eq!(path_segment("a b/ä"), "a%20b%2F%C3%A4");
    }
}
