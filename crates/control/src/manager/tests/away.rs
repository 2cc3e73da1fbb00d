//! Disks of the record that are not served: nobody writes below their layers, and nobody forgets them unasked.

use super::*;
use crate::api::{BackupDisk, MirrorDisk};

/// A disk with the layer `top` on `root`, whose top is `away`.
struct Layered {
    managed: Managed,
    root: PathBuf,
    top: PathBuf,
    away: PathBuf,
}

impl Layered {
    fn new(add: impl FnOnce(&Managed, &Path)) -> Self {
        let managed = Managed::new();
        let root = managed.image("root", None);
        let (top, away) = (root.with_file_name("top"), root.with_file_name("away"));
        add(&managed, &root);
        managed.snapshot("web", &top).unwrap();
        std::fs::rename(&top, &away).unwrap();
        Self { managed: managed.again(), root, top, away }
    }

    fn added_by_a_call() -> Self {
        Self::new(|managed, root| drop(managed.add(root, &[]).unwrap()))
    }

    fn comes_back(self, configured: &[Configured]) {
        std::fs::rename(&self.away, &self.top).unwrap();
        let managed = self.managed.again();
        managed.manager.restore(configured).unwrap();
        assert_eq!(managed.manager.disk("web").unwrap().file, self.top.display().to_string());
    }
}

fn lies_below<T: std::fmt::Debug>(refused: Result<T>) {
    let error = refused.unwrap_err().to_string();
    assert!(error.contains("lies below") && error.contains("'web'"), "{error}");
}

#[test]
fn no_call_writes_below_the_layers_of_a_disk_that_could_not_be_opened() {
    let layered = Layered::added_by_a_call();
    let Layered { managed, root, .. } = &layered;
    managed.manager.restore(&[]).unwrap();
    assert_eq!(managed.away(), ["web"]);
    let link = root.with_file_name("link");
    std::os::unix::fs::symlink(root, &link).unwrap();
    for file in [root, &link] {
        lies_below(managed.add_as(&format!("file={},name=www", file.display()), &[]));
        lies_below(managed.add_as(&format!("file={}", file.display()), &[]));
    }
    let other = managed.image("other", Some(root));
    lies_below(managed.add_as(&format!("file={},name=other", other.display()), &[root]));
    managed.add_as(&format!("file={},name=www,readonly=on", root.display()), &[]).unwrap();
    managed.manager.remove_disk("www", true).unwrap();
    assert_eq!(managed.manager.disks(), Vec::new());
    layered.comes_back(&[]);
}

#[test]
fn no_drive_of_the_same_start_writes_below_the_layers_of_a_disk_that_could_not_be_opened() {
    let layered = Layered::added_by_a_call();
    let www = given(&format!("file={},name=www", layered.root.display()));
    lies_below(layered.managed.manager.restore(&www));
    layered.comes_back(&[]);

    let text = |root: &Path| format!("file={},name=web", root.display());
    let layered = Layered::new(|managed, root| managed.manager.restore(&given(&text(root))).unwrap());
    let (web, www) = (given(&text(&layered.root)), given(&format!("file={},name=www", layered.root.display())));
    lies_below(layered.managed.manager.restore(&[&web[..], &www].concat()));
    layered.comes_back(&web);
}

#[test]
fn no_new_drive_of_a_reload_writes_below_the_layers_of_a_disk_that_could_not_be_opened() {
    let drive =
        |name: &str, root: &Path| format!("[[drive]]\nname = '{name}'\nexport = false\nfile = '{}'\n", root.display());
    let layered = Layered::new(|managed, root| managed.configured_by(&drive("web", root)));
    let Layered { managed, root, .. } = &layered;
    let web = drive("web", root);
    managed.configured_by(&web);
    let failed = managed.reload(&(web.clone() + &drive("www", root))).failed;
    let names: Vec<&str> = failed.iter().map(|failed| failed.name.as_str()).collect();
    assert_eq!(names, ["web", "www"]);
    assert!(failed[1].error.contains("lies below"), "{failed:?}");
    assert!(managed.manager.disks().is_empty());
    std::fs::rename(&layered.away, &layered.top).unwrap();
    assert_eq!(managed.reload(&web).failed, Vec::new());
    assert_eq!(managed.manager.disk("web").unwrap().file, layered.top.display().to_string());
}

