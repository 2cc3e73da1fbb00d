//! `ringdisk convert`: copies disks into another image, in qemu-img's words.

use crate::arguments::{integer, name_text};
use crate::images::{
    INCOMPLETE, OpenArgs, asks_for_help, backing_name, beside_image, copy_bitmaps, create_target, file_name, files,
    holds_old_bytes, image_name, leave_page_cache, open_to_overwrite, open_writable, opened_name, options_help,
    parse_format, path_of, refuse_misfits, refuse_same_file, refuse_without_bitmaps, remote_name, remove_target,
    sync_directory, with_fate,
};
use crate::output::{self, ProgressArgs, Watch, usage};
use crate::threads::Reactors;
use anyhow::{Context, bail};
use block::{Disk, SECTOR_BYTES};
use drive::{escape, parse_options, parse_size};
use engine::CacheMode;
use image::{BackingPolicy, FileName, Format, Image, ImageOptions, os_name};
use jobs::{ConvertOptions, JobDisk, Salvage, Unreadable};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Copy a disk into a new image.
///
/// Several sources are copied one behind the other. Sparse data stay sparse. An existing target is overwritten. An
/// incomplete target is removed.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Format of the source; by default guessed from its contents.
    #[arg(short, long = "source-format", value_name = "FORMAT")]
    format: Option<String>,
    /// Format of the target: raw (default) or qcow2.
    #[arg(short = 'O', long, alias = "target-format", value_name = "FORMAT")]
    output_format: Option<String>,
    /// Options of the target's format, key=value,...: "help" lists them.
    #[arg(short, long, alias = "target-options", value_name = "OPTIONS", value_parser = name_text())]
    options: Vec<String>,
    /// The target becomes an overlay of this image: only the data of the source's top layer are copied.
    #[arg(short = 'B', short_alias = 'b', long, value_name = "FILE", value_parser = name_text())]
    backing: Option<String>,
    /// Format of the backing file.
    #[arg(short = 'F', long, value_name = "FORMAT")]
    backing_format: Option<String>,
    /// Write into the existing target; do not create it.
    #[arg(short = 'n', long)]
    no_create: bool,
    /// The existing target (-n) reads as zeros everywhere.
    #[arg(long, requires = "no_create")]
    target_is_zero: bool,
    /// Leave out runs of zeros of at least this length (4k); 0 writes everything as data.
    #[arg(short = 'S', long = "sparse-size", value_name = "SIZE")]
    sparse: Option<String>,
    /// Requests in flight, 1 to 16 on each thread.
    #[arg(short = 'm', long = "parallel", value_name = "COUNT", default_value_t = 8, value_parser = integer::<u8>(1..=16))]
    requests: u8,
    /// Write in any order (always so).
    #[arg(short = 'W', long = "oob-writes")]
    any_order: bool,
    /// Cache mode of the target: writeback, none, writethrough, directsync, unsafe (it is not made durable).
    #[arg(short = 't', long, value_name = "CACHE", default_value = "writeback")]
    target_cache: String,
    /// Compress each cluster that gets smaller by it (qcow2).
    #[arg(short = 'c', long)]
    compress: bool,
    /// Copy the disk as it was at a snapshot: an id, a name, or snapshot.id=ID,snapshot.name=NAME.
    #[arg(short = 'l', long, alias = "source-snapshot", value_name = "SNAPSHOT")]
    snapshot: Option<String>,
    /// Let the host copy data by itself if it can (copy_file_range, with reflinks if the file system has them). Data
    /// are then not searched for zeros.
    #[arg(short = 'C', long = "copy-range-offloading")]
    copy_offload: bool,
    /// At most this many bytes of data a second.
    #[arg(short = 'r', long, value_name = "RATE")]
    rate: Option<String>,
    /// Copy the persistent bitmaps of the source's top layer, too.
    #[arg(long)]
    bitmaps: bool,
    /// Leave out inconsistent bitmaps (--bitmaps), with a warning.
    #[arg(long)]
    skip_broken_bitmaps: bool,
    /// Replace unreadable data by zeros, with a warning that says where.
    #[arg(long)]
    salvage: bool,
    /// The target is a description of an existing image (-n): driver=FORMAT,file.filename=FILE.
    #[arg(long)]
    target_image_opts: bool,
    #[command(flatten)]
    open: OpenArgs,
    #[command(flatten)]
    progress: ProgressArgs,
    /// The sources, and the target last.
    #[arg(required_unless_present = "options", value_name = "FILE")]
    files: Vec<PathBuf>,
}

