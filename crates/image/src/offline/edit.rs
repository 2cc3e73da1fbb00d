//! Changes of an image that nobody uses: snapshots, size, options.

use super::formats;
use crate::chain::image::Image;
use crate::chain::layer::Layer;
use crate::chain::layers::Chain;
use block::{Error, ErrorKind, Result, block_on};
use format_qcow2::{AmendOptions, Bitmap, BitmapBits, GrowBy};

pub use format_qcow2::EditWatch;

/// New options for an existing image; `None` keeps the present one.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Amend {
    /// 2 (compat=0.10) or 3 (compat=1.1).
    pub version: Option<u32>,
    /// A power of two, from 1 to 64.
    pub refcount_bits: Option<u32>,
    /// Whether writers may postpone refcounts.
    pub lazy_refcounts: Option<bool>,
    /// New size; a smaller one cuts data off.
    pub size_bytes: Option<u64>,
    /// New name of the external data file.
    pub data_file: Option<String>,
    /// Whether the external data file can be read as a raw image: only `false` makes a difference.
    pub data_file_raw: Option<bool>,
}

impl Image {
    /// Changes the size of an image that was opened for writing and that no queue uses. Blocks. Added space reads as
    /// zeros. Afterwards the image is closed, because what it had in memory is out of date.
    pub fn resize(self, size_bytes: u64, shrink: bool, preallocation: GrowBy, watch: &mut EditWatch<'_>) -> Result<()> {
        let chain = self.chain();
        let top = top_of(&chain)?;
        let options = block_on(chain.resize_options(size_bytes, shrink, preallocation))?;
        block_on(top.resize_closed(&options, watch))
    }

    /// As [`Image::resize`], to a larger size, but data of the layer below show in the added space.
    pub fn resize_showing_below(self, size_bytes: u64, watch: &mut EditWatch<'_>) -> Result<()> {
        let chain = self.chain();
        let top = top_of(&chain)?;
        let mut options = block_on(chain.resize_options(size_bytes, false, GrowBy::Nothing))?;
        options.backing_bytes = 0;
        block_on(top.resize_closed(&options, watch))
    }

    /// Changes options of an image that was opened for writing and that no queue uses. Blocks. Afterwards the image is
    /// closed.
    pub fn amend(self, amend: &Amend, watch: &mut EditWatch<'_>) -> Result<()> {
        let chain = self.chain();
        let top = top_of(&chain)?;
        let resize =
            amend.size_bytes.map(|size| block_on(chain.resize_options(size, true, GrowBy::Nothing))).transpose()?;
        let options = AmendOptions::default().with(|options| {
            options.version = amend.version;
            options.refcount_bits = amend.refcount_bits;
            options.lazy_refcounts = amend.lazy_refcounts;
            options.resize = resize;
            options.data_file = amend.data_file.clone();
            options.data_file_raw = amend.data_file_raw;
        });
        block_on(top.mapping.amend_closed(
            &top.open_blocking()?,
            top.file.as_ref(),
            &top.name.to_string(),
            &options,
            watch,
        ))
    }

    /// Reads the bitmaps of the top layer from its file.
    pub fn bitmaps(&self) -> Result<Vec<Bitmap>> {
        let chain = self.chain();
        let top = top_of(&chain)?;
        formats::bitmaps(&top.file, top.format())
    }

    /// Reads the bits of one bitmap of the top layer.
    pub fn read_bitmap(&self, bitmap: &str) -> Result<BitmapBits> {
        let chain = self.chain();
        let top = top_of(&chain)?;
        formats::read_bitmap(&top.file, top.format(), bitmap)
    }
}

fn top_of(chain: &Chain) -> Result<&Layer> {
    let top = chain.layers.first().map(|top| &**top);
    top.ok_or_else(|| Error::new(ErrorKind::Io, "an image without layers"))
}
