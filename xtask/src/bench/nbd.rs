//! `cargo xtask bench --nbd`: disks for NBD clients, beside nbdkit's file plugin and qemu-nbd, and with TLS beside without.
//! The same client (fio's nbd engine, one connection) for every server, interleaved, each server on one core and the client
//! on the other, over one raw file: in memory, and on the disk by way of the page cache.

use super::BenchArguments;
use super::measure::{CLIENT_CORE, SERVER_CORE, Tools, json_of, number, pinned, socket_path, version, with_server};
use super::rounds::{chosen, in_turn, put_page};
use super::statistics::{Spread, median};
use super::stolen::least_stolen;
use crate::command::Program;
use crate::packages;
use crate::workspace;
use anyhow::{Context, Result, ensure};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

const FILE_BYTES: usize = 512 << 20;
/// The most rounds: more would take longer than six minutes.
const ROUNDS_MAX: usize = 5;
const STOLEN_ATTEMPTS: usize = 2;
/// Clock ticks a second in `/proc` (USER_HZ).
const TICKS_PER_SECOND: f64 = 100.0;

/// A load, and the least ratio to each peer that it should reach.
struct Load {
    name: &'static str,
    fio: &'static [&'static str],
    /// The same load for our own client.
    own: &'static [&'static str],
    goals: [f64; 2],
}

static LOADS: [Load; 3] = [
    Load {
        name: "4 KiB random read, depth 32",
        fio: &["--rw=randread", "--bs=4k", "--iodepth=32"],
        own: &["--rw", "randread", "--bs", "4k", "--depth", "32"],
        goals: [2.0, 3.5],
    },
    Load {
        name: "1 MiB sequential read, depth 4",
        fio: &["--rw=read", "--bs=1m", "--iodepth=4"],
        own: &["--rw", "read", "--bs", "1m", "--depth", "4"],
        goals: [1.2, 1.2],
    },
    Load {
        name: "1 MiB sequential write, depth 4",
        fio: &["--rw=write", "--bs=1m", "--iodepth=4"],
        own: &["--rw", "write", "--bs", "1m", "--depth", "4", "--destroy"],
        goals: [1.2, 1.2],
    },
];

/// The servers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Side {
    Ringdisk,
    Nbdkit,
    Qemu,
    /// Ringdisk with our own client: fio cannot name certificates.
    Clear,
    Tls,
}

const SIDES: [Side; 5] = [Side::Ringdisk, Side::Nbdkit, Side::Qemu, Side::Clear, Side::Tls];

struct Places {
    memory: tempfile::TempDir,
    disk: tempfile::TempDir,
}

impl Places {
    fn create(directory: Option<&Path>) -> Result<Self> {
        let memory = tempfile::tempdir_in("/dev/shm").context("files in memory need /dev/shm")?;
        let below = directory.map_or_else(workspace::target, Path::to_path_buf);
        let disk = tempfile::tempdir_in(below)?;
        let mut noise = vec![0_u8; FILE_BYTES];
        let mut state = 1_u64;
        for word in noise.chunks_exact_mut(8) {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            word.copy_from_slice(&state.to_le_bytes());
        }
        for directory in [&memory, &disk] {
            std::fs::write(directory.path().join("disk.raw"), &noise)?;
        }
        Program::new("sync").output_text()?;
        make_certificates(memory.path())?;
        Ok(Self { memory, disk })
    }
}

/// Makes an authority and a certificate for localhost, in QEMU's layout.
fn make_certificates(directory: &Path) -> Result<()> {
    let openssl = |arguments: &[&str]| -> Result<()> {
        let script = format!("cd '{}' && openssl {}", directory.display(), arguments.join(" "));
        Program::new("sh").args(["-c", &script]).output_text().context("certificates are made by openssl").map(drop)
    };
    let key = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes";
    openssl(&["req -x509 -days 2", key, "-keyout ca-key.pem -out ca-cert.pem -subj /CN=bench"])?;
    let name = "-subj /CN=localhost -addext subjectAltName=DNS:localhost";
    openssl(&[
        "req -x509 -days 2 -CA ca-cert.pem -CAkey ca-key.pem",
        key,
        name,
        "-addext basicConstraints=CA:FALSE",
        "-keyout server-key.pem -out server-cert.pem",
    ])
}

