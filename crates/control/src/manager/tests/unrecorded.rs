//! Changes that the state directory does not take: it has no space, say.

use super::*;

/// Nothing can be recorded while this lives.
struct Full(PathBuf);

impl Full {
    fn state_of(managed: &Managed) -> Self {
        let in_the_way = managed.directory.path().join("state/disks.json.new");
        std::fs::create_dir(&in_the_way).unwrap();
        Self(in_the_way)
    }
}

impl Drop for Full {
    fn drop(&mut self) {
        std::fs::remove_dir(&self.0).unwrap();
    }
}

#[test]
fn a_disk_that_cannot_be_taken_off_the_record_keeps_its_layers_until_it_is_removed_again() {
    let managed = Managed::new();
    let root = managed.image("root", None);
    managed.add(&root, &[]).unwrap();
    managed.snapshot("web", &root.with_file_name("top")).unwrap();
    let full = Full::state_of(&managed);
    let error = managed.manager.remove_disk("web", false).unwrap_err().to_string();
    assert!(error.starts_with("the disk 'web': it is closed, but stays on record"), "{error}");
    assert_eq!((managed.manager.disks(), managed.away()), (Vec::new(), vec!["web".to_owned()]));
    managed.manager.remove_disk("web", false).unwrap_err();
    drop(full);

    let below = || managed.add_as(&format!("file={},name=www", root.display()), &[]);
    let error = below().unwrap_err().to_string();
    assert!(error.contains("lies below") && error.contains("'web'"), "{error}");
    managed.add(&root, &[]).unwrap_err();
    managed.manager.remove_disk("web", false).unwrap();
    assert_eq!((managed.recorded(), managed.away()), (None, Vec::new()));
    below().unwrap();
    let managed = managed.again();
    managed.manager.restore(&[]).unwrap();
    assert!(managed.manager.disk("www").is_ok() && !managed.manager.knows("web"));
}

#[test]
fn an_export_that_cannot_be_taken_off_the_record_stays() {
    let managed = Managed::new();
    managed.add(&managed.image("image", None), &[]).unwrap();
    let socket = managed.directory.path().join("socket");
    let request = AddExport { disk: "web".to_owned(), socket: Some(socket.clone()), ..AddExport::default() };
    let export = managed.manager.add_export(request).unwrap().id;
    let full = Full::state_of(&managed);
    managed.manager.remove_export(export).unwrap_err();
    assert!(socket.exists() && managed.manager.exports().len() == 1);
    drop(full);
    managed.manager.remove_export(export).unwrap();
    assert!(!socket.exists() && managed.recorded().unwrap().exports.is_empty());
}

/// It is listed as soon as it is served, which is before it is recorded.
#[test]
fn an_export_that_is_being_added_is_not_taken_for_the_one_of_the_disk_s_own_options() {
    let managed = Managed::new();
    managed.add(&managed.image("image", None), &[]).unwrap();
    let record = managed.manager.record_of("web", managed.manager.node("web").unwrap());
    record.change(|disk| disk.own_export = true).unwrap();
    let socket = Some(managed.directory.path().join("socket"));
    let request = AddExport { disk: "web".to_owned(), socket, ..AddExport::default() };
    managed.manager.begin_export(managed.manager.node("web").unwrap(), &request).unwrap();
    let export = managed.manager.exports()[0].id;
    let refused = managed.manager.remove_export(export).unwrap_err().0;
    assert!(refused.message.contains("just now: try again"), "{refused:?}");
    assert!(managed.recorded().unwrap().own_export && managed.manager.exports().len() == 1);
}
