//! The log of a test's process, for tests of what is logged.

use std::fmt::Debug;
use std::sync::{Mutex, MutexGuard, PoisonError};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

static LINES: Mutex<Vec<String>> = Mutex::new(Vec::new());

fn lines() -> MutexGuard<'static, Vec<String>> {
    LINES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Keeps what is logged at `level` and above from now on, by targets whose names contain `target`. The whole process
/// has one such log, and the first call chooses what it keeps: such tests stand in a file of their own.
pub fn keep_log(level: Level, target: &'static str) {
    // Another test of this process may have been first.
    let _ = tracing::subscriber::set_global_default(Keeper { level, target });
}

/// Returns the kept lines that contain `text`. A line is the message, behind the name of the disk if it has one:
/// `"disk": message`.
#[must_use]
pub fn kept_lines(text: &str) -> Vec<String> {
    lines().iter().filter(|line| line.contains(text)).cloned().collect()
}

struct Keeper {
    level: Level,
    target: &'static str,
}

impl Subscriber for Keeper {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= self.level && metadata.target().contains(self.target)
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut line = Line::default();
        event.record(&mut line);
        lines().push(format!("{}{}", line.disk, line.message));
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

#[derive(Default)]
struct Line {
    disk: String,
    message: String,
}

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        match field.name() {
            "message" => self.message = format!("{value:?}"),
            "disk" => self.disk = format!("{value:?}: "),
            _ => {}
        }
    }
}
