//! `ringdisk bitmap`: persistent dirty bitmaps, in qemu-img's words.

use crate::images::{files, image_name};
use crate::output::{ProgressArgs, Watch};
use anyhow::{Context, bail};
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Command};
use drive::{EngineOpener, parse_size};
use format_qcow2::BitmapAction;
use image::{Opener, Role, inspect};
use jobs::Progress;
use std::path::PathBuf;
use std::sync::atomic::Ordering;

/// Add, change and remove persistent dirty bitmaps of an image that nobody uses.
///
/// The given --add, --remove, --clear, --enable, --disable and --merge are carried out in their order. After an error,
/// or Ctrl-C, none of them is.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    actions: Actions,
    /// The image that --merge takes bitmaps from, if it is another one.
    #[arg(short = 'b', long, value_name = "FILE")]
    source_file: Option<PathBuf>,
    /// Format of that image.
    #[arg(short = 'F', long, value_name = "FORMAT")]
    source_format: Option<String>,
    /// For --add: bytes of the disk for each bit.
    #[arg(short = 'g', long, value_name = "SIZE")]
    granularity: Option<String>,
    /// Format of the image; by default guessed from its contents.
    #[arg(short, long, value_name = "FORMAT")]
    format: Option<String>,
    /// FILE is a description of an image: driver=FORMAT,file.filename=FILE.
    #[arg(long)]
    image_opts: bool,
    #[command(flatten)]
    progress: ProgressArgs,
    /// The image.
    file: PathBuf,
    /// The bitmap.
    bitmap: String,
}

#[derive(Clone, PartialEq, Eq)]
enum Word {
    Add,
    Remove,
    Clear,
    Enable,
    Disable,
    Merge(String),
}

/// The actions, in the order of the command line.
#[derive(Clone)]
struct Actions(Vec<Word>);

const WORDS: [(&str, Word, &str); 5] = [
    ("add", Word::Add, "Make the bitmap, enabled and empty"),
    ("remove", Word::Remove, "Remove the bitmap"),
    ("clear", Word::Clear, "Clear all bits"),
    ("enable", Word::Enable, "Note writes from now on"),
    ("disable", Word::Disable, "Do not note writes any more"),
];
const MERGE: &str = "merge";

impl clap::Args for Actions {
    fn augment_args(command: Command) -> Command {
        let flag = |name: &'static str, help: &'static str| Arg::new(name).long(name).help(help);
        let flags = WORDS.iter().map(|(name, _, help)| flag(name, help).action(ArgAction::SetTrue));
        let merge = flag(MERGE, "Add the bits of the bitmap SOURCE").value_name("SOURCE").action(ArgAction::Append);
        command.args(flags).arg(merge)
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl clap::FromArgMatches for Actions {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let mut found: Vec<(usize, Word)> = Vec::new();
        for (name, word, _) in &WORDS {
            if matches.value_source(name) == Some(ValueSource::CommandLine) {
                found.extend(matches.indices_of(name).into_iter().flatten().map(|index| (index, word.clone())));
            }
        }
        let sources = matches.get_many::<String>(MERGE).into_iter().flatten();
        let indices = matches.indices_of(MERGE).into_iter().flatten();
        found.extend(indices.zip(sources).map(|(index, source)| (index, Word::Merge(source.clone()))));
        found.sort_by_key(|(index, _)| *index);
        Ok(Self(found.into_iter().map(|(_, word)| word).collect()))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl Args {
    fn check(&self) -> anyhow::Result<()> {
        let words = &self.actions.0;
        if words.is_empty() {
            bail!("Need at least one of --add, --remove, --clear, --enable, --disable, or --merge");
        }
        if self.granularity.is_some() && !words.contains(&Word::Add) {
            bail!("granularity only supported with --add");
        }
        if self.source_file.is_some() && !words.iter().any(|word| matches!(word, Word::Merge(_))) {
            bail!("Merge bitmap source file only supported with --merge");
        }
        if self.source_format.is_some() && self.source_file.is_none() {
            bail!("-F only supported with -b");
        }
        Ok(())
    }

    fn action(&self, word: &Word, opener: &EngineOpener) -> anyhow::Result<BitmapAction> {
        Ok(match word {
            Word::Add => {
                let granularity_bytes = self.granularity.as_deref().map(parse_size).transpose();
                BitmapAction::Add { granularity_bytes: granularity_bytes.context("Invalid granularity specified")? }
            }
            Word::Remove => BitmapAction::Remove,
            Word::Clear => BitmapAction::Clear,
            Word::Enable => BitmapAction::Enable,
            Word::Disable => BitmapAction::Disable,
            Word::Merge(source) => match &self.source_file {
                None => BitmapAction::MergeOwn(source.clone()),
                Some(path) => {
                    let (name, format) = image_name(path, self.source_format.as_deref(), false)?.whole()?;
                    let file = opener.open(&name, Role::ReadOnly)?;
                    let format = inspect(name, &file, format)?.format;
                    let failed = || format!("Operation merge on bitmap {} failed", self.bitmap);
                    BitmapAction::Merge(image::read_bitmap(&file, format, source).with_context(failed)?)
                }
            },
        })
    }
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    args.check()?;
    let (name, format) = image_name(&args.file, args.format.as_deref(), args.image_opts)?.whole()?;
    let opener = files();
    let file = opener.open(&name, Role::Writable)?;
    let format = inspect(name, &file, format)?.format;
    let action = |word| Ok((args.bitmap.clone(), args.action(word, &opener)?));
    let actions: Vec<(String, BitmapAction)> = args.actions.0.iter().map(action).collect::<anyhow::Result<_>>()?;
    let mut watch = Watch::start(&args.progress)?;
    let done = watch.run(|control| {
        let mut total = 0;
        image::edit_bitmaps(&file, format, &actions, &mut |done_bytes, total_bytes| {
            total = total_bytes;
            (control.progress)(Progress { done_bytes: done_bytes.min(total_bytes), total_bytes });
            !control.cancel.load(Ordering::Relaxed)
        })?;
        (control.progress)(Progress { done_bytes: total, total_bytes: total });
        Ok::<_, block::Error>(())
    });
    done.map_err(|error| match watch.was_interrupted() {
        true => anyhow::Error::from(error).context("the bitmaps are as they were"),
        false => error.into(),
    })
}
