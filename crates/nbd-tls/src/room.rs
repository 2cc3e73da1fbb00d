//! How much lies in a Unix socket.

use std::os::unix::net::UnixStream;

/// More than the host allows is cut by the kernel to what it does.
const ROOM_BYTES: usize = 1 << 20;

/// Lets as much lie in a socket as the host allows, twice of what is usual: so a sender of long payloads is woken up less
/// often. It is a wish: a socket is as good without.
pub fn widen(socket: &UnixStream) {
    let _ = rustix::net::sockopt::set_socket_send_buffer_size(socket, ROOM_BYTES);
}
