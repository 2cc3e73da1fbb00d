//! `ringdisk info`: the properties of an image, as qemu-img shows them, and the engine that would serve it.

mod encryption;
mod file;

use crate::images::{files, image_name, name_force_share, parse_format, remote_name};
use crate::output::program::is_qemu_img;
use crate::output::{self, printable, snapshot_table, with_bytes_shown};
use anyhow::{Context, bail};
use drive::{FilePart, ImageName, PartOpener, human_size};
use file::ImageFile;
use format_qcow2::{Bitmap, Compression, Header};
use image::{
    BackingPolicy, Description, FileName, Format, Opener, Role, inspect_encrypted, pass_gate, path_with_protocol,
};
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Show the properties of an image.
///
/// Opens only FILE, unless --backing-chain asks for the files below it.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The image.
    file: PathBuf,
    /// Its format; by default guessed from its contents.
    #[arg(short, long, value_name = "FORMAT")]
    format: Option<String>,
    /// How to print.
    #[arg(long, value_enum, default_value = "human")]
    output: Output,
    /// Show the chain of backing files, too.
    #[arg(short, long)]
    backing_chain: bool,
    /// Which backing files --backing-chain opens: deny, same-dir, listed, any, anywhere (files of servers, too).
    #[arg(long, value_name = "POLICY", env = "RINGDISK_ALLOW_BACKING", default_value = "same-dir")]
    allow_backing: String,
    /// Look even if another process writes the image; the output may be out of date.
    #[arg(short = 'U', long)]
    force_share: bool,
    /// FILE is a description of an image: driver=FORMAT,file.filename=FILE.
    #[arg(long)]
    image_opts: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Output {
    Human,
    Json,
}

/// One inspected layer.
struct Layer {
    name: FileName,
    /// The name to show.
    shown: String,
    description: Description,
    /// The space that it takes on its file system, in bytes; `None` if unknown.
    disk_bytes: Option<u64>,
    file: ImageFile,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let name = image_name(&args.file, args.format.as_deref(), args.image_opts)?;
    let policy: BackingPolicy = args.allow_backing.parse()?;
    let mut layers = vec![look(name, args.force_share)?];
    while args.backing_chain
        && let Some((path, format)) = below(&layers, &policy)?
    {
        layers.push(look(ImageName { format, ..path.into() }, args.force_share)?);
    }
    match args.output {
        Output::Human => output::print(&layers.iter().map(human).collect::<Vec<_>>().join("\n")),
        Output::Json => {
            let mut values: Vec<Value> = layers.iter().map(machine).collect();
            let value = if args.backing_chain { Value::Array(values) } else { values.remove(0) };
            output::print(&format!("{}\n", serde_json::to_string_pretty(&value)?))
        }
    }
}

fn look(name: ImageName, force_share: bool) -> anyhow::Result<Layer> {
    let ImageName { file: name, format, part, .. } = name;
    let opener = files();
    let opener = if force_share { opener.without_locks() } else { opener };
    let opener = PartOpener { inner: opener, part };
    let file = opener.open(&name, Role::ReadOnly).map_err(name_force_share)?;
    let description = inspect_encrypted(name.clone(), &file, format)?;
    let look = || std::fs::metadata(name.look_at()).with_context(|| format!("cannot look at '{name}'"));
    // The metadata of a server's socket say nothing about its disk.
    let meta = if name.is_remote() || matches!(name, FileName::VhostUser(_)) { None } else { Some(look()?) };
    // st_blocks counts units of 512 bytes, whatever the file system's block is.
    let disk_bytes = meta.as_ref().map(|meta| meta.blocks() * 512);
    let length_bytes = match (&meta, part) {
        (Some(meta), Some(_)) => meta.len(),
        _ => file.length_bytes()?,
    };
    let file = ImageFile::new(name.to_string(), meta.as_ref(), length_bytes, disk_bytes);
    // A kept overlay has nearly all of its bytes beside its index.
    let data = name.path().and_then(|path| description.format.data_file_of(path)).map(std::fs::metadata);
    let data_bytes = data.and_then(Result::ok).map_or(0, |data| data.blocks() * 512);
    let disk_bytes = disk_bytes.map(|bytes| bytes + data_bytes);
    let shown = part.map_or_else(|| name.to_string(), |part| description_of(&name, &part));
    Ok(Layer { name, shown, description, disk_bytes, file })
}

/// Returns qemu-img's description of a part of a file.
fn description_of(name: &FileName, part: &FilePart) -> String {
    let offset = (part.offset_bytes > 0).then(|| format!("\"offset\": {}, ", part.offset_bytes));
    let size = part.size_bytes.map(|size| format!("\"size\": {size}, "));
    let [offset, size] = [offset, size].map(Option::unwrap_or_default);
    let file = Value::from(name.to_string());
    format!("json:{{{offset}\"driver\": \"raw\", {size}\"file\": {{\"driver\": \"file\", \"filename\": {file}}}}}")
}

