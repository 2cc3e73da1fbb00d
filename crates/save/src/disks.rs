//! The machine's disks, in the daemon that serves them.

use block::{Error, ErrorKind, Result};
use control::api::{
    AddDisk, CommitDisk, CreateSnapshot, Disk, Disks as AllDisks, ErrorKind as CallErrorKind, FormerTop,
    InternalSnapshot, InternalSnapshots, Job, JobState, Jobs, Overlay, Snapshot, VmState,
};
use control::{CallError, Client, Options, path_segment};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// The disks of a machine, by their names.
pub(crate) trait Disks {
    /// Returns the names of all disks.
    fn names(&self) -> Result<Vec<String>>;

    /// Returns the options with which the disk was opened.
    fn options(&self, name: &str) -> Result<Options>;

    /// Returns the layers of a disk, the top first. There is at least one.
    fn layers(&self, name: &str) -> Result<Vec<Layer>>;

    /// Puts a new layer on each of these disks at the same moment. When this returns, the former tops are durable and
    /// do not change any more.
    fn freeze(&self, overlays: Vec<(String, PathBuf)>) -> Result<()>;

    /// Returns the internal snapshots of a disk's top layer.
    fn snapshots(&self, name: &str) -> Result<Vec<InternalSnapshot>>;

    /// Takes an internal snapshot. If given, it keeps the machine's state: the first bytes of a file.
    fn take_snapshot(&self, name: &str, snapshot: &str, state: Option<(&Path, u64)>) -> Result<()>;

    fn delete_snapshot(&self, name: &str, snapshot: &str) -> Result<()>;

    /// Takes this many layers of a disk back into the layer below, and waits for the end.
    fn commit(&self, name: &str, layers: usize, cancel: &AtomicBool, told: &mut dyn FnMut(u64, u64)) -> Result<()>;

    /// Waits until no job changes the disk.
    fn wait_for_jobs(&self, name: &str) -> Result<()>;

    /// Serves a disk with these options under a new layer, and replaces the disk of that name, also one that could not
    /// be opened or taken off the record. The layer is in place before any write is possible. Later, layers may be taken
    /// back into `former_tops`. The disk may rest on `bases`.
    fn replace(
        &self,
        name: &str,
        options: Options,
        former_tops: Vec<FormerTop>,
        bases: Vec<PathBuf>,
        overlay: PathBuf,
    ) -> Result<()>;
}

/// The disks of a daemon.
#[derive(Debug)]
pub(crate) struct Daemon(Client);

/// A layer of a disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Layer {
    pub(crate) format: String,
    pub(crate) file: PathBuf,
}

fn refused(error: CallError) -> Error {
    match error {
        CallError::NoAnswer(error) | CallError::Ended(error) => error,
        other => Error::new(ErrorKind::Io, other.to_string()),
    }
}

/// Parses `qcow2 '/images/a': io_uring...`.
fn layer(line: &str) -> Option<Layer> {
    let (format, rest) = line.split_once(" '")?;
    let (file, _) = rest.split_once("': ")?;
    Some(Layer { format: format.to_owned(), file: file.into() })
}

impl Daemon {
    pub(crate) fn new(control: &Path) -> Result<Self> {
        Client::new(control).map(Self)
    }

    /// Whether a guest's monitor or an NBD client uses the disk.
    pub(crate) fn is_used(&self, name: &str) -> Result<bool> {
        Ok(self.show(name)?.exports.iter().any(|export| export.connected))
    }

    fn show(&self, name: &str) -> Result<Disk> {
        self.0.get(&format!("/v1/disks/{}", path_segment(name))).map_err(refused)
    }
}

impl Disks for Daemon {
    fn names(&self) -> Result<Vec<String>> {
        let all: AllDisks = self.0.get("/v1/disks").map_err(refused)?;
        Ok(all.disks.into_iter().map(|disk| disk.name).collect())
    }

    fn options(&self, name: &str) -> Result<Options> {
        Ok(self.show(name)?.options)
    }

    fn layers(&self, name: &str) -> Result<Vec<Layer>> {
        let layers: Vec<Layer> = self.show(name)?.layers.iter().filter_map(|line| layer(line)).collect();
        match layers.is_empty() {
            true => Err(Error::new(ErrorKind::Unsupported, format!("disk '{name}' has no file that could be saved"))),
            false => Ok(layers),
        }
    }

    fn freeze(&self, overlays: Vec<(String, PathBuf)>) -> Result<()> {
        let overlays = overlays.into_iter().map(|(disk, overlay)| Overlay { disk, overlay }).collect();
        self.0.post::<serde_json::Value>("/v1/snapshots", &Snapshot { overlays }).map(drop).map_err(refused)
    }

    fn snapshots(&self, name: &str) -> Result<Vec<InternalSnapshot>> {
        let all: InternalSnapshots =
            self.0.get(&format!("/v1/disks/{}/snapshots", path_segment(name))).map_err(refused)?;
        Ok(all.snapshots)
    }

