use super::directory::{FILE, NEW_FILE};
use super::*;
use crate::api::{AddExport, FormerTop};
use crate::options::Options;
use daemon::TakenOff;
use drive::absolute;
use image::{FileName, Format};

fn disk(file: &str) -> RecordedDisk {
    let options = Options::parse(&format!("file={file},format=raw")).unwrap();
    RecordedDisk {
        name: "a".into(),
        options,
        own_export: true,
        exports: Vec::new(),
        former_tops: Vec::new(),
        bases: Vec::new(),
        moved_from: None,
        unfinished: Vec::new(),
        unfinished_made: None,
        leaving_tops: Vec::new(),
        leaving_below: 0,
        last_backups: Vec::new(),
        fleeces: Vec::new(),
        kept_in: None,
        configured: None,
    }
}

/// The top layer that goes, the layer below, and its format if somebody has said it.
fn off(top: &str, below: &str, format: Option<Format>) -> TakenOff {
    let [top, below] = [top, below].map(|name| FileName::parse(name).unwrap());
    TakenOff { top, below, below_format: format }
}

#[test]
fn a_layer_on_a_kept_overlay_rests_on_that_whatever_the_configuration_says() {
    let given = Options::parse("file=/a.raw,format=raw,name=a,snapshot=on,keep=/kept,cache=none").unwrap();
    let mut disk = RecordedDisk { options: given.clone(), ..disk("/a.raw") };
    disk.put_on("/b.qcow2");
    assert_eq!(disk.options.to_text(), "file=/b.qcow2,format=qcow2,name=a,cache=none");
    assert!(disk.files().eq(["/b.qcow2", "/kept/a.scratch", "/a.raw", "/kept/a.scratch.data"]));
    assert!(disk.has_layers_on(Some("/a.raw")));
    disk.set_options(given.clone());
    assert_eq!(disk.options.to_text(), "file=/b.qcow2,format=qcow2,name=a,cache=none");
    disk.take_off(&off("/b.qcow2", "/kept/a.scratch", None)).unwrap();
    disk.set_options(given);
    assert_eq!(disk.options.to_text(), "file=/kept/a.scratch,format=scratch,name=a,cache=none");
}

#[test]
fn an_export_says_nothing_of_memory_unless_that_was_set() {
    let plain = serde_json::to_value(AddExport::default()).unwrap();
    assert!(plain.get("guest_memory").is_none() && plain.get("guest_memory_max").is_none(), "{plain}");
    let guest_memory = crate::api::GuestMemory::Locked;
    let set = serde_json::to_value(AddExport { guest_memory, ..AddExport::default() }).unwrap();
    assert_eq!(set["guest_memory"], "locked");
}

#[test]
fn a_former_top_at_a_server_keeps_its_name_and_a_file_gets_its_whole_path() {
    let mut disk = disk("/top");
    let top = |file: &str| FormerTop { file: file.into(), format: None };
    let own = absolute(Path::new("own")).display().to_string();
    disk.former_tops = ["https://h/a", "rbd:pool/x", "/a:b", "own"].map(|file| Top::from(&top(file))).to_vec();
    assert!(disk.files().eq(["/top", "https://h/a", "rbd:pool/x", "/a:b", own.as_str()]));
}

#[test]
fn a_record_comes_back_and_only_one_daemon_has_it() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("state");
    let records = Records::in_directory(&path).unwrap();
    records.change(|record| record.disks.push(disk("/a.raw"))).unwrap();
    let kept = records.current();
    assert_eq!(Records::in_directory(&path).unwrap_err().kind(), ErrorKind::Locked);
    drop(records);
    assert_eq!(*Records::in_directory(&path).unwrap().current(), *kept);
}

