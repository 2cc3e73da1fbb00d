//! A progress bar for people: on standard error, and only if that is a terminal.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

const STEPS: u64 = 1000;

/// A bar that fills from 0 to 1.
pub(crate) struct Bar(ProgressBar);

impl Bar {
    /// Shows an empty bar.
    pub(crate) fn start(message: &str) -> Self {
        // indicatif draws nothing if standard error is not a terminal.
        let bar = ProgressBar::with_draw_target(Some(STEPS), ProgressDrawTarget::stderr());
        if let Ok(style) = ProgressStyle::with_template("{bar:30} {percent:>3}% {msg}") {
            bar.set_style(style);
        }
        bar.set_message(message.to_owned());
        Self(bar)
    }

    /// Fills it up to `fraction`.
    pub(crate) fn set(&self, fraction: f64) {
        self.0.set_position((fraction.clamp(0.0, 1.0) * STEPS as f64) as u64);
    }

    /// Shows the current step.
    pub(crate) fn say(&self, message: &str) {
        self.0.set_message(message.to_owned());
    }

    /// Removes it from the terminal.
    pub(crate) fn finish(&self) {
        self.0.finish_and_clear();
    }
}
