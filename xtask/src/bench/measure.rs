//! One measurement: a server and its client, or fio.

use super::cells::{Cell, Storage};
use super::files::Files;
use super::stolen::least_stolen;
use crate::packages;
use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Where each side runs: servers and fio on one core, the client on the other.
pub(super) const SERVER_CORE: &str = "0";
pub(super) const CLIENT_CORE: &str = "1";
/// How long the client spins, which is longer than any request. Otherwise its own sleep would be measured with the
/// server.
const CLIENT_POLL_US: u32 = 10_000;
/// How long a server may take to start or to end.
const PATIENCE: Duration = Duration::from_secs(30);
/// How long the load runs before anything is counted.
const WARM_UP_SECONDS: f64 = 0.3;
/// The same on a file in memory, where Ringdisk maps pages that are requested again: every program is restarted for
/// each measurement.
const WARM_UP_IN_MEMORY_SECONDS: f64 = 1.0;
/// At depth one, a disk whose slowest hundredth takes longer than this is in one of its slow spells.
const SLOW_SPELL_P99_US: f64 = 500.0;
const CALM_ATTEMPTS: usize = 5;
/// The highest number of attempts if the host takes the processors away.
const STOLEN_ATTEMPTS: usize = 4;
const NULL_BYTES: u64 = 4 << 30;
/// From this block size on, the pages of a request matter.
const LONG_KIB: u32 = 128;

/// The result of one measurement.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub(super) struct Sample {
    pub(super) iops: f64,
    pub(super) p99_us: f64,
    /// CPU time of the server (of fio, for the host), user and system.
    pub(super) cpu_us_per_request: f64,
    /// CPU time of the client.
    pub(super) client_us_per_request: f64,
}

/// The programs of a run.
pub(super) struct Tools {
    pub(super) ringdisk: PathBuf,
    /// The client, the same program for every server.
    pub(super) client: PathBuf,
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
        Ok(Self { client: ringdisk.clone(), ringdisk })
    }

    /// Returns the measured program.
    pub(super) fn ringdisk(&self) -> &Path {
        &self.ringdisk
    }

    /// Returns tools with the same client, and another build of Ringdisk as the server.
    pub(super) fn with_server(&self, ringdisk: PathBuf) -> Self {
        Self { ringdisk, client: self.client.clone() }
    }
}

/// Measures again if the host takes the processors away, or if a cell at depth one shows that the disk is in a slow
/// spell. The host's work for the disk counts as taken, too, so runs that wait for the disk are never repeated for it.
pub(super) fn calm(cell: &Cell, measure: impl Fn() -> Result<Sample>) -> Result<Sample> {
    let attempts = if cell.storage.is_at_the_disks_pace() { 1 } else { STOLEN_ATTEMPTS };
    let mut sample = least_stolen(attempts, &measure)?;
    for _ in 1..CALM_ATTEMPTS {
        if cell.depth > 1 || !cell.storage.is_direct() || sample.p99_us <= SLOW_SPELL_P99_US {
            break;
        }
        println!("    the slowest hundredth took {:.0} us and more: measured again", sample.p99_us);
        sample = least_stolen(attempts, &measure)?;
    }
    Ok(sample)
}

/// Returns how long a cell runs before anything is counted.
pub(super) fn warm_up_seconds(cell: &Cell) -> f64 {
    match cell.storage {
        storage if storage.is_fresh() => 0.0,
        storage if storage.is_tmpfs() => WARM_UP_IN_MEMORY_SECONDS,
        _ => WARM_UP_SECONDS,
    }
}

/// Measures Ringdisk with the client.
pub(super) fn ringdisk(cell: &Cell, tools: &Tools, files: &Files, seconds: f64) -> Result<Sample> {
    files.renew(cell.storage)?;
    let socket = socket_path();
    with_server(serve(tools, &drive(cell, files), &socket), &socket, |pid| client(cell, tools, files, pid, seconds))
}

/// Returns the drive options of a cell's disk.
pub(super) fn drive(cell: &Cell, files: &Files) -> String {
    match cell.storage {
        Storage::Null => format!("format=null,size={NULL_BYTES}"),
        storage => {
            let format = if storage.is_qcow2() { "qcow2" } else { "raw" };
            let cache = if storage.is_direct() { "none" } else { "writeback" };
            let sync = if storage == Storage::RawSync { ",sync=on" } else { "" };
            let fixed = if cell.fixed_buffers { ",fixed-buffers=on" } else { "" };
            let poll = if cell.never_spins { ",poll-max-us=0" } else { "" };
            let file = escaped(&files.path(storage));
            format!("file={file},format={format},engine={},cache={cache}{sync}{fixed}{poll}", cell.engine.ringdisk())
        }
    }
}

