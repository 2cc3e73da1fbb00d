//! The fuzzers without libFuzzer: random inputs from a seed, for a number of seconds, on any toolchain.
//!
//! `fuzz TARGET SECONDS [SEED]` runs one target, `fuzz all SECONDS [SEED]` each, and as many at once as there are
//! processors. `fuzz TARGET FILE...` runs inputs again.

use ringdisk_fuzz::Target;
use std::num::NonZero;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use testkit::Dice;

/// The longest input.
const INPUT_BYTES_MAX: u64 = 512;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let (Some(name), Some(second)) = (words.first(), words.get(1)) else {
        eprintln!("usage: fuzz TARGET|all SECONDS [SEED], or fuzz TARGET FILE...");
        std::process::exit(2);
    };
    let targets: Vec<Target> =
        if *name == "all" { Target::ALL.to_vec() } else { Target::of_name(name).into_iter().collect() };
    assert!(!targets.is_empty(), "there is no target '{name}'");
    match second.parse() {
        Ok(seconds) => {
            let seed = words.get(2).and_then(|seed| seed.parse().ok()).unwrap_or_else(|| u64::from(std::process::id()));
            if *name != "all" {
                targets.into_iter().for_each(|target| random(target, Duration::from_secs(seconds), seed));
            } else if !each(second, &seed.to_string()) {
                std::process::exit(1);
            }
        }
        Err(_) => {
            for file in words.iter().skip(1) {
                let input = std::fs::read(Path::new(file)).expect("the input can be read");
                targets.iter().for_each(|target| target.run(&input));
            }
        }
    }
}

/// Runs each target in a process of its own. Returns whether all have passed.
fn each(seconds: &str, seed: &str) -> bool {
    let program = std::env::current_exe().expect("this program has a path");
    let (next, has_failed) = (AtomicUsize::new(0), AtomicBool::new(false));
    let run = || {
        while let Some(target) = Target::ALL.get(next.fetch_add(1, Ordering::Relaxed)) {
            let status = Command::new(&program).args([target.name(), seconds, seed]).status();
            let status = status.expect("this program can be run again");
            if !status.success() {
                println!("fuzz {}: {status}", target.name());
                has_failed.store(true, Ordering::Relaxed);
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, NonZero::get) {
            scope.spawn(run);
        }
    });
    !has_failed.into_inner()
}

fn random(target: Target, time: Duration, seed: u64) {
    let start = Instant::now();
    let mut inputs = 0u64;
    while start.elapsed() < time {
        let input = input(seed, inputs);
        if std::panic::catch_unwind(|| target.run(&input)).is_err() {
            let path = format!("crash-{}-{seed}-{inputs}", target.name());
            std::fs::write(&path, &input).expect("the input can be kept");
            println!("test fuzz::{} ... FAILED: the input is in {path}", target.name());
            std::process::exit(1);
        }
        inputs += 1;
    }
    println!("fuzz {}: {inputs} inputs in {} s, seed {seed}", target.name(), time.as_secs());
}

fn input(seed: u64, number: u64) -> Vec<u8> {
    let mut dice = Dice::new(testkit::mix(seed, number));
    let mut input = vec![0; 16 + dice.below(INPUT_BYTES_MAX) as usize];
    testkit::fill_seeded(dice.seed(), &mut input);
    input
}
