//! `ringdisk map`: where data lie, as qemu-img shows it.

use crate::images::{OpenArgs, image_name};
use crate::output::{self, ProgressArgs, Watch, printable};
use anyhow::bail;
use drive::parse_size;
use image::Run;
use std::io::Write;
use std::ops::Range;
use std::path::PathBuf;

/// Show which parts of an image hold data, and in which file of its chain.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Format of the image; by default guessed from its contents.
    #[arg(short, long, value_name = "FORMAT")]
    format: Option<String>,
    /// How to print.
    #[arg(long, value_enum, default_value = "human")]
    output: Output,
    /// Show only the part from this offset on.
    #[arg(short = 's', long, value_name = "OFFSET")]
    start_offset: Option<String>,
    /// Show only this many bytes.
    #[arg(short = 'l', long, value_name = "LENGTH")]
    max_length: Option<String>,
    #[command(flatten)]
    open: OpenArgs,
    #[command(flatten)]
    progress: ProgressArgs,
    /// The image.
    file: PathBuf,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Output {
    Human,
    Json,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let start = args.start_offset.as_deref().map_or(Ok(0), parse_size)?;
    let length = args.max_length.as_deref().map_or(Ok(u64::MAX), parse_size)?;
    let window = start..start.saturating_add(length);
    let image = args.open.open(&args.file, args.format.as_deref(), &[])?;
    let part = image_name(&args.file, args.format.as_deref(), args.open.image_opts)?.part;
    let part_offset = part.map_or(0, |part| part.offset_bytes);
    let names: Vec<String> = image.said_file_names().map(|name| printable(&name.to_string())).collect();
    let mut watch = Watch::start(&args.progress)?;
    let mut out = std::io::BufWriter::new(std::io::stdout().lock());
    let failed = |error| block::Error::io("cannot write to standard output", error);
    let mut first = true;
    let mut hidden = false;
    if args.output == Output::Human {
        writeln!(out, "{:<16}{:<16}{:<16}File", "Offset", "Length", "Mapped to")?;
    }
    watch.run(|control| {
        jobs::map(&*image, control, |run| {
            let Some(mut run) = within(run, &window) else { return Ok(()) };
            // The offset in the whole file.
            run.offset = run.offset.map(|offset| offset.saturating_add(part_offset));
            let done = match args.output {
                Output::Json => {
                    let before = if std::mem::take(&mut first) { "[" } else { ",\n" };
                    write!(out, "{before}{}", machine(&run))
                }
                Output::Human if !run.takes_read() => Ok(()),
                // As in qemu-img, the output so far stays, and the command fails at the end.
                Output::Human if hidden || run.offset.is_none() => {
                    hidden = true;
                    Ok(())
                }
                Output::Human => {
                    let name = names.get(run.depth).map_or("", String::as_str);
                    let columns = [run.start, run.length_bytes, run.offset.unwrap_or(0)].map(hexadecimal);
                    writeln!(out, "{:<16}{:<16}{:<16}{name}", columns[0], columns[1], columns[2])
                }
            };
            done.map_err(failed)
        })
    })?;
    if args.output == Output::Json {
        let end = if first { format!("[{}]", machine(&nothing(window.start))) } else { "]".to_owned() };
        writeln!(out, "{end}")?;
    }
    out.flush()?;
    drop(out);
    if hidden {
        bail!("File contains external, encrypted or compressed clusters.");
    }
    output::print("")
}

/// Returns the run that qemu-img shows if there is nothing to show.
fn nothing(start: u64) -> Run {
    let (zero, data, compressed) = (false, false, false);
    Run { start, length_bytes: 0, depth: 0, present: false, zero, data, compressed, offset: None }
}

/// Returns the part of a run within the window.
fn within(run: Run, window: &Range<u64>) -> Option<Run> {
    let (start, end) = (run.start.max(window.start), run.end().min(window.end));
    let offset = run.offset.map(|offset| offset + start.saturating_sub(run.start));
    (start < end).then(|| Run { start, length_bytes: end - start, offset, ..run })
}

/// Formats a number as C's `%#x`: zero has no prefix.
fn hexadecimal(value: u64) -> String {
    if value == 0 { "0".to_owned() } else { format!("{value:#x}") }
}

fn machine(run: &Run) -> String {
    let offset = run.offset.map(|offset| format!(", \"offset\": {offset}")).unwrap_or_default();
    format!(
        "{{ \"start\": {}, \"length\": {}, \"depth\": {}, \"present\": {}, \"zero\": {}, \"data\": {}, \
         \"compressed\": {}{offset}}}",
        run.start, run.length_bytes, run.depth, run.present, run.zero, run.data, run.compressed
    )
}
