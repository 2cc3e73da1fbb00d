//! The ideas, with their cells and the columns of their tables.

/// An idea and its table.
pub(super) struct Idea {
    /// The name for `--filter`, and of the kept table.
    pub(super) name: &'static str,
    pub(super) title: &'static str,
    /// The description of the comparison.
    pub(super) words: &'static str,
    pub(super) columns: Vec<Column>,
    pub(super) cells: Vec<Cell>,
    /// Whether no cell was left out.
    pub(super) is_whole: bool,
    /// Extra time for starting and ending.
    pub(super) around_seconds: f64,
    /// The conclusions from the figures in words.
    pub(super) verdicts: Vec<Verdict>,
    /// What a profile or the counters say about these figures.
    pub(super) why: &'static str,
}

/// A sentence with the median of a ratio over some cells.
pub(super) struct Verdict {
    /// A word in the names of those cells; empty for all.
    pub(super) of: &'static str,
    pub(super) what: &'static str,
    pub(super) sides: (usize, usize),
    /// The words for a ratio below one, and for others.
    pub(super) below: &'static str,
    pub(super) above: &'static str,
}

/// A column of figures.
pub(super) struct Column {
    pub(super) heading: &'static str,
    pub(super) shows: Shows,
}

#[derive(Clone, Copy)]
pub(super) enum Shows {
    /// Requests a second of a side.
    Rate(usize),
    /// One side's figure divided by another's, round by round.
    Ratio(usize, usize, &'static str),
    /// The median of a side's figure.
    Figure(usize, &'static str),
}

/// The storage of the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Storage {
    Null,
    /// A millisecond for each request, and the bandwidth of a slow disk.
    Slow,
    Tmpfs,
    /// A loop device over a file in memory: fast, and a block device.
    Loop,
    /// A file on the disk of the build directory, or of `--directory`.
    Disk,
}

/// The process of the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Server {
    /// A separate process, on its own processor.
    Apart,
    /// The client's process, so that the server's counters are in the report.
    Within,
}

pub(super) struct Side {
    pub(super) name: &'static str,
    /// Drive options beside the file's; with [`Server::Apart`] those of the first side apply to all.
    pub(super) drive: String,
    /// Options that begin with `guest.` or `server.`.
    pub(super) how: &'static str,
}

pub(super) struct Cell {
    pub(super) name: String,
    pub(super) storage: Storage,
    pub(super) server: Server,
    pub(super) rw: &'static str,
    pub(super) read_percent: Option<u8>,
    pub(super) block_bytes: u32,
    pub(super) queues: u32,
    pub(super) depth: u32,
    /// Whether the client sleeps when it has nothing to do, as a kernel's driver does.
    pub(super) sleeps: bool,
    /// Whether a second disk is served, to which every second queue belongs.
    pub(super) two_disks: bool,
    pub(super) sides: Vec<Side>,
}

const RATE: &str = "/iops";
const CLIENT_CPU: &str = "/client_us_per_request";
const SERVER_CPU: &str = "/servers/0/us_per_request";
const SWITCHES: &str = "/client_voluntary_switches_per_request";
const MEAN: &str = "/latency_us/mean";
const P99: &str = "/latency_us/p99";
const DEVIATION: &str = "/latency_us/deviation";

const ACCESSES: [(&str, &str); 4] = [
    ("sequential read", "read"),
    ("sequential write", "write"),
    ("random read", "randread"),
    ("random write", "randwrite"),
];
const MEMORY: [(&str, Storage); 2] = [("null", Storage::Null), ("tmpfs", Storage::Tmpfs)];
/// The number of fio's jobs in the first measurements of the driver's ideas.
const JOBS: u32 = 16;
const JOB_DEPTH: u32 = 64;

fn sides(all: &[(&'static str, &str, &'static str)]) -> Vec<Side> {
    all.iter().map(|&(name, drive, how)| Side { name, drive: drive.to_owned(), how }).collect()
}

fn column(heading: &'static str, shows: Shows) -> Column {
    Column { heading, shows }
}

impl Cell {
    /// Makes a cell with jobs on queues of their own.
    fn of_jobs(name: String, storage: Storage, server: Server, rw: &'static str, sides: Vec<Side>) -> Self {
        let (block_bytes, queues, depth) = (4096, JOBS, JOB_DEPTH);
        let (read_percent, sleeps, two_disks) = (None, true, false);
        Self { name, storage, server, rw, read_percent, block_bytes, queues, depth, sleeps, two_disks, sides }
    }
}

pub(super) fn ideas() -> Vec<Idea> {
    vec![paths(), slow(), callbacks(), harvest(), durable(), contexts(), packed()]
}

