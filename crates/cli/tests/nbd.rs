//! `ringdisk nbd`: disks for other people's NBD clients, from the command line.

mod common;

use common::{Server, directory, has_tool, path_str, ringdisk, run_fails, run_ok, tool_ok};

#[test]
fn disks_are_served_under_their_names_until_a_signal() {
    if !has_tool("nbdinfo") || !has_tool("qemu-io") {
        return;
    }
    let directory = directory();
    let path = |name: &str| path_str(&directory.path().join(name)).to_owned();
    let (image, other, socket) = (path("disk.qcow2"), path("other.raw"), path("nbd"));
    run_ok(&["create", "-q", "-f", "qcow2", &image, "16M"]);
    run_ok(&["create", "-q", "-f", "raw", &other, "1M"]);
    let mut command = ringdisk();
    let drive = format!("file={other},format=raw,name=other,readonly=on");
    command.args(["nbd", &image, "--socket", &socket, "--export-name", "root", "--description", "a system"]);
    command.args(["--drive", &drive]);
    let server = Server::start_command(command);
    assert!(server.announced.contains(&format!("at nbd+unix:///root?socket={socket}")), "{}", server.announced);
    let uri = |name: &str| format!("nbd+unix:///{name}?socket={socket}");
    let list = tool_ok("nbdinfo", &["--list", &uri("")]);
    assert!(
        list.contains("export=\"root\"") && list.contains("a system") && list.contains("export=\"other\""),
        "{list}"
    );
    tool_ok("qemu-io", &["-f", "raw", "-c", "write -P 7 1M 64k", &uri("root")]);
    assert!(tool_ok("nbdinfo", &["--json", &uri("other")]).contains("\"is_read_only\": true"));
    server.stop();
    assert!(!std::path::Path::new(&socket).exists());
    tool_ok("qemu-io", &["-r", "-f", "qcow2", "-c", "read -P 7 1M 64k", &image]);
}

#[test]
fn a_server_without_a_place_or_without_a_disk_says_so() {
    assert!(run_fails(2, &["nbd", "disk.raw"]).contains("--socket"));
    assert!(run_fails(2, &["nbd", "--socket", "x"]).contains("IMAGE"));
}