fn server(side: Side, tools: &Tools, file: &Path, certificates: &Path, socket: &Path) -> Command {
    let ours = || {
        let mut command = pinned(SERVER_CORE, tools.ringdisk());
        let drive = format!("file={},format=raw,cache=writeback,name=disk", file.display());
        command.args(["nbd", "--reactors", "1", "--drive", &drive, "--socket"]).arg(socket);
        command
    };
    match side {
        Side::Ringdisk | Side::Clear => ours(),
        Side::Tls => {
            let mut command = ours();
            command.args(["--tls-verify-peer", "off", "--tls-creds"]).arg(certificates);
            command
        }
        Side::Nbdkit => {
            let mut command = pinned(SERVER_CORE, Path::new("nbdkit"));
            command.arg("--foreground").arg("--unix").arg(socket).arg("file").arg(file);
            command
        }
        Side::Qemu => {
            let mut command = pinned(SERVER_CORE, Path::new("qemu-nbd"));
            command.args(["--persistent", "--format=raw", "--aio=io_uring", "--cache=writeback", "--socket"]);
            command.arg(socket).arg(file);
            command
        }
    }
}

#[derive(Debug, Clone, Copy, Default)]
struct Sample {
    iops: f64,
    /// CPU time of the server, user and system.
    cpu_us_per_request: f64,
}

fn measure(load: &Load, side: Side, tools: &Tools, file: &Path, certificates: &Path, seconds: f64) -> Result<Sample> {
    let socket = socket_path();
    let command = server(side, tools, file, certificates, &socket);
    with_server(command, &socket, |pid| {
        let before = cpu_us(pid)?;
        let (iops, requests) = match side {
            Side::Clear => own_client(load, tools, &format!("nbd+unix:///?socket={}", socket.display()), seconds)?,
            Side::Tls => {
                let directory = certificates.display();
                let uri = format!("nbds+unix:///?socket={}&tls-certificates={directory}", socket.display());
                own_client(load, tools, &uri, seconds)?
            }
            _ => fio_client(load, &format!("nbd+unix:///?socket={}", socket.display()), seconds)?,
        };
        Ok(Sample { iops, cpu_us_per_request: (cpu_us(pid)? - before) / requests })
    })
}

/// Runs fio. Returns requests a second, and the number of requests.
fn fio_client(load: &Load, uri: &str, seconds: f64) -> Result<(f64, f64)> {
    let mut fio = pinned(CLIENT_CORE, Path::new("fio"));
    fio.args(["--name=client", "--thread", "--output-format=json", "--time_based", "--randrepeat=0", "--ioengine=nbd"])
        .arg(format!("--uri={uri}"))
        .arg(format!("--size={FILE_BYTES}"))
        .arg(format!("--runtime={:.0}ms", seconds * 1e3))
        .args(load.fio);
    let report = json_of(fio)?;
    let job = &report["jobs"][0];
    let way = if load.fio.iter().any(|word| word.contains("write")) { &job["write"] } else { &job["read"] };
    let requests = number(&way["total_ios"])?;
    ensure!(number(&job["error"])? == 0.0 && requests > 0.0, "the client had errors: {report}");
    Ok((number(&way["iops"])?, requests))
}

/// The same with our own client.
fn own_client(load: &Load, tools: &Tools, uri: &str, seconds: f64) -> Result<(f64, f64)> {
    let mut client = pinned(CLIENT_CORE, tools.ringdisk());
    client.args(["bench", "--output", "json", "--warmup", "0", "--time", &seconds.to_string()]).args(load.own);
    client.args(["--drive", &format!("file={uri},format=raw")]);
    let iops = number(&json_of(client)?["iops"])?;
    ensure!(iops > 0.0, "the client had no request");
    Ok((iops, iops * seconds))
}

/// Returns the CPU time of a process so far, in microseconds.
fn cpu_us(pid: u32) -> Result<f64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    // The name before these fields may have spaces.
    let fields = stat.rsplit_once(')').map_or("", |(_, rest)| rest).split_whitespace();
    let ticks: u64 = fields.skip(11).take(2).filter_map(|field| field.parse::<u64>().ok()).sum();
    Ok(ticks as f64 * 1e6 / TICKS_PER_SECOND)
}

struct Row {
    load: &'static Load,
    place: &'static str,
    samples: [Vec<Sample>; 5],
}

impl Row {
    fn rates(&self, side: usize) -> Vec<f64> {
        self.samples[side].iter().map(|sample| sample.iops).collect()
    }

