//! What serves disks: vhost-user sockets, and NBD servers at addresses.

mod addresses;
pub(crate) mod front;
pub(crate) mod servers;