/// The largest value of `-S`.
const SPARSE_BYTES_MAX: u64 = 16 << 20;

/// The target, as it was named.
struct Target {
    path: PathBuf,
    /// `None` for an existing target whose format is to be guessed.
    format: Option<Format>,
    /// The options of `-o`, except the two below and the size, which is the sources'.
    options: Vec<String>,
    /// From `-B` and `-F`, or else from `-o`.
    backing: Option<String>,
    backing_format: Option<Format>,
    /// Whether its space is preallocated.
    preallocated: bool,
}

impl Target {
    fn new(args: &Args, path: PathBuf, format: Option<Format>) -> anyhow::Result<Self> {
        let (mut options, mut backing, mut backing_format, mut preallocated) = (Vec::new(), None, None, false);
        for text in &args.options {
            for pair in parse_options(text).map_err(|error| error.in_context(format!("-o {}", image::shown(text))))? {
                if pair.key == "preallocation" {
                    preallocated = pair.value != "off";
                }
                match pair.key.as_str() {
                    "size" => drop(parse_size(&pair.value)?),
                    "backing_file" => backing = Some(pair.value),
                    "backing_fmt" => backing_format = Some(pair.value),
                    key => options.push(format!("{key}={}", escape(&pair.value))),
                }
            }
        }
        let backing_format = args.backing_format.clone().or(backing_format);
        Ok(Self {
            path,
            format,
            options,
            backing: args.backing.clone().or(backing),
            backing_format: parse_format(backing_format.as_deref())?,
            preallocated,
        })
    }

    /// Returns the external data files that it will be made with: as named, and relative to its directory.
    fn data_files(&self) -> Vec<PathBuf> {
        let directory = self.path.parent().unwrap_or(Path::new(""));
        // Parse errors are reported when the target is created.
        let pairs = self.options.iter().filter_map(|options| parse_options(options).ok()).flatten();
        let named = pairs.filter(|pair| pair.key == "data_file");
        named.flat_map(|pair| [os_name(&pair.value).into(), directory.join(os_name(&pair.value))]).collect()
    }
}

impl Args {
    /// Refuses options that contradict each other, in qemu-img's order and words.
    fn refuse_contradictions(&self) -> anyhow::Result<()> {
        let refused = [
            (self.compress && self.copy_offload, "Cannot enable copy offloading when -c is used"),
            (self.copy_offload && self.sparse.is_some(), "Cannot enable copy offloading when -S is used"),
            (self.salvage && self.copy_offload, "Cannot use copy offloading in salvaging mode"),
            (self.target_image_opts && !self.no_create, "--target-image-opts requires use of -n flag"),
            (self.skip_broken_bitmaps && !self.bitmaps, "Use of --skip-broken-bitmaps requires --bitmaps"),
            (self.no_create && !self.options.is_empty(), "-o has no effect when skipping image creation"),
        ];
        match refused.iter().find(|(is_so, _)| *is_so) {
            Some((_, why)) => bail!("{why}"),
            None => Ok(()),
        }
    }

    /// Returns the sources' names, and the target's.
    fn names(&self) -> anyhow::Result<(&[PathBuf], &Path)> {
        match self.files.split_last() {
            Some((target, sources)) if !sources.is_empty() => Ok((sources, target)),
            _ => Err(usage("Must specify image file name: one source or more, and the target")),
        }
    }

    fn target(&self, target: &Path, sources: usize) -> anyhow::Result<Target> {
        let target = match self.target_image_opts {
            true => {
                let (file, format) = image_name(target, self.output_format.as_deref(), true)?.whole()?;
                Target::new(self, path_of(&file)?, format)?
            }
            false => {
                let format = self.output_format.as_deref().unwrap_or("raw").parse()?;
                Target::new(self, file_name(target)?, Some(format))?
            }
        };
        if sources > 1 && target.backing.is_some() {
            bail!("Having a backing file for the target makes no sense when concatenating multiple input images");
        }
        if self.compress && target.format.is_some_and(|format| !format.can_compress()) {
            bail!("Compression not supported for this file format");
        }
        if self.compress && target.preallocated {
            bail!("Compression and preallocation not supported at the same time");
        }
        Ok(target)
    }

