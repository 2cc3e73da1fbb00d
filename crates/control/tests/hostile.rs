//! Clients that send what they should not: each gets an answer or is dropped, and others are served meanwhile.

use daemon::DaemonConfig;
use ringdisk_control::api::{Disks, ErrorBody, ErrorKind};
use ringdisk_control::{Client, ControlServer, Manager, openapi};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tempfile::TempDir;

struct Served {
    _dir: TempDir,
    socket: PathBuf,
    manager: Arc<Manager>,
    server: ControlServer,
}

impl Served {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("control");
        let manager = Arc::new(Manager::start(DaemonConfig::default(), None).unwrap());
        let server = ControlServer::listen(&socket, Arc::clone(&manager)).unwrap();
        Self { _dir: dir, socket, manager, server }
    }

    /// Sends these bytes and returns all that comes back until the server closes.
    fn raw(&self, bytes: &[u8]) -> String {
        let mut stream = UnixStream::connect(&self.socket).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        // The server may close before it has read everything.
        let _ = stream.write_all(bytes);
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        String::from_utf8_lossy(&answer).into_owned()
    }

    fn call(&self, method: &str, path: &str, body: &str) -> (u16, String) {
        let length = body.len();
        let request = format!(
            "{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n{body}"
        );
        let answer = self.raw(request.as_bytes());
        let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no answer: {answer}"));
        (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
    }

    fn error(&self, method: &str, path: &str, body: &str) -> (u16, ErrorBody) {
        let (status, body) = self.call(method, path, body);
        (status, serde_json::from_str(&body).unwrap_or_else(|error| panic!("{method} {path}: {error}: {body}")))
    }

    fn end(self) {
        let disks: Disks = Client::new(&self.socket).unwrap().get("/v1/disks").unwrap();
        assert!(disks.disks.is_empty());
        self.server.stop().unwrap();
        Arc::into_inner(self.manager).expect("nobody else has it").shutdown().unwrap();
    }
}

#[test]
fn wrong_requests_get_structured_errors() {
    let served = Served::new();
    let (status, body) = served.error("POST", "/v1/disks", r#"{"options": {}, "exprot": true}"#);
    assert_eq!((status, body.error.kind), (400, ErrorKind::BadRequest));
    assert_eq!(body.error.field.as_deref(), Some("exprot"));
    assert!(body.error.message.contains("unknown field"), "{}", body.error.message);
    let (status, body) = served.error("POST", "/v1/disks/none/resize", r#"{"size_bytes": "big"}"#);
    assert_eq!((status, body.error.field.as_deref()), (400, Some("size_bytes")));
    for (method, path, body, expected) in [
        ("GET", "/v1/nothing", "", 404),
        ("GET", "/v1/disks/none", "", 404),
        ("GET", "/v1/jobs/7", "", 404),
        ("GET", "/v1/jobs/-1", "", 404),
        ("DELETE", "/v1/exports/99", "", 404),
        ("DELETE", "/v1/disks/none?forse=true", "", 400),
        ("PUT", "/v1/disks", "{}", 405),
        ("POST", "/v1/disks", "", 400),
        ("POST", "/v1/disks", "{\"options\": {\"file\": [1]}}", 400),
        ("POST", "/v1/disks", "{} {}", 400),
        ("POST", "/v1/disks", "\u{0}", 400),
        ("POST", "/v1/snapshots", r#"{"overlays": []}"#, 400),
        ("POST", "/v1/snapshots", r#"{"overlays": [{"disk": "a", "overlay": "/x"}]}"#, 404),
        ("GET", "/v1/disks/%ff%00..%2f", "", 400),
    ] {
        let (status, _) = served.call(method, path, body);
        assert_eq!(status, expected, "{method} {path} {body}");
    }
    served.end();
}

#[test]
fn floods_giants_and_sleepers_keep_no_one_from_being_served() {
    let served = Served::new();
    let sleepers: Vec<UnixStream> = (0..30)
        .map(|count| {
            let mut stream = UnixStream::connect(&served.socket).unwrap();
            let part = &b"POST /v1/disks HTTP/1.1\r\ncontent-length: 100\r\n\r\n{"[..(count + 1) * 47 / 30];
            stream.write_all(part).unwrap();
            stream
        })
        .collect();
    let giant = format!("POST /v1/disks HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n", u64::MAX / 2);
    assert!(served.raw(&[giant.as_bytes(), &vec![b' '; 1 << 20]].concat()).contains(" 400 "));
    assert!(served.raw(&[b"GET /", &vec![b'x'; 1 << 20][..], b" HTTP/1.1\r\n\r\n"].concat()).contains(" 4"));
    served.raw(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03");
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                for _ in 0..50 {
                    drop(UnixStream::connect(&served.socket));
                    assert_eq!(served.call("GET", "/v1/version", "").0, 200);
                }
            });
        }
    });
    drop(sleepers);
    served.end();
}

#[test]
fn the_description_names_every_path_and_every_answer_is_of_its_form() {
    let served = Served::new();
    let client = Client::new(&served.socket).unwrap();
    let description: serde_json::Value = client.get("/v1/openapi.json").unwrap();
    assert_eq!(description, serde_json::to_value(openapi()).unwrap());
    let paths = description["paths"].as_object().unwrap();
    assert!(paths.len() > 10);
    for (path, operations) in paths {
        assert!(path.starts_with("/v1/") || path == "/metrics", "{path}");
        let path = path.replace("{name}", "none").replace("{id}", "7");
        for method in operations.as_object().unwrap().keys().filter(|method| *method != "parameters") {
            if path == "/v1/events" || path == "/v1/shutdown" {
                continue;
            }
            let (status, body) = served.call(&method.to_uppercase(), &path, "");
            // Each is served: what is refused is refused for its contents.
            assert!(status < 500 && status != 405, "{method} {path}: {status} {body}");
            assert!(!body.contains("there is no path"), "{method} {path}: {body}");
            assert!(status < 400 || serde_json::from_str::<ErrorBody>(&body).is_ok(), "{method} {path}: {body}");
        }
    }
    served.end();
}
