//! One measurement: a server and its client, or fio.

use super::cells::{Access, Cell, Storage};
use crate::command::Program;
use crate::packages;
use crate::workspace;
use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Where each side runs: servers and fio on one core, the client on the other.
const SERVER_CORE: &str = "0";
const CLIENT_CORE: &str = "1";
/// How long a server may take to start or to end.
const PATIENCE: Duration = Duration::from_secs(30);
/// Before anything is counted.
const WARM_UP_SECONDS: f64 = 0.3;
/// A disk that takes longer than this for one request in a hundred, one at a time, is in one of its slow spells.
const SLOW_SPELL_P99_US: f64 = 500.0;
const CALM_ATTEMPTS: usize = 5;
const NULL_BYTES: u64 = 4 << 30;

/// What one measurement gave.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(super) struct Sample {
    pub(super) iops: f64,
    pub(super) p99_us: f64,
    /// CPU time of the server (of fio, for the host), user and system.
    pub(super) cpu_us_per_request: f64,
}

/// The programs.
pub(super) struct Tools {
    ringdisk: PathBuf,
}

impl Tools {
    pub(super) fn find(ringdisk: PathBuf) -> Result<Self> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        ensure!(cores > 1, "the servers and their client need a core each");
        for (program, package) in [
            ("qemu-storage-daemon", "qemu-system-common"),
            ("qemu-img", "qemu-utils"),
            ("fio", "fio"),
            ("taskset", "util-linux"),
        ] {
            ensure!(
                packages::find_program(program).is_some(),
                "{program} is missing; it is in the Debian package {package}"
            );
        }
        Ok(Self { ringdisk })
    }
}

/// The files that are measured; gone when it goes.
pub(super) struct Files {
    tmpfs: PathBuf,
    disk: PathBuf,
    size_bytes: u64,
}

impl Files {
    pub(super) fn create(directory: Option<&Path>, size_mib: u64, cells: &[Cell]) -> Result<Self> {
        let name = format!("ringdisk-bench-{}", std::process::id());
        let disk = directory.map_or_else(workspace::target, Path::to_path_buf).join(&name);
        let files = Self { tmpfs: Path::new("/dev/shm").join(name), disk, size_bytes: size_mib << 20 };
        for storage in Storage::ALL {
            if storage != Storage::Null && cells.iter().any(|cell| cell.storage == storage) {
                files.make(storage)?;
            }
        }
        Ok(files)
    }

    /// The file that a server of `storage` opens.
    fn path(&self, storage: Storage) -> PathBuf {
        let directory = if storage.is_tmpfs() { &self.tmpfs } else { &self.disk };
        directory.join(if storage.is_qcow2() { "disk.qcow2" } else { "disk.raw" })
    }

    /// The raw file beside it: what fio measures.
    fn raw(&self, storage: Storage) -> PathBuf {
        self.path(storage).with_file_name("disk.raw")
    }

    fn make(&self, storage: Storage) -> Result<()> {
        let raw = self.raw(storage);
        if let Some(directory) = raw.parent() {
            std::fs::create_dir_all(directory)?;
        }
        if !raw.exists() {
            println!("making {} MiB of {storage}", self.size_bytes >> 20);
            write_noise(&raw, self.size_bytes)?;
        }
        if storage.is_qcow2() && !self.path(storage).exists() {
            let convert = Program::new("qemu-img").args(["convert", "-f", "raw", "-O", "qcow2"]);
            convert.args([raw, self.path(storage)]).output_text()?;
        }
        if !storage.is_tmpfs() {
            Program::new("sync").output_text()?;
        }
        Ok(())
    }

    /// Reads the whole file, so that it is in the page cache.
    pub(super) fn warm(&self, storage: Storage) -> Result<()> {
        let mut file = std::fs::File::open(self.path(storage))?;
        std::io::copy(&mut file, &mut std::io::sink())?;
        Ok(())
    }

    /// What the files lie on, for the page.
    pub(super) fn file_system(&self) -> String {
        let stat = Program::new("stat").args(["--file-system", "--format=%T"]).args([&self.disk]);
        stat.output_text().map_or_else(|_| "unknown".into(), |text| text.trim().to_owned())
    }

    pub(super) fn size_mib(&self) -> u64 {
        self.size_bytes >> 20
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.tmpfs);
        let _ = std::fs::remove_dir_all(&self.disk);
    }
}

