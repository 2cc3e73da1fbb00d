//! The way of primitive requests on one file to their engine.

use super::engines::Engine;
use crate::base::call::Action;
use crate::request::carry_out;
use crate::request::progress::Request;
use crate::request::queue_file::QueueFile;
use block::{Done, IoResult, Priority, Waiter};
use memory::Window;
use std::future::Future;
use std::rc::Rc;

/// Pushes requests on one file to an engine, or carries them out on the calling thread.
#[derive(Clone)]
pub(crate) struct Lane {
    pub(super) engine: Option<Engine>,
    pub(crate) target: Rc<QueueFile>,
    /// The priority of the requests that are pushed through this lane.
    pub(super) priority: Priority,
}

impl Lane {
    /// Returns the lane with another priority.
    pub(super) fn at(&self, priority: Priority) -> Self {
        Self { priority, ..self.clone() }
    }

    /// Pushes one primitive request.
    pub(crate) fn push(&self, action: Action, offset: u64, window: Window, done: Done) {
        self.push_request(action, offset, window, self.priority, done, false);
    }

    /// Pushes a request. `counted` says that it was counted as one of the file's untracked changes.
    pub(super) fn push_request(
        &self,
        action: Action,
        offset: u64,
        window: Window,
        priority: Priority,
        done: Done,
        counted: bool,
    ) {
        match action {
            Action::Truncate => self.target.file.length_changes(offset),
            Action::Fallocate { mode, length } if mode & libc::FALLOC_FL_PUNCH_HOLE != 0 => {
                self.target.file.punch_begins(offset, length);
            }
            _ => {}
        }
        let target = Rc::clone(&self.target);
        let request = Request { target, action, offset, window, progress: 0, counted, priority, done };
        match &self.engine {
            Some(engine) => engine.push(request),
            None => {
                carry_out::run(request);
            }
        }
    }

    /// Pushes one request and returns a future of its end.
    pub(crate) fn start(&self, action: Action, offset: u64, window: Window) -> impl Future<Output = IoResult> + use<> {
        let waiter = Waiter::new();
        self.push(action, offset, window, Done::Waiter(waiter.clone()));
        Waiter::wait(&waiter)
    }
}
