//! Command lines out of a seed, two programs that carry them out, and a judge.

mod fixtures;
mod grammar;
mod judge;
mod known;
mod places;
mod purposes;
mod world;

pub(crate) use fixtures::Fixtures;
pub(crate) use grammar::Family;
pub(crate) use known::Known;
pub(crate) use purposes::purposes;
pub(crate) use world::World;

use grammar::script;
use judge::judge;
use purposes::is_on_purpose;
use std::fmt;

/// What differs after one line.
pub(crate) struct Finding {
    /// The words of the command line.
    line: Vec<String>,
    kind: Kind,
    ours: String,
    theirs: String,
}

/// What of the two programs differs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// The exit code.
    Code,
    /// Standard output.
    Output,
    /// Words of the other program's error are missing in ours.
    Words,
    /// The names of the files that are left.
    Names,
    /// The length of a file.
    Length,
    /// What a guest reads, what is allocated, what `check` or `info` say of a file.
    Image,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let indented = |text: &str| text.trim_end().replace('\n', "\n          ");
        let (ours, theirs) = (indented(&self.ours), indented(&self.theirs));
        let (line, entry) = (self.line.join(" "), known::entry(self));
        write!(f, "{:?}: {line}\n  ours:   {ours}\n  theirs: {theirs}\n  entry:  {entry}", self.kind)
    }
}

/// Carries a seed's script out in both worlds; returns what differs without a reason. A script ends where the worlds part.
pub(crate) fn play(world: &World, fixtures: &Fixtures, known: &Known, family: Family, seed: u64) -> Vec<Finding> {
    world.fill(fixtures);
    let mut found = Vec::new();
    for line in script(family, seed) {
        let done = world.run(&line);
        let mut findings = judge(world, &line, &done);
        let parted = findings.iter().any(|finding| !matches!(finding.kind, Kind::Output | Kind::Words));
        findings.retain(|finding| !is_on_purpose(finding, &done) && !known.has(finding));
        found.extend(findings);
        if parted {
            break;
        }
    }
    found
}
