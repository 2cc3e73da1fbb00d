//! A machine with a disk, its server, and what the disk held whenever the machine was saved.

use super::common::{self, Server, at, directory, numbered, path_str, ringdisk, run, run_ok, text, tool_ok};
use super::{PIECE, QEMU, SIZE, is_running};
use save::{Machine, Qmp};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;
use tempfile::TempDir;

pub(super) struct Bench {
    pub(super) dir: TempDir,
    pub(super) server: Option<Server>,
    pub(super) machine: Option<Child>,
    /// What the disk holds now.
    pub(super) contents: Vec<u8>,
    /// What it held when the saves were made.
    pub(super) saved: HashMap<u64, Vec<u8>>,
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
    pub(super) fn new(format: &str) -> Self {
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

    pub(super) fn path(&self, name: &str) -> PathBuf {
        at(&self.dir, name)
    }

    /// Serves again what the daemon's record says.
    pub(super) fn serve_recorded(&mut self) {
        self.server.take().unwrap().stop();
        let [control, state] = ["control", "daemon"].map(|name| self.path(name));
        self.server = Some(Server::start(&["--control", path_str(&control), "--state-dir", path_str(&state)]));
    }

    pub(super) fn serve(&mut self, format: &str) {
        let [control, state, disk, socket] = ["control", "daemon", "disk", "s"].map(|name| self.path(name));
        let (disk, socket) = (disk.display(), socket.display());
        let drive = format!("file={disk},format={format},name=root,queues=1,socket={socket}");
        let arguments = ["--control", path_str(&control), "--state-dir", path_str(&state), "--drive", &drive];
        self.server = Some(Server::start(&arguments));
        self.export();
    }

    /// The second socket.
    pub(super) fn export(&self) {
        let [control, socket] = ["control", "other"].map(|name| self.path(name));
        run_ok(&["ctl", "--control", path_str(&control), "export", "root", "--socket", path_str(&socket)]);
    }

    pub(super) fn start_machine(&mut self) {
        let machine = Machine::read(&self.path("vm.toml")).unwrap();
        let (program, arguments) = machine.qemu.split_first().unwrap();
        let child = Command::new(program).args(arguments).stdin(Stdio::null()).spawn().unwrap();
        self.machine = Some(child);
        assert!(self.qmp().is_running().unwrap());
    }

    pub(super) fn qmp(&self) -> Qmp {
        Qmp::connect(&self.path("qmp"), Duration::from_secs(60)).unwrap()
    }

    /// What a guest would write.
    pub(super) fn write(&mut self, seed: usize) {
        let length = PIECE * (1 + seed % 9);
        let bytes: Vec<u8> = (0..length).map(|index| (index / 512 + seed * 7) as u8).collect();
        let pieces = self.path("pieces");
        std::fs::write(&pieces, &bytes).unwrap();
        let target = format!("of=vhost-user:{}", self.path("other").display());
        run_ok(&["dd", "-f", "raw", "-O", "raw", "bs=64K", &format!("if={}", pieces.display()), &target]);
        self.contents[..length].copy_from_slice(&bytes);
    }

    pub(super) fn save_command(&self, keep: bool) -> Command {
        let mut command = ringdisk();
        command.args(["save", path_str(&self.path("vm.toml"))]).stderr(Stdio::piped()).stdout(Stdio::piped());
        if keep {
            command.arg("--keep");
        }
        command
    }

    /// The number of the pair that is whole; its disk is what it was then.
    pub(super) fn check_pair(&self) -> Option<u64> {
        self.check_pair_with(&[])
    }

    /// As [`Bench::check_pair`], asked with these words.
    pub(super) fn check_pair_with(&self, words: &[&str]) -> Option<u64> {
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

    pub(super) fn ctl(&self, words: &[&str]) -> String {
        run_ok(&[&["ctl", "--control", path_str(&self.path("control"))][..], words].concat())
    }

    /// A save to its end, as this number.
    pub(super) fn save(&mut self, keep: bool, number: u64) -> String {
        self.saved.insert(number, self.contents.clone());
        let output = self.save_command(keep).output().unwrap();
        assert!(output.status.success() && self.qmp().is_running().unwrap(), "{}", text(&output.stderr));
        assert_eq!(self.check_pair(), Some(number));
        text(&output.stderr)
    }

    /// The host has lost the machine.
    pub(super) fn lose_machine(&mut self) {
        drop(self.machine.take().map(|mut machine| (machine.kill(), machine.wait())));
        // Where a restore has started it, the restore was ended.
        end_machines(&self.path("qmp"));
    }

    pub(super) fn restore_command(&self, words: &[&str]) -> Command {
        let mut command = ringdisk();
        command.args(["restore", "--run", path_str(&self.path("vm.toml"))]).args(words).stdout(Stdio::null());
        command
    }

    /// Resumes the machine from what was saved last, and waits until it runs.
    pub(super) fn restore(&mut self, words: &[&str]) {
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
    pub(super) fn saved_file(&self) -> PathBuf {
        let record: Value = serde_json::from_slice(&std::fs::read(self.path("saved/saved.json")).unwrap()).unwrap();
        record["disks"][0]["file"].as_str().unwrap().into()
    }

    /// What a disk's file holds, with all that is below it.
    pub(super) fn seen(&self, file: &Path) -> Vec<u8> {
        let seen = self.path("seen.raw");
        tool_ok("qemu-img", &["convert", "-U", "-O", "raw", path_str(file), path_str(&seen)]);
        std::fs::read(seen).unwrap()
    }
}

/// Starts a command that tells its progress as lines of JSON, and kills it as this step begins.
pub(super) fn kill_at(command: Command, step: &str) {
    drop(signal_at(command, step, "KILL"));
}

/// As [`kill_at`], by this signal. Returns how it ended, and what it said from there on.
pub(super) fn signal_at(mut command: Command, step: &str, signal: &str) -> (ExitStatus, String) {
    let mut child = command.arg("--progress=json").stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = std::io::BufRead::lines(std::io::BufReader::new(child.stderr.take().unwrap()));
    let is_it = |line: String| line.contains(&format!("\"step\":\"{step}\""));
    let begun = lines.by_ref().map_while(Result::ok).any(is_it);
    // It may have ended by itself.
    let _ = Command::new("kill").arg(format!("-{signal}")).arg(child.id().to_string()).output();
    let status = child.wait().unwrap();
    // A machine that a killed program has left behind has the other end, too.
    let rest: Vec<String> = if signal == "KILL" { Vec::new() } else { lines.map_while(Result::ok).collect() };
    let said = rest.join("\n");
    assert!(begun, "there is no step {step}: {said}");
    (status, said)
}

/// Ends the machines with this monitor that a killed program has left behind, those included that are starting.
pub(super) fn end_machines(qmp: &Path) {
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
