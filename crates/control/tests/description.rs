//! The description of the interface and the server agree, in both directions: every call answers as described, and whatever
//! is described is taken.

mod common;

use common::{PATIENCE, Served};
use driver::{Driver, DriverOptions};
use engine::{Reactor, ReactorConfig};
use image::{CreateOptions, FileName, Opener as _, Role};
use load::{BenchSpec, Hooks, Stop};
use ringdisk_control::{Config, openapi};
use serde_json::{Value, json};
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

const SIZE_BYTES: u64 = 8 << 20;
/// What the server says of a body that it cannot read.
const UNREADABLE: &str = "the request's body is not what is asked for";

/// Validates values by their schemas, with Python's library, and prints what is wrong.
const VALIDATE: &str = "
import json, sys
from jsonschema import Draft202012Validator
given = json.load(sys.stdin)
for schema in given['components']['schemas'].values():
    Draft202012Validator.check_schema(schema)
for case in given['cases']:
    schema = dict(case['schema'], components=given['components'])
    for error in Draft202012Validator(schema).iter_errors(case['value']):
        print(case['what'], error.json_path, error.message)
";

/// The description, the calls that have succeeded, and what was said in them.
struct Described {
    document: Value,
    done: RefCell<BTreeSet<(String, String)>>,
    cases: RefCell<Vec<Value>>,
}

impl Described {
    fn new() -> Self {
        let (done, cases) = (RefCell::default(), RefCell::default());
        Self { document: serde_json::to_value(openapi()).unwrap(), done, cases }
    }

    /// All calls, with their paths and methods.
    fn calls(&self) -> impl Iterator<Item = (&str, &str, &Value)> {
        let paths = self.document["paths"].as_object().unwrap();
        paths.iter().flat_map(|(path, calls)| {
            calls.as_object().unwrap().iter().map(|(method, call)| (path.as_str(), method.as_str(), call))
        })
    }

    /// The value has to be of this form: [`Described::validate`] looks.
    fn is_of(&self, schema: &Value, value: &Value, what: &str) {
        self.cases.borrow_mut().push(json!({ "schema": schema, "value": value, "what": what }));
    }

    fn validate(&self) {
        let given = json!({ "components": self.document["components"], "cases": *self.cases.borrow() });
        assert!(self.cases.borrow().len() > 20);
        let mut python = Command::new("python3");
        let python = python.args(["-c", VALIDATE]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let mut python = python.unwrap();
        let mut input = python.stdin.take().unwrap();
        let writer = std::thread::spawn(move || input.write_all(given.to_string().as_bytes()));
        let output = python.wait_with_output().unwrap();
        writer.join().unwrap().unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && said.is_empty(), "{said}");
    }

    /// Makes a call, which has to succeed, and compares request and answer with the description.
    fn call(&self, served: &Served, method: &str, path: &str, names: &[(&str, &str)], body: Option<&Value>) -> Value {
        let what = format!("{method} {path} {names:?}");
        let call = &self.document["paths"][path][method.to_lowercase()];
        assert!(call.is_object(), "{what} is not described");
        let asked = &call["requestBody"]["content"]["application/json"]["schema"];
        assert_eq!(asked.is_null(), body.is_none(), "{what}: {asked}");
        body.iter().for_each(|body| self.is_of(asked, body, &what));
        let mut place = path.to_owned();
        for (name, value) in names {
            place = place.replace(&format!("{{{name}}}"), value);
        }
        let text = body.map(Value::to_string).unwrap_or_default();
        let answer = served.ask(method, &place, &text);
        assert!((200..300).contains(&answer.status), "{what}: {answer:?}");
        let described = &call["responses"][answer.status.to_string()];
        assert!(described.is_object(), "{what}: the status {} is not described", answer.status);
        self.done.borrow_mut().insert((method.to_lowercase(), path.to_owned()));
        let Some(content) = described["content"].as_object() else {
            assert_eq!(answer.body, "", "{what}");
            return Value::Null;
        };
        let (kind, content) = content.iter().next().unwrap();
        assert!(answer.head.contains(&format!("content-type: {kind}")), "{what}: {}", answer.head);
        if kind != "application/json" {
            return Value::String(answer.body);
        }
        let body: Value = serde_json::from_str(&answer.body).unwrap();
        self.is_of(&content["schema"], &body, &what);
        body
    }

