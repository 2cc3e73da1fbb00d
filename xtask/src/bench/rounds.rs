//! What benchmarks of a few loads on a few sides have in common: which loads, in which order, and where the page goes.

use super::BenchArguments;
use super::page::hardware;
use super::results::Stamp;
use crate::workspace;
use anyhow::{Context, Result, ensure};

/// The loads whose names were asked for, all if none was; nothing if they are only to be listed, which is done then.
pub(super) fn chosen<'a, L>(
    loads: &'a [L],
    name: impl Fn(&L) -> &str,
    arguments: &BenchArguments,
) -> Result<Option<Vec<&'a L>>> {
    let is_chosen = |load: &&L| {
        arguments.filter.is_empty() || arguments.filter.iter().any(|text| name(load).contains(text.as_str()))
    };
    let chosen: Vec<&L> = loads.iter().filter(is_chosen).collect();
    let all = || loads.iter().map(&name).collect::<Vec<_>>().join("; ");
    ensure!(!chosen.is_empty(), "no load has such a name: {}", all());
    if arguments.list {
        chosen.iter().for_each(|load| println!("{}", name(load)));
        return Ok(None);
    }
    Ok(Some(chosen))
}

/// Measures each side in each round: in turn, each first, so that no side has the better place.
pub(super) fn in_turn(rounds: usize, sides: usize, mut measure: impl FnMut(usize) -> Result<()>) -> Result<()> {
    for round in 0..rounds {
        for place in 0..sides {
            measure((place + round) % sides)?;
        }
    }
    Ok(())
}

/// Writes a page of the documents, or where `--output` says, with the machine and the commit below its title. What only
/// some loads were measured for is printed.
pub(super) fn put_page(text: &str, page: &str, arguments: &BenchArguments) -> Result<()> {
    let output = match (&arguments.output, arguments.filter.is_empty()) {
        (Some(path), _) => path.clone(),
        (None, true) => workspace::root().join("docs").join(page),
        (None, false) => {
            println!("\n{text}");
            return Ok(());
        }
    };
    std::fs::write(&output, with_place(text, arguments))
        .with_context(|| format!("cannot write {}", output.display()))?;
    println!("written: {}", output.display());
    Ok(())
}

/// Puts below a page's title what was measured, and on which machine.
fn with_place(text: &str, arguments: &BenchArguments) -> String {
    let (title, rest) = text.split_once('\n').unwrap_or((text, ""));
    format!("{title}\n\n* {}\n* Ringdisk at {}\n{rest}", hardware(), Stamp::of(arguments).commit)
}
