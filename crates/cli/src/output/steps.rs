//! How far a save or a restore is: a line for each step, and now and then one in between.

use save::Moment;
use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

/// Whether and how it is shown.
#[derive(clap::Args)]
pub(crate) struct StepsArgs {
    /// Print nothing except errors.
    #[arg(short, long)]
    pub(crate) quiet: bool,
    /// Show progress even if standard error is not a terminal.
    #[arg(short = 'p')]
    show: bool,
    /// Write progress to standard error, as lines of JSON; without a value as -p does.
    #[arg(long, value_enum, value_name = "FORM", num_args = 0..=1, require_equals = true, default_missing_value = "text")]
    progress: Option<Form>,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Form {
    Text,
    Json,
}

/// Shows how far it is.
pub(crate) struct Shown {
    form: Option<Form>,
    last: Option<(Instant, Moment)>,
}

const EVERY: Duration = Duration::from_millis(200);

impl Shown {
    pub(crate) fn of(args: &StepsArgs) -> Self {
        let form = match args.progress {
            Some(form) => Some(form),
            None if args.quiet => None,
            None if args.show || std::io::stderr().is_terminal() => Some(Form::Text),
            None => None,
        };
        Self { form, last: None }
    }

    /// Shows it only where the user has asked for it.
    pub(crate) fn only_if_asked(args: &StepsArgs) -> Self {
        let form = args.progress.or(args.show.then_some(Form::Text));
        Self { form, last: None }
    }

    pub(crate) fn show(&mut self, moment: Moment) {
        let is_next = self.last.is_none_or(|(_, last)| last.step != moment.step);
        let is_due = self.last.is_none_or(|(at, _)| at.elapsed() >= EVERY);
        if !(is_next || is_due || moment.whole >= 1.0) {
            return;
        }
        self.last = Some((Instant::now(), moment));
        let Moment { step, done_bytes, total_bytes, all_done_bytes, all_total_bytes, whole, .. } = moment;
        let line = match self.form {
            None => return,
            Some(Form::Text) => format!("{:>3.0}% {}", whole * 100.0, step.name()),
            Some(Form::Json) => serde_json::json!({
                "step": step.name(),
                "step-done-bytes": done_bytes,
                "step-total-bytes": total_bytes,
                "done-bytes": all_done_bytes,
                "total-bytes": all_total_bytes,
                "whole": whole,
            })
            .to_string(),
        };
        // If standard error is gone, the message is lost.
        let _ = writeln!(std::io::stderr(), "{line}");
    }
}
