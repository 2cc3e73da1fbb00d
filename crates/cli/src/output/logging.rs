//! Logs go to standard error; results go to standard output.

use super::text::usage;
use anyhow::Context;
use std::io::IsTerminal;
use tracing_subscriber::EnvFilter;

/// Without a wish.
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
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        // It would complain on standard error, by a macro that panics when that fails, too: on a reactor's thread.
        .log_internal_errors(false)
        .init();
    Ok(())
}
