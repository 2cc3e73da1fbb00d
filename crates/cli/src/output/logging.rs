//! Logs go to standard error; results go to standard output.

use super::program;
use super::text::usage;
use anyhow::Context;
use std::fmt;
use std::io::{self, IsTerminal, Write};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

/// The default level.
pub(crate) const DEFAULT_FILTER: &str = "warn";

/// Starts logging as `--log-level` says; without it as RUST_LOG says; without that as `default` says.
pub(crate) fn start(level: Option<&str>, default: &str) -> anyhow::Result<()> {
    let filter = match level {
        Some(level) => EnvFilter::try_new(level)
            .map_err(|error| usage(format!("--log-level '{level}' is not a level or filter: {error}")))?,
        None => match std::env::var("RUST_LOG") {
            Ok(filter) if !filter.is_empty() => {
                EnvFilter::try_new(&filter).with_context(|| format!("RUST_LOG is not a filter: '{filter}'"))?
            }
            _ => EnvFilter::new(default),
        },
    };
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(|| Lines)
        .with_ansi(io::stderr().is_terminal())
        // The library would report it on standard error by a macro that panics if that fails, too, on a reactor's
        // thread.
        .log_internal_errors(false);
    match program::is_qemu_img() && level.is_none() {
        true => log.event_format(AsQemu).init(),
        false => log.init(),
    }
    Ok(())
}

/// Standard error, for whole lines.
struct Lines;

impl Write for Lines {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let mut out = io::stderr();
        match std::str::from_utf8(line) {
            Ok(text) => out.write_all(block::without_numbers(text).as_bytes())?,
            Err(_) => out.write_all(line)?,
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().flush()
    }
}

/// Formats lines as qemu-img does: without time or module.
struct AsQemu;

impl<S, N> FormatEvent<S, N> for AsQemu
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(&self, context: &FmtContext<'_, S, N>, mut out: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        let level = *event.metadata().level();
        write!(out, "{}: ", if level == Level::WARN { "WARNING" } else { level.as_str() })?;
        context.format_fields(out.by_ref(), event)?;
        writeln!(out)
    }
}
