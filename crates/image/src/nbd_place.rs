//! Which disk of an NBD server a URI names: where the server is, and the name of its export. All else in a URI says how
//! the disk is used, and with which credentials.

use nbd_wire::{Server, Uri};
use std::borrow::Cow;
use std::net::IpAddr;

/// Takes a URI apart; `None` if it names no place. Hosts are the same in capitals.
fn parse(uri: &str) -> Option<Uri> {
    let mut uri = Uri::parse(uri).ok()?;
    if let Server::Tcp(host, _) = &mut uri.server {
        host.make_ascii_lowercase();
    }
    Some(uri)
}

/// Returns the URI that says where the disk is, and nothing else. One that names no place loses its options.
pub(crate) fn without_options(uri: &str) -> Cow<'_, str> {
    match parse(uri) {
        Some(place) => Cow::Owned(place.address()),
        None => Cow::Borrowed(uri.split_once('?').map_or(uri, |(place, _)| place)),
    }
}

/// Whether two URIs lead to one disk, with or without TLS.
pub(crate) fn is_same(one: &str, other: &str) -> bool {
    let disk = |uri| parse(uri).map(|uri| (canonical(uri.server), uri.export));
    disk(one).zip(disk(other)).map_or(one == other, |(one, other)| one == other)
}

/// One form of all names that surely lead to a server: a socket's path without links, and one name of this host.
fn canonical(server: Server) -> Server {
    match server {
        Server::Unix(socket) => {
            Server::Unix(socket.canonicalize().or_else(|_| std::path::absolute(&socket)).unwrap_or(socket))
        }
        Server::Tcp(host, port) => {
            let host = match host.parse::<IpAddr>() {
                Ok(address) if address.is_loopback() => "localhost".to_owned(),
                Ok(address) => address.to_string(),
                Err(_) => host,
            };
            Server::Tcp(host, port)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn a_disk_is_named_by_its_place_and_its_export_alone() {
        for (uri, place) in [
            ("nbd://h/x", "nbd://h/x"),
            ("nbd://H:10809/x?connections=4", "nbd://h/x"),
            ("nbd://me:secret@h:99/a%20b", "nbd://h:99/a%20b"),
            ("nbd://h", "nbd://h/"),
            ("nbds://h/x?tls-certificates=/pki/me&reconnect-s=5", "nbds://h/x"),
            ("nbds://[::1]:7/x", "nbds://[::1]:7/x"),
            ("nbd://[::1]7/x?connections=1", "nbd://[::1]7/x"),
            ("nbd+unix:///%61?connections=2&socket=/run/a%2Fb+c", "nbd+unix:///a?socket=/run/a/b%2Bc"),
            ("nbds+unix:///a?tls-hostname=h&socket=/s", "nbds+unix:///a?socket=/s"),
            ("nbd+unix:///a%ff?socket=/s", "nbd+unix:///a%FF?socket=/s"),
            ("nbd://h:99999/x?connections=1", "nbd://h:99999/x"),
        ] {
            assert_eq!(without_options(uri), place, "{uri}");
            assert_eq!(without_options(place), place, "and it stays so");
        }
    }

    #[test]
    fn other_spellings_and_options_are_no_other_disk() {
        for (one, other) in [
            ("nbd://h/x", "nbd://h:10809/x?reconnect-s=5"),
            ("nbd://h/x", "nbds://me@H/%78?tls-certificates=/d"),
            ("nbd://localhost/x", "nbd://127.0.0.1/x"),
            ("nbd://[::1]/x", "nbd://[0:0:0:0:0:0:0:1]/x"),
            ("nbd+unix:///?socket=/run/s", "nbd+unix:///?connections=1&socket=%2Frun%2Fs"),
        ] {
            assert!(is_same(one, other) && is_same(other, one), "{one} {other}");
        }
        for (one, other) in [
            ("nbd://h/x", "nbd://h/y"),
            ("nbd://h/x", "nbd://h:10810/x"),
            ("nbd://h/x", "nbd://i/x"),
            ("nbd://h/a", "nbd://h/A"),
            ("nbd+unix:///a?socket=/s", "nbd+unix:///a?socket=/t"),
            ("nbd+unix:///a?socket=/s", "nbd://s/a"),
        ] {
            assert!(!is_same(one, other), "{one} {other}");
        }
    }

    #[test]
    fn links_to_a_socket_lead_to_one_disk() {
        let dir = tempfile::tempdir().unwrap();
        let [socket, link] = ["socket", "link"].map(|name| dir.path().join(name));
        std::fs::write(&socket, "").unwrap();
        std::os::unix::fs::symlink(&socket, &link).unwrap();
        let uri = |path: &Path| format!("nbd+unix:///x?socket={}", path.display());
        assert!(is_same(&uri(&socket), &uri(&link)));
        assert!(is_same(&uri(&dir.path().join("./socket")), &uri(&socket)));
    }
}
