//! A daemon's answers as tables for people.

use super::cells::table;
use super::latency;
use control::api::{
    Bitmaps, Counters, Disk, Disks, Event, Export, Exports, InternalSnapshots, Job, JobState, Reloaded, Rounds, Stats,
};
use std::fmt::Write as _;

fn switch(on: bool) -> String {
    if on { "yes" } else { "no" }.to_owned()
}

pub(super) fn disks(answer: &Disks) -> String {
    let rows = answer.disks.iter().map(|disk| {
        let sockets: Vec<String> = disk.exports.iter().map(place).collect();
        let size = drive::human_size(disk.size_bytes);
        vec![disk.name.clone(), size, switch(disk.read_only), disk.file.clone(), sockets.join(" ")]
    });
    let mut text = table(&["name", "size", "read-only", "file", "sockets"], rows, 1..2);
    for failed in &answer.failed {
        let _ = writeln!(text, "{}: {}", failed.name, failed.error);
    }
    text
}

pub(super) fn disk(disk: &Disk) -> String {
    let mut text = String::new();
    let mut line = |what: &str, value: &str| {
        let _ = writeln!(text, "{what}: {value}");
    };
    line("name", &disk.name);
    line("size", &format!("{} ({} bytes)", drive::human_size(disk.size_bytes), disk.size_bytes));
    line("read-only", &switch(disk.read_only));
    if !disk.serial.is_empty() {
        line("serial", &disk.serial);
    }
    line("options", &disk.options.to_text());
    if let Some(held) = &disk.held {
        line("held", &format!("{} requests wait for 'ctl resume': {}", held.requests, held.error));
    }
    line("layers", "");
    disk.layers.iter().for_each(|layer| line("  layer", layer));
    for export in &disk.exports {
        let mode = if export.read_only { ", read-only" } else { "" };
        let who = match &export.nbd {
            Some(nbd) => format!("{} NBD clients", nbd.connections),
            None => format!("{} queues", export.queues),
        };
        let waits = export.first_flush_us.map_or_else(String::new, |us| {
            format!(", its guest has waited {} until what was written before is durable", latency::time(us as f64))
        });
        line(&format!("export {}", export.id), &format!("{} ({who}{mode}){waits}", place(export)));
    }
    text
}

pub(super) fn reloaded(reloaded: &Reloaded) -> String {
    let Reloaded { added, removed, changed, reopened, failed, notes } = reloaded;
    let mut text = String::new();
    for (what, names) in [("added", added), ("removed", removed), ("changed", changed), ("opened anew", reopened)] {
        if !names.is_empty() {
            let _ = writeln!(text, "{what}: {}", names.join(", "));
        }
    }
    failed.iter().for_each(|failed| {
        let _ = writeln!(text, "{}: {}", failed.name, failed.error);
    });
    notes.iter().for_each(|note| {
        let _ = writeln!(text, "note: {note}");
    });
    if text.is_empty() { "nothing differs\n".to_owned() } else { text }
}

/// Returns the address of an export.
fn place(export: &Export) -> String {
    export.nbd.as_ref().map_or_else(|| export.socket.display().to_string(), |nbd| nbd.uri.clone())
}

pub(super) fn exports(exports: &[Export]) -> String {
    let rows = exports.iter().map(|export| {
        vec![
            export.id.to_string(),
            export.disk.clone(),
            switch(export.read_only),
            export.queues.to_string(),
            export.counters.requests.to_string(),
            place(export),
        ]
    });
    table(&["id", "disk", "read-only", "queues", "requests", "socket"], rows, 3..5)
}

/// With those that could not begin.
pub(super) fn all_exports(answer: &Exports) -> String {
    let mut text = exports(&answer.exports);
    for failed in &answer.failed {
        let _ = writeln!(text, "export {} of {}: could not begin: {}", failed.id, failed.disk, failed.error);
    }
    text
}

pub(super) fn jobs(jobs: &[Job]) -> String {
    let rows = jobs.iter().map(|job| {
        let percent = match job.total_bytes {
            _ if job.state == JobState::Done => 100,
            0 => 0,
            total => u128::from(job.done_bytes) * 100 / u128::from(total),
        };
        vec![
            job.id.to_string(),
            word(&job.kind),
            job.disk.clone(),
            word(&job.state),
            format!("{percent}%"),
            job.eta_s.map(time_left).unwrap_or_default(),
            job.rounds.as_ref().map(rounds).unwrap_or_default(),
            job.error.as_ref().or(job.outcome.as_ref()).cloned().unwrap_or_default(),
        ]
    });
    table(&["id", "kind", "disk", "state", "done", "left", "guests", "outcome"], rows, 4..6)
}

