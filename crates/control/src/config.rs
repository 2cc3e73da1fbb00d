//! The configuration file of a daemon, which `serve --config` reads, and reads again on request.
//!
//! ```toml
//! control = "/run/ringdisk/control"
//!
//! [defaults]
//! cache = "none"
//!
//! [[drive]]
//! name = "root"
//! file = "/images/root.qcow2"
//! ```
//!
//! Errors name the line and the key.

use crate::api::{AddExport, AddNbd, AddTls, GuestMemory};
use crate::manager::Configured;
use crate::options::Options;
use block::{Error, ErrorKind, Result};
use drive::absolute;
use drive::{DriveOptions, ShownOptions};
use image::BackingPolicy;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use toml::Spanned;
use toml::de::{DeTable, DeValue};

/// The contents of a configuration file.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Config {
    /// The disks, in the order of the file. Each has a name.
    pub drives: Vec<Configured>,
    /// The settings of the daemon as a whole. They are read only when the daemon starts.
    pub settings: Settings,
}

/// The settings of a daemon as a whole.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Settings {
    /// The control socket.
    pub control: Option<PathBuf>,
    /// The state directory.
    pub state_dir: Option<PathBuf>,
    /// The file that the process id is written to.
    pub pidfile: Option<PathBuf>,
    /// Threads that serve requests.
    pub reactors: Option<u16>,
    /// How long an idle thread looks for work.
    pub poll_max_us: Option<u32>,
    /// Memory that requests may take for their own buffers, in bytes.
    pub buffer_memory_bytes: Option<u64>,
    /// Memory that the indexes of kept overlays may take, in bytes.
    pub index_memory_bytes: Option<u64>,
    /// Which backing files images may open.
    pub allow_backing: Option<BackingPolicy>,
    /// Files that images may use as a backing file.
    pub backing: Vec<PathBuf>,
    /// The name of the machine that the disks belong to, for the names of metrics that libvirt's exporters use.
    pub domain: Option<String>,
}

const KEYS: [&str; 14] = [
    "allow-backing",
    "backing",
    "buffer-memory",
    "control",
    "defaults",
    "domain",
    "drive",
    "drives",
    "export",
    "index-memory",
    "pidfile",
    "poll-max-us",
    "reactors",
    "state-dir",
];
const EXPORT_KEYS: [&str; 19] = [
    "bitmaps",
    "connections",
    "description",
    "disk",
    "fixed-buffers",
    "guest-memory",
    "guest-memory-max",
    "listen",
    "name",
    "queue-size",
    "queues",
    "read-only",
    "socket",
    "socket-group",
    "socket-mode",
    "tls",
    "tls-creds",
    "tls-verify-peer",
    "type",
];
/// Keys of an export for a guest.
const GUEST_KEYS: [&str; 5] = ["queues", "queue-size", "fixed-buffers", "guest-memory", "guest-memory-max"];
const EXPORT_TYPES: [&str; 2] = ["nbd", "vhost-user"];
/// Keys that make sense for a single drive only.
const NOT_A_DEFAULT: [&str; 7] = ["name", "file", "fd", "socket", "serial", "size", "export"];
const REACTORS_MAX: u64 = 256;

impl Config {
    /// Reads a file. Relative paths in it begin at its directory.
    pub fn read(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path)
            .map_err(|error| Error::io(format!("cannot read the configuration '{}'", path.display()), error))?;
        Self::parse(&text, path)
    }

    fn parse(text: &str, path: &Path) -> Result<Self> {
        let path = absolute(path);
        let directory = path.parent().map_or_else(PathBuf::new, Path::to_owned);
        let reader = Reader { text, path, directory };
        let table = DeTable::parse(text).map_err(|error| {
            let at = error.span().map_or(0, |span| span.start);
            reader.wrong(at, error.message().trim())
        })?;
        reader.config(table.get_ref())
    }

    /// Returns the drive of this name.
    pub(crate) fn drive(&self, name: &str) -> Option<&Configured> {
        self.drives.iter().find(|drive| drive.name() == Some(name))
    }
}

