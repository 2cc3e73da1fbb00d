//! Reloads that meet what calls have done meanwhile, and what a reload leaves in force and on record.

use super::*;
use crate::record::NotedFile;

fn drive(file: &Path, more: &str) -> String {
    format!("[[drive]]\nname = 'web'\nexport = false\nfile = '{}'\n{more}", file.display())
}

fn export(socket: &Path) -> AddExport {
    let nbd = Some(crate::api::AddNbd { name: Some("e".to_owned()), ..Default::default() });
    AddExport { disk: "web".to_owned(), socket: Some(socket.to_owned()), nbd, ..AddExport::default() }
}

#[test]
fn a_reload_leaves_a_disk_alone_that_a_call_has_added_under_a_configured_name() {
    let managed = Managed::new();
    let (one, other) = (managed.image("one", None), managed.image("other", None));
    managed.configured_by(&drive(&one, ""));
    managed.manager.remove_disk("web", true).unwrap();
    managed.add(&other, &[]).unwrap();
    let (shown, recorded) = (managed.manager.disk("web").unwrap().file, managed.recorded());
    let node = managed.manager.node("web").unwrap();
    assert_eq!(managed.reload(&drive(&one, "")).failed, Vec::new());
    for more in ["cache = 'writethrough'\n", "serial = 'S'\n", "filter = 'throttle:iops-total=5'\n"] {
        let reloaded = managed.reload(&drive(&one, more));
        assert_eq!(reloaded.failed.len(), 1, "{reloaded:?}");
        assert!(reloaded.failed[0].error.contains("added by a command"), "{reloaded:?}");
        assert_eq!((managed.manager.disk("web").unwrap().file, managed.recorded()), (shown.clone(), recorded.clone()));
    }
    let reloaded = managed.reload("");
    assert!(reloaded.notes[0].contains("'web' stays") && reloaded.removed.is_empty(), "{reloaded:?}");
    assert_eq!(managed.manager.node("web").unwrap(), node);
    assert_eq!(managed.recorded(), recorded);
    managed.manager.remove_disk("web", true).unwrap();
    assert_eq!(managed.reload(&drive(&one, "serial = 'S'\n")).added, ["web"]);
    assert_eq!(managed.manager.disk("web").unwrap().file, one.display().to_string());
}

#[test]
fn a_reload_does_not_take_the_record_of_a_disk_that_a_call_added_and_that_could_not_be_opened() {
    let managed = Managed::new();
    let (one, other) = (managed.image("one", None), managed.image("other", None));
    managed.add(&other, &[]).unwrap();
    let recorded = managed.recorded();
    let managed = managed.again();
    std::fs::rename(&other, other.with_file_name("away")).unwrap();
    managed.configured_by("");
    assert_eq!(managed.away(), ["web"]);
    let reloaded = managed.reload(&drive(&one, ""));
    assert!(reloaded.failed[0].error.contains("added by a command"), "{reloaded:?}");
    assert_eq!((managed.recorded(), managed.away()), (recorded, vec!["web".to_owned()]));
}

/// Serves a disk whose top is a fleece, as a daemon that died during a backup leaves it. Returns the image and the fleece.
fn with_fleece() -> (Managed, PathBuf, PathBuf) {
    let managed = Managed::new();
    let root = managed.image("root", None);
    let fleece = root.with_file_name("root.fleece0");
    managed.configured_by(&drive(&root, ""));
    managed.snapshot("web", &fleece).unwrap();
    let record = managed.manager.record_of("web", managed.manager.node("web").unwrap());
    record.change(|disk| disk.fleeces.push(NotedFile::to_be(fleece.display().to_string()))).unwrap();
    (managed, root, fleece)
}

/// Checks that the fleece is taken back.
fn is_taken_back(managed: &Managed, fleece: &Path) {
    managed.manager.daemon.jobs().iter().for_each(|job| managed.manager.daemon.wait_job(job.id).unwrap());
    assert_eq!((managed.manager.disk("web").unwrap().layers.len(), fleece.exists()), (1, false));
    assert_eq!(managed.recorded().unwrap().fleeces, []);
}

#[test]
fn a_fleece_on_a_disk_that_only_a_reload_can_open_is_taken_back_and_removed() {
    let (managed, root, fleece) = with_fleece();
    let managed = managed.again();
    let elsewhere = root.with_file_name("elsewhere");
    std::fs::rename(&root, &elsewhere).unwrap();
    managed.configured_by(&drive(&root, ""));
    assert_eq!(managed.away(), ["web"]);
    let reloaded = managed.reload("");
    assert!(reloaded.failed[0].error.contains("root.fleece0") && reloaded.removed.is_empty(), "{reloaded:?}");
    std::fs::rename(&elsewhere, &root).unwrap();
    assert_eq!(managed.reload(&drive(&root, "")).added, ["web"]);
    is_taken_back(&managed, &fleece);
}

