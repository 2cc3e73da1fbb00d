//! The commands that wait for a job.

use super::{Daemon, common};
use common::{PATIENCE, at, directory, path_str, ringdisk, run, run_ok, text, tool_ok};
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::Stdio;

#[test]
fn a_program_reads_a_job_as_json_beside_progress_for_people() {
    let dir = directory();
    let image = at(&dir, "disk.qcow2");
    run_ok(&["create", "-q", "-f", "qcow2", path_str(&image), "4M"]);
    let drive = format!("file={},name=disk", image.display());
    let daemon = Daemon::start_in(dir, &["--drive", &drive]);
    daemon.ctl(&["snapshot", "disk", path_str(&daemon.path("top.qcow2"))]);
    let output = run(&daemon.arguments(&["commit", "disk", "-p", "--output=json"]));
    let said = text(&output.stderr);
    assert!(output.status.success(), "{said}");
    let job: Value = serde_json::from_slice(&output.stdout).expect("standard output is JSON alone");
    assert_eq!((&job["kind"], &job["state"]), (&json!("commit"), &json!("done")));
    assert!(said.contains("/100%)"), "{said}");
    daemon.end();
}

/// Reads a request, and returns its first line.
fn request(stream: &mut UnixStream) -> String {
    let (mut bytes, mut part) = (Vec::new(), [0; 4096]);
    loop {
        let got = stream.read(&mut part).unwrap();
        bytes.extend_from_slice(&part[..got]);
        let text = String::from_utf8_lossy(&bytes).into_owned();
        let Some((head, body)) = text.split_once("\r\n\r\n") else {
            assert!(got > 0, "the request ends early: {text}");
            continue;
        };
        let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
        if body.len() >= length.map_or(0, |length| length.trim().parse().unwrap()) {
            return head.lines().next().unwrap().to_owned();
        }
        assert!(got > 0, "the request ends early: {text}");
    }
}

/// Answers with a job.
fn answer(stream: &mut UnixStream, state: &str) {
    let job = json!({ "id": 7, "kind": "commit", "disk": "disk", "state": state, "done_bytes": 0, "total_bytes": 1 });
    let (body, kind) = (job.to_string(), "content-type: application/json\r\nconnection: close");
    write!(stream, "HTTP/1.1 200 OK\r\n{kind}\r\ncontent-length: {}\r\n\r\n{body}", body.len()).unwrap();
}

/// The signal comes when the daemon has the call and has not answered it.
#[test]
fn an_interrupt_while_a_job_begins_cancels_it() {
    let dir = directory();
    let control = at(&dir, "control");
    let listener = UnixListener::bind(&control).unwrap();
    let mut command = ringdisk();
    command.args(["ctl", "--control", path_str(&control), "commit", "disk"]);
    let mut ctl = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let accept = || {
        let (stream, _) = listener.accept().unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream
    };
    let mut call = accept();
    assert!(request(&mut call).contains("/commit"));
    tool_ok("kill", &["-INT", &ctl.id().to_string()]);
    std::thread::sleep(std::time::Duration::from_millis(100));
    assert!(ctl.try_wait().unwrap().is_none(), "nobody cancels the job that has begun");
    answer(&mut call, "running");
    drop(call);
    // It may ask how far the job is before.
    let mut asked = String::new();
    while !asked.contains("/v1/jobs/7/cancel") {
        let mut call = accept();
        asked = request(&mut call);
        answer(&mut call, if asked.contains("cancel") { "cancelled" } else { "running" });
    }
    let mut call = accept();
    request(&mut call);
    answer(&mut call, "cancelled");
    drop(call);
    let mut said = String::new();
    ctl.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    assert!(!ctl.wait().unwrap().success());
    assert!(said.contains("job 7 was cancelled"), "{said}");
}

/// A daemon that ends closes its connections without an answer.
#[test]
fn who_waits_when_the_daemon_ends_learns_it_in_plain_words_and_what_becomes_of_the_job() {
    let dir = directory();
    let control = at(&dir, "control");
    let listener = UnixListener::bind(&control).unwrap();
    let call = |call: &[&str]| {
        let mut command = ringdisk();
        command.args(["ctl", "--control", path_str(&control)]).args(call);
        command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let accept = || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        request(&mut stream);
        stream
    };
    let list = call(&["list"]);
    drop(accept());
    let output = list.wait_with_output().unwrap();
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1));
    assert!(said.contains("ended before it answered") && !said.contains("cancel"), "{said}");
    let commit = call(&["commit", "disk"]);
    answer(&mut accept(), "running");
    drop(accept());
    let output = commit.wait_with_output().unwrap();
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1));
    assert!(said.contains("the daemon ended, and its next start does not continue job 7"), "{said}");
    // Part of it may be done: of a commit of several layers, the first may have gone.
    assert!(said.contains("'ringdisk ctl show disk' before"), "{said}");
}