/// A value, and its place in the file.
type Value<'i> = Spanned<DeValue<'i>>;

struct Reader<'i> {
    text: &'i str,
    path: PathBuf,
    /// The directory where relative paths begin.
    directory: PathBuf,
}

impl<'i> Reader<'i> {
    fn config(&self, table: &DeTable<'i>) -> Result<Config> {
        let mut settings = Settings::default();
        let (mut defaults, mut drives, mut exports) = (Vec::new(), Vec::new(), Vec::new());
        for (key, value) in table {
            match key.get_ref().as_ref() {
                "defaults" => defaults = self.defaults(value)?,
                "drive" | "drives" => drives.extend(self.list(key.get_ref(), value)?),
                "export" => exports.extend(self.list("export", value)?),
                key => self.set(&mut settings, key, value)?,
            }
        }
        let mut seen: BTreeMap<String, usize> = BTreeMap::new();
        let mut configured = Vec::new();
        for value in drives {
            let drive = self.drive(value, &defaults)?;
            let name = drive.name().unwrap_or_default().to_owned();
            if seen.insert(name.clone(), configured.len()).is_some() {
                return Err(self.wrong(value.span().start, format!("name: there is a drive '{name}' above already")));
            }
            configured.push(drive);
        }
        for value in exports {
            let export = self.export(value)?;
            let disk = seen.get(&export.disk).and_then(|index| configured.get_mut(*index));
            let no_disk = || self.wrong(value.span().start, format!("disk: there is no drive '{}'", export.disk));
            disk.ok_or_else(no_disk)?.exports.push(export.clone());
        }
        Ok(Config { drives: configured, settings })
    }

    fn set(&self, settings: &mut Settings, key: &str, value: &Value<'i>) -> Result<()> {
        match key {
            "control" => settings.control = Some(self.path(key, value)?),
            "state-dir" => settings.state_dir = Some(self.path(key, value)?),
            "pidfile" => settings.pidfile = Some(self.path(key, value)?),
            "domain" => settings.domain = Some(self.scalar(key, value)?),
            "reactors" => settings.reactors = u16::try_from(self.number(key, value, 1..=REACTORS_MAX)?).ok(),
            "poll-max-us" => settings.poll_max_us = u32::try_from(self.number(key, value, 0..=1_000_000)?).ok(),
            "buffer-memory" => {
                let bytes = drive::parse_size(&self.scalar(key, value)?);
                let bytes = bytes.map_err(|error| self.wrong_value(key, value, error))?;
                if bytes < 1 << 20 {
                    return Err(self.wrong_value(key, value, "it is less than 1M, which one request may need"));
                }
                settings.buffer_memory_bytes = Some(bytes);
            }
            "index-memory" => {
                let bytes = drive::parse_size(&self.scalar(key, value)?);
                settings.index_memory_bytes = Some(bytes.map_err(|error| self.wrong_value(key, value, error))?);
            }
            "allow-backing" => {
                let policy = self.scalar(key, value)?.parse();
                settings.allow_backing = Some(policy.map_err(|error: Error| self.wrong_value(key, value, error))?);
            }
            "backing" => {
                settings.backing =
                    self.list(key, value)?.into_iter().map(|value| self.path(key, value)).collect::<Result<_>>()?;
            }
            _ => return Err(self.wrong(value.span().start, drive::unknown("key of a configuration", key, &KEYS))),
        }
        Ok(())
    }

    fn defaults(&self, value: &Value<'i>) -> Result<Vec<(String, String)>> {
        let mut pairs = Vec::new();
        for (key, value) in self.table("defaults", value)? {
            let key = plain_key(key.get_ref());
            if NOT_A_DEFAULT.contains(&key) {
                return Err(self.wrong_value(key, value, "belongs to one drive and has no default"));
            }
            pairs.extend(self.pairs(key, value)?);
        }
        Ok(pairs)
    }

