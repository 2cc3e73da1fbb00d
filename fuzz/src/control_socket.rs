//! The control socket, with clients that say anything: requests that are right, nearly right or noise, in pieces.
//!
//! What must hold: no panic in any thread, no answer that admits one, and whoever comes next is served.

use arbitrary::{Result, Unstructured};
use control::api::AddDisk;
use control::{ControlServer, Manager, Options};
use daemon::DaemonConfig;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, OnceLock};
use std::time::Duration;

const REQUESTS_MAX: usize = 4;
const CHANGES_MAX: usize = 4;
/// With a loaded host's patience.
const PATIENCE: Duration = Duration::from_secs(60);
/// A connection may stay open: one that watches, and one whose last request is not whole.
const SILENCE: Duration = Duration::from_millis(50);
/// More disks of one server are removed again.
const DISKS_MAX: usize = 8;
/// The disk that is always there.
const KEPT: &str = "kept";

/// Panics of this process, caught or not.
static PANICS: AtomicUsize = AtomicUsize::new(0);

/// The server of all inputs: one that is broken by one of them fails the next.
struct Server {
    socket: PathBuf,
    manager: Arc<Manager>,
    _server: ControlServer,
    _directory: tempfile::TempDir,
}

impl Server {
    fn start() -> Option<Self> {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            PANICS.fetch_add(1, Ordering::SeqCst);
            before(panic);
        }));
        let directory = tempfile::tempdir().ok()?;
        let socket = directory.path().join("control");
        let config = DaemonConfig::default().with(|config| config.reactors = 1);
        let manager = Arc::new(Manager::start(config, None).ok()?);
        let server = ControlServer::listen(&socket, Arc::clone(&manager)).ok()?;
        Some(Self { socket, manager, _server: server, _directory: directory })
    }

    /// Brings the disks back to what inputs begin with, as far as they can tell.
    fn tidy(&self) {
        let disks = self.manager.disks();
        if disks.len() > DISKS_MAX {
            // A call that an input left behind may still keep one.
            disks.iter().for_each(|disk| drop(self.manager.remove_disk(&disk.name, true)));
        }
        if !self.manager.disks().iter().any(|disk| disk.name == KEPT) {
            let options = Options::parse(&format!("format=null,size=1M,name={KEPT},filter=throttle:iops-total=1000"));
            let request = options.map(|options| AddDisk {
                options,
                export: false,
                overlay: None,
                former_tops: Vec::new(),
                bases: Vec::new(),
            });
            // One of that name may be going just now.
            drop(request.and_then(|request| self.manager.add_disk(request)));
        }
    }
}

/// Bodies that some call takes. Nothing exists where their paths lead, however a few of their bytes are changed.
const BODIES: [&str; 16] = [
    "",
    "{}",
    r#"{"options":{"format":"null","size":"1M","name":"n"},"export":false}"#,
    r#"{"options":{"format":"null","size":"64k"},"export":false,"former_tops":[{"file":"/x/x/x/x/x/x/x"}]}"#,
    r#"{"options":{"throttling.iops-total":"5"}}"#,
    r#"{"size_bytes":2097152}"#,
    r#"{"force":true}"#,
    r#"{"overlays":[{"disk":"kept","overlay":"/x/x/x/x/x/x/x"}]}"#,
    r#"{"disk":"kept","socket":"/x/x/x/x/x/x/x","read_only":true}"#,
    r#"{"target":"/x/x/x/x/x/x/x","format":"raw","keep":true,"within_ms":5}"#,
    r#"{"target":"/x/x/x/x/x/x/x","mode":"full","bitmap":"b"}"#,
    r#"{"base":"/x/x/x/x/x/x/x"}"#,
    r#"{"bytes_per_second":5}"#,
    r#"{"actions":[{"action":"add","bitmap":"b"},{"action":"merge","bitmap":"b","source":"c"}]}"#,
    r#"{"name":"s"}"#,
    r#"{"options":{"name":"\ud800\u0000"},"deep":[[[[[[[[[[[[[[[[[[[[[[[["#,
];

