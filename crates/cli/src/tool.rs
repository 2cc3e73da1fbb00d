//! What the commands that work on images share: how they open them, show progress, and end.

use crate::image_name::ImageName;
use crate::output;
use anyhow::{Context, bail};
use block::{Error, ErrorKind, ReactorHandle};
use drive::{EngineOpener, parse_integer, parse_key_values};
use engine::{CacheMode, Reactor, ReactorConfig, ReactorThread};
use image::{BackingPolicy, Format, Image, ImageOptions, SnapshotName};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use jobs::{Control, Progress};
use rustix::io::Errno;
use std::io::{self, IsTerminal, Write};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// More threads than this do not make a copy faster.
const REACTORS_MAX: usize = 4;
/// No ring waits for them: on files in memory they copy whatever a verb reads or writes at once.
const INLINE_BYTES: usize = 4 << 20;
const JSON_EVERY: Duration = Duration::from_millis(200);

/// How a named image is opened.
#[derive(clap::Args, Clone)]
pub(crate) struct OpenArgs {
    /// Cache mode for reading: writeback, none, writethrough, directsync, unsafe.
    #[arg(short = 'T', long, alias = "cache", value_name = "CACHE", default_value = "writeback")]
    source_cache: String,
    /// Work even if somebody else writes the image; what is read may be out of date.
    #[arg(short = 'U', long)]
    force_share: bool,
    /// Which backing files an image may make us open: deny, same-dir, listed, any.
    #[arg(long, value_name = "POLICY", env = "RINGDISK_ALLOW_BACKING", default_value = "same-dir")]
    pub(crate) allow_backing: String,
    /// FILE is a description of an image: driver=FORMAT,file.filename=FILE.
    #[arg(long, alias = "source-image-opts")]
    pub(crate) image_opts: bool,
}

impl OpenArgs {
    /// Opens an image to read it. `listed` are other files on the command line.
    pub(crate) fn open(&self, path: &Path, format: Option<&str>, listed: &[PathBuf]) -> anyhow::Result<Arc<Image>> {
        self.open_at(path, format, listed, None)
    }

    /// As `open`, the disk as it was when a snapshot was taken, where one is named.
    pub(crate) fn open_at(
        &self,
        path: &Path,
        format: Option<&str>,
        listed: &[PathBuf],
        snapshot: Option<&str>,
    ) -> anyhow::Result<Arc<Image>> {
        let ImageName { path, format } = ImageName::of(path, format, self.image_opts)?;
        let mut options = ImageOptions::new(&path);
        options.format = format;
        options.read_only = true;
        options.snapshot = snapshot.map(snapshot_name).transpose()?;
        options.allow_backing = self.allow_backing.parse()?;
        options.listed = listed.to_vec();
        let opener = opener(&self.source_cache)?;
        let opener = if self.force_share { opener.without_locks() } else { opener };
        Ok(Arc::new(image::open(&options, &opener)?))
    }
}

/// What -l names: `snapshot.id=ID,snapshot.name=NAME` (one of them will do), or an id or a name as it is.
fn snapshot_name(text: &str) -> anyhow::Result<SnapshotName> {
    if !text.starts_with("snapshot.") {
        return Ok(SnapshotName::Any(text.to_owned()));
    }
    let (mut id, mut name) = (None, None);
    for pair in parse_key_values(text)? {
        match pair.key.as_str() {
            "snapshot.id" => id = Some(pair.value),
            "snapshot.name" => name = Some(pair.value),
            key => bail!("Failed in parsing snapshot param '{text}': Invalid parameter '{key}'"),
        }
    }
    Ok(SnapshotName::Exactly { id, name })
}

/// Opens an image to write it; it is nobody else's meanwhile. `listed` are other files that the user named.
pub(crate) fn open_writable(
    path: &Path,
    format: Option<Format>,
    cache: &str,
    allow: &str,
    listed: &[PathBuf],
) -> anyhow::Result<Arc<Image>> {
    let mut options = ImageOptions::new(path);
    options.format = format;
    options.allow_backing = allow.parse::<BackingPolicy>()?;
    options.listed = listed.to_vec();
    Ok(Arc::new(image::open(&options, &opener(cache)?.writing_behind())?))
}

/// A new image was made through the page cache; one that is written past it leaves nothing there. Call it when the image
/// is closed.
pub(crate) fn leave_page_cache(path: &Path, cache: &str) -> anyhow::Result<()> {
    if cache.parse::<CacheMode>()?.is_direct() && path.is_file() {
        engine::forget_cached(path)?;
    }
    Ok(())
}

