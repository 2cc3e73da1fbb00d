//! Options of a socket's guest, which is the driver in this process: `path=request,callbacks=kept`, for all targets
//! (`--guest`) or for one (`guest.path=request` among its options). And options of the server of a `serve:` target.

use crate::output::usage;
use drive::{KeyValue, parse_key_values, unknown};
use driver::{Driver, DriverOptions, DriverPath};
use std::path::PathBuf;

const KEYS: [&str; 5] = ["path", "callbacks", "event-idx", "indirect", "packed"];
/// The prefix of such a key among a target's options.
const PREFIX: &str = "guest.";

/// The server of a `serve:` target.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ServerOptions {
    /// Whether its reactors look for completions in turns that submit, too (`server.harvest=always`), or only in others
    /// (`idle`).
    pub(super) harvest_after_submit: bool,
    /// The file of a second disk with the same options (`server.beside=FILE`).
    pub(super) beside: Option<PathBuf>,
}

impl Default for ServerOptions {
    fn default() -> Self {
        Self { harvest_after_submit: true, beside: None }
    }
}

impl ServerOptions {
    const KEYS: [&str; 2] = ["harvest", "beside"];

    /// Splits the server's options from a target's: `file=x,server.harvest=idle` gives `file=x` and `harvest=idle`.
    pub(super) fn split(text: &str) -> anyhow::Result<(String, Self)> {
        let (own, rest): (Vec<&str>, Vec<&str>) = text.split(',').partition(|part| part.starts_with("server."));
        let mut options = Self::default();
        for pair in own.iter().filter_map(|part| part.strip_prefix("server.")) {
            match pair.split_once('=') {
                Some(("harvest", value)) => {
                    options.harvest_after_submit = one_of("server.harvest", value, ("always", "idle"))?;
                }
                Some(("beside", file)) if !file.is_empty() => options.beside = Some(file.into()),
                _ => return Err(unknown("server's key", pair, &Self::KEYS).into()),
            }
        }
        Ok((rest.join(","), options))
    }
}

/// The given options; the driver's defaults apply to the rest.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct GuestOptions {
    path: Option<DriverPath>,
    keep_callbacks: Option<bool>,
    event_idx: Option<bool>,
    indirect: Option<bool>,
    packed: Option<bool>,
}

impl GuestOptions {
    /// Reads `key=value,...`.
    pub(super) fn parse(text: &str) -> anyhow::Result<Self> {
        let mut options = Self::default();
        for pair in parse_key_values(text)? {
            options.set(&pair)?;
        }
        Ok(options)
    }

    /// Splits the guest's options from a target's: `file=x,guest.path=bio` gives `file=x` and `path=bio`.
    pub(super) fn split(text: &str) -> anyhow::Result<(String, Self)> {
        let (own, rest): (Vec<&str>, Vec<&str>) = text.split(',').partition(|part| part.starts_with(PREFIX));
        let own: Vec<_> = own.iter().filter_map(|part| part.strip_prefix(PREFIX)).collect();
        let options = if own.is_empty() { Self::default() } else { Self::parse(&own.join(","))? };
        Ok((rest.join(","), options))
    }

    /// Returns these options, with those of `all` where nothing is given.
    pub(super) fn or(self, all: &Self) -> Self {
        Self {
            path: self.path.or(all.path),
            keep_callbacks: self.keep_callbacks.or(all.keep_callbacks),
            event_idx: self.event_idx.or(all.event_idx),
            indirect: self.indirect.or(all.indirect),
            packed: self.packed.or(all.packed),
        }
    }

    pub(super) fn apply(&self, driver: &mut DriverOptions) {
        driver.path = self.path.unwrap_or(driver.path);
        driver.keep_callbacks = self.keep_callbacks.unwrap_or(driver.keep_callbacks);
        driver.event_idx = self.event_idx.unwrap_or(driver.event_idx);
        driver.indirect = self.indirect.unwrap_or(driver.indirect);
        driver.packed = self.packed.unwrap_or(driver.packed);
    }

    /// Whether packed rings were requested explicitly.
    pub(super) fn wants_packed(&self) -> bool {
        self.packed == Some(true)
    }

    /// Fails if `driver` lacks an explicitly requested feature: figures without it would be misleading.
    pub(super) fn check(&self, driver: &Driver) -> anyhow::Result<()> {
        match self.wants_packed() && !driver.facts().packed {
            true => Err(usage("guest packed=on: the server offers no packed rings (a drive's packed=on does)")),
            false => Ok(()),
        }
    }

    fn set(&mut self, KeyValue { key, value }: &KeyValue) -> anyhow::Result<()> {
        match key.as_str() {
            "path" => self.path = Some(value.parse()?),
            "callbacks" => self.keep_callbacks = Some(one_of(key, value, ("kept", "suppressed"))?),
            "event-idx" => self.event_idx = Some(one_of(key, value, ("on", "off"))?),
            "packed" => self.packed = Some(one_of(key, value, ("on", "off"))?),
            "indirect" => self.indirect = Some(one_of(key, value, ("on", "off"))?),
            _ => return Err(unknown("guest's key", key, &KEYS).into()),
        }
        Ok(())
    }
}

/// Whether the value is the first of the two words; any other value is an error.
fn one_of(key: &str, value: &str, (yes, no): (&str, &str)) -> anyhow::Result<bool> {
    match value {
        _ if value == yes => Ok(true),
        _ if value == no => Ok(false),
        _ => Err(usage(format!("{key}={value}: takes {yes} or {no}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_targets_guest_is_told_apart_from_its_drive() {
        let (rest, own) = GuestOptions::split("file=a,,b,guest.path=request,cache=none,guest.callbacks=kept").unwrap();
        assert_eq!(rest, "file=a,,b,cache=none");
        let all = GuestOptions::parse("path=bio,event-idx=off,indirect=on,packed=off").unwrap();
        let mut driver = DriverOptions::default();
        own.or(&all).apply(&mut driver);
        assert_eq!((driver.path, driver.keep_callbacks), (DriverPath::Request, true));
        assert_eq!((driver.event_idx, driver.indirect, driver.packed), (false, true, false));
        assert_eq!(GuestOptions::split("/a=b.sock").unwrap(), ("/a=b.sock".to_owned(), GuestOptions::default()));
    }

    #[test]
    fn a_server_is_told_when_to_harvest_and_what_else_to_serve() {
        let split = |text| ServerOptions::split(text).unwrap();
        assert_eq!(split("format=null,size=1M"), ("format=null,size=1M".to_owned(), ServerOptions::default()));
        let (rest, own) = split("server.harvest=idle,file=a,server.beside=b.raw");
        assert_eq!((rest.as_str(), own.harvest_after_submit), ("file=a", false));
        assert_eq!(own.beside, Some("b.raw".into()));
        for wrong in ["server.harvest=never", "server.besides=b", "server.beside="] {
            assert!(ServerOptions::split(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn what_a_guest_does_not_have_is_refused_by_name() {
        for (text, named) in [("paths=bio", "path"), ("path=fast", "request"), ("callbacks=on", "suppressed")] {
            let said = format!("{:#}", GuestOptions::parse(text).unwrap_err());
            assert!(said.contains(named), "{text}: {said}");
        }
    }
}
