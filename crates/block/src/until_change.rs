//! What a file's server said of it, believed until something changes.
//!
//! Whoever copies a disk leaves out what is known to be a hole. So an answer must not outlive a write, whether the
//! question was asked before the write or during it.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

/// An answer that holds until the next change.
pub struct UntilChange<T> {
    changes: AtomicU64,
    known: Mutex<Option<(u64, T)>>,
}

/// The time at which something is asked.
#[derive(Debug, Clone, Copy)]
pub struct Asked(u64);

impl<T> UntilChange<T> {
    /// Nothing is known any more, nor from questions that are under way. Call it after each change, and before it, too,
    /// if the change goes on when nobody waits for it.
    pub fn changed(&self) {
        self.changes.fetch_add(1, Ordering::AcqRel);
    }

    /// Begins a question. Call it before anything is asked.
    pub fn asks(&self) -> Asked {
        Asked(self.changes.load(Ordering::Acquire))
    }

    /// Keeps the answer to a question. It takes the place of an earlier one.
    pub fn learn(&self, asked: Asked, answer: T) {
        *self.known.lock().unwrap_or_else(PoisonError::into_inner) = Some((asked.0, answer));
    }

    /// Looks something up in the last answer. `None` if there is none, or if it no longer holds.
    pub fn look_up<R>(&self, find: impl FnOnce(&T) -> Option<R>) -> Option<R> {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let holds = |asked: u64| asked == self.changes.load(Ordering::Acquire);
        known.as_ref().filter(|(asked, _)| holds(*asked)).and_then(|(_, answer)| find(answer))
    }
}

impl<T> Default for UntilChange<T> {
    fn default() -> Self {
        Self { changes: AtomicU64::new(0), known: Mutex::new(None) }
    }
}

impl<T> fmt::Debug for UntilChange<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UntilChange").field("changes", &self.changes).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_holds_until_the_next_change() {
        let holes = UntilChange::default();
        assert_eq!(holes.look_up(|_: &u32| Some(1)), None);
        let asked = holes.asks();
        holes.learn(asked, 7);
        assert_eq!(holes.look_up(|answer| Some(*answer)), Some(7));
        assert_eq!(holes.look_up(|answer| (*answer == 8).then_some(())), None);
        holes.changed();
        assert_eq!(holes.look_up(|answer| Some(*answer)), None);
    }

    #[test]
    fn an_answer_to_a_question_from_before_a_change_is_not_believed() {
        let holes = UntilChange::default();
        let asked = holes.asks();
        holes.changed();
        holes.learn(asked, "all of it is a hole");
        assert_eq!(holes.look_up(|answer| Some(*answer)), None);
        holes.learn(holes.asks(), "data");
        assert_eq!(holes.look_up(|answer| Some(*answer)), Some("data"));
    }
}
