//! `ringdisk img-compat`: what differs from qemu-img.

use crate::compat::{Difference, FLAGS, VERSION, difference};
use crate::output;
use std::fmt::Write as _;

/// List the flags of qemu-img that are not the same here. Called by the name qemu-img (a link will do), this program is
/// that one, but for these.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// List every flag.
    #[arg(long)]
    all: bool,
    /// How to print.
    #[arg(long, value_enum, default_value = "human")]
    output: Output,
}

const BESIDE_FLAGS: &str = "
Beside the flags:
  a backing file outside of its image's directory is opened only with --allow-backing any, or RINGDISK_ALLOW_BACKING=any in
  the environment; --image-opts and json: know driver, file.driver and file.filename; protocols other than file: and
  host_device: are refused. A backing file that is named with one of these is recorded without it. snapshot -a marks enabled
  bitmaps wholly, where qemu-img refuses. convert -l copies a snapshot whole that is larger than the
  disk is now, where qemu-img cuts it off. commit and rebase refuse an overlay whose internal snapshots would show something
  else afterwards, unless --change-snapshots is given.
";

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Output {
    Human,
    Json,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let flags = FLAGS.iter().flat_map(|verb| verb.flags.iter().map(move |flag| (verb.name, flag.name)));
    let rows = flags.map(|(verb, flag)| (verb, flag, difference(verb, flag)));
    let rows: Vec<_> = rows.filter(|(.., other)| args.all || other.is_some()).collect();
    let mut text = String::new();
    match args.output {
        Output::Human if rows.is_empty() => text.push_str("Every flag is as in qemu-img.\n"),
        Output::Human => {
            for (verb, flag, other) in rows {
                let _ = writeln!(text, "{verb:<9} {flag:<20} {}", other.map_or("identical", |other| other.why));
            }
            text.push_str(BESIDE_FLAGS);
            let _ = writeln!(text, "\nThe flags are those that the --help of qemu-img {VERSION} shows.");
        }
        Output::Json => {
            let row = |(verb, flag, other): (&str, &str, Option<&Difference>)| {
                serde_json::json!({
                    "verb": verb,
                    "flag": flag,
                    "identical": other.is_none(),
                    "difference": other.map(|other| other.why),
                })
            };
            let values: Vec<_> = rows.into_iter().map(row).collect();
            text = format!("{}\n", serde_json::to_string_pretty(&values)?);
        }
    }
    output::print(&text)
}
