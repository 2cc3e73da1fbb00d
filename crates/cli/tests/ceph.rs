//! Images of a real Ceph cluster, from the command line, beside Ceph's and QEMU's own programs.

mod common;

use common::{Server, directory, has_tool, path_str, ringdisk, run_fails, run_ok, tool, tool_ok};
use testkit::CephNode;

#[test]
fn images_of_a_real_cluster_are_read_written_and_locked() {
    let Some(cluster) = CephNode::start() else { return };
    let directory = directory();
    let path = |name: &str| path_str(&directory.path().join(name)).to_owned();
    let (raw, back, socket) = (path("disk.raw"), path("back.raw"), path("nbd"));
    let mut bytes = common::numbered(5 << 20);
    bytes.resize(32 << 20, 0);
    std::fs::write(&raw, &bytes).unwrap();
    let (image, qcow2) = (cluster.name("disk"), cluster.name("disk.qcow2"));
    run_ok(&["convert", "-f", "raw", "-O", "raw", &raw, &image]);
    run_ok(&["convert", "-f", "raw", "-O", "qcow2", &raw, &qcow2]);
    for name in [&image, &qcow2] {
        run_ok(&["compare", &raw, name]);
        run_ok(&["convert", "-O", "raw", name, &back]);
        assert!(std::fs::read(&back).unwrap() == bytes);
    }
    cluster.run("rbd", &["export", "disks/disk", "--no-progress", &path("exported.raw")]);
    assert!(std::fs::read(path("exported.raw")).unwrap() == bytes);
    // Objects of 4 MiB: two of eight have data.
    assert!(run_ok(&["map", "--output=json", "-f", "raw", &image]).contains("\"length\": 8388608"));
    assert!(run_ok(&["info", "-f", "raw", &image]).contains("32 MiB"));
    assert!(run_fails(1, &["create", "-f", "raw", &image, "1M"]).contains("exists"));
    // A snapshot keeps what was there.
    cluster.run("rbd", &["snap", "create", "disks/disk@before", "--no-progress"]);
    run_ok(&["resize", "-f", "raw", &image, "48M"]);
    let snapshot = cluster.name("disk@before");
    run_ok(&["compare", "-f", "raw", "-F", "raw", &raw, &snapshot]);
    assert!(run_ok(&["info", "-f", "raw", &image]).contains("48 MiB"));
    assert!(run_fails(2, &["resize", "-f", "raw", &snapshot, "64M"]).contains("snapshot"));
    let overlay = path("overlay.qcow2");
    run_ok(&["create", "-q", "-f", "qcow2", "-b", &snapshot, "-F", "raw", &overlay]);
    let mut serve = ringdisk();
    serve.args(["nbd", &overlay, "--socket", &socket, "--backing", &snapshot]);
    let served = Server::start_command(serve);
    run_ok(&["compare", "-f", "raw", "-F", "raw", &raw, &format!("nbd+unix:///?socket={socket}")]);
    served.stop();
    // Whoever writes has the lock; one that was killed has it until it is missed.
    let mut serve = ringdisk();
    serve.args(["nbd", &image, "--socket", &socket]);
    let served = Server::start_command(serve);
    let said = run_fails(1, &["--lock-timeout-s", "0", "resize", "-f", "raw", &image, "64M"]);
    assert!(said.contains("in use: the client at"), "{said}");
    served.kill();
    run_ok(&["--lock-timeout-s", "120", "resize", "-f", "raw", &image, "64M"]);
}

#[test]
fn qemu_img_and_ringdisk_read_what_the_other_wrote() {
    if !has_tool("qemu-img") {
        return;
    }
    let formats = tool_ok("qemu-img", &["--help"]);
    if !formats.split_whitespace().any(|word| word == "rbd") {
        eprintln!("SKIPPED: this qemu-img has no driver for rbd");
        return;
    }
    let Some(cluster) = CephNode::start() else { return };
    let directory = directory();
    let raw = path_str(&directory.path().join("disk.raw")).to_owned();
    let mut bytes = common::numbered(5 << 20);
    bytes.resize(12 << 20, 0);
    std::fs::write(&raw, &bytes).unwrap();
    for format in ["raw", "qcow2"] {
        let (ours, theirs) = (cluster.name(&format!("ours-{format}")), cluster.name(&format!("theirs-{format}")));
        run_ok(&["convert", "-f", "raw", "-O", format, &raw, &ours]);
        tool_ok("qemu-img", &["convert", "-f", "raw", "-O", format, &raw, &theirs]);
        run_ok(&["compare", "-f", format, "-F", "raw", &theirs, &raw]);
        tool_ok("qemu-img", &["compare", "-f", format, "-F", "raw", &ours, &raw]);
        let is_size = |line: &&str| line.contains("virtual-size");
        let size_of = |text: String| text.lines().find(is_size).map(|line| line.trim_matches([' ', ',']).to_owned());
        let info = ["info", "-f", format, "--output=json", &ours];
        assert_eq!(size_of(run_ok(&info)), size_of(tool_ok("qemu-img", &info)));
        for image in [&ours, &theirs] {
            let map = ["map", "-f", format, "--output=json", image];
            assert_eq!(run_ok(&map), tool_ok("qemu-img", &map));
        }
    }
    let refused = tool("qemu-img", &["create", "-f", "raw", &cluster.name("ours-raw"), "1M"]);
    assert!(!refused.status.success());
}
