use super::*;
use image::{CreateOptions, Opener as _, Role};
use std::sync::Barrier;

const SIZE_BYTES: u64 = 1 << 20;

struct Managed {
    directory: tempfile::TempDir,
    manager: Manager,
}

impl Managed {
    fn new() -> Self {
        Self::in_directory(tempfile::tempdir().unwrap())
    }

    fn in_directory(directory: tempfile::TempDir) -> Self {
        let manager = Manager::start(DaemonConfig::default(), Some(&directory.path().join("state"))).unwrap();
        Self { directory, manager }
    }

    fn snapshot(&self, disk: &str, overlay: &Path) -> Result<Vec<Disk>> {
        self.manager.snapshot(&[Overlay { disk: disk.to_owned(), overlay: overlay.to_owned() }])
    }

    /// Makes a qcow2 image that rests on another one.
    fn image(&self, name: &str, below: Option<&Path>) -> PathBuf {
        let path = self.directory.path().canonicalize().unwrap().join(name);
        let options = format_qcow2::CreateOptions::default().with(|options| {
            options.size_bytes = SIZE_BYTES;
            options.backing_file = below.map(|below| below.display().to_string());
            options.backing_format = below.map(|_| "qcow2".to_owned());
        });
        std::fs::write(&path, "").unwrap();
        let file = drive::EngineOpener::default().open(&FileName::from(&path), Role::Writable).unwrap();
        image::create(&file, &CreateOptions::Qcow2(options)).unwrap();
        path
    }

    fn add(&self, file: &Path, former_tops: &[&Path]) -> Result<Disk> {
        let options = Options::parse(&format!("file={},format=qcow2,name=web", file.display())).unwrap();
        let top = |file: &&Path| FormerTop { file: (*file).to_owned(), format: Some("qcow2".to_owned()) };
        let former_tops = former_tops.iter().map(top).collect();
        self.manager.add_disk(AddDisk { options, export: false, overlay: None, former_tops, bases: Vec::new() })
    }

    fn recorded(&self) -> Option<RecordedDisk> {
        self.manager.records.current().disk("web").cloned()
    }
}

#[test]
fn what_ends_late_changes_no_other_disk_of_the_same_name() {
    let managed = Managed::new();
    let (one, other) = (managed.image("one", None), managed.image("other", None));
    managed.add(&one, &[]).unwrap();
    let old = managed.manager.record_of("web", managed.manager.node("web").unwrap());
    old.change(|disk| disk.put_on("/fleece")).unwrap();
    assert_eq!(managed.recorded().unwrap().options.get("file"), Some("/fleece"));
    managed.manager.remove_disk("web", true).unwrap();
    old.change(|disk| disk.take_off("/one")).unwrap();
    assert_eq!(managed.recorded(), None);
    managed.add(&other, &[]).unwrap();
    let before = managed.recorded();
    old.change(|disk| disk.take_off("/one")).unwrap();
    assert_eq!(managed.recorded(), before);
}

#[test]
fn former_tops_are_recorded_with_their_disk_and_refused_unless_they_are_its_layers() {
    let managed = Managed::new();
    let lowest = managed.image("lowest", None);
    let middle = managed.image("middle", Some(&lowest));
    let (top, other) = (managed.image("top", Some(&middle)), managed.image("other", None));
    for tops in [&[&*other][..], &[&*lowest], &[&*middle, &*other], &[&*middle, &*lowest, &*other]] {
        let error = managed.add(&top, tops).unwrap_err().to_string();
        assert!(error.contains("is no former top of the disk"), "{error}");
        assert!(managed.recorded().is_none() && !managed.manager.knows("web"));
    }
    managed.add(&top, &[&middle, &lowest]).unwrap();
    let files: Vec<_> = [&top, &lowest, &middle].map(|file| file.to_string_lossy().into_owned()).into();
    assert!(managed.recorded().unwrap().files().eq(&files));
}

#[test]
fn a_disk_that_cannot_be_recorded_is_not_served() {
    let managed = Managed::new();
    let lowest = managed.image("lowest", None);
    let top = managed.image("top", Some(&lowest));
    std::fs::create_dir(managed.directory.path().join("state/disks.json.new")).unwrap();
    managed.add(&top, &[&lowest]).unwrap_err();
    assert!(managed.recorded().is_none() && !managed.manager.knows("web"));
}

#[test]
fn snapshots_of_one_disk_at_one_time_leave_the_record_as_the_disk_is() {
    let managed = Managed::new();
    let base = managed.image("base", None);
    managed.add(&base, &[]).unwrap();
    for round in 0..20 {
        let start = Barrier::new(2);
        std::thread::scope(|scope| {
            for side in ["one", "other"] {
                let (start, managed, overlay) = (&start, &managed, base.with_file_name(format!("{side}{round}")));
                scope.spawn(move || {
                    start.wait();
                    // Whoever comes second may be refused.
                    let _ = managed.snapshot("web", &overlay);
                });
            }
        });
        let disk = managed.manager.disk("web").unwrap();
        assert_eq!(managed.recorded().unwrap().options.get("file"), Some(&*disk.file), "round {round}");
    }
}
