//! A scratch overlay that is kept: made on top of a disk, or found there and used again.

use super::gate::{Opener, Role};
use super::layer::open_layer;
use super::temporary::top_with_room;
use crate::chain::layer::{DataFile, Layer};
use crate::chain::mapping::{KEPT_HEADER_MAX_BYTES, KeptHeader, make_kept};
use crate::file_name::FileName;
use crate::guess::Format;
use block::{Error, ErrorKind, File, Locks, MetaIo, PastEnd, Result, block_on};
use format_qcow2::os_name;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Opens the overlay whose index is `path` on these layers. Makes it if there is none.
pub(crate) fn kept_layer(layers: &[Layer], path: &Path, opener: &dyn Opener) -> Result<Layer> {
    let below = top_with_room(layers)?;
    let open = || opener.open(&FileName::from(opener.canonical(path)?), Role::Writable);
    let made = opener.make(path).map_err(in_context)?;
    let is_new = made.is_some();
    let index = made.map_or_else(open, Ok).map_err(in_context)?;
    // It is locked from here on. Others may have had the lock before: what it was then, it may not be any more.
    if !is_at(&*index, path) {
        let what = format!("'{}' was replaced while it was opened: try again", path.display());
        return Err(in_context(Error::new(ErrorKind::Locked, what)));
    }
    match (is_blank(&*index, path).map_err(in_context)?, is_new) {
        (true, true) => make(below, path, &index, opener).inspect_err(|_| unmake(path, &*index, opener))?,
        (true, false) => {
            tracing::warn!("'{}' was never finished, and holds nothing: makes it anew", path.display());
            make(below, path, &index, opener)?;
        }
        (false, _) => {
            tracing::info!("'{}' is there already: goes on with it", path.display());
            // Who made it may have been killed before its name was durable.
            opener.sync_directory_of(path).map_err(in_context)?;
        }
    }
    let layer = open_kept(path, index, opener).map_err(in_context)?;
    let names = layer.mapping.backing().map(|(name, _)| opener.canonical(Path::new(&os_name(name))));
    let rests_on = names.transpose().ok().flatten();
    if rests_on.is_none() || rests_on.as_deref() != below.name.path() {
        let what = format!("'{}' is there already, and rests on another image than '{}'", path.display(), below.name);
        let hint = "it holds what was written there. Commit it, or give the disk another name (name=)";
        return Err(in_context(Error::new(ErrorKind::BadOption, format!("{what}: {hint}"))));
    }
    check_size(&layer, below.size_bytes)?;
    Ok(layer)
}

fn in_context(error: Error) -> Error {
    error.in_context("Could not keep what is written (keep=)")
}

/// Returns the path of the data file, which lies beside the index.
pub(crate) fn data_path_of(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".data");
    name.into()
}

/// Whether the path names this file. A file of which nobody can tell does.
fn is_at(file: &dyn File, path: &Path) -> bool {
    let there = |own| std::fs::metadata(path).is_ok_and(|meta| (meta.dev(), meta.ino()) == own);
    file.identity().is_none_or(there)
}

/// Whether nobody who began to make this index has come to its header: it has nothing but zeros.
fn is_blank(index: &dyn File, path: &Path) -> Result<bool> {
    let length = index.length_bytes()?;
    if length > KEPT_HEADER_MAX_BYTES {
        return Ok(false);
    }
    let read = MetaIo::of_file(index)?;
    let read = block_on(read.read(0, usize::try_from(length).unwrap_or(0), PastEnd::Zeros));
    let bytes = read.map_err(|error| {
        Error::with_source(ErrorKind::Io, format!("'{}': cannot read its header", path.display()), error)
    })?;
    Ok(bytes.iter().all(|byte| *byte == 0))
}

/// Removes a file that was made for this index, if the index is locked. Else others may have begun to use both.
fn unmake(path: &Path, index: &dyn File, opener: &dyn Opener) {
    if index.info().locks == Locks::Held {
        opener.unmake(path);
    }
}

