//! Files on a web server, from the command line.

mod common;

use common::{Server, directory, has_tool, path_str, ringdisk, run, run_fails, run_ok, text, tool_ok};
use std::sync::atomic::Ordering;
use testkit::WebServer;

#[test]
fn commands_read_a_file_on_a_web_server_as_a_local_one() {
    let directory = directory();
    let path = |name: &str| path_str(&directory.path().join(name)).to_owned();
    let (raw, local) = (path("disk.raw"), path("disk.qcow2"));
    let mut bytes = common::numbered(3 << 20);
    bytes.resize(8 << 20, 0);
    std::fs::write(&raw, &bytes).unwrap();
    run_ok(&["convert", "-O", "qcow2", "-f", "raw", &raw, &local]);
    let server = WebServer::start(&std::fs::read(&local).unwrap());
    let url = server.url("/disk.qcow2?key=secret");
    let info = run_ok(&["info", &url]);
    assert!(info.contains("file format: qcow2") && info.contains("8 MiB") && !info.contains("secret"), "{info}");
    assert!(info.contains("protocol type: http\n"), "{info}");
    assert_eq!(run_ok(&["map", "--output=json", &url]), run_ok(&["map", "--output=json", &local]));
    assert_eq!(run_ok(&["measure", "-O", "raw", &url]), run_ok(&["measure", "-O", "raw", &local]));
    run_ok(&["compare", &url, &raw]);
    let copy = path("copy.raw");
    run_ok(&["convert", "-O", "raw", &url, &copy]);
    assert!(std::fs::read(&copy).unwrap() == bytes);
    let said = run_fails(1, &["convert", "-O", "raw", &raw, &url]);
    assert!(said.contains("only be read") && !said.contains("secret"), "{said}");
    let said = text(&run(&["info", &server.url("/missing?secret")]).stderr);
    assert!(said.contains("404") && !said.contains("secret"), "{said}");
}

#[test]
fn an_overlay_over_a_base_on_a_web_server_serves_a_guest_and_needs_no_server_the_second_time() {
    if !has_tool("qemu-io") {
        return;
    }
    let directory = directory();
    let path = |name: &str| path_str(&directory.path().join(name)).to_owned();
    let (raw, base, top, socket) = (path("base.raw"), path("base.qcow2"), path("top.qcow2"), path("nbd"));
    let mut bytes = common::numbered(4 << 20);
    std::fs::write(&raw, &bytes).unwrap();
    run_ok(&["convert", "-O", "qcow2", "-f", "raw", &raw, &base]);
    let server = WebServer::start(&std::fs::read(&base).unwrap());
    server.behaviour.latency_ms.store(20, Ordering::SeqCst);
    let url = server.url("/base.qcow2");
    run_ok(&["create", "-q", "-f", "qcow2", "-b", &url, "-F", "qcow2", &top]);
    assert!(run_ok(&["info", &top]).contains(&format!("backing file: {url}\n")));
    for policy in ["same-dir", "any"] {
        let said = run_fails(1, &["map", "--allow-backing", policy, &top]);
        assert!(said.contains("--backing") && said.contains(&url), "{said}");
    }
    run_ok(&["compare", "--allow-backing", "anywhere", &top, &raw]);
    let chain = run_ok(&["info", "--backing-chain", "--allow-backing=anywhere", &top]);
    assert!(chain.contains(&format!("image: {url}\n")), "{chain}");
    let serve = || {
        let mut command = ringdisk();
        let named = format!("{url}#cache={}", path("cache"));
        command.args(["nbd", &top, "--socket", &socket, "--backing", &named]);
        Server::start_command(command)
    };
    let (served, uri) = (serve(), format!("nbd+unix:///?socket={socket}"));
    tool_ok("qemu-io", &["-f", "raw", "-c", "write -P 9 1M 64k", &uri]);
    bytes[1 << 20..(1 << 20) + 65536].fill(9);
    std::fs::write(&raw, &bytes).unwrap();
    run_ok(&["compare", "-f", "raw", "-F", "raw", &uri, &raw]);
    served.stop();
    let asked = server.requests();
    server.behaviour.is_out.store(true, Ordering::SeqCst);
    let served = serve();
    run_ok(&["compare", "-f", "raw", "-F", "raw", &uri, &raw]);
    served.stop();
    assert_eq!(server.requests(), asked);
}