/// Returns the backing file's name as a path, relative to the image that names it. A name with a protocol stays as it is.
fn backing_path(layer: &Layer) -> Option<String> {
    let name = layer.description.backing_file.as_ref()?;
    if remote_name(name).is_some() || path_with_protocol(name).is_some() {
        return Some(name.clone());
    }
    Some(layer.name.path().and_then(Path::parent).unwrap_or(Path::new("")).join(name).display().to_string())
}

/// Returns the name and format of the layer below the last one, if the policy allows it.
fn below(layers: &[Layer], policy: &BackingPolicy) -> anyhow::Result<Option<(FileName, Option<Format>)>> {
    let (Some(top), Some(last)) = (layers.first(), layers.last()) else { return Ok(None) };
    let Some(path) = backing_path(last) else { return Ok(None) };
    let path = PathBuf::from(image::os_name(path_with_protocol(&path).unwrap_or(&path)));
    let name = last.description.backing_file.as_deref().unwrap_or_default();
    let target = pass_gate(policy, top.name.clone(), &[], last.name.clone(), name, &files())?;
    for layer in layers {
        let canonical = match layer.name.is_remote() {
            true => layer.name.clone(),
            false => {
                let canonical = layer.name.look_at().canonicalize();
                FileName::File(canonical.with_context(|| format!("cannot find '{}'", layer.name))?)
            }
        };
        if canonical.is_same_file(&target) {
            bail!("the backing files form a loop: '{}' appears twice in its own chain", path.display());
        }
    }
    let format = parse_format(last.description.backing_format.as_deref());
    let name = if target.is_remote() { target } else { path.into() };
    Ok(Some((name, format.with_context(|| format!("backing format of '{}'", last.name))?)))
}

fn compat(header: &Header) -> &'static str {
    if header.version == 2 { "0.10" } else { "1.1" }
}

fn compression(header: &Header) -> &'static str {
    match header.compression {
        Compression::Zlib => "zlib",
        Compression::Zstd => "zstd",
    }
}

/// The feature bits that `info` shows (qcow2 specification, "Feature bits").
struct Flags {
    dirty: bool,
    corrupt: bool,
    extended_l2: bool,
    lazy_refcounts: bool,
}

impl Flags {
    fn of(header: &Header) -> Self {
        Self {
            dirty: header.incompatible_features & 1 != 0,
            corrupt: header.incompatible_features & (1 << 1) != 0,
            extended_l2: header.incompatible_features & (1 << 4) != 0,
            lazy_refcounts: header.compatible_features & 1 != 0,
        }
    }
}

fn human(layer: &Layer) -> String {
    let Layer { shown, description, disk_bytes, file, .. } = layer;
    let size = description.virtual_size_bytes;
    let mut text = String::new();
    let mut line = |line: String| {
        let _ = writeln!(text, "{line}");
    };
    line(format!("image: {}", printable(shown)));
    line(format!("file format: {}", description.format));
    line(format!("virtual size: {} ({size} bytes)", human_size(size)));
    line(format!("disk size: {}", file::human_disk_size(*disk_bytes)));
    let flags = description.qcow2.as_ref().map(Flags::of);
    if encryption::is_encrypted(description) {
        line("encrypted: yes".to_owned());
    }
    if let Some(header) = &description.qcow2 {
        line(format!("cluster_size: {}", 1u64 << header.cluster_bits));
    }
    if flags.as_ref().is_some_and(|flags| flags.dirty) {
        line("cleanly shut down: no".to_owned());
    }
    if let (Some(name), Some(full)) = (&description.backing_file, backing_path(layer)) {
        let actual = if full == *name { String::new() } else { format!(" (actual path: {full})") };
        line(format!("backing file: {}", printable(&format!("{name}{actual}"))));
    }
    if let Some(format) = &description.backing_format {
        line(format!("backing file format: {}", printable(format)));
    }
    if !description.snapshots.is_empty() {
        line(snapshot_table(&description.snapshots).trim_end().to_owned());
    }
    if let (Some(header), Some(flags)) = (&description.qcow2, &flags) {
        line("Format specific information:".to_owned());
        line(format!("    compat: {}", compat(header)));
        line(format!("    compression type: {}", compression(header)));
        if header.version >= 3 {
            line(format!("    lazy refcounts: {}", flags.lazy_refcounts));
        }
        if !description.bitmaps.is_empty() {
            line(human_bitmaps(&description.bitmaps));
        }
        line(format!("    refcount bits: {}", header.refcount_bits));
        if encryption::is_encrypted(description) {
            line(encryption::human(description).trim_end().to_owned());
        }
        if header.version >= 3 {
            if let Some(name) = &header.data_file {
                line(format!("    data file: {}", printable(name)));
                line(format!("    data file raw: {}", header.data_file_is_raw()));
            }
            line(format!("    corrupt: {}", flags.corrupt));
            line(format!("    extended l2: {}", flags.extended_l2));
        }
    }
    if let Some(header) = &description.scratch {
        line(format!("Format specific information:\n    data file: {}", printable(&header.data_file)));
    }
    if !is_qemu_img() {
        if description.guessed && !description.format.has_tables() {
            line("format guessed: yes (say -f raw to be sure)".to_owned());
        }
        line(format!("engine: {}", description.engine));
    }
    text + &file.human()
}

