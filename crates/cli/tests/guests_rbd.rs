//! A real Linux guest on disks of a real Ceph cluster: nothing is lost, and Ceph's own programs get a clean image.
//!
//! It needs Debian's packages for the guest and for the cluster, and takes a minute or more, so it is ignored by default and
//! run by `cargo xtask ci`.

mod common;

use common::{Server, path_str, run_ok};
use guestlab::{GuestKind, GuestOptions, GuestReport, GuestWork, ImageFormat, verify_image};
use std::path::Path;
use testkit::CephNode;

const DISK_BYTES: u64 = 512 << 20;
const FILES: u64 = 200;

/// Serves one drive to a guest, and ends the server when the guest has powered off.
fn boot(directory: &Path, drive: &str, more: &[&str], work: GuestWork) -> GuestReport {
    let socket = directory.join("disk.sock");
    // Where /dev/shm is small, User Mode Linux keeps its memory in a file on a disk.
    let drive = format!("{drive},guest-memory=any");
    let arguments = [&["serve", "--drive", &drive, "--socket", path_str(&socket)], more].concat();
    let mut command = common::ringdisk();
    command.args(arguments);
    let server = Server::start_command(command);
    let mut options = GuestOptions::new(GuestKind::Uml, vec![socket]);
    options.work = work;
    let report = guestlab::run(&options, &mut |step| eprintln!("{step}"));
    let (status, said) = server.terminate();
    let report = report.unwrap_or_else(|error| panic!("{error:#}\n\nringdisk serve ({status}) said:\n{said}"));
    assert!(status.success(), "{said}");
    report
}

/// A guest fills an image of the cluster. Another one finds all files there, served anew, and a third one in an overlay
/// over a snapshot, which it does not change.
#[test]
#[ignore = "boots a guest; run by cargo xtask ci"]
fn uml_on_an_image_of_a_ceph_cluster_and_on_an_overlay_over_its_snapshot() {
    let Some(cluster) = CephNode::start() else { return };
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let sockets = tempfile::tempdir().unwrap();
    let image = cluster.name("guest");
    run_ok(&["create", "-q", "-f", "raw", &image, &DISK_BYTES.to_string()]);
    let drive = format!("file={image},format=raw");
    let fill = GuestWork::Fill { measure_seconds: 0, measure_mib: 0, fio_mib: 16 };
    let report = boot(sockets.path(), &drive, &[], fill);
    let [disk] = report.disks.as_slice() else { panic!("{report:?}") };
    assert_eq!(disk.size_bytes, DISK_BYTES);
    assert!(disk.volatile_cache && disk.discard_max_bytes > 0 && disk.trimmed_bytes > 0, "{disk:?}");
    assert!(disk.checks == 2 && disk.files == FILES && disk.fio.is_some(), "{disk:?}");

    let assert_all_there = |report: GuestReport| {
        let [disk] = report.disks.as_slice() else { panic!("{report:?}") };
        assert!(disk.checks == 1 && disk.files == FILES, "{disk:?}");
    };
    assert_all_there(boot(sockets.path(), &drive, &[], GuestWork::CheckAgain));

    let exported = directory.path().join("exported.raw");
    let export = |source: &str| {
        cluster.run("rbd", &["export", source, "--no-progress", path_str(&exported)]);
        let bytes = std::fs::read(&exported).unwrap();
        verify_image(&exported, ImageFormat::Raw).unwrap();
        std::fs::remove_file(&exported).unwrap();
        bytes
    };
    cluster.run("rbd", &["snap", "create", "disks/guest@golden", "--no-progress"]);
    let before = export("disks/guest@golden");
    let (snapshot, overlay) = (cluster.name("guest@golden"), directory.path().join("overlay.qcow2"));
    run_ok(&["create", "-q", "-f", "qcow2", "-b", &snapshot, "-F", "raw", path_str(&overlay)]);
    let drive = format!("file={},format=qcow2", overlay.display());
    assert_all_there(boot(sockets.path(), &drive, &["--backing", &snapshot], GuestWork::CheckAgain));
    assert!(export("disks/guest@golden") == before && export("disks/guest") == before, "the base was written");
    run_ok(&["check", "-q", path_str(&overlay)]);
}