    /// Reads a drive, as a table or as the text that `--drive` takes.
    fn drive(&self, value: &Value<'i>, defaults: &[(String, String)]) -> Result<Configured> {
        let at = value.span().start;
        let (mut pairs, mut serve) = (Vec::new(), true);
        match value.get_ref() {
            DeValue::String(text) => {
                let options = Options::parse(text).map_err(|error| self.wrong(at, error))?;
                pairs.extend(options.pairs().map(|(key, value)| (plain_key(key).to_owned(), value.to_owned())));
            }
            DeValue::Table(table) => {
                for (key, value) in table {
                    match (plain_key(key.get_ref()), value.get_ref()) {
                        ("export", DeValue::Boolean(on)) => serve = *on,
                        ("export", _) => return Err(self.wrong_value("export", value, "takes true or false")),
                        (key, _) => pairs.extend(self.pairs(key, value)?),
                    }
                }
            }
            _ => return Err(self.wrong(at, "a drive is a table or a text such as \"file=PATH,name=NAME\"")),
        }
        let given: Vec<String> = pairs.iter().map(|(key, _)| key.clone()).collect();
        pairs.extend(defaults.iter().filter(|(key, _)| !given.contains(key)).cloned());
        let mut options = Options::of_pairs(pairs);
        options.make_paths_whole(|path| self.directory.join(path)).map_err(|error| self.wrong(at, error))?;
        let drive: DriveOptions = options.to_drive().map_err(|error| self.wrong(at, error))?;
        if drive.disk.name.is_none() {
            return Err(self.wrong(at, "a drive of a configuration needs a name, by which a reload knows it again"));
        }
        Ok(Configured { drive, text: options.to_text(), serve, exports: Vec::new() })
    }

    fn export(&self, value: &Value<'i>) -> Result<AddExport> {
        let table = self.table("export", value)?;
        let mut export = AddExport::default();
        if let Some((_, kind)) = table.iter().find(|(key, _)| key.get_ref().as_ref() == "type") {
            export.nbd = match self.scalar("type", kind)?.as_str() {
                "vhost-user" => None,
                "nbd" => Some(self.nbd(table)?),
                other => return Err(self.wrong_value("type", kind, drive::unknown("type", other, &EXPORT_TYPES))),
            };
        }
        for (key, value) in table {
            let key = key.get_ref().as_ref();
            let count = |most| self.number(key, value, 1..=most).map(|number| u16::try_from(number).ok());
            match key {
                "disk" => export.disk = self.scalar(key, value)?,
                "socket" => {
                    let passed = value.get_ref().as_str().filter(|text| text.starts_with("fd:"));
                    export.socket = Some(passed.map_or_else(|| self.path(key, value), |word| Ok(word.into()))?);
                }
                "socket-mode" | "socket-group" => self.access(key, value, &mut export)?,
                "read-only" => export.read_only = self.switch(key, value)?,
                _ if export.nbd.is_some() && (GUEST_KEYS.contains(&key) || drive::SHOWN_KEYS.contains(&key)) => {
                    return Err(self.wrong_value(key, value, "is not for type = 'nbd'"));
                }
                "fixed-buffers" => export.fixed_buffers = self.switch(key, value)?,
                "guest-memory" => {
                    let text = self.scalar(key, value)?;
                    let known = GuestMemory::NAMES.iter().find(|(name, _)| *name == text);
                    let names = GuestMemory::NAMES.map(|(name, _)| name);
                    let wrong = || self.wrong_value(key, value, drive::unknown("value", &text, &names));
                    export.guest_memory = known.ok_or_else(wrong)?.1;
                }
                "guest-memory-max" => {
                    let bytes = drive::parse_size(&self.scalar(key, value)?);
                    export.guest_memory_max = Some(bytes.map_err(|error| self.wrong_value(key, value, error))?);
                }
                "queues" => export.queues = count(256)?,
                "queue-size" => export.queue_size = count(1024)?,
                _ if drive::SHOWN_KEYS.contains(&key) => {
                    let text = self.scalar(key, value)?;
                    DriveOptions::check_value(key, &text).map_err(|error| self.wrong(value.span().start, error))?;
                    export.shown.set(key, text);
                }
                _ if export.nbd.is_none() && EXPORT_KEYS.contains(&key) && key != "type" => {
                    return Err(self.wrong_value(key, value, "is for type = 'nbd' only"));
                }
                // The other keys were read before.
                _ if EXPORT_KEYS.contains(&key) => {}
                _ => {
                    let known = [&EXPORT_KEYS[..], &drive::SHOWN_KEYS].concat();
                    return Err(self.wrong(value.span().start, drive::unknown("key of an export", key, &known)));
                }
            }
        }
        let listens = export.nbd.as_ref().map(|nbd| nbd.listen.is_some());
        match export.disk.as_str() {
            "" => Err(self.wrong(value.span().start, "disk: an export needs the name of its drive")),
            _ if listens == Some(export.socket.is_some()) => {
                Err(self.wrong(value.span().start, "an NBD export needs either a socket or listen = 'ADDRESS:PORT'"))
            }
            _ => {
                let shown = ShownOptions::parse(export.shown.pairs());
                shown.map_err(|error| self.wrong(value.span().start, error))?;
                Ok(export)
            }
        }
    }

