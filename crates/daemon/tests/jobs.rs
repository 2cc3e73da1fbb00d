//! Jobs on running disks: watched, cancelled, and gone with their disk, while guests and exports go on.

mod common;

use block::{Disk, ErrorKind};
use common::{Client, Guest, assert_clean, assert_holds, at, connect, create, start};
use drive::{DiskOptions, DriveFormat, DriveOptions, EngineOpener, open_disk};
use image::{BackingPolicy, CreateOptions, FileName, Format, Opener, Role};
use load::{BenchSpec, Hooks, Initial, Pattern, Stop, Verify, VerifyState, run};
use ringdisk_daemon::{Daemon, DaemonConfig, ExportId, JobId, JobState, JobStatus, NodeId};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Barrier};
use tempfile::TempDir;

/// Enough that a copy takes a while.
const LARGE_BYTES: u64 = 64 << 20;
/// A job may be done before anybody can stop it, but not so often in a row.
const TRIES_MAX: usize = 20;

/// A large disk with an overlay. A guest goes on in its first part; the rest of the overlay is full.
struct Served {
    dir: TempDir,
    daemon: Daemon,
    options: DiskOptions,
    disk: NodeId,
    export: ExportId,
    guest: Guest,
    rest: VerifyState,
}

fn rest(initial: Initial) -> BenchSpec {
    BenchSpec::default().with(|spec| {
        spec.queue_depth = 8;
        spec.block_bytes = 64 << 10;
        spec.offset_bytes = common::SIZE_BYTES;
        spec.length_bytes = Some(LARGE_BYTES - common::SIZE_BYTES);
        spec.verify = Some(Verify::new(9, initial));
        spec.pattern = Pattern::Sequential;
        spec.stop = Stop::OnePass;
    })
}

/// Writes all of the rest.
fn fill(disk: &Arc<dyn Disk>) -> VerifyState {
    let spec = rest(Initial::Zeros).with(|spec| spec.read_percent = 0);
    let outcome = run(disk, &Client::new(1).handles, &spec, &Hooks::default()).unwrap();
    assert_clean(&outcome.report);
    outcome.state.unwrap()
}

impl Served {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let daemon = start(2);
        let mut options = create(&dir.path().join("disk.qcow2"), DriveFormat::Qcow2).disk;
        options.name = Some("root".to_owned());
        let disk = daemon.add_disk(&options).unwrap();
        daemon.resize(disk, LARGE_BYTES).unwrap();
        daemon.put_overlays(&[(disk, &*dir.path().join("overlay"))]).unwrap();
        let export = daemon.add_export(disk, &at(&dir.path().join("s"))).unwrap();
        let rest = filled(&daemon, disk, &dir.path().join("filler"));
        let guest = Guest::load(&dir.path().join("s"), 0);
        Self { dir, daemon, options, disk, export, guest, rest }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn status(&self, id: JobId) -> JobStatus {
        self.daemon.jobs().into_iter().find(|job| job.id == id).unwrap()
    }

    fn layers(&self) -> usize {
        self.daemon.disks()[0].layers.len()
    }

    /// Puts an overlay on top again, as full as the first.
    fn overlay_again(&mut self) {
        std::fs::remove_file(self.path("overlay")).unwrap();
        self.daemon.put_overlays(&[(self.disk, &*self.path("overlay"))]).unwrap();
        self.rest = filled(&self.daemon, self.disk, &self.path("filler"));
    }

    /// Ends the guest and the daemon; `opened` is what the disk is to be opened by afterwards.
    fn end(self, opened: &DiskOptions) {
        let (guests_disk, state) = self.guest.stop();
        assert_holds(&guests_disk, 0, state.clone());
        drop(guests_disk);
        self.daemon.shutdown().unwrap();
        let opened = open_disk(opened, BackingPolicy::SameDir, &[]).unwrap();
        assert_holds(&opened.disk, 0, state);
        let spec = rest(Initial::State(self.rest)).with(|spec| spec.read_percent = 100);
        assert_clean(&run(&opened.disk, &Client::new(1).handles, &spec, &Hooks::default()).unwrap().report);
        opened.close().unwrap();
    }
}

