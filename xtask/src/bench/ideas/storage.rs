//! The files for measuring ideas, and one measurement of a cell.

use super::cells::{Cell, Server, Storage};
use super::{BenchArguments, WARM_UP_SECONDS};
use crate::bench::measure::{escaped, json_of, with_server};
use crate::command::Program;
use crate::workspace;
use anyhow::{Context, Result};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

const FILE_BYTES: usize = 512 << 20;
const NULL: &str = "format=null,size=4G";
const SLOW: &str = "format=null,size=4G,filter=delay:ms=1:request-us=10:bandwidth=200M";
/// The server on one processor, the client on another.
const SERVER_CORE: &str = "0";
const CLIENT_CORE: &str = "1";

/// The storages: made on first use, and removed on drop.
pub(super) struct Storages {
    tmpfs: tempfile::TempDir,
    disk: tempfile::TempDir,
    looped: OnceLock<Option<LoopDevice>>,
}

impl Storages {
    pub(super) fn new(arguments: &BenchArguments) -> Result<Self> {
        let disk = arguments.directory.clone().unwrap_or_else(workspace::target);
        Ok(Self {
            tmpfs: tempfile::tempdir_in("/dev/shm")?,
            disk: tempfile::Builder::new().prefix("ringdisk-bench-").tempdir_in(disk)?,
            looped: OnceLock::new(),
        })
    }

    /// Returns a directory for sockets.
    pub(super) fn sockets(&self) -> &Path {
        self.tmpfs.path()
    }

    /// Returns the drive options of each of a cell's sides; `None` if this machine has no such storage.
    pub(super) fn drives(&self, cell: &Cell) -> Result<Option<Vec<String>>> {
        let Some(base) = self.base(cell.storage)? else { return Ok(None) };
        let joined = |drive: &str| if drive.is_empty() { base.clone() } else { format!("{base},{drive}") };
        let mut drives: Vec<String> = cell.sides.iter().map(|side| joined(&side.drive)).collect();
        if cell.two_disks {
            let path = file_of(&base).context("a second disk has a file, too")?;
            let beside = format!(",server.beside={}", self.beside(path, 1)?);
            drives.iter_mut().for_each(|drive| drive.push_str(&beside));
        }
        Ok(Some(drives))
    }

    /// Returns the options of a disk on `storage`.
    pub(super) fn base(&self, storage: Storage) -> Result<Option<String>> {
        let raw = |path: &Path| format!("file={},format=raw", escaped(path));
        Ok(match storage {
            Storage::Null => Some(NULL.to_owned()),
            Storage::Slow => Some(SLOW.to_owned()),
            Storage::Tmpfs => Some(raw(&filled(self.tmpfs.path())?)),
            Storage::Disk => Some(raw(&filled(self.disk.path())?)),
            Storage::Loop => {
                let file = filled(self.tmpfs.path())?;
                self.looped.get_or_init(|| LoopDevice::over(&file)).as_ref().map(|device| raw(&device.0))
            }
        })
    }

    /// Makes a copy of a file, for one more disk.
    pub(super) fn beside(&self, path: &str, number: usize) -> Result<String> {
        let copy = format!("{path}-{number}");
        if !Path::new(&copy).exists() {
            std::fs::copy(path, &copy).with_context(|| format!("cannot write {copy}"))?;
        }
        Ok(copy)
    }

    pub(super) fn why_not(&self, cell: &Cell) -> &'static str {
        match cell.storage {
            Storage::Loop => "this machine gives no loop device (root is needed, and losetup)",
            _ => "this machine has no such storage",
        }
    }
}

/// Returns the file among these drive options.
pub(super) fn file_of(drive: &str) -> Option<&str> {
    drive.strip_prefix("file=")?.split(",format=").next()
}

/// Makes a file without holes.
fn filled(directory: &Path) -> Result<PathBuf> {
    let file = directory.join("disk.raw");
    if !file.exists() {
        std::fs::write(&file, vec![7; FILE_BYTES]).with_context(|| format!("cannot write {}", file.display()))?;
        std::fs::File::open(&file)?.sync_all()?;
    }
    Ok(file)
}

struct LoopDevice(PathBuf);

impl LoopDevice {
    fn over(file: &Path) -> Option<Self> {
        let made = Program::new("losetup").args(["--find", "--show"]).args([file]).output_text();
        made.ok().map(|path| Self(PathBuf::from(path.trim())))
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        Program::new("losetup").args(["--detach"]).args([&self.0]).succeeds();
    }
}

/// Measures a cell's sides in turn. Returns the report of `ringdisk bench --compare`.
pub(super) fn compare(cell: &Cell, drives: &[String], ringdisk: &Path, arguments: &BenchArguments) -> Result<Value> {
    match cell.server {
        Server::Within => {
            let targets = cell.sides.iter().zip(drives).map(|(side, drive)| {
                let how = if side.how.is_empty() { String::new() } else { format!(",{}", side.how) };
                format!("{}=serve:{drive}{how}", side.name)
            });
            json_of(client(cell, Command::new(ringdisk), targets.collect(), &[], arguments))
        }
        Server::Apart => {
            let drive = drives.first().context("a cell has sides")?;
            let socket = std::env::temp_dir().join(format!("ringdisk-ideas-{}.sock", std::process::id()));
            let mut server = pinned(SERVER_CORE, ringdisk);
            server.args(["serve", "--reactors", "1", "--queues", &cell.queues.to_string(), "--drive", drive]);
            server.arg("--socket").arg(&socket);
            with_server(server, &socket, |pid| {
                let target = |name, how| format!("{name}=socket:{},{how}", socket.display());
                let targets = cell.sides.iter().map(|side| target(side.name, side.how)).collect();
                let pids: Vec<_> = cell.sides.iter().map(|side| format!("{}:{pid}", side.name)).collect();
                json_of(client(cell, pinned(CLIENT_CORE, ringdisk), targets, &pids, arguments))
            })
        }
    }
}

fn pinned(core: &str, program: &Path) -> Command {
    let mut command = Command::new("taskset");
    command.args(["--cpu-list", core]).arg(program);
    command
}

fn client(
    cell: &Cell,
    mut command: Command,
    targets: Vec<String>,
    servers: &[String],
    arguments: &BenchArguments,
) -> Command {
    command.args(["bench", "--destroy", "--output", "json", "--rw", cell.rw]);
    for (key, value) in [
        ("--bs", cell.block_bytes.to_string()),
        ("--queues", cell.queues.to_string()),
        ("--depth", cell.depth.to_string()),
        ("--pairs", arguments.pairs.to_string()),
        ("--time", arguments.seconds.to_string()),
        ("--warmup", WARM_UP_SECONDS.to_string()),
    ] {
        command.args([key, &value]);
    }
    if let Some(percent) = cell.read_percent {
        command.args(["--rwmixread", &percent.to_string()]);
    }
    if cell.sleeps {
        command.args(["--poll-max-us", "0"]);
    }
    for server in servers {
        command.args(["--server-pid", server]);
    }
    command.arg("--compare").args(targets);
    command
}
