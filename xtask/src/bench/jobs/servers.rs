//! A server of one disk, and how each side does each job.

use super::super::measure::{SERVER_CORE, Tools, pinned};
use super::Job;
use super::events::{Events, JobEnd};
use super::qmp::Qmp;
use crate::command::Program;
use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use std::fmt;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// How long a server may take to start or to end.
const PATIENCE: Duration = Duration::from_secs(30);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    Ringdisk,
    Qemu,
}

impl Side {
    pub(super) const ALL: [Self; 2] = [Self::Ringdisk, Self::Qemu];
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ringdisk => "Ringdisk",
            Self::Qemu => "qemu-storage-daemon",
        })
    }
}

/// A running server of `disk.qcow2` in a directory, past the page cache.
pub(super) struct Server {
    side: Side,
    directory: PathBuf,
    /// The program whose `ctl` steers Ringdisk.
    ringdisk: PathBuf,
    child: Child,
    qmp: Option<Qmp>,
    events: Option<Events>,
    /// The server of a slow target, if one was started.
    target: Option<Child>,
}

impl Server {
    pub(super) fn start(side: Side, tools: &Tools, directory: &Path) -> Result<Self> {
        let at = |name: &str| directory.join(name).display().to_string();
        let mut command = match side {
            Side::Ringdisk => {
                let mut command = pinned(SERVER_CORE, tools.ringdisk());
                let drive =
                    format!("file={},format=qcow2,cache=none,name=disk,socket={}", at("disk.qcow2"), at("disk"));
                command.args(["serve", "--reactors", "1", "--queues", "1", "--drive", &drive]);
                command.args(["--control", &at("control"), "--state-dir", &at("state")]);
                command
            }
            Side::Qemu => {
                let mut command = pinned(SERVER_CORE, Path::new("qemu-storage-daemon"));
                command.args(["--chardev", &format!("socket,id=monitor,path={},server=on,wait=off", at("control"))]);
                // Without a thread of its own for the disk: version 10.0 ends with an assertion when a layer is put on
                // such a disk under load.
                command.args(["--monitor", "chardev=monitor"]);
                command.args(["--blockdev", &node("disk", &at("disk.qcow2")).to_string()]);
                let address = format!("addr.type=unix,addr.path={}", at("disk"));
                let export = format!("vhost-user-blk,id=export,node-name=disk,writable=on,{address}");
                command.args(["--export", &export]);
                command
            }
        };
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let child = command.spawn().with_context(|| format!("cannot run {command:?}"))?;
        let (directory, ringdisk) = (directory.to_owned(), tools.ringdisk().to_owned());
        let mut server = Self { side, directory, ringdisk, child, qmp: None, events: None, target: None };
        server.wait()?;
        Ok(server)
    }

