//! A daemon with a record, one disk, and guests that check each byte that they read.

#![allow(dead_code, reason = "each test program uses a part of it")]

use crate::common::{Server, at, directory, path_str, ringdisk, run_fails, run_ok, tool_ok};
use block::{Disk, DiskIo, Op, OpFlags, ReactorCtx, ReactorHandle, Task};
use driver::{Driver, DriverOptions};
use engine::{Reactor, ReactorConfig, ReactorThread};
use serde_json::Value;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::rc::Rc;
use std::sync::Arc;
use tempfile::TempDir;
use testkit::{HistoryLoad, RunningLoad, SectorHistory};

pub(crate) const SIZE: u64 = 16 << 20;

/// A daemon with a record, one disk, and guests at its socket.
pub(crate) struct Bench {
    dir: TempDir,
    pub(crate) history: Arc<SectorHistory>,
    reactors: Vec<ReactorThread>,
}

impl Bench {
    pub(crate) fn new() -> Self {
        Self::with_clusters("64k")
    }

    /// With an image of another cluster size.
    pub(crate) fn with_clusters(size: &str) -> Self {
        let dir = directory();
        let (image, clusters) = (at(&dir, "base.qcow2"), format!("cluster_size={size}"));
        run_ok(&["create", "-q", "-f", "qcow2", "-o", &clusters, path_str(&image), &SIZE.to_string()]);
        let spawn = |index| Reactor::spawn(ReactorConfig::default().with(|config| config.name = format!("c{index}")));
        let reactors = (0..2).map(|index| spawn(index).unwrap()).collect();
        Self { dir, history: Arc::new(SectorHistory::new((SIZE / 512) as usize)), reactors }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        at(&self.dir, name)
    }

    pub(crate) fn serve(&self) -> Server {
        self.serve_with(|_| ())
    }

    /// Starts the daemon by a command that `change` has changed.
    pub(crate) fn serve_with(&self, change: impl FnOnce(&mut Command)) -> Server {
        let (control, state, drive) = (self.path("control"), self.path("state"), self.path("base.qcow2"));
        let drive = format!("file={},name=root,queues=2,socket={}", drive.display(), self.path("s").display());
        let arguments = ["--control", path_str(&control), "--reactors", "2", "--state-dir", path_str(&state)];
        let mut command = ringdisk();
        command.arg("serve").args(arguments).args(["--drive", &drive]);
        change(&mut command);
        Server::start_command(command)
    }

    pub(crate) fn arguments(&self, call: &[&str]) -> Vec<String> {
        let control = self.path("control");
        ["ctl", "--control", path_str(&control)].iter().chain(call).map(|word| (*word).to_owned()).collect()
    }

    pub(crate) fn ctl(&self, call: &[&str]) -> String {
        let arguments = self.arguments(call);
        run_ok(&arguments.iter().map(String::as_str).collect::<Vec<_>>())
    }

    pub(crate) fn fails(&self, call: &[&str]) -> String {
        let arguments = self.arguments(call);
        run_fails(1, &arguments.iter().map(String::as_str).collect::<Vec<_>>())
    }

    pub(crate) fn json(&self, call: &[&str]) -> Value {
        serde_json::from_str(&self.ctl(&[call, &["--output=json"]].concat())).expect("JSON")
    }

    pub(crate) fn guests(&self, seed: u64, write_percent: u64) -> RunningLoad {
        let load = HistoryLoad { seed, write_percent, ..HistoryLoad::default() };
        self.guests_with(&load)
    }

    pub(crate) fn guests_with(&self, load: &HistoryLoad) -> RunningLoad {
        let options = DriverOptions::default().with(|options| options.queues = 2);
        let disk: Arc<dyn Disk> = Arc::new(Driver::connect(self.path("s"), options).unwrap());
        let handles: Vec<Arc<dyn ReactorHandle>> = self.reactors.iter().map(ReactorThread::handle).collect();
        load.start(&disk, &handles, &self.history)
    }

    /// Discards these sectors, which then read as zeros.
    pub(crate) fn discard(&self, sectors: Range<u64>) {
        let options = DriverOptions::default().with(|options| options.queues = 2);
        let disk: Arc<dyn Disk> = Arc::new(Driver::connect(self.path("s"), options).unwrap());
        let (sender, done) = std::sync::mpsc::channel();
        let (history, its) = (Arc::clone(&self.history), Arc::clone(&disk));
        let job = move |ctx: &Rc<dyn ReactorCtx>| {
            let io = DiskIo::open(its.as_ref(), ctx).unwrap();
            ctx.spawn(Task::new(async move {
                // A driver's requests are not as long as a disk may be.
                for first in sectors.step_by(2048) {
                    let write = history.begin_zeroes(first, 2048);
                    let (offset, length) = (first * 512, 2048 * 512);
                    let op = Op::WriteZeroes { offset, length, may_unmap: true, flags: OpFlags::NONE };
                    io.run(op).await.unwrap();
                    history.end_write(write);
                }
                drop((io, its));
                sender.send(()).unwrap();
            }));
        };
        self.reactors[0].handle().run(Box::new(job)).unwrap();
        done.recv().unwrap();
    }

    pub(crate) fn layers(&self) -> usize {
        self.json(&["show", "root"])["layers"].as_array().expect("a list").len()
    }

    pub(crate) fn is_qcow2(&self, image: &Path) -> bool {
        std::fs::read(image).expect("the image").starts_with(b"QFI\xfb")
    }

    /// What another program reads from an image, byte for byte.
    pub(crate) fn as_qemu_sees(&self, image: &Path) -> Vec<u8> {
        let raw = self.path("seen.raw");
        let format = if self.is_qcow2(image) { "qcow2" } else { "raw" };
        tool_ok("qemu-img", &["convert", "-f", format, "-O", "raw", path_str(image), path_str(&raw)]);
        std::fs::read(raw).expect("the copy")
    }

    /// The top of the disk, as the record of the daemon has it.
    pub(crate) fn recorded_top(&self) -> PathBuf {
        let record: Value = serde_json::from_slice(&std::fs::read(self.path("state/disks.json")).unwrap()).unwrap();
        record["disks"][0]["options"]["file"].as_str().expect("a file").into()
    }
}
