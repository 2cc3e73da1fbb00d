//! The record of a save: the state and the disks that belong together. It is replaced in one step.

use crate::disks::Layer;
use crate::files::{self, NewFile, failed};
use block::{Error, ErrorKind, Result};
use control::Options;
use control::api::FormerTop;
use image::{FileName, Format};
use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

const VERSION: u32 = 1;
const FILE: &str = "saved.json";
const NEW_FILE: &str = "saved.json.new";
/// The file that says that a save is under way, and whether the machine ran when it began.
const UNDER_WAY: &str = "saving.json";
const NEW_UNDER_WAY: &str = "saving.json.new";

/// A machine's state and its disks, as one pair.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Record {
    version: u32,
    /// The number of the save before, plus one.
    pub number: u64,
    /// Milliseconds since 1970.
    pub saved_at_ms: u64,
    /// The file of the machine's state, in the same directory.
    pub state: String,
    /// Whether the machine ran when it was saved.
    pub was_running: bool,
    /// A restore has begun to open the disks' files, which may change their times and no byte that a guest sees.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_being_restored: bool,
    /// The machine's disks.
    pub disks: Vec<SavedDisk>,
}

/// A disk in its saved form.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct SavedDisk {
    /// The disk's name in the daemon.
    pub name: String,
    /// The file that holds the disk, with the layers below. It no longer changes.
    pub file: PathBuf,
    /// The format of that file.
    pub format: String,
    /// The image into which later saves take back the layers above.
    pub base: PathBuf,
    /// The options that the daemon had for it.
    pub options: Options,
    /// The file when it was frozen; `None` while it is taken back into its image, when both show the same.
    pub seen: Option<Seen>,
    /// The layers below the file, the next one first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub below: Vec<LayerBelow>,
    /// The other files that hold the disk, as they were: the layers below, and external data files. Files that are
    /// being taken back, or that this host does not have, are left out.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub others: Vec<OtherFile>,
}

/// A layer below the top of a disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerBelow {
    /// The layer's file.
    pub file: PathBuf,
    /// The format of that file.
    pub format: String,
}

/// A file of a disk beside its top.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OtherFile {
    file: PathBuf,
    seen: Seen,
}

/// Properties that show whether a file was changed. All zero for a block device: nothing shows a change of it, and its
/// node is made anew when the host starts.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Seen {
    inode: u64,
    length_bytes: u64,
    modified_s: i64,
    modified_ns: i64,
}

impl Seen {
    /// Returns how the file is, after making it durable with its times: after a power cut it looks the same. A flush of
    /// the data alone may leave the times in memory only.
    pub(crate) fn durable(path: &Path) -> Result<Self> {
        let synced = File::open(path).and_then(|file| file.sync_all());
        synced.map_err(|error| failed("make durable", path, error))?;
        Self::of(path)
    }

    fn is_device(&self) -> bool {
        *self == Self::default()
    }

    /// Whether the file may be unchanged. Old records hold the properties of a block device's node, whose length is
    /// zero.
    fn may_be(&self, now: &Self) -> bool {
        self == now || (now.is_device() && self.length_bytes == 0)
    }

    /// Whether everything but the times is the same.
    fn is_same_file(&self, other: &Self) -> bool {
        (self.inode, self.length_bytes) == (other.inode, other.length_bytes)
    }

    /// Reads the present properties of the file.
    pub(crate) fn of(path: &Path) -> Result<Self> {
        let meta = std::fs::metadata(path).map_err(|error| failed("look at", path, error))?;
        if meta.file_type().is_block_device() {
            return Ok(Self::default());
        }
        Ok(Self {
            inode: meta.ino(),
            length_bytes: meta.len(),
            modified_s: meta.mtime(),
            modified_ns: meta.mtime_nsec(),
        })
    }
}

/// A save under way, as the next run must know it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct UnderWay {
    pub(crate) was_running: bool,
    /// The number of its pair. A note without one belongs to no pair.
    #[serde(default)]
    pub(crate) number: u64,
}

