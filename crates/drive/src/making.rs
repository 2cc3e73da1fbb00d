//! Files for new images: made and removed here, in a cluster, or found at a server.

use crate::opener::EngineOpener;
use block::{Error, ErrorKind, File, MetaIo, PastEnd, Result, block_on};
use file_rbd::RbdName;
use image::{CreateOptions, FileName, Opener, Role};

/// A server's disk must be zeros up to here before an image is created on it.
const BLANK_BYTES: u64 = 1 << 20;

/// Creates an empty file, or an image of a cluster; neither may exist. A server's disk exists already: it must be empty
/// at its beginning, so that no image is lost. Other files cannot be created.
pub fn make_file(name: &FileName, length_bytes: u64) -> Result<()> {
    match (name, name.path()) {
        (FileName::Rbd(image), _) => file_rbd::create(&RbdName::parse(image)?, length_bytes),
        (FileName::Nbd(_), _) => check_blank(name),
        (_, Some(path)) => engine::create(path, length_bytes),
        (_, None) => {
            let what = format!("'{name}' is no file that can be made here: name an image that exists");
            Err(Error::new(ErrorKind::BadOption, what))
        }
    }
}

/// Removes the file or image that [`make_file`] has created. The contents of a server's disk stay.
pub fn unmake_file(name: &FileName) -> Result<()> {
    match (name, name.path()) {
        (FileName::Rbd(image), _) => file_rbd::remove(&RbdName::parse(image)?),
        (_, Some(path)) => {
            std::fs::remove_file(path).map_err(|error| Error::io(format!("cannot remove '{name}'"), error))
        }
        (_, None) => Ok(()),
    }
}

/// Refuses a file whose size is fixed and too small for the tables of a new image.
pub fn check_room(file: &dyn File, options: &CreateOptions) -> Result<()> {
    let info = file.info();
    if info.can_grow && !info.block_device {
        return Ok(());
    }
    let (length_bytes, needed_bytes) = (file.length_bytes()?, options.measure(0)?.required_bytes);
    if needed_bytes <= length_bytes {
        return Ok(());
    }
    let what = format!("'{}' has {length_bytes} bytes, and the image needs {needed_bytes}", info.name);
    Err(Error::new(ErrorKind::Io, what))
}

fn check_blank(name: &FileName) -> Result<()> {
    let file = EngineOpener::default().open(name, Role::ReadOnly)?;
    let length = usize::try_from(file.length_bytes()?.min(BLANK_BYTES)).unwrap_or(0);
    let head = block_on(MetaIo::of_file(&*file)?.read(0, length, PastEnd::Fails));
    let head = head.map_err(|error| Error::with_source(ErrorKind::Io, format!("cannot read '{name}'"), error))?;
    if head.iter().all(|byte| *byte == 0) {
        return Ok(());
    }
    let what = format!(
        "'{name}' is not empty: a new image is made only on a server's disk whose beginning reads as zeros, \
         so that nothing is lost by mistake. What a job that failed has begun there is of no use: overwrite its first \
         MiB with zeros, then try again"
    );
    Err(Error::new(ErrorKind::BadOption, what))
}
