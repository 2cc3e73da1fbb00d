//! The next call of a request, for a worker.

use crate::base::call::Call;
use crate::route::How;

/// See the module.
#[derive(Clone, Copy)]
pub(crate) struct Job {
    /// The request's index in the reactor's slab.
    pub(crate) index: u32,
    /// The job must not run while another serialized job on the file does.
    pub(crate) serialized: bool,
    pub(crate) how: How,
    pub(crate) length_bytes: usize,
    pub(crate) call: Call,
}

// SAFETY: the pointers name memory that the reactor's slab keeps alive until the job's result has come back (see the
// documentation of `workers`); a worker passes them to the kernel and to nobody else.
unsafe impl Send for Job {}

impl Job {
    pub(crate) fn run(&self) -> i32 {
        // SAFETY: the slab's request keeps the memory and the file until the result has come back.
        unsafe { self.call.run() }
    }
}
