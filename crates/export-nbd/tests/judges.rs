//! What other people's NBD clients see of our disks: libnbd's tools, qemu-img and qemu-io.

mod common;

use common::{Served, tool, try_tool};
use ringdisk_export_nbd::ServerOptions;
use std::path::Path;

const MIB: u64 = 1 << 20;

fn qcow2(directory: &Path, size: &str) -> String {
    let file = directory.join("disk.qcow2");
    tool("qemu-img", &["create", "-q", "-f", "qcow2", file.to_str().unwrap(), size]);
    format!("file={},format=qcow2,name=disk", file.display())
}

#[test]
fn exports_are_listed_with_names_descriptions_sizes_and_contexts() {
    let prepare = |directory: &Path| {
        let other = directory.join("other.raw");
        std::fs::File::create(&other).unwrap().set_len(3 * MIB).unwrap();
        vec![qcow2(directory, "64M"), format!("file={},format=raw,name=other,readonly=on", other.display())]
    };
    let mut served = Served::start(prepare, ServerOptions::default());
    let list = tool("nbdinfo", &["--list", "--json", &served.uri("")]);
    for expected in [
        "\"export-name\": \"disk\"",
        "\"description\": \"the disk disk\"",
        "\"export-size\": 67108864",
        "\"export-name\": \"other\"",
        "\"export-size\": 3145728",
        "\"base:allocation\"",
        "\"qemu:allocation-depth\"",
        "\"is_read_only\": true",
        "\"is_read_only\": false",
        "\"can_multi_conn\": true",
        "\"can_fast_zero\": true",
        "\"can_df\": true",
    ] {
        assert!(list.contains(expected), "{expected} is not in {list}");
    }
    let list = tool("qemu-nbd", &["--list", "--socket", served.socket.to_str().unwrap()]);
    for expected in ["exports available: 2", "'disk'", "the disk other", "67108864", "qemu:allocation-depth"] {
        assert!(list.contains(expected), "{expected} is not in {list}");
    }
    // A name of nothing means the first.
    assert_eq!(tool("nbdinfo", &["--size", &served.uri("")]).trim(), "67108864");
    assert!(!try_tool("nbdinfo", &[&served.uri("nobody")]).status.success());
    let refused = try_tool("qemu-io", &["-f", "raw", "-c", "write 0 64k", &served.uri("other")]);
    assert!(!refused.status.success(), "a disk that is read-only was written");
    served.stop();
}

#[test]
fn what_tools_copy_to_a_disk_comes_back_and_lies_in_the_image() {
    let mut served = Served::start(|directory| vec![qcow2(directory, "24M")], ServerOptions::default());
    let directory = served.directory.path().to_owned();
    let path = |name: &str| directory.join(name).to_str().unwrap().to_owned();
    let (source, back) = (path("source"), path("back"));
    let mut bytes = vec![0; 24 * MIB as usize];
    testkit::fill_seeded(7, &mut bytes[..8 * MIB as usize]);
    testkit::fill_seeded(8, &mut bytes[17 * MIB as usize + 512..18 * MIB as usize]);
    std::fs::write(&source, &bytes).unwrap();
    let uri = served.uri("disk");
    tool("nbdcopy", &["--flush", &source, &uri]);
    tool("nbdcopy", &["--connections=4", &uri, &back]);
    assert!(std::fs::read(&back).unwrap() == bytes, "what came back is not what was sent");
    tool("qemu-img", &["compare", "-f", "raw", "-F", "raw", &source, &uri]);
    let map = tool("nbdinfo", &["--map", "--json", &uri]);
    let holes: u64 = map
        .split('{')
        .filter(|row| row.contains("\"type\": 3"))
        .filter_map(|row| row.split("\"length\": ").nth(1)?.split(',').next()?.trim().parse::<u64>().ok())
        .sum();
    assert!(holes >= 14 * MIB, "{holes} bytes of holes are told: {map}");
    served.stop();
    tool("qemu-img", &["compare", "-f", "raw", "-F", "qcow2", &source, &path("disk.qcow2")]);
    tool("qemu-img", &["check", "-q", &path("disk.qcow2")]);
}

