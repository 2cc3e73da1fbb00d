//! The load generator: drives any disk with a workload, measures it, and checks what it reads.
//!
//! [`run`] opens one queue on each reactor given and keeps it at the asked depth; [`fill_and_verify`] writes a range,
//! flushes, and reads it all back. Both wait on the caller's thread, tell progress there, and can be cancelled.
//! [`compare`] sums up runs of several targets; [`Plot`] draws them over depth.

mod compare;
mod cpu;
mod fill;
mod generator;
mod plot;
mod report;
mod run;
mod scale;
mod spec;
mod verify;

pub use compare::{Comparison, Figure, FigureSpread, Ratios, Side, Spread, compare};
pub use fill::{FillReport, FillSpec, fill_and_verify};
pub use plot::{Curve, Plot, Point};
pub use report::{Batches, BenchReport, CounterGrowth, Latency, ProcessCpu};
pub use run::{Outcome, run};
pub use spec::{Alloc, BenchSpec, Counters, Hooks, Initial, Pattern, Progress, Stop, Verify};
pub use verify::{BlockState, VerifyState};