fn filled(daemon: &Daemon, disk: NodeId, socket: &Path) -> VerifyState {
    let export = daemon.add_export(disk, &at(socket)).unwrap();
    let state = fill(&connect(socket, 1));
    daemon.remove_export(export).unwrap();
    state
}

#[test]
fn a_job_is_listed_with_progress_that_rises_to_its_total_and_takes_the_overlay_back_under_load() {
    let served = Served::new();
    let layers = served.layers();
    let id = served.daemon.start_take_overlay_back(served.disk).unwrap();
    let mut last = served.status(id);
    assert_eq!((last.node, &*last.disk), (served.disk, "root"));
    while last.state == JobState::Running {
        let next = served.status(id);
        assert!(next.done_bytes >= last.done_bytes && next.total_bytes >= last.total_bytes, "{last:?} {next:?}");
        assert!(next.done_bytes <= next.total_bytes, "{next:?}");
        last = next;
        std::thread::yield_now();
    }
    assert_eq!((last.state, last.done_bytes), (JobState::Done, last.total_bytes));
    assert!(last.total_bytes >= LARGE_BYTES);
    assert_eq!(last.time_left, None, "it has ended");
    assert_eq!(served.layers(), layers - 1);
    served.daemon.wait_job(id).unwrap();
    served.daemon.cancel_job(id).unwrap();
    assert_eq!(served.status(id).state, JobState::Done, "it has ended");
    served.daemon.forget_job(id).unwrap();
    assert!(served.daemon.wait_job(id).unwrap_err().to_string().contains("there is no job"));

    let id = served.daemon.start_take_overlay_back(served.disk).unwrap();
    assert!(served.daemon.wait_job(id).unwrap_err().to_string().contains("no layer below"));
    assert!(matches!(served.status(id).state, JobState::Failed(message) if message.contains("no layer below")));
    std::fs::remove_file(served.path("overlay")).unwrap();
    let options = served.options.clone();
    served.end(&options);
}

#[test]
fn jobs_that_are_cancelled_leave_a_disk_its_overlay_and_its_data_while_exports_come_and_go() {
    let mut served = Served::new();
    let (layers, mut cancelled) = (served.layers(), 0);
    for round in 0..20 {
        let id = served.daemon.start_take_overlay_back(served.disk).unwrap();
        let export = served.daemon.add_export(served.disk, &at(&served.path("other"))).unwrap();
        // Every other time it is in the midst of its copy.
        let is_early = |job: JobStatus| job.state == JobState::Running && job.done_bytes == 0;
        while round % 2 == 0 && is_early(served.status(id)) {
            std::thread::yield_now();
        }
        served.daemon.cancel_job(id).unwrap();
        match served.daemon.wait_job(id) {
            Ok(()) => served.overlay_again(),
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Cancelled, "{error}");
                assert_eq!(served.status(id).state, JobState::Cancelled);
                cancelled += 1;
            }
        }
        assert_eq!(served.layers(), layers);
        served.daemon.remove_export(export).unwrap();
    }
    assert!(cancelled > 0);
    let mut options = served.options.clone();
    options.file = DriveOptions::of_file(served.path("overlay")).disk.file;
    served.end(&options);
}

/// Removes a disk while a job of it runs. False if the job was done before it could be cancelled.
fn removed_while_its_job_runs() -> bool {
    let Served { dir: _dir, daemon, disk, export, guest, .. } = Served::new();
    drop(guest.stop());
    daemon.remove_export(export).unwrap();
    let id = daemon.start_take_overlay_back(disk).unwrap();
    let (refused, forget) = (daemon.remove_disk(disk, false), daemon.forget_job(id));
    let (Err(refused), Err(forget)) = (refused, forget) else { return false };
    assert!(refused.to_string().contains(&format!("job {id} (taking its overlay back)")), "{refused}");
    assert!(forget.to_string().contains("'root' runs"), "{forget}");
    daemon.remove_disk(disk, true).unwrap();
    assert!(daemon.disks().is_empty());
    let state = daemon.jobs().remove(0).state;
    daemon.shutdown().unwrap();
    assert!(matches!(state, JobState::Cancelled | JobState::Done), "{state:?}");
    state == JobState::Cancelled
}