    fn wait(&mut self) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        while !(self.at("disk").exists() && self.at("control").exists()) {
            if let Some(status) = self.child.try_wait()? {
                let said = self.said();
                bail!("{} ended ({status}) before it served: {said}", self.side);
            }
            ensure!(Instant::now() < deadline, "{} did not begin to serve", self.side);
            std::thread::sleep(Duration::from_millis(5));
        }
        match self.side {
            Side::Ringdisk => self.events = Some(Events::begin(self.ctl_command(&["watch"]))?),
            Side::Qemu => self.qmp = Some(Qmp::connect(&self.at("control"))?),
        }
        Ok(())
    }

    fn at(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    pub(super) fn socket(&self) -> PathBuf {
        self.at("disk")
    }

    fn ctl_command(&self, call: &[&str]) -> Command {
        let mut command = Command::new(&self.ringdisk);
        command.arg("ctl").arg("--control").arg(self.at("control")).arg("--output=json").args(call);
        command
    }

    fn ctl(&self, call: &[&str]) -> Result<Value> {
        super::json_of(self.ctl_command(call))
    }

    fn qmp(&mut self) -> Result<&mut Qmp> {
        self.qmp.as_mut().context("there is no monitor")
    }

    /// Starts an NBD server as large as the disk that takes 1 MB/s.
    pub(super) fn start_slow_target(&mut self) -> Result<()> {
        let (socket, size) = (self.at("slow"), self.size_bytes()?.to_string());
        let mut command = Command::new("nbdkit");
        command.arg("-f").arg("-U").arg(&socket).args(["--filter=rate", "memory", &size, "rate=8M"]);
        self.target =
            Some(command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().context("nbdkit does not start")?);
        let deadline = Instant::now() + PATIENCE;
        while !socket.exists() {
            ensure!(Instant::now() < deadline, "nbdkit does not listen");
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    fn slow_target(&self) -> String {
        format!("nbd+unix:///?socket={}", self.at("slow").display())
    }

    /// Puts an empty layer on the disk.
    pub(super) fn snapshot(&mut self) -> Result<()> {
        let overlay = self.at("overlay.qcow2").display().to_string();
        match self.side {
            Side::Ringdisk => self.ctl(&["snapshot", "disk", &overlay]).map(drop),
            Side::Qemu => {
                let base = self.at("disk.qcow2").display().to_string();
                let create = Program::new("qemu-img").args(["create", "-q", "-u", "-f", "qcow2", "-F", "qcow2", "-b"]);
                create.args([&base, &overlay]).args([self.size_bytes()?.to_string()]).output_text()?;
                let mut overlay_node = node("overlay", &overlay);
                overlay_node["backing"] = Value::Null;
                let qmp = self.qmp()?;
                qmp.call("blockdev-add", &overlay_node)?;
                qmp.call("blockdev-snapshot", &json!({ "node": "disk", "overlay": "overlay" })).map(drop)
            }
        }
    }

    fn size_bytes(&self) -> Result<u64> {
        let info = Program::new("qemu-img").args(["info", "-U", "--output=json"]).args([self.at("disk.qcow2")]);
        let info: Value = serde_json::from_str(&info.output_text()?)?;
        info["virtual-size"].as_u64().context("qemu-img says no size")
    }

    /// Whether it came to its end in time. What did not is cancelled.
    pub(super) fn carry_out(&mut self, job: Job, deadline: Instant) -> Result<bool> {
        if matches!(job, Job::Snapshot | Job::LargeSnapshot) {
            return self.snapshot().map(|()| true);
        }
        match self.side {
            Side::Ringdisk => self.carry_out_by_ctl(job, deadline),
            Side::Qemu => self.carry_out_by_qmp(job, deadline),
        }
    }

    fn carry_out_by_ctl(&self, job: Job, deadline: Instant) -> Result<bool> {
        let (target, slow) = (self.at("target.qcow2").display().to_string(), self.slow_target());
        let started = match job {
            Job::Commit => self.ctl(&["commit", "disk", "--no-wait"])?,
            Job::SlowBackup => self.ctl(&["backup", "disk", &slow, "--existing", "--format", "raw", "--no-wait"])?,
            _ => self.ctl(&[job.name(), "disk", &target, "--no-wait"])?,
        };
        let id = started["id"].as_u64().context("ringdisk names no job")?;
        let events = self.events.as_ref().context("nobody watches the events")?;
        match events.wait_for(id, deadline)? {
            Some(JobEnd::Done) => Ok(true),
            Some(JobEnd::Failed(message)) => bail!("the job failed: {message}"),
            None => self.ctl(&["cancel", &id.to_string()]).map(|_| false),
        }
    }

    fn carry_out_by_qmp(&mut self, job: Job, deadline: Instant) -> Result<bool> {
        let size_bytes = self.size_bytes()?;
        let target = self.at("target.qcow2").display().to_string();
        if job == Job::SlowBackup {
            let server = json!({ "type": "unix", "path": self.at("slow") });
            let raw = json!({ "driver": "nbd", "server": server });
            self.qmp()?.call("blockdev-add", &json!({ "driver": "raw", "node-name": "target", "file": raw }))?;
        } else if job != Job::Commit {
            let create = Program::new("qemu-img").args(["create", "-q", "-f", "qcow2"]);
            create.args([&target, &size_bytes.to_string()]).output_text()?;
            self.qmp()?.call("blockdev-add", &node("target", &target))?;
        }
        let (command, arguments) = match job {
            Job::Commit => ("block-commit", json!({ "job-id": "job", "device": "overlay" })),
            Job::Mirror => (
                "blockdev-mirror",
                json!({ "job-id": "job", "device": "disk", "target": "target", "sync": "full", "copy-mode": "write-blocking" }),
            ),
            Job::Backup | Job::SlowBackup | Job::Snapshot | Job::LargeSnapshot => {
                ("blockdev-backup", json!({ "job-id": "job", "device": "disk", "target": "target", "sync": "full" }))
            }
        };
        let qmp = self.qmp()?;
        qmp.call(command, &arguments)?;
        let ends = ["BLOCK_JOB_COMPLETED", "BLOCK_JOB_CANCELLED"];
        let mut said = qmp.wait_for("job", &["BLOCK_JOB_READY", ends[0], ends[1]], deadline)?;
        if said.as_ref().is_some_and(|said| said["event"] == "BLOCK_JOB_READY") {
            qmp.call("block-job-complete", &json!({ "device": "job" }))?;
            said = qmp.wait_for("job", &ends, deadline)?;
        }
        match said {
            Some(said) if said["data"]["error"].is_null() => Ok(true),
            Some(said) => bail!("the job failed: {said}"),
            None => {
                qmp.call("block-job-cancel", &json!({ "device": "job", "force": true }))?;
                Ok(false)
            }
        }
    }

    fn said(&mut self) -> String {
        let mut said = String::new();
        if let Some(mut stderr) = self.child.stderr.take() {
            let _ = stderr.read_to_string(&mut said);
        }
        said
    }

    /// Asks it to end, waits, and gives back what it said.
    pub(super) fn end(&mut self) -> String {
        let pid = rustix::process::Pid::from_child(&self.child);
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        let deadline = Instant::now() + PATIENCE;
        while matches!(self.child.try_wait(), Ok(None)) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(5));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
        self.said()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(target) = &mut self.target {
            let _ = target.kill();
            let _ = target.wait();
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A qcow2 image past the page cache, as QMP takes it.
fn node(name: &str, path: &str) -> Value {
    let cache = json!({ "direct": true });
    let file = json!({ "driver": "file", "filename": path, "aio": "io_uring", "cache": cache });
    json!({ "driver": "qcow2", "node-name": name, "cache": cache, "discard": "unmap", "file": file })
}
