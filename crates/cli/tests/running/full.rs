//! A file system without space under the disks of guests.

use super::{Daemon, Guest, common};
use common::{PATIENCE, at, directory, has_tool, path_str, ringdisk, run, run_ok, tool_ok};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

/// An ext4 of 48 MiB, mounted.
struct SmallFileSystem {
    at: PathBuf,
}

impl SmallFileSystem {
    /// Nothing where none can be mounted.
    fn new(dir: &Path) -> Option<Self> {
        let (image, at) = (dir.join("ext4"), dir.join("small"));
        if !has_tool("mkfs.ext4") || !rustix::process::geteuid().is_root() {
            assert!(std::env::var_os("RINGDISK_REQUIRE_ALL").is_none(), "root and mkfs.ext4 are missing");
            eprintln!("SKIPPED: a file system without space takes root and mkfs.ext4");
            return None;
        }
        run_ok(&["create", "-q", "-f", "raw", path_str(&image), "48M"]);
        std::fs::create_dir(&at).unwrap();
        tool_ok("mkfs.ext4", &["-q", "-m", "0", "-O", "^has_journal", path_str(&image)]);
        if !common::tool("mount", &["-o", "loop", path_str(&image), path_str(&at)]).status.success() {
            assert!(std::env::var_os("RINGDISK_REQUIRE_ALL").is_none(), "no loop device can be mounted");
            eprintln!("SKIPPED: no loop device can be mounted");
            return None;
        }
        Some(Self { at })
    }

    fn free_bytes(&self) -> u64 {
        let found = rustix::fs::statvfs(&self.at).unwrap();
        found.f_bfree * found.f_frsize
    }

    /// Takes all but so many bytes.
    fn leave(&self, bytes: u64) -> PathBuf {
        let ballast = self.at.join("ballast");
        let taken = self.free_bytes().checked_sub(bytes).expect("enough space");
        tool_ok("fallocate", &["-l", &taken.to_string(), path_str(&ballast)]);
        ballast
    }
}

impl Drop for SmallFileSystem {
    fn drop(&mut self) {
        let _ = common::tool("umount", &["--lazy", path_str(&self.at)]);
    }
}

/// `ctl watch`, and its lines.
struct Watch {
    child: Child,
    lines: Receiver<String>,
}

impl Watch {
    /// Begins to watch a disk that holds no requests.
    fn begin(daemon: &Daemon, disk: &str) -> Self {
        let mut command = ringdisk();
        command.args(daemon.arguments(&["watch", "--output=json"])).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let (sender, lines) = channel();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        std::thread::spawn(move || stdout.lines().map_while(Result::ok).try_for_each(|line| sender.send(line)));
        let watch = Self { child, lines };
        let deadline = Instant::now() + PATIENCE;
        loop {
            daemon.ctl(&["resume", disk]);
            if watch.lines.recv_timeout(Duration::from_millis(200)).is_ok() {
                return watch;
            }
            assert!(Instant::now() < deadline, "nothing is told");
        }
    }

    fn wait_for(&self, event: &str) -> String {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let line = self.lines.recv_timeout(left).unwrap_or_else(|_| panic!("no event {event}"));
            if line.contains(event) {
                return line;
            }
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_guest_waits_while_there_is_no_space_and_goes_on_when_there_is() {
    for (format, cache) in [("qcow2", "writeback"), ("qcow2", "none"), ("raw", "writeback"), ("raw", "none")] {
        let dir = directory();
        let Some(small) = SmallFileSystem::new(dir.path()) else { return };
        let image = small.at.join("disk");
        run_ok(&["create", "-q", "-f", format, path_str(&image), "64M"]);
        let ballast = small.leave(4 << 20);
        let drive = format!(
            "file={},format={format},name=disk,socket={},cache={cache},on-no-space=hold",
            image.display(),
            at(&dir, "disk.sock").display()
        );
        let daemon = Daemon::start_in(dir, &["--drive", &drive]);
        let watch = Watch::begin(&daemon, "disk");
        let guest = Guest::begin(&daemon.path("disk.sock"));
        let held = watch.wait_for("disk-held");
        assert!(held.contains("ctl resume disk"), "{held}");
        assert!(daemon.json(&["show", "disk"])["held"]["requests"].as_u64().unwrap() > 0);
        // There still is no space.
        daemon.ctl(&["resume", "disk"]);
        watch.wait_for("disk-held");
        std::fs::remove_file(&ballast).unwrap();
        daemon.ctl(&["resume", "disk"]);
        daemon.wait_for_requests("disk", 1000);
        assert!(daemon.json(&["show", "disk"])["held"].is_null());
        assert_eq!(daemon.stats("disk")["counters"]["failed"], 0, "{format} {cache}");
        guest.end();
        let set = daemon.json(&["set", "disk", "on-no-space=report"]);
        assert_eq!(set["options"]["on-no-space"], "report");
        let files = daemon.end();
        assert!(run(&["check", "-f", format, path_str(&image)]).status.code().is_some_and(|code| code != 2));
        drop((small, files));
    }
}