#[test]
fn a_disk_with_a_job_is_removed_by_force_only_and_its_job_is_cancelled() {
    assert!((0..TRIES_MAX).any(|_| removed_while_its_job_runs()));
}

#[test]
fn the_last_jobs_that_have_ended_stay_listed() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = start(1);
    let disk = daemon.add_disk(&create(&dir.path().join("image"), DriveFormat::Raw).disk).unwrap();
    for _ in 0..70 {
        let id = daemon.start_take_overlay_back(disk).unwrap();
        assert!(daemon.wait_job(id).is_err());
    }
    let listed = daemon.jobs();
    assert_eq!(listed.len(), 64);
    assert!(listed.iter().all(|job| matches!(job.state, JobState::Failed(_))), "{listed:?}");
    daemon.remove_disk(disk, false).unwrap();
    daemon.shutdown().unwrap();
}

#[test]
fn of_many_who_start_a_job_on_a_disk_at_once_one_succeeds() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = start(1);
    let disk = daemon.add_disk(&create(&dir.path().join("image"), DriveFormat::Qcow2).disk).unwrap();
    for round in 0..50 {
        daemon.put_overlays(&[(disk, &*dir.path().join(format!("overlay{round}")))]).unwrap();
        // The job that succeeds runs until all have tried.
        let (starts, ends) = (Barrier::new(8), Arc::new(Barrier::new(2)));
        let started: Vec<JobId> = std::thread::scope(|scope| {
            let try_one = || {
                let ends = Arc::clone(&ends);
                starts.wait();
                daemon.start_take_overlay_back_with(disk, move |_| {
                    ends.wait();
                    Ok(())
                })
            };
            let tries: Vec<_> = (0..8).map(|_| scope.spawn(try_one)).collect();
            tries.into_iter().filter_map(|one| one.join().unwrap().ok()).collect()
        });
        ends.wait();
        assert_eq!(started.len(), 1, "round {round}");
        daemon.wait_job(started[0]).unwrap();
    }
    daemon.shutdown().unwrap();
}

#[test]
fn jobs_and_reopening_use_the_bases_that_the_user_named_for_the_disk() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().canonicalize().unwrap().join(name);
    let [image, given, other, base] = ["image", "given", "other", "base"].map(at);
    create(&given, DriveFormat::Raw);
    create(&base, DriveFormat::Raw);
    let mut options = create_over(&image, &given);
    create_over(&other, &base);
    let daemon =
        Daemon::start(DaemonConfig::default().with(|config| config.allow_backing = BackingPolicy::Listed)).unwrap();
    let rebase = |disk| daemon.start_rebase_with(disk, &other, Some(Format::Qcow2), None, ());
    options.bases = vec![given.clone()];
    let disk = daemon.add_disk(&options).unwrap();
    assert!(rebase(disk).is_err(), "nobody has named the base");
    daemon.remove_disk(disk, false).unwrap();
    options.bases = vec![given, base.clone()];
    let disk = daemon.add_disk(&options).unwrap();
    daemon.wait_job(rebase(disk).unwrap()).unwrap();
    let layers = [image, other.clone(), base].map(FileName::from);
    assert_eq!(daemon.layer_files(disk).unwrap(), layers);
    options.bases.clear();
    for _ in 0..2 {
        daemon.reopen_as(disk, &options).unwrap();
    }
    daemon.shutdown().unwrap();
}

/// A qcow2 image that rests on a raw one.
fn create_over(path: &Path, base: &Path) -> DiskOptions {
    let options = create(path, DriveFormat::Qcow2).disk;
    let names_base = format_qcow2::CreateOptions::default().with(|options| {
        options.size_bytes = common::SIZE_BYTES;
        options.backing_file = Some(base.display().to_string());
        options.backing_format = Some("raw".to_owned());
    });
    let file = EngineOpener::default().open(&path.into(), Role::Writable).unwrap();
    image::create(&file, &CreateOptions::Qcow2(names_base)).unwrap();
    options
}