/// Opens an image's files in this cache mode, with the engine that suits them.
pub(crate) fn opener(cache: &str) -> anyhow::Result<EngineOpener> {
    Ok(EngineOpener::default().with_cache(cache.parse()?))
}

pub(crate) fn parse_format(format: Option<&str>) -> anyhow::Result<Option<Format>> {
    Ok(format.map(str::parse).transpose()?)
}

/// A reactor's thread for each processor.
pub(crate) struct Reactors(Vec<ReactorThread>);

impl Reactors {
    pub(crate) fn start(name: &str) -> anyhow::Result<Self> {
        Self::start_some(name, std::thread::available_parallelism().map_or(1, usize::from).min(REACTORS_MAX))
    }

    pub(crate) fn start_some(name: &str, count: usize) -> anyhow::Result<Self> {
        let name = |index| format!("{name}-{index}");
        let config =
            |index| ReactorConfig { name: name(index), inline_bytes: INLINE_BYTES, ..ReactorConfig::default() };
        let threads = (0..count).map(|index| Reactor::spawn(config(index)));
        Ok(Self(threads.collect::<Result<_, _>>()?))
    }

    pub(crate) fn handles(&self) -> Vec<Arc<dyn ReactorHandle>> {
        self.0.iter().map(ReactorThread::handle).collect()
    }

    pub(crate) fn stop(self) -> anyhow::Result<()> {
        self.0.into_iter().try_for_each(|thread| Ok(thread.stop()?))
    }
}

/// How progress is shown.
#[derive(clap::Args, Clone)]
pub(crate) struct ProgressArgs {
    /// Show progress even where standard error is not a terminal.
    #[arg(short = 'p')]
    show: bool,
    /// Say nothing but errors.
    #[arg(short, long)]
    pub(crate) quiet: bool,
    /// Write progress to standard error as lines of JSON; without a form as -p does.
    #[arg(long, value_enum, value_name = "FORM", num_args = 0..=1, require_equals = true, default_missing_value = "text")]
    progress: Option<ProgressForm>,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum ProgressForm {
    Text,
    Json,
}

enum Display {
    Nothing,
    Bar(ProgressBar),
    Percent,
    Json,
}

/// Shows how far a job has come, and stops it when the user asks.
pub(crate) struct Watch {
    display: Display,
    started: Instant,
    shown: Option<(Instant, Progress)>,
    interrupted: Arc<AtomicBool>,
    /// By SIGUSR1.
    asked: Arc<AtomicBool>,
}

impl Watch {
    pub(crate) fn start(args: &ProgressArgs) -> anyhow::Result<Self> {
        let display = match args {
            ProgressArgs { progress: Some(ProgressForm::Json), .. } => Display::Json,
            ProgressArgs { quiet: true, .. } => Display::Nothing,
            _ if std::io::stderr().is_terminal() => Display::Bar(bar()),
            ProgressArgs { show: true, .. } | ProgressArgs { progress: Some(ProgressForm::Text), .. } => {
                Display::Percent
            }
            _ => Display::Nothing,
        };
        let (interrupted, asked) = (crate::signals::interrupted()?, crate::signals::asked()?);
        Ok(Self { display, started: Instant::now(), shown: None, interrupted, asked })
    }

    /// For what has no progress in qemu-img: a bar on a terminal, and nothing elsewhere.
    pub(crate) fn for_people(quiet: bool) -> anyhow::Result<Self> {
        Self::start(&ProgressArgs { show: false, quiet, progress: None })
    }

    /// For what comes before the job and ends with it: with a bar of its own on a terminal, and nothing elsewhere.
    pub(crate) fn before(&self) -> Self {
        let display = match &self.display {
            Display::Bar(_) => Display::Bar(bar()),
            _ => Display::Nothing,
        };
        let (interrupted, asked) = (Arc::clone(&self.interrupted), Arc::clone(&self.asked));
        Self { display, started: Instant::now(), shown: None, interrupted, asked }
    }