impl Record {
    /// Makes the record that follows `before`.
    pub(crate) fn next(before: Option<&Self>, was_running: bool) -> Self {
        let number = before.map_or(0, |before| before.number) + 1;
        let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        let saved_at_ms = since.map_or(0, |since| u64::try_from(since.as_millis()).unwrap_or(u64::MAX));
        let state = format!("state-{number}");
        let is_being_restored = false;
        Self { version: VERSION, number, saved_at_ms, state, was_running, is_being_restored, disks: Vec::new() }
    }

    /// Reads the record of `directory`; `None` if nothing was saved.
    pub fn read(directory: &Path) -> Result<Option<Self>> {
        let path = directory.join(FILE);
        let Some(record) = read_json::<Self>(&path)? else { return Ok(None) };
        let bad = |what: String| Error::new(ErrorKind::BadImage, format!("'{}': {what}", path.display()));
        if record.version != VERSION {
            return Err(bad(format!("version {} is not known (this program knows {VERSION})", record.version)));
        }
        let is_plain = Path::new(&record.state).file_name() == Some(record.state.as_ref());
        if is_plain { Ok(Some(record)) } else { Err(bad("the state must be a file in the same directory".to_owned())) }
    }

    /// Replaces the record durably: after a power cut there is the old one or the new one.
    pub(crate) fn publish(&self, directory: &Path) -> Result<()> {
        write_json(directory, NEW_FILE, self)?;
        files::replace(directory, NEW_FILE, FILE)
    }

    /// Returns the path of the machine's state.
    #[must_use]
    pub fn state_path(&self, directory: &Path) -> PathBuf {
        directory.join(&self.state)
    }

    /// Whether the disks' files are as they were when they were saved. With `force`, times are ignored if a restore was
    /// broken off.
    pub(crate) fn check_disks(&self, force: bool) -> Result<()> {
        let checked = self.disks.iter().try_for_each(|disk| disk.check(force && self.is_being_restored));
        checked.map_err(|error| match self.is_being_restored && !force {
            true => {
                let what = "a restore was broken off while it opened the files. If nobody has written to them since, use \
                            --force";
                Error::new(error.kind(), format!("{error}; {what}"))
            }
            false => error,
        })
    }

    /// Whether all layers that the save wanted to take back were taken back, and the disks frozen again.
    pub(crate) fn is_finished(&self) -> bool {
        self.disks.iter().all(|disk| disk.seen.is_some())
    }

    /// Removes states of earlier saves and of saves that were broken off, which the record does not name.
    pub(crate) fn remove_others(&self, directory: &Path) -> Result<()> {
        remove_states(directory, Some(&self.state))
    }
}

/// Locks the directory, and creates it if it is missing. One program at a time saves to it or restores from it.
pub(crate) fn lock_directory(directory: &Path) -> Result<File> {
    let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(directory);
    made.map_err(|error| failed("make", directory, error))?;
    let lock = File::open(directory).map_err(|error| failed("open", directory, error))?;
    if flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
        let what = format!("'{}': a save or a restore is under way", directory.display());
        return Err(Error::new(ErrorKind::Locked, what));
    }
    Ok(lock)
}

/// Removes all states but one.
pub(crate) fn remove_states(directory: &Path, but: Option<&str>) -> Result<()> {
    let entries = std::fs::read_dir(directory).map_err(|error| failed("read", directory, error))?;
    for entry in entries {
        let name = entry.map_err(|error| failed("read", directory, error))?.file_name();
        let Some(name) = name.to_str() else { continue };
        let number = name.strip_prefix("state-").and_then(|number| number.parse::<u64>().ok());
        if number.is_some() && but != Some(name) {
            files::remove(&directory.join(name))?;
        }
    }
    Ok(())
}

/// Returns a layer's external data file, if the layer's name tells it.
fn data_of(file: &Path, format: &str) -> Option<PathBuf> {
    format.parse::<Format>().ok()?.data_file_of(file)
}

