//! Writes compressed clusters to an image: compressed on the reactors' threads, several in a write.

use crate::JobDisk;
use crate::failure::failed;
use block::{DiskIo, ReactorCtx, Result, reclaim};
use image::{CompressedWriter, Compressor, PackedCluster};
use memory::{AlignedBuf, IoBuf};
use std::ops::Range;
use std::rc::Rc;

/// Writes compressed clusters from one reactor.
pub(crate) struct Packer {
    writer: CompressedWriter,
    cluster_bytes: usize,
    /// The size of the target.
    size_bytes: u64,
}

/// The state that a task keeps from piece to piece.
pub(crate) struct Packing {
    /// Started with the first cluster.
    compressor: Option<Compressor>,
    /// Compressed clusters, one behind the other.
    packed: AlignedBuf,
    clusters: Vec<PackedCluster>,
    /// The disk's last cluster, filled up.
    padded: Vec<u8>,
    /// The parts of the piece that do not get smaller.
    plain: Vec<Range<usize>>,
}

impl Packing {
    pub(crate) fn new(piece_bytes: usize) -> Self {
        Self {
            compressor: None,
            packed: AlignedBuf::zeroed(piece_bytes),
            clusters: Vec::new(),
            padded: Vec::new(),
            plain: Vec::new(),
        }
    }
}

impl Packer {
    pub(crate) fn open(target: &JobDisk, ctx: &Rc<dyn ReactorCtx>, cluster_bytes: u64) -> Result<Self> {
        let (writer, size_bytes) = (target.compressed_writer(ctx)?, target.info().size_bytes);
        // An image that takes no compressed clusters is refused before anything is done.
        writer.compressor()?;
        Ok(Self { writer, cluster_bytes: cluster_bytes as usize, size_bytes })
    }

    /// Writes a part of a piece that lies at `offset` of the disk; the part begins with a cluster.
    pub(crate) async fn write(
        &self,
        target: &DiskIo,
        packing: &mut Packing,
        offset: u64,
        piece: &mut AlignedBuf,
        part: Range<usize>,
    ) -> Result<()> {
        let length = self.compress(packing, offset, piece, part)?;
        if !packing.clusters.is_empty() {
            let shared = IoBuf::from_aligned(std::mem::replace(&mut packing.packed, AlignedBuf::zeroed(0)));
            let written = self.writer.write(&packing.clusters, &shared.whole().slice(0, length)).await;
            packing.packed = reclaim(shared);
            let at = packing.clusters.first().map_or(offset, |cluster| cluster.guest_offset);
            written.map_err(|error| failed("writing compressed clusters", at, error))?;
        }
        for plain in packing.plain.drain(..) {
            let at = offset + plain.start as u64;
            target.write(at, piece, plain).await.map_err(|error| failed("writing", at, error))?;
        }
        Ok(())
    }

    /// Fills `packing` from a part of a piece; returns how many bytes were packed.
    fn compress(&self, packing: &mut Packing, offset: u64, piece: &[u8], part: Range<usize>) -> Result<usize> {
        let Packing { compressor, packed, clusters, padded, plain } = packing;
        let compressor = match compressor {
            Some(compressor) => compressor,
            None => compressor.insert(self.writer.compressor()?),
        };
        clusters.clear();
        plain.clear();
        let mut end = 0;
        for start in part.clone().step_by(self.cluster_bytes) {
            let range = start..part.end.min(start + self.cluster_bytes);
            let mut bytes = &piece[range.clone()];
            let is_short = bytes.len() < self.cluster_bytes;
            // A longer target keeps its data behind the sources' end, and only whole clusters can be compressed.
            if is_short && offset + (range.end as u64) < self.size_bytes {
                plain.push(range);
                continue;
            }
            if is_short {
                padded.clear();
                padded.extend(bytes);
                padded.resize(self.cluster_bytes, 0);
                bytes = padded;
            }
            match compressor.compress(bytes, &mut packed[end..]) {
                Some(length) => {
                    let guest_offset = offset + start as u64;
                    clusters.push(PackedCluster { guest_offset, length_bytes: length as u32 });
                    end += length;
                }
                None => match plain.last_mut() {
                    Some(last) if last.end == range.start => last.end = range.end,
                    _ => plain.push(range),
                },
            }
        }
        Ok(end)
    }
}