/// Measures the reference of the cell's storage: another disk of ours under the same load.
pub(super) fn reference(cell: &Cell, tools: &Tools, files: &Files, seconds: f64) -> Result<Sample> {
    let storage = cell.storage.reference().unwrap_or(cell.storage);
    ringdisk(&Cell { storage, ..*cell }, tools, files, seconds)
}

/// Returns the command `ringdisk serve` with one drive.
pub(super) fn serve(tools: &Tools, drive: &str, socket: &Path) -> Command {
    serve_under(&[], tools, drive, socket)
}

/// As [`serve`], but under another program, and then without spinning.
pub(super) fn serve_under(program: &[&str], tools: &Tools, drive: &str, socket: &Path) -> Command {
    let words = program.iter().map(Path::new).chain([tools.ringdisk.as_path()]);
    let mut command = Command::new("taskset");
    command.args(["--cpu-list", SERVER_CORE]).args(words);
    if !program.is_empty() {
        command.args(["serve", "--poll-max-us", "0"]);
    } else {
        command.arg("serve");
    }
    command.args(["--reactors", "1", "--queues", "1", "--drive", drive, "--socket"]).arg(socket);
    command
}

/// Escapes a path for `--drive` or `--blockdev`.
pub(super) fn escaped(path: &Path) -> String {
    path.display().to_string().replace(',', ",,")
}

/// Measures qemu-storage-daemon with the same client, with a thread of its own for the disk as its manual advises.
pub(super) fn peer(cell: &Cell, tools: &Tools, files: &Files, seconds: f64) -> Result<Sample> {
    files.renew(cell.storage)?;
    let disk = match cell.storage {
        Storage::Null => vec![format!("driver=null-co,node-name=disk,read-zeroes=on,size={NULL_BYTES}")],
        storage => {
            let format = if storage.is_qcow2() { "qcow2" } else { "raw" };
            qemu_disk(&files.path(storage), format, cell.engine.qemu(), storage.is_direct())
        }
    };
    let socket = socket_path();
    let options = QemuOptions { write_through: cell.storage == Storage::RawSync, never_spins: cell.never_spins };
    let command = qemu(&disk, options, &socket);
    with_server(command, &socket, |pid| client(cell, tools, files, pid, seconds))
}

/// Returns the `--blockdev`s of a disk on a file.
pub(super) fn qemu_disk(path: &Path, format: &str, engine: &str, direct: bool) -> Vec<String> {
    let direct = if direct { "on" } else { "off" };
    vec![
        format!("driver=file,node-name=file,filename={},aio={engine},cache.direct={direct}", escaped(path)),
        format!("driver={format},node-name=disk,file=file,cache.direct={direct}"),
    ]
}

/// Options that are off by default in qemu-storage-daemon.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct QemuOptions {
    write_through: bool,
    never_spins: bool,
}

/// Returns the command of qemu-storage-daemon that serves the node `disk` of these `--blockdev`s at a socket.
pub(super) fn qemu(disk: &[String], options: QemuOptions, socket: &Path) -> Command {
    let mut command = pinned(SERVER_CORE, Path::new("qemu-storage-daemon"));
    let thread = if options.never_spins { "iothread,id=thread,poll-max-ns=0" } else { "iothread,id=thread" };
    command.args(["--object", thread]);
    for node in disk {
        command.args(["--blockdev", node]);
    }
    let write_through = if options.write_through { ",writethrough=on" } else { "" };
    let address = format!("addr.type=unix,addr.path={}", socket.display());
    command
        .arg("--export")
        .arg(format!("vhost-user-blk,id=export,node-name=disk,writable=on,iothread=thread,{address}{write_through}"));
    command
}

