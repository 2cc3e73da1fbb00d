//! Opening a chain: the named image, then layer after layer through the gate.

use super::gate::{BACKING_FILE, BackingPolicy, Gate, Opener, Role};
use super::kept::{check_data_length, check_data_name, check_size_below, kept_layer};
use super::layer::{MAX_LAYERS, open_layer};
use super::temporary::temporary_layer;
use crate::chain::image::Image;
use crate::chain::layer::{DataFile, Layer};
use crate::chain::layers::{Chain, Constants, TableCacheSetting};
use crate::chain::table_cache::{Hits, share_out};
use crate::file_name::FileName;
use crate::guess::{Format, PROBE_BYTES, guess_format};
use block::{Error, ErrorKind, File, MetaIo, PastEnd, Result, block_on};
use format_qcow2::SnapshotName;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};

/// How to open an image.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ImageOptions {
    /// The image that the user named.
    pub name: FileName,
    /// Its format. If `None`, the first bytes of the file decide.
    pub format: Option<Format>,
    /// Whether to refuse writes. The file is then opened read-only.
    pub read_only: bool,
    /// How many layers below it are opened for writing, as far as nobody else uses them. They were tops before, and may
    /// take back the layers above them. All of them are made durable.
    pub former_tops: usize,
    /// Which backing files the image may name.
    pub allow_backing: BackingPolicy,
    /// Whether to ignore the backing file that the image names.
    pub is_alone: bool,
    /// The image is going to get a backing file: of what is zeroed it says so from now on.
    pub will_have_backing: bool,
    /// Other files that the user named (on the same command line).
    pub listed: Vec<PathBuf>,
    /// The answer to `GET_ID`.
    pub serial: String,
    /// Whether completed writes may stay volatile until a flush (cache=writeback, none, unsafe).
    pub volatile_cache: bool,
    /// The limit of memory for tables, over all layers. By default they cover the whole disk, up to 32 MiB.
    pub table_cache_bytes: Option<u64>,
    /// Opens the disk as it was when this internal snapshot was taken, read-only. Its size is at least the snapshot's.
    pub snapshot: Option<SnapshotName>,
    /// Whether writes go to a temporary layer on top (`snapshot=on`). The image and its chain are then opened read-only
    /// and never change. A read-only disk gets no such layer.
    pub scratch: bool,
    /// Keeps that layer instead (`keep=`), with its index in this file, in a directory that exists. An overlay that is
    /// already there and rests on this image is used again.
    pub keep: Option<PathBuf>,
}

impl ImageOptions {
    /// Changes some of the options: `ImageOptions::new(path).with(|options| options.read_only = true)`.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }

    /// Whether nobody can write to the disk.
    fn is_read_only(&self) -> bool {
        self.read_only || self.snapshot.is_some()
    }

    /// Makes options for the image `name`, with everything else at its default. A path is taken as it is; for a name
    /// with a protocol see [`FileName::parse`].
    #[must_use]
    pub fn new(name: impl Into<FileName>) -> Self {
        Self {
            name: name.into(),
            format: None,
            read_only: false,
            former_tops: 0,
            allow_backing: BackingPolicy::default(),
            is_alone: false,
            will_have_backing: false,
            listed: Vec::new(),
            serial: String::new(),
            volatile_cache: true,
            table_cache_bytes: None,
            snapshot: None,
            scratch: false,
            keep: None,
        }
    }
}

/// Opens an image and the layers below it. Opens only files that the policy allows. If it fails, no file has been
/// changed.
pub fn open(options: &ImageOptions, opener: &dyn Opener) -> Result<Image> {
    open_chain(options, opener).map_err(|error| {
        let canonical = options.name.try_map_path(|path| opener.canonical(path));
        let names: Vec<String> = canonical.iter().chain([&options.name]).map(FileName::to_string).collect();
        could_not_open(&options.name, &names, &error)
    })
}

