//! Buffers that keep their part of a budget.

use super::IoBuf;
use crate::OutOfMemory;
use crate::budget::{BufferAccount, BufferGrant, BufferUse};

impl BufferAccount {
    /// Waits until there is room, and returns one buffer with its memory's old contents.
    pub async fn buffer(&self, purpose: BufferUse, length_bytes: usize) -> Result<IoBuf, OutOfMemory> {
        self.grant(purpose, BufferGrant::size_of(length_bytes)).await.buffer(length_bytes)
    }
}

impl BufferGrant {
    /// Makes a buffer with its memory's old contents. It keeps its part of the grant as long as it lives.
    pub fn buffer(&mut self, length_bytes: usize) -> Result<IoBuf, OutOfMemory> {
        let part = self.split(Self::size_of(length_bytes));
        IoBuf::from_pool_with(length_bytes, part)
    }
}
