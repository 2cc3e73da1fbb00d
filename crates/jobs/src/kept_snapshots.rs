//! Protects internal snapshots: a snapshot shows the backing file wherever it has no data of its own, so a job that
//! changes the layers below would change the snapshot, too.

use block::{Error, ErrorKind, Result};
use image::Snapshot;
use std::fmt::Display;

/// Refuses a job that would change the contents of `overlay`'s snapshots.
pub(crate) fn keep_snapshots(overlay: impl Display, snapshots: &[Snapshot]) -> Result<()> {
    let Some(first) = snapshots.first() else { return Ok(()) };
    let others = match snapshots.len() - 1 {
        0 => String::new(),
        others => format!(" and {others} more"),
    };
    let what = format!(
        "'{overlay}' has internal snapshots ('{}'{others}), which show what lies below wherever they have no data of their own, \
         and would show something else afterwards: delete them first, or say --change-snapshots",
        first.name,
    );
    Err(Error::new(ErrorKind::Unsupported, what))
}
