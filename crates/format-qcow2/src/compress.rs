//! Reading compressed clusters. The output is bounded by the cluster, whatever the stream says.

use crate::header::Compression;
use crate::state::Inner;
use block::{CompressedExtent, IoError, IoResult, MetaIo, PastEnd};
use memory::AlignedBuf;
use zstd::stream::raw::{DParameter, Decoder, InBuffer, Operation, OutBuffer};

/// Largest window a zstd stream may ask for (16 MiB), as a power of two: bounds what a hostile image makes us allocate.
const ZSTD_WINDOW_BITS_MAX: u32 = 24;

/// A compressed cluster has at most so many sectors that this many clusters hold them.
const COMPRESSED_CLUSTERS_MAX: u64 = 2;

impl Inner {
    pub(crate) async fn read_compressed(&self, io: &MetaIo, extent: CompressedExtent) -> IoResult<AlignedBuf> {
        let cluster_bytes = self.geometry.cluster_bytes();
        let limit = cluster_bytes.saturating_mul(COMPRESSED_CLUSTERS_MAX);
        let length = usize::try_from(u64::from(extent.length_bytes).min(limit)).map_err(|_| IoError::EIO)?;
        let cluster_bytes = usize::try_from(cluster_bytes).map_err(|_| IoError::EIO)?;
        // The last sector may reach behind the end of the file.
        let input = io.read(extent.offset, length, PastEnd::Zeros).await?;
        let mut output = AlignedBuf::zeroed(cluster_bytes);
        let whole = match self.header.compression {
            Compression::Zlib => inflate(&input, &mut output),
            Compression::Zstd => unzstd(&input, &mut output),
        };
        match whole {
            Some(()) => Ok(output),
            None => Err(self.corrupt(format_args!("the compressed cluster at {:#x} cannot be read", extent.offset))),
        }
    }
}

/// Fills `output` from a raw deflate stream; what follows the stream is ignored.
fn inflate(input: &[u8], output: &mut [u8]) -> Option<()> {
    let filled = libdeflater::Decompressor::new().deflate_decompress(input, output).ok()?;
    (filled == output.len()).then_some(())
}

/// Fills `output` from a zstd stream; what follows is ignored.
fn unzstd(input: &[u8], output: &mut [u8]) -> Option<()> {
    let mut decoder = Decoder::new().ok()?;
    decoder.set_parameter(DParameter::WindowLogMax(ZSTD_WINDOW_BITS_MAX)).ok()?;
    let (mut source, mut target) = (InBuffer::around(input), OutBuffer::around(output));
    while target.pos() < target.capacity() {
        let before = (source.pos(), target.pos());
        decoder.run(&mut source, &mut target).ok()?;
        if before == (source.pos(), target.pos()) {
            return None;
        }
    }
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(length: usize) -> Vec<u8> {
        (0..length).map(|index| (index / 7 % 13) as u8).collect()
    }

    #[test]
    fn streams_are_bounded_by_the_cluster_and_need_not_be_the_end_of_the_input() {
        let plain = text(4096);
        let mut deflated = vec![0; 8192];
        let mut compressor = libdeflater::Compressor::new(libdeflater::CompressionLvl::default());
        let length = compressor.deflate_compress(&plain, &mut deflated).unwrap();
        deflated.truncate(length);
        let mut zstandard = zstd::bulk::compress(&plain, 3).unwrap();
        for (stream, decode) in
            [(&mut deflated, inflate as fn(&[u8], &mut [u8]) -> Option<()>), (&mut zstandard, unzstd)]
        {
            let mut output = vec![0; 4096];
            assert_eq!(decode(&stream[..stream.len() / 2], &mut output), None, "cut off");
            assert_eq!(decode(stream, &mut vec![0; 8192]), None, "less than a cluster");
            stream.extend([0xa5; 300]);
            assert_eq!(decode(stream, &mut output), Some(()));
            assert_eq!(output, plain);
        }
    }
}
