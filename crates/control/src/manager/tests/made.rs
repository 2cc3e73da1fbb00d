//! Files that the record names, and other files that get their names.

use super::*;
use crate::api::{BitmapChange, BitmapVerb, ChangeBitmaps};
use crate::backups::RecordOfBackup;
use crate::manager::restore::{refuse_forgetting, refuse_left_file};
use crate::record::{DiskRecord, NotedFile};
use daemon::{BackupRecord as _, FileIdentity, FleeceRecord as _, WholeBackup};
use image::{BitmapAction, ClosedEdit};

fn record_of(managed: &Managed) -> DiskRecord {
    managed.manager.record_of("web", managed.manager.node("web").unwrap())
}

#[test]
fn what_was_not_noted_as_made_goes_only_if_nothing_is_in_it() {
    for (length_bytes, stays) in [(0, false), (1 << 20, true)] {
        let managed = Managed::new();
        let root = managed.image("root", None);
        managed.add(&root, &[]).unwrap();
        let copy = root.with_file_name("copy");
        record_of(&managed).will_make(&FileName::from(copy.as_path())).unwrap();
        // All holes: nobody has written to it, and its length is somebody's all the same.
        std::fs::File::create(&copy).unwrap().set_len(length_bytes).unwrap();
        let managed = managed.again();
        managed.manager.restore(&[]).unwrap();
        assert_eq!((copy.exists(), managed.recorded().unwrap().unfinished), (stays, Vec::new()));
    }
}

#[test]
fn each_file_that_is_being_made_is_on_record_by_itself() {
    let managed = Managed::new();
    let root = managed.image("root", None);
    managed.add(&root, &[]).unwrap();
    let node = managed.manager.node("web").unwrap();
    let [one, other] = ["one", "other"].map(|name| FileName::from(root.with_file_name(name)));
    let (record, reserve) = (record_of(&managed), |file: &FileName| managed.manager.reserve("web", node, file));
    let noted = || managed.recorded().unwrap().unfinished.into_iter().map(|made| made.file).collect::<Vec<_>>();
    let make = |file: &FileName| {
        std::fs::write(file.path().unwrap(), "half").unwrap();
        record.has_made(file).unwrap();
    };
    let is_refused = |file: &FileName| {
        let refused = record.will_make(file).unwrap_err();
        assert!(refused.kind() == ErrorKind::Locked && refused.to_string().contains(&file.to_string()), "{refused}");
    };
    // Of two callers at once, the second one fails later.
    let first = reserve(&one).unwrap();
    is_refused(&one);
    let second = reserve(&other).unwrap();
    make(&one);
    is_refused(&one);
    drop(second);
    assert_eq!(noted(), [one.to_string()]);
    // One that somebody has removed keeps nobody away.
    std::fs::remove_file(one.path().unwrap()).unwrap();
    let again = reserve(&one).unwrap();
    make(&one);
    drop((first, again));
    assert!(noted().is_empty());
    // A file that nobody has noted is somebody's, and does not get on record.
    std::fs::write(one.path().unwrap(), "").unwrap();
    let somebodys = record.will_make(&one).unwrap_err().to_string();
    assert!(somebodys.contains("if none is, remove it") && noted().is_empty(), "{somebodys}");
    std::fs::remove_file(one.path().unwrap()).unwrap();
    // Another disk's copy gets the name no sooner.
    let records = &managed.manager.records;
    records
        .change(|record| {
            let web = record.disk("web").unwrap().clone();
            record.disks.push(RecordedDisk { name: "second".into(), ..web });
        })
        .unwrap();
    records.is_of("second", node);
    let second = managed.manager.record_of("second", node);
    let first = reserve(&one).unwrap();
    for is_made in [false, true] {
        if is_made {
            make(&one);
        }
        let refused = second.will_make(&one).unwrap_err();
        assert!(refused.kind() == ErrorKind::Locked && refused.to_string().contains("for the disk 'web'"), "{refused}");
    }
    drop((first, second));
    records.change(|record| record.disks.retain(|disk| disk.name == "web")).unwrap();
    std::fs::remove_file(one.path().unwrap()).unwrap();
    // A daemon that dies leaves none of them.
    [&one, &other].into_iter().for_each(|file| record.will_make(file).unwrap());
    [&one, &other].into_iter().for_each(make);
    drop(record);
    let managed = managed.again();
    managed.manager.restore(&[]).unwrap();
    assert!(!one.path().unwrap().exists() && !other.path().unwrap().exists());
    assert_eq!(managed.recorded().unwrap().unfinished, []);
}

