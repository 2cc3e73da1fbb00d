//! Exchanging a disk's chain of layers while guests use it.
//!
//! A chain ([`super::layers::Chain`]) never changes. What is put in its place is another one that shares layers with it,
//! and the queues go over to that by a barrier:
//!
//! 1. **Prepare.** Every queue, on its own reactor, opens the files that the next chain has and its own has not. From then
//!    on it begins no request any more, but keeps what is submitted. Requests in flight go on. Each queue says when it is
//!    that far, or that it could not open a file. One that cannot is enough: all go on with the chain that they have.
//! 2. **Adopt.** When all queues of all disks that take part hold, all are told of the next chain. Each begins what it
//!    has kept on that one. Nothing can fail here: all files are open.
//!
//! So no request begins on the former chain once one has begun on the next. Nothing is drained: a request ends on the chain
//! that it began with, for the queue keeps that chain's files, its place in the epochs of its top layer, and a *lease*
//! ([`board::Lease`]) until its last request there has ended. The last lease's end says that the former chain is over.
//!
//! A queue is told through a task of its own on its reactor ([`attendant`]), which sleeps until something is announced: so
//! idle queues on sleeping reactors are reached, and requests pay for nothing but a look at a flag of their queue. A queue
//! that is opened meanwhile takes its seat only if nothing was announced since it looked, and holds if the others do; one
//! that is dropped leaves its seat, and what it has in flight keeps its lease.
//!
//! **A new top layer** ([`overlay`]). Requests in flight may still write to the former top while others run on the next
//! chain. Four things could go wrong, so the next chain is *handing over* until the former one is over:
//!
//! * A write to a part of a cluster copies the rest from below. If a write in flight landed below after that, its data
//!   would be hidden, although it is acknowledged. So such copies wait until the former chain is over. Reads, and writes of
//!   whole clusters, wait for nothing: a write in flight that they overlap has not been acknowledged.
//! * What is remembered of the layers below could become wrong. So there is no merged map.
//! * A flush covers what was acknowledged on the former chain. So it flushes both layers; and so does a durable write,
//!   because one takes along what was not flushed when the guest chose write-through.
//! * Space that is freed in the former top could be used again, or be given back to the host, below a read that was
//!   resolved on the next chain. So whoever exchanges has a place in the former top's epochs, until all of these have ended.
//!
//! When the former chain is over, its top is flushed, the queues go over to a chain of the same layers that is not handing
//! over (without holding anything: the two may be used at once), and when that has happened everywhere the former top is
//! closed: refcounts, dirty bit, persistent bitmaps, which stay in it. From then on it is only read.
//!
//! **Taking the top layer back** ([`take_back`]). Where the top layer holds data, nobody sees what the layer below has. So
//! the data are copied down while guests go on; what they write meanwhile is noted by a chain that notes ranges before
//! writes begin ([`change_log`]). Going over to a chain with a new log, and waiting until the former is over, gives a log
//! that is complete, whose ranges are copied once more. The last round is made while all requests are held and none is in
//! flight. Then the layer below is flushed and becomes the top.
//!
//! **More room** ([`grow`]) is a barrier too, with the format's own offline resize while nothing is in flight.

pub(crate) mod attendant;
pub(crate) mod board;
pub(crate) mod change_log;
#[cfg(all(test, feature = "explore"))]
pub(crate) mod explored;
pub(crate) mod grow;
pub(crate) mod overlay;
pub(crate) mod take_back;

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
    pub(crate) async fn prepare(disks: Vec<(Arc<Board>, Option<Arc<Layer>>)>, hold: Hold) -> Result<Self> {
        let order = |(board, layer): (Arc<Board>, _)| (board.announce(Order::Prepare { layer, hold }), board);
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
    let barrier = Barrier::prepare(vec![(Arc::clone(board), None)], Hold::No).await?;
    barrier.release(vec![Arc::new(chain)]).await;
    over.wait().await;
    Ok(())
}

/// Holds all requests of a disk and waits until none is in flight.
pub(crate) async fn hold_quiet(board: &Arc<Board>) -> Result<Barrier> {
    let over = board.over();
    let barrier = Barrier::prepare(vec![(Arc::clone(board), None)], Hold::UntilQuiet).await?;
    over.wait().await;
    Ok(barrier)
}