#[test]
fn qemu_writes_zeroes_discards_and_flushes() {
    let mut served = Served::start(|directory| vec![qcow2(directory, "8M")], ServerOptions::default());
    let uri = served.uri("disk");
    let said = tool(
        "qemu-io",
        &[
            "-f",
            "raw",
            "-c",
            "write -P 5 0 1M",
            "-c",
            "write -f -P 6 1M 512",
            "-c",
            "write -z 64k 64k",
            "-c",
            "write -z -u 256k 64k",
            "-c",
            "discard 512k 128k",
            "-c",
            "flush",
            "-c",
            "read -P 5 0 64k",
            "-c",
            "read -P 0 64k 64k",
            "-c",
            "read -P 0 256k 64k",
            "-c",
            "read -P 6 1M 512",
            "-c",
            "read -P 5 130k 1000",
            "-c",
            "read -P 5 384k 128k",
            &uri,
        ],
    );
    assert!(!said.contains("failed") && !said.contains("error"), "{said}");
    served.stop();
    let image = served.directory.path().join("disk.qcow2");
    tool("qemu-io", &["-r", "-f", "qcow2", "-c", "read -P 6 1M 512", image.to_str().unwrap()]);
}

#[test]
fn libnbd_finds_every_command_as_the_protocol_says() {
    let mut served = Served::start(|directory| vec![qcow2(directory, "8M")], ServerOptions::default());
    let script = r#"
import errno
h.set_handshake_flags(nbd.HANDSHAKE_FLAG_FIXED_NEWSTYLE)
h.add_meta_context("base:allocation")
h.add_meta_context("qemu:allocation-depth")
h.connect_uri(URI)
size = h.get_size()
assert size == 8 << 20
assert h.can_fua() and h.can_flush() and h.can_multi_conn() and h.can_cache() and h.can_trim()
assert h.can_zero() and h.can_fast_zero() and h.can_df() and not h.is_read_only()
assert h.can_meta_context("qemu:allocation-depth")
assert h.get_block_size(nbd.SIZE_MINIMUM) == 512 and h.get_block_size(nbd.SIZE_MAXIMUM) == 32 << 20
h.pwrite(b"x" * 65536, 65536, nbd.CMD_FLAG_FUA)
seen = {}
def status(context, offset, extents, error):
    seen[context] = extents
h.block_status(size, 0, status)
assert seen["base:allocation"] == [65536, 3, 65536, 0, size - 131072, 3], seen
assert seen["qemu:allocation-depth"] == [65536, 0, 65536, 1, size - 131072, 0], seen
h.block_status(size - 65536, 65536, status, nbd.CMD_FLAG_REQ_ONE)
assert seen["base:allocation"] == [65536, 0], seen
h.set_strict_mode(0)
# A read of any bytes, and none behind the end.
assert h.pread(3, 131071) == b"x\0\0"
assert h.pread(4 << 20, 0, nbd.CMD_FLAG_DF)[65536] == ord("x")
for failing, number in [
    (lambda: h.pread(512, size), errno.EINVAL),
    (lambda: h.pwrite(b"y" * 512, size), errno.ENOSPC),
    (lambda: h.pwrite(b"y" * 10, 3), errno.EINVAL),
    (lambda: h.zero(512, size), errno.ENOSPC),
    (lambda: h.zero(65536, 0, nbd.CMD_FLAG_FAST_ZERO | nbd.CMD_FLAG_NO_HOLE), errno.ENOTSUP),
    (lambda: h.trim(512, 0, nbd.CMD_FLAG_DF), errno.EINVAL),
]:
    try:
        failing()
        raise SystemExit("it should fail with %d" % number)
    except nbd.Error as error:
        assert error.errnum == number, (error.errnum, number)
h.zero(65536, 65536, nbd.CMD_FLAG_FAST_ZERO)
assert h.pread(65536, 65536) == bytearray(65536)
h.trim(65536, 0, nbd.CMD_FLAG_FUA)
h.cache(3 << 20, 100)
h.flush()
h.shutdown()
"#;
    let script = script.replace("URI", &format!("{:?}", served.uri("disk")));
    tool("nbdsh", &["-c", &script]);
    served.stop();
}
