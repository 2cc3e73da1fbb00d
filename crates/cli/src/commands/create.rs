//! `ringdisk create`: a new image, in qemu-img's words.

use crate::image_name::file_name;
use crate::output::{self, usage};
use crate::tool::Watch;
use anyhow::Context;
use block::{File, FileOp, block_on};
use daemon::{EngineOpener, parse_key_values, parse_size, unknown};
use format_qcow2::{Compression, Preallocation};
use image::{CreateOptions, Format, GrowBy, Opener, Role, inspect};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Create an image. A file that exists is overwritten, unless somebody uses it. Ctrl-C ends it with the files that are new
/// removed.
#[derive(clap::Args, Clone)]
pub(crate) struct Args {
    /// Format of the new image: raw or qcow2.
    #[arg(short, long, value_name = "FORMAT", default_value = "raw")]
    format: String,
    /// Options of the format, key=value,...: "help" lists them.
    #[arg(short, value_name = "OPTIONS")]
    options: Vec<String>,
    /// The image that the new one is an overlay of; a relative name is relative to FILE.
    #[arg(short, long, value_name = "FILE")]
    backing: Option<String>,
    /// Format of the backing file.
    #[arg(short = 'F', long, value_name = "FORMAT")]
    backing_format: Option<String>,
    /// Do not look at the backing file; it may be missing, and SIZE has to be given.
    #[arg(short = 'u', long)]
    unsafe_backing: bool,
    /// Say nothing.
    #[arg(short, long)]
    quiet: bool,
    /// The image to create.
    file: PathBuf,
    /// Size of the disk: bytes, or with k, M, G, T; by default the backing file's.
    size: Option<String>,
}

const RAW_KEYS: [&str; 3] = ["size", "preallocation", "nocow"];
const QCOW2_KEYS: [&str; 13] = [
    "size",
    "cluster_size",
    "compat",
    "refcount_bits",
    "compression_type",
    "lazy_refcounts",
    "extended_l2",
    "data_file",
    "data_file_raw",
    "preallocation",
    "nocow",
    "backing_file",
    "backing_fmt",
];
const SWITCH: [(&str, bool); 2] = [("on", true), ("off", false)];
const REFCOUNT_BITS: [u32; 7] = [1, 2, 4, 8, 16, 32, 64];
const SECTOR_BYTES: u64 = 512;
/// As many as Linux follows.
const LINKS_MAX: usize = 40;

/// All that can be said about a new image.
struct Wanted {
    format: Format,
    size_bytes: Option<u64>,
    cluster_bits: u32,
    version: u32,
    refcount_bits: u32,
    compression: Compression,
    /// As it was given.
    compat: Option<String>,
    lazy_refcounts: bool,
    extended_l2: bool,
    data_file: Option<String>,
    data_file_raw: Option<bool>,
    /// As it was given.
    preallocation: Option<String>,
    nocow: Option<bool>,
    backing_file: Option<String>,
    backing_format: Option<Format>,
    /// The external data file, once it was made where there was none.
    new_data_file: Option<PathBuf>,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let format: Format = args.format.parse()?;
    if args.options.iter().any(|text| matches!(text.as_str(), "help" | "?")) {
        return output::print(&format!("Options of {format}: {}\n", keys(format).join(", ")));
    }
    let args = &Args { file: file_name(&args.file)?, ..args.clone() };
    let wanted = create(args, format, &mut Watch::for_people(args.quiet)?)?;
    if args.quiet { Ok(()) } else { output::print(&wanted.announcement(&args.file)) }
}

/// An image that another command is going to fill. Returns its external data file if that is new too.
pub(super) fn target(
    file: &Path,
    format: Format,
    options: &[String],
    backing: Option<&str>,
    backing_format: Option<Format>,
    size_bytes: u64,
    watch: &mut Watch,
) -> anyhow::Result<Option<PathBuf>> {
    let args = Args {
        format: format.to_string(),
        options: options.to_vec(),
        backing: backing.map(str::to_owned),
        backing_format: backing_format.map(|format| format.to_string()),
        unsafe_backing: false,
        quiet: true,
        file: file.to_owned(),
        size: Some(size_bytes.to_string()),
    };
    Ok(create(&args, format, watch)?.new_data_file)
}