#[test]
fn a_disk_with_a_fleece_is_not_forgotten_by_a_start_that_does_not_give_it() {
    let (managed, root, fleece) = with_fleece();
    let other = managed.image("other", None);
    let mut managed = managed.again();
    // Another image of its name would take its place in the record.
    let refused = managed.manager.restore(&managed.configure(&drive(&other, "")).1.drives).unwrap_err().to_string();
    assert!(refused.contains("another drive has the name 'web'") && refused.contains("root.fleece0"), "{refused}");
    for _ in 0..2 {
        managed = managed.again();
        managed.configured_by("");
        assert_eq!(managed.away(), ["web"]);
    }
    let managed = managed.again();
    managed.configured_by(&drive(&root, ""));
    is_taken_back(&managed, &fleece);
}

#[test]
fn a_new_drive_that_cannot_be_opened_is_listed_until_a_reload_opens_it() {
    let managed = Managed::new();
    let (one, other) = (managed.image("one", None), managed.image("other", None));
    let missing = drive(&one.with_file_name("missing"), "");
    managed.configured_by("");
    for _ in 0..2 {
        assert_eq!(managed.reload(&missing).failed.len(), 1);
        let failed = managed.manager.failed_disks();
        assert_eq!(failed.len(), 1, "{failed:?}");
        assert!(failed[0].name == "web" && failed[0].error.contains("the last reload"), "{failed:?}");
    }
    // Its name is nobody's.
    managed.add(&other, &[]).unwrap();
    assert_eq!(managed.away(), Vec::<String>::new());
    managed.manager.remove_disk("web", true).unwrap();
    assert_eq!(managed.reload(&drive(&one, "")).added, ["web"]);
    assert_eq!(managed.away(), Vec::<String>::new());
    assert_eq!(managed.reload(&missing).failed.len(), 1);
    assert_eq!(managed.manager.failed_disks(), Vec::new(), "it is served as before");
}

#[test]
fn a_disk_whose_export_cannot_begin_is_served_once_and_recorded() {
    for is_new in [true, false] {
        let managed = Managed::new();
        let one = managed.image("one", None);
        let missing = one.with_file_name("missing");
        managed.configured_by(&if is_new { String::new() } else { drive(&one, "") });
        let text = drive(&one, "serial = 'S'\n")
            + &format!("[[export]]\ndisk = 'web'\ntype = 'nbd'\nsocket = '{}/x'\n", missing.display());
        for _ in 0..2 {
            let reloaded = managed.reload(&text);
            assert_eq!(reloaded.failed.len(), 1, "{reloaded:?}");
            assert!(reloaded.failed[0].error.contains("without one of its exports"), "{reloaded:?}");
            assert_eq!(managed.manager.disks().len(), 1);
            assert!(managed.manager.away.failed().is_empty());
            assert_eq!(managed.manager.failed_exports().len(), 1);
            assert_eq!(managed.recorded().unwrap().exports.len(), 1);
        }
        std::fs::create_dir(&missing).unwrap();
        assert_eq!(managed.reload(&text).failed, Vec::new());
        assert_eq!((managed.manager.exports().len(), managed.manager.failed_exports()), (1, Vec::new()));
        managed.manager.remove_disk("web", true).unwrap();
        assert!(managed.recorded().is_none() && managed.manager.disks().is_empty());
    }
}

#[test]
fn a_start_that_fails_for_an_export_does_not_leave_the_disk_on_record_without_it() {
    let managed = Managed::new();
    let one = managed.image("one", None);
    let (path, config) = managed
        .configure(&format!("{}[[export]]\ndisk = 'web'\ntype = 'nbd'\nsocket = 'missing/x'\n", drive(&one, "")));
    managed.manager.restore(&config.drives).unwrap_err();
    let managed = managed.again();
    std::fs::create_dir(path.with_file_name("missing")).unwrap();
    managed.manager.restore(&config.drives).unwrap();
    assert_eq!(managed.manager.exports().len(), 1);
}

