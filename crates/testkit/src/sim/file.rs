//! A simulated file as a [`File`].

use super::queue::{BlockingQueue, SimQueue};
use super::reactor::SimReactor;
use super::storage::SimFile;
use block::{Error, ErrorKind, File, FileInfo, FileQueue, ReactorCtx, Result};
use memory::BufferAccount;
use std::rc::Rc;

impl File for SimFile {
    fn info(&self) -> &FileInfo {
        &self.info
    }

    fn length_bytes(&self) -> Result<u64> {
        Ok(self.storage.lock().files[self.index].state.length())
    }

    fn buffers(&self) -> &BufferAccount {
        &self.buffers
    }

    fn open_queue(&self, ctx: &Rc<dyn ReactorCtx>) -> Result<Rc<dyn FileQueue>> {
        let Some(reactor) = ctx.as_any().downcast_ref::<SimReactor>() else {
            let message = format!("the simulated file '{}' needs a simulated reactor", self.info.name);
            return Err(Error::new(ErrorKind::Unsupported, message));
        };
        Ok(Rc::new(SimQueue::new(self.again(), reactor.world())))
    }

    fn open_blocking(&self) -> Result<Rc<dyn FileQueue>> {
        Ok(Rc::new(BlockingQueue::new(self.again())))
    }
}
