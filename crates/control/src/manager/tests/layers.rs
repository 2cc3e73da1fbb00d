//! Layers that are committed, and internal snapshots of large images.

use super::*;
use crate::api::{JobKind, MirrorDisk, RebaseDisk};
use crate::backups::RecordOfBackup;
use daemon::{FleeceRecord, TakenOff};
use image::{ClosedEdit, NewSnapshot};
use std::time::{Duration, Instant};

#[test]
fn a_layer_between_others_is_committed_and_a_daemon_that_died_in_it_looks_what_its_image_names() {
    let managed = Managed::new();
    let root = managed.image("root", None);
    let [middle, top] = ["middle", "top"].map(|name| root.with_file_name(name));
    managed.add(&root, &[]).unwrap();
    [&middle, &top].into_iter().for_each(|overlay| drop(managed.snapshot("web", overlay).unwrap()));
    let layer = image::FileName::from(middle.as_path());
    let goes = |managed: &Managed| {
        let record = managed.manager.record_of("web", managed.manager.node("web").unwrap());
        record.change(|disk| disk.layer_goes(&layer)).unwrap();
    };
    // The daemon dies before the image names its new base.
    goes(&managed);
    let managed = managed.again();
    managed.manager.restore(&[]).unwrap();
    let recorded = managed.recorded().unwrap();
    assert_eq!((recorded.former_tops.len(), recorded.leaving_tops.len()), (2, 0));

    // It dies after that.
    let (daemon, node) = (&managed.manager.daemon, managed.manager.node("web").unwrap());
    let options = || daemon::CommitOptions::default().with(|options| options.top = Some(middle.clone()));
    daemon.wait_job(daemon.start_commit(node, options(), ()).unwrap()).unwrap();
    goes(&managed);
    let managed = managed.again();
    managed.manager.restore(&[]).unwrap();
    let recorded = managed.recorded().unwrap();
    assert_eq!((recorded.former_tops.len(), recorded.leaving_tops.len()), (1, 0));
    assert_eq!(managed.manager.disk("web").unwrap().layers.len(), 2);

    // A whole call, on a chain that was open for reading.
    let before = managed.image("before", Some(&top));
    let first = managed.image("first", Some(&before));
    managed.manager.remove_disk("web", true).unwrap();
    managed.add(&first, &[]).unwrap();
    let manager = Arc::new(managed.manager);
    let request = || CommitDisk { top: Some(top.clone()), base: Some(root.clone()), ..CommitDisk::default() };
    let wrong = CommitDisk { layers: 2, ..request() };
    assert!(manager.commit("web", wrong).unwrap_err().to_string().contains("not both"));
    let job = manager.commit("web", request()).unwrap();
    manager.daemon.wait_job(manager.job_id(job.id).unwrap()).unwrap();
    assert_eq!(manager.disk("web").unwrap().layers.len(), 3);
    // And its top into what is then below it.
    let job = manager.commit("web", CommitDisk { layers: 2, ..CommitDisk::default() }).unwrap();
    manager.daemon.wait_job(manager.job_id(job.id).unwrap()).unwrap();
    assert_eq!(manager.disk("web").unwrap().file, root.display().to_string());
    assert!(manager.records.current().disk("web").unwrap().has_layers_on(first.to_str()));
}

#[test]
fn a_rebase_is_listed_by_its_name_whatever_its_new_base_is() {
    let managed = Managed::new();
    let root = managed.image("root", None);
    let (middle, other) = (managed.image("middle", Some(&root)), managed.image("other", None));
    let top = managed.image("top", Some(&middle));
    managed.add(&top, &[]).unwrap();
    let manager = Arc::new(managed.manager);
    for base in [&root, &other] {
        let job =
            manager.rebase("web", &RebaseDisk { base: base.clone(), format: None, bytes_per_second: None }).unwrap();
        assert_eq!(job.kind, JobKind::Rebase, "{}", base.display());
        manager.daemon.wait_job(manager.job_id(job.id).unwrap()).unwrap();
    }
}

#[test]
fn a_refused_copy_names_the_option_that_is_missing() {
    let managed = Managed::new();
    let root = managed.image("root", None);
    managed.add(&root, &[]).unwrap();
    let there = managed.image("there", None);
    let manager = Arc::new(managed.manager);
    let mirror = |request: serde_json::Value| {
        manager.mirror("web", &serde_json::from_value(request).unwrap()).unwrap_err().to_string()
    };
    let said = mirror(serde_json::json!({ "target": there }));
    assert!(said.contains("--existing"), "{said}");
    let said = mirror(serde_json::json!({ "target": there, "existing": true }));
    assert!(said.contains("--format"), "{said}");
    let backup = serde_json::json!({ "target": there });
    let job = manager.backup("web", serde_json::from_value(backup).unwrap()).unwrap();
    let said = manager.daemon.wait_job(manager.job_id(job.id).unwrap()).unwrap_err().to_string();
    assert!(said.contains("--existing"), "{said}");
}

