//! How long a guest takes to copy a tree: on a disk with `snapshot=on`, on a qcow2 overlay of ours, and on one of QEMU's.
//! Also on a raw image, with nothing below: what a copy costs in any case.
//!
//! A User Mode Linux guest makes the tree on a raw image once. Then each side serves that image under an overlay of its own,
//! in turn, and a guest copies the tree from the disk to the disk and compares the two. At the end QEMU does the same on a
//! disk with `snapshot=on`. The image is unchanged.
//!
//! For figures, on a quiet machine and built with `--release`, after `cargo xtask ci --only guests` has fetched its kernel:
//! `RINGDISK_TREE_MIB=300 RINGDISK_TREE_ROUNDS=3 cargo test --release -p ringdisk --test tree_copy -- --ignored --nocapture`.
//! `RINGDISK_TREE_DIRECTORY` says where the files lie; by default in the build directory. With `RINGDISK_TREE_KVM=1` the
//! guests are QEMU's, with KVM, which spend less time on themselves. What is printed at the end is the table of
//! `docs/benchmarks-guests.md`.

mod common;

use common::{PATIENCE, Server, has_tool, path_str, tool_ok};
use guestlab::{GuestKind, GuestOptions, GuestWork};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const QSD: &str = "qemu-storage-daemon";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Side {
    Scratch,
    Qcow2,
    /// Durable when the guest flushes.
    Durable,
    Qemu,
    /// A copy of the image, written to itself.
    Raw,
}

impl Side {
    fn name(self) -> &'static str {
        match self {
            Self::Scratch => "`snapshot=on`",
            Self::Qcow2 => "our qcow2 overlay, `cache=unsafe`",
            Self::Durable => "our qcow2 overlay, as it is by default",
            Self::Qemu => "QEMU's qcow2 overlay, never flushed",
            Self::Raw => "a raw image without an overlay, `cache=unsafe`",
        }
    }
}

fn asked(variable: &str, default: u32) -> u32 {
    std::env::var(variable).map_or(default, |number| number.parse().expect("a number"))
}

/// Ends QEMU's daemon, whatever becomes of the test.
struct Ending(Child);

impl Drop for Ending {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

struct Files {
    directory: tempfile::TempDir,
}

impl Files {
    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn overlay(&self) -> PathBuf {
        let overlay = self.path("overlay.qcow2");
        let _ = std::fs::remove_file(&overlay);
        let base = self.path("base.raw");
        tool_ok("qemu-img", &["create", "-q", "-f", "qcow2", "-F", "raw", "-b", path_str(&base), path_str(&overlay)]);
        overlay
    }

    fn serve(&self, side: Side, socket: &Path) -> (Option<Server>, Option<Ending>) {
        let base = self.path("base.raw");
        let serve = |drive: String| {
            let mut command = common::ringdisk();
            let drive = format!("{drive},guest-memory=any");
            command.env("TMPDIR", self.directory.path()).args(["serve", "--drive", &drive]);
            (Some(Server::start_command(command)), None)
        };
        match side {
            Side::Scratch => {
                serve(format!("file={},format=raw,snapshot=on,socket={}", base.display(), socket.display()))
            }
            Side::Qcow2 | Side::Durable => {
                let overlay = self.overlay();
                let cache = if side == Side::Qcow2 { ",cache=unsafe" } else { "" };
                serve(format!("file={},format=qcow2{cache},socket={}", overlay.display(), socket.display()))
            }
            Side::Raw => {
                let copy = self.path("copy.raw");
                tool_ok("cp", &["--sparse=always", path_str(&base), path_str(&copy)]);
                serve(format!("file={},format=raw,cache=unsafe,socket={}", copy.display(), socket.display()))
            }
            Side::Qemu => {
                let address = format!("addr.type=unix,addr.path={}", socket.display());
                let nodes = [
                    format!("driver=file,node-name=below,filename={},read-only=on,aio=io_uring", base.display()),
                    "driver=raw,node-name=base,file=below,read-only=on".to_owned(),
                    format!("driver=file,node-name=file,filename={},cache.no-flush=on", self.overlay().display()),
                    "driver=qcow2,node-name=disk,file=file,backing=base,cache.no-flush=on".to_owned(),
                ];
                let mut command = Command::new(QSD);
                command.args(["--object", "iothread,id=thread"]);
                for node in &nodes {
                    command.args(["--blockdev", node]);
                }
                let export = format!("vhost-user-blk,id=export,node-name=disk,writable=on,iothread=thread,{address}");
                let child = command.args(["--export", &export]).stdin(Stdio::null()).spawn().unwrap();
                let begun = Instant::now();
                while !socket.exists() {
                    assert!(begun.elapsed() < PATIENCE, "{QSD} makes no socket");
                    std::thread::sleep(Duration::from_millis(20));
                }
                (None, Some(Ending(child)))
            }
        }
    }
}

/// Runs a guest; returns how long its copy took.
fn guest(kind: GuestKind, socket: &Path, work: GuestWork) -> Option<f64> {
    let mut options = GuestOptions::new(kind, vec![socket.to_owned()]);
    options.work = work;
    (options.queues, options.kvm) = (1, with_kvm());
    if kind == GuestKind::Uml {
        options.memory_mib = 256;
    }
    options.time_limit = Duration::from_secs(1200);
    let report =
        guestlab::run(&options, &mut |step| eprintln!("guest: {step}")).unwrap_or_else(|error| panic!("{error:#}"));
    let [disk] = report.disks.as_slice() else { panic!("{report:?}") };
    disk.facts.get("copy-ms").map(|ms| ms.parse::<f64>().unwrap() / 1000.0)
}

fn with_kvm() -> bool {
    asked("RINGDISK_TREE_KVM", 0) != 0
}

/// The processor time that a server has used so far, in seconds.
fn server_seconds(pid: u32) -> f64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    // Behind the program's name, which may have spaces.
    let words: Vec<&str> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
    let ticks: u64 = words[11..13].iter().map(|ticks| ticks.parse::<u64>().unwrap()).sum();
    ticks as f64 / 100.0
}

