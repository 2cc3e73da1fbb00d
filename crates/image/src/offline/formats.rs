//! Everything that depends on the format of an image that nobody uses: how it is made, checked and changed, and its
//! size.
//!
//! For open layers, `chain/mapping` does the same. Nothing else in this crate asks for a format. A new format gets
//! an arm in the methods below; its own crate does the work.

use crate::chain::mapping::raw_space;
use crate::guess::Format;
use crate::open::kept::data_path_of;
use crate::open::layers::format_of;
use block::{Error, ErrorKind, File, FileInfo, MetaIo, Result, block_on};
use format_qcow2::{
    Backing, Bitmap, BitmapAction, BitmapBits, CheckReport, CheckWatch, EditWatch, GrowBy, Header, Luks, Measure,
    NewSnapshot, Repair, Snapshot, SnapshotName,
};
use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The image to make.
#[derive(Debug, Clone)]
pub enum CreateOptions {
    /// A raw image; see also [`CreateOptions::raw`].
    Raw {
        /// Size in bytes, rounded up to whole sectors.
        size_bytes: u64,
        /// How the space is allocated. A raw image has no tables.
        space: GrowBy,
    },
    /// A qcow2 image.
    Qcow2(format_qcow2::CreateOptions),
}

impl CreateOptions {
    /// Makes options for a raw image of this size, all of it a hole.
    #[must_use]
    pub fn raw(size_bytes: u64) -> Self {
        Self::Raw { size_bytes, space: GrowBy::Nothing }
    }

    /// Makes options for an image of this format, of a disk of this size, that rests on `below` if that is given. The rest
    /// is at its default. Fails if no image can be made so.
    pub fn new(format: Format, size_bytes: u64, below: Option<Backing>) -> Result<Self> {
        if !format.can_be_made() {
            let what = format!("a {format} image is not made by itself; choose {}", Format::OF_OVERLAYS);
            return Err(Error::new(ErrorKind::Unsupported, what));
        }
        match (format, below) {
            (Format::Qcow2, below) => Ok(Self::overlay(size_bytes, below)),
            (Format::Raw, None) => Ok(Self::raw(size_bytes)),
            (Format::Raw | Format::Scratch, _) => {
                Err(Error::new(ErrorKind::Unsupported, format!("a {format} image cannot get a backing file")))
            }
        }
    }

    /// Makes options for a new layer of a disk of this size, which rests on `below`. Its format is
    /// [`Format::OF_OVERLAYS`].
    #[must_use]
    pub fn overlay(size_bytes: u64, below: Option<Backing>) -> Self {
        Self::Qcow2(format_qcow2::CreateOptions::default().with(|options| {
            options.size_bytes = size_bytes;
            options.rest_on(below);
        }))
    }

    /// Chooses the unit of allocation, and whether each unit is allocated in parts. A raw image has none.
    #[must_use]
    pub fn in_clusters(self, cluster_bytes: u64, in_parts: bool) -> Self {
        match self {
            Self::Raw { .. } => self,
            Self::Qcow2(options) => Self::Qcow2(options.with(|options| {
                options.cluster_size = cluster_bytes;
                options.extended_l2 = in_parts;
            })),
        }
    }

    /// Returns the format that these options make.
    #[must_use]
    pub fn format(&self) -> Format {
        match self {
            Self::Raw { .. } => Format::Raw,
            Self::Qcow2(_) => Format::Qcow2,
        }
    }

    /// Whether the image will rest on another.
    #[must_use]
    pub fn has_backing(&self) -> bool {
        match self {
            Self::Raw { .. } => false,
            Self::Qcow2(options) => options.backing_file.is_some(),
        }
    }

    /// Checks that these options are valid and go together. Ask before a file is emptied for them.
    pub fn validate(&self) -> Result<()> {
        match self {
            Self::Raw { space, .. } => raw_space(*space).map(drop),
            Self::Qcow2(options) => options.validate(),
        }
    }

