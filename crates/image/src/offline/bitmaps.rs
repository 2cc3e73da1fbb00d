//! Persistent dirty bitmaps of one file. Opens nothing else.

use crate::chain::image::Image;
use crate::open::guess::Format;
use block::{Error, ErrorKind, File, MetaIo, Result, block_on};
use format_qcow2::{Bitmap, BitmapAction, BitmapBits, EditWatch};
use std::sync::Arc;

fn only_qcow2(file: &Arc<dyn File>, format: Format) -> Result<MetaIo> {
    match format {
        Format::Qcow2 => Ok(MetaIo::new(file.open_blocking()?)),
        Format::Raw => {
            let what = format!("'{}': Format driver 'raw' does not support bitmaps", file.info().name);
            Err(Error::new(ErrorKind::Unsupported, what))
        }
    }
}

/// The bitmaps of an image; none in a raw one.
pub fn bitmaps(file: &Arc<dyn File>, format: Format) -> Result<Vec<Bitmap>> {
    match format {
        Format::Raw => Ok(Vec::new()),
        Format::Qcow2 => block_on(format_qcow2::bitmaps(&only_qcow2(file, format)?, &file.info().name)),
    }
}

impl Image {
    /// The bitmaps of the top layer, as they are in its file.
    pub fn bitmaps(&self) -> Result<Vec<Bitmap>> {
        match self.chain().layers.first() {
            Some(top) => bitmaps(&top.file, top.format()),
            None => Ok(Vec::new()),
        }
    }

    /// The bits of one bitmap of the top layer.
    pub fn read_bitmap(&self, bitmap: &str) -> Result<BitmapBits> {
        let chain = self.chain();
        let top = chain.layers.first().ok_or_else(|| Error::new(ErrorKind::Io, "an image without layers"))?;
        read_bitmap(&top.file, top.format(), bitmap)
    }
}

/// The bits of one bitmap.
pub fn read_bitmap(file: &Arc<dyn File>, format: Format, bitmap: &str) -> Result<BitmapBits> {
    block_on(format_qcow2::read_bitmap(&only_qcow2(file, format)?, &file.info().name, bitmap))
}

/// Changes bitmaps of an image that nobody uses, durably: all that was asked for, or nothing.
pub fn edit_bitmaps(
    file: &Arc<dyn File>,
    format: Format,
    actions: &[(String, BitmapAction)],
    watch: &mut EditWatch<'_>,
) -> Result<()> {
    let io = only_qcow2(file, format)?;
    block_on(format_qcow2::edit_bitmaps(&io, file.as_ref(), &file.info().name, actions, watch))
}