fn paths() -> Idea {
    let both = || sides(&[("bio", "", "guest.path=bio"), ("request", "", "guest.path=request")]);
    let cells = MEMORY.iter().flat_map(|&(words, storage)| {
        ACCESSES.iter().flat_map(move |&(access, rw)| {
            [512, 4096].map(|block_bytes| Cell {
                block_bytes,
                ..Cell::of_jobs(format!("{words}, {access}, {block_bytes} B"), storage, Server::Apart, rw, both())
            })
        })
    });
    Idea {
        name: "paths",
        title: "The bio path beside the request path",
        words: "16 jobs at depth 64. Bio sends each request at once; request queues, sorts and merges. The server has a \
                processor of its own, the client the other. Client's CPU in us a request, and its switches a request.",
        columns: vec![
            column("bio", Shows::Rate(0)),
            column("request", Shows::Rate(1)),
            column("bio by request", Shows::Ratio(0, 1, RATE)),
            column("CPU, bio", Shows::Figure(0, CLIENT_CPU)),
            column("CPU, request", Shows::Figure(1, CLIENT_CPU)),
            column("switches, bio", Shows::Figure(0, SWITCHES)),
            column("switches, request", Shows::Figure(1, SWITCHES)),
            column("on the wire, request", Shows::Figure(1, "ring_requests")),
        ],
        cells: cells.collect(),
        is_whole: true,
        around_seconds: 0.0,
        verdicts: vec![
            Verdict {
                of: "random",
                what: RATE,
                sides: (0, 1),
                below: "the request path is faster even where nothing can be merged",
                above: "bio is as fast or faster where nothing can be merged, and is the default",
            },
            Verdict {
                of: "sequential",
                what: RATE,
                sides: (0, 1),
                below: "where neighbours can be merged, the request path is faster on fast disks, too",
                above: "bio is faster even where neighbours can be merged",
            },
        ],
        why: "Where nothing can be merged, both paths send the same requests, and the queue of the request path costs the \
              client some hundredths of a microsecond each: that is what bio gains on the null disk, where the client is \
              the limit. On tmpfs the server is. In sequential loads 64 neighbours become one request on the wire, which \
              saves both sides more than the queue costs. The first measurements were of a kernel's block layer, whose \
              queue costs much more than a driver's.",
    }
}

fn slow() -> Idea {
    let both = || sides(&[("request", "", "guest.path=request"), ("bio", "", "guest.path=bio")]);
    let cells = ACCESSES
        .iter()
        .take(2)
        .map(|&(access, rw)| Cell::of_jobs(format!("{access}, 4096 B"), Storage::Slow, Server::Apart, rw, both()));
    Idea {
        name: "slow",
        title: "The same on a slow disk",
        words: "A millisecond for each request; on the link 10 us for each request, and 200 MB a second for all \
                (`filter=delay:ms=1:request-us=10:bandwidth=200M`), as on a SATA disk. Merging saves requests on the \
                link.",
        columns: vec![
            column("request", Shows::Rate(0)),
            column("bio", Shows::Rate(1)),
            column("request by bio", Shows::Ratio(0, 1, RATE)),
            column("on the wire, request", Shows::Figure(0, "ring_requests")),
            column("on the wire, bio", Shows::Figure(1, "ring_requests")),
            column("CPU, request", Shows::Figure(0, CLIENT_CPU)),
            column("CPU, bio", Shows::Figure(1, CLIENT_CPU)),
        ],
        cells: cells.collect(),
        is_whole: true,
        around_seconds: 0.0,
        verdicts: vec![Verdict {
            of: "",
            what: RATE,
            sides: (0, 1),
            below: "merging loses where each request costs",
            above: "merging gains where each request costs",
        }],
        why: "",
    }
}

fn callbacks() -> Idea {
    let all = || {
        sides(&[
            ("suppressed-event", "", "guest.callbacks=suppressed,guest.event-idx=on"),
            ("kept-event", "", "guest.callbacks=kept,guest.event-idx=on"),
            ("suppressed-flags", "", "guest.callbacks=suppressed,guest.event-idx=off"),
            ("kept-flags", "", "guest.callbacks=kept,guest.event-idx=off"),
        ])
    };
    let cells = MEMORY.iter().flat_map(|&(words, storage)| {
        ACCESSES
            .iter()
            .map(move |&(access, rw)| Cell::of_jobs(format!("{words}, {access}"), storage, Server::Within, rw, all()))
    });
    const NOTES: &str = "server_notifications";
    Idea {
        name: "callbacks",
        title: "Callbacks off while the ring is drained",
        words: "16 jobs of 4 KiB at depth 64. Kept callbacks call for every completion. Both with EVENT_IDX and with plain \
                flags. Notifications a request. Server and client are one process.",
        columns: vec![
            column("suppressed", Shows::Rate(0)),
            column("by kept, EVENT_IDX", Shows::Ratio(0, 1, RATE)),
            column("by kept, flags", Shows::Ratio(2, 3, RATE)),
            column("EVENT_IDX by flags", Shows::Ratio(0, 2, RATE)),
            column("notes, EVENT_IDX", Shows::Figure(0, NOTES)),
            column("notes, kept, EVENT_IDX", Shows::Figure(1, NOTES)),
            column("notes, flags", Shows::Figure(2, NOTES)),
            column("notes, kept, flags", Shows::Figure(3, NOTES)),
        ],
        cells: cells.collect(),
        is_whole: true,
        around_seconds: 0.3,
        verdicts: vec![Verdict {
            of: "",
            what: RATE,
            sides: (0, 1),
            below: "suppressing callbacks loses",
            above: "suppressing callbacks loses nothing",
        }],
        why: "There is little to suppress: a busy client finds completions by looking, and a server tells of a batch \
              once, so even with callbacks kept there is one notification for 16 to 64 requests. The first measurements were \
              of a kernel's driver, which each callback interrupts.",
    }
}