#[test]
fn no_job_writes_below_the_layers_of_a_disk_that_could_not_be_opened() {
    let Layered { managed, root, .. } = Layered::added_by_a_call();
    managed.manager.restore(&[]).unwrap();
    let other = managed.image("other", None);
    managed.add_as(&format!("file={},name=other", other.display()), &[]).unwrap();
    let manager = Arc::new(managed.manager);
    let target = root.display().to_string();
    let request = serde_json::json!({ "target": target, "format": "qcow2", "existing": true });
    let mirror: MirrorDisk = serde_json::from_value(request.clone()).unwrap();
    lies_below(manager.mirror("other", &mirror));
    let backup: BackupDisk = serde_json::from_value(request).unwrap();
    lies_below(manager.backup("other", backup));
}

#[test]
fn a_disk_with_layers_is_kept_while_a_drive_only_reads_what_lies_below_them() {
    let managed = Managed::new();
    let (root, other) = (managed.image("root", None), managed.image("other", None));
    let top = root.with_file_name("top");
    let [root, other] = [&root, &other].map(|path| path.display().to_string());
    let web = given(&format!("file={root},name=web"));
    managed.manager.restore(&web).unwrap();
    managed.snapshot("web", &top).unwrap();
    let mut managed = managed;
    for reads in ["readonly=on", "snapshot=on"] {
        managed = managed.again();
        let reader = given(&format!("file={root},{reads},name=r"));
        managed.manager.restore(&reader).unwrap();
        assert_eq!(managed.away(), ["web"]);
        assert_eq!(managed.manager.disks().len(), 1);
        lies_below(managed.add_as(&format!("file={root},name=www"), &[]));
        managed = managed.again();
        // Nobody takes its name meanwhile.
        let other = given(&format!("file={other},name=web"));
        let error = managed.manager.restore(&[&reader[..], &other].concat()).unwrap_err().to_string();
        assert!(error.contains("another drive has the name 'web'"), "{error}");
        managed = managed.again();
        managed.manager.restore(&web).unwrap();
        assert_eq!(managed.manager.disk("web").unwrap().file, top.display().to_string(), "{reads}");
    }
    let managed = managed.again();
    let reader = given(&format!("file={root},readonly=on,name=r"));
    managed.manager.restore(&reader).unwrap();
    managed.manager.remove_disk("web", false).unwrap();
    assert_eq!((managed.away(), managed.recorded()), (Vec::new(), None));
    let managed = managed.again();
    managed.manager.restore(&reader).unwrap();
    assert!(managed.away().is_empty());
}

#[test]
fn a_reload_keeps_a_disk_with_layers_while_a_drive_only_reads_what_lies_below_them() {
    let managed = Managed::new();
    let root = managed.image("root", None);
    let top = root.with_file_name("top");
    let drive = |name: &str, more: &str| {
        format!("[[drive]]\nname = '{name}'\nexport = false\nfile = '{}'\n{more}", root.display())
    };
    managed.configured_by(&drive("web", ""));
    managed.snapshot("web", &top).unwrap();
    for _ in 0..2 {
        let reloaded = managed.reload(&drive("r", "readonly = true\n"));
        let failed: Vec<&str> = reloaded.failed.iter().map(|failed| failed.name.as_str()).collect();
        // The disk has the file open to take its layer back into it.
        assert_eq!(failed, ["web", "r"], "{reloaded:?}");
        assert!(reloaded.failed[0].error.contains("they are kept"), "{reloaded:?}");
        assert_eq!(managed.manager.disk("web").unwrap().file, top.display().to_string());
        assert_eq!(managed.manager.disks().len(), 1);
    }
    let reloaded = managed.reload("");
    assert_eq!(reloaded.removed, ["web"]);
    assert_eq!(managed.recorded(), None);
}