/// As `45s`, `3m20s` or `2h05m`.
fn time_left(seconds: u64) -> String {
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3600 => format!("{}m{:02}s", seconds / 60, seconds % 60),
        _ => format!("{}h{:02}m", seconds / 3600, seconds % 3600 / 60),
    }
}

/// Describes the passes of a copy and its effects on guests.
fn rounds(rounds: &Rounds) -> String {
    let ms = |us: u64| us as f64 / 1e3;
    let mut text = format!("round {}, stall {:.1} ms", rounds.rounds, ms(rounds.longest_stall_us));
    if rounds.throttled_us > 0 {
        let _ = write!(text, ", writes slowed by {:.0} ms in all", ms(rounds.throttled_us));
    }
    if rounds.late {
        text.push_str(", late");
    }
    text
}

pub(super) fn bitmaps(answer: &Bitmaps) -> String {
    let rows = answer.bitmaps.iter().map(|bitmap| {
        let state = match (bitmap.inconsistent, bitmap.recording) {
            (true, _) => "inconsistent",
            (false, true) => "recording",
            (false, false) => "disabled",
        };
        let state = if bitmap.persistent { state.to_owned() } else { format!("{state}, in memory") };
        let dirty = bitmap.dirty_bytes.map_or_else(String::new, drive::human_size);
        vec![bitmap.name.clone(), drive::human_size(bitmap.granularity), dirty, state, bitmap.file.clone()]
    });
    table(&["name", "granularity", "dirty", "state", "file"], rows, 1..3)
}

pub(super) fn snapshots(answer: &InternalSnapshots) -> String {
    let rows = answer.snapshots.iter().map(|snapshot| {
        let time = chrono::DateTime::from_timestamp(i64::from(snapshot.date_seconds), 0).unwrap_or_default();
        let size = drive::human_size(snapshot.disk_bytes);
        vec![snapshot.id.clone(), snapshot.name.clone(), size, time.format("%Y-%m-%dT%H:%M:%SZ").to_string()]
    });
    table(&["id", "name", "disk", "date"], rows, 2..3)
}

pub(super) fn stats(stats: &Stats) -> String {
    let rows = stats.disks.iter().map(|disk| {
        let Counters { requests, batches, notifications, failed, .. } = disk.counters;
        let mut row = vec![disk.disk.clone()];
        row.extend([requests, batches, notifications, failed].map(|figure| figure.to_string()));
        row.push(disk.tables.map_or_else(String::new, |tables| drive::human_size(tables.used_bytes)));
        row.push(disk.oldest_request_us.map_or_else(String::new, |us| latency::time(us as f64)));
        row.push(switch(disk.connected));
        row
    });
    let header = ["disk", "requests", "batches", "notifications", "failed", "tables", "oldest", "connected"];
    let mut text = table(&header, rows, 1..7);
    text.push('\n');
    if stats.disks.iter().any(|disk| !disk.latency.is_empty()) {
        text += &latency::table(stats);
        text.push('\n');
    }
    let rows = stats.reactors.iter().map(|reactor| {
        let figures = [reactor.turns, reactor.sleeps, reactor.system_calls, reactor.worker_calls];
        std::iter::once(reactor.name.clone()).chain(figures.map(|figure| figure.to_string())).collect()
    });
    text + &table(&["reactor", "turns", "sleeps", "system calls", "worker calls"], rows, 1..5)
}

/// Formats an event as one line.
pub(super) fn event(event: &Event) -> String {
    let seconds = i64::try_from(event.time_ms / 1000).unwrap_or(i64::MAX);
    let time = chrono::DateTime::from_timestamp(seconds, 0).unwrap_or_default();
    let mut line = format!("{} {}", time.format("%Y-%m-%dT%H:%M:%SZ"), word(&event.kind));
    if let Some(disk) = &event.disk {
        let _ = write!(line, " {disk}");
    }
    if let Some(id) = event.id {
        let _ = write!(line, " {id}");
    }
    if let Some(message) = &event.message {
        let _ = write!(line, ": {message}");
    }
    line
}

/// Returns a value's word in the interface's JSON.
fn word(value: &impl serde::Serialize) -> String {
    let value = serde_json::to_value(value).unwrap_or_default();
    value.as_str().map(str::to_owned).unwrap_or_default()
}
