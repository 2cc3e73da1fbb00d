//! Saves of the record that fail after the new one has got its name: nobody knows which one is on disk.

use super::*;
use crate::api::MirrorDisk;
use crate::record::{NotedFile, Records, SaveMeets};
use block::{DiskIo, Op, ReactorCtx, Task};
use daemon::{FileIdentity, JobState};
use driver::{Driver, DriverOptions};
use engine::{Reactor, ReactorConfig};
use memory::AlignedBuf;
use std::rc::Rc;
use std::time::{Duration, Instant};

/// Whatever takes longer than this hangs.
const PATIENCE: Duration = Duration::from_secs(120);
const BLOCK_BYTES: usize = 4096;

/// How a disk gets another top.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Change {
    TakeFleeceBack,
    Commit,
    Mirror { existing: bool },
}

const CHANGES: [Change; 4] =
    [Change::TakeFleeceBack, Change::Commit, Change::Mirror { existing: true }, Change::Mirror { existing: false }];

/// A disk with a guest, which gets another top.
struct Changed {
    directory: tempfile::TempDir,
    manager: Arc<Manager>,
    change: Change,
    old_top: PathBuf,
    new_top: PathBuf,
    /// The record before the change.
    old_record: Vec<u8>,
}

impl Changed {
    /// The saves of the record meet this from the change on.
    fn begin(change: Change, met: impl IntoIterator<Item = SaveMeets>) -> Self {
        let managed = Managed::new();
        let root = managed.directory.path().canonicalize().unwrap().join("root");
        std::fs::write(&root, vec![0; SIZE_BYTES as usize]).unwrap();
        managed.add_as(&format!("file={},format=raw,name=web", root.display()), &[]).unwrap();
        let [overlay, copy] = ["overlay", "copy"].map(|name| root.with_file_name(name));
        let (old_top, new_top) = match change {
            Change::TakeFleeceBack | Change::Commit => {
                managed.snapshot("web", &overlay).unwrap();
                (overlay, root)
            }
            Change::Mirror { .. } => (root, copy),
        };
        match change {
            Change::TakeFleeceBack => note_fleece(&managed.manager, &old_top),
            Change::Mirror { existing: true } => std::fs::write(&new_top, vec![7; SIZE_BYTES as usize]).unwrap(),
            Change::Commit | Change::Mirror { existing: false } => {}
        }
        let Managed { directory, manager } = managed;
        let old_record = std::fs::read(directory.path().join("state/disks.json")).unwrap();
        let changed = Self { directory, manager: Arc::new(manager), change, old_top, new_top, old_record };
        changed.export();
        changed.start(met);
        changed
    }

    fn start(&self, met: impl IntoIterator<Item = SaveMeets>) {
        let manager = &self.manager;
        let node = manager.node("web").unwrap();
        if let Change::Mirror { existing } = self.change {
            let request = MirrorDisk {
                target: self.new_top.clone(),
                format: Some("raw".to_owned()),
                existing,
                top: false,
                keep: false,
                bytes_per_second: Some(1),
                within_ms: None,
                stall_ms: None,
            };
            let job = manager.mirror("web", &request).unwrap();
            manager.records.next_saves_meet(met);
            manager.limit_job(job.id, 0).unwrap();
            return;
        }
        manager.records.next_saves_meet(met);
        match self.change {
            Change::TakeFleeceBack => manager.take_fleece_off(node, "web"),
            _ => drop(manager.commit("web", serde_json::from_str("{}").unwrap()).unwrap()),
        }
    }

    fn socket(&self) -> PathBuf {
        self.directory.path().join("socket")
    }

    fn export(&self) {
        let request = AddExport { disk: "web".to_owned(), socket: Some(self.socket()), ..AddExport::default() };
        self.manager.add_export(request).unwrap();
    }

    fn state(&self) -> (JobState, String) {
        let job = self.manager.daemon.jobs().remove(0);
        (job.state, job.outcome.unwrap_or_default())
    }

    fn ended(&self) -> Result<()> {
        self.manager.daemon.wait_job(self.manager.daemon.jobs()[0].id)
    }

