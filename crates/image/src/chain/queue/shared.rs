//! The files of a chain, open on one reactor.

use crate::chain::give_up::Ends;
use crate::chain::job_calls::JobCalls;
use crate::chain::layer::Layer;
use crate::chain::layers::Chain;
use block::{FileQueue, MetaIo, Participant, ReactorCtx, Result, Sink};
use std::rc::Rc;
use std::sync::Arc;

/// A chain whose files are open on this reactor. The queue and its tasks share it.
pub(crate) struct Shared {
    pub(crate) chain: Arc<Chain>,
    /// Where the guest's data lie, one a layer.
    pub(crate) files: Vec<Rc<dyn FileQueue>>,
    /// Where the tables lie, one a layer; mostly in the same file.
    pub(crate) metas: Vec<MetaIo>,
    pub(crate) sink: Rc<Sink>,
    /// The other chain that also gets all writes, if there is one.
    pub(crate) other: Option<OtherSide>,
}

/// The other chain as it is open on this reactor.
#[derive(Clone)]
pub(crate) struct OtherSide {
    pub(crate) shared: Rc<Shared>,
    pub(crate) ctx: Rc<dyn ReactorCtx>,
}

/// A layer's files on this reactor.
pub(super) type OpenFiles = (Rc<dyn FileQueue>, MetaIo);

impl Shared {
    pub(super) fn open(chain: &Arc<Chain>, ctx: &Rc<dyn ReactorCtx>) -> Result<Self> {
        let queues = chain.layers.iter().map(|layer| layer.open_queues(ctx)).collect::<Result<Vec<_>>>()?;
        let shared = Self::of(chain, queues, Sink::new());
        let Some(both) = &chain.both else { return Ok(shared) };
        let open = |layer: &Arc<Layer>| shared.find(layer).map_or_else(|| layer.open_queues(ctx), Ok);
        let queues = both.next.layers.iter().map(open).collect::<Result<Vec<_>>>()?;
        let other = Rc::new(Self::of(&both.next, queues, Rc::clone(&shared.sink)));
        Ok(Self { other: Some(OtherSide { shared: other, ctx: Rc::clone(ctx) }), ..shared })
    }

    /// Opens a chain for calls that block.
    pub(crate) fn blocking(chain: &Arc<Chain>) -> Result<Self> {
        Self::for_job(chain, &JobCalls::blocking(), Ends::Reads)
    }

    /// Opens a chain for the calls of a job.
    pub(crate) fn for_job(chain: &Arc<Chain>, calls: &Rc<JobCalls>, ends: Ends) -> Result<Self> {
        let open = |layer: &Arc<Layer>| {
            let meta = calls.open(layer, ends)?;
            Ok((Rc::clone(meta.data().unwrap_or(meta.queue())), meta))
        };
        let queues = chain.layers.iter().map(open).collect::<Result<Vec<_>>>()?;
        Ok(Self::of(chain, queues, Sink::new()))
    }

    fn of(chain: &Arc<Chain>, queues: Vec<OpenFiles>, sink: Rc<Sink>) -> Self {
        let (files, metas) = queues.into_iter().unzip();
        Self { chain: Arc::clone(chain), files, metas, sink, other: None }
    }

    /// Finds the open files of a layer. The layer here may have another mapping.
    fn find(&self, layer: &Layer) -> Option<OpenFiles> {
        let mine = self.chain.layers.iter().zip(self.files.iter().zip(&self.metas));
        match mine.into_iter().find(|(mine, _)| Arc::ptr_eq(&mine.file, &layer.file)) {
            Some((_, (file, meta))) => Some((Rc::clone(file), meta.clone())),
            None => self.other.as_ref()?.shared.find(layer),
        }
    }

    /// Makes another chain, all of whose files are open here or prepared.
    pub(super) fn next(
        &self,
        chain: &Arc<Chain>,
        prepared: &[(Arc<Layer>, OpenFiles)],
        ctx: &Rc<dyn ReactorCtx>,
    ) -> Self {
        let find = |layer: &Arc<Layer>| {
            let new = prepared.iter().find(|(prepared, _)| Arc::ptr_eq(prepared, layer));
            self.find(layer).or_else(|| new.map(|(_, (file, meta))| (Rc::clone(file), meta.clone())))
        };
        let all = |chain: &Arc<Chain>| {
            let queues = chain.layers.iter().map(find).collect::<Option<Vec<_>>>()?;
            Some(Self::of(chain, queues, Rc::clone(&self.sink)))
        };
        let both = || {
            let side = |shared| OtherSide { shared: Rc::new(shared), ctx: Rc::clone(ctx) };
            let other = chain.both.as_ref().map(|both| all(&both.next).map(side));
            Some(Self { other: other.map_or(Some(None), |other| other.map(Some))?, ..all(chain)? })
        };
        match both() {
            Some(shared) => shared,
            None => {
                tracing::error!("a queue was told of a chain that it has not prepared for: its requests fail");
                let dead = Chain::dead(self.chain.layers.clone(), &self.chain.disk);
                let mine = self.files.iter().cloned().zip(self.metas.iter().cloned()).collect();
                Self::of(&Arc::new(dead), mine, Rc::clone(&self.sink))
            }
        }
    }

    pub(super) fn join_epochs(&self) -> Option<Participant> {
        self.chain.layers.first().and_then(|top| top.mapping.epochs()).map(block::Epochs::join)
    }
}
