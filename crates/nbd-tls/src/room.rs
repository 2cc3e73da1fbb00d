//! The size of a Unix socket's send buffer.

use std::os::unix::net::UnixStream;

/// The size asked for. The kernel reduces it to the host's limit.
const ROOM_BYTES: usize = 1 << 20;

/// Makes the send buffer as large as the host allows, usually twice the default, so that a sender of long payloads is
/// woken up less often. Errors are ignored: the socket works without.
pub fn widen(socket: &UnixStream) {
    let _ = rustix::net::sockopt::set_socket_send_buffer_size(socket, ROOM_BYTES);
}
