//! Images of a Ceph cluster, from the command line: with a library that plays librbd.

mod common;

use block::{Disk, ReactorHandle};
use common::{Server, directory, has_tool, path_str, ringdisk, run_ok, text, tool_ok};
use driver::{Driver, DriverOptions};
use engine::{Reactor, ReactorConfig};
use load::{BenchSpec, Hooks, Initial, Pattern, Stop, Verify};
use std::path::Path;
use std::process::{Command, Output};
use std::sync::Arc;
use testkit::{CephNode, RbdStandIn};

struct Cluster(RbdStandIn);

impl Cluster {
    fn new() -> Self {
        Self(RbdStandIn::new())
    }

    fn command(&self) -> Command {
        let mut command = ringdisk();
        command.env("RINGDISK_LIBRBD", self.0.library());
        command
    }

    fn run(&self, arguments: &[&str]) -> Output {
        self.command().args(arguments).output().unwrap()
    }

    fn ok(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        assert!(output.status.success(), "ringdisk {arguments:?}: {}\n{}", output.status, text(&output.stderr));
        text(&output.stdout)
    }

    fn fails(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        assert_eq!(output.status.code(), Some(1), "ringdisk {arguments:?}: {}", text(&output.stdout));
        text(&output.stderr)
    }
}

#[test]
fn commands_take_an_image_of_a_cluster_in_the_place_of_a_file() {
    let (cluster, directory) = (Cluster::new(), directory());
    let path = |name: &str| path_str(&directory.path().join(name)).to_owned();
    let (raw, local, back) = (path("disk.raw"), path("disk.qcow2"), path("back.raw"));
    let mut bytes = common::numbered(3 << 20);
    bytes.resize(8 << 20, 0);
    std::fs::write(&raw, &bytes).unwrap();
    cluster.ok(&["convert", "-O", "qcow2", "-f", "raw", &raw, &local]);
    for (format, source, name) in [("raw", &local, "one"), ("qcow2", &raw, "two")] {
        let image = cluster.0.name(name);
        cluster.ok(&["convert", "-O", format, source, &image]);
        let info = cluster.ok(&["info", &image]);
        let shown = format!("image: rbd:pool/{name}:stand_in=...\n");
        assert!(info.contains(&format!("file format: {format}")) && info.contains("8 MiB"), "{info}");
        assert!(info.contains(&shown) && info.contains("protocol type: rbd\n"), "{info}");
        cluster.ok(&["compare", &image, &raw]);
        assert_eq!(cluster.ok(&["measure", "-O", "raw", &image]), cluster.ok(&["measure", "-O", "raw", &local]));
        let map = cluster.ok(&["map", "--output=json", &image]);
        assert!(map.contains("\"start\": 3145728, \"length\": 5242880"), "{map}");
        cluster.ok(&["convert", "-O", "raw", &image, &back]);
        assert!(std::fs::read(&back).unwrap() == bytes);
        cluster.ok(&["resize", "-f", format, &image, "+8M"]);
        assert!(cluster.ok(&["info", &image]).contains("16 MiB"));
        cluster.ok(&["resize", "-f", format, "--shrink", &image, "8M"]);
        cluster.ok(&["compare", &image, &raw]);
        // One that exists is not overwritten, but it can be filled.
        assert!(cluster.fails(&["convert", "-O", format, &raw, &image]).contains("exists"));
        cluster.ok(&["convert", "-n", "-O", format, &raw, &image]);
        assert!(
            cluster.fails(&["convert", "-n", "-f", format, "-O", format, &image, &image]).contains("another target")
        );
        cluster.ok(&["compare", &image, &raw]);
    }
    assert!(std::fs::read(cluster.0.file("one")).unwrap() == bytes);
    let (new, copy) = (cluster.0.name("new"), cluster.0.name("copy"));
    let said = cluster.ok(&["create", "-f", "raw", &new, "5M"]);
    assert!(said.contains("'rbd:pool/new:stand_in=...'"), "what Ceph is told may be secret: {said}");
    assert_eq!(std::fs::metadata(cluster.0.file("new")).unwrap().len(), 5 << 20);
    assert!(cluster.fails(&["create", "-f", "raw", &new, "5M"]).contains("exists"));
    cluster.ok(&["dd", &format!("if={raw}"), &format!("of={copy}"), "bs=1M", "count=4"]);
    assert!(std::fs::read(cluster.0.file("copy")).unwrap() == bytes[..4 << 20]);
}

#[test]
fn what_goes_wrong_leaves_no_half_image_and_shows_no_secret() {
    let (cluster, directory) = (Cluster::new(), directory());
    let raw = path_str(&directory.path().join("disk.raw")).to_owned();
    std::fs::write(&raw, common::numbered(1 << 20)).unwrap();
    let image = cluster.0.name("half");
    cluster.0.set_faults("write error 28\n");
    let said = cluster.fails(&["convert", "-f", "raw", "-O", "raw", &raw, &image]);
    assert!(said.contains("No space left") && said.contains("removed again"), "{said}");
    assert!(!cluster.0.file("half").exists());
    let said = cluster.fails(&["create", "-f", "qcow2", &image, "1M"]);
    assert!(said.contains("removed again") && !cluster.0.file("half").exists(), "{said}");
    cluster.0.set_faults("");
    for arguments in [
        vec!["info", "rbd:pool/x:key=AQsecret"],
        vec!["convert", "-O", "raw", &raw, "rbd:pool/x:key=AQsecret"],
        vec!["convert", "-n", "-O", "raw", &raw, "rbd:pool/x:key=AQsecret"],
        vec!["create", "-f", "raw", "rbd:pool/x:key=AQsecret", "1M"],
        vec!["serve", "--drive", "file=rbd:pool/x:key=AQsecret,socket=/nowhere/s"],
    ] {
        let said = text(&cluster.run(&arguments).stderr);
        assert!(said.contains("keyring=") && !said.contains("AQsecret"), "{arguments:?}: {said}");
    }
    let mut command = ringdisk();
    let output = command.env("RINGDISK_LIBRBD", "/nowhere/librbd.so").args(["info", &image]).output().unwrap();
    assert!(text(&output.stderr).contains("librbd1"), "{output:?}");
}