/// Makes an error that names the image once, by its user's name for it. `names` are all its names.
pub(crate) fn could_not_open(name: &FileName, names: &[String], error: &Error) -> Error {
    let text = error.to_string();
    let said = text.strip_prefix("Could not open ");
    let quoted = || names.iter().map(|own| format!("'{own}'"));
    let after_name = |said: &str| quoted().find_map(|own| said.strip_prefix(&own).map(str::to_owned));
    let rest = match (said.and_then(after_name), after_name(&text)) {
        // What follows the name is the reason, or how the file was to be opened.
        (Some(rest), _) => rest,
        (None, Some(rest)) if rest.starts_with(": ") => rest,
        (None, Some(rest)) if rest.starts_with(" is ") => format!(": it{rest}"),
        _ => format!(": {text}"),
    };
    let rest = quoted().fold(rest, |rest, own| rest.replace(&own, &format!("'{name}'")));
    let named = Error::new(error.kind(), format!("Could not open '{name}'{rest}"));
    if error.is_only_for_writing() { named.only_for_writing() } else { named }
}

/// Opens the image and those that it rests on, top first.
fn open_layers(options: &ImageOptions, opener: &dyn Opener) -> Result<Vec<Layer>> {
    let gate = Gate::new(&options.allow_backing, &options.name, &options.listed, opener)?;
    let mut layers: Vec<Layer> = Vec::new();
    let read_only = options.is_read_only() || options.scratch;
    let mut next = Some((gate.top.clone(), options.name.clone(), options.format));
    while let Some((name, said, format)) = next.take() {
        refuse_loop(&layers, &name)?;
        let was_top = !read_only && !layers.is_empty() && layers.len() <= options.former_tops;
        let mut role = match (layers.is_empty(), read_only) {
            (true, false) => Role::Writable,
            (true, true) => Role::ReadOnly,
            (false, _) => Role::Backing,
        };
        let in_context = |error: Error| match layers.is_empty() {
            true => error,
            false => error.in_context("Could not open backing file"),
        };
        let again = if was_top { opener.open(&name, Role::Writable).ok() } else { None };
        let file = match again {
            Some(file) => {
                role = Role::Writable;
                file
            }
            None => opener.open(&name, role).map_err(in_context)?,
        };
        let (format, guessed) = format_of(&said, file.as_ref(), format).map_err(in_context)?;
        let snapshot = options.snapshot.as_ref().filter(|_| layers.is_empty());
        let mut layer = open_layer(&name, file, format, role, snapshot).map_err(in_context)?;
        if options.will_have_backing && layers.is_empty() {
            layer.mapping.expect_backing();
        }
        if !options.is_alone
            && let Some((backing, backing_format)) = backing_of(&layer)?
        {
            let (target, backing) = gate.pass(&said, BACKING_FILE, &backing)?;
            next = Some((target, backing, backing_format));
        }
        if let Some(data_file) = layer.mapping.data_file() {
            check_data_name(&layer, name.path().unwrap_or(Path::new("")))?;
            let (target, data_said) = gate.pass(&said, "data file", data_file)?;
            refuse_shared_data(&layers, &name, &target)?;
            let file = opener.open(&target, role)?;
            layer.data = Some(DataFile { name: target, said: data_said, file });
            check_data_length(&layer)?;
        }
        layer.said = said;
        layer.guessed = guessed;
        check_size_below(&layers, &layer)?;
        layers.push(layer);
    }
    Ok(layers)
}

fn open_chain(options: &ImageOptions, opener: &dyn Opener) -> Result<Image> {
    let mut layers = open_layers(options, opener)?;
    let is_read_only = options.is_read_only();
    let is_on_scratch = options.scratch && !is_read_only;
    if is_on_scratch {
        let top = match &options.keep {
            Some(path) => kept_layer(&layers, path, opener)?,
            None => temporary_layer(&layers, &*opener.temporary()?)?,
        };
        layers.insert(0, top);
    }
    // A temporary layer is never durable.
    let volatile_cache = options.volatile_cache || (is_on_scratch && options.keep.is_none());
    if !is_read_only {
        // Below a scratch overlay nobody writes.
        let former_tops = if is_on_scratch { 0 } else { options.former_tops };
        make_durable(&layers, volatile_cache, former_tops)?;
    }
    share_out(&mut layers, options.table_cache_bytes);
    let constants = Constants {
        read_only: is_read_only,
        serial: options.serial.clone(),
        volatile_cache: AtomicBool::new(volatile_cache),
        table_cache: TableCacheSetting::new(options.table_cache_bytes),
        refused_headers: AtomicU64::new(0),
        has_lost: AtomicBool::new(false),
        hits: Hits::default(),
    };
    Ok(Image::new(Chain::new(layers.into_iter().map(Arc::new).collect(), &Arc::new(constants))))
}

