//! The slab that owns the requests in an engine's hands, and with them their memory, until the kernel is done. Their
//! contexts come from the pool.

use super::progress::Request;
use super::segments::{Scratch, cut, listed};
use crate::base::call::Buffers;
use memory::{Placed, room_for};
use std::rc::Rc;

/// What a request in an engine's hands needs: its context, from the pool.
struct InFlight {
    request: Request,
    scratch: Scratch,
}

room_for!(InFlight, "request in an engine");

/// Owns the requests in flight, by index: a table that grows to the peak. The indices are the kernel's names for
/// requests.
#[derive(Default)]
pub(crate) struct Slab {
    slots: Vec<Option<Placed<InFlight>>>,
    free: Vec<u32>,
}

impl Slab {
    pub(crate) fn with_capacity(count: usize) -> Self {
        Self { slots: Vec::with_capacity(count), free: Vec::with_capacity(count) }
    }

    /// Requests owned now.
    pub(crate) fn live(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// The most requests owned at once so far. Lists of requests have room for as many: they grow when the load does, not
    /// when the machine happens to end many at once.
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

    /// Takes all requests out of the hands of an engine that can tell no more about them. The kernel may still write to
    /// their memory, so that stays as it is for ever, and with it the lists that the kernel was given.
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

    /// The memory that is left to move, for one call. The pointers stay valid until the slot is prepared again or its
    /// request removed: they point into the buffer's own list, which is not refilled while the request holds a handle,
    /// or into the context's scratch.
    pub(crate) fn buffers(&mut self, index: u32) -> Buffers {
        let Some(Some(context)) = self.slots.get_mut(index as usize) else {
            return Buffers::Vector { ptr: std::ptr::null(), count: 0 };
        };
        let InFlight { request, scratch } = &mut **context;
        listed(request).unwrap_or_else(|| cut(request, scratch.list(request.window.segment_count())))
    }
}