    fn sparse_bytes(&self) -> anyhow::Result<u64> {
        let bytes = parse_size(self.sparse.as_deref().unwrap_or("4k"))?;
        match bytes.is_multiple_of(SECTOR_BYTES) && bytes <= SPARSE_BYTES_MAX {
            true => Ok(bytes),
            false => Err(usage(format!("-S takes a multiple of {SECTOR_BYTES} up to 16M, or 0, not {bytes}"))),
        }
    }

    /// Opens the sources. A snapshot in the form `snapshot.` belongs to the first source; a bare name needs a single
    /// source.
    fn open_sources(&self, paths: &[PathBuf]) -> anyhow::Result<Vec<Arc<Image>>> {
        let snapshot = self.snapshot.as_deref();
        if paths.len() > 1 && snapshot.is_some_and(|name| !name.starts_with("snapshot.")) {
            bail!("No support for concatenating multiple snapshot");
        }
        let open = |(index, path): (usize, &PathBuf)| {
            self.open.open_at(path, self.format.as_deref(), &[], snapshot.filter(|_| index == 0))
        };
        paths.iter().enumerate().map(open).collect()
    }

    /// Returns the files that the target may open: those that the user named for it and, if it is new, the chain of its
    /// backing file.
    fn listed(&self, target: &Target, sources: &[PathBuf]) -> anyhow::Result<Vec<PathBuf>> {
        let mut listed = target.data_files();
        let Some(backing) = &target.backing else { return Ok(listed) };
        let remote = remote_name(backing);
        let path = beside_image(&target.path, &backing_name(backing, true)?);
        // Without the backing format no image is created.
        if let Some(format) = target.backing_format.filter(|_| !self.no_create) {
            let mut options = ImageOptions::new(remote.unwrap_or_else(|| FileName::from(&path)));
            options.format = Some(format);
            options.read_only = true;
            options.allow_backing = self.open.gate.policy()?;
            options.listed = sources.to_vec();
            let below = image::open(&options, &files())?;
            let is_named = |name: &FileName| name.path().is_some() || name.is_remote();
            listed.extend(below.file_names().filter(is_named).map(|name| name.look_at()));
        }
        listed.push(path);
        Ok(listed)
    }

