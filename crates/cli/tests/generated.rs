//! Generated command lines through both programs that are called qemu-img: the same exit codes, output and images, and in
//! what is said about errors the other one's key words. What differs on purpose is printed by `ringdisk img-compat`.
//!
//! Each seed is a script of a few lines over small images. `RINGDISK_SEEDS=n` widens a run, `RINGDISK_SEED=s` begins at
//! another seed: what differs names its own. What is known to differ, against nobody's wish, is in
//! `generated_lines/known.txt`.

mod common;
mod generated_lines;

use common::{has_tool, tool_ok};
use generated_lines::{Family, Fixtures, Known, World, play, purposes};

/// The version whose words, columns and key names are compared.
const VERSION: &str = "version 10.";
/// More findings than this tell no more.
const SHOWN_MAX: usize = 400;

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().and_then(|text| text.parse().ok())
}

fn agree(family: Family) {
    if !has_tool("qemu-img") || !has_tool("qemu-io") {
        return;
    }
    if !tool_ok("qemu-img", &["--version"]).contains(VERSION) {
        return testkit::skipped("this compares with qemu-img 10");
    }
    let dir = common::directory();
    let fixtures = Fixtures::make(&dir.path().join("fixtures"));
    let world = World::new(dir.path());
    let known = Known::read();
    let (first, count) = (number("RINGDISK_SEED").unwrap_or(1), number("RINGDISK_SEEDS").unwrap_or(50));
    let mut found = Vec::new();
    for seed in first..first + count {
        let findings = play(&world, &fixtures, &known, family, seed);
        found.extend(findings.into_iter().map(|finding| format!("seed {seed}: {finding}")));
    }
    let shown = found.iter().take(SHOWN_MAX).map(String::as_str).collect::<Vec<_>>().join("\n");
    assert!(found.is_empty(), "{} differences\n{shown}", found.len());
}

#[test]
fn generated_lines_that_look_agree() {
    agree(Family::Look);
}

#[test]
fn generated_lines_that_make_images_agree() {
    agree(Family::Make);
}

#[test]
fn generated_lines_that_copy_agree() {
    agree(Family::Copy);
}

#[test]
fn generated_lines_that_change_images_agree() {
    agree(Family::Change);
}

#[test]
fn each_difference_on_purpose_is_printed_with_its_reason() {
    let said = common::run_ok(&["img-compat", "--output=json"]);
    let rows: Vec<serde_json::Value> = serde_json::from_str(&said).unwrap();
    let printed: Vec<&str> = rows.iter().filter_map(|row| row["topic"].as_str()).collect();
    let human = common::run_ok(&["img-compat"]);
    for topic in purposes() {
        assert!(printed.contains(&topic), "{topic} is not printed");
    }
    for row in rows.iter().filter(|row| row["topic"].is_string()) {
        let why = row["difference"].as_str().expect("a reason");
        let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(words(&human).contains(&words(why)), "{why}");
    }
}
