//! Certificates and keys, in the directory layout that QEMU and libnbd share.

use block::{Error, ErrorKind, Result};
use rustls::client::WebPkiServerVerifier;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer, ServerName};
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, ClientConnection, Connection, RootCertStore, ServerConfig};
use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A directory with `ca-cert.pem`, perhaps `ca-crl.pem` (the certificates that this authority has revoked), and
/// `server-cert.pem` with `server-key.pem`, or `client-cert.pem` with `client-key.pem`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Credentials(PathBuf);

type Own = (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>);

impl Credentials {
    /// Names the files in `directory`. Nothing is read yet.
    pub fn in_directory(directory: impl Into<PathBuf>) -> Self {
        Self(directory.into())
    }

    /// Reads the files of a server. If it verifies its peers, clients need a certificate of the same authority.
    pub fn server(&self, verifies_peers: bool) -> Result<Arc<ServerConfig>> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ServerConfig::builder_with_provider(Arc::clone(&provider));
        let builder = builder.with_safe_default_protocol_versions().map_err(|error| self.bad("", &error))?;
        let builder = match verifies_peers {
            true => {
                let roots = Arc::new(self.authorities()?);
                let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider);
                // As in QEMU, an authority without a list has revoked nothing. With an expired list, all are refused.
                let verifier = verifier.with_crls(self.revoked()?).allow_unknown_revocation_status();
                let verifier = verifier.enforce_revocation_expiration().build();
                builder.with_client_cert_verifier(verifier.map_err(|error| self.bad("ca-cert.pem", &error))?)
            }
            false => builder.with_no_client_auth(),
        };
        let (chain, key) = self.own("server")?;
        let config = builder.with_single_cert(chain, key);
        Ok(Arc::new(config.map_err(|error| self.bad("server-cert.pem", &error))?))
    }

    /// Reads the files of a client. The client shows a certificate of its own if there is one.
    pub fn client(&self) -> Result<Arc<ClientConfig>> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ClientConfig::builder_with_provider(Arc::clone(&provider)).with_safe_default_protocol_versions();
        let verifier = WebPkiServerVerifier::builder_with_provider(Arc::new(self.authorities()?), provider);
        let verifier = verifier.with_crls(self.revoked()?).allow_unknown_revocation_status();
        let verifier = verifier.enforce_revocation_expiration().build();
        let verifier = verifier.map_err(|error| self.bad("ca-cert.pem", &error))?;
        let builder = builder.map_err(|error| self.bad("", &error))?.with_webpki_verifier(verifier);
        Ok(Arc::new(match self.0.join("client-cert.pem").exists() {
            true => {
                let (chain, key) = self.own("client")?;
                builder.with_client_auth_cert(chain, key).map_err(|error| self.bad("client-cert.pem", &error))?
            }
            false => builder.with_no_client_auth(),
        }))
    }

    /// Makes a client's session with the server `host`; the server's certificate must be for that name.
    pub fn connect(&self, host: &str) -> Result<Connection> {
        let name = ServerName::try_from(host.to_owned());
        let name = name.map_err(|_| Error::new(ErrorKind::BadOption, format!("'{host}' is no name of a server")))?;
        let connection = ClientConnection::new(self.client()?, name).map_err(|error| self.bad("", &error))?;
        Ok(Connection::Client(connection))
    }

    fn bad(&self, file: &str, why: &dyn Display) -> Error {
        Error::new(ErrorKind::BadOption, format!("TLS credentials '{}': {why}", self.path(file).display()))
    }

    /// Whether that file exists.
    pub(crate) fn has(&self, file: &str) -> bool {
        self.0.join(file).exists()
    }

    pub(crate) fn path(&self, file: &str) -> PathBuf {
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

    /// Reads the lists of revoked certificates, if there are any.
    fn revoked(&self) -> Result<Vec<CertificateRevocationListDer<'static>>> {
        const FILE: &str = "ca-crl.pem";
        // If the file exists and cannot be read, that is an error: it says whom to refuse.
        if !self.path(FILE).try_exists().map_err(|error| self.bad(FILE, &error))? {
            return Ok(Vec::new());
        }
        let read = CertificateRevocationListDer::pem_file_iter(self.path(FILE));
        let found = read.and_then(Iterator::collect::<std::result::Result<Vec<_>, _>>);
        let found = found.map_err(|error| self.bad(FILE, &error))?;
        if found.is_empty() {
            return Err(self.bad(FILE, &"there is no list of revoked certificates in it"));
        }
        Ok(found)
    }

    fn own(&self, role: &str) -> Result<Own> {
        let key = format!("{role}-key.pem");
        let read = PrivateKeyDer::from_pem_file(self.path(&key)).map_err(|error| self.bad(&key, &error))?;
        Ok((self.certificates(&format!("{role}-cert.pem"))?, read))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shake_hands;
    use rcgen::{
        BasicConstraints, CertificateParams, CertificateRevocationListParams, ExtendedKeyUsagePurpose, IsCa, Issuer,
        KeyIdMethod, KeyPair, KeyUsagePurpose, RevokedCertParams, SerialNumber, date_time_ymd,
    };
    use std::os::unix::net::UnixStream;

    const SERVER: u64 = 11;
    const CLIENT: u64 = 12;

    /// An authority with a server and a client, and what writes its list of revoked ones.
    fn authority(directory: &Path) -> impl Fn(&[u64], i32) + use<> {
        let directory = directory.to_owned();
        let write = move |name: &str, text: String| std::fs::write(directory.join(name), text).unwrap();
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        write("ca-cert.pem", params.self_signed(&key).unwrap().pem());
        let issuer = Issuer::new(params, key);
        for (role, serial, usage) in [
            ("server", SERVER, ExtendedKeyUsagePurpose::ServerAuth),
            ("client", CLIENT, ExtendedKeyUsagePurpose::ClientAuth),
        ] {
            let own = KeyPair::generate().unwrap();
            let mut params = CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
            params.serial_number = Some(SerialNumber::from(serial));
            params.extended_key_usages = vec![usage];
            write(&format!("{role}-cert.pem"), params.signed_by(&own, &issuer).unwrap().pem());
            write(&format!("{role}-key.pem"), own.serialize_pem());
        }
        move |serials, until| {
            let revoked = serials.iter().map(|serial| RevokedCertParams {
                serial_number: SerialNumber::from(*serial),
                revocation_time: date_time_ymd(2020, 1, 1),
                reason_code: None,
                invalidity_date: None,
            });
            let list = CertificateRevocationListParams {
                this_update: date_time_ymd(2020, 1, 1),
                next_update: date_time_ymd(until, 1, 1),
                crl_number: SerialNumber::from(1),
                issuing_distribution_point: None,
                revoked_certs: revoked.collect(),
                key_identifier_method: KeyIdMethod::Sha256,
            };
            write("ca-crl.pem", list.signed_by(&issuer).unwrap().pem().unwrap());
        }
    }

    /// Whether the server and the client accept each other.
    fn accept(directory: &Path) -> [bool; 2] {
        let credentials = Credentials::in_directory(directory);
        let (mut to_server, mut to_client) = UnixStream::pair().unwrap();
        let config = credentials.server(true).unwrap();
        let mut server = Connection::Server(rustls::ServerConnection::new(config).unwrap());
        let serves = std::thread::spawn(move || shake_hands(&mut server, &mut to_client).is_ok());
        let mut client = credentials.connect("localhost").unwrap();
        let client = shake_hands(&mut client, &mut to_server).is_ok();
        // What the server still says has a place.
        to_server.shutdown(std::net::Shutdown::Write).unwrap();
        [serves.join().unwrap(), client]
    }

    #[test]
    fn who_was_revoked_is_refused_on_both_sides() {
        let directory = tempfile::tempdir().unwrap();
        let revoke = authority(directory.path());
        assert_eq!(accept(directory.path()), [true, true], "no list");
        revoke(&[99], 4000);
        assert_eq!(accept(directory.path()), [true, true]);
        revoke(&[CLIENT], 4000);
        assert!(!accept(directory.path())[0], "the client");
        revoke(&[SERVER], 4000);
        assert!(!accept(directory.path())[1], "the server");
        revoke(&[99], 2021);
        assert!(!accept(directory.path())[1], "a list that is out of date");
        std::fs::write(directory.path().join("ca-crl.pem"), "no list").unwrap();
        let credentials = Credentials::in_directory(directory.path());
        for error in [credentials.server(true).map(drop), credentials.client().map(drop)] {
            assert!(error.unwrap_err().to_string().contains("ca-crl.pem"));
        }
    }
    #[test]
    fn credentials_that_are_missing_are_named() {
        let directory = tempfile::tempdir().unwrap();
        let credentials = Credentials::in_directory(directory.path());
        assert!(credentials.server(true).unwrap_err().to_string().contains("ca-cert.pem"));
        let _ = authority(directory.path());
        std::fs::remove_file(directory.path().join("server-key.pem")).unwrap();
        assert!(credentials.server(true).unwrap_err().to_string().contains("server-key.pem"));
        assert!(credentials.connect("no name").is_err() && credentials.connect("localhost").is_ok());
    }
}