    /// Reads who may connect to an export's socket.
    fn access(&self, key: &str, value: &Value<'i>, export: &mut AddExport) -> Result<()> {
        let text = self.scalar(key, value)?;
        let (parsed, place) = match key {
            "socket-mode" => (drive::parse_socket_mode(&text), &mut export.socket_mode),
            _ => (drive::parse_socket_group(&text), &mut export.socket_group),
        };
        parsed.map_err(|error| self.wrong(value.span().start, error))?;
        *place = Some(text);
        Ok(())
    }

    /// Reads the settings of an export for NBD clients.
    fn nbd(&self, table: &DeTable<'i>) -> Result<AddNbd> {
        let (mut nbd, mut credentials, mut uses) = (AddNbd::default(), None, Vec::new());
        let (mut required, mut verify_peer) = (true, true);
        for (key, value) in table {
            let key = key.get_ref().as_ref();
            match key {
                "listen" => nbd.listen = Some(self.scalar(key, value)?),
                "name" => nbd.name = Some(self.scalar(key, value)?),
                "description" => nbd.description = self.scalar(key, value)?,
                "bitmaps" => {
                    let names = self.list(key, value)?.into_iter().map(|name| self.scalar(key, name));
                    nbd.bitmaps = names.collect::<Result<_>>()?;
                }
                "connections" => {
                    nbd.connections = u16::try_from(self.number(key, value, 1..=u16::MAX.into())?).ok();
                }
                "tls-creds" => credentials = Some(self.path(key, value)?),
                "tls" => {
                    uses.push((key, value));
                    required = match self.scalar(key, value)?.as_str() {
                        "required" => true,
                        "allow" => false,
                        other => {
                            let what = drive::unknown("use of TLS", other, &["allow", "required"]);
                            return Err(self.wrong_value(key, value, what));
                        }
                    };
                }
                "tls-verify-peer" => {
                    uses.push((key, value));
                    verify_peer = self.switch(key, value)?;
                }
                _ => {}
            }
        }
        match (credentials, uses.first()) {
            (None, Some((key, value))) => return Err(self.wrong_value(key, value, "needs tls-creds")),
            (credentials, _) => {
                nbd.tls = credentials.map(|credentials| AddTls { credentials, required, verify_peer });
            }
        }
        Ok(nbd)
    }