/// Bytes that are neither zero nor alike, so that no tool leaves holes.
fn write_noise(path: &Path, size_bytes: u64) -> Result<()> {
    let mut file = std::fs::File::create(path).with_context(|| format!("cannot create {}", path.display()))?;
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut block = vec![0_u8; 1 << 20];
    for _ in 0..size_bytes >> 20 {
        for word in block.chunks_exact_mut(8) {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            word.copy_from_slice(&state.to_le_bytes());
        }
        file.write_all(&block)?;
    }
    Ok(())
}

/// Measures again where a cell at depth one shows that the disk is in a slow spell.
pub(super) fn calm(cell: &Cell, measure: impl Fn() -> Result<Sample>) -> Result<Sample> {
    let mut sample = measure()?;
    for _ in 1..CALM_ATTEMPTS {
        if cell.depth > 1 || sample.p99_us <= SLOW_SPELL_P99_US {
            break;
        }
        println!("    the slowest hundredth took {:.0} us and more: measured again", sample.p99_us);
        sample = measure()?;
    }
    Ok(sample)
}

/// Ringdisk under its client.
pub(super) fn ringdisk(cell: &Cell, tools: &Tools, files: &Files, seconds: f64) -> Result<Sample> {
    let socket = socket_path();
    let cache = if cell.storage.is_direct() { "none" } else { "writeback" };
    let file = files.path(cell.storage);
    let drive = match cell.storage {
        Storage::Null => format!("format=null,size={NULL_BYTES}"),
        storage => {
            let format = if storage.is_qcow2() { "qcow2" } else { "raw" };
            let file = file.display().to_string().replace(',', ",,");
            format!("file={file},format={format},engine={},cache={cache}", cell.engine.ringdisk())
        }
    };
    let mut command = pinned(SERVER_CORE, &tools.ringdisk);
    command.args(["serve", "--reactors", "1", "--queues", "1", "--drive", &drive, "--socket"]).arg(&socket);
    with_server(command, &socket, |pid| client(cell, tools, &socket, pid, seconds))
}

/// qemu-storage-daemon under the same client, with a thread of its own for the disk as its manual advises.
pub(super) fn peer(cell: &Cell, tools: &Tools, files: &Files, seconds: f64) -> Result<Sample> {
    let socket = socket_path();
    let mut command = pinned(SERVER_CORE, Path::new("qemu-storage-daemon"));
    command.args(["--object", "iothread,id=thread"]);
    if cell.storage == Storage::Null {
        command.args(["--blockdev", &format!("driver=null-co,node-name=disk,read-zeroes=on,size={NULL_BYTES}")]);
    } else {
        let direct = if cell.storage.is_direct() { "on" } else { "off" };
        let format = if cell.storage.is_qcow2() { "qcow2" } else { "raw" };
        let file = files.path(cell.storage).display().to_string().replace(',', ",,");
        let engine = cell.engine.qemu();
        command
            .args([
                "--blockdev",
                &format!("driver=file,node-name=file,filename={file},aio={engine},cache.direct={direct}"),
            ])
            .args(["--blockdev", &format!("driver={format},node-name=disk,file=file,cache.direct={direct}")]);
    }
    let address = format!("addr.type=unix,addr.path={}", socket.display());
    command
        .args(["--export", &format!("vhost-user-blk,id=export,node-name=disk,writable=on,iothread=thread,{address}")]);
    with_server(command, &socket, |pid| client(cell, tools, &socket, pid, seconds))
}

/// fio on the raw file, with registered file and buffers as the servers have them.
pub(super) fn host(cell: &Cell, _tools: &Tools, files: &Files, seconds: f64) -> Result<Sample> {
    let mut command = pinned(SERVER_CORE, Path::new("fio"));
    command
        .args(["--name=host", "--thread", "--output-format=json", "--time_based", "--invalidate=0", "--randrepeat=0"])
        .arg(format!("--filename={}", files.raw(cell.storage).display()))
        .arg(format!("--ioengine={}", cell.engine.fio()))
        .arg(format!("--direct={}", u8::from(cell.storage.is_direct())))
        .arg(format!("--rw={}", cell.access.name()))
        .arg(format!("--bs={}k", cell.block_kib))
        .arg(format!("--iodepth={}", cell.depth))
        .arg(format!("--runtime={seconds}"))
        .arg(format!("--ramp_time={WARM_UP_SECONDS}"))
        // As a server takes what has come in, and hands back what is done, in batches.
        .arg(format!("--iodepth_batch_submit={}", cell.depth))
        .arg(format!("--iodepth_batch_complete_max={}", cell.depth));
    if cell.engine.fio() == "io_uring" {
        command.args(["--registerfiles", "--fixedbufs"]);
    }
    let report = json_of(command)?;
    let job = &report["jobs"][0];
    let side = match cell.access {
        Access::RandomRead | Access::SequentialRead => &job["read"],
        Access::RandomWrite | Access::SequentialWrite => &job["write"],
    };
    let iops = number(&side["iops"])?;
    let cpu_share = (number(&job["usr_cpu"])? + number(&job["sys_cpu"])?) / 100.0;
    let p99_us = number(&side["clat_ns"]["percentile"]["99.000000"])? / 1000.0;
    Ok(Sample { iops, p99_us, cpu_us_per_request: if iops > 0.0 { cpu_share * 1e6 / iops } else { 0.0 } })
}