/// The described calls: method and path.
static CALLS: LazyLock<Vec<(&'static str, String)>> = LazyLock::new(|| {
    let calls = control::openapi().paths.paths.into_iter().flat_map(|(path, item)| {
        let methods = [
            ("GET", item.get.is_some()),
            ("POST", item.post.is_some()),
            ("PATCH", item.patch.is_some()),
            ("DELETE", item.delete.is_some()),
        ];
        methods.into_iter().filter(|(_, is_there)| *is_there).map(move |(method, _)| (method, path.clone()))
    });
    calls.collect()
});

/// The place in [`BODIES`] of what a call takes.
fn body_of(method: &str, path: &str) -> usize {
    match (method, path.rsplit('/').next().unwrap_or_default()) {
        ("POST", "disks") => 2,
        ("PATCH", _) => 4,
        ("POST", "resize") => 5,
        ("POST", "reopen") => 6,
        ("POST", "snapshots") if path == "/v1/snapshots" => 7,
        ("POST", "exports") => 8,
        ("POST", "mirror") => 9,
        ("POST", "backup") => 10,
        ("POST", "rebase" | "stream") => 11,
        ("POST", "limit" | "commit" | "compact") => 12,
        ("POST", "bitmaps") => 13,
        ("POST", "snapshots") => 14,
        _ => 0,
    }
}

/// Mostly `usual`.
fn mostly<'a, T: ?Sized>(u: &mut Unstructured<'_>, usual: &'a T, others: &[&'a T]) -> Result<&'a T> {
    Ok(if u.ratio(15u8, 16)? { usual } else { u.choose(others)? })
}

/// One request. It is right more often than not, and half of those that are wrong have a few bytes changed.
fn request(u: &mut Unstructured<'_>, is_last: bool) -> Result<Vec<u8>> {
    let &(method, ref path) = u.choose(CALLS.as_slice())?;
    let usual = BODIES.get(body_of(method, path)).copied().unwrap_or_default();
    let body: Vec<u8> = match u.int_in_range(0..=15)? {
        0 => u.arbitrary()?,
        _ => mostly(u, usual, &BODIES)?.as_bytes().to_vec(),
    };
    let method = mostly(u, method, &["GET", "POST", "DELETE", "PUT", "HEAD", "OPTIONS", "CONNECT"])?;
    let names = [KEPT, KEPT, KEPT, "n", "disk1", "1", "%6b%65pt", "%ff", ".."];
    let numbers = ["0", "1", "2", "3", "-1", "18446744073709551616", KEPT, "%ff"];
    let path = path.replace("{name}", u.choose(&names)?).replace("{snapshot}", u.choose(&names)?);
    let mut path = path.replace("{id}", u.choose(&numbers)?);
    let usual = if method == "DELETE" && path.starts_with("/v1/disks/") { "?force=true" } else { "" };
    path.push_str(mostly(u, usual, &["", "?force=maybe", "?force", "?&=", "?bogus=1", "/", "#x"])?);
    let close = if is_last { "connection: close\r\n" } else { "" };
    let mut bytes = format!("{method} {path} HTTP/1.1\r\nhost: x\r\n{close}").into_bytes();
    put_body(u, &mut bytes, &body)?;
    if u.ratio(1u8, 4)? {
        for _ in 0..u.int_in_range(1..=CHANGES_MAX)? {
            let at = u.choose_index(bytes.len())?;
            if let Some(byte) = bytes.get_mut(at) {
                *byte = u.arbitrary()?;
            }
        }
    }
    if u.ratio(1u8, 32)? {
        bytes.truncate(u.choose_index(bytes.len())?);
    }
    Ok(bytes)
}

