//! The barrier by which the queues of a disk go over to another chain of layers while guests use it.
//!
//! A chain ([`super::layers::Chain`]) never changes. Another chain, which shares layers with it, takes its place. The
//! queues go over to it by a barrier:
//!
//! 1. **Prepare.** Every queue, on its own reactor, opens the files of the next chain that its own chain does not have.
//!    From then on it begins no request, but keeps what is submitted. Requests in flight go on. Each queue answers that
//!    it is ready, or that it could not open a file. If one could not, all go on with the chain that they have.
//! 2. **Adopt.** When all queues of all disks that take part hold, all are told of the next chain. Each begins there
//!    what it has kept. Nothing can fail here: all files are open.
//!
//! So no request begins on the former chain once one has begun on the next. Nothing is drained: a request ends on the
//! chain that it began with. A queue keeps the chain's files, its place in the top layer's epochs, and a *lease*
//! ([`lease::Lease`]) until its last request there has ended. When the last lease ends, the former chain is over.
//!
//! Each queue has a task on its reactor (`queue/attendant.rs`) that sleeps until an order is announced. So idle queues on
//! sleeping reactors are reached, and a request pays only for a look at a flag of its queue. A queue that is opened
//! during an exchange takes its seat only if nothing was announced since it looked, and holds if the others do. A
//! dropped queue leaves its seat; its requests in flight keep its lease.
//!
//! [`crate::online`] holds the changes that use this barrier.

pub(crate) mod board;
pub(crate) mod change_log;
pub(crate) mod lease;

use super::layer::Layer;
use super::layers::Chain;
use block::Result;
use board::{Board, Hold, Order};
use lease::Lease;
use std::sync::Arc;

/// A barrier that the queues of some disks have reached. Dropping it lets the queues go on with the chains that they
/// have.
pub(crate) struct Barrier {
    boards: Vec<Arc<Board>>,
    is_pending: bool,
}

impl Barrier {
    /// Makes all queues prepare for chains with these additional layers. If one queue cannot, all go on as before.
    pub(crate) async fn prepare(disks: Vec<(Arc<Board>, Vec<Arc<Layer>>)>, hold: Hold) -> Result<Self> {
        let order = |(board, layers): (Arc<Board>, _)| (board.announce(Order::Prepare { layers, hold }), board);
        let (numbers, boards): (Vec<u64>, Vec<_>) = disks.into_iter().map(order).unzip();
        let barrier = Self { boards, is_pending: true };
        match barrier.answered(&numbers).await {
            Ok(()) => Ok(barrier),
            Err(error) => {
                barrier.give_up().await;
                Err(error)
            }
        }
    }

    /// Makes the holding queues also prepare for chains with these layers. They hold on, whatever the result.
    pub(crate) async fn prepare_more(&self, layers: &[Arc<Layer>]) -> Result<()> {
        let order =
            |board: &Arc<Board>| board.announce(Order::Prepare { layers: layers.to_vec(), hold: Hold::UntilQuiet });
        let numbers: Vec<u64> = self.boards.iter().map(order).collect();
        self.answered(&numbers).await
    }

    /// Gives each disk's queues their next chain and waits until all have adopted it.
    pub(crate) async fn release(mut self, chains: Vec<Arc<Chain>>) {
        self.is_pending = false;
        let orders = chains.iter().map(|chain| Order::Adopt(Arc::clone(chain), Lease::new()));
        let numbers: Vec<u64> = self.boards.iter().zip(orders).map(|(board, order)| board.announce(order)).collect();
        // Adopting cannot fail.
        let _ = self.answered(&numbers).await;
    }

    /// Lets the queues go on with the chains that they have, and waits until all do.
    pub(crate) async fn give_up(mut self) {
        let numbers = self.resume();
        let _ = self.answered(&numbers).await;
    }

    fn resume(&mut self) -> Vec<u64> {
        self.is_pending = false;
        self.boards.iter().map(|board| board.announce(Order::Resume(board.renewed_lease()))).collect()
    }

    /// Waits for all queues even if some fail: an order is given only when the one before has been carried out.
    async fn answered(&self, numbers: &[u64]) -> Result<()> {
        let mut result = Ok(());
        for (board, number) in self.boards.iter().zip(numbers) {
            let answer = board.answered(*number).await;
            result = result.and(answer);
        }
        result
    }
}

impl Drop for Barrier {
    fn drop(&mut self) {
        if self.is_pending {
            self.resume();
        }
    }
}

/// Goes over to a chain that may be used beside the former one. Waits until the former chain's requests have ended.
pub(crate) async fn go_over(board: &Arc<Board>, chain: Chain) -> Result<()> {
    go_over_to(board, chain, Vec::new()).await
}

/// As [`go_over`], to a chain that needs the files of these layers open.
pub(crate) async fn go_over_to(board: &Arc<Board>, chain: Chain, layers: Vec<Arc<Layer>>) -> Result<()> {
    let over = board.over();
    let barrier = Barrier::prepare(vec![(Arc::clone(board), layers)], Hold::No).await?;
    barrier.release(vec![Arc::new(chain)]).await;
    over.wait().await;
    Ok(())
}

/// Holds all requests of a disk and waits until none is in flight.
pub(crate) async fn hold_quiet(board: &Arc<Board>) -> Result<Barrier> {
    hold_quiet_for(board, Vec::new()).await
}

/// As [`hold_quiet`], for a chain with these additional layers.
pub(crate) async fn hold_quiet_for(board: &Arc<Board>, layers: Vec<Arc<Layer>>) -> Result<Barrier> {
    let over = board.over();
    let barrier = Barrier::prepare(vec![(Arc::clone(board), layers)], Hold::UntilQuiet).await?;
    over.wait().await;
    Ok(barrier)
}
