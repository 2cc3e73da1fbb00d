//! Clients that send what they should not: each gets an answer or is dropped, and others are served meanwhile.

mod common;

use common::{PATIENCE, Served};
use ringdisk_control::api::{Disks, ErrorBody, ErrorKind};
use ringdisk_control::{Client, openapi};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

impl Served {
    fn call(&self, method: &str, path: &str, body: &str) -> (u16, String) {
        let answer = self.ask(method, path, body);
        (answer.status, answer.body)
    }

    fn error(&self, method: &str, path: &str, body: &str) -> (u16, ErrorBody) {
        let (status, body) = self.call(method, path, body);
        (status, serde_json::from_str(&body).unwrap_or_else(|error| panic!("{method} {path}: {error}: {body}")))
    }

    fn end(self) {
        let disks: Disks = Client::new(&self.socket).unwrap().get("/v1/disks").unwrap();
        assert!(disks.disks.is_empty());
        self.stop();
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
        ("POST", "/v1/disks/none/resize", "[1024]", 400),
        ("POST", "/v1/snapshots", r#"{"overlays": [{"disk": "a", "overlay": "/x"}]}"#, 404),
        ("GET", "/v1/disks/%ff%00..%2f", "", 400),
        ("DELETE", "/v1/disks/none/snapshots/%ff", "", 400),
        ("GET", "/v1/disks?bogus=1", "", 400),
        ("POST", "/v1/shutdown?now", "", 400),
        ("POST", "/v1/shutdown", r#"{"bogus": 1}"#, 400),
        ("POST", "/v1/shutdown", "[]", 400),
        ("POST", "/v1/reload", r#"{"bogus": 1}"#, 400),
        ("DELETE", "/v1/jobs/7", r#"{"bogus": 1}"#, 400),
        ("POST", "/v1/jobs/7/cancel", "{}", 404),
        ("GET", "/v1/version", "{}", 200),
    ] {
        let (status, said) = served.call(method, path, body);
        assert_eq!(status, expected, "{method} {path} {body}");
        let is_structured = status < 400 || serde_json::from_str::<ErrorBody>(&said).is_ok();
        assert!(is_structured, "{method} {path} {body}: {said}");
    }
    let (_, body) = served.error("GET", "/v1/disks?bogus=1", "");
    assert_eq!(body.error.field.as_deref(), Some("bogus"));
    for query in ["force=maybe", "force=", "force", "force=true&force=false"] {
        let (status, body) = served.error("DELETE", &format!("/v1/disks/none?{query}"), "");
        assert_eq!((status, body.error.kind), (400, ErrorKind::BadRequest), "{query}");
        assert_eq!(body.error.field.as_deref(), Some("force"), "{query}");
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

/// Clients that never read, that only listen, and that say half a word: more of each than the server has places for.
#[test]
fn whatever_clients_do_an_operator_and_a_scrape_get_through() {
    const COUNT: usize = 600;
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }).unwrap();
    let served = Served::new();
    let lists = |when: &str| {
        let begun = Instant::now();
        for path in ["/v1/disks", "/metrics"] {
            assert_eq!(served.call("GET", path, "").0, 200, "{when}");
        }
        println!("{when}: {:?}", begun.elapsed());
    };
    let open = |bytes: &[u8]| {
        let send = |_| {
            let stream = UnixStream::connect(&served.socket).ok()?;
            stream.set_write_timeout(Some(Duration::from_millis(100))).unwrap();
            // It may have been dropped, or its buffer may be full.
            let _ = (&stream).write_all(bytes);
            Some(stream)
        };
        (0..COUNT).filter_map(send).collect::<Vec<UnixStream>>()
    };
    let silent = open(b"");
    lists("clients that say nothing");
    let half = open(b"POST /v1/disks HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{");
    lists("clients with half a request");
    let long_answers = b"GET /v1/openapi.json HTTP/1.1\r\nhost: x\r\n\r\n".repeat(20);
    let deaf = open(&long_answers);
    lists("clients that never read");
    let watching = open(b"GET /v1/events HTTP/1.1\r\nhost: x\r\n\r\n");
    lists("clients that watch");
    // Enough may watch, and who is one too many is told.
    let heads = watching.iter().map(|stream| {
        let mut head = [0; 12];
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        (&*stream).read_exact(&mut head).map(|()| head)
    });
    let heads: Vec<[u8; 12]> = heads.filter_map(Result::ok).collect();
    let count = |wanted: &[u8; 12]| heads.iter().filter(|head| *head == wanted).count();
    assert_eq!(count(b"HTTP/1.1 200"), 128);
    assert!(count(b"HTTP/1.1 409") > 0);
    drop(watching);
    // Their places are free again when the server has seen that they are gone.
    let deadline = Instant::now() + PATIENCE;
    loop {
        let mut stream = served.connect();
        stream.write_all(b"GET /v1/events HTTP/1.1\r\nhost: x\r\n\r\n").unwrap();
        let mut head = [0; 12];
        stream.read_exact(&mut head).unwrap();
        if &head == b"HTTP/1.1 200" {
            break;
        }
        assert!(Instant::now() < deadline, "places are not given back");
        std::thread::sleep(Duration::from_millis(10));
    }
    drop((silent, half, deaf));
    served.end();
}

#[test]
fn deep_and_long_values_are_refused() {
    let served = Served::new();
    let deep = format!("{{\"options\": {}1{}}}", "[".repeat(100_000), "]".repeat(100_000));
    let long = "n".repeat(250 << 10);
    for (method, path, body) in [
        ("POST", "/v1/disks", deep.clone()),
        ("PATCH", "/v1/disks/none", deep),
        ("POST", "/v1/disks", format!(r#"{{"options": {{"format": "null", "size": "1M", "name": "{long}"}}}}"#)),
        ("POST", "/v1/exports", format!(r#"{{"disk": "{long}"}}"#)),
        ("POST", "/v1/snapshots", format!(r#"{{"overlays": [{{"disk": "{long}", "overlay": "/x"}}]}}"#)),
        (
            "POST",
            "/v1/snapshots",
            format!(r#"{{"overlays": [{}]}}"#, vec![r#"{"disk":"d","overlay":"/x"}"#; 5000].join(",")),
        ),
    ] {
        let (status, _) = served.error(method, path, &body);
        assert!((400..500).contains(&status), "{method} {path}: {status}");
    }
    served.end();
}