    /// Follows a reference.
    fn found<'a>(&'a self, schema: &'a Value) -> &'a Value {
        match schema["$ref"].as_str() {
            Some(name) => self.document.pointer(name.trim_start_matches('#')).unwrap(),
            None => schema,
        }
    }

    /// Makes a value of this form: with all properties, or only with those that are required.
    fn example(&self, schema: &Value, all: bool) -> Value {
        let schema = self.found(schema);
        if let Some(values) = schema["enum"].as_array() {
            return values[0].clone();
        }
        for choice in ["oneOf", "anyOf", "allOf"] {
            if let Some(forms) = schema[choice].as_array() {
                let is_null = |form: &&Value| form["type"] == "null";
                return self.example(forms.iter().find(|form| !is_null(form)).unwrap(), all);
            }
        }
        let kind = match &schema["type"] {
            Value::Array(kinds) => kinds.iter().find(|kind| *kind != "null").unwrap().as_str(),
            kind => kind.as_str(),
        };
        match kind {
            Some("object") | None => {
                let required: Vec<&str> =
                    schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
                let properties = schema["properties"].as_object().into_iter().flatten();
                let wanted = properties.filter(|(name, _)| all || required.contains(&name.as_str()));
                Value::Object(wanted.map(|(name, schema)| (name.clone(), self.example(schema, all))).collect())
            }
            Some("array") => json!([self.example(&schema["items"], all)]),
            Some("integer") => json!(schema["minimum"].as_u64().unwrap_or(1)),
            Some("boolean") => json!(true),
            Some("string") => json!("x"),
            Some(other) => panic!("a value of type {other}: {schema}"),
        }
    }

    /// Returns values that are wrong as a whole or in one place, however deep. Some may be right after all.
    fn broken(&self, schema: &Value) -> Vec<Value> {
        let mut values = vec![json!(-7.5), json!(-1), json!(u64::MAX), json!(true), json!("no"), Value::Null];
        values.extend([json!([]), json!([[1]]), json!({}), json!({ "x": {} })]);
        let schema = self.found(schema);
        let forms = ["oneOf", "anyOf", "allOf"].iter().filter_map(|choice| schema[choice].as_array()).flatten();
        values.extend(forms.filter(|form| form["type"] != "null").flat_map(|form| self.broken(form)));
        if let Some(properties) = schema["properties"].as_object() {
            let whole = self.example(schema, true);
            for (name, form) in properties {
                values.extend(self.broken(form).into_iter().map(|value| {
                    let mut body = whole.clone();
                    body[name] = value;
                    body
                }));
            }
        }
        if !schema["items"].is_null() {
            values.extend(self.broken(&schema["items"]).into_iter().map(|value| json!([value])));
        }
        values
    }
}

/// Words of the program that reads a body, which mean nothing to whoever wrote it.
const WORDS_OF_RUST: [&str; 22] = [
    "struct", "enum", "variant", "untagged", "tuple", "newtype", "sequence", "map", "unit", "bool", "str", "u8", "u16",
    "u32", "u64", "usize", "i32", "i64", "f64", "integer", "floating", "Option",
];

/// Returns the words of a message outside of what it quotes.
fn words(message: &str) -> Vec<&str> {
    let unquoted = message.split('`').step_by(2).flat_map(|part| part.split('"').step_by(2));
    unquoted.flat_map(|part| part.split(|char: char| !char.is_ascii_alphanumeric())).collect()
}

/// Whether Python's library is there. In CI it has to be.
fn has_library() -> bool {
    let found = Command::new("python3").args(["-c", "import jsonschema"]).output();
    let found = found.is_ok_and(|output| output.status.success());
    assert!(found || std::env::var_os("CI").is_none(), "python3-jsonschema is missing, and this is CI");
    if !found {
        eprintln!("SKIPPED: python3-jsonschema is not installed");
    }
    found
}

struct Disks {
    served: Served,
    dir: PathBuf,
}

impl Disks {
    fn new() -> Self {
        let served = Served::new();
        let dir = served.dir.path().canonicalize().unwrap();
        Self { served, dir }
    }

    fn path(&self, name: &str) -> String {
        self.dir.join(name).to_str().unwrap().to_owned()
    }

    fn image(&self, name: &str, size_bytes: u64) -> String {
        let path = self.path(name);
        let options = format_qcow2::CreateOptions::default().with(|options| options.size_bytes = size_bytes);
        std::fs::write(&path, "").unwrap();
        let file = drive::EngineOpener::default().open(&FileName::from(Path::new(&path)), Role::Writable).unwrap();
        image::create(&file, &CreateOptions::Qcow2(options)).unwrap();
        path
    }
}

