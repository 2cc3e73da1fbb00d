//! Tells the service manager how we are (the sd_notify protocol: one datagram to `$NOTIFY_SOCKET`).

use std::ffi::OsStr;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// Sends `state` ("READY=1", "STOPPING=1") if a service manager listens; otherwise does nothing.
pub fn notify(state: &str) {
    let Some(name) = std::env::var_os("NOTIFY_SOCKET") else { return };
    if let Err(error) = send(&name, state) {
        tracing::warn!("cannot tell the service manager '{state}' at {}: {error}", name.display());
    }
}

fn send(name: &OsStr, state: &str) -> io::Result<()> {
    let address = match name.as_bytes() {
        [b'@', rest @ ..] => SocketAddr::from_abstract_name(rest)?,
        _ => SocketAddr::from_pathname(name)?,
    };
    UnixDatagram::unbound()?.send_to_addr(state.as_bytes(), &address).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_state_arrives_at_paths_and_abstract_names() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notify");
        let abstract_name = format!("ringdisk-notify-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(abstract_name.as_bytes()).unwrap();
        let cases = [
            (path.clone().into_os_string(), UnixDatagram::bind(&path).unwrap()),
            (format!("@{abstract_name}").into(), UnixDatagram::bind_addr(&address).unwrap()),
        ];
        for (name, socket) in cases {
            send(&name, "READY=1").unwrap();
            let mut buf = [0; 16];
            let length = socket.recv(&mut buf).unwrap();
            assert_eq!(&buf[..length], b"READY=1");
        }
    }
}
