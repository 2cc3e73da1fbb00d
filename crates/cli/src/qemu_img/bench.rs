//! `qemu-img bench`: a fixed number of requests, timed. `ringdisk bench` is a different, larger command.

use crate::arguments::integer;
use crate::images::{image_name, opener};
use crate::output::{self, ProgressArgs, Watch};
use crate::threads::Reactors;
use anyhow::{anyhow, bail};
use block::Disk;
use drive::parse_size;
use engine::EngineKind;
use image::ImageOptions;
use load::RequestBench;
use std::path::PathBuf;
use std::sync::Arc;

/// The largest int of C.
const INT_MAX: u64 = i32::MAX as u64;

/// Send a number of requests to an image and show how long they took.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Number of requests.
    #[arg(short, long, value_name = "COUNT", default_value_t = 75000, value_parser = integer::<u64>(0..=INT_MAX))]
    count: u64,
    /// Requests in flight at once.
    #[arg(short, long, value_name = "DEPTH", default_value_t = 64, value_parser = integer::<u32>(1..=INT_MAX))]
    depth: u32,
    /// Format of the image; by default guessed from its contents.
    #[arg(short, long, value_name = "FORMAT")]
    format: Option<String>,
    /// Flush after this many writes.
    #[arg(long, value_name = "COUNT", default_value_t = 0, value_parser = integer::<u64>(0..=INT_MAX))]
    flush_interval: u64,
    /// How bytes reach the storage: threads, native, io_uring.
    #[arg(short = 'i', long, value_name = "AIO")]
    aio: Option<String>,
    /// Native AIO.
    #[arg(short = 'n', long)]
    native: bool,
    /// Do not wait for the writes before a flush.
    #[arg(long)]
    no_drain: bool,
    /// Offset of the first request.
    #[arg(short, long, value_name = "OFFSET", default_value = "0")]
    offset: String,
    /// The byte to write.
    #[arg(long, value_name = "BYTE", default_value_t = 0, value_parser = integer::<u8>(0..=255))]
    pattern: u8,
    /// Bytes of a request.
    #[arg(short = 's', long = "buffer-size", value_name = "SIZE", default_value = "4096")]
    size: String,
    /// Distance from one request to the next; 0 (default) is the size of a request.
    #[arg(short = 'S', long = "step-size", value_name = "SIZE")]
    step: Option<String>,
    /// Cache mode: writeback, none, writethrough, directsync, unsafe.
    #[arg(short = 't', long, value_name = "CACHE", default_value = "writeback")]
    cache: String,
    /// Write instead of reading.
    #[arg(short, long)]
    write: bool,
    /// Read even if another process writes the image.
    #[arg(short = 'U', long)]
    force_share: bool,
    /// FILE is a description of an image: driver=FORMAT,file.filename=FILE.
    #[arg(long)]
    image_opts: bool,
    #[command(flatten)]
    progress: ProgressArgs,
    /// The image.
    file: PathBuf,
}

impl Args {
    fn engine(&self) -> anyhow::Result<EngineKind> {
        Ok(match self.aio.as_deref() {
            None if self.native => EngineKind::LinuxAio,
            None => EngineKind::Auto,
            Some("threads") => EngineKind::Threads,
            Some("native") => EngineKind::LinuxAio,
            Some("io_uring") => EngineKind::IoUring,
            Some(other) => bail!("Invalid aio option: {other}"),
        })
    }

    fn requests(&self) -> anyhow::Result<RequestBench> {
        if !self.write && self.flush_interval > 0 {
            bail!("--flush-interval is only available in write tests");
        }
        if self.flush_interval > 0 && self.flush_interval < u64::from(self.depth) {
            bail!("Flush interval can't be smaller than depth");
        }
        let size = parse_size(&self.size)?;
        let step = self.step.as_deref().map_or(Ok(0), parse_size)?;
        let mut bench = RequestBench::default();
        bench.count = self.count;
        bench.depth = self.depth as usize;
        bench.offset = parse_size(&self.offset)?;
        bench.size_bytes = usize::try_from(size).map_err(|_| anyhow!("Invalid buffer size specified"))?;
        bench.step_bytes = if step == 0 { size } else { step };
        bench.write = self.write;
        bench.pattern = self.pattern;
        bench.flush_interval = self.flush_interval;
        bench.drain = !self.no_drain;
        Ok(bench)
    }
}

/// Printed with -q, too, as in qemu-img.
fn announce(requests: &RequestBench) -> anyhow::Result<()> {
    let RequestBench { count, depth, offset, size_bytes, step_bytes, .. } = requests;
    let kind = if requests.write { "write" } else { "read" };
    output::print(&format!(
        "Sending {count} {kind} requests, {size_bytes} bytes each, {depth} in parallel (starting at offset {offset}, \
         step size {step_bytes})\n"
    ))?;
    match requests.flush_interval {
        0 => Ok(()),
        interval => output::print(&format!("Sending flush every {interval} requests\n")),
    }
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let requests = args.requests()?;
    let (file, format) = image_name(&args.file, args.format.as_deref(), args.image_opts)?.whole()?;
    if args.write && args.force_share {
        bail!("-U (no locks) and -w (writing) cannot go together: another program may be using the image");
    }
    let options = ImageOptions::new(file).with(|options| {
        options.format = format;
        options.read_only = !args.write;
    });
    let opener = opener(&args.cache)?.with_engine(args.engine()?);
    let opener = if args.force_share { opener.without_locks() } else { opener };
    let image = Arc::new(image::open(&options, &opener)?);
    let disk: Arc<dyn Disk> = Arc::clone(&image) as _;
    announce(&requests)?;
    let reactors = Reactors::start_some("bench", 1)?;
    let mut watch = Watch::start(&args.progress)?;
    let done = match reactors.handles().first() {
        Some(reactor) => watch.run(|control| load::request_bench(&disk, &requests, reactor, control.cancel)),
        None => bail!("no thread was started"),
    };
    reactors.stop()?;
    // Close it also after an error: an image that is not closed has inconsistent bitmaps.
    let closed = image.close();
    let took = done?;
    closed?;
    output::print(&format!("Run completed in {:.3} seconds.\n", took.as_secs_f64()))
}