fn is_remote(file: &Path) -> bool {
    FileName::parse(file).is_ok_and(|name| name.is_remote())
}

/// Checks that this program can compare the files of a disk with the record, as a restore does. Fails if it sees a file
/// and may not open it. Apart from the top, files that it does not see are not compared.
pub(crate) fn check_files(name: &str, layers: &[Layer]) -> Result<()> {
    for (index, layer) in layers.iter().enumerate() {
        for file in [Some(layer.file.clone()), data_of(&layer.file, &layer.format)].into_iter().flatten() {
            let Err(error) = File::open(&file) else { continue };
            if (index == 0 && file == layer.file) || file.exists() {
                let what = "save as a user who may read all files of the disk, such as the daemon's user";
                let error = failed("read", &file, error);
                return Err(Error::new(error.kind(), format!("disk '{name}': {error}; {what}")));
            }
        }
    }
    Ok(())
}

impl LayerBelow {
    fn files(&self) -> impl Iterator<Item = PathBuf> + use<> {
        [Some(self.file.clone()), data_of(&self.file, &self.format)].into_iter().flatten()
    }
}

impl SavedDisk {
    /// Records the present state of the disk's files. `layers` are all layers of the disk, of which its file is one.
    pub(crate) fn look(&mut self, layers: &[Layer]) -> Result<()> {
        self.seen = Some(Seen::durable(&self.file)?);
        let below = layers.iter().skip_while(|layer| layer.file != self.file).skip(1);
        self.below = below.map(|layer| LayerBelow { file: layer.file.clone(), format: layer.format.clone() }).collect();
        let data = data_of(&self.file, &self.format);
        let others: Vec<PathBuf> = data.into_iter().chain(self.bases()).collect();
        self.others.clear();
        let mut is_told = false;
        for file in others.into_iter().filter(|file| !is_remote(file)) {
            match Seen::durable(&file).or_else(|_| Seen::of(&file)) {
                Ok(seen) if seen.is_device() => {}
                Ok(seen) => self.others.push(OtherFile { file, seen }),
                // Only the daemon can see this file.
                Err(error) if !is_told => {
                    let what = "if that changes, what is saved is of no use, and restore will not notice";
                    tracing::warn!("disk '{}': {error}; {what}", self.name);
                    is_told = true;
                }
                Err(_) => {}
            }
        }
        Ok(())
    }

    /// Records the present state of the same files.
    pub(crate) fn look_again(&mut self) -> Result<()> {
        self.seen = Some(Seen::durable(&self.file)?);
        self.others.iter_mut().try_for_each(|other| {
            // Older saves recorded files that they could not open.
            other.seen = Seen::durable(&other.file).or_else(|_| Seen::of(&other.file))?;
            Ok(())
        })
    }

    /// Notes that the layers above the image are about to be taken back into it, so the files' recorded states mean
    /// nothing.
    pub(crate) fn is_taken_back(&mut self) {
        self.seen = None;
        let first_that_stays = match self.below.iter().position(|layer| layer.file == self.base) {
            Some(base) => base + 1,
            None if self.file == self.base => 0,
            None => self.below.len(),
        };
        let stay = self.below.get(first_that_stays..).unwrap_or_default();
        let belongs = |layer: &LayerBelow, file: &Path| {
            layer.file == file || data_of(&layer.file, &layer.format).is_some_and(|data| data == file)
        };
        self.others.retain(|other| stay.iter().any(|layer| belongs(layer, &other.file)));
    }

    /// Returns the layers below its file down to the image, the next one first. Layers may be taken back into them.
    pub(crate) fn former_tops(&self) -> Vec<FormerTop> {
        let Some(base) = self.below.iter().position(|layer| layer.file == self.base) else { return Vec::new() };
        let tops = self.below.iter().take(base + 1);
        tops.map(|layer| FormerTop { file: layer.file.clone(), format: Some(layer.format.clone()) }).collect()
    }

