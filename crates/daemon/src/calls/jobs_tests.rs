use super::*;
use crate::daemon::DaemonConfig;
use crate::jobs::commit::CommitOptions;
use crate::state::status::JobState;
use drive::DiskOptions;
use image::{CreateOptions, Opener as _, Role, take_back};
use load::{BenchSpec, Hooks, Pattern, Stop, run};
use std::time::Duration;

const LARGE_BYTES: u64 = 12 << 20;
const BYTES_PER_SECOND: u64 = 2 << 20;

/// A daemon with small patience, and a disk with a full overlay.
fn full(directory: &Path) -> (Daemon, NodeId) {
    let daemon = Daemon::start(DaemonConfig::default().with(|config| config.give_up_after = Duration::from_secs(1)));
    let (daemon, path) = (daemon.unwrap(), directory.join("disk.raw"));
    engine::create(&path, 0).unwrap();
    let file = EngineOpener::default().open(&(&*path).into(), Role::Writable).unwrap();
    image::create(&file, &CreateOptions::raw(LARGE_BYTES)).unwrap();
    drop(file);
    let node = daemon.add_disk(&DiskOptions::of_file(&path)).unwrap();
    daemon.put_overlays(&[(node, &*directory.join("overlay"))]).unwrap();
    let disk = Arc::clone(&daemon.table.find(node).unwrap().disk.disk);
    let spec = BenchSpec::default().with(|spec| {
        (spec.block_bytes, spec.read_percent) = (64 << 10, 0);
        (spec.pattern, spec.stop) = (Pattern::Sequential, Stop::OnePass);
    });
    assert_eq!(run(&disk, &daemon.reactor_handles(), &spec, &Hooks::default()).unwrap().report.errors, 0);
    (daemon, node)
}

/// Slow storage, and far more to do than anybody waits for storage that hangs.
#[test]
fn what_a_cancelled_job_has_to_finish_is_waited_for_as_long_as_it_goes_on() {
    let directory = tempfile::tempdir().unwrap();
    let (daemon, node) = full(directory.path());
    let ending = Arc::new(CopyWatch::default());
    ending.set_rate(BYTES_PER_SECOND);
    let (its, (sender, ended)) = (Arc::clone(&ending), std::sync::mpsc::channel());
    let finish = move |image: &Image, watch: &CopyWatch, has_new_top: &dyn Fn()| {
        while !watch.is_cancelled() {
            std::thread::sleep(Duration::from_millis(10));
        }
        let result = take_back(image, &its, || Ok(()));
        has_new_top();
        sender.send(()).unwrap();
        result
    };
    daemon.start_job_with_ending(JobKind::Backup, node, None, ending, finish).unwrap();
    daemon.shutdown().unwrap();
    ended.try_recv().unwrap();
}

/// A commit looks at the layers first, which the job may change.
#[test]
fn a_commit_beside_a_job_names_the_job_even_if_there_is_nothing_to_commit() {
    let directory = tempfile::tempdir().unwrap();
    let (daemon, node) = full(directory.path());
    let (release, released) = std::sync::mpsc::channel::<()>();
    let wait = move |_: &Image, _: &CopyWatch, _: &dyn Fn()| released.recv().map_err(|_| no_job(JobId(0)));
    let id = daemon.start_job(JobKind::Compact, node, None, wait).unwrap();
    let deep = CommitOptions::default().with(|options| options.layers = 9);
    let refused = daemon.layers_of_commit(node, &deep).unwrap_err();
    assert!(refused.to_string().contains("has a job already: job"), "{refused}");
    let refused = daemon.start_commit(node, deep.clone(), ()).unwrap_err();
    assert!(refused.to_string().contains("has a job already: job"), "{refused}");
    release.send(()).unwrap();
    daemon.wait_job(id).unwrap();
    let refused = daemon.start_commit(node, deep, ()).unwrap_err();
    assert!(refused.to_string().contains("between 1 and 1"), "{refused}");
}

/// Whoever cancels again and again does not pile up threads.
#[test]
fn one_thread_waits_for_a_job_however_often_it_is_cancelled() {
    let directory = tempfile::tempdir().unwrap();
    let (daemon, node) = full(directory.path());
    let (release, released) = std::sync::mpsc::channel::<()>();
    let wait = move |_: &Image, _: &CopyWatch, _: &dyn Fn()| released.recv().map_err(|_| no_job(JobId(0)));
    let id = daemon.start_job(JobKind::Compact, node, None, wait).unwrap();
    let job = daemon.jobs.find(id).unwrap();
    daemon.cancel_job(id).unwrap();
    assert_eq!(job.status().state, JobState::Cancelling, "it has not ended");
    let users = Arc::strong_count(&job);
    (0..50).for_each(|_| daemon.cancel_job(id).unwrap());
    assert!(Arc::strong_count(&job) <= users, "{} users of the job, which had {users}", Arc::strong_count(&job));
    release.send(()).unwrap();
    // It may count as cancelled by now.
    let _ = daemon.wait_job(id);
}
