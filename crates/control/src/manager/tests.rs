mod away;
mod in_doubt;
mod layers;
mod made;
mod reloaded;
mod unrecorded;

use super::*;
use crate::api::{AddDisk, ChangeDisk, CommitDisk, FormerTop, Reloaded};
use crate::config::Config;
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

    /// Ends the manager, and starts another one with the same record.
    fn again(self) -> Self {
        self.manager.shutdown().unwrap();
        Self::in_directory(self.directory)
    }

    fn snapshot(&self, disk: &str, overlay: &Path) -> Result<Vec<Disk>> {
        self.manager.snapshot(&[Overlay { disk: disk.to_owned(), overlay: overlay.to_owned() }])
    }

    /// Writes the configuration file.
    fn configure(&self, text: &str) -> (PathBuf, Config) {
        let path = self.directory.path().join("disks.toml");
        std::fs::write(&path, text).unwrap();
        let config = Config::read(&path).unwrap();
        (path, config)
    }

    /// Serves the disks of a configuration file, which says `text`.
    fn configured_by(&self, text: &str) {
        let (path, config) = self.configure(text);
        self.manager.restore(&config.drives).unwrap();
        self.manager.is_configured_by(path, config);
    }

    /// Serves a disk of the command line, and records that it has moved to a copy.
    fn moved(&self, text: &str, copy: &str) {
        self.manager.restore(&given(text)).unwrap();
        let disk = self.manager.disks().remove(0).name;
        let record = self.manager.record_of(&disk, self.manager.node(&disk).unwrap());
        record.change(|disk| disk.move_to(copy, "qcow2", None)).unwrap();
    }

    /// Changes the configuration file and has it read again.
    fn reload(&self, text: &str) -> Reloaded {
        self.configure(text);
        self.manager.reload().unwrap()
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
        self.add_as(&format!("file={},format=qcow2,name=web", file.display()), former_tops)
    }

    fn add_as(&self, text: &str, former_tops: &[&Path]) -> Result<Disk> {
        let options = Options::parse(text).unwrap();
        let top = |file: &&Path| FormerTop { file: (*file).to_owned(), format: Some("qcow2".to_owned()) };
        let former_tops = former_tops.iter().map(top).collect();
        self.manager.add_disk(AddDisk { options, export: false, overlay: None, former_tops, bases: Vec::new() })
    }

    fn set(&self, disk: &str, key: &str, value: &str) -> Result<Disk> {
        let mut options = Options::default();
        options.set(key, value);
        self.manager.change_disk(disk, &ChangeDisk { options })
    }

    /// The names of the disks that are not served.
    fn away(&self) -> Vec<String> {
        self.manager.failed_disks().into_iter().map(|disk| disk.name).collect()
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
    let layers = daemon::TakenOff { top: "/fleece".into(), below: "/one".into(), below_format: None };
    old.change_if_it_can(|disk| disk.take_off(&layers)).unwrap();
    assert_eq!(managed.recorded(), None);
    managed.add(&other, &[]).unwrap();
    let before = managed.recorded();
    old.change_if_it_can(|disk| disk.take_off(&layers)).unwrap();
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

#[test]
fn a_disk_that_gets_the_name_of_a_removed_one_at_once_keeps_its_record() {
    let managed = Managed::new();
    let (one, other) = (managed.image("one", None), managed.image("other", None));
    managed.add(&one, &[]).unwrap();
    let node = managed.manager.node("web").unwrap();
    managed.manager.daemon.remove_disk(node, true).unwrap();
    managed.add(&other, &[]).unwrap();
    managed.manager.records.forget("web", Some(node), Some("key".to_owned())).unwrap();
    assert_eq!(managed.recorded().unwrap().options.get("file"), Some(&*other.to_string_lossy()));
    assert_eq!(managed.manager.records.current().removed, ["key"]);
    managed.manager.remove_disk("web", false).unwrap();
    assert_eq!(managed.recorded(), None);
}

/// A disk of the command line.
fn given(text: &str) -> [Configured; 1] {
    let drive = Options::parse(text).unwrap().to_drive().unwrap();
    [Configured { drive, text: text.to_owned(), serve: false, exports: Vec::new() }]
}

#[test]
fn a_disk_that_is_given_in_other_words_or_by_another_path_keeps_its_layers() {
    for name in ["", ",name=web"] {
        let managed = Managed::new();
        let root = managed.image("root", None);
        let (link, top) = (root.with_file_name("link"), root.with_file_name("top"));
        std::os::unix::fs::symlink(&root, &link).unwrap();
        let [root, link] = [&root, &link].map(|path| path.display().to_string());
        managed.manager.restore(&given(&format!("file={root}{name}"))).unwrap();
        let disk = managed.manager.disks().remove(0).name;
        managed.snapshot(&disk, &top).unwrap();
        let mut managed = managed;
        for text in [format!("file={root},cache=writeback{name}"), format!("file={link}{name}")] {
            managed = managed.again();
            managed.manager.restore(&given(&text)).unwrap();
            let files: Vec<_> = managed.manager.disks().into_iter().map(|disk| (disk.name, disk.file)).collect();
            assert_eq!(files, [(disk.clone(), top.display().to_string())], "{text}");
        }
    }
}

#[test]
fn a_file_with_layers_of_a_disk_that_would_be_forgotten_is_not_opened_for_writing() {
    let managed = Managed::new();
    let (root, other) = (managed.image("root", None), managed.image("other", None));
    let top = root.with_file_name("top");
    let first = given(&format!("file={}", root.display()));
    managed.manager.restore(&first).unwrap();
    managed.snapshot("disk0", &top).unwrap();
    let managed = managed.again();
    let link = root.with_file_name("link");
    std::os::unix::fs::symlink(&root, &link).unwrap();
    let error = managed.manager.restore(&given(&format!("file={},name=web", link.display()))).unwrap_err().to_string();
    assert!(error.contains("link") && error.contains("'disk0'") && error.contains("top"), "{error}");
    assert!(managed.manager.disks().is_empty());
    let managed = managed.again();
    managed.manager.restore(&first).unwrap();
    assert_eq!(managed.manager.disk("disk0").unwrap().file, top.display().to_string());
    // Others may read the file, and a disk of another file comes in its place.
    let managed = managed.again();
    managed.manager.restore(&given(&format!("file={},name=web,readonly=on", root.display()))).unwrap();
    let managed = managed.again();
    managed.manager.restore(&given(&format!("file={},name=web", other.display()))).unwrap();
    assert_eq!(managed.manager.disks().len(), 1);
}

#[test]
fn a_call_that_ends_late_changes_no_other_disk_of_the_same_name() {
    let managed = Managed::new();
    let (one, other) = (managed.image("one", None), managed.image("other", None));
    managed.add(&one, &[]).unwrap();
    let before = managed.recorded();
    managed.manager.restore(&given(&format!("file={},name=other", other.display()))).unwrap();
    // As if the disk had been removed while the call waits for its storage, and another one had got its name.
    managed.manager.records.is_of("web", managed.manager.node("other").unwrap());
    let error = managed.snapshot("web", &one.with_file_name("top")).unwrap_err().to_string();
    assert!(error.contains("'web'") && error.contains("removed meanwhile"), "{error}");
    assert_eq!(managed.recorded(), before);
    let change: ChangeDisk = serde_json::from_str(r#"{"options": {"lock-timeout-s": "7"}}"#).unwrap();
    let error = managed.manager.change_disk("web", &change).unwrap_err().to_string();
    assert!(error.contains("removed meanwhile"), "{error}");
    assert_eq!(managed.recorded(), before);
    let drive =
        Options::parse(&format!("file={},socket={}", one.display(), one.with_file_name("s").display())).unwrap();
    let node = managed.manager.node("web").unwrap();
    managed.manager.export_as_added("web", node, &drive.to_drive().unwrap()).unwrap_err();
    let export = AddExport { disk: "web".into(), socket: Some(one.with_file_name("t")), ..AddExport::default() };
    managed.manager.add_export(export).unwrap_err();
    assert!(managed.manager.exports().is_empty());
    assert_eq!(managed.recorded(), before);
}

#[test]
fn a_reload_does_not_write_below_the_layers_of_a_disk_that_could_not_be_opened() {
    let managed = Managed::new();
    let root = managed.image("root", None);
    let (top, away) = (root.with_file_name("top"), root.with_file_name("away"));
    let drive = |name: &str| format!("[[drive]]\nname = '{name}'\nexport = false\nfile = '{}'\n", root.display());
    managed.configured_by(&drive("web"));
    managed.snapshot("web", &top).unwrap();
    std::fs::rename(&top, &away).unwrap();
    let managed = managed.again();
    managed.configured_by(&drive("web"));
    for _ in 0..2 {
        let failed: Vec<_> = managed.reload(&drive("www")).failed.into_iter().map(|failed| failed.name).collect();
        assert_eq!(failed, ["web", "www"]);
        assert!(managed.manager.disks().is_empty());
    }
    std::fs::rename(&away, &top).unwrap();
    assert_eq!(managed.reload(&drive("web")).failed, Vec::new());
    assert_eq!(managed.manager.disk("web").unwrap().file, top.display().to_string());
}

#[test]
fn a_kept_overlay_below_a_layer_is_known_by_any_name_of_its_directory_and_not_written_to() {
    let managed = Managed::new();
    let root = managed.image("root", None);
    let (kept, link, top) = (root.with_file_name("kept"), root.with_file_name("link"), root.with_file_name("top"));
    std::fs::create_dir(&kept).unwrap();
    std::os::unix::fs::symlink(&kept, &link).unwrap();
    let [root, kept, link] = [&root, &kept, &link].map(|path| path.display().to_string());
    let on = |keep: &str, others: &str| given(&format!("file={root},snapshot=on,keep={keep}{others}"));
    managed.manager.restore(&on(&kept, "")).unwrap();
    managed.snapshot("disk0", &top).unwrap();
    let mut managed = managed;
    for keep in [format!("{kept}/"), link, kept.clone()] {
        managed = managed.again();
        managed.manager.restore(&on(&keep, "")).unwrap();
        assert_eq!(managed.manager.disk("disk0").unwrap().file, top.display().to_string(), "{keep}");
    }
    let managed = managed.again();
    // A disk of this name keeps its overlay in the same file.
    let error = managed.manager.restore(&on(&kept, ",name=root")).unwrap_err().to_string();
    assert!(error.contains("root.scratch") && error.contains("'disk0'"), "{error}");
}

#[test]
fn a_disk_without_a_name_does_not_take_the_record_of_a_disk_that_is_given() {
    for (name, is_first) in [("", true), ("", false), (",name=web", true), (",name=web", false)] {
        let managed = Managed::new();
        let [root, copy] = ["root", "copy"].map(|name| managed.image(name, None).display().to_string());
        managed.moved(&format!("file={root}{name}"), &copy);
        let managed = managed.again();
        let mut drives = [given(&format!("file={copy}{name}")), given(&format!("file={root},readonly=on"))];
        if !is_first {
            drives.reverse();
        }
        managed.manager.restore(&drives.concat()).unwrap();
        let mut files: Vec<_> = managed.manager.disks().into_iter().map(|disk| disk.file).collect();
        files.sort();
        assert_eq!(files, [copy, root]);
        assert!(managed.manager.failed_disks().is_empty());
    }
}

#[test]
fn nobody_writes_below_a_layer_because_another_drive_gives_the_layer() {
    let managed = Managed::new();
    let root = managed.image("root", None);
    let top = root.with_file_name("top");
    let [root, shown] = [&root, &top].map(|path| path.display().to_string());
    let before = given(&format!("file={root}"));
    managed.manager.restore(&before).unwrap();
    managed.snapshot("disk0", &top).unwrap();
    let mut drives = [given(&format!("file={root},cache=none")), given(&format!("file={shown},readonly=on"))];
    let mut managed = managed;
    for _ in 0..2 {
        managed = managed.again();
        let error = managed.manager.restore(&drives.concat()).unwrap_err().to_string();
        assert!(error.contains("'disk0'"), "{error}");
        drives.reverse();
    }
    let managed = managed.again();
    managed.manager.restore(&before).unwrap();
    assert_eq!(managed.manager.disk("disk0").unwrap().file, shown);
}

#[test]
fn the_former_file_of_a_disk_whose_copy_is_gone_is_free_but_not_what_may_lie_below_a_layer() {
    let managed = Managed::new();
    let [root, copy] = ["root", "copy"].map(|name| managed.image(name, None));
    let web = format!("file={},name=web", root.display());
    managed.moved(&web, &copy.display().to_string());
    let managed = managed.again();
    let other = given(&format!("file={},name=other", root.display()));
    let error = managed.manager.restore(&other).unwrap_err().to_string();
    assert!(error.contains("one start or reload, which forgets 'web'"), "{error}");
    std::fs::remove_file(&copy).unwrap();
    managed.manager.restore(&other).unwrap();
    assert_eq!(managed.manager.disks().len(), 1);

    let managed = managed.again();
    managed.manager.restore(&given(&web)).unwrap();
    let top = root.with_file_name("top");
    managed.snapshot("web", &top).unwrap();
    let managed = managed.again();
    // Its file system may not be mounted.
    std::fs::remove_file(&top).unwrap();
    managed.manager.restore(&other).unwrap_err();
}

#[test]
fn half_of_an_addition_is_forgotten_although_its_disk_is_going() {
    let managed = Managed::new();
    let one = managed.image("one", None);
    managed.add(&one, &[]).unwrap();
    let node = managed.manager.node("web").unwrap();
    managed.manager.daemon.end_disks().unwrap();
    managed.manager.undo_add_of("web", node);
    assert_eq!(managed.recorded(), None);
}

#[test]
fn a_reload_does_not_rename_a_disk_and_leave_its_layers() {
    let managed = Managed::new();
    let root = managed.image("root", None);
    let top = root.with_file_name("top");
    let drive = |name: &str| format!("[[drive]]\nname = '{name}'\nexport = false\nfile = '{}'\n", root.display());
    managed.configured_by(&drive("web"));
    managed.snapshot("web", &top).unwrap();
    let reloaded = managed.reload(&drive("other"));
    assert!(reloaded.failed[0].error.contains("name=web"), "{reloaded:?}");
    assert_eq!(managed.manager.disk("web").unwrap().file, top.display().to_string());
    assert_eq!(managed.manager.disks().len(), 1);
    assert_eq!(managed.reload(&drive("web")).failed, Vec::new());
}

#[test]
fn a_reload_opens_a_disk_with_layers_elsewhere_and_they_can_be_taken_back() {
    let managed = Managed::new();
    let root = managed.image("root", None);
    let top = root.with_file_name("elsewhere").join("top");
    std::fs::create_dir(top.parent().unwrap()).unwrap();
    let text = format!("[[drive]]\nname = 'web'\nexport = false\nfile = '{}'\n", root.display());
    managed.configured_by(&text);
    let before = managed.recorded().unwrap();
    managed.snapshot("web", &top).unwrap();
    let reloaded = managed.reload(&format!("{text}serial = 'S'\n"));
    assert_eq!((reloaded.reopened, reloaded.failed), (vec!["web".to_owned()], Vec::new()));
    assert_eq!(managed.manager.disk("web").unwrap().file, top.display().to_string());
    assert!(managed.recorded().unwrap().bases.is_empty());
    let manager = Arc::new(managed.manager);
    let commit = CommitDisk::default();
    let job = manager.commit("web", commit).unwrap();
    manager.daemon.wait_job(manager.job_id(job.id).unwrap()).unwrap();
    let recorded = manager.records.current().disk("web").cloned().unwrap();
    assert_eq!(recorded.files().collect::<Vec<_>>(), before.files().collect::<Vec<_>>());
}

#[test]
fn a_reload_removes_an_export_whose_disk_was_opened_anew() {
    let managed = Managed::new();
    let drive = |serial: &str| {
        let file = managed.image(&format!("root{serial}"), None);
        format!("[[drive]]\nname = 'web'\nexport = false\nfile = '{}'\nserial = '{serial}'\n", file.display())
    };
    let export = "[[export]]\ndisk = 'web'\ntype = 'nbd'\nsocket = 'web.sock'\n";
    managed.configured_by(&format!("{}{export}", drive("A")));
    let drive = drive("B");
    let reloaded = managed.reload(&format!("{drive}{export}"));
    assert_eq!((reloaded.reopened, reloaded.failed), (vec!["web".to_owned()], Vec::new()));
    assert_eq!(managed.manager.exports().len(), 1);
    let reloaded = managed.reload(&drive);
    assert_eq!((reloaded.changed, reloaded.failed), (vec!["web".to_owned()], Vec::new()));
    assert!(managed.manager.exports().is_empty() && managed.recorded().unwrap().exports.is_empty());
    assert!(lock(&managed.manager.exports).is_empty());
}

#[test]
fn a_disk_that_was_to_get_another_base_has_its_former_tops_if_its_image_still_names_them() {
    let managed = Managed::new();
    let root = managed.image("root", None);
    let [middle, top] = ["middle", "top"].map(|name| root.with_file_name(name));
    managed.add(&root, &[]).unwrap();
    [&middle, &top].into_iter().for_each(|overlay| drop(managed.snapshot("web", overlay).unwrap()));
    // The daemon dies before the image names its new base.
    let record = managed.manager.record_of("web", managed.manager.node("web").unwrap());
    record.change(|disk| disk.rest_on(1, None)).unwrap();
    drop(record);
    let managed = managed.again();
    managed.manager.restore(&[]).unwrap();
    let recorded = managed.recorded().unwrap();
    assert_eq!((recorded.former_tops.len(), recorded.leaving_tops.len()), (2, 0));
    let node = managed.manager.node("web").unwrap();
    let record = managed.manager.record_of("web", node);
    let (its, daemon) = (record.clone(), &managed.manager.daemon);
    let take_off = move |layers: &daemon::TakenOff| its.change_if_it_can(|disk| disk.take_off(layers));
    let aim = image::Aim::default();
    daemon.wait_job(daemon.start_take_layers_back_with(node, 2, None, aim, take_off).unwrap()).unwrap();
    assert_eq!(managed.manager.disk("web").unwrap().file, root.display().to_string());

    // It dies after that.
    managed.snapshot("web", &root.with_file_name("last")).unwrap();
    daemon.wait_job(daemon.start_stream_with(node, None, None, ()).unwrap()).unwrap();
    record.change(|disk| disk.rest_on(usize::MAX, None)).unwrap();
    drop(record);
    let managed = managed.again();
    managed.manager.restore(&[]).unwrap();
    let recorded = managed.recorded().unwrap();
    assert_eq!((recorded.former_tops.len(), recorded.leaving_tops.len()), (0, 0));
    assert!(recorded.uses(root.to_str().unwrap()) && managed.manager.disk("web").unwrap().layers.len() == 1);
}

#[test]
fn half_a_copy_is_removed_by_the_next_daemon_and_no_other_file_of_its_name() {
    for is_replaced in [false, true] {
        let managed = Managed::new();
        let root = managed.image("root", None);
        managed.add(&root, &[]).unwrap();
        let copy = root.with_file_name("copy");
        let record = managed.manager.record_of("web", managed.manager.node("web").unwrap());
        record.will_make(&FileName::from(copy.as_path())).unwrap();
        std::fs::write(&copy, "half").unwrap();
        record.has_made(&FileName::from(copy.as_path())).unwrap();
        if is_replaced {
            std::fs::write(root.with_file_name("other"), "somebody's").unwrap();
            std::fs::rename(root.with_file_name("other"), &copy).unwrap();
        }
        drop(record);
        let managed = managed.again();
        managed.manager.restore(&[]).unwrap();
        assert_eq!(copy.exists(), is_replaced);
        assert_eq!(managed.recorded().unwrap().unfinished, []);
    }
    // One that was to be made, and that somebody else has made since.
    let managed = Managed::new();
    let root = managed.image("root", None);
    managed.add(&root, &[]).unwrap();
    let copy = root.with_file_name("copy");
    managed
        .manager
        .record_of("web", managed.manager.node("web").unwrap())
        .will_make(&FileName::from(copy.as_path()))
        .unwrap();
    std::fs::write(&copy, "somebody's").unwrap();
    let managed = managed.again();
    managed.manager.restore(&[]).unwrap();
    assert!(copy.exists());
}

#[test]
fn a_snapshot_that_fails_leaves_the_record_and_no_file() {
    let managed = Managed::new();
    let root = managed.image("root", None);
    managed.add(&root, &[]).unwrap();
    let before = managed.recorded();
    std::fs::create_dir(managed.directory.path().join("state/disks.json.new")).unwrap();
    managed.snapshot("web", &root.with_file_name("top")).unwrap_err();
    assert_eq!(managed.recorded(), before);
    assert_eq!(managed.manager.disk("web").unwrap().layers.len(), 1);
}