    /// Returns the files below the disk's file, which the daemon was allowed to open at the save. They include the
    /// image of a kept scratch overlay, which lies elsewhere.
    pub(crate) fn bases(&self) -> Vec<PathBuf> {
        self.below.iter().flat_map(LayerBelow::files).collect()
    }

    /// Whether the disk's files are as they were at the save. Without times, their times are ignored.
    fn check(&self, without_times: bool) -> Result<()> {
        let compare = |file: &Path, seen: &Seen| {
            let now = Seen::of(file)?;
            if seen.may_be(&now) || (without_times && now.is_same_file(seen)) {
                return Ok(());
            }
            let what = "was changed since it was saved: it no longer belongs to the machine's state";
            Err(Error::new(ErrorKind::BadImage, format!("disk '{}': '{}' {what}", self.name, file.display())))
        };
        match &self.seen {
            Some(seen) => compare(&self.file, seen)?,
            None => Seen::of(&self.file).map(|_| ())?,
        }
        self.others.iter().try_for_each(|other| compare(&other.file, &other.seen))
    }
}

impl UnderWay {
    pub(crate) fn read(directory: &Path) -> Result<Option<Self>> {
        read_json(&directory.join(UNDER_WAY))
    }

    pub(crate) fn write(self, directory: &Path) -> Result<()> {
        // If the storage is full, the old note stays.
        write_json(directory, NEW_UNDER_WAY, &self)?;
        files::replace(directory, NEW_UNDER_WAY, UNDER_WAY)
    }

    /// Removes the note durably. If it came back after a power cut, the next save would let a machine go on that its user
    /// has stopped.
    pub(crate) fn remove(directory: &Path) -> Result<()> {
        files::remove(&directory.join(UNDER_WAY))?;
        files::sync_directory(directory)
    }
}

pub(crate) fn read_json<T: serde::de::DeserializeOwned>(path: &Path) -> Result<Option<T>> {
    let text = match std::fs::read(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        read => read.map_err(|error| failed("read", path, error))?,
    };
    let bad = |error: serde_json::Error| {
        let what = block::in_plain_words(&error.to_string());
        Error::new(ErrorKind::BadImage, format!("'{}': {what}", path.display()))
    };
    serde_json::from_slice(&text).map(Some).map_err(bad)
}

