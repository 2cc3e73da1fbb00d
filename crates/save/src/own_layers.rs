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
    /// Layers that a save takes back. While the record is finished, each of them has been taken back, and its file may
    /// be removed. While it is not, some may still hold what no other file does.
    #[serde(default, rename = "taken-back", skip_serializing_if = "BTreeSet::is_empty")]
    taken_back: BTreeSet<PathBuf>,
}

impl OwnLayers {
    pub(crate) fn read(directory: &Path) -> Result<Self> {
        Ok(read_json(&directory.join(FILE))?.unwrap_or_default())
    }

    /// Notes durably the layers that are about to be put on, so that they are known after any interruption.
    pub(crate) fn note<'a>(&mut self, directory: &Path, new: impl IntoIterator<Item = &'a Path>) -> Result<()> {
        self.layers.retain(|layer| layer.exists());
        self.taken_back.retain(|layer| layer.exists());
        for layer in new {
            self.taken_back.remove(layer);
            self.layers.insert(layer.to_owned());
        }
        self.write(directory)
    }

    /// Notes durably the layers that are about to be taken back. The record must say so before.
    pub(crate) fn note_taking_back(
        &mut self,
        directory: &Path,
        layers: impl IntoIterator<Item = PathBuf>,
    ) -> Result<()> {
        self.taken_back.extend(layers);
        self.write(directory)
    }

    /// Notes durably that of these layers only those with `is_taken_back` were taken back. The record may be finished
    /// after that.
    pub(crate) fn keep_taken_back(&mut self, directory: &Path, is_taken_back: impl Fn(&Path) -> bool) -> Result<()> {
        let before = self.taken_back.len();
        self.taken_back.retain(|layer| is_taken_back(layer));
        if self.taken_back.len() == before { Ok(()) } else { self.write(directory) }
    }

    /// The layers that a save takes back or has taken back.
    pub(crate) fn taken_back(&self) -> impl Iterator<Item = &Path> {
        self.taken_back.iter().map(PathBuf::as_path)
    }

    fn write(&self, directory: &Path) -> Result<()> {
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

    #[test]
    fn a_layer_counts_as_taken_back_until_its_file_is_gone_or_its_name_is_used_again() {
        let dir = tempfile::tempdir().unwrap();
        let files = ["one", "two", "three"].map(|name| dir.path().join(name));
        for file in &files {
            std::fs::write(file, "").unwrap();
        }
        let [one, two, three] = files.each_ref().map(PathBuf::as_path);
        let mut layers = OwnLayers::read(dir.path()).unwrap();
        layers.note(dir.path(), [one, two, three]).unwrap();
        layers.note_taking_back(dir.path(), files.clone()).unwrap();
        let taken_back = || {
            let layers = OwnLayers::read(dir.path()).unwrap();
            layers.taken_back().map(Path::to_owned).collect::<BTreeSet<_>>()
        };
        assert_eq!(taken_back(), files.clone().into());
        layers.keep_taken_back(dir.path(), |layer| layer != two).unwrap();
        assert_eq!(taken_back(), [one, three].map(Path::to_owned).into());
        std::fs::remove_file(one).unwrap();
        layers.note(dir.path(), [three]).unwrap();
        assert!(taken_back().is_empty() && layers.has(two) && layers.has(three));
    }
}