    /// Returns the ratio of the rate of `side` to that of `other`.
    fn ratio(&self, side: usize, other: usize) -> Spread {
        Spread::of_ratios(&self.rates(side), &self.rates(other))
    }

    fn cpu(&self, side: usize) -> f64 {
        median(&self.samples[side].iter().map(|sample| sample.cpu_us_per_request).collect::<Vec<_>>())
    }
}

pub(super) fn run(ringdisk: PathBuf, arguments: &BenchArguments) -> Result<()> {
    for (program, package) in [("nbdkit", "nbdkit"), ("qemu-nbd", "qemu-utils"), ("openssl", "openssl")] {
        ensure!(packages::find_program(program).is_some(), "{program} is missing; it is in the package {package}");
    }
    let tools = Tools::find(ringdisk)?;
    let Some(loads) = chosen(&LOADS, |load| load.name, arguments)? else { return Ok(()) };
    let places = Places::create(arguments.directory.as_deref())?;
    let rounds = arguments.pairs.min(ROUNDS_MAX);
    let mut rows = Vec::new();
    for load in loads {
        for (place, directory) in [("memory", &places.memory), ("disk", &places.disk)] {
            let file = directory.path().join("disk.raw");
            let mut row = Row { load, place, samples: Default::default() };
            in_turn(rounds, SIDES.len(), |side| {
                let once = || measure(load, SIDES[side], &tools, &file, places.memory.path(), arguments.seconds);
                row.samples[side].push(least_stolen(STOLEN_ATTEMPTS, once)?);
                Ok(())
            })?;
            let (to_nbdkit, to_qemu, tls) = (row.ratio(0, 1), row.ratio(0, 2), row.ratio(4, 3));
            println!("{}, {place}: {to_nbdkit} of nbdkit, {to_qemu} of qemu-nbd, TLS {tls}", load.name);
            rows.push(row);
        }
    }
    put_page(&page(&rows, rounds, arguments.seconds)?, "benchmarks-nbd.md", arguments)
}

fn page(rows: &[Row], rounds: usize, seconds: f64) -> Result<String> {
    let mut text = "# NBD: figures\n\n".to_owned();
    writeln!(
        text,
        "`cargo xtask bench --nbd` has written this page. Each load ran {rounds} times for {seconds} s on each server, in\n\
         turn, with the same client: fio's nbd engine, one connection over a Unix socket, on a core of its own. Each server\n\
         had one core, and a raw file of {} MiB, in memory (tmpfs) or on the disk by way of the page cache, which\n\
         all of them use (`cache=writeback`), and which has all of it. The peers are {} with its file plugin\n\
         and {} with io_uring.\n\n\
         Requests a second are medians. Ratios are medians of the rounds, with the least and the most.\n",
        FILE_BYTES >> 20,
        version("nbdkit"),
        version("qemu-nbd"),
    )?;
    text += "| load | file | Ringdisk | nbdkit | qemu-nbd | to nbdkit | goal | to qemu-nbd | goal |\n|---|---|---|---|---|---|---|---|---|\n";
    for row in rows {
        let Load { name, goals: [first, second], .. } = row.load;
        let [own, nbdkit, qemu] = [0, 1, 2].map(|side| median(&row.rates(side)));
        let (to_nbdkit, to_qemu) = (row.ratio(0, 1), row.ratio(0, 2));
        writeln!(
            text,
            "| {name} | {} | {own:.0} | {nbdkit:.0} | {qemu:.0} | {to_nbdkit} | {first} | {to_qemu} | {second} |",
            row.place
        )?;
    }
    text += "\nCPU time of the server for each request, in microseconds, and what TLS with\ncertificates leaves of the rate. fio cannot name certificates, so there `ringdisk bench` is the client, with TLS and without:\n\n";
    text += "| load | file | Ringdisk | nbdkit | qemu-nbd | clear, own client | TLS, own client | TLS to clear |\n|---|---|---|---|---|---|---|---|\n";
    for row in rows {
        let [own, nbdkit, qemu, clear, tls] = [0, 1, 2, 3, 4].map(|side| row.cpu(side));
        let (name, ratio) = (row.load.name, row.ratio(4, 3));
        writeln!(
            text,
            "| {name} | {} | {own:.1} | {nbdkit:.1} | {qemu:.1} | {clear:.1} | {tls:.1} | {ratio} |",
            row.place
        )?;
    }
    Ok(text)
}
