//! The slab owns the requests in an engine, and with them their memory, until the kernel is done. Their contexts come
//! from the pool.

use super::progress::Request;
use super::segments::{Scratch, cut, listed};
use crate::base::call::Buffers;
use memory::{Placed, room_for};
use std::rc::Rc;

/// The context of a request in an engine, from the pool.
struct InFlight {
    request: Request,
    scratch: Scratch,
}

room_for!(InFlight, "request in an engine");

/// Owns the requests in flight, by index, in a table that grows to the peak. The kernel names requests by these
/// indices.
#[derive(Default)]
pub(crate) struct Slab {
    slots: Vec<Option<Placed<InFlight>>>,
    free: Vec<u32>,
}

impl Slab {
    pub(crate) fn with_capacity(count: usize) -> Self {
        Self { slots: Vec::with_capacity(count), free: Vec::with_capacity(count) }
    }

    /// Returns how many requests it owns.
    pub(crate) fn live(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Returns the most requests that it has owned at once. Lists of requests have room for as many, so they grow when
    /// the load does, not when many requests happen to end at once.
    pub(crate) fn peak(&self) -> usize {
        self.slots.len()
    }

    pub(crate) fn insert(&mut self, request: Request) -> u32 {
        let context = Some(Placed::new(InFlight { request, scratch: Scratch::None }));
        match self.free.pop() {
            Some(index) => {
                self.slots[index as usize] = context;
                index
            }
            None => {
                self.slots.push(context);
                self.free.reserve(self.slots.len());
                (self.slots.len() - 1) as u32
            }
        }
    }

    pub(crate) fn get(&self, index: u32) -> Option<&Request> {
        self.slots.get(index as usize)?.as_ref().map(|context| &context.request)
    }

    pub(crate) fn get_mut(&mut self, index: u32) -> Option<&mut Request> {
        self.slots.get_mut(index as usize)?.as_mut().map(|context| &mut context.request)
    }

    pub(crate) fn remove(&mut self, index: u32) -> Option<Request> {
        let context = self.slots.get_mut(index as usize)?.take()?;
        self.free.push(index);
        Some(context.into_inner().request)
    }

    /// Takes all requests from an engine that can report no more ends. The kernel may still write to their memory, so
    /// that is leaked, and with it the lists that the kernel was given.
    pub(crate) fn abandon(&mut self) -> Vec<Request> {
        self.free.clear();
        let contexts = std::mem::take(&mut self.slots).into_iter().flatten();
        let leak = |context: Placed<InFlight>| {
            let InFlight { request, scratch } = context.into_inner();
            std::mem::forget((scratch, request.window.clone(), Rc::clone(&request.target)));
            request
        };
        contexts.map(leak).collect()
    }

    /// Returns the memory that is left to move, for one call. The pointers stay valid until the next call for this
    /// slot, or until its request is removed. They point into the buffer's own list, which is not refilled while the
    /// request holds a handle, or into the context's scratch list.
    pub(crate) fn buffers(&mut self, index: u32) -> Buffers {
        let Some(Some(context)) = self.slots.get_mut(index as usize) else {
            return Buffers::Vector { ptr: std::ptr::null(), count: 0 };
        };
        let InFlight { request, scratch } = &mut **context;
        listed(request).unwrap_or_else(|| cut(request, scratch.list(request.window.segment_count())))
    }
}