#[test]
fn a_record_of_an_older_build_is_read() {
    let disk = |more: &str| {
        format!(
            r#"{{"name": "a", "options": {{"name": "a", "file": "/fleece", "format": "qcow2"}}, "own_export": true, "exports": [],
                 "former_tops": [{{"file": "/a.raw", "format": "raw"}}]{more}}}"#
        )
    };
    let read = |more: &str| {
        let dir = tempfile::tempdir().unwrap();
        let text = format!(r#"{{"version": 1, "disks": [{}], "removed": []}}"#, disk(more));
        std::fs::write(dir.path().join(FILE), text).unwrap();
        let record = Records::in_directory(dir.path())?.current();
        Ok::<_, Error>(record.disk("a").unwrap().clone())
    };
    let made = r#"{"device": 1, "inode": 2, "born_ns": 3}"#;
    let identity = serde_json::from_str(made).unwrap();
    for (older, unfinished) in [
        (r#", "unfinished": "/c.qcow2""#.to_owned(), vec![NotedFile::to_be("/c.qcow2")]),
        (
            format!(r#", "unfinished": "/c.qcow2", "unfinished_made": {made}"#),
            vec![NotedFile { file: "/c.qcow2".into(), made: Some(identity) }],
        ),
        (r#", "unfinished": null"#.to_owned(), Vec::new()),
    ] {
        let read = read(&format!(r#"{older}, "fleeces": ["/fleece"]"#)).unwrap();
        assert_eq!((read.unfinished, read.fleeces), (unfinished, vec![NotedFile::to_be("/fleece")]), "{older}");
        assert_eq!(read.options.to_text(), "name=a,file=/fleece,format=qcow2");
        assert_eq!((read.unfinished_made, read.former_tops.len()), (None, 1));
    }
    let refused = read(r#", "colour": "red""#).unwrap_err().to_string();
    assert!(refused.contains("unknown field `colour`"), "{refused}");
}

#[test]
fn a_file_that_is_no_record_is_refused_with_the_place_the_fault_and_what_to_do() {
    for (text, why) in [
        ("", "it is not an object of JSON"),
        ("[]", "it is not an object of JSON"),
        ("{", "EOF while parsing an object at line 1 column 1"),
        ("{}", "missing field `version` at line 1 column 2"),
        (r#"{"version": "1"}"#, "version: the text \"1\" stands where a whole number up to 4294967295 belongs"),
        (r#"{"version": 1, "disks": {}}"#, "disks: an object stands where a list belongs"),
        (r#"{"version": 1, "disks": [[]]}"#, "disks[0]: a list of 0 values stands where an object belongs"),
        (r#"{"disks": [{"options": {"file": {}}}]}"#, "an option is a text, a number, true, false or a list of texts"),
        (r#"{"disks": [{"unfinished": 5}]}"#, "files are a list of them, one name or null"),
        (r#"{"version": 1, "disks": [], "removed": []} x"#, "trailing characters at line 1 column 44"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join(FILE);
        std::fs::write(&file, text).unwrap();
        let error = Records::in_directory(dir.path()).unwrap_err().to_string();
        let begin = format!("'{}' is not a record of disks: ", file.display());
        assert!(error.starts_with(&begin) && error.contains(why) && error.contains("move it away"), "{text}: {error}");
        assert_eq!(std::fs::read_to_string(&file).unwrap(), text, "it is left as it is");
    }
}

#[test]
fn layers_go_on_and_come_off_with_their_formats() {
    let mut disk = disk("/a.raw");
    disk.put_on("/b.qcow2");
    assert_eq!(disk.options.to_text(), "file=/b.qcow2,format=qcow2");
    disk.put_on("/c.qcow2");
    disk.take_off(&off("/c.qcow2", "/b.qcow2", None)).unwrap();
    assert_eq!(disk.options.to_text(), "file=/b.qcow2,format=qcow2");
    disk.take_off(&off("/b.qcow2", "/a.raw", None)).unwrap();
    assert_eq!(disk.options.to_text(), "file=/a.raw,format=raw");
}

#[test]
fn a_layer_that_comes_off_leaves_a_record_of_the_layers_that_are_there() {
    let mut disk = disk("/a.raw");
    disk.put_on("/b.qcow2");
    disk.put_on("/c.qcow2");
    let before = disk.clone();
    let error = disk.take_off(&off("/b.qcow2", "/a.raw", None)).unwrap_err();
    assert!(error.to_string().contains("'/c.qcow2' as the top of the disk 'a', and not '/b.qcow2'"), "{error}");
    assert_eq!(disk, before);
    // It was to rest on the lowest layer, and the daemon died before its image named that.
    disk.rest_on(1, None);
    disk.take_off(&off("/c.qcow2", "/b.qcow2", Some(Format::Qcow2))).unwrap();
    assert_eq!(disk.options.to_text(), "file=/b.qcow2,format=qcow2");
    assert!(disk.has_left("/a.raw") && disk.has_layers_on(Some("/a.raw")), "nobody else writes below it");
    // From two layers down.
    let mut disk = before;
    disk.options.set("file", "/d.qcow2");
    disk.take_off(&off("/d.qcow2", "/a.raw", None)).unwrap();
    assert_eq!((disk.options.to_text(), disk.former_tops.len()), ("file=/a.raw,format=raw".to_owned(), 0));
    assert!(disk.uses("/b.qcow2"));
}

#[test]
fn a_layer_comes_off_a_disk_at_a_server_and_leaves_the_users_name_of_it() {
    let given = "rbd:p/i:conf=/c:id=me";
    let mut disk = disk(given);
    let before = disk.clone();
    disk.put_on("/b.qcow2");
    assert!(disk.files().eq(["/b.qcow2", given]));
    disk.take_off(&off("/b.qcow2", "rbd:p/i:conf=/c:id=other", None)).unwrap();
    assert_eq!(disk, before);
}

#[test]
fn former_tops_that_were_to_go_are_there_again_if_the_image_still_names_them() {
    let mut disk = disk("/a.raw");
    ["/b.qcow2", "/c.qcow2", "/d.qcow2"].into_iter().for_each(|overlay| disk.put_on(overlay));
    let before = disk.clone();
    disk.rest_on(2, None);
    assert_eq!((disk.former_tops.len(), disk.leaving_tops.len()), (1, 2));
    assert!(before.files().all(|file| disk.uses(file)));
    let [gone, stays] = ["/c.qcow2", "/a.raw"].map(|name| [FileName::parse(name).unwrap()]);
    assert!(disk.names_old_base(&gone) && !disk.names_old_base(&stays) && !disk.names_old_base(&[]));
    let mut moved = disk.clone();
    moved.has_moved();
    assert!(!moved.names_old_base(&gone) && moved.files().any(|file| file == "/c.qcow2"));
    disk.stays();
    assert_eq!(disk, before);
}

#[test]
fn a_last_backup_is_one_of_a_bitmap_of_the_top_layer() {
    let mut disk = disk("/a.qcow2");
    disk.set_last_backup("b", "/a.qcow2", "/monday");
    disk.set_last_backup("c", "/a.qcow2", "/other");
    disk.set_last_backup("b", "/a.qcow2", "/tuesday");
    let last = |disk: &RecordedDisk, bitmap: &str| disk.last_backup(bitmap).map(|last| last.backup.clone());
    assert_eq!((last(&disk, "b").as_deref(), last(&disk, "d")), (Some("/tuesday"), None));
    disk.put_on("/top.qcow2");
    assert_eq!(disk.last_backup("b"), None, "the bitmap is in a lower layer");
    disk.undo_put_on();
    disk.forget_last_backup("b");
    assert_eq!((last(&disk, "b"), last(&disk, "c").as_deref()), (None, Some("/other")));
    disk.move_to("/copy", "qcow2", None);
    assert_eq!(disk.last_backup("c"), None, "the bitmap is in the former image");
}

#[test]
fn a_disk_that_went_over_to_a_copy_keeps_it_whatever_else_its_options_say() {
    let mut moved = disk("/a.raw");
    moved.put_on("/b.qcow2");
    moved.will_make("/c.qcow2");
    moved.will_make("/other");
    let mut top = moved.clone();
    moved.move_to("/c.qcow2", "qcow2", None);
    moved.is_finished("/c.qcow2");
    assert_eq!(moved.options.to_text(), "file=/c.qcow2,format=qcow2");
    assert_eq!((moved.files().count(), &*moved.unfinished), (1, &[NotedFile::to_be("/other")][..]));
    assert!(moved.has_layers_on(Some("/a.raw")) && !moved.has_layers_on(Some("/b.qcow2")));
    moved.set_options(Options::parse("file=/a.raw,format=raw,cache=none").unwrap());
    assert_eq!(moved.options.get("file"), Some("/c.qcow2"));

    top.move_to("/d.qcow2", "qcow2", Some(vec!["/a.raw".to_owned()]));
    top.take_off(&off("/d.qcow2", "/a.raw", None)).unwrap();
    assert_eq!(top.options.to_text(), "file=/a.raw,format=raw");
}

#[test]
fn a_disk_whose_top_took_in_all_layers_keeps_it() {
    let mut merged = disk("/a.raw");
    merged.put_on("/b.qcow2");
    merged.rest_on(1, None);
    assert!(merged.has_layers_on(Some("/a.raw")) && merged.has_left("/a.raw"));
    merged.set_options(Options::parse("file=/a.raw,format=raw,cache=none").unwrap());
    assert_eq!(merged.options.to_text(), "file=/b.qcow2,format=qcow2,cache=none");
    let mut alone = disk("/a.raw");
    alone.rest_on(0, Some("/base.raw".to_owned()));
    assert_eq!(alone.moved_from, None);
}

#[test]
fn a_layer_comes_off_a_disk_that_was_given_by_a_link_and_leaves_it_as_it_was_given() {
    let dir = tempfile::tempdir().unwrap();
    let (own, link) = (dir.path().canonicalize().unwrap().join("own"), dir.path().join("link"));
    std::fs::write(&own, "").unwrap();
    std::os::unix::fs::symlink(&own, &link).unwrap();
    let mut disk = disk(link.to_str().unwrap());
    let given = disk.clone();
    disk.put_on("/fleece");
    disk.take_off(&off("/fleece", own.to_str().unwrap(), None)).unwrap();
    assert_eq!(disk, given);
    disk.put_on("/b.qcow2");
    assert!(disk.uses(own.to_str().unwrap()) && !disk.uses("/other"));
}

#[test]
fn a_disk_of_another_file_does_not_take_over_a_fleece() {
    let mut old = disk("/a.raw");
    old.fleeces.push(NotedFile::to_be("/fleece"));
    old.put_on("/fleece");
    let mut record = Record { disks: vec![old], ..Record::default() };
    record.put(disk("/fleece"));
    assert_eq!(record.disks[0].fleeces, [NotedFile::to_be("/fleece")]);
    record.put(disk("/b.raw"));
    assert!(record.disks[0].fleeces.is_empty());
}

#[test]
fn a_record_that_is_none_is_refused_with_its_path() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join(FILE), "{\"version\": 1}").unwrap();
    let error = Records::in_directory(dir.path()).unwrap_err();
    assert!(error.to_string().contains(FILE), "{error}");
    std::fs::write(dir.path().join(FILE), r#"{"version": 2, "disks": [], "removed": []}"#).unwrap();
    assert!(Records::in_directory(dir.path()).unwrap_err().to_string().contains("version is 2"));
}

#[test]
fn a_change_that_cannot_be_written_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let records = Records::in_directory(dir.path()).unwrap();
    std::fs::create_dir(dir.path().join(NEW_FILE)).unwrap();
    assert!(records.change(|record| record.disks.push(disk("/a.raw"))).is_err());
    assert!(records.current().disks.is_empty());
    std::fs::remove_dir(dir.path().join(NEW_FILE)).unwrap();
    records.change(|_| ()).unwrap();
    assert!(!dir.path().join(FILE).exists(), "nothing was written, so nothing has to be written anew");
}

#[test]
fn a_record_is_in_doubt_from_a_save_that_fails_after_its_rename_until_one_is_durable() {
    let dir = tempfile::tempdir().unwrap();
    let records = Records::in_directory(dir.path()).unwrap();
    let add = |file: &str| records.change(|record| record.disks.push(disk(file)));
    let meets = |met: &[SaveMeets]| records.next_saves_meet(met.iter().copied());
    let current = || records.current().disks.len();
    let on_disk = || {
        let copy = tempfile::tempdir().unwrap();
        std::fs::copy(dir.path().join(FILE), copy.path().join(FILE)).unwrap();
        Records::in_directory(copy.path()).unwrap().current().disks.len()
    };
    add("/a.raw").unwrap();
    // The old record is written again, or the new one has never had its name.
    for met in [SaveMeets::FailedSync, SaveMeets::NoSpace] {
        meets(&[met]);
        assert_eq!(add("/b.raw").unwrap_err().kind(), ErrorKind::Io);
        assert_eq!((current(), on_disk()), (1, 1));
    }
    meets(&[SaveMeets::FailedSync, SaveMeets::NoSpace]);
    assert_eq!(add("/b.raw").unwrap_err().kind(), ErrorKind::Unsure);
    assert_eq!((current(), on_disk()), (1, 2));
    let refuse = || records.try_change(|_| Err(Error::new(ErrorKind::Locked, "refused"))).unwrap_err().kind();
    meets(&[SaveMeets::NoSpace; 5]);
    assert_eq!(add("/c.raw").unwrap_err().kind(), ErrorKind::Unsure);
    assert_eq!(refuse(), ErrorKind::Unsure);
    assert_eq!(records.check_doubt().unwrap_err().kind(), ErrorKind::Unsure);
    assert_eq!((current(), on_disk()), (1, 2));
    meets(&[]);
    assert_eq!(refuse(), ErrorKind::Locked);
    assert_eq!((current(), on_disk()), (1, 1), "it is written anew");
    meets(&[SaveMeets::FailedSync, SaveMeets::NoSpace]);
    add("/b.raw").unwrap_err();
    add("/b.raw").unwrap();
    assert_eq!((current(), on_disk()), (2, 2));
}

#[test]
fn the_disks_of_a_group_have_the_same_limits_in_the_record() {
    let with = |filter: &str| {
        let options = Options::parse(&format!("format=null,size=1M,filter=delay:ms=1,filter={filter}")).unwrap();
        RecordedDisk { options, ..disk("/a") }
    };
    let filters = ["throttle:iops-total=5:group=g", "throttle:group=g", "throttle:iops-total=5:group=h", "throttle"];
    let mut record = Record { disks: filters.map(with).into(), ..Record::default() };
    let mut limits = ThrottleLimits::default();
    limits.total.requests.per_second = Some(9);
    record.set_group_limits("g", limits);
    let all = ["throttle:iops-total=9:group=g", "throttle:iops-total=9:group=g", filters[2], filters[3]];
    for (disk, expected) in record.disks.iter().zip(all) {
        let filters: Vec<&str> =
            disk.options.pairs().filter(|(key, _)| *key == "filter").map(|(_, text)| text).collect();
        assert_eq!(filters, ["delay:ms=1", expected]);
    }
    record.set_group_limits("g", ThrottleLimits::default());
    assert!(record.disks[0].options.to_text().ends_with("filter=throttle:group=g"));
}

#[test]
fn a_layer_between_others_goes_and_is_in_its_place_again_if_the_image_still_rests_on_it() {
    let mut disk = disk("/a.raw");
    ["/b.qcow2", "/c.qcow2", "/d.qcow2"].into_iter().for_each(|overlay| disk.put_on(overlay));
    let before = disk.clone();
    let names = |names: &[&str]| names.iter().map(|name| FileName::parse(name).unwrap()).collect::<Vec<_>>();
    let [b, a] = [&names(&["/b.qcow2"])[0], &names(&["/a.raw"])[0]].map(Clone::clone);
    disk.layer_goes(&b);
    assert_eq!((disk.former_tops.len(), disk.leaving_below), (2, 1));
    assert!(before.files().all(|file| disk.uses(file)));
    assert!(disk.names_old_base(&names(&["/c.qcow2", "/b.qcow2", "/a.raw"])));
    assert!(!disk.names_old_base(&names(&["/c.qcow2", "/a.raw"])));
    let mut gone = disk.clone();
    disk.stays();
    assert_eq!(disk, before);
    gone.layer_is_gone(&b);
    assert!(!gone.uses("/b.qcow2") && gone.uses("/a.raw") && gone.uses("/c.qcow2"));
    assert!(gone.has_layers_on(Some("/a.raw")));
    // The image that it was added with goes.
    disk.layer_goes(&a);
    disk.layer_is_gone(&a);
    assert!(disk.has_layers_on(Some("/a.raw")) && !disk.rests_on("/a.raw"));
}
