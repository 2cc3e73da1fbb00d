//! Queues of simulated files.

use super::flying::Flying;
use super::reactor::World;
use super::storage::SimFile;
use crate::dice::Dice;
use block::{FileIo, FileQueue};
use std::rc::Rc;
use std::sync::Arc;

/// A queue on a simulated reactor.
pub(crate) struct SimQueue {
    file: Arc<SimFile>,
    world: Rc<World>,
}

impl SimQueue {
    pub(crate) fn new(file: Arc<SimFile>, world: Rc<World>) -> Self {
        Self { file, world }
    }
}

impl FileQueue for SimQueue {
    fn push(&self, io: FileIo) {
        self.world.take(|dice| Flying::start(Arc::clone(&self.file), io, dice));
    }
}

/// A queue that carries out each push at once.
pub(crate) struct BlockingQueue {
    file: Arc<SimFile>,
}

impl BlockingQueue {
    pub(crate) fn new(file: Arc<SimFile>) -> Self {
        Self { file }
    }
}

impl FileQueue for BlockingQueue {
    fn push(&self, io: FileIo) {
        let mut dice = Dice::new(self.file.storage().now());
        let mut flying = Flying::start(Arc::clone(&self.file), io, &mut dice);
        flying.stalls = false;
        while flying.apply_next(&mut dice) {}
        flying.finish();
    }
}
