//! What lies where in a whole chain: for tools, off the path of requests.

use crate::chain::image::Image;
use crate::chain::layer::Layer;
use crate::chain::layers::Chain;
use block::{Error, ErrorKind, Extent, IoError, IoResult, MetaIo, Result, Run, block_on};
use std::ops::Range;
use std::sync::Arc;

/// Looked at in one step: steps that find little do not each walk all of the rest.
const LOOK_BYTES: u64 = 256 << 20;

/// Whether `next` goes on where `run` ends, in the same way.
fn is_continued_by(run: &Run, next: &Run) -> bool {
    let in_file = match (run.offset, next.offset) {
        (Some(offset), Some(after)) => offset.checked_add(run.length_bytes) == Some(after),
        (None, None) => true,
        _ => false,
    };
    let kind = |run: &Run| (run.depth, run.present, run.zero, run.data, run.compressed);
    in_file && kind(run) == kind(next)
}

/// The runs of a disk, in order, each as long as it goes. Reads tables with blocking calls, so it belongs on a thread
/// of its own; what is written meanwhile may or may not show.
pub struct Extents {
    chain: Arc<Chain>,
    metas: Vec<MetaIo>,
    /// How many layers are asked.
    layers: usize,
    /// In raw files, what follows data may be called data up to the next multiple of this; long runs are told in parts
    /// then.
    granule_bytes: Option<u64>,
    at: u64,
    /// Where the walk ends.
    end: u64,
    pending: Option<Run>,
    /// Where the walk ended with an error.
    failed_at: Option<u64>,
}

impl Image {
    /// What lies where, through the whole chain.
    pub fn extents(&self) -> Result<Extents> {
        self.extents_of(usize::MAX)
    }

    /// As [`Self::extents`], for whoever counts granules of the disk in which any byte is data: what follows data in a
    /// raw file may be called data too, up to the granule's end, and long runs are told in parts. Costs less where the
    /// files lie in memory.
    pub fn coarse_extents(&self, granule_bytes: u64) -> Result<Extents> {
        Ok(Extents { granule_bytes: Some(granule_bytes), ..self.extents()? })
    }

    /// What lies where in the top layer; what it leaves to those below is neither present nor zero nor data.
    pub fn top_extents(&self) -> Result<Extents> {
        self.extents_of(1)
    }

    /// What lies where in the `count` layers from the top on; what they leave to those below is neither present nor zero
    /// nor data.
    pub fn extents_above(&self, count: usize) -> Result<Extents> {
        self.extents_of(count)
    }

    fn extents_of(&self, layers: usize) -> Result<Extents> {
        let chain = self.chain();
        let layers = layers.min(chain.layers.len());
        let asked = chain.layers.iter().take(layers);
        let metas = asked.map(|layer| layer.open_blocking()).collect::<Result<_>>()?;
        let end = chain.size_bytes;
        Ok(Extents { chain, metas, layers, granule_bytes: None, at: 0, end, pending: None, failed_at: None })
    }
}

impl Extents {
    /// The part of the walk that lies in a range.
    pub(crate) fn within(self, offset: u64, length_bytes: u64) -> Self {
        let end = offset.saturating_add(length_bytes).min(self.end);
        Self { at: offset.min(end), end, ..self }
    }

    /// After an error: lets the walk go on behind the next multiple of `step_bytes`. Returns the part that is left out,
    /// about which nothing is known.
    pub fn step_over(&mut self, step_bytes: u64) -> Option<Range<u64>> {
        let start = self.failed_at.take()?;
        let next = start.checked_div(step_bytes)?.saturating_add(1).saturating_mul(step_bytes);
        self.at = next.min(self.end);
        Some(start..self.at)
    }

    /// The run at `self.at`, perhaps not all of it.
    fn look(&self) -> Result<Run> {
        let mut left = self.end.saturating_sub(self.at);
        for (depth, layer) in self.chain.layers.iter().take(self.layers).enumerate() {
            let inside = layer.size_bytes.saturating_sub(self.at).min(left);
            let found = self.look_in(depth, layer, inside)?;
            left = found.length_bytes;
            if found.present {
                return Ok(found);
            }
            // What no layer holds is the lowest layer's that reaches here, with the space that it keeps for it.
            match self.chain.layers.get(depth.saturating_add(1)) {
                None => return Ok(Run { zero: true, ..found }),
                Some(below) if below.size_bytes <= self.at => return Ok(Run { zero: true, ..found }),
                Some(_) if depth.saturating_add(1) == self.layers => return Ok(Run { offset: None, ..found }),
                Some(below) => left = left.min(below.size_bytes.saturating_sub(self.at)),
            }
        }
        Err(Error::new(ErrorKind::Io, "an image without layers"))
    }

    fn look_in(&self, depth: usize, layer: &Layer, length: u64) -> Result<Run> {
        let length = length.min(LOOK_BYTES);
        let nothing = Run {
            start: self.at,
            length_bytes: length,
            depth,
            present: false,
            zero: false,
            data: false,
            compressed: false,
            offset: None,
        };
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
            Extent::Data { offset, .. } => Run { present: true, data: true, offset: Some(offset), ..here },
            Extent::Compressed(_) => Run { present: true, data: true, compressed: true, ..here },
        })
    }

    async fn resolve(&self, depth: usize, layer: &Layer, length: u64) -> IoResult<block::Mapped> {
        let meta = self.metas.get(depth).ok_or(IoError::EIO)?;
        layer.mapping.resolve(meta, self.at, length).await
    }
}

impl Iterator for Extents {
    type Item = Result<Run>;

    fn next(&mut self) -> Option<Result<Run>> {
        while self.at < self.end {
            let run = match self.look() {
                Ok(run) => run,
                Err(error) => {
                    // The walk ends with the error, which comes again if something is told before.
                    if let Some(done) = self.pending.take() {
                        return Some(Ok(done));
                    }
                    self.failed_at = Some(self.at);
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