/// Asks for a second snapshot at each step of the first one.
struct Second<'a> {
    record: RecordOfBackup,
    managed: &'a Managed,
    refused: usize,
}

impl Second<'_> {
    fn is_refused(&mut self) {
        let before = self.managed.recorded();
        let second = self.managed.manager.create_internal_snapshot("web", "second", None).unwrap_err();
        assert_eq!((second.kind(), self.managed.recorded()), (ErrorKind::Locked, before), "{second}");
        self.refused += 1;
    }
}

impl FleeceRecord for Second<'_> {
    fn will_make(&mut self, fleece: &Path) -> Result<()> {
        self.record.will_make(fleece)?;
        self.is_refused();
        Ok(())
    }

    fn has_made(&mut self, fleece: &Path) -> Result<()> {
        self.is_refused();
        self.record.has_made(fleece)
    }

    fn is_on_top(&mut self, fleece: &Path) -> Result<()> {
        self.record.is_on_top(fleece)?;
        self.is_refused();
        Ok(())
    }

    fn is_off(&mut self, layers: &TakenOff) -> Result<()> {
        self.is_refused();
        self.record.is_off(layers)
    }

    fn is_unmade(&mut self, fleece: &Path) -> Result<()> {
        self.record.is_unmade(fleece)
    }

    fn is_removed(&mut self, fleece: &Path) -> Result<()> {
        self.is_refused();
        self.record.is_removed(fleece)
    }
}

#[test]
fn a_second_snapshot_of_a_large_image_is_refused_at_each_step_of_the_first_one() {
    let managed = Managed::new();
    let root = managed.directory.path().canonicalize().unwrap().join("root");
    let options = format_qcow2::CreateOptions::default().with(|options| {
        options.size_bytes = SIZE_BYTES;
        options.cluster_size = 512;
    });
    std::fs::write(&root, "").unwrap();
    let file = drive::EngineOpener::default().open(&FileName::from(&root), Role::Writable).unwrap();
    image::create(&file, &CreateOptions::Qcow2(options)).unwrap();
    drop(file);
    // It counts as one with many clusters.
    std::fs::OpenOptions::new().write(true).open(&root).unwrap().set_len(4 << 20).unwrap();
    managed.add(&root, &[]).unwrap();
    let before = managed.recorded();
    let node = managed.manager.node("web").unwrap();
    let record = RecordOfBackup(managed.manager.record_of("web", node));
    let mut second = Second { record, managed: &managed, refused: 0 };
    let edit = ClosedEdit::CreateSnapshot(NewSnapshot::new("first"));
    managed.manager.daemon.edit_disk_beside(node, &edit, || Ok(()), &mut second).unwrap();
    assert_eq!((second.refused, managed.recorded()), (5, before));
    assert_eq!(managed.manager.disk("web").unwrap().layers.len(), 1);
    let taken = managed.manager.internal_snapshots("web").unwrap().snapshots;
    assert_eq!(taken.into_iter().map(|taken| taken.name).collect::<Vec<_>>(), ["first"]);
    let mut left = std::fs::read_dir(managed.directory.path()).unwrap().map(|found| found.unwrap().file_name());
    assert!(left.all(|name| !name.to_string_lossy().contains("fleece")), "a fleece is left");
}

#[test]
fn an_event_says_that_a_copy_does_not_keep_its_time() {
    let managed = Managed::new();
    let data = managed.directory.path().canonicalize().unwrap().join("data");
    // It is copied in many pieces, and in more than a millisecond.
    std::fs::write(&data, vec![7; 32 << 20]).unwrap();
    managed.add_as(&format!("file={},format=raw,name=web", data.display()), &[]).unwrap();
    let manager = Arc::new(managed.manager);
    let mut events = manager.events();
    let copy = data.with_file_name("copy");
    let request = MirrorDisk {
        target: copy.clone(),
        format: None,
        existing: false,
        top: false,
        keep: true,
        bytes_per_second: None,
        within_ms: Some(1),
        stall_ms: None,
    };
    let job = manager.mirror("web", &request).unwrap();
    let begun = Instant::now();
    let behind = loop {
        match events.try_recv() {
            Ok(event) if event.kind == EventKind::JobBehind => break event,
            Ok(_) => {}
            Err(error) => assert!(begun.elapsed() < Duration::from_secs(120), "{error}"),
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    assert_eq!((behind.id, behind.disk.as_deref()), (Some(job.id), Some("web")));
    assert!(behind.message.as_deref().unwrap().contains("too slow to be done within 0.001 s"), "{behind:?}");
    manager.daemon.wait_job(manager.job_id(job.id).unwrap()).unwrap();
    assert!(std::fs::read(&copy).unwrap() == std::fs::read(&data).unwrap());
    assert_eq!(manager.records.current().disk("web").unwrap().unfinished, []);
}
