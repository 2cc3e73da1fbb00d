//! Output for people and scripts: text, errors and exit codes, progress, logs.

mod bar;
pub(crate) mod logging;
pub(crate) mod program;
mod snapshots;
mod sparse_file;
pub(crate) mod steps;
mod text;
mod watch;

pub(crate) use bar::Bar;
pub(crate) use snapshots::snapshot_table;
pub(crate) use sparse_file::SparseFile;
pub(crate) use text::{error, exit, exit_code, is_locked, print, printable, usage, usage_of, warn, with_bytes_shown};
pub(crate) use watch::{ProgressArgs, Watch};
