//! How long a guest takes to copy a tree: on a disk with `snapshot=on`, on a qcow2 overlay of ours, and on one of QEMU's.
//!
//! A User Mode Linux guest makes the tree on a raw image once. Then each side serves that image under an overlay of its own,
//! in turn, and a guest copies the tree from the disk to the disk and compares the two. At the end QEMU does the same on a
//! disk with `snapshot=on`. The image is unchanged.
//!
//! For figures, on a quiet machine and built with `--release`, after `cargo xtask ci --only guests` has fetched its kernel:
//! `RINGDISK_TREE_MIB=300 RINGDISK_TREE_ROUNDS=3 cargo test --release -p ringdisk --test tree_copy -- --ignored --nocapture`.
//! `RINGDISK_TREE_DIRECTORY` says where the files lie; by default in the build directory.

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
    Qemu,
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
            Side::Qcow2 => {
                let overlay = self.overlay();
                serve(format!("file={},format=qcow2,cache=unsafe,socket={}", overlay.display(), socket.display()))
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
    if kind == GuestKind::Uml {
        options.memory_mib = 256;
    }
    options.time_limit = Duration::from_secs(1200);
    let report =
        guestlab::run(&options, &mut |step| eprintln!("guest: {step}")).unwrap_or_else(|error| panic!("{error:#}"));
    let [disk] = report.disks.as_slice() else { panic!("{report:?}") };
    disk.facts.get("copy-ms").map(|ms| ms.parse::<f64>().unwrap() / 1000.0)
}

fn median(samples: &[f64]) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[sorted.len() / 2]
}

#[test]
#[ignore = "boots guests; run by cargo xtask ci"]
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

    let mut sides = vec![(Side::Scratch, Vec::new()), (Side::Qcow2, Vec::new())];
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
            let (server, _qemu) = files.serve(*side, &socket);
            let took = guest(GuestKind::Uml, &socket, GuestWork::CopyTree).expect("the guest says how long it took");
            server.into_iter().for_each(Server::stop);
            println!("{side:?}: {took:.2} s");
            samples.push(took);
        }
    }
    let _ = std::fs::remove_file(&socket);
    let (server, _) = files.serve(Side::Scratch, &socket);
    let took = guest(GuestKind::Qemu, &socket, GuestWork::CopyTree).expect("the guest says how long it took");
    println!("QEMU on {:?}: {took:.2} s", Side::Scratch);
    server.into_iter().for_each(Server::stop);
    assert_eq!(tool_ok("sha256sum", &[path_str(&base)]), before, "the image was written");
    sides.sort_by_key(|(side, _)| *side as u8);
    let scratch = median(&sides[0].1);
    println!("A tree of {mib} MiB, {rounds} rounds, medians: scratch {scratch:.2} s.");
    for (side, samples) in &sides[1..] {
        let other = median(samples);
        println!("{side:?}: {other:.2} s; scratch takes {:.2} of it.", scratch / other);
    }
}