fn create(args: &Args, format: Format, watch: &mut Watch) -> anyhow::Result<Wanted> {
    let mut wanted = Wanted::from_args(args, format)?;
    wanted.settle_backing(args)?;
    let options = wanted.create_options()?;
    options.validate()?;
    let raw_space = wanted.raw_space()?;
    let mut emptied = Vec::new();
    let mut empty = |path: PathBuf| -> anyhow::Result<Arc<dyn File>> {
        let path = behind_links(path);
        let is_new = !path.exists();
        let file = empty_file(&path, is_new)?;
        emptied.push((path, is_new));
        Ok(file)
    };
    let file = empty(args.file.clone())?;
    let data_path = wanted.data_file.as_ref().map(|name| args.file.parent().unwrap_or(Path::new("")).join(name));
    let data = data_path.map(&mut empty).transpose();
    let made = data.and_then(|data| {
        watch.run(|control| match &options {
            CreateOptions::Raw { size_bytes } if raw_space != GrowBy::Nothing => {
                jobs::resize_raw(file.as_ref(), *size_bytes, false, raw_space, control)
            }
            options => jobs::create(&file, data.as_ref(), options, control),
        })?;
        Ok(())
    });
    if let Err(error) = made {
        let files = emptied.iter().map(|(path, is_new)| given_up(path, *is_new));
        return Err(error.context(files.collect::<Vec<_>>().join(", ")));
    }
    wanted.new_data_file = emptied.into_iter().nth(1).filter(|(_, is_new)| *is_new).map(|(path, _)| path);
    Ok(wanted)
}

/// What a name stands for that may be a symbolic link to a file that is not there yet.
pub(super) fn behind_links(mut path: PathBuf) -> PathBuf {
    for _ in 0..LINKS_MAX {
        match std::fs::read_link(&path) {
            Ok(target) => path = path.parent().unwrap_or(Path::new("")).join(target),
            Err(_) => break,
        }
    }
    path
}

/// Half an image is of no use: one that was not there before goes again, so that its name is free for the next attempt.
/// Returns what became of it.
fn given_up(path: &Path, is_new: bool) -> String {
    match is_new && std::fs::remove_file(path).is_ok() {
        true => format!("'{}' was removed again", path.display()),
        false => format!("'{}' is incomplete", path.display()),
    }
}

fn keys(format: Format) -> &'static [&'static str] {
    match format {
        Format::Raw => &RAW_KEYS,
        Format::Qcow2 => &QCOW2_KEYS,
    }
}

/// An empty file under a lock: a new one, or one that was there and that nobody uses.
fn empty_file(path: &Path, is_new: bool) -> anyhow::Result<Arc<dyn File>> {
    if is_new {
        engine::create(path, 0)?;
    }
    let file = EngineOpener::default().open(path, Role::Writable)?;
    if !file.info().block_device {
        let queue = file.open_blocking()?;
        block_on(queue.start(FileOp::SetLength { length: 0 }))
            .with_context(|| format!("cannot empty '{}'", path.display()))?;
    }
    Ok(file)
}