fn harvest() -> Idea {
    let cells = [("loop over tmpfs", Storage::Loop), ("direct, disk", Storage::Disk)].into_iter().flat_map(
        |(words, storage)| {
            ["linux-aio", "io_uring"].map(|engine| Cell {
                name: format!("{words}, {engine}"),
                storage,
                server: Server::Within,
                rw: "randread",
                read_percent: None,
                block_bytes: 4096,
                queues: 1,
                depth: 128,
                sleeps: false,
                two_disks: false,
                sides: ["", "server.harvest=idle"]
                    .into_iter()
                    .zip(["on", "off"])
                    .map(|(how, name)| Side { name, drive: format!("engine={engine},cache=none"), how })
                    .collect(),
            })
        },
    );
    Idea {
        name: "harvest",
        title: "Completions are looked for after each submission",
        words: "4 KiB random reads at depth 128. Off, a turn of the reactor that has submitted does not look for \
                completions (`server.harvest=idle`). Times in us. Completions a harvest of the engine: tenth percentile, \
                median, ninetieth, and the share of harvests that gave a full queue.",
        columns: vec![
            column("on", Shows::Rate(0)),
            column("on by off", Shows::Ratio(0, 1, RATE)),
            column("mean, on", Shows::Figure(0, MEAN)),
            column("off", Shows::Figure(1, MEAN)),
            column("p99, on", Shows::Figure(0, P99)),
            column("off", Shows::Figure(1, P99)),
            column("deviation, on", Shows::Figure(0, DEVIATION)),
            column("off", Shows::Figure(1, DEVIATION)),
            column("p10, on", Shows::Figure(0, "/engine_harvests/p10")),
            column("p50, on", Shows::Figure(0, "/engine_harvests/p50")),
            column("p90, on", Shows::Figure(0, "/engine_harvests/p90")),
            column("full, on, %", Shows::Figure(0, "/engine_harvests/full_percent")),
            column("p10, off", Shows::Figure(1, "/engine_harvests/p10")),
            column("p50, off", Shows::Figure(1, "/engine_harvests/p50")),
            column("p90, off", Shows::Figure(1, "/engine_harvests/p90")),
            column("full, off, %", Shows::Figure(1, "/engine_harvests/full_percent")),
        ],
        cells: cells.collect(),
        is_whole: true,
        around_seconds: 0.0,
        verdicts: vec![
            Verdict {
                of: "direct, disk",
                what: RATE,
                sides: (0, 1),
                below: "looking after each submission costs a little on storage",
                above: "looking after each submission costs nothing on storage",
            },
            Verdict {
                of: "loop",
                what: RATE,
                sides: (0, 1),
                below: "looking after each submission loses where all processors are busy",
                above: "looking after each submission gains where all processors are busy",
            },
        ],
        why: "With the look, the engine's harvests are smaller, as was intended (the columns of p50 and p90), so the same \
              completions take more turns of the reactor. That time is missing where the loop device's thread, the server \
              and the client share two processors; on storage, the device is the limit. The look stays on: without it, \
              completions lie as long as new requests come.",
    }
}

