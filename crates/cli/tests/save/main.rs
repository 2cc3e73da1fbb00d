//! `ringdisk save` and `restore` with a real QEMU: the pair of state and disk is whole at every moment, also after `kill -9`
//! of the save, and the machine is resumed from it. qemu-img reads the disks.
//!
//! The machine has no system: its firmware waits. What a guest would write comes through a second socket of its disk.

mod bench;
#[path = "../common/mod.rs"]
mod common;
mod interrupted;

use bench::{Bench, end_machines, kill_at};
use common::{at, directory, has_tool, path_str, run, run_ok, text, tool_ok};
use save::{Machine, Qmp};
use serde_json::{Value, json};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

const QEMU: &str = "qemu-system-x86_64";
const SIZE: usize = 2 << 20;
const PIECE: usize = 64 << 10;

/// Before version 9, QEMU does not save a machine whose disk keeps no log of what it writes.
fn has_tools() -> bool {
    if !(has_tool("qemu-img") && has_tool(QEMU)) {
        return false;
    }
    let said = tool_ok(QEMU, &["--version"]);
    let major = said.split("version ").nth(1).and_then(|rest| rest.split('.').next()?.parse::<u32>().ok());
    let is_new = major.is_some_and(|major| major >= 9);
    if !is_new {
        testkit::skipped(&format!("QEMU is older than 9.0: {}", said.lines().next().unwrap_or_default()));
    }
    is_new
}

#[test]
fn a_pair_is_whole_whenever_the_save_is_killed_and_the_machine_goes_on() {
    if !has_tools() {
        return;
    }
    let rounds: u64 = std::env::var("RINGDISK_SAVE_ROUNDS").map_or(8, |rounds| rounds.parse().expect("a number"));
    let mut bench = Bench::new("raw");
    bench.start_machine();
    for round in 0..rounds {
        // A save that was killed may have left the machine stopped: then it writes nothing.
        if bench.qmp().is_running().unwrap() {
            bench.write(2 * round as usize);
        }
        let before = bench.check_pair();
        let next = before.unwrap_or(0) + 1;
        bench.saved.insert(next, bench.contents.clone());
        // Each second one is killed, later and later.
        let mut child = bench.save_command(round % 3 == 2).spawn().unwrap();
        if round % 2 == 1 {
            std::thread::sleep(Duration::from_millis(15 * round));
            child.kill().unwrap();
        }
        let output = child.wait_with_output().unwrap();
        if round % 2 == 0 {
            assert!(output.status.success(), "{}", text(&output.stderr));
            assert!(bench.qmp().is_running().unwrap());
        }
        let after = bench.check_pair();
        assert!(after == before || after == Some(next), "{before:?}, then {after:?}");
        assert!(round % 2 == 1 || after == Some(next));
        // What comes later is no part of it.
        if round % 2 == 0 {
            bench.write(2 * round as usize + 1);
            assert_eq!(bench.check_pair(), after);
        }
    }
    let output = bench.save_command(false).output().unwrap();
    assert!(output.status.success() && bench.qmp().is_running().unwrap(), "{}", text(&output.stderr));
}

#[test]
fn a_machine_is_resumed_from_what_was_saved_and_can_be_saved_again() {
    if !has_tools() {
        return;
    }
    for keep in [false, true] {
        let mut bench = Bench::new("qcow2");
        bench.start_machine();
        for number in 1..=2 {
            bench.write(number as usize);
            bench.saved.insert(number, bench.contents.clone());
            let output = bench.save_command(keep).output().unwrap();
            assert!(output.status.success(), "{}", text(&output.stderr));
        }
        let then = bench.contents.clone();
        bench.write(9);
        bench.lose_machine();
        bench.restore(&[]);
        bench.contents = then;
        assert_eq!(bench.check_pair(), Some(2));
        bench.write(11);
        assert_eq!(bench.check_pair(), Some(2));
        bench.saved.insert(3, bench.contents.clone());
        let output = bench.save_command(false).output().unwrap();
        assert!(output.status.success(), "{}", text(&output.stderr));
        assert_eq!(bench.check_pair(), Some(3));
        // All of it went into the image, which a restore has opened below a layer.
        assert_eq!((bench.saved_file(), text(&output.stderr)), (bench.path("disk"), String::new()));
        assert!(bench.seen(&bench.path("disk")) == bench.contents);
        bench.qmp().run("quit", json!({})).unwrap();
        assert!(bench.machine.take().unwrap().wait().unwrap().success());
    }
}