impl Wanted {
    fn from_args(args: &Args, format: Format) -> anyhow::Result<Self> {
        let backing_format = args.backing_format.as_deref().map(str::parse).transpose()?;
        let mut wanted = Self {
            format,
            size_bytes: args.size.as_deref().map(parse_size).transpose()?,
            cluster_bits: 16,
            version: 3,
            refcount_bits: 16,
            compression: Compression::Zlib,
            compat: None,
            lazy_refcounts: false,
            extended_l2: false,
            data_file: None,
            data_file_raw: None,
            preallocation: None,
            nocow: None,
            backing_file: args.backing.clone(),
            backing_format,
            new_data_file: None,
        };
        for text in &args.options {
            for pair in parse_key_values(text).map_err(|error| error.in_context(format!("-o {text}")))? {
                wanted.set(&pair.key, &pair.value)?;
            }
        }
        if wanted.version == 2 && wanted.refcount_bits != 16 {
            return Err(usage("refcount_bits other than 16 needs compat=1.1"));
        }
        if wanted.version == 2 && wanted.compression != Compression::Zlib {
            return Err(usage("compression_type other than zlib needs compat=1.1"));
        }
        if wanted.backing_file.is_some() && format == Format::Raw {
            return Err(usage("a raw image cannot have a backing file: use -f qcow2"));
        }
        if wanted.backing_file.is_none() && wanted.backing_format.is_some() {
            return Err(usage("a backing format (-F) needs a backing file (-b)"));
        }
        Ok(wanted)
    }

    fn set(&mut self, key: &str, value: &str) -> anyhow::Result<()> {
        if key == "encryption" || key.starts_with("encrypt.") {
            return Err(usage(format!("{key}: encrypted images (legacy AES, LUKS) are not supported")));
        }
        if !keys(self.format).contains(&key) {
            return Err(unknown(&format!("option of {}:", self.format), key, keys(self.format)).into());
        }
        match key {
            "size" => self.size_bytes = Some(parse_size(value)?),
            "cluster_size" => self.cluster_bits = cluster_bits(value)?,
            "compat" => {
                self.version = choose(key, value, &[("0.10", 2), ("v2", 2), ("1.1", 3), ("v3", 3)])?;
                self.compat = Some(value.to_owned());
            }
            "lazy_refcounts" => self.lazy_refcounts = choose(key, value, &SWITCH)?,
            "data_file" => self.data_file = Some(value.to_owned()),
            "data_file_raw" => self.data_file_raw = Some(choose(key, value, &SWITCH)?),
            "preallocation" => {
                value.parse::<Preallocation>()?;
                self.preallocation = Some(value.to_owned());
            }
            "nocow" if choose(key, value, &SWITCH)? => {
                return Err(usage("nocow=on is not supported: use chattr +C on the directory"));
            }
            "nocow" => self.nocow = Some(false),
            "extended_l2" => self.extended_l2 = choose(key, value, &SWITCH)?,
            "refcount_bits" => self.refcount_bits = refcount_bits(value)?,
            "compression_type" => {
                let choices = [("zlib", Compression::Zlib), ("zstd", Compression::Zstd)];
                self.compression = choose(key, value, &choices)?;
            }
            "backing_file" => self.backing_file = Some(value.to_owned()),
            _ => self.backing_format = Some(value.parse()?),
        }
        Ok(())
    }

    /// Looks at the backing file: its size where none was given, and that its format was said.
    fn settle_backing(&mut self, args: &Args) -> anyhow::Result<()> {
        let Some(name) = &self.backing_file else { return Ok(()) };
        if args.unsafe_backing {
            return Ok(());
        }
        let path = args.file.parent().unwrap_or(Path::new("")).join(name);
        let file = EngineOpener::default().open(&path, Role::Backing)?;
        let below = inspect(&path, &file, self.backing_format)?;
        if self.backing_format.is_none() {
            return Err(usage(format!(
                "the backing file '{name}' is given without its format: add -F {} if that is what it is",
                below.format
            )));
        }
        self.size_bytes = self.size_bytes.or(Some(below.virtual_size_bytes));
        Ok(())
    }

