//! Opening a chain: the named image, then layer after layer through the gate.

use crate::chain::image::{Chain, Image};
use crate::chain::layer::{DataFile, Layer};
use crate::chain::mapping::Mapping;
use crate::chain::table_cache::{Hits, share_out};
use crate::open::gate::{BackingPolicy, Gate, Opener, Role};
use crate::open::guess::{Format, PROBE_BYTES, guess_format};
use block::{Error, ErrorKind, File, FileInfo, Listeners, MetaIo, PastEnd, Result, block_on};
use format_qcow2::SnapshotName;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};

/// The longest chain that is opened.
pub const MAX_LAYERS: usize = 256;

/// How to open an image.
#[derive(Debug, Clone)]
pub struct ImageOptions {
    /// The image that the user named.
    pub path: PathBuf,
    /// Its format; guessed from its first bytes where the user said nothing.
    pub format: Option<Format>,
    /// Refuse writes; the file is opened read-only.
    pub read_only: bool,
    /// Which backing files it may make us open.
    pub allow_backing: BackingPolicy,
    /// Other files that the user named (on the same command line).
    pub listed: Vec<PathBuf>,
    /// What `GET_ID` answers.
    pub serial: String,
    /// Whether completed writes may stay volatile until a flush (cache=writeback, none, unsafe).
    pub volatile_cache: bool,
    /// The memory for tables, over all layers; by default what covers the whole disk, up to 32 MiB.
    pub table_cache_bytes: Option<u64>,
    /// The disk as it was when this internal snapshot was taken, in the size that it had; read-only.
    pub snapshot: Option<SnapshotName>,
}

impl ImageOptions {
    /// Options for `path` with everything else at its default.
    #[must_use]
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            format: None,
            read_only: false,
            allow_backing: BackingPolicy::default(),
            listed: Vec::new(),
            serial: String::new(),
            volatile_cache: true,
            table_cache_bytes: None,
            snapshot: None,
        }
    }
}

/// Opens an image and the layers below it. Opens no file that the policy does not allow; on an error no file has been
/// changed.
pub fn open(options: &ImageOptions, opener: &dyn Opener) -> Result<Image> {
    let gate = Gate::new(&options.allow_backing, &options.path, &options.listed, opener)?;
    let mut layers: Vec<Layer> = Vec::new();
    let mut guessed_raw = false;
    let mut next = Some((gate.top.clone(), options.path.clone(), options.format));
    while let Some((path, said, format)) = next.take() {
        refuse_loop(&layers, &path)?;
        let read_only = options.read_only || options.snapshot.is_some();
        let role = match (layers.is_empty(), read_only) {
            (true, false) => Role::Writable,
            (true, true) => Role::ReadOnly,
            (false, _) => Role::Backing,
        };
        let file = opener.open(&path, role)?;
        let (format, guessed) = format_of(&path, file.as_ref(), format)?;
        if layers.is_empty() {
            guessed_raw = guessed && format == Format::Raw;
        }
        let snapshot = options.snapshot.as_ref().filter(|_| layers.is_empty());
        let mut layer = open_layer(&path, file, format, role, snapshot)?;
        if let Some((name, backing_format)) = backing_of(&layer)? {
            let (target, name) = gate.pass(&said, "backing file", &name)?;
            next = Some((target, name, backing_format));
        }
        if let Some(name) = layer.mapping.data_file() {
            let (target, name) = gate.pass(&said, "data file", name)?;
            refuse_shared_data(&layers, &path, &target)?;
            let file = opener.open(&target, role)?;
            layer.data = Some(DataFile { path: target, said: name, file });
        }
        layer.said = said;
        layer.guessed = guessed;
        layers.push(layer);
    }
    let size_bytes = layers.first().map_or(0, |top| top.size_bytes);
    let below = share_out(&mut layers, size_bytes, options.table_cache_bytes);
    let chain = Chain {
        layers,
        size_bytes,
        read_only: options.read_only || options.snapshot.is_some(),
        guessed_raw,
        refused_headers: AtomicU64::new(0),
        volatile_cache: AtomicBool::new(options.volatile_cache),
        serial: options.serial.clone(),
        below,
        hits: Hits::default(),
    };
    Ok(Image { chain: Arc::new(chain), listeners: Listeners::default() })
}

