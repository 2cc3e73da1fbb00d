//! Makes new images, for `create` and for the commands that fill one.

use super::name::{backing_name, beside_image, cluster_image, is_socket, opened_name, parse_format, remote_name};
use super::new_image::{self, NewImage};
use super::open::files;
use super::own_backing;
use super::target::{INCOMPLETE, REMOVED, behind_links, remove_file, with_fate};
use crate::output::{self, Watch, usage};
use anyhow::{Context, bail};
use block::{File, FileOp, SECTOR_BYTES, block_on};
use drive::check_room;
use format_qcow2::Preallocation;
use image::{CreateOptions, FileName, Format, GrowBy, Opener, Role, inspect, os_name};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Makes an image of this size, whatever the options say, for another command to fill. Returns its external data file
/// if that is new, too.
pub(crate) fn create_target(
    file: &Path,
    format: Format,
    options: &[String],
    backing: Option<&str>,
    backing_format: Option<Format>,
    size_bytes: u64,
    watch: &mut Watch,
) -> anyhow::Result<Option<PathBuf>> {
    let mut wanted = NewImage::parse(format, options)?;
    wanted.size_bytes = Some(size_bytes);
    wanted.backing_file = backing.map(str::to_owned).or(wanted.backing_file);
    wanted.backing_format = backing_format.map(|format| format.to_string()).or(wanted.backing_format);
    create(file, &mut wanted, true, &mut |_| Ok(()), watch)
}

/// Makes the image. `announce` is called before, with all options as they will be. Returns the external data file if that
/// is new.
pub(crate) fn create(
    file: &Path,
    wanted: &mut NewImage,
    look_at_backing: bool,
    announce: &mut dyn FnMut(&NewImage) -> anyhow::Result<()>,
    watch: &mut Watch,
) -> anyhow::Result<Option<PathBuf>> {
    match cluster_image(file)? {
        Some(image) if wanted.data_file.is_some() => {
            bail!("'{image}': an image of a cluster has no external data file")
        }
        None if is_socket(file) && !wanted.format.has_tables() => {
            check_served(file, wanted)?;
            return announce(wanted).map(|()| None);
        }
        None if is_socket(file) && wanted.data_file.is_some() => {
            bail!("'{}': an image at a server has no external data file", opened_name(file))
        }
        _ => {}
    }
    wanted.settle_backing(file, look_at_backing)?;
    let size_bytes = wanted.size()?;
    let beside = |name: &String| file.parent().unwrap_or(Path::new("")).join(os_name(name));
    let data_path = wanted.data_file.as_ref().map(beside);
    if let Some(backing) = &wanted.backing_file {
        let files: Vec<_> = [Some(file.to_owned()), data_path.clone()].into_iter().flatten().collect();
        let format = parse_format(wanted.backing_format.as_deref()).ok().flatten();
        own_backing::refuse(&files, &beside_image(file, backing), format, look_at_backing)?;
    }
    announce(wanted)?;
    let options = wanted.options_of_size(size_bytes)?;
    options.validate()?;
    let mut emptied = Vec::new();
    let mut empty = |path: PathBuf| -> anyhow::Result<Arc<dyn File>> {
        let path = behind_links(path);
        // A server's disk is always there, and its length stays.
        let is_new = !path.exists() && !is_servers_disk(&path)?;
        let file = empty_file(&path, is_new)?;
        wanted.hint_layout(&path, file.as_ref());
        emptied.push((path, is_new));
        Ok(file)
    };
    let opened = empty(file.to_owned())?;
    if is_servers_disk(file)? {
        check_room(&*opened, &options)?;
    }
    let data = data_path.map(&mut empty).transpose();
    let made = data.and_then(|data| {
        watch.run(|control| jobs::create(&opened, data.as_ref(), &options, control))?;
        Ok(())
    });
    if let Err(error) = made {
        // The files are closed before they are removed.
        drop(opened);
        let (files, is_only) = (emptied.iter().rev(), emptied.len() == 1);
        return Err(files.fold(error, |error, (path, is_new)| given_up(error, path, *is_new, is_only)));
    }
    Ok(emptied.into_iter().nth(1).filter(|(_, is_new)| *is_new).map(|(path, _)| path))
}

/// Whether it is the disk of a server, not an image of a cluster.
fn is_servers_disk(path: &Path) -> anyhow::Result<bool> {
    Ok(is_socket(path) && cluster_image(path)?.is_none())
}

/// Checks that a server's disk can take a raw image. It exists already, if the server's disk is long enough for it.
fn check_served(socket: &Path, wanted: &NewImage) -> anyhow::Result<()> {
    wanted.preallocation()?;
    let disk_bytes = files().open(&opened_name(socket), Role::ReadOnly)?.length_bytes()?;
    match wanted.size_bytes {
        Some(size_bytes) if size_bytes > disk_bytes => {
            bail!("{}: the server's disk has {disk_bytes} bytes, the image {size_bytes}", opened_name(socket))
        }
        _ => Ok(()),
    }
}