/// Ends the head, and adds the body: whole, in chunks, or of another length than was said.
fn put_body(u: &mut Unstructured<'_>, bytes: &mut Vec<u8>, body: &[u8]) -> Result<()> {
    match u.int_in_range(0..=15)? {
        0 => {
            bytes.extend_from_slice(b"transfer-encoding: chunked\r\n\r\n");
            for piece in body.chunks(u.int_in_range(1..=64)?) {
                bytes.extend_from_slice(format!("{:x}\r\n", piece.len()).as_bytes());
                bytes.extend_from_slice(piece);
                bytes.extend_from_slice(b"\r\n");
            }
            bytes.extend_from_slice(b"0\r\n\r\n");
            return Ok(());
        }
        1 => bytes.extend_from_slice(b"expect: 100-continue\r\nupgrade: h2c\r\n"),
        _ => {}
    }
    let length = if u.ratio(31u8, 32)? { body.len() } else { u.int_in_range(0..=600_000)? };
    bytes.extend_from_slice(format!("content-length: {length}\r\n\r\n").as_bytes());
    bytes.extend_from_slice(body);
    Ok(())
}

fn connect(server: &Server, patience: Duration) -> Option<UnixStream> {
    let stream = UnixStream::connect(&server.socket).ok()?;
    stream.set_read_timeout(Some(patience)).ok()?;
    stream.set_write_timeout(Some(SILENCE)).ok()?;
    Some(stream)
}

/// Sends bytes in pieces, and returns what comes back until the server hangs up or says nothing more.
fn ask(server: &Server, bytes: &[u8], piece: usize) -> Vec<u8> {
    let Some(mut stream) = connect(server, SILENCE) else { return Vec::new() };
    for piece in bytes.chunks(piece) {
        // It may have hung up, or wait for its answers to be read.
        if stream.write_all(piece).is_err() {
            break;
        }
    }
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    answer
}

pub(crate) fn control(u: &mut Unstructured<'_>) -> Result<()> {
    static SERVER: OnceLock<Option<Server>> = OnceLock::new();
    let Some(server) = SERVER.get_or_init(Server::start) else { return Ok(()) };
    let panics = PANICS.load(Ordering::SeqCst);
    server.tidy();
    let (mut bytes, count) = (Vec::new(), u.int_in_range(1..=REQUESTS_MAX)?);
    for number in 1..=count {
        bytes.extend(request(u, number == count)?);
    }
    let piece = if u.ratio(3u8, 4)? { bytes.len().max(1) } else { u.int_in_range(1..=200)? };
    let answer = ask(server, &bytes, piece);
    let text = String::from_utf8_lossy(&answer);
    assert!(text.is_empty() || text.starts_with("HTTP/1."), "no answer of HTTP: {text}");
    assert!(!text.contains(r#""kind":"internal""#), "a call is broken: {text}");
    assert_serves(server);
    assert_eq!(PANICS.load(Ordering::SeqCst), panics, "a thread of the server panicked");
    Ok(())
}

/// Somebody new asks for the disks.
fn assert_serves(server: &Server) {
    let request = b"GET /v1/disks HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n";
    let Some(mut stream) = connect(server, PATIENCE) else { panic!("nobody listens any more") };
    let mut answer = String::new();
    let asked = stream.write_all(request).and_then(|()| stream.read_to_string(&mut answer).map(drop));
    let is_right = asked.is_ok() && answer.starts_with("HTTP/1.1 200") && answer.contains("\"disks\":");
    assert!(is_right, "the next client is not served: {asked:?}: {answer}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_that_is_right_is_answered() {
        let server = Server::start().expect("a server");
        server.tidy();
        let body = BODIES[5];
        let head =
            format!("POST /v1/disks/{KEPT}/resize HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n", body.len());
        let request = format!("{head}{body}GET /v1/version HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
        let mut stream = connect(&server, PATIENCE).expect("a connection");
        stream.write_all(request.as_bytes()).expect("a request");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("answers");
        assert!(answer.starts_with("HTTP/1.1 4") && answer.contains("not an image"), "{answer}");
        assert!(answer.contains("\"api\":1"), "{answer}");
        assert!(CALLS.contains(&("POST", "/v1/disks/{name}/resize".to_owned())));
    }
}