#[test]
fn a_part_that_is_there_stays_and_so_does_what_the_record_says_of_it() {
    let managed = Managed::new();
    let root = managed.image("root", None);
    managed.add(&root, &[]).unwrap();
    let [target, part] = ["copy", "copy.part"].map(|name| root.with_file_name(name));
    let Managed { directory: _directory, manager } = managed;
    let manager = Arc::new(manager);
    let unfinished = || manager.records.current().disk("web").unwrap().unfinished.len();
    let refused = || {
        let target = target.display();
        let backup = serde_json::from_str(&format!(r#"{{"target": "{target}"}}"#)).unwrap();
        let mirror = serde_json::from_str(&format!(r#"{{"target": "{target}"}}"#)).unwrap();
        let job = manager.backup("web", backup).unwrap();
        let backup = manager.daemon.wait_job(manager.job_id(job.id).unwrap()).unwrap_err();
        [backup.to_string(), manager.mirror("web", &mirror).unwrap_err().to_string()]
    };
    // Somebody's, although nothing is in it.
    std::fs::write(&part, "").unwrap();
    for refused in refused() {
        assert!(refused.contains("if none is, remove it"), "{refused}");
    }
    assert_eq!(unfinished(), 0);
    // One that a job could not remove.
    std::fs::remove_file(&part).unwrap();
    let record = manager.record_of("web", manager.node("web").unwrap());
    let name = FileName::from(part.as_path());
    record.will_make(&name).unwrap();
    std::fs::write(&part, "whole").unwrap();
    record.has_made(&name).unwrap();
    for refused in refused() {
        assert!(refused.contains("is being made for the disk 'web'"), "{refused}");
    }
    assert_eq!(unfinished(), 1);
}

#[test]
fn a_whole_copy_that_has_both_names_when_the_daemon_dies_keeps_its_own() {
    let managed = Managed::new();
    let root = managed.image("root", None);
    managed.add(&root, &[]).unwrap();
    let [target, part] = ["copy", "copy.part"].map(|name| root.with_file_name(name));
    let (record, name) = (record_of(&managed), FileName::from(part.as_path()));
    record.will_make(&name).unwrap();
    std::fs::write(&part, "whole").unwrap();
    record.has_made(&name).unwrap();
    std::fs::hard_link(&part, &target).unwrap();
    drop(record);
    let managed = managed.again();
    managed.manager.restore(&[]).unwrap();
    assert!(!part.exists() && std::fs::read(&target).unwrap() == b"whole");
}

/// What a daemon that died has left of a fleece that was not the top of the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Left {
    /// It is on record, and was not made.
    Nothing,
    Empty,
    /// It was not noted as made, and somebody's file has its name.
    Somebodys,
    Fleece,
    /// It was noted as made, and somebody's file has got its name.
    Replaced,
}

#[test]
fn a_fleece_that_is_not_used_is_removed_by_the_next_daemon_and_no_other_file_of_its_name() {
    for left in [Left::Nothing, Left::Empty, Left::Somebodys, Left::Fleece, Left::Replaced] {
        let managed = Managed::new();
        let root = managed.image("root", None);
        managed.add(&root, &[]).unwrap();
        let fleece = root.with_file_name("root.fleece0");
        let mut record = RecordOfBackup(record_of(&managed));
        record.will_make(&fleece).unwrap();
        match left {
            Left::Nothing => {}
            Left::Empty => drop(std::fs::File::create(&fleece).unwrap()),
            Left::Somebodys => std::fs::write(&fleece, "somebody's").unwrap(),
            Left::Fleece | Left::Replaced => {
                drop(std::fs::File::create(&fleece).unwrap());
                record.has_made(&fleece).unwrap();
                std::fs::write(&fleece, "what guests wrote").unwrap();
            }
        }
        if left == Left::Replaced {
            std::fs::write(root.with_file_name("other"), "somebody's").unwrap();
            std::fs::rename(root.with_file_name("other"), &fleece).unwrap();
        }
        drop(record);
        let managed = managed.again();
        managed.manager.restore(&[]).unwrap();
        assert_eq!(fleece.exists(), matches!(left, Left::Somebodys | Left::Replaced), "{left:?}");
        assert_eq!(managed.recorded().unwrap().fleeces, [], "{left:?}");
    }
}

#[test]
fn a_fleece_that_is_the_top_is_taken_back_and_removed() {
    let managed = Managed::new();
    let root = managed.image("root", None);
    managed.add(&root, &[]).unwrap();
    let fleece = root.with_file_name("root.fleece0");
    managed.snapshot("web", &fleece).unwrap();
    // Noted by a daemon on another file system, from which the images were copied here.
    let elsewhere = NotedFile { file: fleece.display().to_string(), made: Some(FileIdentity::AT_A_SERVER) };
    record_of(&managed).change(|disk| disk.fleeces.push(elsewhere)).unwrap();
    let managed = managed.again();
    managed.manager.restore(&[]).unwrap();
    managed.manager.daemon.jobs().iter().for_each(|job| managed.manager.daemon.wait_job(job.id).unwrap());
    assert_eq!((managed.manager.disk("web").unwrap().layers.len(), fleece.exists()), (1, false));
    let recorded = managed.recorded().unwrap();
    assert_eq!(recorded.files().collect::<Vec<_>>(), [root.to_str().unwrap()]);
    assert_eq!(recorded.fleeces, []);
}

#[test]
fn a_backup_rests_on_the_last_one_and_on_no_other_file_of_its_path() {
    let managed = Managed::new();
    let root = managed.image("root", None);
    managed.add(&root, &[]).unwrap();
    let (monday, other) = (root.with_file_name("monday"), root.with_file_name("other"));
    std::fs::write(&monday, "whole").unwrap();
    let mut record = RecordOfBackup(record_of(&managed));
    record.0.change(|disk| disk.put_on("/fleece")).unwrap();
    record.is_whole(&WholeBackup { made: None, bitmap: Some("b"), base_of_next: Some(&monday) }).unwrap();
    record.0.change(RecordedDisk::undo_put_on).unwrap();
    let is_there = || record.last_with("b").map(|last| (last.path == monday, last.is_there));
    assert_eq!(is_there(), Some((true, true)));
    std::fs::write(&other, "another").unwrap();
    std::fs::rename(&other, &monday).unwrap();
    assert_eq!(is_there(), Some((true, false)));
    std::fs::remove_file(&monday).unwrap();
    assert_eq!(is_there(), Some((true, false)));
}

#[test]
fn a_disk_whose_files_are_opened_anew_has_no_last_backup() {
    let managed = Managed::new();
    let root = managed.image("root", None);
    managed.add(&root, &[]).unwrap();
    record_of(&managed).change(|disk| disk.set_last_backup("b", root.to_str().unwrap(), "/monday")).unwrap();
    assert!(managed.recorded().unwrap().last_backup("b").is_some());
    managed.manager.reopen("web", false).unwrap();
    assert_eq!(managed.recorded().unwrap().last_backups, []);
}

#[test]
fn a_disk_that_a_reload_brings_back_has_its_former_tops_if_its_image_still_names_them() {
    let managed = Managed::new();
    let root = managed.image("root", None);
    let [middle, top, hidden] = ["middle", "top", "hidden"].map(|name| root.with_file_name(name));
    let drive = format!("[[drive]]\nname = 'web'\nexport = false\nfile = '{}'\n", root.display());
    managed.configured_by(&drive);
    [&middle, &top].into_iter().for_each(|overlay| drop(managed.snapshot("web", overlay).unwrap()));
    // The daemon dies before the image names its new base.
    let record = record_of(&managed);
    record.change(|disk| disk.rest_on(1, None)).unwrap();
    assert!(managed.recorded().unwrap().has_left(middle.to_str().unwrap()));
    drop(record);
    let managed = managed.again();
    std::fs::rename(&top, &hidden).unwrap();
    managed.configured_by(&drive);
    assert_eq!(managed.away(), ["web"]);
    std::fs::rename(&hidden, &top).unwrap();
    let reloaded = managed.reload(&drive);
    assert_eq!((reloaded.added, reloaded.failed), (vec!["web".to_owned()], Vec::new()));
    let recorded = managed.recorded().unwrap();
    assert_eq!((recorded.former_tops.len(), recorded.leaving_tops.len()), (2, 0));
}

#[test]
fn messages_about_files_below_layers_show_no_secrets() {
    let managed = Managed::new();
    let root = managed.image("root", None);
    managed.add(&root, &[]).unwrap();
    let left = "rbd:vms/a:key=S3CRET";
    record_of(&managed)
        .change(|disk| {
            disk.options.set("file", left);
            disk.put_on("rbd:vms/top:key=S3CRET");
        })
        .unwrap();
    let disk = managed.recorded().unwrap();
    let other = given(&format!("file={left},format=raw,name=other"));
    managed.manager.away.fails("web", "its storage is away".to_owned());
    for refused in [
        refuse_left_file(&disk, &other[0]),
        refuse_forgetting(&disk, &other),
        managed.manager.refuse_writing_below(None, &[left.to_owned()]),
    ] {
        let refused = refused.unwrap_err().to_string();
        assert!(refused.contains("rbd:vms/a") && !refused.contains("S3CRET"), "{refused}");
    }
}

#[test]
fn a_change_of_bitmaps_forgets_the_last_backup_only_when_no_job_can_record_another_one() {
    let managed = Managed::new();
    let root = managed.image("root", None);
    managed.add(&root, &[]).unwrap();
    let monday = root.with_file_name("monday");
    std::fs::write(&monday, "whole").unwrap();
    let change = |action| {
        let change = BitmapChange { bitmap: "b".to_owned(), action, granularity: None, source: None };
        managed.manager.change_bitmaps("web", &ChangeBitmaps { actions: vec![change] })
    };
    change(BitmapVerb::Add).unwrap();
    let [layer, backup] = [&root, &monday].map(|path| path.display().to_string());
    record_of(&managed).change(|disk| disk.set_last_backup("b", &layer, &backup)).unwrap();
    let has_last = || !managed.recorded().unwrap().last_backups.is_empty();
    // Another edit is under way, as a backup would be.
    let meanwhile = || {
        assert_eq!(change(BitmapVerb::Clear).unwrap_err().kind(), ErrorKind::Locked);
        assert!(has_last(), "a backup that ends now would be recorded again");
        Ok(())
    };
    let other = ClosedEdit::Bitmaps(vec![("c".to_owned(), BitmapAction::Add { granularity_bytes: None })]);
    let (node, mut record) = (managed.manager.node("web").unwrap(), RecordOfBackup(record_of(&managed)));
    managed.manager.daemon.edit_disk_beside(node, &other, meanwhile, &mut record).unwrap();
    assert!(has_last());
    change(BitmapVerb::Clear).unwrap();
    assert!(!has_last());
}
