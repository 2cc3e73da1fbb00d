//! The driver's word to its queues, and the rings that no queue has.

use crate::ring::Ring;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// What queues must do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(u8)]
pub(crate) enum Hold {
    /// Carry out requests.
    #[default]
    None,
    /// End the requests that the device has, and keep the rest.
    Freeze,
    /// End everything with an error.
    Reset,
}

/// The driver's word to its queues: what they must do, and how often the device was reset. A queue whose reactor did not
/// turn during a reset learns of it by the count.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Word(pub(super) u32);

impl Word {
    const HOLD_BITS: u32 = 2;

    #[inline]
    pub(crate) fn hold(self) -> Hold {
        match self.0 & 3 {
            0 => Hold::None,
            1 => Hold::Freeze,
            _ => Hold::Reset,
        }
    }

    pub(crate) fn with(self, hold: Hold) -> Self {
        Self((self.0 & !3) | hold as u32)
    }

    pub(super) fn with_one_more_reset(self) -> Self {
        Self(self.0.wrapping_add(1 << Self::HOLD_BITS))
    }

    pub(super) fn resets(self) -> u32 {
        self.0 >> Self::HOLD_BITS
    }
}

/// The rings that no queue has at the moment.
#[derive(Debug, Default)]
pub(crate) struct Rings {
    /// Rings of queues that are not open.
    pub(crate) parked: Vec<Ring>,
    /// Rings of open queues, while the driver holds them.
    pub(super) held: Vec<Ring>,
}

/// The control over all queues.
#[derive(Debug, Default)]
pub(crate) struct Control {
    pub(super) word: AtomicU32,
    rings: Mutex<Rings>,
    pub(super) handed_over: Condvar,
    /// Whether the device is frozen. Locked while that changes.
    frozen: Mutex<bool>,
}

impl Control {
    pub(crate) fn new(rings: Vec<Ring>) -> Self {
        Self { rings: Mutex::new(Rings { parked: rings, held: Vec::new() }), ..Self::default() }
    }

    #[inline]
    pub(crate) fn word(&self) -> Word {
        Word(self.word.load(Ordering::Acquire))
    }

    pub(crate) fn hold(&self) -> Hold {
        self.word().hold()
    }

    pub(crate) fn rings(&self) -> MutexGuard<'_, Rings> {
        self.rings.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn frozen(&self) -> MutexGuard<'_, bool> {
        self.frozen.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Rings {
    pub(super) fn all(&mut self) -> impl Iterator<Item = &mut Ring> {
        self.parked.iter_mut().chain(&mut self.held)
    }

    pub(super) fn take_held(&mut self, index: usize) -> Option<Ring> {
        let at = self.held.iter().position(|ring| ring.index == index)?;
        Some(self.held.swap_remove(at))
    }
}