/// Whether the monitor answers, and its machine runs.
fn is_running(socket: &Path) -> bool {
    Qmp::connect(socket, Duration::ZERO).and_then(|mut qmp| qmp.is_running()).unwrap_or(false)
}

/// Ends a child of the test, whatever becomes of the test.
struct Ending(Child);

impl Drop for Ending {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_state_that_qemu_keeps_in_an_image_is_taken_out_and_resumes_the_machine() {
    if !has_tools() {
        return;
    }
    let dir = directory();
    let [disk, socket, state] = ["disk.qcow2", "qmp", "state"].map(|name| at(&dir, name));
    tool_ok("qemu-img", &["create", "-q", "-f", "qcow2", "-o", "cluster_size=4096", path_str(&disk), "40M"]);
    let start = |more: &[&str]| {
        let _ = std::fs::remove_file(&socket);
        let child = Command::new(QEMU)
            .args(["-nodefaults", "-no-user-config", "-display", "none", "-accel", "tcg", "-machine", "q35"])
            .args(["-m", "64M", "-device", "virtio-blk-pci,drive=disk"])
            .args(["-drive", &format!("if=none,id=disk,format=qcow2,file={}", disk.display())])
            .args(["-qmp", &format!("unix:{},server=on,wait=off", socket.display())])
            .args(more)
            .stdin(Stdio::null())
            .spawn();
        let child = Ending(child.unwrap());
        (Qmp::connect(&socket, Duration::from_secs(60)).unwrap(), child)
    };
    let (mut qmp, machine) = start(&[]);
    let said = qmp.run("human-monitor-command", json!({ "command-line": "savevm one" })).unwrap();
    assert_eq!(said, "");
    drop((qmp, machine));

    run_ok(&["state", "extract", "-l", "one", path_str(&disk), path_str(&state)]);
    let info: Value = serde_json::from_str(&run_ok(&["info", "--output=json", path_str(&disk)])).unwrap();
    let stream = std::fs::read(&state).unwrap();
    assert!(stream.starts_with(b"QEVM"));
    assert_eq!(info["snapshots"][0]["vm-state-size"], stream.len());
    assert!(!run(&["state", "extract", "-l", "two", path_str(&disk), "-"]).status.success());

