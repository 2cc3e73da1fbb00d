//! The layers that saves and restores have put on disks. Only these are taken back and removed: a layer of the user
//! stays, whatever its name.

use crate::files;
use crate::record::{read_json, write_json};
use block::Result;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

const FILE: &str = "layers.json";
const NEW_FILE: &str = "layers.json.new";

/// The layers, by their files. Files that are gone may still be listed.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct OwnLayers {
    layers: BTreeSet<PathBuf>,
}

impl OwnLayers {
    pub(crate) fn read(directory: &Path) -> Result<Self> {
        Ok(read_json(&directory.join(FILE))?.unwrap_or_default())
    }

    /// Notes durably the layers that are about to be put on, so that they are known after any interruption.
    pub(crate) fn note<'a>(&mut self, directory: &Path, new: impl IntoIterator<Item = &'a Path>) -> Result<()> {
        self.layers.retain(|layer| layer.exists());
        self.layers.extend(new.into_iter().map(Path::to_owned));
        write_json(directory, NEW_FILE, self)?;
        files::replace(directory, NEW_FILE, FILE)
    }

    /// Whether a save or a restore has put this layer on.
    pub(crate) fn has(&self, layer: &Path) -> bool {
        self.layers.contains(layer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_are_known_until_their_files_are_gone() {
        let dir = tempfile::tempdir().unwrap();
        let [one, two] = ["one", "two"].map(|name| dir.path().join(name));
        let mut layers = OwnLayers::read(dir.path()).unwrap();
        assert!(!layers.has(&one));
        layers.note(dir.path(), [one.as_path()]).unwrap();
        std::fs::write(&one, "").unwrap();
        layers.note(dir.path(), [two.as_path()]).unwrap();
        let again = OwnLayers::read(dir.path()).unwrap();
        assert!(again == layers && again.has(&one) && again.has(&two));
        std::fs::remove_file(&one).unwrap();
        layers.note(dir.path(), []).unwrap();
        assert_eq!(OwnLayers::read(dir.path()).unwrap(), OwnLayers::default());
    }
}