/// Measures fio on the raw file. It registers its file, as Ringdisk does by default, and its buffers if the cell says
/// so.
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
        .arg(format!("--runtime={}", fio_time(seconds)))
        .arg(format!("--ramp_time={}", fio_time(WARM_UP_SECONDS)))
        // Requests and completions come in batches, as in a server.
        .arg(format!("--iodepth_batch_submit={}", cell.depth))
        .arg(format!("--iodepth_batch_complete_max={}", cell.depth));
    if cell.engine.fio() == "io_uring" {
        command.arg("--registerfiles");
    }
    if cell.fixed_buffers {
        command.arg("--fixedbufs");
    }
    if cell.block_kib >= LONG_KIB {
        // The buffers are pages of a file, as a guest's memory is. They cost more to look up than a process's own.
        command.arg("--iomem=mmapshared");
    }
    if cell.storage == Storage::RawSync {
        command.arg("--sync=dsync");
    }
    let report = json_of(command)?;
    let job = &report["jobs"][0];
    let side = if cell.access.is_write() { &job["write"] } else { &job["read"] };
    let iops = number(&side["iops"])?;
    let cpu_share = (number(&job["usr_cpu"])? + number(&job["sys_cpu"])?) / 100.0;
    let p99_us = number(&side["clat_ns"]["percentile"]["99.000000"])? / 1000.0;
    let cpu_us_per_request = if iops > 0.0 { cpu_share * 1e6 / iops } else { 0.0 };
    Ok(Sample { iops, p99_us, cpu_us_per_request, client_us_per_request: 0.0 })
}

/// Formats a time for fio. fio ignores a fraction of a second, and without a time it goes through the whole file.
fn fio_time(seconds: f64) -> String {
    format!("{:.0}ms", seconds * 1e3)
}

/// Measures the server at the socket with `ringdisk bench`.
fn client(cell: &Cell, tools: &Tools, files: &Files, server: u32, seconds: f64) -> Result<Sample> {
    let mut arguments = vec!["--rw".to_owned(), cell.access.name().to_owned()];
    arguments.extend(["--bs".to_owned(), format!("{}k", cell.block_kib)]);
    arguments.extend(["--depth".to_owned(), cell.depth.to_string()]);
    arguments.extend(["--poll-max-us".to_owned(), CLIENT_POLL_US.to_string()]);
    match files.request_limit(cell.storage) {
        Some(count) => arguments.extend(["--count".to_owned(), count.to_string()]),
        None => arguments.extend(["--time".to_owned(), seconds.to_string()]),
    }
    arguments.extend(["--warmup".to_owned(), warm_up_seconds(cell).to_string()]);
    if let Some(every) = cell.flush_every {
        arguments.extend(["--flush-every".to_owned(), every.to_string()]);
    }
    let report = bench(tools, server, &arguments)?;
    Ok(Sample {
        iops: number(&report["iops"])?,
        p99_us: number(&report["latency_us"]["p99"])?,
        cpu_us_per_request: number(&report["servers"][0]["us_per_request"])?,
        client_us_per_request: number(&report["client_us_per_request"])?,
    })
}

/// Returns the report of `ringdisk bench` on the socket.
pub(super) fn bench(tools: &Tools, server: u32, arguments: &[String]) -> Result<Value> {
    let mut command = pinned(CLIENT_CORE, &tools.client);
    command.arg("bench").arg("--socket").arg(socket_path()).args(arguments).arg("--destroy");
    command.args(["--server-pid", &server.to_string(), "--output", "json"]);
    json_of(command)
}

pub(super) fn number(value: &Value) -> Result<f64> {
    value.as_f64().context("the report of a measurement lacks a number; the tool is of another version than expected")
}

pub(super) fn json_of(mut command: Command) -> Result<Value> {
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

pub(super) fn pinned(core: &str, program: &Path) -> Command {
    let mut command = Command::new("taskset");
    command.args(["--cpu-list", core]).arg(program);
    command
}

pub(super) fn socket_path() -> PathBuf {
    std::env::temp_dir().join(format!("ringdisk-bench-{}.sock", std::process::id()))
}

/// Runs `server`, and `measure` once it accepts connections. taskset becomes the server, so its process id is the
/// server's.
pub(super) fn with_server<T>(mut server: Command, socket: &Path, measure: impl FnOnce(u32) -> Result<T>) -> Result<T> {
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
        // A connection that is closed at once is an ended session; both servers wait for the next one.
        while UnixStream::connect(socket).is_err() {
            if let Some(status) = self.0.try_wait()? {
                bail!("it ended ({status}) before it served");
            }
            ensure!(Instant::now() < end, "it did not begin to serve");
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    /// Asks it to end, waits, and returns its output.
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

/// Returns the first line of a program's `--version`.
pub(super) fn version(program: &str) -> String {
    let output = Command::new(program).arg("--version").stdin(Stdio::null()).output();
    output
        .ok()
        .and_then(|output| BufReader::new(output.stdout.as_slice()).lines().next().and_then(Result::ok))
        .unwrap_or_else(|| format!("{program}, version unknown"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fio_gets_no_fractions() {
        assert_eq!([0.4, 1.0, 2.5].map(fio_time), ["400ms", "1000ms", "2500ms"]);
    }
}