/// Makes durable what a process that was killed may have left in the host's cache, and what no flush of this disk covers.
/// Former tops: a flush makes only the top durable. The killed process may have put it there and not made the former one
/// durable yet. They count whether they could be opened for writing or not: another program may just be reading them. All
/// writable layers of a disk without a volatile cache: its guest takes what it reads for durable, and has no flush.
fn make_durable(layers: &[Layer], volatile_cache: bool, former_tops: usize) -> Result<()> {
    let covered = usize::from(volatile_cache);
    let former = 1..=former_tops;
    let counts = |(index, layer): &(usize, &Layer)| layer.writable || former.contains(index);
    layers.iter().enumerate().skip(covered).filter(counts).try_for_each(|(_, layer)| layer.sync_files())
}

/// Refuses a data file that is another part of the chain: a guest could write an image's tables through it.
fn refuse_shared_data(layers: &[Layer], own: &FileName, target: &FileName) -> Result<()> {
    let is_part = |layer: &Layer| {
        layer.name.is_same_file(target) || layer.data.as_ref().is_some_and(|data| data.name.is_same_file(target))
    };
    if !own.is_same_file(target) && !layers.iter().any(is_part) {
        return Ok(());
    }
    let what = format!("'{own}' names '{target}' as its data file, which is another part of the same disk");
    Err(Error::new(ErrorKind::BadImage, what))
}

fn refuse_loop(layers: &[Layer], name: &FileName) -> Result<()> {
    let bad = |what: String| Err(Error::new(ErrorKind::BadImage, what));
    if layers.iter().any(|layer| layer.data.as_ref().is_some_and(|data| data.name.is_same_file(name))) {
        return bad(format!("'{name}' is the data file of an image, and in its own chain a backing file"));
    }
    if layers.iter().any(|layer| layer.name.is_same_file(name)) {
        return bad(format!("the backing files form a loop: '{name}' appears twice in its own chain"));
    }
    if layers.len() >= MAX_LAYERS {
        return bad(format!("the chain has more than {MAX_LAYERS} layers, at '{name}'"));
    }
    Ok(())
}

/// Reads a file's first bytes, for guessing its format. A shorter file gives fewer.
pub(crate) fn read_head(file: &dyn File) -> Result<Vec<u8>> {
    let info = file.info();
    let length = usize::try_from(info.length_bytes).unwrap_or(PROBE_BYTES).min(PROBE_BYTES);
    let io = MetaIo::new(file.open_blocking()?);
    let failed = |error| Error::with_source(ErrorKind::Io, format!("cannot read the start of '{}'", info.name), error);
    Ok(block_on(io.read(0, length, PastEnd::Zeros)).map_err(failed)?.to_vec())
}

/// Returns the format to open a file in, and whether it was guessed.
pub(crate) fn format_of(name: impl fmt::Display, file: &dyn File, said: Option<Format>) -> Result<(Format, bool)> {
    if let Some(format) = said {
        return Ok((format, false));
    }
    let guess = guess_format(&name.to_string(), &read_head(file)?)?;
    if guess.is_none() && !file.info().read_only {
        tracing::warn!(
            "Image format was not specified for '{name}' and probing guessed raw. Automatically detecting the format is \
             dangerous for raw images, write operations on block 0 will be restricted. Specify the 'raw' format \
             explicitly to remove the restrictions (a drive: format=raw, the image tool: -f raw)"
        );
    }
    Ok((guess.unwrap_or(Format::OF_UNRECOGNISED), true))
}

/// Returns the backing file that a layer names, and the format that the layer records for it.
fn backing_of(layer: &Layer) -> Result<Option<(String, Option<Format>)>> {
    let Some((name, format)) = layer.mapping.backing() else { return Ok(None) };
    let in_context = |error: Error| error.in_context(format!("backing format of '{}'", layer.name));
    let format = format.map(str::parse).transpose().map_err(in_context)?;
    Ok(Some((name.to_owned(), format)))
}
