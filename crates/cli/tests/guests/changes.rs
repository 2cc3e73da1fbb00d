//! Guests that write and check all the time, while an operator's script changes their disks and others.

use super::common::{Server, path_str, run_ok, tool_ok};
use guestlab::{GuestKind, GuestOptions, GuestWork};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Has a guest killed when whoever drives it fails.
struct KillOnFailure(Arc<AtomicBool>);

impl Drop for KillOnFailure {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.store(true, Ordering::Relaxed);
        }
    }
}

/// Changes disks as an operator's script does, by the client and by curl in turn.
struct Operator {
    control: PathBuf,
    more: PathBuf,
}

impl Operator {
    fn ctl(&self, call: &[&str]) -> String {
        run_ok(&[&["ctl", "--control", path_str(&self.control)], call].concat())
    }

    fn curl(&self, path: &str, more: &[&str]) -> String {
        let url = format!("http://localhost{path}");
        let fixed = ["--silent", "--show-error", "--fail-with-body", "--max-time", "60", "--unix-socket"];
        tool_ok("curl", &[&fixed[..], &[path_str(&self.control), &url], more].concat())
    }

    /// Another disk comes, gets a second socket, loses it, and goes. Then the guest's disk grows. Returns when that was
    /// asked for.
    fn change(&self, round: u64, size_bytes: u64) -> Instant {
        let [first, second] = ["more.sock", "second.sock"].map(|name| self.more.join(name));
        let (socket, other) = (path_str(&first), path_str(&second));
        let id = |answer: String| {
            let export: serde_json::Value = serde_json::from_str(&answer).expect("JSON");
            export["id"].to_string()
        };
        if round.is_multiple_of(2) {
            self.ctl(&["add", &format!("format=null,size=1G,name=more,socket={socket}")]);
            let export = id(self.ctl(&["export", "more", "--socket", other, "--output=json"]));
            assert!(first.exists() && second.exists(), "round {round}");
            self.ctl(&["unexport", &export]);
            self.ctl(&["remove", "more", "--force"]);
        } else {
            let options = format!(r#"{{"format": "null", "size": "1G", "name": "more", "socket": "{socket}"}}"#);
            self.curl("/v1/disks", &["--data", &format!(r#"{{"options": {options}}}"#)]);
            let export = format!(r#"{{"disk": "more", "socket": "{other}"}}"#);
            let export = id(self.curl("/v1/exports", &["--data", &export]));
            assert!(first.exists() && second.exists(), "round {round}");
            self.curl(&format!("/v1/exports/{export}"), &["--request", "DELETE"]);
            self.curl("/v1/disks/more?force=true", &["--request", "DELETE"]);
        }
        assert!(!first.exists() && !second.exists(), "round {round}");
        let asked = Instant::now();
        match round.is_multiple_of(2) {
            true => self.ctl(&["resize", "disk", &size_bytes.to_string()]),
            false => self.curl("/v1/disks/disk/resize", &["--data", &format!(r#"{{"size_bytes": {size_bytes}}}"#)]),
        };
        asked
    }
}

#[test]
#[ignore = "boots a guest; run by cargo xtask ci"]
fn uml_on_a_disk_that_grows_while_a_script_changes_others_a_hundred_times() {
    sees_each_size(GuestKind::Uml);
}

#[test]
#[ignore = "boots a guest; run by cargo xtask ci"]
fn qemu_on_a_disk_that_grows_while_a_script_changes_others_a_hundred_times() {
    sees_each_size(GuestKind::Qemu);
}

/// The guest writes and checks all the time, and looks at the disk's size every 20 ms. How soon it sees a new one is
/// printed.
fn sees_each_size(kind: GuestKind) {
    const ROUNDS: u64 = 100;
    let size_of = |round: u64| (64 + round) << 20;
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let short = tempfile::tempdir().unwrap();
    let [image, socket, control] =
        [directory.path().join("disk.qcow2"), short.path().join("d"), short.path().join("ctl")];
    run_ok(&["create", "-q", "-f", "qcow2", path_str(&image), "64M"]);
    let drive = format!("name=disk,file={},format=qcow2,guest-memory=any", image.display());
    let fixed = ["--queues", "4", "--control", path_str(&control)];
    let server = Server::start(&[&fixed[..], &["--drive", &drive, "--socket", path_str(&socket)]].concat());
    let mut options = GuestOptions::new(kind, vec![socket]);
    options.work = GuestWork::Grow { until_bytes: size_of(ROUNDS) };
    let operator = Operator { control, more: short.path().to_owned() };
    let (step, steps) = std::sync::mpsc::channel();
    let mut seen_after = Vec::new();
    let report = std::thread::scope(|scope| {
        let _kill = KillOnFailure(Arc::clone(&options.stop));
        let guest = scope.spawn(|| guestlab::run(&options, &mut |said| step.send(said.to_owned()).unwrap_or(())));
        let wait_for = |size_bytes: u64| {
            let wanted = format!("vda has {} sectors", size_bytes / 512);
            loop {
                let said = steps.recv_timeout(Duration::from_secs(120)).unwrap_or_else(|_| panic!("never: {wanted}"));
                if said == wanted {
                    return;
                }
            }
        };
        wait_for(size_of(0));
        for round in 1..=ROUNDS {
            let asked = operator.change(round, size_of(round));
            wait_for(size_of(round));
            seen_after.push(asked.elapsed());
        }
        guest.join().unwrap()
    });
    let (status, said) = server.terminate();
    let report = report.unwrap_or_else(|error| panic!("{error:#}\n\nringdisk serve ({status}) said:\n{said}"));
    assert!(status.success(), "{said}");
    let facts = &report.disks[0].facts;
    assert_eq!(facts["sizes"], (ROUNDS + 1).to_string());
    assert!(facts["passes"].parse::<u64>().unwrap() > 0, "{facts:?}");
    println!("{kind:?}: {ROUNDS} rounds, {} passes of verified writes, {:?}", facts["passes"], report.time);
    seen_after.sort_unstable();
    let (usual, longest) = (seen_after[seen_after.len() / 2], seen_after[seen_after.len() - 1]);
    println!("{kind:?}: from the call until the guest sees the size: {usual:?} (median), {longest:?} (longest)");
    tool_ok("qemu-img", &["check", path_str(&image)]);
}

/// Under one boot. Afterwards another program finds the images clean, and the last backup the same as the disk.
#[test]
#[ignore = "boots a guest; run by cargo xtask ci"]
fn uml_on_a_disk_that_gets_layers_copies_and_backups_one_after_the_other() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let directory = directory.path().canonicalize().unwrap();
    let short = tempfile::tempdir().unwrap();
    let [socket, control, state] = ["d", "ctl", "state"].map(|name| short.path().join(name));
    let at = |name: &str| directory.join(name);
    let [disk, first, second, moved] = ["disk.qcow2", "first.qcow2", "second.qcow2", "moved.qcow2"].map(at);
    run_ok(&["create", "-q", "-f", "qcow2", path_str(&disk), "128M"]);
    let drive = format!("name=disk,file={},format=qcow2,guest-memory=any", disk.display());
    let server = ["--control", path_str(&control), "--state-dir", path_str(&state), "--drive", &drive, "--socket"];
    let server = Server::start(&[&server[..], &[path_str(&socket)]].concat());
    let mut options = GuestOptions::new(GuestKind::Uml, vec![socket]);
    options.work = GuestWork::WorkUntilGrown { fio_mib: 4 };
    let operator = Operator { control, more: short.path().to_owned() };
    let ctl = |call: &[&str]| {
        eprintln!("ctl {call:?}");
        operator.ctl(call)
    };
    let (step, steps) = std::sync::mpsc::channel();
    let backups = ["0.qcow2", "1.qcow2", "2.qcow2"].map(at);
    let report = std::thread::scope(|scope| {
        let _kill = KillOnFailure(Arc::clone(&options.stop));
        let guest = scope.spawn(|| guestlab::run(&options, &mut |said| step.send(said.to_owned()).unwrap_or(())));
        while steps.recv_timeout(Duration::from_secs(120)).expect("the guest works") != "vda is at work" {}
        ctl(&["snapshot", "disk", path_str(&first)]);
        ctl(&["stream", "disk"]);
        ctl(&["snapshot", "disk", path_str(&second)]);
        ctl(&["commit", "disk"]);
        ctl(&["mirror", "disk", path_str(&moved)]);
        ctl(&["bitmap", "add", "disk", "b"]);
        backups[..2].iter().for_each(|backup| drop(ctl(&["backup", "disk", path_str(backup), "--bitmap", "b"])));
        ctl(&["compact", "disk"]);
        ctl(&["resize", "disk", "130M"]);
        guest.join().unwrap()
    });
    let report = match report {
        Ok(report) => report,
        Err(error) => {
            let (status, said) = server.terminate();
            panic!("{error:#}\n\nringdisk serve ({status}) said:\n{said}");
        }
    };
    ctl(&["backup", "disk", path_str(&backups[2]), "--bitmap", "b"]);
    assert!(ctl(&["show", "disk"]).contains(path_str(&moved)));
    let (status, said) = server.terminate();
    assert!(status.success(), "{said}");
    let passes: u64 = report.disks[0].facts["passes"].parse().unwrap();
    assert!(passes > 0 && report.disks[0].checks == 2, "{:?}", report.disks[0]);
    eprintln!("{passes} passes of verified writes, {:?}", report.time);
    [&second, &moved]
        .into_iter()
        .chain(&backups)
        .for_each(|image| drop(tool_ok("qemu-img", &["check", path_str(image)])));
    tool_ok("qemu-img", &["compare", path_str(&backups[2]), path_str(&moved)]);
}