#[test]
fn an_overlay_over_an_image_of_a_cluster_is_opened_only_if_the_user_named_that() {
    let (cluster, directory) = (Cluster::new(), directory());
    let path = |name: &str| path_str(&directory.path().join(name)).to_owned();
    let (raw, top, socket) = (path("base.raw"), path("top.qcow2"), path("nbd"));
    let mut bytes = common::numbered(4 << 20);
    std::fs::write(&raw, &bytes).unwrap();
    let base = cluster.0.name("base");
    cluster.ok(&["convert", "-f", "raw", "-O", "raw", &raw, &base]);
    cluster.ok(&["create", "-q", "-f", "qcow2", "-b", &base, "-F", "raw", &top]);
    assert!(cluster.ok(&["info", &top]).contains("backing file: rbd:pool/base\n"));
    for policy in ["same-dir", "any"] {
        let said = cluster.fails(&["map", "--allow-backing", policy, &top]);
        assert!(said.contains("--backing") && said.contains("rbd:pool/base"), "{said}");
    }
    // In the cluster, an overlay's backing file is not beside it.
    let above = cluster.0.name("above");
    let said = cluster.fails(&["create", "-f", "qcow2", "-b", "base.raw", "-F", "raw", &above]);
    assert!(said.contains("relative") || said.contains("No such file"), "{said}");
    cluster.ok(&["create", "-q", "-f", "qcow2", "-b", &raw, "-F", "raw", &above]);
    cluster.ok(&["compare", "--allow-backing", "any", &above, &raw]);
    if !has_tool("qemu-io") {
        return;
    }
    let mut command = cluster.command();
    command.args(["nbd", &top, "--socket", &socket, "--backing", &base]);
    let (served, uri) = (Server::start_command(command), format!("nbd+unix:///?socket={socket}"));
    tool_ok("qemu-io", &["-f", "raw", "-c", "write -P 9 1M 64k", &uri]);
    bytes[1 << 20..(1 << 20) + 65536].fill(9);
    std::fs::write(&raw, &bytes).unwrap();
    cluster.ok(&["compare", "-f", "raw", "-F", "raw", &uri, &raw]);
    served.stop();
}

#[test]
fn a_served_image_is_locked_until_its_server_ends() {
    let (cluster, directory) = (Cluster::new(), directory());
    let socket = path_str(&directory.path().join("nbd")).to_owned();
    let image = cluster.0.name("disk");
    cluster.ok(&["create", "-f", "raw", &image, "4M"]);
    let mut command = cluster.command();
    command.args(["nbd", &image, "--socket", &socket]);
    let served = Server::start_command(command);
    let said = cluster.fails(&["--lock-timeout-s", "0", "resize", "-f", "raw", &image, "8M"]);
    assert!(said.contains("in use") && said.contains(&format!("127.0.0.1:0/{}", served.pid())), "{said}");
    assert!(cluster.ok(&["info", "-f", "raw", &image]).contains("4 MiB"));
    served.stop();
    cluster.ok(&["--lock-timeout-s", "0", "resize", "-f", "raw", &image, "8M"]);
}

#[test]
fn a_guest_uses_a_disk_in_a_real_cluster() {
    let Some(cluster) = CephNode::start() else { return };
    let directory = directory();
    let socket = path_str(&directory.path().join("vm.sock")).to_owned();
    for format in ["raw", "qcow2"] {
        let image = cluster.name(format);
        run_ok(&["create", "-q", "-f", format, &image, "64M"]);
        let drive = format!("file={image},format={format},name=root,queues=1,socket={socket}");
        // What one server has written, the next one reads.
        let mut initial = Initial::Zeros;
        for _ in 0..2 {
            let server = Server::start(&["--drive", &drive]);
            let disk: Arc<dyn Disk> = Arc::new(Driver::connect(Path::new(&socket), DriverOptions::default()).unwrap());
            let reactor = Reactor::spawn(ReactorConfig::default()).unwrap();
            let handles: [Arc<dyn ReactorHandle>; 1] = [reactor.handle()];
            let spec = BenchSpec::default().with(|spec| {
                spec.queue_depth = 16;
                spec.block_bytes = 4096;
                spec.length_bytes = Some(16 << 20);
                spec.drain_timeout = common::PATIENCE;
                spec.read_percent = 50;
                spec.verify = Some(Verify::new(5, initial));
                spec.pattern = Pattern::Random { seed: 6 };
                spec.flush_every = Some(32);
                spec.stop = Stop::Requests(2000);
            });
            let outcome = load::run(&disk, &handles, &spec, &Hooks::default()).unwrap();
            assert_eq!((outcome.report.errors, outcome.report.mismatches), (0, 0), "{format}");
            initial = Initial::State(outcome.state.expect("it was verified"));
            drop(disk);
            reactor.stop().unwrap();
            server.stop();
        }
        if format == "qcow2" {
            run_ok(&["check", &image]);
        }
    }
}