pub(crate) fn write_json(directory: &Path, name: &str, value: &impl Serialize) -> Result<()> {
    let path = directory.join(name);
    let text = serde_json::to_vec_pretty(value).map_err(|error| failed("write", &path, error.into()))?;
    let mut file = NewFile::create_or_truncate(&path)?;
    file.write(&text)?;
    file.sync()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_replaces_the_one_before_and_names_files_that_did_not_change() {
        let dir = tempfile::tempdir().unwrap();
        let image = dir.path().join("image");
        std::fs::write(&image, "one").unwrap();
        assert_eq!(Record::read(dir.path()).unwrap(), None);
        let mut first = Record::next(None, true);
        first.disks.push(SavedDisk {
            name: "root".to_owned(),
            file: image.clone(),
            format: "raw".to_owned(),
            base: image.clone(),
            options: Options::default(),
            seen: Some(Seen::of(&image).unwrap()),
            below: Vec::new(),
            others: Vec::new(),
        });
        first.publish(dir.path()).unwrap();
        assert_eq!(Record::read(dir.path()).unwrap().as_ref(), Some(&first));
        let mode = std::fs::metadata(dir.path().join(FILE)).unwrap().mode();
        assert_eq!(mode & 0o777, 0o600, "others may not read it");
        first.check_disks(false).unwrap();
        std::fs::write(&image, "two").unwrap();
        let restored = Record { is_being_restored: true, ..first.clone() };
        assert!(restored.check_disks(false).unwrap_err().to_string().contains("--force"));
        restored.check_disks(true).unwrap();
        std::fs::write(&image, "other").unwrap();
        assert!(restored.check_disks(true).is_err());
        assert!(first.check_disks(true).unwrap_err().to_string().contains("was changed"));
        let second = Record::next(Some(&first), false);
        for name in ["state-1", "state-2", "state-7", "state-x"] {
            std::fs::write(dir.path().join(name), "").unwrap();
        }
        second.publish(dir.path()).unwrap();
        second.remove_others(dir.path()).unwrap();
        let is_there = |name: &str| dir.path().join(name).exists();
        assert_eq!(["state-1", "state-2", "state-7", "state-x"].map(is_there), [false, true, false, true]);
        std::fs::write(dir.path().join(FILE), r#"{"version": 1}"#).unwrap();
        assert!(Record::read(dir.path()).is_err());
    }

    #[test]
    fn a_layer_that_changes_below_the_top_is_noticed_until_it_is_taken_back() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        for name in ["top", "kept", "kept.data", "image", "below"] {
            std::fs::write(path(name), name).unwrap();
        }
        let layer = |name: &str, format: &str| Layer { format: format.to_owned(), file: path(name) };
        let gone = Layer { format: "raw".to_owned(), file: "nbd://host/export".into() };
        let layers = [
            layer("new", "qcow2"),
            layer("top", "qcow2"),
            layer("kept", "scratch"),
            layer("image", "raw"),
            layer("below", "raw"),
            gone,
        ];
        let mut record = Record::next(None, true);
        record.disks.push(SavedDisk {
            name: "root".to_owned(),
            file: path("top"),
            format: "qcow2".to_owned(),
            base: path("image"),
            options: Options::default(),
            seen: None,
            below: Vec::new(),
            others: Vec::new(),
        });
        record.disks[0].look(&layers).unwrap();
        record.publish(dir.path()).unwrap();
        let saved = Record::read(dir.path()).unwrap().unwrap();
        let tops: Vec<PathBuf> = saved.disks[0].former_tops().into_iter().map(|top| top.file).collect();
        assert_eq!(tops, [path("kept"), path("image")]);
        let change = |name: &str| std::fs::write(path(name), format!("{name} of another length")).unwrap();
        for (name, is_taken_back) in
            [("top", true), ("kept", true), ("kept.data", true), ("image", true), ("below", false)]
        {
            saved.check_disks(false).unwrap();
            let mut committing = saved.clone();
            committing.disks[0].is_taken_back();
            assert!(!committing.is_finished() && saved.is_finished());
            change(name);
            let error = saved.check_disks(true).unwrap_err().to_string();
            assert!(error.contains("root") && error.contains(&format!("/{name}'")), "{error}");
            assert_eq!(committing.check_disks(false).is_ok(), is_taken_back, "{name}");
            std::fs::write(path(name), name).unwrap();
            record.disks[0].look_again().unwrap();
            record.check_disks(false).unwrap();
            assert!(saved.check_disks(false).is_err(), "written anew");
            std::fs::File::open(path(name)).unwrap().set_modified(saved_time(&saved, &path(name))).unwrap();
        }
    }

    /// Detached on drop.
    struct LoopDevice(PathBuf);

    impl LoopDevice {
        /// Over a new file.
        fn over(path: &Path) -> Option<Self> {
            std::fs::write(path, [0; 1 << 16]).unwrap();
            let output = std::process::Command::new("losetup").args(["--find", "--show"]).arg(path).output();
            let output = output.ok().filter(|output| output.status.success())?;
            Some(Self(PathBuf::from(String::from_utf8(output.stdout).unwrap().trim())))
        }
    }

    impl Drop for LoopDevice {
        fn drop(&mut self) {
            let _ = std::process::Command::new("losetup").arg("--detach").arg(&self.0).status();
        }
    }

    #[test]
    fn a_block_device_is_the_same_after_a_start_of_the_host_has_made_its_node_anew() {
        use rustix::fs::{CWD, FileType, Mode, mknodat};
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        let Some(device) = LoopDevice::over(&path("device")) else {
            eprintln!("skipped: needs loop devices");
            return;
        };
        let number = std::fs::metadata(&device.0).unwrap().rdev();
        let make = |name: &str| mknodat(CWD, path(name), FileType::BlockDevice, Mode::RUSR, number).unwrap();
        ["top", "below"].into_iter().for_each(make);
        std::fs::write(path("image"), "").unwrap();
        let layer = |name: &str| Layer { format: "raw".to_owned(), file: path(name) };
        for (top, others) in [("top", vec!["image", "below"]), ("image", vec!["below"])] {
            let chain: Vec<Layer> = [top].iter().chain(&others).map(|name| layer(name)).collect();
            let mut disk = saved_disk(path(top), "raw");
            disk.look(&chain).unwrap();
            assert!(disk.others.iter().all(|other| other.file == path("image")), "{disk:?}");
            let mut record = Record::next(None, true);
            record.disks.push(disk.clone());
            // As saves before have noted them.
            let node = |file| Seen { inode: std::fs::metadata(file).unwrap().ino(), ..Seen::default() };
            disk.others.push(OtherFile { file: path("below"), seen: node(path("below")) });
            disk.seen = if top == "top" { Some(node(path("top"))) } else { disk.seen };
            record.disks.push(disk);
            for name in ["top", "below"] {
                make(&format!("{name}-anew"));
                std::fs::rename(path(&format!("{name}-anew")), path(name)).unwrap();
            }
            record.check_disks(false).unwrap();
            record.disks.iter_mut().for_each(|disk| disk.look_again().unwrap());
            record.check_disks(false).unwrap();
            if top == "top" {
                std::fs::remove_file(path("top")).unwrap();
                std::fs::write(path("top"), "a file").unwrap();
                assert!(record.check_disks(true).is_err(), "it is no device any more");
            }
        }
    }

    #[test]
    fn a_file_that_may_not_be_read_is_refused_by_a_save_and_compared_where_one_has_taken_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        std::fs::write(path("top"), "").unwrap();
        // It can be looked at and not be opened, by anybody.
        let _socket = std::os::unix::net::UnixListener::bind(path("image")).unwrap();
        let layer = |file: PathBuf| Layer { format: "raw".to_owned(), file };
        let layers = ["top", "image", "hidden"].map(|name| layer(path(name)));
        check_files("root", &[layers[0].clone(), layers[2].clone(), layer("nbd://host/export".into())]).unwrap();
        let error = check_files("root", &layers).unwrap_err().to_string();
        assert!(error.contains("root") && error.contains("/image'") && error.contains("save as"), "{error}");
        assert!(check_files("root", &layers[2..]).is_err(), "the top is needed");
        let mut record = Record::next(None, true);
        record.disks.push(saved_disk(path("top"), "raw"));
        record.disks[0].look(&layers).unwrap();
        record.disks[0].look_again().unwrap();
        record.check_disks(false).unwrap();
        std::fs::remove_file(path("image")).unwrap();
        std::fs::write(path("image"), "other").unwrap();
        assert!(record.check_disks(true).is_err());
    }

    fn saved_disk(file: PathBuf, format: &str) -> SavedDisk {
        SavedDisk {
            name: "root".to_owned(),
            base: file.clone(),
            file,
            format: format.to_owned(),
            options: Options::default(),
            seen: None,
            below: Vec::new(),
            others: Vec::new(),
        }
    }

    /// When the file was modified as the record has seen it.
    fn saved_time(record: &Record, path: &Path) -> std::time::SystemTime {
        let disk = &record.disks[0];
        let other = disk.others.iter().find(|other| other.file == path).map(|other| &other.seen);
        let seen = other.or(disk.seen.as_ref()).unwrap();
        let (seconds, nanoseconds) = (seen.modified_s as u64, seen.modified_ns as u32);
        std::time::UNIX_EPOCH + std::time::Duration::new(seconds, nanoseconds)
    }
}
