//! The machine to be saved: the places of its monitor, its daemon and its saved state.

use block::{Error, ErrorKind, Result};
use serde::Deserialize;
use std::path::{Path, PathBuf};

/// A machine, as its user describes it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct Machine {
    /// The socket of QEMU's monitor protocol.
    pub qmp: PathBuf,
    /// The control socket of the daemon that has its disks.
    pub control: PathBuf,
    /// The directory for its saves.
    pub state: PathBuf,
    /// The names of its disks in the daemon; all disks of the daemon if none is given.
    #[serde(default)]
    pub disks: Vec<String>,
    /// The command that starts it, without `-incoming`.
    #[serde(default)]
    pub qemu: Vec<String>,
}

impl Machine {
    /// Reads a description. Relative paths begin at the file's directory.
    pub fn read(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path);
        let text = text.map_err(|error| Error::io(format!("cannot read '{}'", path.display()), error))?;
        let bad = |error: toml::de::Error| {
            let before = error.span().and_then(|span| text.get(..span.start));
            let line = before.map_or_else(String::new, |before| format!(", line {}", 1 + before.matches('\n').count()));
            let what = block::in_plain_words(error.message().trim());
            Error::new(ErrorKind::BadOption, format!("'{}'{line}: {what}", path.display()))
        };
        let mut machine: Self = toml::from_str(&text).map_err(bad)?;
        let path = std::path::absolute(path).map_err(|error| Error::io("there is no working directory", error))?;
        let directory = path.parent().unwrap_or(Path::new("/"));
        for path in [&mut machine.qmp, &mut machine.control, &mut machine.state] {
            *path = directory.join(&*path);
        }
        Ok(machine)
    }

    /// Fills missing fields from another description.
    #[must_use]
    pub fn or(self, other: Self) -> Self {
        let path = |own: PathBuf, other| if own.as_os_str().is_empty() { other } else { own };
        let list = |own: Vec<String>, other| if own.is_empty() { other } else { own };
        Self {
            qmp: path(self.qmp, other.qmp),
            control: path(self.control, other.control),
            state: path(self.state, other.state),
            disks: list(self.disks, other.disks),
            qemu: list(self.qemu, other.qemu),
        }
    }

    /// Makes a description without any values, to be filled in.
    #[must_use]
    pub fn nothing() -> Self {
        Self::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_description_is_read_and_what_is_wrong_is_said_with_its_line() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("vm.toml");
        std::fs::write(&path, "qmp = 'q'\ncontrol = '/run/c'\nstate = 's'\nqemu = ['qemu', '-S']\n").unwrap();
        let machine = Machine::read(&path).unwrap();
        assert_eq!((machine.qmp, machine.control), (dir.path().join("q"), PathBuf::from("/run/c")));
        assert_eq!((machine.disks.len(), machine.qemu.len()), (0, 2));
        std::fs::write(&path, "qmp = 'q'\nkontrol = '/run/c'\n").unwrap();
        let error = Machine::read(&path).unwrap_err().to_string();
        assert!(error.contains("vm.toml', line 2: ") && error.contains("kontrol"), "{error}");
        std::fs::write(&path, "qmp = 'q'\nstate = 's'\ncontrol = 5\n").unwrap();
        let error = Machine::read(&path).unwrap_err().to_string();
        assert!(error.ends_with(", line 3: the number `5` stands where a path belongs"), "{error}");
    }
}
