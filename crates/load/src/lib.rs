//! The load generator: puts a load on any [`Disk`](block::Disk), measures the disk, and checks the data that it reads.
//!
//! It takes the place of a guest: on a disk in this process, or on the [driver](driver::Driver), connected to a
//! server's socket.
//!
//! * [`run`]: one workload, at a fixed depth, with one queue on each reactor. [`BenchSpec`] describes it.
//! * [`fill_and_verify`]: writes a range, flushes, and reads all of it back.
//! * [`request_bench`]: a fixed number of requests at rising offsets.
//! * [`compare`]: sums up runs of several disks; [`Plot`] draws them over depth, as SVG.
//! * [`driver_hooks`]: lets a run use the driver's shared memory and report its counters.
//!
//! All of them block the caller's thread, report progress on it, and can be cancelled.
//!
//! ```no_run
//! # use {block as ringdisk_block, driver as ringdisk_driver, engine as ringdisk_engine};
//! use ringdisk_block::Disk;
//! use ringdisk_driver::{Driver, DriverOptions};
//! use ringdisk_engine::{Reactor, ReactorConfig};
//! use ringdisk_load::{BenchSpec, driver_hooks, run};
//! use std::path::Path;
//! use std::sync::Arc;
//!
//! let driver = Arc::new(Driver::connect(Path::new("/run/disk.sock"), DriverOptions::default())?);
//! let disk: Arc<dyn Disk> = driver.clone();
//! let reactor = Reactor::spawn(ReactorConfig::default())?;
//! let spec = BenchSpec::default().with(|spec| spec.queue_depth = 64);
//! let outcome = run(&disk, &[reactor.handle()], &spec, &driver_hooks(&driver))?;
//! println!("{:.0} requests a second", outcome.report.iops);
//! # Ok::<(), ringdisk_block::Error>(())
//! ```

#![forbid(unsafe_code)]

mod compare;
mod cpu;
mod evenness;
mod fill;
mod generator;
mod moments;
mod over_driver;
mod plot;
mod range;
mod report;
mod request_bench;
mod run;
mod scale;
mod spec;
mod verify;

pub use compare::{Comparison, Figure, FigureSpread, Ratios, Side, Spread, compare};
pub use fill::{FillReport, FillSpec, fill_and_verify};
pub use moments::Moment;
pub use over_driver::driver_hooks;
pub use plot::{Curve, Plot, Point};
pub use report::{Batches, BenchReport, CounterGrowth, EngineHarvests, Latency, ProcessCpu};
pub use request_bench::{RequestBench, request_bench};
pub use run::{Outcome, run};
pub use spec::{Alloc, BenchSpec, Counters, HarvestLengths, Hooks, Initial, Pattern, Progress, Stop, Verify};
pub use verify::{BlockState, VerifyState};
