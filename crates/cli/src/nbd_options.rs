//! Where NBD clients connect and how they use TLS: options of the commands that serve them.

use control::api::AddTls;
use daemon::NbdAddress;
use std::path::{Path, PathBuf};

/// Options about TLS for NBD clients.
#[derive(clap::Args)]
pub(crate) struct TlsArgs {
    /// Serve NBD clients with TLS. DIRECTORY has ca-cert.pem, server-cert.pem and server-key.pem, or only a keys.psk with
    /// keys that clients share, as for QEMU.
    #[arg(long, value_name = "DIRECTORY")]
    pub(crate) tls_creds: Option<PathBuf>,
    /// Whether clients must use TLS, or may.
    #[arg(long, value_enum, default_value = "required", requires = "tls_creds")]
    tls: TlsUse,
    /// Whether clients need a certificate of the same authority. With keys.psk they need a key.
    #[arg(long, value_enum, default_value = "on", requires = "tls_creds")]
    tls_verify_peer: Verify,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum TlsUse {
    Required,
    Allow,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Verify {
    On,
    Off,
}

impl TlsArgs {
    /// Returns the TLS settings, if TLS is requested.
    pub(crate) fn asked(&self) -> Option<AddTls> {
        let credentials = drive::absolute(self.tls_creds.as_deref()?);
        let (required, verify_peer) = (self.tls == TlsUse::Required, self.tls_verify_peer == Verify::On);
        Some(AddTls { credentials, required, verify_peer })
    }
}

/// Reads where NBD clients connect: a Unix socket, a passed socket (`fd:NAME`), or an address to listen at.
pub(crate) fn place(word: &str) -> block::Result<(Option<PathBuf>, Option<String>)> {
    if word.starts_with(PASSED) {
        return Ok((Some(word.into()), None));
    }
    Ok(match NbdAddress::parse(word)? {
        NbdAddress::Tcp(address) => (None, Some(address)),
        _ => (Some(drive::absolute(Path::new(word))), None),
    })
}

/// How a passed socket is named.
const PASSED: &str = "fd:";

/// Returns the word for a socket that was passed, if it is one.
pub(crate) fn passed_word(socket: &Path) -> Option<&str> {
    socket.to_str()?.strip_prefix(PASSED)
}

/// Makes a socket's path absolute, unless it is a passed socket.
pub(crate) fn absolute_or_passed(socket: &Path) -> PathBuf {
    if passed_word(socket).is_some() { socket.to_owned() } else { drive::absolute(socket) }
}

/// Checks a socket's permissions.
pub(crate) fn socket_mode(text: &str) -> Result<String, String> {
    drive::parse_socket_mode(text).map(|_| text.to_owned()).map_err(|error| error.to_string())
}
