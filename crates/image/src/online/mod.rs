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
//! So the data are copied down while guests go on, in rounds, and at last guests write to both layers ([`converge`]).
//! Then the layer below becomes the top. Others see how far the copy has come, and can cancel it ([`watch`]).
//!
//! **Committing a lower layer** ([`commit_layer`]). Nobody writes to it, nor to the layer below it, so one pass copies all.
//! Then the layer above names the one below as its backing file.
//!
//! **A copy elsewhere** ([`mirror`]) is made in the same way, of all layers or of the top one, and may take the disk's
//! place.
//!
//! **Other layers below** ([`move_onto`]). The top gets a copy of all that the layers that go away say, then its header
//! names another backing file, or none.
//!
//! **More room** ([`grow`]) is a barrier too, with the format's own offline resize while nothing is in flight. So are
//! changes to persistent bitmaps and internal snapshots ([`edit`]).
//!
//! **A shorter file** ([`compact`]). What lies at the end of the top layer's file moves down into holes while guests go
//! on. The rest is a change like those of bitmaps: nothing in flight, a few tables moved, the file cut off.
//!
//! **A point in time** ([`point_in_time`]). Under a temporary new top layer, the former one is what the disk was at the
//! barrier, and a backup copies it ([`copy_out`]). Then the temporary layer is taken back. So a bitmap of the former
//! top notes what was written meanwhile, when that is copied down.
//!
//! **The same files opened anew** ([`reopen`]): nothing in flight, the top closed, and a chain of fresh layers. A former
//! top that could not be made durable is closed first.

pub(crate) mod commit_layer;
pub(crate) mod compact;
pub(crate) mod converge;
pub(crate) mod copy_out;
mod copying;
pub(crate) mod edit;
#[cfg(all(test, feature = "explore"))]
pub(crate) mod explored_tests;
pub(crate) mod grow;
mod lanes;
pub(crate) mod mirror;
pub(crate) mod move_onto;
mod new_base;
pub(crate) mod overlay;
pub(crate) mod point_in_time;
mod ranges;
pub(crate) mod recent_rate;
mod reopen;
#[cfg(test)]
mod simulated_tests;
pub(crate) mod take_back;
pub(crate) mod watch;
pub(crate) mod writable;