/// A data file holds what one guest wrote: were it also an image of the chain, its guest would write that image's tables.
fn refuse_shared_data(layers: &[Layer], path: &Path, target: &Path) -> Result<()> {
    let is_shared = |layer: &Layer| layer.path == target || layer.data.as_ref().is_some_and(|data| data.path == target);
    if path != target && !layers.iter().any(is_shared) {
        return Ok(());
    }
    let (path, target) = (path.display(), target.display());
    let what = format!("'{path}' names '{target}' as its data file, which is another part of the same disk");
    Err(Error::new(ErrorKind::BadImage, what))
}

fn refuse_loop(layers: &[Layer], path: &Path) -> Result<()> {
    let bad = |what: String| Err(Error::new(ErrorKind::BadImage, what));
    if layers.iter().any(|layer| layer.data.as_ref().is_some_and(|data| data.path == path)) {
        return bad(format!("'{}' is the data file of an image, and in its own chain a backing file", path.display()));
    }
    if layers.iter().any(|layer| layer.path == path) {
        return bad(format!("the backing files form a loop: '{}' appears twice in its own chain", path.display()));
    }
    if layers.len() >= MAX_LAYERS {
        return bad(format!("the chain has more than {MAX_LAYERS} layers, at '{}'", path.display()));
    }
    Ok(())
}

/// The first bytes of a file, for guessing: fewer where it is shorter.
pub(crate) fn read_head(file: &dyn File) -> Result<Vec<u8>> {
    let info = file.info();
    let length = usize::try_from(info.length_bytes).unwrap_or(PROBE_BYTES).min(PROBE_BYTES);
    let io = MetaIo::new(file.open_blocking()?);
    let failed = |error| Error::with_source(ErrorKind::Io, format!("cannot read the start of '{}'", info.name), error);
    Ok(block_on(io.read(0, length, PastEnd::Zeros)).map_err(failed)?.to_vec())
}

/// The format to open a file in, and whether that is only a guess.
pub(crate) fn format_of(path: &Path, file: &dyn File, said: Option<Format>) -> Result<(Format, bool)> {
    if let Some(format) = said {
        return Ok((format, false));
    }
    let guess = guess_format(&path.display().to_string(), &read_head(file)?)?;
    if guess.is_none() && !file.info().read_only {
        tracing::warn!(
            "the format of '{}' was not given; it is taken for raw, and a guest may not write another format's header \
             to it (format=raw allows it)",
            path.display()
        );
    }
    Ok((guess.unwrap_or(Format::Raw), true))
}

pub(crate) fn open_layer(
    path: &Path,
    file: Arc<dyn File>,
    format: Format,
    role: Role,
    snapshot: Option<&SnapshotName>,
) -> Result<Layer> {
    let read_only = !matches!(role, Role::Writable);
    let info = FileInfo { length_bytes: file.length_bytes()?, ..file.info().clone() };
    let mapping = Mapping::open(path.display().to_string(), &*file, &info, format, read_only, snapshot)?;
    let size_bytes = mapping.size_bytes();
    let said = path.to_owned();
    Ok(Layer { path: said.clone(), said, guessed: false, file, data: None, mapping, size_bytes })
}

/// The backing file that a layer names, and the format it gives it.
fn backing_of(layer: &Layer) -> Result<Option<(String, Option<Format>)>> {
    let Some((name, format)) = layer.mapping.backing() else { return Ok(None) };
    let in_context = |error: Error| error.in_context(format!("backing format of '{}'", layer.path.display()));
    let format = format.map(str::parse).transpose().map_err(in_context)?;
    Ok(Some((name.to_owned(), format)))
}
