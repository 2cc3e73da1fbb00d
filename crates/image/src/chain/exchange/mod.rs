//! Exchanging a disk's chain of layers while guests use it.
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
//! chain that it began with. Until its last request there has ended, a queue keeps that chain's files, its place in the
//! epochs of the top layer, and a *lease* ([`board::Lease`]). When the last lease ends, the former chain is over.
//!
//! A queue is told by a task of its own on its reactor ([`attendant`]), which sleeps until something is announced. So
//! idle queues on sleeping reactors are reached, and a request pays only for a look at a flag of its queue. A queue
//! that is opened during an exchange takes its seat only if nothing was announced since it looked, and holds if the
//! others do. A queue that is dropped leaves its seat; its requests in flight keep its lease.
//!
//! **A new top layer** ([`overlay`]). Requests in flight may still write to the former top while others run on the next
//! chain. Four things could go wrong. So the next chain is *handing over* until the former one is over:
//!
//! * A write to a part of a cluster copies the rest from below. If a write in flight landed below after that, its
//!   data would be hidden, although it is acknowledged. So such copies wait until the former chain is over. Reads, and
//!   writes of whole clusters, do not wait: a write in flight that they overlap has not been acknowledged.
//! * A memory of what lies below could become wrong. So there is no merged map.
//! * A flush covers what was acknowledged on the former chain. So it flushes both layers. So does a durable write,
//!   because it takes along what was not flushed when the guest chose write-through.
//! * Space that is freed in the former top could be used again, or be given back to the host, below a read that was
//!   resolved on the next chain. So the exchange holds a place in the former top's epochs until all such reads have
//!   ended.
//!
//! When the former chain is over, its top is flushed, the queues go over to a chain of the same layers that is not
//! handing over (without holding anything: the two may be used at once), and when that has happened everywhere the
//! former top is closed: refcounts, dirty bit, persistent bitmaps, which stay in it. From then on it is only read.
//!
//! **Taking the top layer back** ([`take_back`]). Where the top layer holds data, nobody sees what the layer below has.
//! So the data are copied down while guests go on. Meanwhile the chain has a log ([`change_log`]), which notes ranges
//! before writes to them begin. To get a complete log, the queues go over to a chain with a new log, until the former
//! chain is over. The ranges of the complete log are copied again. The last round is made while all requests are held
//! and none is in flight. Then the layer below is flushed and becomes the top.
//! Others see how far the copy has come, and can cancel it ([`watch`]).
//!
//! **Other layers below** ([`move_onto`]). The top gets a copy of all that the layers that go away say, then its header
//! names another backing file, or none.
//!
//! **More room** ([`grow`]) is a barrier too, with the format's own offline resize while nothing is in flight.

pub(crate) mod attendant;
pub(crate) mod board;
pub(crate) mod change_log;
#[cfg(all(test, feature = "explore"))]
pub(crate) mod explored;
pub(crate) mod grow;
pub(crate) mod move_onto;
pub(crate) mod overlay;
pub(crate) mod take_back;
pub(crate) mod watch;

use super::layer::Layer;
use super::layers::Chain;
use block::Result;
use board::{Board, Hold, Lease, Order};
use std::sync::Arc;

/// A barrier that the queues of some disks have come to. Dropped, it lets them go on with the chains that they have.
pub(crate) struct Barrier {
    boards: Vec<Arc<Board>>,
    is_pending: bool,
}

impl Barrier {
    /// Has all queues prepare for chains with these additional layers. If one cannot, all go on as before.
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

    /// Lets the queues go on with these chains, one a disk, and waits until all have adopted them.
    pub(crate) async fn release(mut self, chains: Vec<Arc<Chain>>) {
        self.is_pending = false;
        let orders = chains.iter().map(|chain| Order::Adopt(Arc::clone(chain), Lease::new()));
        let numbers: Vec<u64> = self.boards.iter().zip(orders).map(|(board, order)| board.announce(order)).collect();
        // Adopting cannot fail.
        let _ = self.answered(&numbers).await;
    }

    /// Lets the queues go on with the chains that they have.
    pub(crate) async fn give_up(mut self) {
        let numbers = self.resume();
        let _ = self.answered(&numbers).await;
    }

    fn resume(&mut self) -> Vec<u64> {
        self.is_pending = false;
        self.boards.iter().map(|board| board.announce(Order::Resume(board.renewed_lease()))).collect()
    }

    /// Waits for all, also if some cannot: an order is given only when the one before has been carried out.
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

/// Goes over to a chain that may be used together with the one before, and waits until that is over.
pub(crate) async fn go_over(board: &Arc<Board>, chain: Chain) -> Result<()> {
    let over = board.over();
    let barrier = Barrier::prepare(vec![(Arc::clone(board), Vec::new())], Hold::No).await?;
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