    fn take_snapshot(&self, name: &str, snapshot: &str, state: Option<(&Path, u64)>) -> Result<()> {
        let vm_state = state.map(|(file, length_bytes)| VmState { file: file.to_owned(), length_bytes });
        let request = CreateSnapshot { name: snapshot.to_owned(), vm_state };
        let path = format!("/v1/disks/{}/snapshots", path_segment(name));
        self.0.post::<InternalSnapshots>(&path, &request).map(drop).map_err(refused)
    }

    fn delete_snapshot(&self, name: &str, snapshot: &str) -> Result<()> {
        let path = format!("/v1/disks/{}/snapshots/{}", path_segment(name), path_segment(snapshot));
        self.0.delete(&path).map(drop).map_err(refused)
    }

    fn commit(&self, name: &str, layers: usize, cancel: &AtomicBool, told: &mut dyn FnMut(u64, u64)) -> Result<()> {
        let request = CommitDisk { layers, ..CommitDisk::default() };
        let mut job: Job =
            self.0.post(&format!("/v1/disks/{}/commit", path_segment(name)), &request).map_err(refused)?;
        let mut is_cancelled = false;
        while job.state.is_under_way() {
            if cancel.load(Ordering::Relaxed) && !is_cancelled {
                is_cancelled = true;
                self.0.post_nothing::<Job>(&format!("/v1/jobs/{}/cancel", job.id)).map_err(refused)?;
            }
            std::thread::sleep(Duration::from_millis(10));
            job = self.0.get(&format!("/v1/jobs/{}", job.id)).map_err(refused)?;
            told(job.done_bytes, job.total_bytes);
        }
        match (job.state, job.error) {
            (JobState::Done, _) => Ok(()),
            (JobState::Cancelled, _) => Err(Error::new(ErrorKind::Cancelled, "interrupted")),
            (_, error) => Err(Error::new(ErrorKind::Io, error.unwrap_or_else(|| "it does not say why".to_owned()))),
        }
    }

    fn wait_for_jobs(&self, name: &str) -> Result<()> {
        loop {
            let jobs: Jobs = self.0.get("/v1/jobs").map_err(refused)?;
            if !jobs.jobs.iter().any(|job| job.disk == name && job.state.is_under_way()) {
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn replace(
        &self,
        name: &str,
        options: Options,
        former_tops: Vec<FormerTop>,
        bases: Vec<PathBuf>,
        overlay: PathBuf,
    ) -> Result<()> {
        let is_served = self.names()?.iter().any(|own| own == name);
        match self.0.delete(&format!("/v1/disks/{}?force=true", path_segment(name))) {
            Err(CallError::Refused(why)) if !is_served && why.kind == CallErrorKind::NotFound => {}
            removed => removed.map_err(refused)?,
        }
        self.0
            .post::<Disk>("/v1/disks", &AddDisk { options, export: true, overlay: Some(overlay), former_tops, bases })
            .map(drop)
            .map_err(refused)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use control::{ControlServer, Manager};
    use std::sync::Arc;

    /// The disk is closed, and its name stays taken, because the daemon could not write that it is gone.
    #[test]
    fn a_restore_is_tried_again_after_the_daemon_could_not_record_it() {
        let directory = tempfile::tempdir().unwrap();
        let [control, state, file] = ["control", "state", "disk"].map(|name| directory.path().join(name));
        std::fs::write(&file, vec![0; 1 << 20]).unwrap();
        let manager = Arc::new(Manager::start(Default::default(), Some(&state)).unwrap());
        let mut server = ControlServer::listen(&control, Arc::clone(&manager)).unwrap();
        let daemon = Daemon::new(&control).unwrap();
        let options = Options::parse(&format!("file={},format=raw,name=root", file.display())).unwrap();
        let replace =
            |layer: &str| daemon.replace("root", options.clone(), Vec::new(), Vec::new(), directory.path().join(layer));
        let tops = || manager.disks().into_iter().map(|disk| disk.file).collect::<Vec<_>>();
        let top = |layer: &str| vec![directory.path().join(layer).display().to_string()];
        replace("one").unwrap();
        assert_eq!(tops(), top("one"));
        let full = state.join("disks.json.new");
        std::fs::create_dir(&full).unwrap();
        replace("two").unwrap_err();
        assert!(tops().is_empty() && manager.failed_disks().len() == 1);
        std::fs::remove_dir(full).unwrap();
        replace("three").unwrap();
        assert_eq!(tops(), top("three"));
        assert!(manager.failed_disks().is_empty());
        server.close();
    }

    #[test]
    fn layers_are_read_from_their_lines() {
        let found = layer("qcow2 '/images/it's a.qcow2': io_uring, cache=none: O_DIRECT").unwrap();
        assert_eq!((found.format.as_str(), found.file.to_str()), ("qcow2", Some("/images/it's a.qcow2")));
        assert_eq!(layer("null"), None);
    }
}
