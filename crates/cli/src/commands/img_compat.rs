//! `ringdisk img-compat`: the differences from qemu-img.

use crate::compat::{Difference, FLAGS, ON_PURPOSE, Purpose, VERSION, difference};
use crate::output;
use std::fmt::Write as _;

/// List the flags of qemu-img that differ here.
///
/// Called by the name qemu-img (a link will do), this program works as qemu-img, except for these differences.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// List every flag.
    #[arg(long)]
    all: bool,
    /// How to print.
    #[arg(long, value_enum, default_value = "human")]
    output: Output,
}

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
        Output::Human => {
            for (verb, flag, other) in rows {
                let _ = writeln!(text, "{verb:<9} {flag:<20} {}", other.map_or("identical", |other| other.why));
            }
            text.push_str("\nBeside the flags:\n");
            for purpose in ON_PURPOSE {
                let _ = writeln!(text, "{}", paragraph(purpose.why));
            }
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
            let beside = |purpose: &Purpose| {
                serde_json::json!({
                    "verb": null,
                    "flag": null,
                    "topic": purpose.topic,
                    "identical": false,
                    "difference": purpose.why,
                })
            };
            let values: Vec<_> = rows.into_iter().map(row).chain(ON_PURPOSE.iter().map(beside)).collect();
            text = format!("{}\n", serde_json::to_string_pretty(&values)?);
        }
    }
    output::print(&text)
}

/// Formats an item of a list, in lines that fit a terminal.
fn paragraph(why: &str) -> String {
    const WIDTH: usize = 100;
    let (mut text, mut length) = ("  *".to_owned(), 3);
    for word in why.split_whitespace() {
        if length + 1 + word.len() > WIDTH {
            text.push_str("\n   ");
            length = 3;
        }
        text.push(' ');
        text.push_str(word);
        length += 1 + word.len();
    }
    text
}