    /// Runs a job under this watch.
    pub(crate) fn run<T, E>(&mut self, job: impl FnOnce(&mut Control<'_>) -> Result<T, E>) -> Result<T, E> {
        let cancel = Arc::clone(&self.interrupted);
        let done = job(&mut Control { cancel: &cancel, progress: &mut |progress| self.show(progress) });
        match &self.display {
            Display::Bar(bar) => bar.finish_and_clear(),
            Display::Percent if self.shown.is_some() => drop(output::print("\n")),
            _ => {}
        }
        done
    }

    pub(crate) fn was_interrupted(&self) -> bool {
        self.interrupted.load(Ordering::Relaxed)
    }

    /// The end of a job that changes `file` where it lies and that is simply run again when it was broken off.
    pub(crate) fn resumable<E: Into<anyhow::Error>>(&self, done: Result<(), E>, file: &Path) -> anyhow::Result<()> {
        let how = "its contents are as they were: run the same command again to finish";
        match done.map_err(Into::into) {
            Err(error) if self.was_interrupted() => Err(error.context(format!("'{}': {how}", file.display()))),
            done => done,
        }
    }

    fn show(&mut self, progress: Progress) {
        let Progress { done_bytes, total_bytes } = progress;
        let percent = if total_bytes == 0 { 100.0 } else { done_bytes as f64 * 100.0 / total_bytes as f64 };
        if self.asked.swap(false, Ordering::Relaxed) && matches!(self.display, Display::Nothing) {
            // Nobody can be told that standard error is gone.
            let _ = writeln!(std::io::stderr(), "    ({percent:.2}/100%)");
        }
        let is_end = done_bytes >= total_bytes;
        let is_due = self.shown.is_none_or(|(at, _)| at.elapsed() >= JSON_EVERY);
        let is_news = self.shown.is_none_or(|(_, shown)| shown != progress);
        if !is_news || !(is_due || is_end) {
            return;
        }
        self.shown = Some((Instant::now(), progress));
        match &self.display {
            Display::Nothing => {}
            Display::Bar(bar) => {
                bar.set_length(total_bytes);
                bar.set_position(done_bytes);
            }
            Display::Percent => {
                drop(output::print(&format!("    ({percent:.2}/100%)\r")));
            }
            Display::Json => {
                let seconds = self.started.elapsed().as_secs_f64();
                let rate = if seconds > 0.0 { done_bytes as f64 / seconds } else { 0.0 };
                let left = total_bytes - done_bytes;
                let line = serde_json::json!({
                    "done-bytes": done_bytes,
                    "left-bytes": left,
                    "total-bytes": total_bytes,
                    "elapsed-seconds": seconds,
                    "bytes-per-second": rate.round() as u64,
                    "eta-seconds": if rate > 0.0 { serde_json::json!(left as f64 / rate) } else { serde_json::Value::Null },
                });
                // Nobody can be told that standard error is gone.
                let _ = writeln!(std::io::stderr(), "{line}");
            }
        }
    }
}

fn bar() -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::stderr());
    let template = "{bar:30} {percent:>3}% {bytes} of {total_bytes}, {bytes_per_sec}, {eta} left";
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
    bar
}

/// Ends the program with a code of its own. Call it when everything is closed.
pub(crate) fn exit(code: i32) -> ! {
    std::process::exit(code)
}

/// Reads a whole number within bounds, for the command line.
pub(crate) fn integer<T: TryFrom<u64>>(
    range: RangeInclusive<u64>,
) -> impl Fn(&str) -> block::Result<T> + Clone + Send + Sync + 'static {
    move |text| {
        let number = parse_integer(text)?;
        let fits = T::try_from(number).ok().filter(|_| range.contains(&number));
        let what = || Error::new(ErrorKind::BadOption, format!("takes {} to {}", range.start(), range.end()));
        fits.ok_or_else(what)
    }
}

/// Makes the names in the directory of `path` durable, where that can be asked for.
pub(crate) fn sync_directory(path: &Path) -> anyhow::Result<()> {
    let directory = match path.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    };
    match std::fs::File::open(directory).and_then(|file| file.sync_all()) {
        // What was to be copied is copied.
        Err(error) if cannot_be_asked(&error) => {
            tracing::info!("nobody can say whether the name '{}' is durable: {error}", path.display());
            Ok(())
        }
        done => done.with_context(|| format!("cannot make the name '{}' durable", path.display())),
    }
}

/// Directories in which files may be made but that may not be read, file systems that sync none.
fn cannot_be_asked(error: &io::Error) -> bool {
    let refused = [Errno::ACCESS, Errno::INVAL, Errno::NOTSUP];
    Errno::from_io_error(error).is_some_and(|error| refused.contains(&error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_sync_that_was_tried_and_failed_fails_a_copy() {
        for (error, is_none) in [
            (Errno::ACCESS, true),
            (Errno::INVAL, true),
            (Errno::NOTSUP, true),
            (Errno::IO, false),
            (Errno::NOSPC, false),
        ] {
            assert_eq!(cannot_be_asked(&error.into()), is_none, "{error}");
        }
        let dir = tempfile::tempdir().unwrap();
        sync_directory(&dir.path().join("name")).unwrap();
        sync_directory(&dir.path().join("missing/name")).expect_err("there is no such directory");
    }
}
