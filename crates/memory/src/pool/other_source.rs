//! Other sources of contexts, for measuring the benefit of the pool: `cargo xtask bench --contexts` builds the program
//! with each (`--cfg contexts_from="allocator"`, `"lock"`). The pool's counters mean nothing then.

use super::PoolContext;
use super::magazine::{Magazine, Node};
use std::sync::{Mutex, PoisonError};

/// Whether contexts come from elsewhere in this build.
pub(super) const IS_ON: bool = cfg!(any(contexts_from = "allocator", contexts_from = "lock"));
/// Whether contexts come from one list for all threads; otherwise they come from the allocator.
const IS_LOCKED: bool = cfg!(contexts_from = "lock");

pub(super) fn take<T: PoolContext>(idle: &Mutex<Magazine<T>>) -> Box<Node<T>> {
    let context = if IS_LOCKED { idle.lock().unwrap_or_else(PoisonError::into_inner).pop() } else { None };
    context.unwrap_or_else(|| Node::boxed(T::create()))
}

pub(super) fn put<T>(idle: &Mutex<Magazine<T>>, context: Box<Node<T>>) {
    if IS_LOCKED {
        idle.lock().unwrap_or_else(PoisonError::into_inner).push(context);
    }
}
