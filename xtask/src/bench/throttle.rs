//! `cargo xtask bench --throttle`: the filter `throttle` beside qemu-storage-daemon's, over a null disk, with the same
//! client. It shows how far a second is from the rate, the longest gap, what the host adds to gaps, and how a greedy disk
//! shares a group's rate with another.

use super::BenchArguments;
use super::gaps::{Thread, longest_wait_ms};
use super::measure::{CLIENT_CORE, SERVER_CORE, Tools, json_of, number, pinned, socket_path, version, with_server};
use super::rounds::put_page;
use super::statistics::median;
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The limits, in requests a second.
const RATES: [u64; 5] = [100, 1_000, 10_000, 50_000, 200_000];
/// Limits of other kinds.
const LIMITS: [Limit; 5] = [
    Limit { key: "iops-read", per_second: 10_000, access: "randread", block_kib: 4 },
    Limit { key: "iops-write", per_second: 10_000, access: "randwrite", block_kib: 4 },
    Limit { key: "bps-total", per_second: 100 << 20, access: "randread", block_kib: 4 },
    Limit { key: "bps-read", per_second: 1 << 30, access: "randread", block_kib: 64 },
    Limit { key: "bps-write", per_second: 100 << 20, access: "randwrite", block_kib: 64 },
];
/// The rate that two disks share.
const SHARED_RATE: u64 = 20_000;
/// Requests in flight of each disk: the first is the greedy one.
const SHARED_DEPTHS: [u32; 2] = [256, 4];
const DEPTH: u32 = 128;
/// The limit at which a server that never sleeps is measured, too, and how long that one looks for work before it would
/// sleep: longer than two requests are apart.
const SPINNING: (u64, &str) = (10_000, "5000");
/// The shortest run: there have to be whole seconds to look at.
const SECONDS_MIN: f64 = 4.0;

/// A limit, and the load that meets it.
#[derive(Debug, Clone, Copy)]
struct Limit {
    /// Its name; QEMU puts `x-` before it.
    key: &'static str,
    /// Requests or bytes.
    per_second: u64,
    access: &'static str,
    block_kib: u64,
}

impl Limit {
    /// A limit of all requests.
    fn of_requests(per_second: u64) -> Self {
        Self { key: "iops-total", per_second, access: "randread", block_kib: 4 }
    }

    /// The requests a second that it allows.
    fn requests(&self) -> u64 {
        if self.key.starts_with("bps") { self.per_second / (self.block_kib << 10) } else { self.per_second }
    }