    fn create_options(&mut self) -> anyhow::Result<CreateOptions> {
        let size =
            self.size_bytes.ok_or_else(|| usage("the size of the image is missing: FILE SIZE, for example 20G"))?;
        let size_bytes = size.next_multiple_of(SECTOR_BYTES);
        self.size_bytes = Some(size_bytes);
        Ok(match self.format {
            Format::Raw => CreateOptions::Raw { size_bytes },
            Format::Qcow2 => CreateOptions::Qcow2(format_qcow2::CreateOptions {
                size_bytes,
                version: self.version,
                cluster_size: 1 << self.cluster_bits,
                refcount_bits: self.refcount_bits,
                compression: self.compression,
                lazy_refcounts: self.lazy_refcounts,
                extended_l2: self.extended_l2,
                data_file: self.data_file.clone(),
                data_file_raw: self.data_file_raw == Some(true),
                preallocation: self.preallocation.as_deref().map_or(Ok(Preallocation::Off), str::parse)?,
                backing_file: self.backing_file.clone(),
                backing_format: self.backing_format.map(|format| format.to_string()),
            }),
        })
    }

    /// The space that is made in advance for a raw image.
    fn raw_space(&self) -> anyhow::Result<GrowBy> {
        Ok(match self.preallocation.as_deref().filter(|_| self.format == Format::Raw) {
            None | Some("off") => GrowBy::Nothing,
            Some("falloc") => GrowBy::Space,
            Some("full") => GrowBy::Zeros,
            Some(mode) => {
                return Err(usage(format!("preallocation={mode}: a raw image has off, falloc and full")));
            }
        })
    }

    /// What qemu-img says.
    fn announcement(&self, file: &Path) -> String {
        let mut text = format!("Formatting '{}', fmt={}", file.display(), self.format);
        let mut say = |key: &str, value: &str| _ = write!(text, " {key}={value}");
        let switch = |on: bool| if on { "on" } else { "off" };
        let is_qcow2 = self.format == Format::Qcow2;
        if is_qcow2 {
            say("cluster_size", &(1u64 << self.cluster_bits).to_string());
            say("extended_l2", switch(self.extended_l2));
            if let Some(mode) = &self.preallocation {
                say("preallocation", mode);
            }
            say("compression_type", if self.compression == Compression::Zstd { "zstd" } else { "zlib" });
        }
        say("size", &self.size_bytes.unwrap_or(0).to_string());
        if !is_qcow2 {
            self.nocow.iter().for_each(|nocow| say("nocow", switch(*nocow)));
            self.preallocation.iter().for_each(|mode| say("preallocation", mode));
        }
        if let Some(name) = &self.backing_file {
            say("backing_file", name);
        }
        if let Some(format) = self.backing_format {
            say("backing_fmt", &format.to_string());
        }
        if is_qcow2 {
            if let Some(compat) = &self.compat {
                say("compat", compat);
            }
            if let Some(name) = &self.data_file {
                say("data_file", name);
            }
            if let Some(raw) = self.data_file_raw {
                say("data_file_raw", switch(raw));
            }
            say("lazy_refcounts", switch(self.lazy_refcounts));
            say("refcount_bits", &self.refcount_bits.to_string());
            if let Some(nocow) = self.nocow {
                say("nocow", switch(nocow));
            }
        }
        text.push('\n');
        text
    }
}

fn choose<T: Copy>(key: &str, value: &str, choices: &[(&str, T)]) -> anyhow::Result<T> {
    let found = choices.iter().find(|(name, _)| *name == value).map(|(_, choice)| *choice);
    let names: Vec<&str> = choices.iter().map(|(name, _)| *name).collect();
    found.ok_or_else(|| unknown(&format!("value of '{key}':"), value, &names).into())
}

fn cluster_bits(value: &str) -> anyhow::Result<u32> {
    let bytes = parse_size(value)?;
    let valid = bytes.is_power_of_two() && (512..=2 << 20).contains(&bytes);
    valid
        .then(|| bytes.trailing_zeros())
        .ok_or_else(|| usage(format!("cluster_size={value}: takes a power of two from 512 to 2M")))
}

fn refcount_bits(value: &str) -> anyhow::Result<u32> {
    let bits = value.parse().ok().filter(|bits| REFCOUNT_BITS.contains(bits));
    bits.ok_or_else(|| usage(format!("refcount_bits={value}: takes one of {REFCOUNT_BITS:?}")))
}
