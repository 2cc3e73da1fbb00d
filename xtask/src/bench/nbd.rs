//! `cargo xtask bench --nbd`: disks for NBD clients, beside nbdkit's file plugin and qemu-nbd, and with TLS beside without.
//! The same client for every server, interleaved, each server on one core and the client on the other, over one raw file:
//! in memory, and on the disk by way of the page cache. Each load runs with three clients, over one connection: one that looks
//! at no data, so that the server is the bound, `ringdisk bench`, and fio's nbd engine, which others know.

use super::BenchArguments;
use super::measure::{CLIENT_CORE, SERVER_CORE, Tools, json_of, number, pinned, socket_path, version, with_server};
use super::nbd_client;
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
/// The most rounds: more would take longer than ten minutes.
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
    /// And for the one that looks at no data.
    bare: nbd_client::Load,
    goals: [f64; 2],
}

static LOADS: [Load; 3] = [
    Load {
        name: "4 KiB random read, depth 32",
        fio: &["--rw=randread", "--bs=4k", "--iodepth=32"],
        own: &["--rw", "randread", "--bs", "4k", "--depth", "32"],
        bare: nbd_client::Load { writes: false, is_random: true, length_bytes: 4 << 10, depth: 32 },
        goals: [2.0, 3.5],
    },
    Load {
        name: "1 MiB sequential read, depth 4",
        fio: &["--rw=read", "--bs=1m", "--iodepth=4"],
        own: &["--rw", "read", "--bs", "1m", "--depth", "4"],
        bare: nbd_client::Load { writes: false, is_random: false, length_bytes: 1 << 20, depth: 4 },
        goals: [1.2, 1.2],
    },
    Load {
        name: "1 MiB sequential write, depth 4",
        fio: &["--rw=write", "--bs=1m", "--iodepth=4"],
        own: &["--rw", "write", "--bs", "1m", "--depth", "4", "--destroy"],
        bare: nbd_client::Load { writes: true, is_random: false, length_bytes: 1 << 20, depth: 4 },
        goals: [1.2, 1.2],
    },
];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Server {
    Ringdisk,
    Nbdkit,
    Qemu,
    /// Ringdisk with TLS, by certificates.
    Tls,
    /// By a shared key.
    Psk,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Client {
    /// It looks at no data.
    Bare,
    Fio,
    Own,
}

/// What is measured. fio cannot name certificates or keys.
const SIDES: [(Client, Server); 11] = [
    (Client::Bare, Server::Ringdisk),
    (Client::Bare, Server::Nbdkit),
    (Client::Bare, Server::Qemu),
    (Client::Fio, Server::Ringdisk),
    (Client::Fio, Server::Nbdkit),
    (Client::Fio, Server::Qemu),
    (Client::Own, Server::Ringdisk),
    (Client::Own, Server::Nbdkit),
    (Client::Own, Server::Qemu),
    (Client::Own, Server::Tls),
    (Client::Own, Server::Psk),
];
/// Where a client's sides begin.
const BARE: usize = 0;
const FIO: usize = 3;
const OWN: usize = 6;
/// The sides with TLS, and what both sides show there.
const TLS: [(usize, &str); 2] = [(9, "certificates"), (10, "a shared key")];

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
        let keys = keys_of(memory.path());
        std::fs::create_dir_all(keys.parent().unwrap_or(&keys))?;
        std::fs::write(&keys, "bench:00112233445566778899aabbccddeeff\n")?;
        Ok(Self { memory, disk })
    }
}

/// Returns the file with the shared key, beside the certificates.
fn keys_of(credentials: &Path) -> PathBuf {
    credentials.join("keys/keys.psk")
}

