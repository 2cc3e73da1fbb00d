//! Simulated storage: files with a volatile cache, whose operations end in a seeded order, and whose power can be cut.

mod fault;
mod file;
mod flying;
mod handle;
mod queue;
mod reactor;
mod state;
mod storage;
#[cfg(test)]
mod tests;

pub use fault::{Fault, FaultAction, OpKind};
pub use handle::SimHandle;
pub use reactor::SimReactor;
pub use storage::{Recording, Replay, SimFile, SimFileOptions, SimStorage};
