//! What is done to images while guests use them: each exchanges the chain of layers by a barrier
//! ([`crate::chain::exchange`]).
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
//! So the data are copied down while guests go on. Meanwhile the chain has a log
//! ([`crate::chain::exchange::change_log`]), which notes ranges before writes to them begin. To get a complete log, the
//! queues go over to a chain with a new log, until the former chain is over. The ranges of the complete log are copied again. The last round is made while all requests are held
//! and none is in flight. Then the layer below is flushed and becomes the top.
//! Others see how far the copy has come, and can cancel it ([`watch`]).
//!
//! **Other layers below** ([`move_onto`]). The top gets a copy of all that the layers that go away say, then its header
//! names another backing file, or none.
//!
//! **More room** ([`grow`]) is a barrier too, with the format's own offline resize while nothing is in flight. So are
//! changes to persistent bitmaps and internal snapshots ([`edit`]).
//!
//! **A point in time** ([`point_in_time`]). Under a temporary new top layer, the former one is what the disk was at the
//! barrier, and a backup copies it ([`copy_out`]). Then the temporary layer is taken back. So a bitmap of the former top
//! notes what was written meanwhile, when that is copied down.

pub(crate) mod copy_out;
pub(crate) mod edit;
#[cfg(all(test, feature = "explore"))]
pub(crate) mod explored_tests;
pub(crate) mod grow;
pub(crate) mod move_onto;
pub(crate) mod overlay;
pub(crate) mod point_in_time;
pub(crate) mod take_back;
pub(crate) mod watch;