    /// Returns the unit in which data are counted to [`CreateOptions::measure`] such an image; `None` if its size does
    /// not depend on the amount of data.
    #[must_use]
    pub fn measured_unit_bytes(&self) -> Option<u64> {
        match self {
            Self::Raw { .. } => None,
            Self::Qcow2(options) => options.measure_depends_on_data().then_some(options.cluster_size),
        }
    }

    /// Returns the file's size with so many bytes in units that hold data. Checks only the options that change the
    /// size.
    pub fn measure(&self, needed_bytes: u64) -> Result<Measure> {
        match self {
            Self::Raw { size_bytes, .. } => {
                Ok(Measure { required_bytes: *size_bytes, fully_allocated_bytes: *size_bytes })
            }
            Self::Qcow2(options) => options.measure(needed_bytes),
        }
    }

    /// Returns the size of copies of these bitmaps; `None` if such an image keeps none.
    #[must_use]
    pub fn measure_bitmaps(&self, bitmaps: &[Bitmap]) -> Option<u64> {
        match self {
            Self::Raw { .. } => None,
            Self::Qcow2(options) => options.measure_bitmaps(bitmaps),
        }
    }
}

/// A change of an image's snapshots.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Edit {
    /// Take an internal snapshot.
    CreateSnapshot(NewSnapshot),
    /// Make the disk what it was when this snapshot was taken.
    ApplySnapshot(SnapshotName),
    /// Delete this snapshot.
    DeleteSnapshot(SnapshotName),
}

/// Makes an image in an empty file. The image is durable when this returns.
pub fn create(file: &Arc<dyn File>, options: &CreateOptions) -> Result<()> {
    create_with_data(file, None, options)
}

/// As [`create`], with the external data file that the options name. That file exists and is empty.
pub fn create_with_data(file: &Arc<dyn File>, data: Option<&Arc<dyn File>>, options: &CreateOptions) -> Result<()> {
    create_watched(file, data, options, &mut |_, _| true)
}

/// As [`create_with_data`], and tells `watch` of the progress of preallocation. If given up, it leaves an incomplete
/// image.
pub fn create_watched(
    file: &Arc<dyn File>,
    data: Option<&Arc<dyn File>>,
    options: &CreateOptions,
    watch: &mut EditWatch<'_>,
) -> Result<()> {
    let io = open(file)?;
    match options {
        CreateOptions::Raw { size_bytes, space: GrowBy::Nothing } => {
            block_on(format_raw::create(&io, file.as_ref(), *size_bytes))
        }
        CreateOptions::Raw { size_bytes, space } => {
            let space = raw_space(*space)?;
            block_on(format_raw::resize(&io, file.as_ref(), *size_bytes, false, space, watch))
        }
        CreateOptions::Qcow2(options) => {
            block_on(format_qcow2::create(&io, options))?;
            let mut io = io;
            if let Some(data) = data {
                block_on(format_raw::create(&open(data)?, data.as_ref(), options.size_bytes))?;
                io = io.with_data(data.open_blocking()?);
            }
            let info = FileInfo { length_bytes: file.length_bytes()?, ..file.info().clone() };
            block_on(format_qcow2::preallocate(&io, &info, options.effective_preallocation(), watch))
        }
    }
}

/// Abilities of formats.
impl Format {
    /// The format of layers that are put on running disks, and of what is best copied from them.
    pub const OF_OVERLAYS: Self = Self::Qcow2;

    /// The format of layers that keep what is written to a disk apart.
    pub const OF_KEPT: Self = Self::Scratch;

    /// The format that keeps internal snapshots, and machines' states in them.
    pub(crate) const OF_SNAPSHOTS: Self = Self::Qcow2;

    /// Whether data are found through tables. If not, the image's file is the disk, byte by byte.
    #[must_use]
    pub fn has_tables(self) -> bool {
        match self {
            Self::Raw => false,
            Self::Qcow2 | Self::Scratch => true,
        }
    }

    /// Whether an image of this format can be made without the disk that it belongs to.
    #[must_use]
    pub fn can_be_made(self) -> bool {
        match self {
            Self::Raw | Self::Qcow2 => true,
            Self::Scratch => false,
        }
    }

