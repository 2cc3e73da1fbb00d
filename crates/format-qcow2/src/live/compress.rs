//! Compressed clusters: compressing, and decompressing that never exceeds a cluster, whatever the stream says.

use crate::layout::header::Compression;
use crate::live::state::Inner;
use block::{CompressedExtent, Error, IoError, IoResult, MetaIo, PastEnd, Result};
use libdeflater::CompressionLvl;
use memory::AlignedBuf;
use std::cell::RefCell;
use zstd::stream::raw::{DParameter, Decoder, InBuffer, Operation, OutBuffer};

/// Largest window of a zstd stream (16 MiB), as a power of two. It limits what a hostile image makes us allocate.
const ZSTD_WINDOW_BITS_MAX: u32 = 24;

/// The most host clusters that a compressed cluster touches.
const COMPRESSED_CLUSTERS_MAX: u64 = 2;

/// The defaults of the codecs and of qemu.
const ZLIB_LEVEL: i32 = 6;
const ZSTD_LEVEL: i32 = 3;

/// Compresses clusters one after the other and reuses its tables. Belongs to one thread at a time.
pub struct Compressor {
    codec: Codec,
}

enum Codec {
    Zlib(libdeflater::Compressor),
    Zstd(zstd::bulk::Compressor<'static>),
}

impl std::fmt::Debug for Compressor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self.codec {
            Codec::Zlib(_) => "Compressor(zlib)",
            Codec::Zstd(_) => "Compressor(zstd)",
        })
    }
}

impl Compressor {
    pub(crate) fn new(compression: Compression) -> Result<Self> {
        let codec = match compression {
            Compression::Zlib => {
                let level = CompressionLvl::new(ZLIB_LEVEL).unwrap_or_default();
                Codec::Zlib(libdeflater::Compressor::new(level))
            }
            Compression::Zstd => {
                let failed = |error| Error::io("cannot start the zstd compressor", error);
                Codec::Zstd(zstd::bulk::Compressor::new(ZSTD_LEVEL).map_err(failed)?)
            }
        };
        Ok(Self { codec })
    }

    /// Compresses `cluster` into the start of `output`. Returns the number of bytes; `None` if the cluster does not get
    /// smaller or does not fit.
    pub fn compress(&mut self, cluster: &[u8], output: &mut [u8]) -> Option<usize> {
        let limit = cluster.len().checked_sub(1)?.min(output.len());
        let output = output.get_mut(..limit)?;
        match &mut self.codec {
            Codec::Zlib(codec) => codec.deflate_compress(cluster, output).ok(),
            Codec::Zstd(codec) => codec.compress_to_buffer(cluster, output).ok(),
        }
    }
}

thread_local! {
    /// Each thread keeps the codecs' tables from cluster to cluster.
    static DEFLATE: RefCell<libdeflater::Decompressor> = RefCell::new(libdeflater::Decompressor::new());
    static ZSTD: RefCell<Option<zstd::bulk::Decompressor<'static>>> = const { RefCell::new(None) };
}

impl Inner {
    /// Returns how many bytes of a compressed cluster are read; the entry may claim too many.
    fn input_bytes(&self, extent: &CompressedExtent) -> u64 {
        let limit = self.geometry.cluster_bytes().saturating_mul(COMPRESSED_CLUSTERS_MAX);
        u64::from(extent.length_bytes).min(limit)
    }

    /// Returns how many bytes of memory it takes to read a compressed cluster.
    pub(crate) fn decompress_bytes(&self, extent: &CompressedExtent) -> u64 {
        self.input_bytes(extent).saturating_add(self.geometry.cluster_bytes())
    }

    /// Reads and decompresses a cluster. The file's queue decompresses, and does so outside the reactor.
    pub(crate) async fn read_compressed(&self, io: &MetaIo, extent: CompressedExtent) -> IoResult<AlignedBuf> {
        let length = usize::try_from(self.input_bytes(&extent)).map_err(|_| IoError::EIO)?;
        let cluster_bytes = usize::try_from(self.geometry.cluster_bytes()).map_err(|_| IoError::EIO)?;
        // The last sector may reach behind the end of the file.
        let input = io.read(extent.offset, length, PastEnd::Zeros).await?;
        let mut output = AlignedBuf::try_zeroed(cluster_bytes)?;
        let decompress = match self.header.compression {
            Compression::Zlib => inflate,
            Compression::Zstd => unzstd,
        };
        let whole = io.queue().compute(move || decompress(&input, &mut output).map(|()| output)).await?;
        whole.ok_or_else(|| self.corrupt(format_args!("the compressed cluster at {:#x} cannot be read", extent.offset)))
    }
}

/// Fills `output` from a raw deflate stream; bytes behind the stream are ignored.
fn inflate(input: &[u8], output: &mut [u8]) -> Option<()> {
    let filled = DEFLATE.try_with(|codec| codec.borrow_mut().deflate_decompress(input, output)).ok()?.ok()?;
    (filled == output.len()).then_some(())
}

/// Fills `output` from a zstd stream; bytes behind the stream are ignored.
fn unzstd(input: &[u8], output: &mut [u8]) -> Option<()> {
    unzstd_frame(input, output).or_else(|| unzstd_in_steps(input, output))
}

/// Decodes the usual case: one frame, as long as the cluster. It needs no window of its own.
fn unzstd_frame(input: &[u8], output: &mut [u8]) -> Option<()> {
    let frame = input.get(..zstd::zstd_safe::find_frame_compressed_size(input).ok()?)?;
    let filled = ZSTD.try_with(|codec| {
        let mut codec = codec.borrow_mut();
        let codec = match &mut *codec {
            Some(codec) => codec,
            none => none.insert(zstd::bulk::Decompressor::new().ok()?),
        };
        codec.decompress_to_buffer(frame, output).ok()
    });
    (filled.ok()?? == output.len()).then_some(())
}

/// Decodes any stream.
fn unzstd_in_steps(input: &[u8], output: &mut [u8]) -> Option<()> {
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
    fn what_is_compressed_is_decompressed_and_noise_is_left_alone() {
        let mut noise = vec![0; 65536];
        testkit::fill_seeded(3, &mut noise);
        for (compression, decode) in [
            (Compression::Zlib, inflate as fn(&[u8], &mut [u8]) -> Option<()>),
            (Compression::Zstd, unzstd),
            (Compression::Zstd, unzstd_in_steps),
        ] {
            let mut compressor = Compressor::new(compression).unwrap();
            let mut output = vec![0; 65536];
            for _ in 0..2 {
                let plain = text(65536);
                let length = compressor.compress(&plain, &mut output).unwrap();
                let mut back = vec![0; 65536];
                assert_eq!(decode(&output[..length], &mut back), Some(()));
                assert!(back == plain);
                assert_eq!(compressor.compress(&noise, &mut output), None);
                assert_eq!(compressor.compress(&plain, &mut output[..length - 1]), None);
            }
        }
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