fn median(samples: impl Iterator<Item = f64>) -> f64 {
    let mut sorted: Vec<f64> = samples.collect();
    sorted.sort_by(f64::total_cmp);
    sorted[sorted.len() / 2]
}

/// Prints the table. Each sample is a copy's time, and its server's.
fn say(sides: &[(Side, Vec<[f64; 2]>)]) {
    println!(
        "| the guest's disk | seconds | `snapshot=on` to it | processor time of the server, s |\n|---|---|---|---|"
    );
    let middle = |samples: &[[f64; 2]], which: usize| median(samples.iter().map(|both| both[which]));
    let scratch = middle(&sides[0].1, 0);
    for (side, samples) in sides {
        let times = samples.iter().map(|[took, _]| *took);
        let (least, most) = (times.clone().fold(f64::MAX, f64::min), times.fold(0.0, f64::max));
        let (name, took, used) = (side.name(), middle(samples, 0), middle(samples, 1));
        println!("| {name} | {took:.2} ({least:.2} to {most:.2}) | {:.2} | {used:.2} |", scratch / took);
    }
}

#[test]
#[ignore = "boots guests; run by cargo xtask ci --only machines"]
fn a_guest_copies_a_tree_on_each_kind_of_overlay() {
    let (mib, rounds) = (asked("RINGDISK_TREE_MIB", 24), asked("RINGDISK_TREE_ROUNDS", 1));
    let parent = std::env::var("RINGDISK_TREE_DIRECTORY").unwrap_or_else(|_| env!("CARGO_TARGET_TMPDIR").to_owned());
    let files = Files { directory: tempfile::tempdir_in(parent).unwrap() };
    let (base, socket) = (files.path("base.raw"), files.path("s"));
    std::fs::File::create(&base).unwrap().set_len(u64::from(mib * 2 + mib / 2 + 128) << 20).unwrap();
    let making =
        Server::start(&["--drive", &format!("file={},format=raw,socket={}", base.display(), socket.display())]);
    guest(GuestKind::Uml, &socket, GuestWork::MakeTree { mib });
    making.stop();
    let before = tool_ok("sha256sum", &[path_str(&base)]);

    let own = [Side::Scratch, Side::Qcow2, Side::Durable, Side::Raw];
    let mut sides: Vec<(Side, Vec<[f64; 2]>)> = own.map(|side| (side, Vec::new())).into();
    if has_tool(QSD) {
        sides.push((Side::Qemu, Vec::new()));
    }
    for round in 0..rounds {
        // In turn, and each second time the other way round.
        sides.reverse();
        if round == 0 {
            sides.reverse();
        }
        for (side, samples) in &mut sides {
            let _ = std::fs::remove_file(&socket);
            let (server, qemu) = files.serve(*side, &socket);
            let kind = if with_kvm() { GuestKind::Qemu } else { GuestKind::Uml };
            let took = guest(kind, &socket, GuestWork::CopyTree).expect("the guest says how long it took");
            let pids = server.iter().map(Server::pid).chain(qemu.iter().map(|qemu| qemu.0.id()));
            let used = pids.map(server_seconds).sum();
            server.into_iter().for_each(Server::stop);
            println!("{side:?}: {took:.2} s, and {used:.2} s of the server's");
            samples.push([took, used]);
        }
    }
    let _ = std::fs::remove_file(&socket);
    let (server, _) = files.serve(Side::Scratch, &socket);
    let took = guest(GuestKind::Qemu, &socket, GuestWork::CopyTree).expect("the guest says how long it took");
    println!("QEMU on {:?}: {took:.2} s", Side::Scratch);
    server.into_iter().for_each(Server::stop);
    assert_eq!(tool_ok("sha256sum", &[path_str(&base)]), before, "the image was written");
    sides.sort_by_key(|(side, _)| *side as u8);
    println!("A tree of {mib} MiB, {rounds} rounds.\n");
    say(&sides);
}