    let (mut qmp, _machine) = start(&["-incoming", "defer"]);
    qmp.run("migrate-incoming", json!({ "uri": format!("exec:cat {}", state.display()) })).unwrap();
    while qmp.status().unwrap() == "inmigrate" {
        std::thread::sleep(Duration::from_millis(20));
    }
    qmp.run("cont", json!({})).unwrap();
    assert!(qmp.is_running().unwrap());
}

#[test]
fn a_machine_is_put_into_its_image_and_comes_out_as_it_went_in() {
    if !has_tools() {
        return;
    }
    let mut bench = Bench::new("qcow2");
    let (disk, state, seen) = (bench.path("disk"), bench.path("stream"), bench.path("seen.raw"));
    bench.start_machine();
    bench.write(3);
    let then = bench.contents.clone();
    let save = |name: &str| bench.save_command(false).args(["--into-image", name]).output().unwrap();
    let output = save("one");
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(text(&output.stdout).contains("snapshot 'one'") && bench.qmp().is_running().unwrap());
    let again = save("one");
    assert!(text(&again.stderr).contains("already") && bench.qmp().is_running().unwrap(), "{}", text(&again.stderr));
    // What a save that was killed leaves.
    std::fs::write(bench.path("saved/saving.json"), r#"{"was-running": true}"#).unwrap();
    let again = save("one");
    assert!(text(&again.stderr).contains("until a save comes to its end"), "{}", text(&again.stderr));
    std::fs::remove_file(bench.path("saved/saving.json")).unwrap();
    let left: Vec<_> =
        std::fs::read_dir(bench.path("saved")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(left.is_empty(), "{left:?}");
    bench.write(8);

    let info: Value =
        serde_json::from_str(&tool_ok("qemu-img", &["info", "-U", "--output=json", path_str(&disk)])).unwrap();
    let said = info["snapshots"][0]["vm-state-size"].as_u64().unwrap();
    run_ok(&["state", "extract", "-U", "-l", "one", path_str(&disk), path_str(&state)]);
    let stream = std::fs::read(&state).unwrap();
    assert!(stream.starts_with(b"QEVM") && stream.len() as u64 == said && said > 0, "{said}");

    // The machine ends. QEMU's tools find the disk and the state as they were.
    drop(bench.machine.take().map(|mut machine| (machine.kill(), machine.wait())));
    bench.server.take().unwrap().stop();
    tool_ok("qemu-img", &["check", "-q", path_str(&disk)]);
    tool_ok("qemu-img", &["convert", "-l", "snapshot.name=one", "-O", "raw", path_str(&disk), path_str(&seen)]);
    assert!(std::fs::read(&seen).unwrap() == then);
    tool_ok("qemu-img", &["snapshot", "-a", "one", path_str(&disk)]);
    tool_ok("qemu-img", &["check", "-q", path_str(&disk)]);
    for piece in [0, stream.len() / 2, stream.len() - 512] {
        let read = format!("read -b -v {} 512", piece / 512 * 512);
        let dump = tool_ok("qemu-io", &["-r", "-f", "qcow2", "-c", &read, path_str(&disk)]);
        let bytes = stream[piece / 512 * 512..].iter().take(16).map(|byte| format!("{byte:02x}"));
        let line = bytes.collect::<Vec<_>>().join(" ");
        assert!(dump.contains(&line), "{line} in {dump}");
    }

    for name in ["qmp", "control", "other", "s"] {
        let _ = std::fs::remove_file(bench.path(name));
    }
    std::fs::remove_dir_all(bench.path("daemon")).unwrap();
    bench.serve("qcow2");
    let machine = Machine::read(&bench.path("vm.toml")).unwrap();
    let child = Command::new(QEMU).args(&machine.qemu[1..]).args(["-incoming", "defer"]).stdin(Stdio::null()).spawn();
    bench.machine = Some(child.unwrap());
    let mut qmp = bench.qmp();
    qmp.run("migrate-incoming", json!({ "uri": format!("exec:cat {}", state.display()) })).unwrap();
    while qmp.status().unwrap() == "inmigrate" {
        std::thread::sleep(Duration::from_millis(20));
    }
    qmp.run("cont", json!({})).unwrap();
    assert!(qmp.is_running().unwrap());
}

/// A save takes layers back and removes them: what was put into them would be gone.
#[test]
fn a_snapshot_is_not_put_into_a_layer_and_a_layer_that_has_one_stays() {
    if !has_tools() {
        return;
    }
    let mut bench = Bench::new("qcow2");
    bench.start_machine();
    let save = |bench: &mut Bench, number: u64| {
        bench.write(number as usize);
        bench.saved.insert(number, bench.contents.clone());
        let output = bench.save_command(false).output().unwrap();
        assert!(output.status.success() && bench.qmp().is_running().unwrap(), "{}", text(&output.stderr));
        assert_eq!(bench.check_pair(), Some(number));
        text(&output.stderr)
    };
    assert_eq!(save(&mut bench, 1), "");
    let refused = bench.save_command(false).args(["--into-image", "one"]).output().unwrap();
    let said = text(&refused.stderr);
    assert!(!refused.status.success() && said.contains(".save-1'") && said.contains("ctl commit root"), "{said}");
    assert!(bench.qmp().is_running().unwrap());
    assert_eq!(bench.check_pair(), Some(1));

    let control = bench.path("control");
    run_ok(&["ctl", "--control", path_str(&control), "snapshot-create", "root", "own"]);
    let then = bench.contents.clone();
    for number in 2..=3 {
        let said = save(&mut bench, number);
        assert!(said.contains("keeps its layers") && said.contains("internal snapshots ('own'"), "{said}");
    }
    let (layer, seen) = (bench.path("disk.save-1"), bench.path("own.raw"));
    let own = ["convert", "-U", "-l", "snapshot.name=own", "-O", "raw", path_str(&layer), path_str(&seen)];
    tool_ok("qemu-img", &own);
    assert!(std::fs::read(&seen).unwrap() == then);
}

#[test]
fn killed_as_each_step_begins_the_old_pair_or_the_new_one_is_whole_and_the_next_save_goes_on() {
    if !has_tools() {
        return;
    }
    let mut bench = Bench::new("qcow2");
    bench.start_machine();
    bench.saved.insert(1, bench.contents.clone());
    let output = bench.save_command(false).output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    for (index, step) in ["stop", "state", "freeze", "publish", "commit", "resume"].into_iter().enumerate() {
        bench.write(10 + index);
        let before = bench.check_pair();
        let next = before.unwrap() + 1;
        bench.saved.insert(next, bench.contents.clone());
        kill_at(bench.save_command(false), step);
        let after = bench.check_pair();
        assert!(after == before || after == Some(next), "{step}: {before:?}, then {after:?}");
        assert!(step != "resume" || after == Some(next), "{after:?}");
        assert!(!matches!(step, "stop" | "state") || after == before, "{after:?}");
        // The next one lets the machine go on.
        let next = after.unwrap() + 1;
        bench.saved.insert(next, bench.contents.clone());
        let output = bench.save_command(index % 2 == 0).output().unwrap();
        assert!(output.status.success() && bench.qmp().is_running().unwrap(), "{step}: {}", text(&output.stderr));
        assert_eq!(bench.check_pair(), Some(next), "{step}");
    }
}

#[test]
fn a_restore_that_is_killed_as_each_step_begins_leaves_the_pair_and_the_next_one_resumes_it() {
    if !has_tools() {
        return;
    }
    let mut bench = Bench::new("qcow2");
    bench.start_machine();
    for number in 1..=2 {
        bench.write(number as usize);
        bench.save(true, number);
    }
    let then = bench.contents.clone();
    bench.write(7);
    bench.lose_machine();
    for step in ["look", "serve", "start", "state", "resume"] {
        kill_at(bench.restore_command(&["--force"]), step);
        end_machines(&bench.path("qmp"));
        assert_eq!(bench.check_pair_with(&["--force"]), Some(2), "{step}");
        // Without it, the pair is whole, or the reason is said.
        let asked = run(&["restore", path_str(&bench.path("vm.toml"))]);
        let said = text(&asked.stderr);
        assert!(asked.status.success() || said.contains("a restore was broken off"), "{step}: {said}");
    }
    // What a save leaves that is killed before the machine is lost. The next save is of another machine.
    std::fs::write(bench.path("saved/saving.json"), r#"{"was-running": true}"#).unwrap();
    bench.restore(&["--force"]);
    assert!(!bench.path("saved/saving.json").exists(), "the next save lets the machine go on, even if it stands");
    bench.contents = then;
    assert_eq!(bench.check_pair(), Some(2));
    bench.write(9);
    assert_eq!(bench.save(false, 3), "");
    assert_eq!(bench.saved_file(), bench.path("disk"));
}

#[test]
fn a_layer_that_changes_below_what_was_saved_is_noticed() {
    if !has_tools() {
        return;
    }
    let mut bench = Bench::new("qcow2");
    bench.start_machine();
    for number in 1..=3 {
        bench.write(number as usize);
        bench.save(true, number);
    }
    // A daemon that is started again changes none of them.
    bench.lose_machine();
    bench.server.take().unwrap().stop();
    assert_eq!(bench.check_pair(), Some(3));
    for layer in ["disk", "disk.save-1", "disk.save-2"] {
        let file = std::fs::File::open(bench.path(layer)).unwrap();
        let modified = file.metadata().unwrap().modified().unwrap();
        file.set_modified(modified + Duration::from_millis(1)).unwrap();
        for words in [&["restore"][..], &["restore", "--force"]] {
            let output = run(&[words, &[path_str(&bench.path("vm.toml"))]].concat());
            let said = text(&output.stderr);
            assert!(!output.status.success() && said.contains(&format!("/{layer}' was changed")), "{said}");
        }
        file.set_modified(modified).unwrap();
        assert_eq!(bench.check_pair(), Some(3));
    }
}

/// The gate takes the image, which lies elsewhere, from the daemon's record alone.
#[test]
fn a_kept_overlay_of_an_image_elsewhere_is_resumed_and_served_whenever_the_daemon_is_started_again() {
    if !has_tools() {
        return;
    }
    for daemon_restarts in [false, true] {
        let mut bench = Bench::new("raw");
        bench.ctl(&["remove", "root", "--force"]);
        bench.serve_recorded();
        let [keep, disk, socket] = ["keep", "disk", "s"].map(|name| bench.path(name));
        std::fs::create_dir(&keep).unwrap();
        let drive = format!(
            "file={},format=raw,name=root,queues=1,snapshot=on,keep={},socket={}",
            disk.display(),
            keep.display(),
            socket.display()
        );
        bench.ctl(&["add", &drive]);
        bench.export();
        bench.start_machine();
        bench.write(1);
        let then = bench.contents.clone();
        let output = bench.save_command(false).output().unwrap();
        assert!(output.status.success(), "{}", text(&output.stderr));
        bench.write(2);
        bench.lose_machine();
        if daemon_restarts {
            bench.serve_recorded();
        }
        bench.restore(&[]);
        bench.contents = then;
        bench.write(3);
        bench.lose_machine();
        bench.serve_recorded();
        let source = format!("if=vhost-user:{}", socket.display());
        let seen = bench.path("seen.raw");
        run_ok(&["dd", "-f", "raw", "-O", "raw", "bs=64K", &source, &format!("of={}", seen.display())]);
        assert!(std::fs::read(seen).unwrap() == bench.contents);
    }
}

/// As its user does: reads the message, and does what it says.
#[test]
fn the_layers_of_a_restore_are_taken_back_by_the_command_that_the_message_names() {
    if !has_tools() {
        return;
    }
    for daemon_restarts in [false, true] {
        let mut bench = Bench::new("qcow2");
        bench.start_machine();
        for number in 1..=2 {
            bench.write(number as usize);
            bench.save(true, number);
        }
        let then = bench.contents.clone();
        bench.write(8);
        bench.lose_machine();
        bench.restore(&[]);
        bench.contents = then;
        bench.write(5);
        let refused = bench.save_command(false).args(["--into-image", "one"]).output().unwrap();
        let said = text(&refused.stderr);
        assert!(!refused.status.success() && said.contains("/disk.restored-1'"), "{said}");
        let advice = said.split("'ringdisk ctl ").nth(1).and_then(|rest| rest.split('\'').next()).unwrap().to_owned();
        assert_eq!(advice, "commit root --layers 2");
        if daemon_restarts {
            bench.lose_machine();
            bench.serve_recorded();
        }
        bench.ctl(&advice.split(' ').collect::<Vec<_>>());
        assert!(bench.seen(&bench.path("disk")) == bench.contents);
        let asked = run(&["restore", path_str(&bench.path("vm.toml"))]);
        assert!(text(&asked.stderr).contains("was changed"), "what was saved before is of no use");
        if !daemon_restarts {
            let output = bench.save_command(false).args(["--into-image", "one"]).output().unwrap();
            assert!(output.status.success(), "{}", text(&output.stderr));
        }
        bench.lose_machine();
        bench.server.take().unwrap().stop();
        tool_ok("qemu-img", &["check", "-q", path_str(&bench.path("disk"))]);
    }
}

#[test]
fn a_state_that_is_taken_out_has_holes_where_it_is_zero() {
    use std::os::unix::fs::MetadataExt;
    let dir = directory();
    let [state, out] = ["state", "out"].map(|name| at(&dir, name));
    let mut stream = vec![0; (16 << 20) + 123];
    for at in [0, 5_000_000, stream.len() - (3 << 20)] {
        stream[at..at + 100].fill(7);
    }
    save::StateFile::write(&state, &mut stream.as_slice(), &mut |_| Ok(())).unwrap();
    run_ok(&["state", "extract", path_str(&state), path_str(&out)]);
    assert!(std::fs::read(&out).unwrap() == stream);
    let meta = std::fs::metadata(&out).unwrap();
    assert!((1..=64 << 10).contains(&(meta.blocks() * 512)), "{} blocks", meta.blocks());
    assert_eq!(meta.mode() & 0o777, 0o600);
    let shown = run(&["state", "extract", path_str(&state), "-"]);
    assert!(shown.status.success() && shown.stdout == stream);
}
