//! Limits how many bytes tasks may move by themselves in one turn.
//!
//! A task that zeroes or copies memory holds its reactor up: a mebibyte takes a tenth of a millisecond or more.
//! Thousands of such tasks may be ready at once, so [`crate::Executor::run_ready`] ends when they have moved enough,
//! and each task moves its bytes in steps.

use std::cell::Cell;

/// Bytes that tasks move in a turn; the last task may exceed this by one step.
const BYTES_PER_TURN: usize = 1 << 20;

/// The longest step that a task should make between two calls of [`moved`].
pub const STEP_BYTES: usize = 256 << 10;

thread_local! {
    static MOVED_BYTES: Cell<usize> = const { Cell::new(0) };
}

/// Begins a new turn.
#[inline]
pub(crate) fn begin() {
    MOVED_BYTES.set(0);
}

/// Notes that the calling task has moved `bytes`.
pub fn note_moved(bytes: usize) {
    MOVED_BYTES.set(MOVED_BYTES.get().saturating_add(bytes));
}

/// Whether tasks have moved enough in this turn. The rest waits for the next turn.
#[must_use]
pub fn has_moved_enough() -> bool {
    MOVED_BYTES.get() >= BYTES_PER_TURN
}

/// Notes that the calling task has moved `bytes`. Lets all other work go first if that was enough for this turn.
pub async fn moved(bytes: usize) {
    note_moved(bytes);
    if has_moved_enough() {
        crate::yield_now().await;
    }
}

/// Waits for a turn in which tasks may still move bytes, for a task that is about to. [`crate::block_on`] and
/// [`crate::Executor`] begin turns.
pub async fn until_free() {
    while has_moved_enough() {
        crate::yield_now().await;
    }
}
