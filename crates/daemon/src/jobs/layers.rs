//! The layers of a disk in use, and the record that a caller keeps of them while they change.

use block::Result;
use image::{FileName, Format, Image};

/// The two top layers of a disk, of which the upper one is taken off.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TakenOff {
    /// The file of the layer that is taken off, by its canonical name.
    pub top: FileName,
    /// The file of the layer below, which becomes the top.
    pub below: FileName,
    /// The format of the layer below; `None` if it was guessed.
    pub below_format: Option<Format>,
}

impl TakenOff {
    /// Returns those of a disk; `None` if it has one layer.
    pub(crate) fn of(image: &Image) -> Option<Self> {
        let mut names = image.layer_file_names().map(|(own, _)| own);
        let (top, below) = names.next().zip(names.next())?;
        Some(Self { top, below, below_format: image.said_formats().nth(1).flatten() })
    }
}

/// Keeps a record of what a disk rests on, while that changes.
pub trait BaseRecord: Send {
    /// Notes, durably, that so many layers below the top will go. Until [`BaseRecord::has_moved`] or
    /// [`BaseRecord::stays`] is called, the image may name either base. On an error it keeps the old one.
    fn will_move(&mut self, gone: usize) -> Result<()>;
    /// Notes that the image names its new base.
    fn has_moved(&mut self);
    /// Notes that the image keeps its old base.
    fn stays(&mut self);
}

/// Keeps no record.
impl BaseRecord for () {
    fn will_move(&mut self, _gone: usize) -> Result<()> {
        Ok(())
    }

    fn has_moved(&mut self) {}

    fn stays(&mut self) {}
}

pub(crate) fn top_of(image: &Image) -> Option<FileName> {
    image.file_names().next()
}
