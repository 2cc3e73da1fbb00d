//! Seeded schedules that rarely interrupt a thread. To show a fault, two or three interruptions in the right places are
//! needed, not thousands anywhere. A thread that waits for storage is sometimes suspended for long, as with a slow
//! disk.

use crate::dice::{Dice, mix};
use shuttle::scheduler::{Schedule, Scheduler, Task, TaskId};
use shuttle::{Config, Runner};
use std::sync::{Arc, Mutex};

/// The first error, noted without a panic: threads of an execution share the locks of this process.
#[derive(Clone, Default)]
pub struct Verdict(Arc<Mutex<Option<String>>>);

impl Verdict {
    /// Notes an error, if it is the first.
    pub fn fail(&self, what: String) {
        self.0.lock().unwrap().get_or_insert(what);
    }

    /// Returns the first error.
    #[must_use]
    pub fn get(&self) -> Option<String> {
        self.0.lock().unwrap().clone()
    }
}

/// The longest time of a slow operation, in steps.
const LONG_STEPS: u64 = 4000;

/// How often threads are interrupted, in ten thousand steps. For executions of thousands of steps.
pub const LONG: &[u64] = &[5, 20, 100, 500];
/// As [`LONG`], for executions of tens of steps.
pub const SHORT: &[u64] = &[500, 1500, 3000];

struct Seldom {
    seed: u64,
    executions: u64,
    limit: u64,
    dice: Dice,
    /// Interruptions in ten thousand steps. Each execution takes one of these values.
    interruptions: &'static [u64],
    chance: u64,
    step: u64,
    /// The thread that waits for a slow disk, and the step until which it waits.
    waiting: Option<(TaskId, u64)>,
    verdict: Verdict,
}

impl Scheduler for Seldom {
    fn new_execution(&mut self) -> Option<Schedule> {
        if self.executions == self.limit || self.verdict.get().is_some() {
            return None;
        }
        self.dice = Dice::new(mix(self.seed, self.executions));
        self.chance = self.interruptions[self.dice.index(self.interruptions.len())];
        self.step = 0;
        self.waiting = None;
        self.executions += 1;
        Some(Schedule::new(self.seed))
    }

    fn next_task(&mut self, runnable: &[&Task], current: Option<TaskId>, is_yielding: bool) -> Option<TaskId> {
        self.step += 1;
        self.waiting = self.waiting.filter(|(_, until)| *until > self.step);
        if is_yielding && self.waiting.is_none() && self.dice.chance(8) {
            self.waiting = current.map(|current| (current, self.step + 1 + self.dice.below(LONG_STEPS)));
        }
        let mut awake: Vec<TaskId> = runnable.iter().map(|task| task.id()).collect();
        if awake.len() > 1 {
            awake.retain(|task| self.waiting.is_none_or(|(waiting, _)| waiting != *task));
        }
        let chance = if is_yielding { 3000 } else { self.chance };
        match current.filter(|current| awake.contains(current)) {
            Some(current) if self.dice.below(10_000) >= chance => Some(current),
            _ => Some(awake[self.dice.index(awake.len())]),
        }
    }

    fn next_u64(&mut self) -> u64 {
        self.dice.seed()
    }
}

/// Returns the first seed: `RINGDISK_SEED`, or 1.
///
/// # Panics
/// If it is not a number.
#[must_use]
pub fn seed() -> u64 {
    std::env::var("RINGDISK_SEED").map_or(1, |text| text.parse().unwrap())
}

/// Returns how many schedules a test explores: `RINGDISK_SCHEDULES`, or the number given.
///
/// # Panics
/// If it is not a number.
#[must_use]
pub fn schedules(by_default: u64) -> u64 {
    std::env::var("RINGDISK_SCHEDULES").map_or(by_default, |text| text.parse().unwrap())
}

/// Runs `execution` through `limit` schedules, or until one fails. Each execution gets its own seed.
pub fn explore(
    seed: u64,
    limit: u64,
    interruptions: &'static [u64],
    execution: impl Fn(u64, &Verdict) + Send + Sync + 'static,
) -> Result<(), String> {
    let verdict = Verdict::default();
    let scheduler = Seldom {
        seed,
        executions: 0,
        limit,
        dice: Dice::new(seed),
        interruptions,
        chance: 0,
        step: 0,
        waiting: None,
        verdict: verdict.clone(),
    };
    let mut config = Config::new();
    config.silence_warnings = true;
    config.stack_size = 256 << 10;
    let theirs = verdict.clone();
    let count = Runner::new(scheduler, config)
        .run(move || execution(shuttle::rand::RngCore::next_u64(&mut shuttle::rand::thread_rng()), &theirs));
    match verdict.get() {
        None => Ok(()),
        Some(wrong) => Err(format!("schedule {count} of seed {seed}: {wrong}")),
    }
}
