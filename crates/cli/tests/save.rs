//! `ringdisk save` and `restore` with a real QEMU: the pair of state and disk is whole at every moment, also after `kill -9`
//! of the save, and the machine is resumed from it. qemu-img reads the disks.
//!
//! The machine has no system: its firmware waits. What a guest would write comes through a second socket of its disk.

mod common;

use common::{Server, at, directory, has_tool, numbered, path_str, ringdisk, run, run_ok, text, tool_ok};
use save::{Machine, Qmp};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use tempfile::TempDir;

const QEMU: &str = "qemu-system-x86_64";
const SIZE: usize = 2 << 20;
const PIECE: usize = 64 << 10;

struct Bench {
    dir: TempDir,
    server: Option<Server>,
    machine: Option<Child>,
    /// What the disk holds now.
    contents: Vec<u8>,
    /// What it held when the saves were made.
    saved: HashMap<u64, Vec<u8>>,
}

impl Drop for Bench {
    fn drop(&mut self) {
        if let Some(mut machine) = self.machine.take() {
            let _ = machine.kill();
            let _ = machine.wait();
            end_machines(&self.path("qmp"));
        }
    }
}

impl Bench {
    fn new(format: &str) -> Self {
        let dir = directory();
        let contents = numbered(SIZE);
        let bench = Self { dir, server: None, machine: None, contents, saved: HashMap::new() };
        std::fs::write(bench.path("model.raw"), &bench.contents).unwrap();
        let [model, disk] = ["model.raw", "disk"].map(|name| bench.path(name));
        tool_ok("qemu-img", &["convert", "-f", "raw", "-O", format, path_str(&model), path_str(&disk)]);
        let path = |name: &str| bench.path(name).display().to_string();
        let chardev = format!("socket,id=disk0,path={}", path("s"));
        let monitor = format!("unix:{},server=on,wait=off", path("qmp"));
        let qemu = [
            &[QEMU, "-nodefaults", "-no-user-config", "-display", "none", "-accel", "tcg"][..],
            &["-machine", "q35,memory-backend=memory", "-m", "64M"],
            &["-object", "memory-backend-memfd,id=memory,size=64M,share=on"],
            &["-chardev", &chardev],
            &["-device", "vhost-user-blk-pci,chardev=disk0,num-queues=1"],
            &["-qmp", &monitor],
        ]
        .concat();
        let text = format!("qmp = 'qmp'\ncontrol = 'control'\nstate = 'saved'\nqemu = {}\n", json!(qemu));
        std::fs::write(bench.path("vm.toml"), text).unwrap();
        let mut bench = bench;
        bench.serve(format);
        bench
    }

    fn path(&self, name: &str) -> PathBuf {
        at(&self.dir, name)
    }

    /// Serves again what the daemon's record says.
    fn serve_recorded(&mut self) {
        self.server.take().unwrap().stop();
        let [control, state] = ["control", "daemon"].map(|name| self.path(name));
        self.server = Some(Server::start(&["--control", path_str(&control), "--state-dir", path_str(&state)]));
    }

    fn serve(&mut self, format: &str) {
        let [control, state, disk, socket] = ["control", "daemon", "disk", "s"].map(|name| self.path(name));
        let (disk, socket) = (disk.display(), socket.display());
        let drive = format!("file={disk},format={format},name=root,queues=1,socket={socket}");
        let arguments = ["--control", path_str(&control), "--state-dir", path_str(&state), "--drive", &drive];
        self.server = Some(Server::start(&arguments));
        self.export();
    }

    /// The second socket.
    fn export(&self) {
        let [control, socket] = ["control", "other"].map(|name| self.path(name));
        run_ok(&["ctl", "--control", path_str(&control), "export", "root", "--socket", path_str(&socket)]);
    }

    fn start_machine(&mut self) {
        let machine = Machine::read(&self.path("vm.toml")).unwrap();
        let (program, arguments) = machine.qemu.split_first().unwrap();
        let child = Command::new(program).args(arguments).stdin(Stdio::null()).spawn().unwrap();
        self.machine = Some(child);
        assert!(self.qmp().is_running().unwrap());
    }

    fn qmp(&self) -> Qmp {
        Qmp::connect(&self.path("qmp"), Duration::from_secs(60)).unwrap()
    }

    /// What a guest would write.
    fn write(&mut self, seed: usize) {
        let length = PIECE * (1 + seed % 9);
        let bytes: Vec<u8> = (0..length).map(|index| (index / 512 + seed * 7) as u8).collect();
        let pieces = self.path("pieces");
        std::fs::write(&pieces, &bytes).unwrap();
        let target = format!("of=vhost-user:{}", self.path("other").display());
        run_ok(&["dd", "-f", "raw", "-O", "raw", "bs=64K", &format!("if={}", pieces.display()), &target]);
        self.contents[..length].copy_from_slice(&bytes);
    }

    fn save_command(&self, keep: bool) -> Command {
        let mut command = ringdisk();
        command.args(["save", path_str(&self.path("vm.toml"))]).stderr(Stdio::piped()).stdout(Stdio::piped());
        if keep {
            command.arg("--keep");
        }
        command
    }

    /// The number of the pair that is whole; its disk is what it was then.
    fn check_pair(&self) -> Option<u64> {
        self.check_pair_with(&[])
    }

