//! The user's credentials for a server. They come from files, as everybody can see names and arguments.

use crate::url::HttpOptions;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use block::{Error, ErrorKind, Result};
use hyper::Uri;
use hyper::header::{AUTHORIZATION, HeaderName, HeaderValue};
use std::path::{Path, PathBuf};

/// The longest file with secrets.
const FILE_BYTES_MAX: u64 = 1 << 20;

const HTTPS_PORT: u16 = 443;

/// Headers that only this user's requests carry. Debug shows none of them.
#[derive(Clone, Default)]
pub(crate) struct Secrets {
    /// The host and port that `headers` are for.
    host: String,
    headers: Vec<(HeaderName, HeaderValue)>,
    accounts: Vec<Account>,
}

impl std::fmt::Debug for Secrets {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Secrets").finish_non_exhaustive()
    }
}

/// A line of a netrc file.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
struct Account {
    /// `None` for any host.
    machine: Option<String>,
    login: String,
    password: String,
}

impl Secrets {
    /// Reads the files that the user named.
    pub(crate) fn read(uri: &Uri, options: &HttpOptions) -> Result<Self> {
        let netrc = options.netrc_file.clone().or_else(|| std::env::var_os("NETRC").map(PathBuf::from));
        let accounts = netrc.map(|path| read(&path)).transpose()?.map_or_else(Vec::new, |text| accounts(&text));
        let headers = match &options.headers_file {
            Some(path) => headers(path, &read(path)?)?,
            None => Vec::new(),
        };
        Ok(Self { host: place(uri), headers, accounts })
    }

    /// Returns the headers for a request to `uri`, which may be where a redirect has led.
    pub(crate) fn for_uri(&self, uri: &Uri) -> Vec<(HeaderName, HeaderValue)> {
        let own = if place(uri) == self.host { self.headers.clone() } else { Vec::new() };
        let host = uri.host().unwrap_or_default();
        let account = self
            .accounts
            .iter()
            .find(|account| account.machine.as_deref().is_none_or(|name| name.eq_ignore_ascii_case(host)));
        // After a redirect, a password is sent only to its own host, under TLS, at the default port: another port may
        // belong to somebody else. `default` is only for the server that the user named.
        let is_own = place(uri) == self.host;
        let is_safe = uri.scheme_str() == Some("https") && uri.port_u16().is_none_or(|port| port == HTTPS_PORT);
        let account = account.filter(|account| is_own || is_safe && account.machine.is_some());
        let basic = account.and_then(|Account { login, password, .. }| {
            let text = format!("Basic {}", STANDARD.encode(format!("{login}:{password}")));
            let mut value = HeaderValue::try_from(text).ok()?;
            value.set_sensitive(true);
            Some((AUTHORIZATION, value))
        });
        let says_itself = own.iter().any(|(name, _)| name == AUTHORIZATION);
        own.into_iter().chain(basic.filter(|_| !says_itself)).collect()
    }
}

fn place(uri: &Uri) -> String {
    format!("{}://{}", uri.scheme_str().unwrap_or_default(), uri.authority().map_or("", |authority| authority.as_str()))
}

fn read(path: &Path) -> Result<String> {
    let failed = |error| Error::io(format!("cannot read '{}'", path.display()), error);
    let length = std::fs::metadata(path).map_err(failed)?.len();
    if length > FILE_BYTES_MAX {
        return Err(Error::new(
            ErrorKind::BadOption,
            format!("'{}' is too long for a file of secrets", path.display()),
        ));
    }
    std::fs::read_to_string(path).map_err(failed)
}

fn accounts(text: &str) -> Vec<Account> {
    let mut found: Vec<Account> = Vec::new();
    let mut words = text.lines().filter(|line| !line.trim_start().starts_with('#')).flat_map(str::split_whitespace);
    while let Some(word) = words.next() {
        match (word, found.last_mut()) {
            ("machine", _) => found.push(Account { machine: words.next().map(str::to_owned), ..Account::default() }),
            ("default", _) => found.push(Account::default()),
            ("login", Some(last)) => last.login = words.next().unwrap_or_default().to_owned(),
            ("password", Some(last)) => last.password = words.next().unwrap_or_default().to_owned(),
            _ => {}
        }
    }
    found
}

fn headers(path: &Path, text: &str) -> Result<Vec<(HeaderName, HeaderValue)>> {
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let read = |(number, line): (usize, &str)| {
        // The message must not show the line, which is a secret.
        let bad = || {
            let place = format!("'{}', line {}", path.display(), number.saturating_add(1));
            Error::new(ErrorKind::BadOption, format!("{place}: a header is written as 'Name: value'"))
        };
        let (name, value) = line.split_once(':').ok_or_else(bad)?;
        let mut value = HeaderValue::try_from(value.trim()).map_err(|_| bad())?;
        value.set_sensitive(true);
        Ok((HeaderName::try_from(name.trim()).map_err(|_| bad())?, value))
    };
    lines.map(read).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_go_to_the_server_that_they_are_for_and_to_no_other() {
        let directory = tempfile::tempdir().unwrap();
        let (netrc, lines) = (directory.path().join("netrc"), directory.path().join("headers"));
        std::fs::write(
            &netrc,
            "# mine\nmachine a login me password x\nmachine b\n login you password y\ndefault login z password z",
        )
        .unwrap();
        std::fs::write(&lines, "X-Token: t\n\n").unwrap();
        let options =
            HttpOptions { netrc_file: Some(netrc), headers_file: Some(lines.clone()), ..HttpOptions::default() };
        let uri = |text: &str| text.parse::<Uri>().unwrap();
        let secrets = Secrets::read(&uri("https://a/x"), &options).unwrap();
        let sent = |text: &str| -> Vec<String> {
            let sent = secrets.for_uri(&uri(text));
            sent.iter().map(|(name, value)| format!("{name}={}", value.to_str().unwrap())).collect()
        };
        let basic = |pair: &str| format!("authorization=Basic {}", STANDARD.encode(pair));
        assert_eq!(sent("https://a/y"), ["x-token=t".to_owned(), basic("me:x")]);
        assert_eq!(sent("https://b/y"), [basic("you:y")]);
        assert_eq!(sent("https://b:443/y"), [basic("you:y")]);
        for elsewhere in ["https://a:8/y", "https://b:8443/y", "http://a/y", "http://b/y", "https://c/y"] {
            assert!(sent(elsewhere).is_empty(), "{elsewhere}");
        }
        let plain =
            Secrets::read(&uri("http://a:80/x"), &HttpOptions { headers_file: None, ..options.clone() }).unwrap();
        assert!(plain.for_uri(&uri("http://a:80/y")).len() == 1 && plain.for_uri(&uri("http://b/y")).is_empty());
        assert!(!format!("{secrets:?}").contains('t'.to_string().repeat(2).as_str()));
        std::fs::write(&lines, "token only").unwrap();
        let error = Secrets::read(&uri("https://a/x"), &options).unwrap_err().to_string();
        assert!(error.contains("line 1") && !error.contains("token only"), "{error}");
    }
}
