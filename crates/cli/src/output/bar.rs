//! A progress bar for people, on standard error. A bar is drawn only on a terminal.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::Write as _;

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

    /// Shows the current step; where no bar can be drawn, as a line of its own.
    pub(crate) fn step(&self, message: &str) {
        match self.0.is_hidden() {
            // If standard error is gone, the message is lost.
            true => drop(writeln!(std::io::stderr(), "{message}")),
            false => self.say(message),
        }
    }

    /// Tells something that stays on the terminal.
    pub(crate) fn note(&self, message: &str) {
        self.0.suspend(|| super::warn(message));
    }

    /// Removes it from the terminal.
    pub(crate) fn finish(&self) {
        self.0.finish_and_clear();
    }
}