    /// As [`Bench::check_pair`], asked with these words.
    fn check_pair_with(&self, words: &[&str]) -> Option<u64> {
        let found = run(&[&["restore", path_str(&self.path("vm.toml"))][..], words].concat());
        if !self.path("saved/saved.json").exists() {
            assert!(text(&found.stderr).contains("no machine was saved"), "{}", text(&found.stderr));
            return None;
        }
        assert!(found.status.success(), "{}", text(&found.stderr));
        assert!(text(&found.stdout).contains("state extract"), "{}", text(&found.stdout));
        let record: Value = serde_json::from_slice(&std::fs::read(self.path("saved/saved.json")).unwrap()).unwrap();
        let number = record["number"].as_u64().unwrap();
        let disk = &record["disks"][0];
        let (file, format) = (disk["file"].as_str().unwrap(), disk["format"].as_str().unwrap());
        let seen = self.path("seen.raw");
        tool_ok("qemu-img", &["convert", "-U", "-f", format, "-O", "raw", file, path_str(&seen)]);
        assert!(std::fs::read(seen).unwrap() == self.saved[&number], "pair {number} has another disk: {record}");
        Some(number)
    }

    fn ctl(&self, words: &[&str]) -> String {
        run_ok(&[&["ctl", "--control", path_str(&self.path("control"))][..], words].concat())
    }

    /// A save to its end, as this number.
    fn save(&mut self, keep: bool, number: u64) -> String {
        self.saved.insert(number, self.contents.clone());
        let output = self.save_command(keep).output().unwrap();
        assert!(output.status.success() && self.qmp().is_running().unwrap(), "{}", text(&output.stderr));
        assert_eq!(self.check_pair(), Some(number));
        text(&output.stderr)
    }

    /// The host has lost the machine.
    fn lose_machine(&mut self) {
        drop(self.machine.take().map(|mut machine| (machine.kill(), machine.wait())));
        // Where a restore has started it, the restore was ended.
        end_machines(&self.path("qmp"));
    }

    fn restore_command(&self, words: &[&str]) -> Command {
        let mut command = ringdisk();
        command.args(["restore", "--run", path_str(&self.path("vm.toml"))]).args(words).stdout(Stdio::null());
        command
    }

    /// Resumes the machine from what was saved last, and waits until it runs.
    fn restore(&mut self, words: &[&str]) {
        self.machine = Some(self.restore_command(words).spawn().unwrap());
        let begun = std::time::Instant::now();
        loop {
            assert!(begun.elapsed() < common::PATIENCE, "the machine does not go on");
            std::thread::sleep(Duration::from_millis(100));
            let alive = self.machine.as_mut().unwrap().try_wait().unwrap();
            assert!(alive.is_none(), "the restore has ended: {alive:?}");
            if is_running(&self.path("qmp")) {
                break;
            }
        }
        self.export();
    }

    /// The file that the record names.
    fn saved_file(&self) -> PathBuf {
        let record: Value = serde_json::from_slice(&std::fs::read(self.path("saved/saved.json")).unwrap()).unwrap();
        record["disks"][0]["file"].as_str().unwrap().into()
    }

    /// What a disk's file holds, with all that is below it.
    fn seen(&self, file: &Path) -> Vec<u8> {
        let seen = self.path("seen.raw");
        tool_ok("qemu-img", &["convert", "-U", "-O", "raw", path_str(file), path_str(&seen)]);
        std::fs::read(seen).unwrap()
    }
}

/// Starts a command that tells its progress as lines of JSON, and kills it as this step begins.
fn kill_at(mut command: Command, step: &str) {
    let mut child = command.arg("--progress=json").stderr(Stdio::piped()).spawn().unwrap();
    let lines = std::io::BufRead::lines(std::io::BufReader::new(child.stderr.take().unwrap()));
    let begun = lines.map_while(Result::ok).any(|line| line.contains(&format!("\"step\":\"{step}\"")));
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(begun, "there is no step {step}");
}

/// Ends the machines with this monitor that a killed program has left behind, those included that are starting.
fn end_machines(qmp: &Path) {
    let is_it = |process: &Path| {
        let words = std::fs::read(process.join("cmdline")).unwrap_or_default();
        let text = String::from_utf8_lossy(&words).into_owned();
        text.starts_with(QEMU) && text.contains(path_str(qmp))
    };
    for _ in 0..2 {
        let begun = std::time::Instant::now();
        loop {
            let processes = std::fs::read_dir("/proc").unwrap().filter_map(|entry| Some(entry.ok()?.path()));
            let left: Vec<PathBuf> = processes.filter(|process| is_it(process)).collect();
            if left.is_empty() {
                break;
            }
            assert!(begun.elapsed() < common::PATIENCE, "{left:?} do not end");
            for process in left {
                // It may have ended by itself.
                let _ = Command::new("kill").arg("-KILL").arg(process.file_name().unwrap()).status();
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    let _ = std::fs::remove_file(qmp);
}

/// Before version 9, QEMU does not save a machine whose disk keeps no log of what it writes.
fn has_tools() -> bool {
    if !(has_tool("qemu-img") && has_tool(QEMU)) {
        return false;
    }
    let said = tool_ok(QEMU, &["--version"]);
    let major = said.split("version ").nth(1).and_then(|rest| rest.split('.').next()?.parse::<u32>().ok());
    let is_new = major.is_some_and(|major| major >= 9);
    if !is_new {
        eprintln!("skipped: QEMU is older than 9.0: {}", said.lines().next().unwrap_or_default());
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
    bench.restore(&["--force"]);
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