/// Returns the name of the file system that a directory is on.
fn file_system(directory: &Path) -> Result<String> {
    let said = Program::new("stat").args(["--file-system", "--format=%T"]).args([directory]).output_text()?;
    Ok(said.trim().to_owned())
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

fn server(server: Server, tools: &Tools, file: &Path, credentials: &Path, socket: &Path) -> Command {
    let ours = || {
        let mut command = pinned(SERVER_CORE, tools.ringdisk());
        let drive = format!("file={},format=raw,cache=writeback,name=disk", file.display());
        command.args(["nbd", "--reactors", "1", "--drive", &drive, "--socket"]).arg(socket);
        command
    };
    match server {
        Server::Ringdisk => ours(),
        Server::Tls => {
            let mut command = ours();
            command.args(["--tls-verify-peer", "off", "--tls-creds"]).arg(credentials);
            command
        }
        Server::Psk => {
            let mut command = ours();
            command.arg("--tls-creds").arg(credentials.join("keys"));
            command
        }
        Server::Nbdkit => {
            let mut command = pinned(SERVER_CORE, Path::new("nbdkit"));
            command.arg("--foreground").arg("--unix").arg(socket).arg("file").arg(file);
            command
        }
        Server::Qemu => {
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
    /// CPU time of our own client.
    client_us_per_request: f64,
}

fn measure(
    load: &Load,
    (client, kind): (Client, Server),
    tools: &Tools,
    file: &Path,
    credentials: &Path,
    seconds: f64,
) -> Result<Sample> {
    let socket = socket_path();
    let command = server(kind, tools, file, credentials, &socket);
    with_server(command, &socket, |pid| {
        let before = cpu_us(pid)?;
        let place = format!("unix:///?socket={}", socket.display());
        let (mut sample, requests) = match (client, kind) {
            (Client::Bare, _) => bare_client(load, &socket, seconds)?,
            (Client::Fio, _) => fio_client(load, &format!("nbd+{place}"), seconds)?,
            (_, Server::Tls) => {
                let uri = format!("nbds+{place}&tls-certificates={}", credentials.display());
                own_client(load, tools, &uri, seconds)?
            }
            (_, Server::Psk) => {
                let (socket, keys) = (socket.display(), keys_of(credentials));
                let uri = format!("nbds+unix://bench@/?socket={socket}&tls-psk-file={}", keys.display());
                own_client(load, tools, &uri, seconds)?
            }
            _ => own_client(load, tools, &format!("nbd+{place}"), seconds)?,
        };
        sample.cpu_us_per_request = (cpu_us(pid)? - before) / requests;
        Ok(sample)
    })
}

/// Runs the client that looks at no data. Returns what it measured, and the number of requests.
fn bare_client(load: &Load, socket: &Path, seconds: f64) -> Result<(Sample, f64)> {
    let counted = nbd_client::run(socket, CLIENT_CORE, load.bare, seconds)?;
    let requests = counted.requests as f64;
    let client_us_per_request = counted.cpu_seconds * 1e6 / requests;
    Ok((Sample { iops: requests / counted.seconds, client_us_per_request, ..Sample::default() }, requests))
}

/// Runs fio. Returns what it measured, and the number of requests.
fn fio_client(load: &Load, uri: &str, seconds: f64) -> Result<(Sample, f64)> {
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
    Ok((Sample { iops: number(&way["iops"])?, ..Sample::default() }, requests))
}

/// The same with our own client.
fn own_client(load: &Load, tools: &Tools, uri: &str, seconds: f64) -> Result<(Sample, f64)> {
    let mut client = pinned(CLIENT_CORE, tools.ringdisk());
    client.args(["bench", "--output", "json", "--warmup", "0", "--time", &seconds.to_string()]).args(load.own);
    // Its threads share a core: one that spins would keep it from the other.
    client.args(["--poll-max-us", "0", "--drive", &format!("file={uri},format=raw")]);
    let report = json_of(client)?;
    let iops = number(&report["iops"])?;
    ensure!(iops > 0.0, "the client had no request");
    let client_us_per_request = number(&report["client_us_per_request"])?;
    Ok((Sample { iops, client_us_per_request, ..Sample::default() }, iops * seconds))
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
    samples: [Vec<Sample>; SIDES.len()],
}

impl Row {
    fn rates(&self, side: usize) -> Vec<f64> {
        self.samples[side].iter().map(|sample| sample.iops).collect()
    }

    /// Returns the ratio of the rate of `side` to that of `other`.
    fn ratio(&self, side: usize, other: usize) -> Spread {
        Spread::of_ratios(&self.rates(side), &self.rates(other))
    }

    /// Returns the ratios of Ringdisk to nbdkit and to qemu-nbd with a client.
    fn to_peers(&self, client: usize) -> [Spread; 2] {
        [self.ratio(client, client + 1), self.ratio(client, client + 2)]
    }

    fn median_of(&self, side: usize, figure: impl Fn(&Sample) -> f64) -> f64 {
        median(&self.samples[side].iter().map(figure).collect::<Vec<_>>())
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
    let kind = file_system(places.disk.path())?;
    for load in loads {
        for (place, directory) in [("memory", &places.memory), ("disk", &places.disk)] {
            let file = directory.path().join("disk.raw");
            let mut row = Row { load, place, samples: Default::default() };
            in_turn(rounds, SIDES.len(), |side| {
                let once = || measure(load, SIDES[side], &tools, &file, places.memory.path(), arguments.seconds);
                row.samples[side].push(least_stolen(STOLEN_ATTEMPTS, once)?);
                Ok(())
            })?;
            let ([to_nbdkit, to_qemu], [tls, psk]) = (row.to_peers(BARE), TLS.map(|(side, _)| row.ratio(side, OWN)));
            println!("{}, {place}: {to_nbdkit} of nbdkit, {to_qemu} of qemu-nbd, TLS {tls}, PSK {psk}", load.name);
            rows.push(row);
        }
    }
    put_page(&page(&rows, rounds, arguments.seconds, &kind)?, "benchmarks-nbd.md", arguments)
}

/// A table of the rates with one client.
fn put_rates(text: &mut String, rows: &[Row], client: usize) -> Result<()> {
    *text += "| load | file | Ringdisk | nbdkit | qemu-nbd | to nbdkit | goal | to qemu-nbd | goal |\n|---|---|---|---|---|---|---|---|---|\n";
    for row in rows {
        let Load { name, goals: [first, second], .. } = row.load;
        let [own, nbdkit, qemu] = [0, 1, 2].map(|server| median(&row.rates(client + server)));
        let [to_nbdkit, to_qemu] = row.to_peers(client);
        writeln!(
            text,
            "| {name} | {} | {own:.0} | {nbdkit:.0} | {qemu:.0} | {to_nbdkit} | {first} | {to_qemu} | {second} |",
            row.place
        )?;
    }
    Ok(())
}

/// A table of the CPU times with one client.
fn put_cpu_times(text: &mut String, rows: &[Row], client: usize) -> Result<()> {
    *text += "| load | file | Ringdisk | nbdkit | qemu-nbd | client of Ringdisk | of nbdkit | of qemu-nbd |\n|---|---|---|---|---|---|---|---|\n";
    for row in rows {
        let servers = [0, 1, 2].map(|server| row.median_of(client + server, |sample| sample.cpu_us_per_request));
        let clients = [0, 1, 2].map(|server| row.median_of(client + server, |sample| sample.client_us_per_request));
        write!(text, "| {} | {}", row.load.name, row.place)?;
        servers.into_iter().chain(clients).try_for_each(|figure| write!(text, " | {figure:.1}"))?;
        *text += " |\n";
    }
    Ok(())
}

/// A table of what TLS leaves of the rate.
fn put_tls(text: &mut String, rows: &[Row]) -> Result<()> {
    *text += "| load | file | both sides have | clear | TLS | TLS to clear | server CPU, us | client CPU, us |\n|---|---|---|---|---|---|---|---|\n";
    for row in rows {
        for (side, kind) in TLS {
            let [clear, tls] = [OWN, side].map(|side| median(&row.rates(side)));
            let server = row.median_of(side, |sample| sample.cpu_us_per_request);
            let client = row.median_of(side, |sample| sample.client_us_per_request);
            let (name, place, ratio) = (row.load.name, row.place, row.ratio(side, OWN));
            writeln!(
                text,
                "| {name} | {place} | {kind} | {clear:.0} | {tls:.0} | {ratio} | {server:.1} | {client:.1} |"
            )?;
        }
    }
    Ok(())
}

fn page(rows: &[Row], rounds: usize, seconds: f64, file_system: &str) -> Result<String> {
    let mut text = "# NBD: figures\n\n".to_owned();
    writeln!(
        text,
        "`cargo xtask bench --nbd` has written this page. Each load ran {rounds} times for {seconds} s on each server, in\n\
         turn, with the same clients, over one connection at a Unix socket. The client had a core of its own. Each server had\n\
         one core and served a raw file of {} MiB, in memory (tmpfs) or on disk ({file_system}). All use the page cache, which\n\
         holds the whole file. The peers are {} with its file plugin and\n\
         {} with io_uring.\n\n\
         Requests a second are medians. Ratios are medians of the rounds, with the least and the most.\n\n\
         With a client that sends requests and looks at no data. It takes so little time that the server is the bound:\n",
        FILE_BYTES >> 20,
        version("nbdkit"),
        version("qemu-nbd"),
    )?;
    put_rates(&mut text, rows, BARE)?;
    text += "\nCPU time for each request with that client, in microseconds, of the server and of the client. A reactor of Ringdisk\nwithout work spins for a while, which counts, too:\n\n";
    put_cpu_times(&mut text, rows, BARE)?;
    text += "\nWith `ringdisk bench` as the client, which uses a server's disk as any command does:\n\n";
    put_rates(&mut text, rows, OWN)?;
    text += "\nCPU time for each request with `ringdisk bench`:\n\n";
    put_cpu_times(&mut text, rows, OWN)?;
    text += "\nWith fio's nbd engine as the client. It makes a system call for each request, and takes longer for short ones\nthan Ringdisk does:\n\n";
    put_rates(&mut text, rows, FIO)?;
    text += "\nWhat TLS leaves of the rate, with `ringdisk bench` (goal: 0.5):\n\n";
    put_tls(&mut text, rows)?;
    Ok(text)
}