    /// A guest comes, fills the block of this number with it, and flushes.
    fn write(&self, number: u8) {
        let path = self.socket();
        with_guest(&path, async move |io| {
            let mut block = AlignedBuf::copy_of(&[number; BLOCK_BYTES]);
            io.write(u64::from(number) * BLOCK_BYTES as u64, &mut block, 0..BLOCK_BYTES).await.unwrap();
            io.run(Op::Flush).await.unwrap();
        });
    }

    /// A guest comes and looks whether it finds what was written.
    fn assert_reads(&self, number: u8) {
        let path = self.socket();
        with_guest(&path, async move |io| {
            let mut block = AlignedBuf::zeroed(BLOCK_BYTES);
            io.read(u64::from(number) * BLOCK_BYTES as u64, &mut block, BLOCK_BYTES).await.unwrap();
            assert!(block.iter().all(|byte| *byte == number), "{number} is lost");
        });
    }

    /// Whether the files of the old and of the new top hold what was written.
    fn hold(&self, number: u8) -> (bool, bool) {
        let holds = |path: &Path| {
            let bytes = std::fs::read(path).unwrap_or_default();
            bytes.chunks(BLOCK_BYTES).any(|block| block == [number; BLOCK_BYTES])
        };
        (holds(&self.old_top), holds(&self.new_top))
    }

    /// The top that a daemon finds if this one is killed.
    fn top_on_disk(&self) -> PathBuf {
        let copy = tempfile::tempdir().unwrap();
        std::fs::copy(self.directory.path().join("state/disks.json"), copy.path().join("disks.json")).unwrap();
        let found = Records::in_directory(copy.path()).unwrap().current();
        PathBuf::from(found.disk("web").unwrap().options.get("file").unwrap())
    }

    /// Ends the daemon, and starts the next one, which may find another record.
    fn again(self, found: Option<&[u8]>) -> Self {
        let Self { directory, manager, change, old_top, new_top, old_record } = self;
        manager.daemon.end_disks().unwrap();
        let mut manager = manager;
        // Threads that wait for the ends of jobs let go of it.
        let manager = loop {
            match Arc::try_unwrap(manager) {
                Ok(manager) => break manager,
                Err(held) => manager = held,
            }
            std::thread::yield_now();
        };
        manager.shutdown().unwrap();
        if let Some(found) = found {
            std::fs::write(directory.path().join("state/disks.json"), found).unwrap();
        }
        let Managed { directory, manager } = Managed::in_directory(directory);
        manager.restore(&[]).unwrap();
        manager.daemon.jobs().iter().for_each(|job| manager.daemon.wait_job(job.id).unwrap());
        Self { directory, manager: Arc::new(manager), change, old_top, new_top, old_record }
    }
}

fn note_fleece(manager: &Manager, fleece: &Path) {
    let fleece = NotedFile { file: fleece.display().to_string(), made: Some(FileIdentity::at(fleece).unwrap()) };
    manager.records.change_disk("web", |disk| disk.fleeces.push(fleece)).unwrap();
}

