//! `ringdisk compare`: whether two images hold the same data, in qemu-img's words and with its exit codes.

use crate::images::OpenArgs;
use crate::output::{self, ProgressArgs, Watch};
use crate::threads::Reactors;
use block::Disk;
use jobs::{Comparison, Difference, JobDisk, Stage};
use std::path::PathBuf;

/// Compare the contents of two images as guests see them.
///
/// Exit codes: 0 the same, 1 different, 2 cannot open, 3 cannot find out what is allocated, 4 cannot read.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Format of the first image; by default guessed from its contents.
    #[arg(short, long = "a-format", value_name = "FORMAT")]
    format: Option<String>,
    /// Format of the second image.
    #[arg(short = 'F', long = "b-format", value_name = "FORMAT")]
    second_format: Option<String>,
    /// Sizes and allocation have to be the same, too.
    #[arg(short, long)]
    strict: bool,
    #[command(flatten)]
    open: OpenArgs,
    #[command(flatten)]
    progress: ProgressArgs,
    /// The first image.
    first: PathBuf,
    /// The second image.
    second: PathBuf,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    match compare(args) {
        Ok(0) => Ok(()),
        Ok(code) => output::exit(code),
        Err((code, error)) => {
            output::error(&error);
            output::exit(code)
        }
    }
}

fn compare(args: &Args) -> Result<i32, (i32, anyhow::Error)> {
    let cannot_open = |error: anyhow::Error| (2, error);
    let listed = [args.first.clone(), args.second.clone()];
    let first = args.open.open(&args.first, args.format.as_deref(), &listed).map_err(cannot_open)?;
    let second = args.open.open(&args.second, args.second_format.as_deref(), &listed).map_err(cannot_open)?;
    let reactors = Reactors::start("compare").map_err(cannot_open)?;
    let mut watch = Watch::start(&args.progress).map_err(cannot_open)?;
    let [left, right] = [&first, &second].map(JobDisk::from);
    let compared = watch.run(|control| jobs::compare(&left, &right, args.strict, &reactors.handles(), control));
    reactors.stop().map_err(cannot_open)?;
    let found = match compared {
        Ok(found) => found,
        Err(failure) => {
            let code = match failure.stage {
                _ if watch.was_interrupted() => 2,
                Stage::Tables => 3,
                Stage::Data => 4,
            };
            return Err((code, failure.error.into()));
        }
    };
    let (text, code) = match found {
        Comparison::Same => ("Images are identical.\n".to_owned(), 0),
        Comparison::Different(Difference::Content(at)) => (format!("Content mismatch at offset {at}!\n"), 1),
        Comparison::Different(Difference::Size) => ("Strict mode: Image size mismatch!\n".to_owned(), 1),
        Comparison::Different(Difference::Allocation(at)) => {
            (format!("Strict mode: Offset {at} block status mismatch!\n"), 1)
        }
    };
    let (first_bytes, second_bytes) = (first.info().size_bytes, second.info().size_bytes);
    let is_behind = match found {
        Comparison::Same => true,
        Comparison::Different(Difference::Content(at)) => at >= first_bytes.min(second_bytes),
        Comparison::Different(_) => false,
    };
    let warning = if is_behind && first_bytes != second_bytes { "Warning: Image size mismatch!\n" } else { "" };
    if !args.progress.quiet {
        output::print(&format!("{warning}{text}")).map_err(cannot_open)?;
    }
    Ok(code)
}