    /// The limit and its load in words.
    fn words(&self) -> String {
        let Self { key, per_second, access, block_kib } = self;
        let verb = access.trim_start_matches("rand");
        match key.starts_with("bps") {
            true => format!("`{key}` {} MiB, {verb}s of {block_kib} KiB", per_second >> 20),
            false => format!("`{key}` {per_second}, {verb}s of {block_kib} KiB"),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Side {
    Ringdisk,
    Qemu,
}

const SIDES: [Side; 2] = [Side::Ringdisk, Side::Qemu];

/// Returns the command of a server with null disks at these sockets, which share a rate.
fn server(side: Side, tools: &Tools, limit: Limit, sockets: &[PathBuf]) -> Command {
    let Limit { key, per_second, .. } = limit;
    match side {
        Side::Ringdisk => {
            let mut command = pinned(SERVER_CORE, &tools.ringdisk);
            command.args(["serve", "--reactors", "1", "--queues", "1"]);
            for (index, socket) in sockets.iter().enumerate() {
                let limits = format!("filter=throttle:{key}={per_second}:group=shared");
                let drive = format!("name=disk{index},format=null,size=4G,socket={},{limits}", socket.display());
                command.args(["--drive", &drive]);
            }
            command
        }
        Side::Qemu => {
            let mut command = pinned(SERVER_CORE, Path::new("qemu-storage-daemon"));
            command.args(["--object", "iothread,id=thread"]);
            command.args(["--object", &format!("throttle-group,id=shared,x-{key}={per_second}")]);
            for (index, socket) in sockets.iter().enumerate() {
                let null = format!("driver=null-co,node-name=null{index},read-zeroes=on,size={}", 4_u64 << 30);
                let throttle = format!("driver=throttle,node-name=disk{index},file=null{index},throttle-group=shared");
                let address = format!("addr.type=unix,addr.path={}", socket.display());
                let export =
                    format!("vhost-user-blk,id=export{index},node-name=disk{index},writable=on,iothread=thread");
                command.args([
                    "--blockdev",
                    &null,
                    "--blockdev",
                    &throttle,
                    "--export",
                    &format!("{export},{address}"),
                ]);
            }
            command
        }
    }
}

fn client(tools: &Tools, socket: &Path, limit: Limit, depth: u32, seconds: f64) -> Command {
    let block = format!("{}k", limit.block_kib);
    let mut command = pinned(CLIENT_CORE, &tools.client);
    command.arg("bench").arg("--socket").arg(socket).args(["--rw", limit.access, "--bs", &block, "--warmup", "1"]);
    // The disk has nothing to destroy.
    command.arg("--destroy");
    command.args(["--depth", &depth.to_string(), "--time", &seconds.to_string(), "--output", "json"]);
    command
}

/// The effects of a limit.
#[derive(Debug, Clone, Default)]
struct Samples {
    /// The largest deviation of a second from the rate, in percent of it.
    error_percent: Vec<f64>,
    longest_gap_ms: Vec<f64>,
}

impl Samples {
    fn add(&mut self, report: &Value, rate: u64) -> Result<()> {
        let seconds = report["per_second"].as_array().context("a client of another version than expected")?;
        let error = |count: &Value| Ok((number(count)? / rate as f64 - 1.0).abs() * 100.0);
        let errors = seconds.iter().map(error).collect::<Result<Vec<f64>>>()?;
        self.error_percent.push(errors.into_iter().fold(0.0, f64::max));
        self.longest_gap_ms.push(number(&report["longest_gap_us"])? / 1000.0);
        Ok(())
    }
}

fn measure(side: Side, tools: &Tools, limit: Limit, seconds: f64) -> Result<Value> {
    let socket = socket_path();
    with_server(server(side, tools, limit, std::slice::from_ref(&socket)), &socket, |_| {
        json_of(client(tools, &socket, limit, DEPTH, seconds))
    })
}

/// Measures one limit on both sides, in turn.
fn measure_both(tools: &Tools, limit: Limit, pairs: usize, seconds: f64) -> Result<[Samples; 2]> {
    let mut samples = [Samples::default(), Samples::default()];
    for round in 0..pairs {
        for place in 0..SIDES.len() {
            let side = (place + round) % SIDES.len();
            samples[side].add(&measure(SIDES[side], tools, limit, seconds)?, limit.requests())?;
        }
    }
    println!("{}: {samples:?}", limit.words());
    Ok(samples)
}

/// Measures which part of its fair share each of two disks gets.
fn measure_shares(side: Side, tools: &Tools, seconds: f64) -> Result<[f64; 2]> {
    let first = socket_path();
    let second = first.with_extension("second.sock");
    let _ = std::fs::remove_file(&second);
    let sockets = [first.clone(), second.clone()];
    let limit = Limit::of_requests(SHARED_RATE);
    let rates = with_server(server(side, tools, limit, &sockets), &first, |_| {
        std::thread::scope(|scope| {
            let run = |index: usize| {
                let command = client(tools, &sockets[index], limit, SHARED_DEPTHS[index], seconds);
                scope.spawn(move || json_of(command).and_then(|report| number(&report["iops"])))
            };
            let clients = [run(0), run(1)];
            clients.map(|client| client.join().unwrap_or_else(|_| anyhow::bail!("a client panicked")))
        })
        .into_iter()
        .collect::<Result<Vec<f64>>>()
    });
    let _ = std::fs::remove_file(&second);
    let rates = rates?;
    let fair = rates.iter().sum::<f64>() / 2.0;
    Ok([rates[0] / fair, rates[1] / fair])
}

/// Longest waits that are not the limit's, in milliseconds: one of each a round.
#[derive(Debug, Default)]
struct Waits {
    clock: Vec<f64>,
    sleep: Vec<f64>,
    unlimited: Vec<f64>,
    spinning: Vec<f64>,
}

impl Waits {
    fn measure(&mut self, tools: &Tools, seconds: f64) -> Result<()> {
        let gap = |limits: &str, more: &[&str], load: Limit| {
            let socket = socket_path();
            let drive = format!("name=disk,format=null,size=4G,socket={}{limits}", socket.display());
            let mut command = pinned(SERVER_CORE, &tools.ringdisk);
            command.args(["serve", "--reactors", "1", "--queues", "1", "--drive", &drive]).args(more);
            let report = with_server(command, &socket, |_| json_of(client(tools, &socket, load, DEPTH, seconds)))?;
            anyhow::Ok(number(&report["longest_gap_us"])? / 1000.0)
        };
        let (rate, poll_max_us) = SPINNING;
        let load = Limit::of_requests(rate);
        self.clock.push(longest_wait_ms(Thread::ReadsTheClock, seconds)?);
        self.sleep.push(longest_wait_ms(Thread::Sleeps, seconds)?);
        self.unlimited.push(gap("", &[], load)?);
        let limits = format!(",filter=throttle:iops-total={rate}");
        self.spinning.push(gap(&limits, &["--poll-max-us", poll_max_us], load)?);
        Ok(())
    }

    fn table(&self) -> String {
        let spinning = format!("{} requests a second, and the server never sleeps: the gap", SPINNING.0);
        let rows = [
            ("a thread on each core that only reads the clock: the time between two looks", &self.clock),
            ("a thread on each core that sleeps until each next millisecond: how late it wakes up", &self.sleep),
            ("the client of a null disk without a limit: the gap", &self.unlimited),
            (spinning.as_str(), &self.spinning),
        ];
        let rows = rows.map(|(what, waits)| format!("| {what} | {} |\n", shown(waits, " ms")));
        format!("| what | longest wait |\n|---|---|\n{}", rows.concat())
    }
}

pub(super) fn run(ringdisk: PathBuf, arguments: &BenchArguments) -> Result<()> {
    let tools = Tools::find(ringdisk)?;
    ensure!(arguments.pairs > 0, "at least one pair is needed");
    let seconds = arguments.seconds.max(SECONDS_MIN);
    let measured = |limit: Limit| Ok((limit, measure_both(&tools, limit, arguments.pairs, seconds)?));
    let rows = RATES.map(Limit::of_requests).into_iter().map(measured).collect::<Result<Vec<Row>>>()?;
    let others = LIMITS.into_iter().map(measured).collect::<Result<Vec<Row>>>()?;
    let mut waits = Waits::default();
    (0..arguments.pairs).try_for_each(|_| waits.measure(&tools, seconds))?;
    println!("{waits:?}");
    let mut shares = [Vec::new(), Vec::new()];
    for round in 0..arguments.pairs {
        for place in 0..SIDES.len() {
            let side = (place + round) % SIDES.len();
            shares[side].push(measure_shares(SIDES[side], &tools, seconds)?);
        }
    }
    println!("shares: {shares:?}");
    let text = page([&rows, &others], &waits, &shares, arguments.pairs, seconds)?;
    put_page(&text, "benchmarks-throttle.md", arguments)
}

/// A limit, with what was measured of it on both sides.
type Row = (Limit, [Samples; 2]);

fn page(rows: [&[Row]; 2], waits: &Waits, shares: &[Vec<[f64; 2]>; 2], pairs: usize, seconds: f64) -> Result<String> {
    let mut text = "# Limits: figures\n\n".to_owned();
    writeln!(
        text,
        "`cargo xtask bench --throttle` has written this page. Each limit ran {pairs} times for {seconds} s on each side, in turn,\n\
         with the same client, {DEPTH} reads of 4 KiB in flight, and a null disk below the filter. The peer is\n\
         {}, filter `throttle`. The server and the client have a core each.\n\n\
         The error is that of the whole second that is the furthest from the rate. The gap is the longest time in which the\n\
         client got no completion. Figures are medians of the runs, with the worst in brackets. The goals are 1% and the\n\
         larger of 2 ms and twice the distance of two requests.\n",
        version("qemu-storage-daemon"),
    )?;
    let [of_all, others] = rows;
    text += "| requests a second | error | error of QEMU | gap | gap of QEMU | goal |\n|---|---|---|---|---|---|\n";
    for (limit, samples) in of_all {
        writeln!(text, "| {} | {}", limit.per_second, cells_of(limit, samples))?;
    }
    text += "\nOther limits, each with the load that meets it:\n\n";
    text += "| limit and load | error | error of QEMU | gap | gap of QEMU | goal |\n|---|---|---|---|---|---|\n";
    for (limit, samples) in others {
        writeln!(text, "| {} | {}", limit.words(), cells_of(limit, samples))?;
    }
    text += "\nWhat the machine adds to gaps, which [0150](decisions/0150-gaps.md) explains. No limit is at work in the first\n";
    text += "three rows:\n\n";
    text += &waits.table();
    let part =
        |side: &[[f64; 2]], disk: usize| median(&side.iter().map(|shares| shares[disk]).collect::<Vec<_>>()) * 100.0;
    let [greedy, other] = SHARED_DEPTHS;
    writeln!(
        text,
        "\nTwo disks share {SHARED_RATE} requests a second, one with {greedy} in flight and one with {other}. The goal is 95% to\n\
         105% of a fair share for each.\n\n\
         | disk | share | share with QEMU |\n|---|---|---|\n| {greedy} in flight | {:.1}% | {:.1}% |\n\
         | {other} in flight | {:.1}% | {:.1}% |",
        part(&shares[0], 0),
        part(&shares[1], 0),
        part(&shares[0], 1),
        part(&shares[1], 1),
    )?;
    Ok(text)
}

/// The cells of a row behind its first.
fn cells_of(limit: &Limit, [own, qemu]: &[Samples; 2]) -> String {
    let goal_ms = f64::max(2.0, 2000.0 / limit.requests() as f64);
    format!(
        "{} | {} | {} | {} | {goal_ms:.1} ms |",
        shown(&own.error_percent, "%"),
        shown(&qemu.error_percent, "%"),
        shown(&own.longest_gap_ms, " ms"),
        shown(&qemu.longest_gap_ms, " ms"),
    )
}

/// The median of some figures, and the worst.
fn shown(samples: &[f64], unit: &str) -> String {
    let worst = samples.iter().copied().fold(0.0, f64::max);
    format!("{:.2}{unit} ({worst:.2})", median(samples))
}
