//! One request for a part of a file, with a limit on every wait.

use crate::answer::{Meaning, meaning};
use block::{Error, ErrorKind, Result};
use bytes::{Bytes, BytesMut};
use http_body_util::{BodyExt as _, Empty};
use hyper::body::Incoming;
use hyper::header::{ACCEPT_ENCODING, HeaderName, HeaderValue, RANGE, USER_AGENT};
use hyper::{Request, Uri};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client as Pool;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;
use std::error::Error as StdError;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::timeout;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// The time from the request to the headers of its answer.
const HEAD_TIMEOUT: Duration = Duration::from_secs(20);
/// The time between two pieces of a body.
const BODY_TIMEOUT: Duration = Duration::from_secs(15);
/// The time for a whole body, which has a megabyte at most. A slower line would be of no use.
const WHOLE_BODY_TIMEOUT: Duration = Duration::from_secs(120);
/// Unused connections are closed after this time.
const IDLE_TIMEOUT: Duration = Duration::from_secs(30);

/// The reason why a request has failed.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Failure {
    /// It may succeed later, perhaps not before this time.
    ForNow(String, Option<Duration>),
    /// It will never succeed.
    ForGood(String),
}

/// Connections to servers, kept for reuse.
#[derive(Debug, Clone)]
pub(crate) struct Client(Pool<HttpsConnector<HttpConnector>, Empty<Bytes>>);

/// A server's answer. The body has not been read.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) meaning: Meaning,
    body: Incoming,
}

impl Client {
    /// Makes a client that trusts the system's certificates, and those in `ca_file`.
    pub(crate) fn new(ca_file: Option<&Path>) -> Result<Self> {
        let mut roots = rustls::RootCertStore::empty();
        // System certificates that cannot be read are not trusted; a connection that needs one fails.
        roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        if let Some(path) = ca_file {
            let bad = |why: String| Error::new(ErrorKind::BadOption, format!("ca-file '{}': {why}", path.display()));
            let certificates = CertificateDer::pem_file_iter(path).map_err(|error| bad(error.to_string()))?;
            let before = roots.len();
            for certificate in certificates {
                let added = certificate.map_err(|error| bad(error.to_string()));
                roots.add(added?).map_err(|error| bad(error.to_string()))?;
            }
            if roots.len() == before {
                return Err(bad("there is no certificate in it".into()));
            }
        }
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let failed = |error| Error::with_source(ErrorKind::Unsupported, "TLS cannot be used", error);
        let versions = rustls::ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
        let config = versions.map_err(|error: rustls::Error| failed(error))?.with_root_certificates(roots);
        let mut http = HttpConnector::new();
        http.set_connect_timeout(Some(CONNECT_TIMEOUT));
        http.set_nodelay(true);
        http.set_keepalive(Some(IDLE_TIMEOUT));
        http.enforce_http(false);
        let tls = HttpsConnectorBuilder::new().with_tls_config(config.with_no_client_auth());
        let connector = tls.https_or_http().enable_http1().wrap_connector(http);
        let mut pool = Pool::builder(TokioExecutor::new());
        pool.pool_idle_timeout(IDLE_TIMEOUT).pool_timer(TokioTimer::new());
        Ok(Self(pool.build(connector)))
    }

    /// Asks for a part, and waits for the headers of the answer.
    pub(crate) async fn ask(
        &self,
        uri: &Uri,
        range: &Range<u64>,
        secrets: Vec<(HeaderName, HeaderValue)>,
    ) -> Result<Answer, Failure> {
        let mut request = Request::get(uri.clone());
        request = request.header(RANGE, format!("bytes={}-{}", range.start, range.end.saturating_sub(1)));
        request = request.header(ACCEPT_ENCODING, "identity");
        request = request.header(USER_AGENT, concat!("ringdisk/", env!("CARGO_PKG_VERSION")));
        for (name, value) in secrets {
            request = request.header(name, value);
        }
        let request = request.body(Empty::new()).map_err(|error| Failure::ForGood(error.to_string()))?;
        let answer = timeout(HEAD_TIMEOUT, self.0.request(request)).await;
        let answer = answer.map_err(|_| Failure::ForNow("the server does not answer".into(), None))?;
        let answer = answer.map_err(|error| failure(&error))?;
        Ok(Answer { meaning: meaning(answer.status(), answer.headers()), body: answer.into_body() })
    }
}

impl Answer {
    /// Reads the body: exactly `length_bytes` bytes.
    pub(crate) async fn bytes(self, length_bytes: usize) -> Result<Bytes, Failure> {
        let too_slow = |_| Failure::ForNow("the server sends an answer too slowly".into(), None);
        timeout(WHOLE_BODY_TIMEOUT, self.collect(length_bytes)).await.map_err(too_slow)?
    }

    async fn collect(mut self, length_bytes: usize) -> Result<Bytes, Failure> {
        let mut bytes = BytesMut::with_capacity(length_bytes);
        loop {
            let frame = timeout(BODY_TIMEOUT, self.body.frame()).await;
            let frame =
                frame.map_err(|_| Failure::ForNow("the server stopped in the middle of an answer".into(), None))?;
            match frame {
                Some(Ok(frame)) => {
                    if let Some(data) = frame.data_ref() {
                        if bytes.len().saturating_add(data.len()) > length_bytes {
                            return Err(Failure::ForNow("the server sends more than it was asked for".into(), None));
                        }
                        bytes.extend_from_slice(data);
                    }
                }
                Some(Err(error)) => return Err(failure(&error)),
                None if bytes.len() == length_bytes => return Ok(bytes.freeze()),
                None => return Err(Failure::ForNow("the server sends less than it says".into(), None)),
            }
        }
    }
}

/// Puts all causes of an error into words, each once. An untrusted certificate is a permanent failure.
fn failure(error: &(dyn StdError + 'static)) -> Failure {
    let (mut said, mut cause, mut is_final) = (Vec::new(), Some(error), false);
    while let Some(error) = cause {
        let text = error.to_string();
        if said.last().is_none_or(|last: &String| !last.contains(&text)) {
            said.push(text);
        }
        is_final |= matches!(tls_error(error), Some(rustls::Error::InvalidCertificate(_)));
        cause = error.source();
    }
    match is_final {
        true => Failure::ForGood(format!("{} (#ca-file=FILE names more that are trusted)", said.join(": "))),
        false => Failure::ForNow(said.join(": "), None),
    }
}

/// Finds an error of TLS, which an I/O error may hold without naming it as its source.
fn tls_error<'a>(error: &'a (dyn StdError + 'static)) -> Option<&'a rustls::Error> {
    match error.downcast_ref::<std::io::Error>().and_then(std::io::Error::get_ref) {
        Some(inner) => tls_error(inner),
        None => error.downcast_ref(),
    }
}
