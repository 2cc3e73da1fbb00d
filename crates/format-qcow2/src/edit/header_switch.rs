//! Overwriting the header's first sector, and what to do when it is unknown which header the storage has.
//!
//! When a sync fails, the storage may have the old header or the new one, while the page cache shows the new one. A
//! writer that trusted the page cache would take clusters that the other header refers to. So the old header is put
//! back. If that is durable, the image is as before. Otherwise the old header gets the dirty bit, so that the next
//! writer of another program repairs the image. Our own writers always make the header that they read durable before
//! they take space.

use crate::layout::extensions::{field_u32, field_u64};
use crate::layout::header::{HEADER_SECTOR_BYTES, INCOMPATIBLE_DIRTY, OFFSET_INCOMPATIBLE};
use block::{Error, ErrorKind, IoResult, MetaIo, Result};
use memory::AlignedBuf;

const OFFSET_VERSION: usize = 4;

/// The error of a switch that failed.
#[derive(Debug)]
pub(crate) struct Failed {
    pub(crate) error: Error,
    /// The old header is back, durably. If not, space that either header refers to must not be freed.
    pub(crate) is_undone: bool,
}

/// Overwrites the header's first sector, durably. Everything that `new` refers to must be durable already, and
/// everything that `old` refers to must still be there.
pub(crate) async fn switch_header(io: &MetaIo, name: &str, old: &[u8], new: &[u8]) -> Result<(), Failed> {
    let written = async {
        put(io, new).await?;
        io.flush().await
    };
    let Err(error) = written.await else { return Ok(()) };
    let is_marked = put(io, &marked(old)).await.is_ok();
    // Once this flush succeeds, the storage has the old header, marked or not.
    let is_old = is_marked && io.flush().await.is_ok();
    let is_undone = is_old && put(io, old).await.is_ok() && io.flush().await.is_ok();
    let now = match (is_old, is_marked) {
        (true, _) => "the image is as before",
        (false, true) => {
            "the image is whole, as before or changed, and nobody can say which yet. Whoever writes to it next makes sure \
             of that first"
        }
        (false, false) => {
            "the image is whole, as before or changed, and nobody can say which yet. Ringdisk makes sure of that before it \
             writes to it. Run 'check -r all' before another program does"
        }
    };
    let error = Error::with_source(ErrorKind::Io, format!("'{name}': writing the header failed; {now}"), error);
    Err(Failed { error, is_undone })
}

async fn put(io: &MetaIo, sector: &[u8]) -> IoResult {
    io.write(0, AlignedBuf::copy_of(sector)).await
}

/// Returns the header with its dirty bit. Version 2 has none.
fn marked(sector: &[u8]) -> Vec<u8> {
    let mut marked = sector.to_vec();
    if field_u32(sector, OFFSET_VERSION) >= 3 && sector.len() >= HEADER_SECTOR_BYTES {
        let bits = field_u64(sector, OFFSET_INCOMPATIBLE) | INCOMPATIBLE_DIRTY;
        let field = marked.get_mut(OFFSET_INCOMPATIBLE..OFFSET_INCOMPATIBLE.saturating_add(8));
        field.into_iter().for_each(|field| field.copy_from_slice(&bits.to_be_bytes()));
    }
    marked
}