    fn salvage(&self, paths: &[PathBuf]) -> Option<Salvage> {
        let (paths, quiet) = (paths.to_vec(), self.progress.quiet);
        let tell = move |lost: Unreadable| {
            let Unreadable { source, offset, length_bytes, error } = lost;
            let name = paths.get(source).map(|path| opened_name(path).to_string()).unwrap_or_default();
            if !quiet {
                let what = format!("error while reading {length_bytes} bytes at offset {offset} of '{name}'");
                output::warn(&format!("warning: {what}: {error}; they are zeros in the target"));
            }
        };
        self.salvage.then(|| Salvage(Arc::new(tell)))
    }
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    if asks_for_help(&args.options) {
        let format = args.output_format.as_deref().unwrap_or("raw").parse()?;
        return output::print(&options_help(format, !args.files.is_empty()));
    }
    args.refuse_contradictions()?;
    // This comes before the target is emptied.
    args.target_cache.parse::<CacheMode>()?;
    let (paths, target) = args.names()?;
    let mut options = ConvertOptions::default();
    options.sparse_bytes = args.sparse_bytes()?;
    options.rate = args.rate.as_deref().map(parse_size).transpose().context("Invalid rate limit specified")?;
    // Errors of a source are reported before errors of the target.
    let sources = args.open_sources(paths)?;
    let target = args.target(target, paths.len())?;
    options.target_is_new = !args.no_create;
    options.target_is_zero = args.target_is_zero || (!args.no_create && !holds_old_bytes(&target.path, target.format));
    options.top_only = target.backing.is_some();
    options.compress = args.compress;
    options.depth = usize::from(args.requests);
    options.offload = args.copy_offload;
    options.salvage = args.salvage(paths);
    for source in &sources {
        refuse_same_file(source, &opened_name(&target.path))?;
        for data_file in target.data_files() {
            refuse_same_file(source, &FileName::from(&data_file))?;
        }
    }
    if args.bitmaps && sources.len() > 1 {
        bail!("Copying bitmaps only possible with single source");
    }
    if let Some(first) = sources.first().filter(|_| args.bitmaps) {
        refuse_without_bitmaps(first, target.format, args.skip_broken_bitmaps)?;
    }
    let listed = args.listed(&target, paths)?;
    let mut watch = Watch::start(&args.progress)?;
    let mut new_data_file = None;
    if let Some(format) = target.format.filter(|_| !args.no_create) {
        let size = sources.iter().map(|source| source.info().size_bytes).sum();
        let Target { path, options, backing, backing_format, .. } = &target;
        let watch = &mut watch.before();
        new_data_file = create_target(path, format, options, backing.as_deref(), *backing_format, size, watch)?;
    }
    let copied = match open_target(args, &target, &sources, &listed, &watch) {
        // The target is unchanged.
        Err(error) if args.no_create => return Err(error),
        opened => opened.and_then(|image| copy(args, &target, image, &sources, &options, &mut watch)),
    };
    let Err(error) = copied else {
        // The name of an existing target needs no sync.
        return if args.no_create { Ok(()) } else { sync_directory(&target.path) };
    };
    Err(match args.no_create {
        true => {
            let what = if watch.was_interrupted() { error.context("interrupted") } else { error };
            with_fate(what, &target.path, INCOMPLETE, true)
        }
        false => {
            // Without the image, the data file is useless.
            let is_only = new_data_file.is_none();
            new_data_file.into_iter().for_each(|path| drop(std::fs::remove_file(path)));
            remove_target(&target.path, error, watch.was_interrupted(), is_only)
        }
    })
}

/// Opens the target. Nothing is written before everything is known to fit.
fn open_target(
    args: &Args,
    target: &Target,
    sources: &[Arc<Image>],
    listed: &[PathBuf],
    watch: &Watch,
) -> anyhow::Result<Arc<Image>> {
    let (name, cache) = (opened_name(&target.path), &args.target_cache);
    let image = match args.no_create {
        // New data go to space that its refcounts call free, so they must be right.
        true => {
            let mut goes_on = |_, _| !watch.was_interrupted();
            open_to_overwrite(name, target.format, cache, args.open.gate.policy()?, listed, &mut goes_on)?
        }
        // A new target names the files that the user named; they and those below have passed the gate.
        false => open_writable(name, target.format, cache, BackingPolicy::Listed, listed)?,
    };
    if image.info().size_bytes < sources.iter().map(|source| source.info().size_bytes).sum::<u64>() {
        bail!("output file is smaller than input file");
    }
    let (own, data) = image.layer_file_names().next().unzip();
    for name in own.into_iter().chain(data.flatten()) {
        sources.iter().try_for_each(|source| refuse_same_file(source, &name))?;
    }
    if let Some(first) = sources.first().filter(|_| args.bitmaps) {
        refuse_misfits(first, &image)?;
    }
    Ok(image)
}

fn copy(
    args: &Args,
    target: &Target,
    image: Arc<Image>,
    sources: &[Arc<Image>],
    options: &ConvertOptions,
    watch: &mut Watch,
) -> anyhow::Result<()> {
    let reactors = Reactors::start("convert")?;
    let disks: Vec<_> = sources.iter().map(JobDisk::from).collect();
    let done = watch.run(|control| jobs::convert(&disks, &(&image).into(), options, &reactors.handles(), control));
    reactors.stop()?;
    let done = done?;
    if args.copy_offload {
        tracing::info!(offloaded_bytes = done.offloaded_bytes, "copied by the host");
    }
    drop(image);
    leave_page_cache(&target.path, &args.target_cache)?;
    match sources.first().filter(|_| args.bitmaps) {
        Some(first) => copy_bitmaps(first, &target.path),
        None => Ok(()),
    }
}
