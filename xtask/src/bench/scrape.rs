//! `cargo xtask bench --scrape`: how long it takes to scrape the figures of many disks, and what that costs a guest.

use super::BenchArguments;
use super::measure::{CLIENT_CORE, SERVER_CORE, Tools, json_of, number, pinned, with_server};
use super::rounds::{in_turn, put_page};
use super::statistics::{median, quantile, ratios};
use anyhow::{Context, Result, ensure};
use std::fmt::Write as _;
use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const DISKS: usize = 100;
const SCRAPES: usize = 100;
/// What each disk is asked for first: histograms that nothing was counted in are left out.
const REQUESTS: u32 = 500;
/// How often the guest is disturbed: more often than anybody scrapes.
const PERIOD: Duration = Duration::from_millis(100);
const PATHS: [&str; 2] = ["/metrics", "/v1/stats"];

/// A path, its length, and the time of each scrape in milliseconds.
struct Scraped {
    path: &'static str,
    length_bytes: usize,
    times_ms: Vec<f64>,
}

/// What a guest gets through in a second, alone and while somebody scrapes: one of each a round.
#[derive(Default)]
struct Cost {
    alone: Vec<f64>,
    scraped: Vec<f64>,
}

fn server(tools: &Tools, control: &Path, socket: impl Fn(usize) -> PathBuf) -> Command {
    let mut command = pinned(SERVER_CORE, tools.ringdisk());
    command.args(["serve", "--reactors", "1", "--control"]).arg(control);
    for disk in 0..DISKS {
        let drive = format!("format=null,size=1G,queues=1,name=disk{disk},socket={}", socket(disk).display());
        command.args(["--drive", &drive]);
    }
    command
}

fn client(tools: &Tools, socket: &Path, limit: [&str; 2]) -> Result<f64> {
    let mut command = pinned(CLIENT_CORE, &tools.client);
    command.arg("bench").arg("--socket").arg(socket).args(["--rw", "randrw", "--bs", "4k", "--depth", "16"]);
    command.args(["--destroy", "--flush-every", "64", "--warmup", "0", "--output", "json"]).args(limit);
    json_of(command).and_then(|report| number(&report["iops"]))
}

/// Fetches `path` as a scraper does: the time, and how many bytes come.
fn fetch(control: &Path, path: &str) -> Result<(Duration, usize)> {
    let begun = Instant::now();
    let mut stream = UnixStream::connect(control).context("cannot connect to the control socket")?;
    write!(stream, "GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer)?;
    ensure!(answer.starts_with(b"HTTP/1.1 200"), "{path} is not answered as expected");
    Ok((begun.elapsed(), answer.len()))
}

fn scrape(control: &Path, path: &'static str) -> Result<Scraped> {
    let fetched = (0..SCRAPES).map(|_| fetch(control, path)).collect::<Result<Vec<_>>>()?;
    let length_bytes = fetched.first().map_or(0, |(_, length_bytes)| *length_bytes);
    let times_ms = fetched.iter().map(|(time, _)| time.as_secs_f64() * 1000.0).collect();
    Ok(Scraped { path, length_bytes, times_ms })
}

/// Ends the scraper, also when what runs beside it panics.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Runs `work` while somebody scrapes.
fn while_scraped<T>(control: &Path, work: impl FnOnce() -> Result<T>) -> Result<T> {
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let scraper = scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                fetch(control, PATHS[0])?;
                std::thread::sleep(PERIOD);
            }
            anyhow::Ok(())
        });
        let over = Over(&is_over);
        let worked = work();
        drop(over);
        scraper.join().unwrap_or_else(|_| anyhow::bail!("the scraper panicked"))?;
        worked
    })
}

pub(super) fn run(ringdisk: PathBuf, arguments: &BenchArguments) -> Result<()> {
    let tools = Tools::find(ringdisk)?;
    let directory = tempfile::Builder::new().prefix("ringdisk-scrape-").tempdir()?;
    let control = directory.path().join("control");
    let socket = |disk: usize| directory.path().join(format!("{disk}.sock"));
    let (scraped, cost) = with_server(server(&tools, &control, socket), &socket(DISKS - 1), |_| {
        for disk in 0..DISKS {
            client(&tools, &socket(disk), ["--count", &REQUESTS.to_string()])?;
        }
        let scraped = PATHS.iter().map(|path| scrape(&control, path)).collect::<Result<Vec<_>>>()?;
        let (mut cost, seconds) = (Cost::default(), arguments.seconds.to_string());
        let work = || client(&tools, &socket(0), ["--time", &seconds]);
        in_turn(arguments.pairs, 2, |side| {
            match side {
                0 => cost.alone.push(work()?),
                _ => cost.scraped.push(while_scraped(&control, work)?),
            }
            Ok(())
        })?;
        Ok((scraped, cost))
    })?;
    let text = page(&scraped, &cost, arguments)?;
    print!("{text}");
    put_page(&text, "benchmarks-scrape.md", arguments)
}

fn page(scraped: &[Scraped], cost: &Cost, arguments: &BenchArguments) -> Result<String> {
    let mut text = "# Scrapes: figures\n\n".to_owned();
    writeln!(
        text,
        "`cargo xtask bench --scrape` has written this page. One daemon with one reactor serves {DISKS} null disks. Each has\n\
         served requests, so all histograms are there. A scraper connects, asks, and reads to the end, {SCRAPES} times. The goal\n\
         for `{}` is 5 ms.\n\n\
         | path | KiB | median | slowest |\n|---|---|---|---|",
        PATHS[0],
    )?;
    for Scraped { path, length_bytes, times_ms } in scraped {
        let slowest = quantile(times_ms, 1.0);
        writeln!(text, "| `{path}` | {} | {:.2} ms | {slowest:.2} ms |", length_bytes >> 10, median(times_ms))?;
    }
    let ratio = ratios(&cost.scraped, &cost.alone);
    let scrape_ms = scraped.first().map_or(0.0, |scraped| median(&scraped.times_ms));
    let a_second = 1.0 / PERIOD.as_secs_f64();
    writeln!(
        text,
        "\nA guest of one of the disks has 16 requests in flight, alone and with ten scrapes a second, {} times for {} s each,\n\
         in turn. Figures are medians. The daemon has one core, on which a thread beside the reactor makes the answers. Ten of\n\
         them a second take {:.1}% of it, which the guest cannot have.\n\n\
         | requests a second, alone | with ten scrapes a second | ratio (lowest) |\n|---|---|---|\n\
         | {:.0} | {:.0} | {:.3} ({:.3}) |",
        arguments.pairs,
        arguments.seconds,
        scrape_ms * a_second / 10.0,
        median(&cost.alone),
        median(&cost.scraped),
        median(&ratio),
        quantile(&ratio, 0.0),
    )?;
    Ok(text)
}