/// Waits until the first job waits for the record, or has ended.
fn wait_for_doubt(daemon: &Daemon) {
    let begun = Instant::now();
    loop {
        let job = daemon.jobs().remove(0);
        if job.state != JobState::Running || job.outcome.as_ref().is_some_and(|said| said.contains("record")) {
            return;
        }
        assert!(begun.elapsed() < PATIENCE, "{job:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Lets a guest of the disk at this socket do this.
fn with_guest<W: AsyncFnOnce(&DiskIo) + Send + 'static>(socket: &Path, work: W) {
    let reactor = Reactor::spawn(ReactorConfig::default()).unwrap();
    let driver = Driver::connect(socket, DriverOptions::default()).unwrap();
    let (done, is_done) = std::sync::mpsc::channel();
    let job = move |ctx: &Rc<dyn ReactorCtx>| {
        let io = DiskIo::open(&driver, ctx).unwrap();
        ctx.spawn(Task::new(async move {
            work(&io).await;
            drop((io, driver));
            done.send(()).unwrap();
        }));
    };
    reactor.handle().run(Box::new(job)).unwrap();
    is_done.recv_timeout(PATIENCE).unwrap();
    reactor.stop().unwrap();
}

/// The first save gets its name and is not durable, and the next ones are not written.
fn doubt() -> impl Iterator<Item = SaveMeets> {
    std::iter::once(SaveMeets::FailedSync).chain(std::iter::repeat_n(SaveMeets::NoSpace, 1000))
}

#[test]
fn while_nobody_knows_which_record_is_on_disk_guests_write_to_both_tops() {
    for change in CHANGES {
        let changed = Changed::begin(change, doubt());
        wait_for_doubt(&changed.manager.daemon);
        changed.write(1);
        let top = changed.top_on_disk();
        assert_eq!(top, changed.new_top, "{change:?}");
        // A daemon that is killed here leaves either record.
        assert_eq!(changed.hold(1), (true, true), "{change:?}: {:?}", changed.state());
        assert_eq!(changed.state().0, JobState::Running);
        changed.manager.records.next_saves_meet([]);
        changed.ended().unwrap();
        changed.write(2);
        assert_eq!((changed.top_on_disk(), changed.hold(2).1), (changed.new_top.clone(), true));
        assert_eq!(changed.state(), (JobState::Done, String::new()));
        let changed = changed.again(None);
        [1, 2].into_iter().for_each(|number| changed.assert_reads(number));
        assert_eq!(changed.change == Change::TakeFleeceBack, !changed.old_top.exists());
    }
}

#[test]
fn a_daemon_that_ends_before_a_record_is_durable_leaves_both_tops_whole() {
    for change in CHANGES {
        for finds_old in [false, true] {
            let changed = Changed::begin(change, doubt());
            wait_for_doubt(&changed.manager.daemon);
            changed.write(1);
            let old_record = changed.old_record.clone();
            let changed = changed.again(Some(&*old_record).filter(|_| finds_old));
            if finds_old {
                changed.export();
            }
            changed.assert_reads(1);
            let top = changed.top_on_disk();
            let stays = finds_old && change != Change::TakeFleeceBack;
            assert_eq!(top, if stays { changed.old_top.clone() } else { changed.new_top.clone() }, "{change:?}");
        }
    }
}

#[test]
fn a_reload_closes_no_disk_while_nobody_knows_which_record_is_on_disk() {
    let managed = Managed::new();
    let root = managed.image("root", None);
    let drive = |more: &str| format!("[[drive]]\nname = 'web'\nexport = false\nfile = '{}'\n{more}", root.display());
    managed.configured_by(&drive(""));
    let fleece = root.with_file_name("fleece");
    managed.snapshot("web", &fleece).unwrap();
    let manager = &managed.manager;
    note_fleece(manager, &fleece);
    let node = manager.node("web").unwrap();
    manager.records.next_saves_meet(doubt());
    manager.take_fleece_off(node, "web");
    wait_for_doubt(&manager.daemon);
    let reloaded = managed.reload(&drive("serial = 'S'\n"));
    assert_eq!(reloaded.failed.len(), 1, "{reloaded:?}");
    assert_eq!((manager.node("web").unwrap(), manager.daemon.jobs()[0].state.clone()), (node, JobState::Running));
    managed.manager.records.next_saves_meet([]);
    assert_eq!(managed.reload(&drive("serial = 'S'\n")).reopened, ["web"]);
    assert!(!fleece.exists());
}

#[test]
fn a_change_whose_record_is_surely_not_on_disk_fails_at_once() {
    for met in [SaveMeets::NoSpace, SaveMeets::FailedSync] {
        for change in CHANGES {
            // The record is written anew, and that succeeds.
            let changed = Changed::begin(change, [met]);
            let failed = changed.ended().unwrap_err();
            assert_eq!(failed.kind(), ErrorKind::Io, "{failed}");
            changed.write(1);
            assert_eq!((changed.top_on_disk(), changed.hold(1)), (changed.old_top.clone(), (true, false)));
        }
    }
}
