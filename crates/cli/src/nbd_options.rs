//! Where NBD clients come in and how they use TLS, as the commands that serve them take it.

use control::api::AddTls;
use daemon::NbdAddress;
use std::path::PathBuf;

/// Options about TLS for NBD clients.
#[derive(clap::Args)]
pub(crate) struct TlsArgs {
    /// Serve NBD clients with TLS. DIRECTORY has ca-cert.pem, server-cert.pem and server-key.pem, as for QEMU.
    #[arg(long, value_name = "DIRECTORY")]
    pub(crate) tls_creds: Option<PathBuf>,
    /// Whether clients must use TLS, or may.
    #[arg(long, value_enum, default_value = "required", requires = "tls_creds")]
    tls: TlsUse,
    /// Whether clients need a certificate of the same authority.
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
    /// What they ask for, if for anything.
    pub(crate) fn asked(&self) -> Option<AddTls> {
        let credentials = daemon::absolute(self.tls_creds.as_deref()?);
        let (required, verify_peer) = (self.tls == TlsUse::Required, self.tls_verify_peer == Verify::On);
        Some(AddTls { credentials, required, verify_peer })
    }
}

/// A word that says where NBD clients come in: a Unix socket, or an address to listen at.
pub(crate) fn place(word: &str) -> (Option<PathBuf>, Option<String>) {
    match NbdAddress::parse(word) {
        NbdAddress::Unix(path) => (Some(path), None),
        NbdAddress::Tcp(address) => (None, Some(address)),
    }
}
