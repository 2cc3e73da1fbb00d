//! `ringdisk check`: whether an image's tables agree, with qemu-img's counts, output and exit codes.

use crate::images::{image_name, name_force_share, opener};
use crate::output::{self, ProgressArgs, Watch};
use anyhow::bail;
use block::ErrorKind;
use drive::ImageName;
use image::{CheckReport, Format, Opener, Repair, Role};
use serde_json::{Map, Value};
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::PathBuf;

/// Check that an image's tables agree, and repair them with -r.
///
/// Changes nothing without -r. Exit codes: 0 good, 1 not checked, 2 damaged, 3 leaks only, 63 the format has nothing to
/// check.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Format of the image; by default guessed from its contents.
    #[arg(short, long, value_name = "FORMAT")]
    format: Option<String>,
    /// How to print.
    #[arg(long, value_enum, default_value = "human")]
    output: Output,
    /// Repair: leaks (free unused clusters) or all. The image is never worse than before, even if the power fails.
    #[arg(short, long, value_name = "WHAT")]
    repair: Option<String>,
    /// Check even if another process writes the image; the result may be out of date.
    #[arg(short = 'U', long)]
    force_share: bool,
    /// Cache mode for reading: writeback, none, writethrough, directsync, unsafe.
    #[arg(short = 'T', long = "cache", value_name = "CACHE", default_value = "writeback")]
    source_cache: String,
    /// FILE is a description of an image: driver=FORMAT,file.filename=FILE.
    #[arg(long)]
    image_opts: bool,
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

const NOT_CHECKED: i32 = 1;
const DAMAGED: i32 = 2;
const LEAKS: i32 = 3;
const NOTHING_TO_CHECK: i32 = 63;

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let repair = match args.repair.as_deref() {
        None => None,
        Some("leaks") => Some(Repair::Leaks),
        Some("all") => Some(Repair::All),
        Some(other) => bail!("check: -r is leaks or all, not '{other}'"),
    };
    if repair.is_some() && args.force_share {
        bail!("check: -U and -r contradict each other: what is repaired must be nobody else's");
    }
    let ImageName { file: name, format, .. } = image_name(&args.file, args.format.as_deref(), args.image_opts)?;
    let opener = opener(&args.source_cache)?;
    let opener = if args.force_share { opener.without_locks() } else { opener };
    let file = match repair {
        Some(_) => opener.open(&name, Role::Writable)?,
        None => opener.open(&name, Role::ReadOnly).map_err(name_force_share)?,
    };
    let name = name.to_string();
    let mut finding = |text: &str| {
        if !args.progress.quiet {
            // A check goes on, and so does a repair, though nobody reads what it finds.
            let _ = writeln!(std::io::stderr(), "{text}");
        }
    };
    let mut watch = Watch::start(&args.progress)?;
    let mut checked = watch.run(|control| jobs::check(&name, &file, format, repair, control, &mut finding));
    if let Ok(CheckReport { leaks_fixed, corruptions_fixed, .. }) = checked
        && (leaks_fixed, corruptions_fixed) != (0, 0)
    {
        if args.output == Output::Human && !args.progress.quiet {
            output::print(&format!(
                "The following inconsistencies were found and repaired:\n\n    {leaks_fixed} leaked clusters\n    \
                 {corruptions_fixed} corruptions\n\nDouble checking the fixed image now...\n"
            ))?;
        }
        let again = watch.run(|control| jobs::check(&name, &file, format, None, control, &mut finding));
        checked = again.map(|report| CheckReport { leaks_fixed, corruptions_fixed, ..report });
    }
    drop(file);
    let report = match checked {
        Ok(report) => report,
        Err(error) if error.kind() == ErrorKind::Unsupported && !format.is_some_and(Format::can_be_checked) => {
            output::error(&error.into());
            output::exit(NOTHING_TO_CHECK)
        }
        Err(error) => return Err(error.into()),
    };
    match args.output {
        _ if args.progress.quiet => {}
        Output::Human => output::print(&human(&report))?,
        Output::Json => output::print(&format!("{}\n", serde_json::to_string_pretty(&machine(args, &report))?))?,
    }
    match report {
        CheckReport { check_errors: 1.., .. } => output::exit(NOT_CHECKED),
        CheckReport { corruptions: 1.., .. } => output::exit(DAMAGED),
        CheckReport { leaks: 1.., .. } => output::exit(LEAKS),
        _ => Ok(()),
    }
}

fn human(report: &CheckReport) -> String {
    let CheckReport { corruptions, leaks, check_errors, .. } = report;
    let mut text = String::new();
    if (*corruptions, *leaks, *check_errors) == (0, 0, 0) {
        text.push_str("No errors were found on the image.\n");
    }
    if *corruptions > 0 {
        let _ = write!(
            text,
            "\n{corruptions} errors were found on the image.\n\
             Data may be corrupted, or further writes to the image may corrupt it.\n"
        );
    }
    if *leaks > 0 {
        let _ = write!(
            text,
            "\n{leaks} leaked clusters were found on the image.\n\
             This means waste of disk space, but no harm to data.\n"
        );
    }
    if *check_errors > 0 {
        let _ = write!(text, "\n{check_errors} internal errors have occurred during the check.\n");
    }
    let CheckReport { total_clusters: total, allocated_clusters: allocated, .. } = *report;
    if total > 0 && allocated > 0 {
        let percent = |part: u64, whole: u64| part as f64 * 100.0 / whole as f64;
        let _ = writeln!(
            text,
            "{allocated}/{total} = {:.2}% allocated, {:.2}% fragmented, {:.2}% compressed clusters",
            percent(allocated, total),
            percent(report.fragmented_clusters, allocated),
            percent(report.compressed_clusters, allocated)
        );
    }
    if report.image_end_offset > 0 {
        let _ = writeln!(text, "Image end offset: {}", report.image_end_offset);
    }
    text
}

/// Returns the JSON. Zero counts are left out, except that of errors.
fn machine(args: &Args, report: &CheckReport) -> Value {
    let mut value = Map::new();
    value.insert("filename".to_owned(), image::shown(&args.file).into());
    value.insert("format".to_owned(), Format::Qcow2.to_string().into());
    value.insert("check-errors".to_owned(), report.check_errors.into());
    for (key, count) in [
        ("image-end-offset", report.image_end_offset),
        ("corruptions", report.corruptions),
        ("leaks", report.leaks),
        ("corruptions-fixed", report.corruptions_fixed),
        ("leaks-fixed", report.leaks_fixed),
        ("total-clusters", report.total_clusters),
        ("allocated-clusters", report.allocated_clusters),
        ("fragmented-clusters", report.fragmented_clusters),
        ("compressed-clusters", report.compressed_clusters),
    ] {
        if count > 0 {
            value.insert(key.to_owned(), count.into());
        }
    }
    Value::Object(value)
}
