//! Where answers about what lies where come in.

use crate::context::Context;
use nbd_wire::reply::Extent;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

/// The extents of each context.
pub(crate) type Answer = Vec<(Context, Vec<Extent>)>;

/// Where answers come in.
#[derive(Default)]
pub(crate) struct Mailbox {
    answers: Mutex<VecDeque<(u64, Option<Answer>)>>,
    has_mail: AtomicBool,
}

impl Mailbox {
    pub(crate) fn put(&self, tag: u64, answer: Option<Answer>) {
        self.answers.lock().unwrap_or_else(PoisonError::into_inner).push_back((tag, answer));
        self.has_mail.store(true, Ordering::Release);
    }

    pub(crate) fn take(&self) -> Option<(u64, Option<Answer>)> {
        if !self.has_mail.load(Ordering::Acquire) {
            return None;
        }
        let mut answers = self.answers.lock().unwrap_or_else(PoisonError::into_inner);
        let answer = answers.pop_front();
        self.has_mail.store(!answers.is_empty(), Ordering::Release);
        answer
    }
}