/// Fills the index file, which is blank, and makes the data file. After an error, a data file that is there is empty, or was
/// there before. An empty one is used: others may have begun to make the overlay.
fn make(below: &Layer, path: &Path, index: &Arc<dyn File>, opener: &dyn Opener) -> Result<()> {
    let data_path = data_path_of(path);
    let unnamed = || {
        let what = "an image without a path of its own cannot be named by what rests on it";
        Error::new(ErrorKind::Unsupported, format!("'{}': {what}", below.name))
    };
    let text = |path: &Path| path.to_str().map(str::to_owned).ok_or_else(unnamed);
    let header = KeptHeader {
        size_bytes: below.size_bytes,
        backing_file: text(below.name.path().ok_or_else(unnamed)?)?,
        // A guessed format is guessed again by whoever lets a guest's bytes into the layer.
        backing_format: (!below.guessed).then(|| below.format().to_string()),
        data_file: text(Path::new(data_path.file_name().ok_or_else(unnamed)?))?,
    };
    let is_new = opener.make(&data_path)?.is_some();
    let is_empty = || -> Result<bool> {
        let name = FileName::from(opener.canonical(&data_path)?);
        Ok(opener.open(&name, Role::Writable)?.length_bytes()? == 0)
    };
    let may_be_there = is_new || is_empty()?;
    if !may_be_there {
        let what = format!("'{}' is there already, without the index '{}'", data_path.display(), path.display());
        let hint = "put the index back, or move the file away, or give the disk another name (name=)";
        return Err(Error::new(ErrorKind::BadOption, format!("{what}: {hint}")));
    }
    let filled = || {
        block_on(make_kept(&MetaIo::of_file(&**index)?, &path.display().to_string(), &header))?;
        opener.sync_directory_of(path)
    };
    filled().inspect_err(|_| {
        if is_new {
            unmake(&data_path, &**index, opener);
        }
    })
}

fn open_kept(path: &Path, index: Arc<dyn File>, opener: &dyn Opener) -> Result<Layer> {
    let own = FileName::from(opener.canonical(path)?);
    let mut layer = open_layer(&own, index, Format::OF_KEPT, Role::Writable, None)?;
    // Anybody may have written the header. So the data file must lie beside the index.
    check_data_name(&layer, path)?;
    let said = data_path_of(path);
    let name = FileName::from(opener.canonical(&said)?);
    let file = opener.open(&name, Role::Writable)?;
    layer.data = Some(DataFile { name, said: said.into(), file });
    layer.said = path.into();
    check_data_length(&layer)?;
    Ok(layer)
}

/// An overlay whose data were cut off is not written to: they would grow again by a write elsewhere, and what is lost would
/// read as zeros then, where it is an error now.
pub(crate) fn check_data_length(layer: &Layer) -> Result<()> {
    let (Some(named), Some(data)) = (layer.mapping.data_end(), &layer.data) else { return Ok(()) };
    let there = data.file.info().length_bytes;
    if !layer.writable || named <= there {
        return Ok(());
    }
    let what = format!("'{}' has {there} bytes, and '{}' names data up to byte {named}", data.said, layer.name);
    let hint = "one of the two is damaged. Open it read-only (convert) to save what is there";
    Err(Error::new(ErrorKind::BadImage, format!("{what}: {hint}")))
}

/// Refuses an index `path` whose data file does not lie beside it: no header sends a guest's writes into another file.
pub(crate) fn check_data_name(layer: &Layer, path: &Path) -> Result<()> {
    let own = data_path_of(path);
    if layer.mapping.kept_header().is_none()
        || layer.mapping.data_file().map(Path::new) == own.file_name().map(Path::new)
    {
        return Ok(());
    }
    let what = format!("'{}' does not have its data in '{}'", path.display(), own.display());
    Err(Error::new(ErrorKind::BadImage, what))
}

/// Refuses a layer below a scratch overlay whose size has changed: it is another image.
pub(crate) fn check_size_below(above: &[Layer], below: &Layer) -> Result<()> {
    above.last().map_or(Ok(()), |above| check_size(above, below.size_bytes))
}

fn check_size(layer: &Layer, below_bytes: u64) -> Result<()> {
    match layer.mapping.kept_header() {
        Some(header) if header.size_bytes != below_bytes => {
            let KeptHeader { size_bytes, backing_file, .. } = header;
            let what = format!("rests on '{backing_file}' with {size_bytes} bytes, which has {below_bytes} bytes now");
            let hint = "give that its size back, or drop the overlay";
            Err(Error::new(ErrorKind::BadImage, format!("'{}' {what}: {hint}", layer.name)))
        }
        _ => Ok(()),
    }
}
