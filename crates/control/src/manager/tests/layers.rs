//! Layers that are committed, and internal snapshots of large images.

use super::*;

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
fn snapshots_of_a_large_image_at_one_time_leave_the_record_as_the_disk_is() {
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
    let calls = |which: u32| {
        let take = |round| managed.manager.create_internal_snapshot("web", &format!("s{which}-{round}"), None);
        (0..8).map(take).filter_map(Result::err).collect::<Vec<_>>()
    };
    let refused = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..3).map(|which| scope.spawn(move || calls(which))).collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
    });
    assert!(refused.iter().all(|error| error.kind() == ErrorKind::Locked), "{refused:?}");
    let recorded = managed.recorded().unwrap();
    assert_eq!(recorded.files().collect::<Vec<_>>(), [root.to_str().unwrap()]);
    assert!(recorded.fleeces.is_empty() && managed.manager.disk("web").unwrap().layers.len() == 1);
    assert_eq!(managed.manager.internal_snapshots("web").unwrap().snapshots.len() + refused.len(), 24);
}
