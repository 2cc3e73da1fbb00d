//! The unit, and what each of its lines means where there is no systemd.

use std::path::{Path, PathBuf};

/// Lines of the section `Service`.
pub(crate) struct Unit(Vec<(String, String)>);

/// How a line is applied here.
enum How {
    /// By these arguments of bubblewrap.
    Bwrap(&'static [&'static str]),
    /// By a filter of system calls ([`crate::filter`]).
    Filter,
    /// By the test itself.
    Test,
    /// Not at all, for this reason.
    #[allow(dead_code, reason = "the reason is for readers")]
    Not(&'static str),
}

/// Every key that the unit may have. One that is not listed fails the tests.
const KEYS: &[(&str, How)] = &[
    ("Type", How::Test),
    ("EnvironmentFile", How::Test),
    ("ExecStart", How::Test),
    ("ExecReload", How::Test),
    ("Restart", How::Not("nobody is there to restart it")),
    ("TimeoutStartSec", How::Not("the test has a limit of its own")),
    ("TimeoutStopSec", How::Not("the test has a limit of its own")),
    ("WatchdogSec", How::Not("the watchdog has tests of its own")),
    ("User", How::Bwrap(&["--unshare-user", "--uid", "990"])),
    ("Group", How::Bwrap(&["--gid", "108"])),
    ("UMask", How::Test),
    ("StateDirectory", How::Test),
    ("StateDirectoryMode", How::Not("the directory is the test's")),
    ("RuntimeDirectory", How::Test),
    ("RuntimeDirectoryMode", How::Not("the directory is the test's")),
    ("LimitMEMLOCK", How::Test),
    ("LimitNOFILE", How::Test),
    ("ReadWritePaths", How::Test),
    ("ProtectSystem", How::Bwrap(&["--ro-bind", "/", "/", "--tmpfs", "/var/lib"])),
    ("ProtectHome", How::Bwrap(&["--tmpfs", "/home", "--tmpfs", "/root"])),
    ("PrivateTmp", How::Bwrap(&["--tmpfs", "/tmp", "--tmpfs", "/var/tmp"])),
    ("PrivateDevices", How::Bwrap(&["--dev", "/dev"])),
    ("PrivateNetwork", How::Bwrap(&["--unshare-net"])),
    ("PrivateUsers", How::Bwrap(&["--unshare-user"])),
    ("PrivateIPC", How::Bwrap(&["--unshare-ipc"])),
    ("PrivateMounts", How::Bwrap(&[])),
    ("ProtectHostname", How::Bwrap(&["--unshare-uts"])),
    ("ProtectClock", How::Bwrap(&["--cap-drop", "ALL"])),
    ("ProtectKernelTunables", How::Bwrap(&["--proc", "/proc"])),
    ("ProtectKernelModules", How::Bwrap(&["--cap-drop", "ALL"])),
    ("ProtectKernelLogs", How::Bwrap(&["--cap-drop", "ALL"])),
    ("ProtectControlGroups", How::Bwrap(&[])),
    ("ProtectProc", How::Bwrap(&["--unshare-pid", "--as-pid-1"])),
    ("ProcSubset", How::Not("it needs a mount option that bubblewrap does not set")),
    ("NoNewPrivileges", How::Bwrap(&[])),
    ("CapabilityBoundingSet", How::Bwrap(&["--cap-drop", "ALL"])),
    ("AmbientCapabilities", How::Bwrap(&["--cap-drop", "ALL"])),
    ("RestrictAddressFamilies", How::Filter),
    ("RestrictNamespaces", How::Filter),
    ("RestrictRealtime", How::Filter),
    ("RestrictSUIDSGID", How::Filter),
    ("LockPersonality", How::Filter),
    ("MemoryDenyWriteExecute", How::Filter),
    ("RemoveIPC", How::Not("it concerns what is left when the user has no process any more")),
    ("IPAddressDeny", How::Not("it needs a control group; there is no network either way")),
    ("DevicePolicy", How::Not("it needs a control group; there are no devices either way")),
    ("KeyringMode", How::Not("only the service manager makes a keyring for a service")),
    ("SystemCallArchitectures", How::Filter),
    ("SystemCallFilter", How::Filter),
    ("SystemCallErrorNumber", How::Filter),
];

fn systemd() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../dist/systemd")
}

impl Unit {
    /// The one that the package installs.
    pub(crate) fn read() -> Self {
        let text = std::fs::read_to_string(systemd().join("ringdisk@.service")).unwrap();
        let section =
            text.lines().skip_while(|line| *line != "[Service]").skip(1).take_while(|line| !line.starts_with('['));
        let lines = section.filter(|line| !line.is_empty() && !line.starts_with('#'));
        let pairs: Vec<_> = lines.map(|line| line.split_once('=').unwrap_or_else(|| panic!("{line}"))).collect();
        for (key, value) in &pairs {
            assert!(KEYS.iter().any(|(known, _)| known == key), "say how {key}={value} is tested, or why not");
        }
        Self(pairs.into_iter().map(|(key, value)| (key.to_owned(), value.to_owned())).collect())
    }

    /// All values of a key; each line adds some.
    pub(crate) fn values(&self, key: &str) -> Vec<&str> {
        self.0.iter().filter(|(other, _)| other == key).map(|(_, value)| value.as_str()).collect()
    }

    /// The one value of a key.
    pub(crate) fn value(&self, key: &str) -> String {
        let [value] = self.values(key)[..] else { panic!("the unit has {key}= not once") };
        value.to_owned()
    }

    pub(crate) fn is_on(&self, key: &str) -> bool {
        self.values(key) == ["yes"]
    }

    /// What bubblewrap is told for the lines that it can apply: those of the whole file system first.
    pub(crate) fn confinement(&self) -> Vec<&'static str> {
        let mut arguments: Vec<&[&str]> = Vec::new();
        for (key, _) in &self.0 {
            let how = KEYS.iter().find(|(known, _)| known == key).map(|(_, how)| how);
            if let Some(How::Bwrap(more)) = how.filter(|_| self.values(key) != ["no"])
                && !arguments.contains(more)
            {
                arguments.push(more);
            }
        }
        arguments.sort_by_key(|arguments| !arguments.contains(&"/"));
        arguments.concat()
    }
}

/// A command line's words, with the instance's name in its places, and with these in the place of the variable.
pub(crate) fn words_of(line: &str, instance: &str, variable: &[String]) -> Vec<String> {
    let line = line.replace("%i", instance);
    let words = line.split_whitespace();
    words.flat_map(|word| if word == "$DISKS" { variable.to_vec() } else { vec![word.to_owned()] }).collect()
}

/// What the example of an environment file serves.
pub(crate) fn example_drives() -> Vec<String> {
    let text = std::fs::read_to_string(systemd().join("vm1.conf.example")).unwrap();
    let disks = text.lines().find_map(|line| line.strip_prefix("DISKS=")).unwrap();
    disks.split_whitespace().map(str::to_owned).collect()
}
