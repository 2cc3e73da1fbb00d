//! Durable writes through the page cache. They share their syncs.

use super::lane::Lane;
use crate::base::call::Action;
use crate::request::group_commit::DurableWrite;
use block::{IoError, IoResult};
use memory::Window;
use std::sync::atomic::Ordering;

/// Writes, and waits until the data are durable.
pub(crate) async fn write(lane: Lane, counted: DurableWrite, offset: u64, data: Window) -> IoResult {
    let durable = counted.is_alone() && lane.target.file.write_through;
    lane.start(Action::Write { durable }, offset, data).await?;
    if durable {
        return Ok(());
    }
    let no_data = || lane.target.no_data.clone();
    lane.target.group_commit.join(|| lane.start(Action::Sync, 0, no_data())).await;
    // A failed sync sets this for good.
    match lane.target.file.sync_lost.load(Ordering::Relaxed) {
        true => Err(IoError::EIO),
        false => Ok(()),
    }
}
