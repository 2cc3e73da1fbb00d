//! Every call of the interface, made as a script without our client would make it, while a guest's data are checked.

use super::{Daemon, Guest, common};
use common::{PATIENCE, Server, assert_valid, at, directory, has_tool, path_str, run_ok, tool};
use serde_json::{Value, json};
use std::cell::RefCell;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

struct Curl {
    control: PathBuf,
    /// Methods and paths of the calls that succeeded.
    done: RefCell<Vec<(String, String)>>,
}

impl Curl {
    fn text(&self, method: &str, path: &str, body: Option<&Value>) -> String {
        let url = format!("http://localhost{path}");
        let data = body.map(Value::to_string);
        let fixed = ["--silent", "--show-error", "--fail-with-body", "--max-time", "60", "--unix-socket"];
        let mut arguments = [&fixed[..], &[path_str(&self.control), &url, "--request", method]].concat();
        data.iter().for_each(|data| arguments.extend(["--data", data]));
        let output = tool("curl", &arguments);
        let said = common::text(&output.stdout);
        assert!(output.status.success(), "{method} {path} {body:?}: {said}{}", common::text(&output.stderr));
        self.done.borrow_mut().push((method.to_lowercase(), path.split('?').next().unwrap().to_owned()));
        said
    }

    fn call(&self, method: &str, path: &str, body: &Value) -> Value {
        let said = self.text(method, path, (!body.is_null()).then_some(body));
        if said.is_empty() { Value::Null } else { serde_json::from_str(&said).expect("JSON") }
    }

    fn get(&self, path: &str) -> Value {
        self.call("GET", path, &Value::Null)
    }

    fn post(&self, path: &str, body: &Value) -> Value {
        self.call("POST", path, body)
    }

    /// Starts a job and polls it until it has this state.
    fn job(&self, path: &str, body: &Value, wanted: &str) {
        self.wait_for(&self.post(path, body)["id"], wanted);
    }