fn bitmap_flags(bitmap: &Bitmap) -> Vec<&'static str> {
    let flags = [(bitmap.in_use, "in-use"), (bitmap.enabled, "auto")];
    flags.into_iter().filter(|(is_set, _)| *is_set).map(|(_, name)| name).collect()
}

fn human_bitmaps(bitmaps: &[Bitmap]) -> String {
    let mut text = "    bitmaps:".to_owned();
    for (index, bitmap) in bitmaps.iter().enumerate() {
        let _ = write!(text, "\n        [{index}]:\n            flags:");
        for (index, flag) in bitmap_flags(bitmap).into_iter().enumerate() {
            let _ = write!(text, "\n                [{index}]: {flag}");
        }
        let _ = write!(
            text,
            "\n            name: {}\n            granularity: {}",
            printable(&bitmap.name),
            bitmap.granularity_bytes()
        );
    }
    text
}

/// Returns the JSON of a layer. The keys are qemu-img's, except those under "ringdisk".
fn machine(layer: &Layer) -> Value {
    let Layer { shown, description, disk_bytes, file, .. } = layer;
    let mut value = json!({
        "filename": shown,
        "format": description.format.to_string(),
        "virtual-size": description.virtual_size_bytes,
        "actual-size": disk_bytes.unwrap_or_default(),
        "dirty-flag": description.qcow2.as_ref().is_some_and(|header| Flags::of(header).dirty),
        "children": file.machine(),
    });
    if !is_qemu_img() {
        value["ringdisk"] = json!({
            "engine": description.engine,
            "format-guessed": description.guessed,
        });
    }
    if !description.snapshots.is_empty() {
        value["snapshots"] = description.snapshots.iter().map(snapshot).collect();
    }
    if let Some(header) = &description.qcow2 {
        value["cluster-size"] = json!(1u64 << header.cluster_bits);
        value["format-specific"] = json!({ "type": "qcow2", "data": qcow2_data(header) });
        if let Some(encrypt) = encryption::machine(description) {
            value["encrypted"] = json!(true);
            value["format-specific"]["data"]["encrypt"] = encrypt;
        }
        if !description.bitmaps.is_empty() {
            let bitmap = |bitmap: &Bitmap| json!({ "name": bitmap.name, "granularity": bitmap.granularity_bytes(), "flags": bitmap_flags(bitmap) });
            value["format-specific"]["data"]["bitmaps"] = description.bitmaps.iter().map(bitmap).collect();
        }
    }
    if let (Some(name), Some(full)) = (&description.backing_file, backing_path(layer)) {
        value["backing-filename"] = json!(with_bytes_shown(name));
        value["full-backing-filename"] = json!(with_bytes_shown(&full));
    }
    if let Some(format) = &description.backing_format {
        value["backing-filename-format"] = json!(format);
    }
    value
}

fn snapshot(snapshot: &image::Snapshot) -> Value {
    const SECOND: u64 = 1_000_000_000;
    let mut value = json!({
        "id": snapshot.id,
        "name": snapshot.name,
        "vm-state-size": snapshot.vm_state_bytes,
        "date-sec": snapshot.date_seconds,
        "date-nsec": snapshot.date_nanoseconds,
        "vm-clock-sec": snapshot.vm_clock_nanoseconds / SECOND,
        "vm-clock-nsec": snapshot.vm_clock_nanoseconds % SECOND,
    });
    if let Some(icount) = snapshot.icount {
        value["icount"] = json!(icount);
    }
    value
}

fn qcow2_data(header: &Header) -> Value {
    let mut data = json!({
        "compat": compat(header),
        "compression-type": compression(header),
        "refcount-bits": header.refcount_bits,
    });
    if header.version >= 3 {
        let flags = Flags::of(header);
        data["lazy-refcounts"] = json!(flags.lazy_refcounts);
        if let Some(name) = &header.data_file {
            data["data-file"] = json!(with_bytes_shown(name));
            data["data-file-raw"] = json!(header.data_file_is_raw());
        }
        data["corrupt"] = json!(flags.corrupt);
        data["extended-l2"] = json!(flags.extended_l2);
    }
    data
}
