//! Files that the record names, and other files that get their names.

use super::*;
use crate::backups::RecordOfBackup;
use crate::manager::restore::{refuse_forgetting, refuse_left_file};
use crate::record::DiskRecord;
use daemon::{BackupRecord as _, WholeBackup};

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
        assert_eq!((copy.exists(), managed.recorded().unwrap().unfinished), (stays, None));
    }
}

#[test]
fn a_job_does_not_take_the_place_of_a_file_that_another_one_is_about_to_make() {
    let managed = Managed::new();
    let root = managed.image("root", None);
    managed.add(&root, &[]).unwrap();
    let [one, other] = ["one", "other"].map(|name| FileName::from(root.with_file_name(name)));
    let record = record_of(&managed);
    record.will_make(&one).unwrap();
    let refused = record.will_make(&other).unwrap_err();
    assert!(refused.kind() == ErrorKind::Locked && refused.to_string().contains(&one.to_string()), "{refused}");
    assert_eq!(managed.recorded().unwrap().unfinished, Some(one.to_string()));
    record.forget_unfinished(&one).unwrap();
    // One that was made and could not be removed keeps no job away.
    record.will_make(&one).unwrap();
    std::fs::write(one.path().unwrap(), "half").unwrap();
    record.has_made(&one).unwrap();
    record.will_make(&other).unwrap();
    assert_eq!(managed.recorded().unwrap().unfinished, Some(other.to_string()));
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
    record.is_whole(&WholeBackup { bitmap: Some("b"), base_of_next: Some(&monday) }).unwrap();
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