    fn wait_for(&self, id: &Value, wanted: &str) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let job = self.get(&format!("/v1/jobs/{id}"));
            if job["state"] == wanted {
                return;
            }
            let before = if wanted == "cancelled" { "cancelling" } else { "running" };
            assert!(job["state"] == before && Instant::now() < deadline, "not {wanted}: {job:#}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Bitmaps, a backup, and internal snapshots of the first disk.
    fn take_points(&self, file: &dyn Fn(&str) -> String) {
        self.post("/v1/disks/first/bitmaps", &json!({ "actions": [{ "action": "add", "bitmap": "daily" }] }));
        assert_eq!(self.get("/v1/disks/first/bitmaps")["bitmaps"][0]["recording"], true);
        let backup = json!({ "target": file("backup.qcow2"), "bitmap": "daily", "mode": "full" });
        self.job("/v1/disks/first/backup", &backup, "done");
        self.post("/v1/disks/first/bitmaps", &json!({ "actions": [{ "action": "remove", "bitmap": "daily" }] }));
        self.post("/v1/disks/first/snapshots", &json!({ "name": "one" }));
        assert_eq!(self.get("/v1/disks/first/snapshots")["snapshots"][0]["name"], "one");
        self.call("DELETE", "/v1/disks/first/snapshots/one", &Value::Null);
    }

    /// Layers on the first disk, and jobs on them.
    fn change_layers(&self, file: &dyn Fn(&str) -> String) {
        let put_on = |name: &str| {
            self.post("/v1/snapshots", &json!({ "overlays": [{ "disk": "first", "overlay": file(name) }] }))
        };
        put_on("top.qcow2");
        self.job("/v1/disks/first/commit", &json!({ "within_ms": 30_000 }), "done");
        put_on("next.qcow2");
        self.job("/v1/disks/first/rebase", &json!({ "base": file("root.qcow2"), "format": "qcow2" }), "done");
        self.job("/v1/disks/first/stream", &json!({}), "done");
        self.job("/v1/disks/first/compact", &json!({}), "done");
    }

    /// Other disks, and a job that is paused, limited and cancelled.
    fn steer_jobs(&self, file: &dyn Fn(&str) -> String) {
        // A disk that no guest uses: its snapshot can be applied, and its jobs can take their time.
        let other = json!({ "options": { "file": file("backup.qcow2"), "name": "other" }, "export": false });
        self.post("/v1/disks", &other);
        self.post("/v1/disks/other/snapshots", &json!({ "name": "two" }));
        self.post("/v1/disks/other/snapshots/two/apply", &Value::Null);
        self.post(
            "/v1/disks",
            &json!({ "options": { "file": file("data.raw"), "format": "raw", "name": "data" }, "export": false }),
        );
        let mirror = json!({ "target": file("copy.raw"), "keep": true, "bytes_per_second": 65536 });
        let id = self.post("/v1/disks/data/mirror", &mirror)["id"].clone();
        assert_eq!(self.post(&format!("/v1/jobs/{id}/pause"), &Value::Null)["state"], "paused");
        assert_eq!(self.post(&format!("/v1/jobs/{id}/resume"), &Value::Null)["state"], "running");
        self.post(&format!("/v1/jobs/{id}/limit"), &json!({ "bytes_per_second": 32768 }));
        self.post(&format!("/v1/jobs/{id}/cancel"), &Value::Null);
        self.wait_for(&id, "cancelled");
        assert!(self.get("/v1/jobs")["jobs"].as_array().unwrap().len() >= 6);
        self.call("DELETE", &format!("/v1/jobs/{id}"), &Value::Null);
    }

    /// Names the described calls that were not made.
    fn left(&self) -> Vec<String> {
        let description = self.get("/v1/openapi.json");
        let done = self.done.borrow();
        let is_done = |path: &str, method: &str| {
            let is_of = |made: &str| {
                let (made, described): (Vec<&str>, Vec<&str>) = (made.split('/').collect(), path.split('/').collect());
                made.len() == described.len()
                    && made.iter().zip(described).all(|(made, part)| part.starts_with('{') || *made == part)
            };
            done.iter().any(|(how, made)| how == method && is_of(made))
        };
        let paths = description["paths"].as_object().unwrap().iter();
        let calls = paths.flat_map(|(path, calls)| calls.as_object().unwrap().keys().map(move |method| (path, method)));
        calls.filter(|(path, method)| !is_done(path, method)).map(|(path, method)| format!("{method} {path}")).collect()
    }
}

#[test]
fn every_call_can_be_made_by_curl_while_a_guest_works() {
    if !has_tool("curl") {
        return;
    }
    let dir = directory();
    let (image, raw, config) = (at(&dir, "root.qcow2"), at(&dir, "data.raw"), at(&dir, "disks.toml"));
    run_ok(&["create", "-q", "-f", "qcow2", path_str(&image), "64M"]);
    std::fs::write(&raw, vec![7; 8 << 20]).unwrap();
    std::fs::write(&config, "").unwrap();
    let (control, state) = (at(&dir, "control"), at(&dir, "state"));
    let fixed = ["--reactors", "1", "--control", path_str(&control), "--state-dir", path_str(&state)];
    let server = Server::start(&[&fixed[..], &["--config", path_str(&config)]].concat());
    let daemon = Daemon { dir, control: control.clone(), server };
    let file = |name: &str| path_str(&daemon.path(name)).to_owned();
    let curl = Curl { control, done: RefCell::default() };

    let events = std::fs::File::create(daemon.path("events")).unwrap();
    let mut listener = Command::new("curl");
    listener.args(["--silent", "--no-buffer", "--unix-socket", path_str(&curl.control), "http://localhost/v1/events"]);
    let mut listener = listener.stdout(events).stdin(Stdio::null()).spawn().unwrap();
    assert_eq!(curl.get("/v1/version")["api"], 1);
    let options = json!({
        "file": file("root.qcow2"), "name": "first", "socket": file("root.sock"), "queues": 1, "on-error": "hold",
        "filter": "throttle:iops-total=1000000",
    });
    curl.post("/v1/disks", &json!({ "options": options }));
    let guest = Guest::begin(&daemon.path("root.sock"));
    curl.call("PATCH", "/v1/disks/first", &json!({ "options": { "throttling.iops-total": "500000" } }));
    assert_eq!(curl.post("/v1/disks/first/resize", &json!({ "size_bytes": 80 << 20 }))["size_bytes"], 80 << 20);
    curl.post("/v1/disks/first/reopen", &json!({}));
    curl.post("/v1/disks/first/resume", &Value::Null);
    assert_eq!(curl.get("/v1/disks")["disks"][0]["name"], "first");
    assert_eq!(curl.get("/v1/disks/first")["exports"][0]["connected"], true);

    curl.take_points(&file);
    curl.change_layers(&file);
    curl.steer_jobs(&file);

    let export = curl.post("/v1/exports", &json!({ "disk": "data", "socket": file("data.nbd"), "nbd": {} }));
    assert!(export["nbd"]["uri"].as_str().unwrap().starts_with("nbd+unix:///data"));
    assert_eq!(curl.get("/v1/exports")["exports"].as_array().unwrap().len(), 2);
    curl.call("DELETE", &format!("/v1/exports/{}", export["id"]), &Value::Null);
    std::fs::write(&config, "[[drive]]\nname = 'more'\nformat = 'null'\nsize = '1G'\nexport = false\n").unwrap();
    assert_eq!(curl.post("/v1/reload", &Value::Null)["added"], json!(["more"]));
    curl.call("DELETE", "/v1/disks/data", &Value::Null);
    assert!(!curl.get("/v1/stats")["disks"][0]["latency"].as_array().unwrap().is_empty());
    assert!(curl.text("GET", "/metrics", None).contains("ringdisk_disk_requests_total{disk=\"first\"}"));
    guest.end();
    let left = curl.left();
    assert_eq!(left, ["get /v1/events", "post /v1/shutdown"], "all others were made");
    curl.post("/v1/shutdown", &Value::Null);
    let mut server = daemon.server;
    assert!(server.wait().success());
    // It ends with the daemon, in the middle of an answer.
    listener.wait().unwrap();
    let heard = std::fs::read_to_string(daemon.dir.path().join("events")).unwrap();
    for kind in ["disk-added", "layers-changed", "job-ended", "export-removed", "shutting-down"] {
        assert!(heard.contains(&format!("\"kind\":\"{kind}\"")), "{kind}: {heard}");
    }
    assert_valid(&daemon.dir.path().join("next.qcow2"), false);
}