/// Removes an incomplete image if it is new, so that its name is free for the next attempt. The error then says what
/// happened to it.
fn given_up(error: anyhow::Error, path: &Path, is_new: bool, is_only: bool) -> anyhow::Error {
    let fate = if is_new && remove_file(path).is_ok() { REMOVED } else { INCOMPLETE };
    with_fate(error, path, fate, is_only)
}

/// Returns an empty, locked file: a new one, or an existing one that nobody uses.
fn empty_file(path: &Path, is_new: bool) -> anyhow::Result<Arc<dyn File>> {
    if let Some(image) = cluster_image(path)? {
        file_rbd::create(&image, 0)?;
        let opened = files().open(&opened_name(path), Role::Writable);
        return opened.map_err(|error| given_up(error.into(), path, true, true));
    }
    if is_new {
        engine::create(path, 0)?;
    }
    let file = files().open(&opened_name(path), Role::Writable)?;
    if !file.info().block_device {
        let queue = file.open_blocking()?;
        block_on(queue.start(FileOp::SetLength { length: 0 }))
            .with_context(|| format!("cannot empty '{}'", opened_name(path)))?;
    }
    Ok(file)
}

impl NewImage {
    /// Checks the backing file, takes its size if none was given, and requires its format. Without `look`, its name and
    /// format are only recorded.
    fn settle_backing(&mut self, image: &Path, look: bool) -> anyhow::Result<()> {
        let Some(name) = &mut self.backing_file else {
            return match self.backing_format {
                Some(_) => Err(usage("a backing format (-F) needs a backing file (-b)")),
                None => Ok(()),
            };
        };
        if !self.format.can_have_backing() {
            return Err(usage("a raw image cannot have a backing file: use -f qcow2"));
        }
        let said = name.clone();
        *name = backing_name(name, look)?;
        let name = &*name;
        if !look {
            let unsaid = || Err(usage("Backing file specified without backing format: add -F"));
            return self.backing_format.as_deref().map_or_else(unsaid, new_image::check_backing_format);
        }
        let format = parse_format(self.backing_format.as_deref())?;
        if is_socket(image) && remote_name(name).is_none() && beside_image(Path::new(""), name).is_relative() {
            bail!(
                "'{name}' is relative, and an image of a cluster or server lies in no directory: name its backing file by a \
                 whole path"
            );
        }
        let backing = remote_name(&said).unwrap_or_else(|| FileName::File(beside_image(image, name)));
        let file = files().open(&backing, Role::Backing)?;
        let below = inspect(backing, &file, format)?;
        if format.is_none() {
            return Err(usage(format!(
                "the backing file '{name}' is given without its format: add -F {} if that is what it is",
                below.format
            )));
        }
        self.size_bytes = self.size_bytes.or(Some(below.virtual_size_bytes));
        Ok(())
    }

    /// Sets hints for the file system. The image also works without them.
    fn hint_layout(&self, path: &Path, file: &dyn File) {
        if file.info().block_device {
            return;
        }
        if self.nocow.is_on
            && let Err(error) = engine::disable_copy_on_write(path)
        {
            // A file system without copy-on-write has nothing to turn off.
            tracing::info!("{error}");
        }
        if let Some(bytes) = self.extent_size_hint.filter(|bytes| *bytes > 0)
            && let Err(error) = engine::set_extent_size_hint(path, bytes)
        {
            output::warn(&format!("warning: {:#}", anyhow::Error::from(error)));
        }
    }

    fn size(&self) -> anyhow::Result<u64> {
        self.size_bytes.ok_or_else(|| usage("the size of the image is missing: FILE SIZE, for example 20G"))
    }

    /// Returns the options for this image with another size.
    pub(crate) fn options_of_size(&self, size_bytes: u64) -> anyhow::Result<CreateOptions> {
        let size_bytes = size_bytes.next_multiple_of(SECTOR_BYTES);
        Ok(match self.format {
            Format::Raw => {
                let space = match self.preallocation()? {
                    Preallocation::Off => GrowBy::Nothing,
                    Preallocation::Metadata => GrowBy::Tables,
                    Preallocation::Falloc => GrowBy::Space,
                    Preallocation::Full => GrowBy::Zeros,
                };
                CreateOptions::Raw { size_bytes, space }
            }
            Format::Scratch => return Err(new_image::scratch_is_not_made()),
            Format::Qcow2 => {
                let mut options = format_qcow2::CreateOptions::default();
                options.size_bytes = size_bytes;
                options.version = self.version()?;
                options.compression = self.compression()?;
                options.preallocation = self.preallocation()?;
                options.cluster_size = self.cluster_bytes;
                options.refcount_bits = u32::try_from(self.refcount_bits).unwrap_or(u32::MAX);
                options.lazy_refcounts = self.lazy_refcounts.is_on;
                options.extended_l2 = self.extended_l2.is_on;
                options.data_file = self.data_file.clone();
                options.data_file_raw = self.data_file_raw.is_on;
                options.backing_file = self.backing_file.clone();
                options.backing_format = self.backing_format.clone();
                CreateOptions::Qcow2(options)
            }
        })
    }
}