    /// Whether a disk with such a top layer can be copied while guests use it.
    #[must_use]
    pub fn can_be_copied_live(self) -> bool {
        match self {
            Self::Raw | Self::Qcow2 => true,
            // What is written to it is thrown away, or kept for this disk only.
            Self::Scratch => false,
        }
    }

    /// Whether tables can be checked and repaired.
    #[must_use]
    pub fn can_be_checked(self) -> bool {
        match self {
            Self::Raw | Self::Scratch => false,
            Self::Qcow2 => true,
        }
    }

    /// Whether options of an existing image can be changed.
    #[must_use]
    pub fn can_be_amended(self) -> bool {
        match self {
            Self::Raw | Self::Scratch => false,
            Self::Qcow2 => true,
        }
    }

    /// Whether images can keep internal snapshots.
    #[must_use]
    pub fn has_snapshots(self) -> bool {
        match self {
            Self::Raw | Self::Scratch => false,
            Self::Qcow2 => true,
        }
    }

    /// Returns the path of the data file of the image at `path`, for formats whose images always have one beside them.
    #[must_use]
    pub fn data_file_of(self, path: &Path) -> Option<PathBuf> {
        match self {
            Self::Raw | Self::Qcow2 => None,
            Self::Scratch => Some(data_path_of(path)),
        }
    }

    /// Whether an image of this format can get a backing file, and so become an overlay.
    #[must_use]
    pub fn can_have_backing(self) -> bool {
        match self {
            // A scratch overlay has its backing file from the beginning, and cannot get another.
            Self::Raw | Self::Scratch => false,
            Self::Qcow2 => true,
        }
    }

    /// Whether clusters can be compressed.
    #[must_use]
    pub fn can_compress(self) -> bool {
        match self {
            Self::Raw | Self::Scratch => false,
            Self::Qcow2 => true,
        }
    }

    /// Whether images can keep dirty bitmaps.
    #[must_use]
    pub fn has_bitmaps(self) -> bool {
        match self {
            Self::Raw | Self::Scratch => false,
            Self::Qcow2 => true,
        }
    }
}

fn open(file: &Arc<dyn File>) -> Result<MetaIo> {
    MetaIo::of_file(&**file)
}

fn refused<T>(name: impl Display, what: &str) -> Result<T> {
    Err(Error::new(ErrorKind::Unsupported, format!("'{name}': {what}")))
}

/// Checks one file, which messages call `name`. It is open for reading, or for writing if it is to be repaired. Blocks.
/// Formats without tables give Unsupported. An image that cannot be read, for instance because it is encrypted, gives
/// BadImage. Opens no other file.
pub fn check(
    name: &str,
    file: &Arc<dyn File>,
    format: Option<Format>,
    repair: Option<Repair>,
    watch: &mut CheckWatch<'_>,
) -> Result<CheckReport> {
    let (format, _) = format_of(name, file.as_ref(), format)?;
    let (io, length) = (open(file)?, file.length_bytes()?);
    let checked = match (format, repair) {
        (Format::Raw | Format::Scratch, _) => {
            return Err(Error::new(ErrorKind::Unsupported, "This image format does not support checks"));
        }
        (Format::Qcow2, None) => block_on(format_qcow2::check(&io, length, name, watch)),
        (Format::Qcow2, Some(what)) => block_on(format_qcow2::repair(&io, length, name, what, watch)),
    };
    // Unsupported is for formats that have nothing to check. This one has, but could not be read.
    checked.map_err(|error| match error.kind() {
        ErrorKind::Unsupported => Error::new(ErrorKind::BadImage, error.to_string()),
        _ => error,
    })
}

/// Changes the snapshots of the image in a file that is open for writing. Blocks. A power cut leaves the image before
/// or after the change.
pub fn edit(
    name: &str,
    file: &Arc<dyn File>,
    format: Option<Format>,
    edit: &Edit,
    watch: &mut EditWatch<'_>,
) -> Result<()> {
    let (format, _) = format_of(name, file.as_ref(), format)?;
    let (io, file) = (open(file)?, file.as_ref());
    match (format, edit) {
        (Format::Raw, _) => refused(name, "a raw image has no snapshots"),
        (Format::Scratch, _) => refused(name, "a scratch overlay has no snapshots"),
        (Format::Qcow2, Edit::CreateSnapshot(new)) => {
            block_on(format_qcow2::create_snapshot(&io, file, name, new, watch))
        }
        (Format::Qcow2, Edit::ApplySnapshot(which)) => {
            block_on(format_qcow2::apply_snapshot(&io, file, name, which, watch))
        }
        (Format::Qcow2, Edit::DeleteSnapshot(which)) => {
            block_on(format_qcow2::delete_snapshot(&io, file, name, which, watch))
        }
    }
}

