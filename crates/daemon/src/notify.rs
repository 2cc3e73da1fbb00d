//! Tells the service manager our state (the sd_notify protocol: one datagram to `$NOTIFY_SOCKET`).

use std::ffi::OsStr;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

/// Returns how long the service manager waits for "WATCHDOG=1" before it takes this process for dead; `None` if it does
/// not watch (sd_watchdog_enabled(3)).
#[must_use]
pub fn watchdog_interval() -> Option<Duration> {
    read_watchdog_interval(std::process::id(), |name| std::env::var(name).ok())
}

fn read_watchdog_interval(process: u32, variable: impl Fn(&str) -> Option<String>) -> Option<Duration> {
    let is_ours = variable("WATCHDOG_PID").is_none_or(|watched| watched.parse() == Ok(process));
    let microseconds = variable("WATCHDOG_USEC").filter(|_| is_ours)?.parse().ok()?;
    (microseconds > 0).then_some(Duration::from_micros(microseconds))
}

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
    fn only_the_process_that_is_watched_has_an_interval() {
        let interval = |variables: &[(&str, &str)]| {
            let value =
                |name: &str| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
            read_watchdog_interval(77, value)
        };
        let seconds = Some(Duration::from_secs(3));
        assert_eq!(interval(&[("WATCHDOG_USEC", "3000000")]), seconds);
        assert_eq!(interval(&[("WATCHDOG_USEC", "3000000"), ("WATCHDOG_PID", "77")]), seconds);
        for other in [&[] as &[(&str, &str)], &[("WATCHDOG_USEC", "0")], &[("WATCHDOG_USEC", "x")]] {
            assert_eq!(interval(other), None);
        }
        assert_eq!(interval(&[("WATCHDOG_USEC", "3000000"), ("WATCHDOG_PID", "78")]), None);
    }

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
