//! The task that carries out orders for a queue, on the queue's reactor.

use super::Core;
#[cfg(all(test, feature = "explore"))]
use crate::chain::exchange::board::Hold;
use crate::chain::exchange::board::{Bell, Board, Order, Seat};
use block::Result;
use std::cell::RefCell;
use std::rc::Weak;
use std::sync::Arc;

/// Carries out the board's orders until the queue or the image is gone. Holds neither while it sleeps, so that their
/// files are closed when their owners drop them.
pub(crate) async fn attend(
    core: Weak<RefCell<Core>>,
    board: std::sync::Weak<Board>,
    bell: Arc<Bell>,
    seat: Arc<Seat>,
    mut seen: u64,
) {
    let post = Post { core, bell, seat };
    loop {
        post.bell.next(seen, &post.seat).await;
        let (Some(core), Some(board)) = (post.core.upgrade(), board.upgrade()) else { return };
        let (number, order) = board.order();
        seen = number;
        let result = match order {
            Some(order) => carry_out(&mut core.borrow_mut(), &board, &post.seat, &order),
            None => Ok(()),
        };
        drop((core, board));
        post.bell.answer(&post.seat, number, result);
    }
}

fn carry_out(core: &mut Core, board: &Board, seat: &Arc<Seat>, order: &Order) -> Result<()> {
    match order {
        #[cfg(all(test, feature = "explore"))]
        Order::Prepare { layers, hold: Hold::Requests } if board.mutant.is_late() => core.prepare(layers, Hold::No),
        Order::Prepare { layers, hold } => core.prepare(layers, *hold),
        Order::Adopt(_, lease) if board.is_late(seat) => {
            core.resume(lease);
            Ok(())
        }
        Order::Adopt(chain, lease) => {
            core.adopt(chain, lease);
            Ok(())
        }
        Order::Resume(lease) => {
            core.resume(lease);
            Ok(())
        }
    }
}

/// Held by an attendant. If the reactor ends and drops the attendant before the queue, the queue begins no more
/// requests: it would not hear of another chain.
struct Post {
    core: Weak<RefCell<Core>>,
    bell: Arc<Bell>,
    seat: Arc<Seat>,
}

impl Drop for Post {
    fn drop(&mut self) {
        if let Some(core) = self.core.upgrade()
            && let Ok(mut core) = core.try_borrow_mut()
        {
            core.orphan();
        }
        self.bell.leave(&self.seat);
    }
}
