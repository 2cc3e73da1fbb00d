//! A real Linux guest that writes all the time is saved again and again, with saves that are killed as their steps begin, goes
//! on to its end, and is then resumed from what was saved last. Its file system is clean both times.
//!
//! By hand, after the step `guests` has fetched its kernel:
//! `RINGDISK_GUEST_KERNEL=$PWD/target/guest-kernel cargo test -p ringdisk --test save_guest -- --ignored`. It takes a minute.
//!
//! * `RINGDISK_SAVE_GUEST_ROUNDS`: how many times each of two steps is killed, with two saves to their ends.
//! * `RINGDISK_SAVE_GUEST_MIB`: the guest's memory.
//! * `RINGDISK_SAVE_GUEST_GAP_MS`: how long the guest writes before each save that comes to its end.
//! * `RINGDISK_SAVE_GUEST_FIO_MIB`: how much each of its two writers writes in all, so that it does not end too soon.
//!
//! What is printed at the end is the table of `docs/benchmarks-guests.md`: how long the guest was paused, how long saves took,
//! and how much was taken back into the image.

mod common;

use common::{Server, ringdisk, run, tool_ok};
use guestlab::{GuestKind, GuestOptions, GuestReport, GuestWork, ImageFormat, verify_image};
use serde_json::json;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::mpsc::channel;
use std::time::Duration;

const DISK_BYTES: u64 = 512 << 20;
const STEPS: [&str; 6] = ["stop", "state", "freeze", "publish", "commit", "resume"];

struct Bench {
    dir: tempfile::TempDir,
}

impl Bench {
    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn text(&self, name: &str) -> String {
        self.path(name).display().to_string()
    }

    fn describe_machine(&self, qemu: &[String]) {
        let text = format!("qmp = 'qmp'\ncontrol = 'control'\nstate = 'saved'\nqemu = {}\n", json!(qemu));
        std::fs::write(self.path("vm.toml"), text).unwrap();
    }

    /// A save to its end, after the guest has written for a while.
    fn save(&self, keep: bool) -> Taken {
        std::thread::sleep(Duration::from_millis(asked("RINGDISK_SAVE_GUEST_GAP_MS", 0).into()));
        let (file, layers) = (self.text("vm.toml"), self.mib_of_layers());
        let more: &[&str] = if keep { &["--keep"] } else { &[] };
        let output = run(&[&["save", "--output=json", &file][..], more].concat());
        assert!(output.status.success(), "{}", common::text(&output.stderr));
        let saved: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        let seconds = |name: &str| saved[name].as_f64().unwrap();
        let taken = Taken {
            paused: seconds("paused-seconds"),
            total: seconds("total-seconds"),
            state_mib: saved["state-bytes"].as_f64().unwrap() / f64::from(1 << 20),
            layers_mib: layers,
        };
        eprintln!("keep {keep}: {taken:.2?}");
        taken
    }

    /// What the layers of saves hold, which a save without `--keep` takes back.
    fn mib_of_layers(&self) -> f64 {
        let entries = std::fs::read_dir(self.dir.path()).unwrap().map(|entry| entry.unwrap());
        let layers = entries.filter(|entry| entry.file_name().to_string_lossy().contains(".save-"));
        let blocks: u64 = layers.map(|entry| std::os::unix::fs::MetadataExt::blocks(&entry.metadata().unwrap())).sum();
        blocks as f64 / 2048.0
    }

    /// A save that is killed as a step begins.
    fn killed_save(&self, step: &str) {
        let mut command = ringdisk();
        command.args(["save", &self.text("vm.toml"), "--progress=json"]).stderr(Stdio::piped()).stdout(Stdio::null());
        let mut child = command.spawn().unwrap();
        let lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let begun = lines.map_while(Result::ok).any(|line| line.contains(&format!("\"step\":\"{step}\"")));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(begun, "no step {step}");
    }

    /// The file of the disk that was put on last.
    fn top(&self, mark: &str) -> PathBuf {
        let entries = std::fs::read_dir(self.dir.path()).unwrap().map(|entry| entry.unwrap().path());
        let layers = entries.filter(|path| path.to_string_lossy().contains(mark));
        layers.max_by_key(|path| std::fs::metadata(path).unwrap().modified().unwrap()).expect("a layer")
    }
}

/// The command of the machine whose monitor is `qmp`.
fn command_of(qmp: &Path) -> Vec<String> {
    let processes = std::fs::read_dir("/proc").unwrap().map(|entry| entry.unwrap().path());
    let commands = processes.filter_map(|process| std::fs::read(process.join("cmdline")).ok()).map(|bytes| {
        let words = bytes.split(|byte| *byte == 0).map(|word| String::from_utf8_lossy(word).into_owned());
        words.filter(|word| !word.is_empty()).collect::<Vec<_>>()
    });
    let is_it = |words: &Vec<String>| {
        words.first().is_some_and(|program| program.contains("qemu-system"))
            && words.iter().any(|word| word.contains(&*qmp.to_string_lossy()))
    };
    commands.into_iter().find(is_it).expect("the machine runs")
}

/// What a save took, in seconds, and how much it wrote.
#[derive(Debug)]
struct Taken {
    paused: f64,
    total: f64,
    state_mib: f64,
    layers_mib: f64,
}