#[test]
fn exports_that_calls_have_added_stay_whatever_else_a_reload_or_a_start_changes() {
    let managed = Managed::new();
    let one = managed.image("one", None);
    let given = |text: &str| managed.configure(text).1.drives;
    managed.configured_by(&drive(&one, ""));
    let of_call = export(&one.with_file_name("call.sock"));
    managed.manager.add_export(of_call.clone()).unwrap();
    let recorded = managed.recorded();
    let missing = one.with_file_name("missing");
    let reloaded = managed.reload(&drive(&missing, ""));
    assert!(reloaded.failed[0].error.contains("as it was before"), "{reloaded:?}");
    assert_eq!((managed.manager.exports().len(), managed.recorded()), (1, recorded));
    // The given export cannot begin.
    let more = "serial = 'S'\n[[export]]\ndisk = 'web'\ntype = 'nbd'\nsocket = 'missing/x'\n";
    assert_eq!(managed.reload(&drive(&one, more)).reopened, ["web"]);
    assert_eq!((managed.manager.exports().len(), managed.recorded().unwrap().exports.len()), (1, 2));
    assert_eq!(managed.reload(&drive(&one, "serial = 'T'\n")).reopened, ["web"]);
    assert_eq!(managed.recorded().unwrap().exports, std::slice::from_ref(&of_call));
    let texts = [drive(&one, "serial = 'U'\n"), drive(&one, "serial = 'V'\n")].map(|text| given(&text));
    let mut managed = managed;
    for (drives, top) in texts.into_iter().zip([None, Some(one.with_file_name("top"))]) {
        // With a layer, the record stays; without one, it is made anew.
        top.iter().for_each(|top| drop(managed.snapshot("web", top).unwrap()));
        managed = managed.again();
        managed.manager.restore(&drives).unwrap();
        assert_eq!(managed.recorded().unwrap().exports, std::slice::from_ref(&of_call));
        assert_eq!(managed.manager.exports().len(), 1);
    }
}

#[test]
fn limits_of_a_group_come_back_whichever_disk_got_them() {
    let managed = Managed::new();
    let group = format!("group-{}", std::process::id());
    let limits = |managed: &Managed, disk: &str| {
        let node = managed.manager.node(disk).unwrap();
        managed.manager.daemon.throttles(node).unwrap()[0].group().limits().total.requests.per_second
    };
    let add = |managed: &Managed, name: &str, filter: &str| {
        managed.add_as(&format!("format=null,size=1M,name={name},filter=throttle:{filter}"), &[]).unwrap();
    };
    add(&managed, "d0", &format!("iops-total=100:group={group}"));
    add(&managed, "d1", &format!("iops-total=100:group={group}"));
    managed.set("d0", "throttling.iops-total", "5000").unwrap();
    let mut managed = managed.again();
    managed.manager.restore(&[]).unwrap();
    assert_eq!(["d0", "d1"].map(|disk| limits(&managed, disk)), [Some(5000); 2]);
    // Whoever gives limits when it is added sets them for all.
    add(&managed, "d2", &format!("iops-total=70:group={group}"));
    managed.set("d1", "throttling.iops-read", "30").unwrap();
    managed.set("d0", "throttling.iops-total", "0").unwrap();
    for _ in 0..2 {
        assert_eq!(["d0", "d1", "d2"].map(|disk| limits(&managed, disk)), [None; 3]);
        managed = managed.again();
        managed.manager.restore(&[]).unwrap();
    }
}

#[test]
fn of_two_calls_that_change_limits_at_once_none_is_lost() {
    let managed = Managed::new();
    managed.add_as("format=null,size=1M,name=web,filter=throttle", &[]).unwrap();
    for round in 1..=50 {
        let (start, value) = (Barrier::new(2), (round * 1000).to_string());
        std::thread::scope(|scope| {
            for key in ["throttling.iops-total", "throttling.iops-read"] {
                let (start, managed, value) = (&start, &managed, &value);
                scope.spawn(move || {
                    start.wait();
                    managed.set("web", key, value).unwrap();
                });
            }
        });
        let filter = format!("throttle:iops-total={value}:iops-read={value}");
        assert_eq!(managed.recorded().unwrap().options.get("filter"), Some(filter.as_str()));
    }
}

#[test]
fn every_path_of_the_record_is_whole() {
    let text = "file=a.raw,format=raw,name=k,snapshot=on,keep=kept,socket=s,filter=log:file=changes";
    let options = absolute_file(Options::parse(text).unwrap()).unwrap();
    let here = std::env::current_dir().unwrap().display().to_string();
    let expected = format!(
        "file={here}/a.raw,format=raw,name=k,snapshot=on,keep={here}/kept,socket={here}/s,filter=log:file={here}/changes"
    );
    assert_eq!(options.to_text(), expected);
}

#[test]
fn a_drive_whose_kept_overlay_was_named_by_a_relative_path_keeps_its_layers_by_its_whole_path() {
    let managed = Managed::new();
    let root = managed.image("root", None);
    let kept = root.with_file_name("kept");
    std::fs::create_dir(&kept).unwrap();
    let on = |keep: &str| given(&format!("file={},snapshot=on,name=web,keep={keep}", root.display()));
    managed.manager.restore(&on(&format!("{}/./", kept.display()))).unwrap();
    let top = root.with_file_name("top");
    managed.snapshot("web", &top).unwrap();
    let managed = managed.again();
    managed.manager.restore(&on(&kept.display().to_string())).unwrap();
    assert_eq!(managed.manager.disk("web").unwrap().file, top.display().to_string());
}