    /// Returns the pairs of a drive's key: several if its value is a list.
    fn pairs(&self, key: &str, value: &Value<'i>) -> Result<Vec<(String, String)>> {
        let values = match value.get_ref() {
            DeValue::Array(list) => list.iter().collect(),
            _ => vec![value],
        };
        if values.len() > 1 && key != "filter" {
            return Err(self.wrong_value(key, value, "takes one value, not a list"));
        }
        let pair = |value: &Value<'i>| {
            let text = self.scalar(key, value)?;
            DriveOptions::check_value(key, &text).map_err(|error| self.wrong(value.span().start, error))?;
            Ok((key.to_owned(), text))
        };
        values.into_iter().map(pair).collect()
    }

    fn scalar(&self, key: &str, value: &Value<'i>) -> Result<String> {
        match value.get_ref() {
            DeValue::String(text) => Ok(text.as_ref().to_owned()),
            DeValue::Boolean(on) => Ok(if *on { "on" } else { "off" }.to_owned()),
            DeValue::Integer(number) if number.radix() == 10 => Ok(number.as_str().to_owned()),
            _ => Err(self.wrong_value(key, value, "takes a text, a decimal number, or true or false")),
        }
    }

    fn switch(&self, key: &str, value: &Value<'i>) -> Result<bool> {
        value.get_ref().as_bool().ok_or_else(|| self.wrong_value(key, value, "takes true or false"))
    }

    fn number(&self, key: &str, value: &Value<'i>, range: std::ops::RangeInclusive<u64>) -> Result<u64> {
        let number = value.get_ref().as_integer().and_then(|number| number.as_str().parse().ok());
        let wrong = || format!("takes a number from {} to {}", range.start(), range.end());
        number.filter(|number| range.contains(number)).ok_or_else(|| self.wrong_value(key, value, wrong()))
    }

    fn path(&self, key: &str, value: &Value<'i>) -> Result<PathBuf> {
        match value.get_ref().as_str() {
            Some(path) if !path.is_empty() => Ok(self.directory.join(path)),
            _ => Err(self.wrong_value(key, value, "takes a path")),
        }
    }

    fn list<'a>(&self, key: &str, value: &'a Value<'i>) -> Result<Vec<&'a Value<'i>>> {
        let list = value.get_ref().as_array().ok_or_else(|| {
            let hint = if key == "drive" || key == "export" { format!(": write [[{key}]]") } else { String::new() };
            self.wrong_value(key, value, format!("takes a list{hint}"))
        });
        Ok(list?.iter().collect())
    }

    fn table<'a>(&self, key: &str, value: &'a Value<'i>) -> Result<&'a DeTable<'i>> {
        value.get_ref().as_table().ok_or_else(|| self.wrong_value(key, value, "takes a table"))
    }

    fn wrong_value(&self, key: &str, value: &Value<'i>, why: impl std::fmt::Display) -> Error {
        self.wrong(value.span().start, format!("{key}: {why}"))
    }

    fn wrong(&self, at: usize, why: impl std::fmt::Display) -> Error {
        let before = self.text.get(..at).unwrap_or(self.text);
        let line = before.matches('\n').count().saturating_add(1);
        Error::new(ErrorKind::BadOption, format!("{}, line {line}: {why}", self.path.display()))
    }
}

