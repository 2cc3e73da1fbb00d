//! Certificates and keys, in the directory layout that QEMU and libnbd share.

use block::{Error, ErrorKind, Result};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, ClientConnection, Connection, RootCertStore, ServerConfig};
use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A directory with `ca-cert.pem`, and `server-cert.pem` with `server-key.pem`, or `client-cert.pem` with `client-key.pem`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Credentials(PathBuf);

type Own = (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>);

impl Credentials {
    /// Those in `directory`. Nothing is read yet.
    pub fn in_directory(directory: impl Into<PathBuf>) -> Self {
        Self(directory.into())
    }

    /// What a server needs. If it verifies its peers, clients need a certificate of the same authority.
    pub fn server(&self, verifies_peers: bool) -> Result<Arc<ServerConfig>> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ServerConfig::builder_with_provider(Arc::clone(&provider));
        let builder = builder.with_safe_default_protocol_versions().map_err(|error| self.bad("", &error))?;
        let builder = match verifies_peers {
            true => {
                let roots = Arc::new(self.authorities()?);
                let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider).build();
                builder.with_client_cert_verifier(verifier.map_err(|error| self.bad("ca-cert.pem", &error))?)
            }
            false => builder.with_no_client_auth(),
        };
        let (chain, key) = self.own("server")?;
        let config = builder.with_single_cert(chain, key);
        Ok(Arc::new(config.map_err(|error| self.bad("server-cert.pem", &error))?))
    }

    /// What a client needs. It shows a certificate of its own if there is one.
    pub fn client(&self) -> Result<Arc<ClientConfig>> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
        let builder = builder.map_err(|error| self.bad("", &error))?.with_root_certificates(self.authorities()?);
        Ok(Arc::new(match self.0.join("client-cert.pem").exists() {
            true => {
                let (chain, key) = self.own("client")?;
                builder.with_client_auth_cert(chain, key).map_err(|error| self.bad("client-cert.pem", &error))?
            }
            false => builder.with_no_client_auth(),
        }))
    }

    /// A client's connection to the server of that name, which its certificate has to have.
    pub fn connect(&self, host: &str) -> Result<Connection> {
        let name = ServerName::try_from(host.to_owned());
        let name = name.map_err(|_| Error::new(ErrorKind::BadOption, format!("'{host}' is no name of a server")))?;
        let connection = ClientConnection::new(self.client()?, name).map_err(|error| self.bad("", &error))?;
        Ok(Connection::Client(connection))
    }

    fn bad(&self, file: &str, why: &dyn Display) -> Error {
        Error::new(ErrorKind::BadOption, format!("TLS credentials '{}': {why}", self.path(file).display()))
    }

    fn path(&self, file: &str) -> PathBuf {
        if file.is_empty() { self.0.clone() } else { self.0.join(file) }
    }

    fn certificates(&self, file: &str) -> Result<Vec<CertificateDer<'static>>> {
        let read = CertificateDer::pem_file_iter(Path::new(&self.path(file)));
        let found = read.and_then(Iterator::collect::<std::result::Result<Vec<_>, _>>);
        let found = found.map_err(|error| self.bad(file, &error))?;
        if found.is_empty() {
            return Err(self.bad(file, &"there is no certificate in it"));
        }
        Ok(found)
    }

    fn authorities(&self) -> Result<RootCertStore> {
        let mut roots = RootCertStore::empty();
        for certificate in self.certificates("ca-cert.pem")? {
            roots.add(certificate).map_err(|error| self.bad("ca-cert.pem", &error))?;
        }
        Ok(roots)
    }

    fn own(&self, role: &str) -> Result<Own> {
        let key = format!("{role}-key.pem");
        let read = PrivateKeyDer::from_pem_file(self.path(&key)).map_err(|error| self.bad(&key, &error))?;
        Ok((self.certificates(&format!("{role}-cert.pem"))?, read))
    }
}