/// Says the median of each figure, and the most.
fn say(what: &str, all: &[Taken]) {
    let both = |figure: fn(&Taken) -> f64| {
        let mut sorted: Vec<f64> = all.iter().map(figure).collect();
        sorted.sort_by(f64::total_cmp);
        let (middle, most) = (sorted.get(sorted.len() / 2), sorted.last());
        format!("{:.2}, {:.2}", middle.copied().unwrap_or_default(), most.copied().unwrap_or_default())
    };
    let (paused, total) = (both(|taken| taken.paused), both(|taken| taken.total));
    let (state, layers) = (both(|taken| taken.state_mib), both(|taken| taken.layers_mib));
    println!("| {what} | {} | {paused} | {total} | {state} | {layers} |", all.len());
}

fn asked(variable: &str, usual: u32) -> u32 {
    std::env::var(variable).map_or(usual, |number| number.parse().expect("a number"))
}

fn assert_filled(report: &GuestReport) {
    let [disk] = report.disks.as_slice() else { panic!("{report:?}") };
    assert_eq!((disk.size_bytes, disk.checks, disk.files), (DISK_BYTES, 2, 200), "{disk:?}");
    assert!(disk.fio.is_some(), "{disk:?}");
}

#[test]
#[ignore = "boots a guest; run by cargo xtask ci --only machines"]
fn qemu_on_a_disk_that_is_saved_all_the_time_goes_on_and_comes_back() {
    let rounds = asked("RINGDISK_SAVE_GUEST_ROUNDS", 3) as usize;
    let bench = Bench { dir: tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap() };
    let (disk, socket, qmp) = (bench.text("disk"), bench.path("s"), bench.path("qmp"));
    tool_ok("qemu-img", &["create", "-q", "-f", "qcow2", &disk, &DISK_BYTES.to_string()]);
    let drive = format!("file={disk},format=qcow2,name=root,queues=4,socket={}", socket.display());
    let (control, daemon) = (bench.text("control"), bench.text("daemon"));
    let server = Server::start(&["--control", &control, "--state-dir", &daemon, "--drive", &drive]);
    bench.describe_machine(&[]);

    let (steps, told) = channel();
    let mut options = GuestOptions::new(GuestKind::Qemu, vec![socket]);
    options.memory_mib = asked("RINGDISK_SAVE_GUEST_MIB", 384);
    options.work =
        GuestWork::Fill { measure_seconds: 0, measure_mib: 0, fio_mib: asked("RINGDISK_SAVE_GUEST_FIO_MIB", 48) };
    options.monitor = Some(qmp.clone());
    options.time_limit = Duration::from_secs(1200);
    let stop = std::sync::Arc::clone(&options.stop);
    let guest = std::thread::spawn(move || {
        guestlab::run(&options, &mut |step| {
            eprintln!("guest: {step}");
            let _ = steps.send(step.to_owned());
        })
    });
    // Whatever fails here ends the guest, too.
    let stops = Guard(move || stop.store(true, std::sync::atomic::Ordering::Relaxed));
    loop {
        let step = told.recv().expect("the guest begins to write");
        if step.contains("writing files") {
            break;
        }
    }
    let mut qemu = command_of(&qmp);
    let initramfs = qemu.iter().position(|word| word == "-initrd").unwrap() + 1;
    std::fs::copy(&qemu[initramfs], bench.path("initramfs")).unwrap();
    qemu[initramfs] = bench.text("initramfs");
    let (mut kept, mut committed) = (Vec::new(), Vec::new());
    for round in 0..rounds {
        bench.killed_save(STEPS[(round * 2 + 1) % STEPS.len()]);
        let times = if round % 2 == 0 { &mut kept } else { &mut committed };
        times.push(bench.save(round % 2 == 0));
        bench.killed_save(STEPS[round * 2 % STEPS.len()]);
        committed.push(bench.save(false));
    }
    println!("| save | saves | paused, s | took, s | state, MiB | layers before, MiB |\n|---|---|---|---|---|---|");
    say("`--keep`", &kept);
    say("with a commit", &committed);
    let report = guest.join().unwrap().unwrap_or_else(|error| panic!("{error:#}"));
    assert_filled(&report);
    drop(stops);

    // What the guest wrote since the last save is forgotten.
    bench.describe_machine(&qemu);
    let _ = std::fs::remove_file(&qmp);
    let mut restored = ringdisk();
    restored.args(["restore", "--run", &bench.text("vm.toml")]).stdin(Stdio::null()).stdout(Stdio::piped());
    let mut restored = Ending(restored.spawn().unwrap());
    let lines = BufReader::new(restored.0.stdout.take().unwrap()).lines().map_while(Result::ok);
    let ended = lines.inspect(|line| eprintln!("restored: {line}")).any(|line| {
        assert!(!line.contains("@ringdisk failed"), "{line}");
        line.contains("@ringdisk end")
    });
    assert!(ended, "the machine that came back has not ended its work");
    assert!(restored.0.wait().unwrap().success());
    server.stop();
    verify_image(&bench.top(".restored-"), ImageFormat::Qcow2).unwrap();
}

/// Ends a child of the test, whatever becomes of the test.
struct Ending(std::process::Child);

impl Drop for Ending {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

struct Guard<F: FnMut()>(F);

impl<F: FnMut()> Drop for Guard<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}
