//! Lists what lies where in a whole chain. For tools; not on the path of requests.

use crate::chain::exchange::board::Board;
use crate::chain::in_place::Places;
use crate::chain::layer::Layer;
use crate::chain::layers::Chain;
use block::{Error, ErrorKind, Extent, IoError, IoResult, Keep, MetaIo, Result, Run, StatusQuery, block_on};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// The most bytes that one step looks at. Without it, steps that find little would each walk all the rest.
const LOOK_BYTES: u64 = 256 << 20;

/// How often a layer that is being changed is asked again, and the time between.
const TRIES: usize = 3000;
const NAP: Duration = Duration::from_millis(10);

/// Whether `next` continues `run`: same kind, and next in the file.
fn is_continued_by(run: &Run, next: &Run) -> bool {
    let in_file = match (run.offset, next.offset) {
        (Some(offset), Some(after)) => offset.checked_add(run.length_bytes) == Some(after),
        (None, None) => true,
        _ => false,
    };
    let kind = |run: &Run| (run.depth, run.present, run.zero, run.data, run.compressed);
    in_file && kind(run) == kind(next)
}

/// The runs of a disk, in order, each as long as possible. Reads tables with blocking calls, so it belongs on a thread
/// of its own. Writes made meanwhile may or may not show.
///
/// Each step has a place in the epochs, like a read in flight: the space it finds is not reused meanwhile. If a layer
/// was closed to be changed, the step asks the next chain.
pub(crate) struct Extents {
    board: Arc<Board>,
    chain: Arc<Chain>,
    metas: Vec<MetaIo>,
    /// How many layers are asked, at most.
    layers: usize,
    /// If given, raw files may count what follows data as data, up to the next multiple of this. Long runs are then
    /// reported in parts.
    granule_bytes: Option<u64>,
    at: u64,
    /// Where the walk ends.
    end: u64,
    pending: Option<Run>,
}

impl Extents {
    pub(crate) fn of(board: &Arc<Board>, query: &StatusQuery) -> Result<Self> {
        let (board, chain) = (Arc::clone(board), board.chain());
        let layers = query.layers;
        let metas = metas_of(&chain, layers)?;
        let Range { start: at, end } = query.range_in(chain.size_bytes);
        Ok(Self { board, chain, metas, layers, granule_bytes: query.granule_bytes, at, end, pending: None })
    }

    /// Returns the run at `self.at`, or its first part.
    fn look(&mut self) -> Result<Run> {
        for _ in 0..TRIES {
            if self.chain.is_dead() {
                // Another one comes when somebody opens the disk anew, and that may be never.
                let what = "a layer of the disk could not be opened again after a change: open the disk anew";
                return Err(Error::new(ErrorKind::Io, what));
            }
            let asked = self.chain.layers.get(..self.layers).unwrap_or(&self.chain.layers);
            if let Some(places) = Places::in_layers(asked) {
                let found = self.look_once();
                if places.is_kept() {
                    return found;
                }
            }
            let chain = self.board.chain();
            if Arc::ptr_eq(&chain, &self.chain) {
                std::thread::sleep(NAP);
            } else {
                self.metas = metas_of(&chain, self.layers)?;
                self.chain = chain;
            }
        }
        Err(Error::new(ErrorKind::Io, "a layer of the disk is being changed, and that takes too long: try again"))
    }

    fn look_once(&self) -> Result<Run> {
        let mut left = self.end.saturating_sub(self.at);
        for (depth, layer) in self.chain.layers.iter().take(self.layers).enumerate() {
            let inside = layer.size_bytes.saturating_sub(self.at).min(left);
            let found = self.look_in(depth, layer, inside)?;
            left = found.length_bytes;
            if found.present {
                return Ok(found);
            }
            // A range that no layer holds belongs to the lowest layer that reaches here, with the space that the layer
            // keeps for it.
            match self.chain.layers.get(depth.saturating_add(1)) {
                None => return Ok(Run { zero: true, ..found }),
                Some(below) if below.size_bytes <= self.at => return Ok(Run { zero: true, ..found }),
                Some(_) if depth.saturating_add(1) >= self.layers => return Ok(Run { offset: None, ..found }),
                Some(below) => left = left.min(below.size_bytes.saturating_sub(self.at)),
            }
        }
        Err(Error::new(ErrorKind::Io, "an image without layers"))
    }

    fn look_in(&self, depth: usize, layer: &Layer, length: u64) -> Result<Run> {
        let length = length.min(LOOK_BYTES);
        let nothing = Run { depth, zero: false, ..Run::of_nothing(self.at, length) };
        if !layer.mapping.has_tables() {
            let (hole, length_bytes) = match self.granule_bytes {
                Some(granule_bytes) => layer.file.hole_or_granule_at(self.at, length, granule_bytes)?,
                None => layer.file.hole_at(self.at, length)?,
            };
            let here = Run { length_bytes, present: true, offset: Some(self.at), ..nothing };
            return Ok(Run { zero: hole, data: !hole, ..here });
        }
        let mapped = block_on(self.resolve(depth, layer, length)).map_err(|error| {
            let what = format!("cannot read the tables of '{}' for offset {}", layer.name, self.at);
            Error::with_source(ErrorKind::Io, what, error)
        })?;
        let here = Run { length_bytes: mapped.length_bytes, ..nothing };
        let empty_space = || layer.mapping.empty_space(self.at, mapped.length_bytes);
        Ok(match mapped.extent {
            Extent::Backing => {
                let (offset, length_bytes) = empty_space();
                Run { length_bytes, offset, ..here }
            }
            Extent::Zero => {
                let (offset, length_bytes) = empty_space();
                Run { length_bytes, present: true, zero: true, offset, ..here }
            }
            Extent::Data { offset, .. } => {
                let mut data = Run { present: true, data: true, offset: Some(offset), ..here };
                let meta = self.metas.get(depth);
                if meta.is_some_and(|meta| block_on(layer.has_empty_clusters(meta))) {
                    (data.zero, data.length_bytes) = layer.data_file().hole_at(offset, here.length_bytes)?;
                }
                data
            }
            Extent::Compressed(_) => Run { present: true, data: true, compressed: true, ..here },
        })
    }

    async fn resolve(&self, depth: usize, layer: &Layer, length: u64) -> IoResult<block::Mapped> {
        let meta = self.metas.get(depth).ok_or(IoError::EIO)?;
        layer.mapping.resolve(meta, self.at, length).await
    }
}

/// Opens the tables of the first `layers` layers.
fn metas_of(chain: &Chain, layers: usize) -> Result<Vec<MetaIo>> {
    chain.layers.iter().take(layers).map(|layer| layer.open_blocking()).collect()
}

impl Iterator for Extents {
    type Item = Result<Run>;

    fn next(&mut self) -> Option<Result<Run>> {
        while self.at < self.end {
            let run = match self.look() {
                Ok(run) => run,
                Err(error) => {
                    // The walk ends with the error. If a pending run is reported first, the next call meets the error
                    // again.
                    if let Some(done) = self.pending.take() {
                        return Some(Ok(done));
                    }
                    self.at = self.end;
                    return Some(Err(error));
                }
            };
            self.at = run.end();
            let may_end = self.granule_bytes.is_some();
            match &mut self.pending {
                Some(pending) if is_continued_by(pending, &run) && !(may_end && pending.length_bytes >= LOOK_BYTES) => {
                    pending.length_bytes = pending.length_bytes.saturating_add(run.length_bytes);
                }
                pending => {
                    if let Some(done) = pending.replace(run) {
                        return Some(Ok(done));
                    }
                }
            }
        }
        self.pending.take().map(Ok)
    }
}
