//! A server whose disk lies at another server: our client on a reactor, beneath raw and qcow2.

mod common;

use common::{Served, tool};
use ringdisk_export_nbd::ServerOptions;

#[test]
fn a_disk_at_another_server_is_served_as_a_file_is() {
    for format in ["raw", "qcow2"] {
        let mut inner = Served::raw(16 << 20, ServerOptions::default());
        let place = inner.uri("disk");
        if format == "qcow2" {
            tool("qemu-img", &["create", "-q", "-f", "qcow2", &place, "8M"]);
        }
        let drive = format!("file={place},format={format},name=disk");
        let mut outer = Served::start(|_| vec![drive], ServerOptions::default());
        let directory = outer.directory.path().to_owned();
        let path = |name: &str| directory.join(name).to_str().unwrap().to_owned();
        let (source, back) = (path("source"), path("back"));
        let size = if format == "raw" { 16 << 20 } else { 8 << 20 };
        let mut bytes = vec![0; size];
        testkit::fill_seeded(3, &mut bytes[1 << 20..5 << 20]);
        std::fs::write(&source, &bytes).unwrap();
        let uri = outer.uri("disk");
        tool("nbdcopy", &["--flush", &source, &uri]);
        tool("qemu-io", &["-f", "raw", "-c", "write -P 7 2M 64k", "-c", "write -z -u 3M 64k", "-c", "flush", &uri]);
        bytes[2 << 20..(2 << 20) + (64 << 10)].fill(7);
        bytes[3 << 20..(3 << 20) + (64 << 10)].fill(0);
        tool("nbdcopy", &[&uri, &back]);
        assert!(std::fs::read(&back).unwrap() == bytes, "{format}: what came back is not what was sent");
        let map = tool("nbdinfo", &["--map=base:allocation", "--totals", &uri]);
        assert!(map.contains("hole,zero"), "{format}: {map}");
        outer.stop();
        if format == "qcow2" {
            tool("qemu-img", &["check", "-q", "-f", "qcow2", &place]);
        }
        inner.stop();
    }
}
