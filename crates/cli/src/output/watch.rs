//! Shows the progress of a job on an image, and stops the job when the user asks.

use super::text;
use crate::signals;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use jobs::{Control, Progress};
use std::io::{IsTerminal, Write};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const JSON_EVERY: Duration = Duration::from_millis(200);

/// Options for progress.
#[derive(clap::Args, Clone)]
pub(crate) struct ProgressArgs {
    /// Show progress even if standard error is not a terminal.
    #[arg(short = 'p')]
    show: bool,
    /// Print nothing except errors.
    #[arg(short, long)]
    pub(crate) quiet: bool,
    /// Write progress to standard error, as lines of JSON; without a value as -p does.
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
    PercentOnStandardError,
    Json,
}

/// Shows the progress of a job, and stops it when the user asks.
pub(crate) struct Watch {
    display: Display,
    started: Instant,
    shown: Option<(Instant, Progress)>,
    interrupted: Arc<AtomicBool>,
    /// Set by SIGUSR1, which asks for the progress.
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
        let (interrupted, asked) = (signals::interrupted()?, signals::asked()?);
        Ok(Self { display, started: Instant::now(), shown: None, interrupted, asked })
    }

    /// Keeps standard output free of progress.
    pub(crate) fn on_standard_error(mut self) -> Self {
        if matches!(self.display, Display::Percent) {
            self.display = Display::PercentOnStandardError;
        }
        self
    }

    /// Makes a watch for a step before the job, which the same signals end: it has its own bar on a terminal, and shows
    /// nothing elsewhere.
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
        let done = job(&mut Control::new(&cancel, &mut |progress| self.show(progress)));
        match &self.display {
            Display::Bar(bar) => bar.finish_and_clear(),
            Display::Percent if self.shown.is_some() => drop(text::print("\n")),
            Display::PercentOnStandardError if self.shown.is_some() => drop(writeln!(std::io::stderr())),
            _ => {}
        }
        done
    }

    pub(crate) fn was_interrupted(&self) -> bool {
        self.interrupted.load(Ordering::Relaxed)
    }

    /// Ends a job that changes `file` in place. If it was interrupted, the error says to run it again.
    pub(crate) fn resumable<E: Into<anyhow::Error>>(&self, done: Result<(), E>, file: &Path) -> anyhow::Result<()> {
        let how = "contents are as they were: run the same command again to finish";
        let name = format!("'{}'", image::shown(file));
        match done.map_err(Into::into) {
            Err(error) if self.was_interrupted() => Err(match format!("{error:#}").contains(&name) {
                true => error.context(format!("the image's {how}")),
                false => error.context(format!("{name}: its {how}")),
            }),
            done => done,
        }
    }

    fn show(&mut self, progress: Progress) {
        let Progress { done_bytes, total_bytes } = progress;
        let percent = if total_bytes == 0 { 100.0 } else { done_bytes as f64 * 100.0 / total_bytes as f64 };
        if self.asked.swap(false, Ordering::Relaxed) && matches!(self.display, Display::Nothing) {
            // If standard error is gone, the message is lost.
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
                drop(text::print(&format!("    ({percent:.2}/100%)\r")));
            }
            // If standard error is gone, the message is lost.
            Display::PercentOnStandardError => drop(write!(std::io::stderr(), "    ({percent:.2}/100%)\r")),
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
                // If standard error is gone, the message is lost.
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