/// `ringdisk bench` against whoever serves at `socket`.
fn client(cell: &Cell, tools: &Tools, socket: &Path, server: u32, seconds: f64) -> Result<Sample> {
    let mut command = pinned(CLIENT_CORE, &tools.ringdisk);
    command
        .arg("bench")
        .arg("--socket")
        .arg(socket)
        .args(["--rw", cell.access.name(), "--bs", &format!("{}k", cell.block_kib)])
        .args(["--depth", &cell.depth.to_string(), "--time", &seconds.to_string()])
        .args(["--warmup", &WARM_UP_SECONDS.to_string(), "--server-pid", &server.to_string(), "--output", "json"]);
    let report = json_of(command)?;
    Ok(Sample {
        iops: number(&report["iops"])?,
        p99_us: number(&report["latency_us"]["p99"])?,
        cpu_us_per_request: number(&report["servers"][0]["us_per_request"])?,
    })
}

fn number(value: &Value) -> Result<f64> {
    value.as_f64().context("the report of a measurement lacks a number; the tool is of another version than expected")
}

fn json_of(mut command: Command) -> Result<Value> {
    let name = format!("{command:?}");
    let output = command.stdin(Stdio::null()).output().with_context(|| format!("cannot run {name}"))?;
    if !output.status.success() {
        bail!("{name}: {}\n{}", output.status, String::from_utf8_lossy(&output.stderr).trim_end());
    }
    // fio may print remarks before its report.
    let text = String::from_utf8_lossy(&output.stdout);
    let start = text.find('{').unwrap_or(0);
    serde_json::from_str(text.get(start..).unwrap_or_default()).with_context(|| format!("{name} gave no JSON"))
}

fn pinned(core: &str, program: &Path) -> Command {
    let mut command = Command::new("taskset");
    command.args(["--cpu-list", core]).arg(program);
    command
}

fn socket_path() -> PathBuf {
    std::env::temp_dir().join(format!("ringdisk-bench-{}.sock", std::process::id()))
}

/// Runs `server`, and `measure` once it can be connected to. taskset becomes the server, so its process id is the
/// server's.
fn with_server(mut server: Command, socket: &Path, measure: impl Fn(u32) -> Result<Sample>) -> Result<Sample> {
    let _ = std::fs::remove_file(socket);
    server.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let name = format!("{server:?}");
    let mut running = Running(server.spawn().with_context(|| format!("cannot run {name}"))?);
    let sample = running.wait_for(socket).and_then(|()| measure(running.0.id()));
    let said = running.end();
    let _ = std::fs::remove_file(socket);
    sample.with_context(|| format!("{name} said:\n{said}"))
}

struct Running(Child);

impl Running {
    fn wait_for(&mut self, socket: &Path) -> Result<()> {
        let end = Instant::now() + PATIENCE;
        // A connection that is closed at once is a session that ended; both servers wait for the next.
        while UnixStream::connect(socket).is_err() {
            if let Some(status) = self.0.try_wait()? {
                bail!("it ended ({status}) before it served");
            }
            ensure!(Instant::now() < end, "it did not begin to serve");
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    /// Asks it to end, waits, and gives back what it said.
    fn end(&mut self) -> String {
        let pid = rustix::process::Pid::from_child(&self.0);
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        let end = Instant::now() + PATIENCE;
        while matches!(self.0.try_wait(), Ok(None)) && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(2));
        }
        let _ = self.0.kill();
        let _ = self.0.wait();
        let mut said = String::new();
        if let Some(mut stderr) = self.0.stderr.take() {
            let _ = stderr.read_to_string(&mut said);
        }
        said
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The first line that a program prints when asked for its version.
pub(super) fn version(program: &str) -> String {
    let output = Command::new(program).arg("--version").stdin(Stdio::null()).output();
    output
        .ok()
        .and_then(|output| BufReader::new(output.stdout.as_slice()).lines().next().and_then(Result::ok))
        .unwrap_or_else(|| format!("{program}, version unknown"))
}