/// Returns the main name of a key; two keys have a second name.
fn plain_key(key: &str) -> &str {
    match key {
        "id" => "name",
        "num-queues" => "queues",
        key => key,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Config> {
        Config::parse(text, Path::new("/etc/ringdisk/disks.toml"))
    }

    #[test]
    fn tables_texts_defaults_and_exports_make_drives() {
        let config = parse(
            "control = '/run/control'\nstate-dir = 'state'\nreactors = 2\nbacking = ['/base.qcow2']\n\
             drives = ['file=b.raw,format=raw,name=b,cache=writeback']\n\
             [defaults]\ncache = 'none'\nqueues = 2\n\
             [[drive]]\nname = 'a'\nfile = '/a.qcow2'\nsnapshot = true\nkeep = 'kept'\nexport = false\n\
             filter = ['throttle:iops-total=5', 'log:file=changes']\n\
             [[export]]\ndisk = 'a'\nsocket = 'a.sock'\nread-only = true\nqueues = 1\nsocket-mode = '0640'\nseg-max = 30\nwrite-cache = false\n\
             [[export]]\ntype = 'nbd'\ndisk = 'a'\nlisten = '127.0.0.1:10809'\nname = 'x'\nbitmaps = ['b']\n\
             tls-creds = 'pki'\ntls = 'allow'\ntls-verify-peer = false\n",
        )
        .unwrap();
        assert_eq!(config.settings.state_dir, Some("/etc/ringdisk/state".into()));
        assert_eq!((config.settings.reactors, config.settings.backing.len()), (Some(2), 1));
        let texts: Vec<&str> = config.drives.iter().map(|drive| drive.text.as_str()).collect();
        let expected = [
            "file=/etc/ringdisk/b.raw,format=raw,name=b,cache=writeback,queues=2",
            "name=a,file=/a.qcow2,snapshot=on,keep=/etc/ringdisk/kept,filter=throttle:iops-total=5,\
             filter=log:file=/etc/ringdisk/changes,cache=none,queues=2",
        ];
        assert_eq!(texts, expected);
        let drive = config.drive("a").unwrap();
        assert!(!drive.serve);
        assert_eq!(drive.exports[0].socket, Some("/etc/ringdisk/a.sock".into()));
        assert!(drive.exports[0].read_only && drive.exports[0].queues == Some(1));
        assert_eq!(drive.exports[0].socket_mode.as_deref(), Some("0640"));
        let shown: Vec<_> = drive.exports[0].shown.pairs().collect();
        assert_eq!(shown, [("seg-max", "30"), ("write-cache", "off")]);
        let nbd = drive.exports[1].nbd.clone().unwrap();
        assert_eq!((nbd.listen.as_deref(), nbd.name.as_deref()), (Some("127.0.0.1:10809"), Some("x")));
        let tls = AddTls { credentials: "/etc/ringdisk/pki".into(), required: false, verify_peer: false };
        assert_eq!((nbd.bitmaps, nbd.tls), (vec!["b".to_owned()], Some(tls)));
    }

    #[test]
    fn what_is_wrong_is_said_with_its_line_and_key() {
        for (text, line, part) in [
            ("\ncontroll = 'x'", 2, "did you mean 'control'?"),
            ("reactors = 0", 1, "reactors: takes a number from 1"),
            ("a = ", 1, ""),
            ("[[drive]]\nname = 'a'\nfile = '/a'\ncahce = 'none'", 4, "did you mean 'cache'?"),
            ("[[drive]]\nname = 'a'\nfile = '/a'\ncache = 'nine'", 4, "did you mean 'none'?"),
            ("[[drive]]\nfile = '/a'", 1, "needs a name"),
            ("\n[[drive]]\nname = 'a'", 2, "file=PATH"),
            ("\n[[drive]]\nname = 'a'\nfile = ['/a', '/b']", 4, "file: takes one value"),
            ("drives = ['file=/a,name=a', \n'file=/b,name=a']", 2, "'a' above already"),
            ("[drive]\nname = 'a'", 1, "[[drive]]"),
            ("[defaults]\ncache = 'none'\nfile = '/a'", 3, "has no default"),
            ("[[export]]\ndisk = 'a'", 1, "no drive 'a'"),
            ("[[export]]\nsocket = '/a'", 1, "needs the name"),
            ("[[export]]\ntype = 'nbf'", 2, "did you mean 'nbd'?"),
            ("[[export]]\ntype = 'nbd'\ndisk = 'a'", 1, "either a socket or listen"),
            ("[[export]]\ntype = 'nbd'\nlisten = ':1'\nqueues = 2", 4, "queues: is not for type = 'nbd'"),
            ("[[export]]\ntype = 'nbd'\nlisten = ':1'\nseg-max = 2", 4, "seg-max: is not for type = 'nbd'"),
            ("[[export]]\ndisk = 'a'\nwrite-cache = 'of'", 3, "write-cache"),
            ("[[drive]]\nname = 'a'\nfile = '/a'\n[[export]]\ndisk = 'a'\ncyls = 2", 4, "go together"),
            ("[[export]]\nlisten = ':1'", 2, "is for type = 'nbd' only"),
            ("[[export]]\ntype = 'nbd'\ntls = 'allow'", 3, "needs tls-creds"),
            ("allow-backing = 'all'", 1, "allow-backing"),
            ("buffer-memory = 5", 1, "less than 1M"),
        ] {
            let message = parse(text).unwrap_err().to_string();
            let place = format!("/etc/ringdisk/disks.toml, line {line}: ");
            assert!(message.starts_with(&place) && message.contains(part), "{text}: {message}");
        }
    }
}