/// A few requests, so that there are figures.
fn work_on(socket: &str) {
    let reactor = Reactor::spawn(ReactorConfig::default()).unwrap();
    let disk: Arc<dyn block::Disk> = Arc::new(Driver::connect(Path::new(socket), DriverOptions::default()).unwrap());
    let spec = BenchSpec::default().with(|spec| {
        (spec.block_bytes, spec.read_percent, spec.flush_every) = (4096, 50, Some(4));
        spec.stop = Stop::Runtime(Duration::from_millis(200));
    });
    let outcome = load::run(&disk, &[reactor.handle()], &spec, &Hooks::default()).unwrap();
    assert_eq!(outcome.report.errors, 0);
}

const OF_A: [(&str, &str); 1] = [("name", "a")];

/// Makes calls, and compares the answers with the description.
struct Caller<'a> {
    described: &'a Described,
    disks: &'a Disks,
}

impl Caller<'_> {
    fn call(&self, method: &str, path: &str, names: &[(&str, &str)], body: Option<Value>) -> Value {
        self.described.call(&self.disks.served, method, path, names, body.as_ref())
    }

    fn job_is(&self, job: &Value, wanted: &str) {
        let id = job["id"].to_string();
        let deadline = Instant::now() + PATIENCE;
        loop {
            let job = self.call("GET", "/v1/jobs/{id}", &[("id", &id)], None);
            if job["state"] == wanted {
                return;
            }
            let goes_on = ["running", "paused", "cancelling"].iter().any(|state| job["state"] == *state);
            assert!(goes_on && Instant::now() < deadline, "not {wanted}: {job}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// A disk that a guest has used, and its figures.
    fn serve_a_disk(&self) {
        let socket = self.disks.path("a.sock");
        let options = json!({
            "file": self.disks.image("a.qcow2", SIZE_BYTES), "name": "a", "socket": socket, "queues": 1, "readonly": false,
            "filter": ["throttle:iops-total=100000", "delay:us=1"], "on-error": "hold",
        });
        self.call("POST", "/v1/disks", &[], Some(json!({ "options": options })));
        work_on(&socket);
        let deadline = Instant::now() + PATIENCE;
        while self.call("GET", "/v1/disks/{name}", &OF_A, None)["exports"][0]["connected"] == true {
            assert!(Instant::now() < deadline, "the guest stays connected");
            std::thread::sleep(Duration::from_millis(10));
        }
        self.call("PATCH", "/v1/disks/{name}", &OF_A, Some(json!({ "options": { "throttling.iops-total": "0" } })));
        self.call("POST", "/v1/disks/{name}/resize", &OF_A, Some(json!({ "size_bytes": 2 * SIZE_BYTES })));
        self.call("POST", "/v1/disks/{name}/reopen", &OF_A, Some(json!({})));
        self.call("POST", "/v1/disks/{name}/resume", &OF_A, None);
        self.call("GET", "/v1/disks", &[], None);
        self.call("GET", "/v1/disks/{name}", &OF_A, None);
        let stats = self.call("GET", "/v1/stats", &[], None);
        assert!(stats["disks"][0]["latency"].as_array().unwrap().len() >= 2, "{stats:#}");
        self.call("GET", "/metrics", &[], None);
    }

    /// Bitmaps, a backup, and internal snapshots.
    fn take_points(&self) {
        let bitmap = json!({ "actions": [{ "action": "add", "bitmap": "daily" }] });
        self.call("POST", "/v1/disks/{name}/bitmaps", &OF_A, Some(bitmap));
        self.call("GET", "/v1/disks/{name}/bitmaps", &OF_A, None);
        let backup = json!({ "target": self.disks.path("backup.qcow2"), "bitmap": "daily", "mode": "full" });
        self.job_is(&self.call("POST", "/v1/disks/{name}/backup", &OF_A, Some(backup)), "done");
        self.call(
            "POST",
            "/v1/disks/{name}/bitmaps",
            &OF_A,
            Some(json!({ "actions": [{ "action": "remove", "bitmap": "daily" }] })),
        );
        let snapshot = [("name", "a"), ("snapshot", "one")];
        self.call("POST", "/v1/disks/{name}/snapshots", &OF_A, Some(json!({ "name": "one" })));
        self.call("GET", "/v1/disks/{name}/snapshots", &OF_A, None);
        self.call("POST", "/v1/disks/{name}/snapshots/{snapshot}/apply", &snapshot, None);
        self.call("DELETE", "/v1/disks/{name}/snapshots/{snapshot}", &snapshot, None);
    }

    /// Layers, and jobs on them.
    fn change_layers(&self) {
        let put_on = |name: &str| {
            let overlay = json!({ "overlays": [{ "disk": "a", "overlay": self.disks.path(name) }] });
            self.call("POST", "/v1/snapshots", &[], Some(overlay));
        };
        put_on("top.qcow2");
        self.job_is(&self.call("POST", "/v1/disks/{name}/commit", &OF_A, Some(json!({}))), "done");
        put_on("next.qcow2");
        let base = json!({ "base": self.disks.image("base.qcow2", 2 * SIZE_BYTES), "format": "qcow2" });
        self.job_is(&self.call("POST", "/v1/disks/{name}/rebase", &OF_A, Some(base)), "done");
        self.job_is(&self.call("POST", "/v1/disks/{name}/stream", &OF_A, Some(json!({}))), "done");
        self.job_is(&self.call("POST", "/v1/disks/{name}/compact", &OF_A, Some(json!({}))), "done");
    }

    /// A job that is paused, limited and cancelled.
    fn steer_a_job(&self) {
        // A job that takes long enough to be steered.
        let raw = self.disks.path("b.raw");
        std::fs::write(&raw, vec![7; 8 << 20]).unwrap();
        let options = json!({ "file": raw, "format": "raw", "name": "b" });
        self.call("POST", "/v1/disks", &[], Some(json!({ "options": options, "export": false })));
        let mirror = json!({ "target": self.disks.path("copy.raw"), "keep": true, "bytes_per_second": 65536 });
        let job = self.call("POST", "/v1/disks/{name}/mirror", &[("name", "b")], Some(mirror));
        let id = job["id"].to_string();
        for verb in ["pause", "resume", "limit", "cancel"] {
            let body = (verb == "limit").then(|| json!({ "bytes_per_second": 131_072 }));
            self.call("POST", &format!("/v1/jobs/{{id}}/{verb}"), &[("id", &id)], body);
        }
        self.job_is(&job, "cancelled");
        self.call("GET", "/v1/jobs", &[], None);
        self.call("DELETE", "/v1/jobs/{id}", &[("id", &id)], None);
    }
}

#[test]
fn every_call_answers_as_described() {
    if !has_library() {
        return;
    }
    let (described, disks) = (Described::new(), Disks::new());
    let config = disks.path("disks.toml");
    std::fs::write(&config, "").unwrap();
    disks.served.manager.is_configured_by(config.into(), Config::read(Path::new(&disks.path("disks.toml"))).unwrap());
    let caller = Caller { described: &described, disks: &disks };
    let call = |method: &str, path: &str, names: &[(&str, &str)], body| caller.call(method, path, names, body);

    call("GET", "/v1/version", &[], None);
    call("GET", "/v1/openapi.json", &[], None);
    let mut listener = disks.served.connect();
    listener.write_all(b"GET /v1/events HTTP/1.1\r\nhost: x\r\n\r\n").unwrap();
    let mut events = BufReader::new(listener).lines();
    assert!(events.next().unwrap().unwrap().contains("200 OK"));

    caller.serve_a_disk();
    caller.take_points();
    caller.change_layers();
    caller.steer_a_job();

    call("POST", "/v1/exports", &[], Some(json!({ "disk": "b", "socket": disks.path("b.sock"), "read_only": true })));
    let nbd = json!({ "disk": "b", "socket": disks.path("b.nbd"), "nbd": { "name": "export" } });
    let export = call("POST", "/v1/exports", &[], Some(nbd));
    call("GET", "/v1/exports", &[], None);
    call("DELETE", "/v1/exports/{id}", &[("id", &export["id"].to_string())], None);
    call("POST", "/v1/reload", &[], None);
    for name in ["a", "b"] {
        call("DELETE", "/v1/disks/{name}", &[("name", name)], None);
    }
    call("POST", "/v1/shutdown", &[], None);
    read_events(&described, events.map_while(Result::ok));

    let all: BTreeSet<(String, String)> =
        described.calls().map(|(path, method, _)| (method.to_owned(), path.to_owned())).collect();
    assert_eq!(*described.done.borrow(), all, "each call was made");
    described.validate();
    disks.served.stop();
}

/// Reads events until the daemon says that it ends.
fn read_events(described: &Described, lines: impl Iterator<Item = String>) {
    let schema = &described.document["paths"]["/v1/events"]["get"]["responses"]["200"]["content"]["text/event-stream"];
    let mut kinds = BTreeSet::new();
    for line in lines {
        let Some(data) = line.strip_prefix("data:") else { continue };
        let event: Value = serde_json::from_str(data).unwrap();
        described.is_of(&schema["schema"], &event, "an event");
        kinds.insert(event["kind"].as_str().unwrap().to_owned());
        if event["kind"] == "shutting-down" {
            break;
        }
    }
    let expected = ["disk-added", "disk-removed", "export-removed", "job-ended", "layers-changed", "shutting-down"];
    assert!(expected.iter().all(|kind| kinds.contains(*kind)), "{kinds:?}");
    described.done.borrow_mut().insert(("get".to_owned(), "/v1/events".to_owned()));
}

/// Requests that are made from the description, about things that do not exist.
#[test]
fn what_is_described_is_taken_and_nothing_else() {
    if !has_library() {
        return;
    }
    let (described, served) = (Described::new(), Served::new());
    for (path, method, call) in described.calls() {
        let refusal = &call["responses"]["default"]["content"]["application/json"]["schema"]["$ref"];
        assert_eq!(refusal, "#/components/schemas/ErrorBody", "{method} {path}");
        let place = path.replace("{name}", "none").replace("{id}", "7").replace("{snapshot}", "none");
        let schema = &call["requestBody"]["content"]["application/json"]["schema"];
        if schema.is_null() {
            continue;
        }
        let error = |body: &Value| {
            let answer = served.ask(&method.to_uppercase(), &place, &body.to_string());
            let error: Value = serde_json::from_str(&answer.body).unwrap_or_else(|_| panic!("{path}: {answer:?}"));
            assert!(answer.status >= 400, "{path}: {body}: {answer:?}");
            described.is_of(&json!({ "$ref": "#/components/schemas/ErrorBody" }), &error, path);
            error["error"].clone()
        };
        let says = |error: &Value, what: &str| error["message"].as_str().unwrap().contains(what);
        for all in [false, true] {
            let body = described.example(schema, all);
            described.is_of(schema, &body, path);
            let error = error(&body);
            assert!(!says(&error, UNREADABLE), "{path}: {body}: {error}");
        }
        let (whole, form) = (described.example(schema, true), described.found(schema));
        for name in form["properties"].as_object().unwrap().keys() {
            let mut body = whole.clone();
            // No call takes a fraction.
            body[name] = json!(-7.5);
            let error = error(&body);
            assert_eq!(error["kind"], "bad-request", "{path}: {body}: {error}");
            assert!(says(&error, UNREADABLE), "{path}: {body}: {error}");
            let field = error["field"].as_str().unwrap_or_default();
            assert!(field.starts_with(name.as_str()), "{path}: {body}: {error}");
        }
        for name in form["required"].as_array().into_iter().flatten() {
            let mut body = whole.clone();
            body.as_object_mut().unwrap().remove(name.as_str().unwrap());
            assert!(says(&error(&body), UNREADABLE), "{path}: without {name}");
        }
        let mut body = whole.clone();
        body["bogus"] = json!(1);
        assert_eq!(error(&body)["field"], "bogus", "{path}");
    }
    described.validate();
    served.stop();
}

/// Whoever calls knows objects, lists, texts and numbers.
#[test]
fn what_is_wrong_with_a_body_is_said_without_the_names_of_the_program_s_types() {
    let (described, served) = (Described::new(), Served::new());
    let mut refused = 0;
    for (path, method, call) in described.calls() {
        let schema = &call["requestBody"]["content"]["application/json"]["schema"];
        if schema.is_null() {
            continue;
        }
        let place = path.replace("{name}", "none").replace("{id}", "7").replace("{snapshot}", "none");
        for body in described.broken(schema) {
            let answer = served.ask(&method.to_uppercase(), &place, &body.to_string());
            if answer.status < 400 {
                continue;
            }
            let error: Value = serde_json::from_str(&answer.body).unwrap_or_else(|_| panic!("{path}: {answer:?}"));
            let message = error["error"]["message"].as_str().unwrap();
            let is_named = |word: &&str| WORDS_OF_RUST.contains(word);
            assert!(!words(message).iter().any(is_named), "{path}: {body}: {message}");
            refused += usize::from(message.contains(UNREADABLE));
        }
    }
    assert!(refused > 500, "{refused} bodies were refused for their form");
    served.stop();
}
