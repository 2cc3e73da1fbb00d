//! `cargo xtask bench --driver`: what the driver's ideas are worth, each beside a driver without it. Bio path beside request
//! path, and callbacks suppressed beside kept, with flags and with EVENT_IDX. Disk and guest are one process, which
//! `ringdisk bench --compare serve:...` measures in turn.

use super::BenchArguments;
use super::measure::escaped;
use crate::command::Program;
use anyhow::{Result, ensure};
use std::path::Path;

/// As many as fio's jobs were where these ideas were first measured.
const QUEUES: u32 = 16;
const DEPTH: u32 = 64;
const FILE_BYTES: usize = 512 << 20;

const ACCESSES: [(&str, &str); 4] = [
    ("sequential read", "read"),
    ("sequential write", "write"),
    ("random read", "randread"),
    ("random write", "randwrite"),
];
/// A name, and the guest's options, of each side. The first is compared with the others.
type Sides = &'static [(&'static str, &'static str)];
const PATHS: Sides = &[("bio", "guest.path=bio"), ("request", "guest.path=request")];
const CALLBACKS: Sides = &[
    ("suppressed-event", "guest.callbacks=suppressed,guest.event-idx=on"),
    ("kept-event", "guest.callbacks=kept,guest.event-idx=on"),
    ("suppressed-flags", "guest.callbacks=suppressed,guest.event-idx=off"),
    ("kept-flags", "guest.callbacks=kept,guest.event-idx=off"),
];
/// A millisecond for each request, and as much data a second as a slow disk moves.
const SLOW: &str = "format=null,size=4G,filter=delay:ms=1:bandwidth=200M";
const NULL: &str = "format=null,size=4G";

struct Cell {
    name: String,
    drive: String,
    rw: &'static str,
    block_bytes: u32,
    sides: Sides,
}

fn cells(file: &Path) -> Vec<Cell> {
    let tmpfs = format!("file={},format=raw", escaped(file));
    let mut cells = Vec::new();
    for (storage, drive) in [("null", NULL), ("tmpfs", tmpfs.as_str())] {
        for (words, rw) in ACCESSES {
            for (what, blocks, sides) in [("paths", &[512, 4096][..], PATHS), ("callbacks", &[4096][..], CALLBACKS)] {
                cells.extend(blocks.iter().map(|&block_bytes| Cell {
                    name: format!("{what}, {storage}, {words}, {block_bytes} B"),
                    drive: drive.to_owned(),
                    rw,
                    block_bytes,
                    sides,
                }));
            }
        }
    }
    for (words, rw) in ACCESSES.into_iter().take(2) {
        let name = format!("paths, slow, {words}, 4096 B");
        cells.push(Cell { name, drive: SLOW.to_owned(), rw, block_bytes: 4096, sides: PATHS });
    }
    cells
}

pub(super) fn run(ringdisk: &Path, arguments: &BenchArguments) -> Result<()> {
    let directory = tempfile::tempdir_in("/dev/shm")?;
    let file = directory.path().join("disk.raw");
    let is_chosen = |cell: &Cell| {
        arguments.filter.is_empty() || arguments.filter.iter().any(|text| cell.name.contains(text.as_str()))
    };
    let cells: Vec<_> = cells(&file).into_iter().filter(is_chosen).collect();
    if arguments.list {
        cells.iter().for_each(|cell| println!("{}", cell.name));
        return Ok(());
    }
    ensure!(!cells.is_empty(), "no cell has such a name; --list names them");
    std::fs::write(&file, vec![7; FILE_BYTES])?;
    for cell in cells {
        println!("\n## {}", cell.name);
        let mut bench = Program::new(ringdisk).args(["bench", "--destroy", "--verbose", "--rw", cell.rw]);
        for (key, value) in [
            ("--bs", cell.block_bytes.to_string()),
            ("--queues", QUEUES.to_string()),
            ("--depth", DEPTH.to_string()),
            ("--pairs", arguments.pairs.to_string()),
            ("--time", arguments.seconds.to_string()),
        ] {
            bench = bench.args([key, &value]);
        }
        let targets = cell.sides.iter().map(|(name, guest)| format!("{name}=serve:{},{guest}", cell.drive));
        let targets: Vec<_> = targets.collect();
        let bench = bench.args(["--compare"]).args(targets.iter().map(String::as_str));
        ensure!(bench.watch()?.success(), "ringdisk bench has failed");
    }
    Ok(())
}