fn durable() -> Idea {
    let all = || {
        sides(&[
            ("sync", "cache=writeback,sync=on", ""),
            ("none", "cache=none", ""),
            ("directsync", "cache=directsync", ""),
        ])
    };
    let cells = [("sequential write", "write"), ("random write", "randwrite")].map(|(access, rw)| Cell {
        block_bytes: 16 << 10,
        queues: 1,
        depth: 74,
        sleeps: false,
        ..Cell::of_jobs(format!("{access}, 16 KiB at 74"), Storage::Disk, Server::Within, rw, all())
    });
    Idea {
        name: "durable",
        title: "Durable writes through the page cache beside direct I/O",
        words: "16 KiB writes at depth 74 on the disk. `sync=on` makes each durable when it ends, and so does \
                `cache=directsync`; `cache=none` leaves that to flushes. CPU of both sides, us a request.",
        columns: vec![
            column("sync=on", Shows::Rate(0)),
            column("by cache=none", Shows::Ratio(0, 1, RATE)),
            column("by directsync", Shows::Ratio(0, 2, RATE)),
            column("p99, sync=on", Shows::Figure(0, P99)),
            column("p99, none", Shows::Figure(1, P99)),
            column("p99, directsync", Shows::Figure(2, P99)),
            column("CPU, sync=on", Shows::Figure(0, CLIENT_CPU)),
            column("CPU, none", Shows::Figure(1, CLIENT_CPU)),
            column("CPU, directsync", Shows::Figure(2, CLIENT_CPU)),
        ],
        cells: cells.into(),
        is_whole: true,
        around_seconds: 0.0,
        verdicts: vec![Verdict {
            of: "",
            what: RATE,
            sides: (0, 2),
            below: "sync=on is slower than direct durable writes",
            above: "sync=on is as fast as direct durable writes",
        }],
        why: "With `sync=on`, writes that come while a sync of the file runs are copied into the page cache and share the \
              next sync (one `fdatasync` for a group), so each waits for up to two syncs and costs a copy and a worker's \
              turn: that is the CPU column. A direct durable write waits only for the device, and all of them do so at \
              once. `cache=none` promises nothing before a flush, so it is no durable rival.",
    }
}

fn contexts() -> Idea {
    let pooled = || {
        let late = "engine=io_uring,filter=delay:ms=1:jitter-us=1000";
        sides(&[("pool", "engine=io_uring", ""), ("late", late, "")])
    };
    let cell = |name: &str, read_percent, queues, depth| Cell {
        name: name.to_owned(),
        storage: Storage::Tmpfs,
        server: Server::Within,
        rw: "randrw",
        read_percent: Some(read_percent),
        block_bytes: 4096,
        queues,
        depth,
        sleeps: false,
        two_disks: false,
        sides: pooled(),
    };
    Idea {
        name: "contexts",
        title: "Contexts of requests that are made anew",
        words: "4 KiB on a file in memory, at full speed and one to two milliseconds late, at random. A pool that never \
                misses makes none once it is warm. `cargo xtask bench --contexts` compares it with the allocator.",
        columns: vec![
            column("full speed", Shows::Rate(0)),
            column("made a request", Shows::Figure(0, "contexts_made")),
            column("bytes a request", Shows::Figure(0, "context_bytes_made")),
            column("late", Shows::Rate(1)),
            column("made a request", Shows::Figure(1, "contexts_made")),
            column("bytes a request", Shows::Figure(1, "context_bytes_made")),
        ],
        cells: vec![
            Cell { two_disks: true, ..cell("2 disks at 128, half reads", 50, 2, 128) },
            cell("4 queues at 128, 80% reads", 80, 4, 128),
            cell("4 queues at 128, 90% reads", 90, 4, 128),
            cell("1 queue at 256, half reads", 50, 1, 256),
        ],
        is_whole: true,
        around_seconds: 0.2,
        verdicts: Vec::new(),
        why: "",
    }
}

fn packed() -> Idea {
    let both = || sides(&[("packed", "packed=on", "guest.packed=on"), ("split", "", "guest.packed=off")]);
    let cells = MEMORY.iter().flat_map(|&(words, storage)| {
        ACCESSES.iter().skip(2).flat_map(move |&(access, rw)| {
            [1, 32, 128].map(|depth| Cell {
                queues: 1,
                depth,
                sleeps: false,
                ..Cell::of_jobs(format!("{words}, {access}, {depth}"), storage, Server::Apart, rw, both())
            })
        })
    });
    Idea {
        name: "packed",
        title: "Packed rings beside split rings",
        words: "4 KiB, one queue. CPU in us a request, of the server and of the client.",
        columns: vec![
            column("packed", Shows::Rate(0)),
            column("split", Shows::Rate(1)),
            column("rate, packed by split", Shows::Ratio(0, 1, RATE)),
            column("server, packed", Shows::Figure(0, SERVER_CPU)),
            column("server, split", Shows::Figure(1, SERVER_CPU)),
            column("server, packed by split", Shows::Ratio(0, 1, SERVER_CPU)),
            column("client, packed by split", Shows::Ratio(0, 1, CLIENT_CPU)),
        ],
        cells: cells.collect(),
        is_whole: true,
        around_seconds: 0.0,
        verdicts: vec![Verdict {
            of: "",
            what: SERVER_CPU,
            sides: (0, 1),
            below: "packed rings take less of the server's CPU",
            above: "split rings take less of the server's CPU",
        }],
        why: "",
    }
}