/// Refuses an image whose tables hide data that are in the file: new writes would destroy these. The image is open for
/// writing. Blocks, reads all tables, and repairs an image that was left dirty.
pub fn look_before_writing(file: &Arc<dyn File>, format: Format, watch: &mut EditWatch<'_>) -> Result<()> {
    match format {
        Format::Raw | Format::Scratch => Ok(()),
        Format::Qcow2 => {
            let name = &file.info().name;
            block_on(format_qcow2::look_before_writing(&open(file)?, file.as_ref(), name, watch))
        }
    }
}

const NO_BITMAPS: &str = "Format driver 'raw' does not support bitmaps";

/// Reads the persistent dirty bitmaps of an image; none if its format has none. Opens no other file.
pub fn bitmaps(file: &Arc<dyn File>, format: Format) -> Result<Vec<Bitmap>> {
    match format {
        Format::Raw | Format::Scratch => Ok(Vec::new()),
        Format::Qcow2 => block_on(format_qcow2::bitmaps(&open(file)?, &file.info().name)),
    }
}

/// Reads the bits of one bitmap.
pub fn read_bitmap(file: &Arc<dyn File>, format: Format, bitmap: &str) -> Result<BitmapBits> {
    let name = &file.info().name;
    match format {
        Format::Raw | Format::Scratch => refused(name, NO_BITMAPS),
        Format::Qcow2 => block_on(format_qcow2::read_bitmap(&open(file)?, name, bitmap)),
    }
}

/// Changes bitmaps of an image that nobody uses, durably. All changes are made, or none.
pub fn edit_bitmaps(
    file: &Arc<dyn File>,
    format: Format,
    actions: &[(String, BitmapAction)],
    watch: &mut EditWatch<'_>,
) -> Result<()> {
    let name = &file.info().name;
    match format {
        Format::Raw | Format::Scratch => refused(name, NO_BITMAPS),
        Format::Qcow2 => block_on(format_qcow2::edit_bitmaps(&open(file)?, file.as_ref(), name, actions, watch)),
    }
}

/// Records another backing file, or none, in the header of the image in `file`, durably. Opens no other file. The
/// guest's data change with it unless the caller prevents that.
pub fn set_backing(file: &Arc<dyn File>, format: Format, backing: Option<&Backing>) -> Result<()> {
    let name = &file.info().name;
    match format {
        Format::Raw | Format::Scratch => refused(name, "a raw image cannot have a backing file"),
        Format::Qcow2 => block_on(format_qcow2::set_backing(&open(file)?, file.as_ref(), name, backing)),
    }
}

/// What an encrypted image shows without its key.
pub(crate) struct Encrypted {
    pub(crate) header: Header,
    pub(crate) luks: Option<Luks>,
    pub(crate) snapshots: Vec<Snapshot>,
}

/// Describes an encrypted image, which messages call `name`; `None` if it is not encrypted, or if opening it reports
/// what is wrong with it.
pub(crate) fn describe_encrypted(name: &str, file: &Arc<dyn File>, format: Format) -> Result<Option<Encrypted>> {
    match format {
        Format::Raw | Format::Scratch => Ok(None),
        Format::Qcow2 => {
            let io = open(file)?;
            let Ok((header, luks)) = block_on(format_qcow2::describe(&io, name)) else { return Ok(None) };
            if header.encryption.is_none() {
                return Ok(None);
            }
            let snapshots = block_on(format_qcow2::snapshots(&io, &header, name))?;
            Ok(Some(Encrypted { header, luks, snapshots }))
        }
    }
}
