//! Image commands on the disk of a server that runs: `vhost-user:SOCKET` in the place of a file.

mod common;

use block::{Disk, DiskIo, IoResult, Op, OpFlags, ReactorCtx, Task, Topology, run_and_wait};
use common::{Server, at, directory, has_tool, path_str, run, run_fails, run_ok, text, tool_ok};
use driver::{Driver, DriverOptions};
use engine::{Reactor, ReactorConfig};
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;

const SIZE: usize = 3 << 20;

/// Data, zeros, and data that no page ends with.
fn contents() -> Vec<u8> {
    let mut bytes: Vec<u8> = (0..SIZE).map(|index| (index / 7) as u8).collect();
    bytes[1 << 20..2 << 20].fill(0);
    bytes
}

/// The image served by Ringdisk, and its name as a source.
fn serve(dir: &tempfile::TempDir, image: &Path, format: &str) -> (Server, String) {
    let socket = at(dir, "s");
    let drive = format!("file={},format={format},socket={}", path_str(image), path_str(&socket));
    (Server::start(&["--drive", &drive]), format!("vhost-user:{}", path_str(&socket)))
}

#[test]
fn a_servers_disk_is_a_source_of_every_command_that_reads() {
    let dir = directory();
    let (image, copy) = (at(&dir, "disk.raw"), at(&dir, "copy.qcow2"));
    std::fs::write(&image, contents()).unwrap();
    let (_server, name) = serve(&dir, &image, "raw");
    let said = run_ok(&["info", "-f", "raw", &name]);
    assert!(said.contains("(3145728 bytes)") && said.contains("disk size: unavailable"), "{said}");
    run_ok(&["convert", "-f", "raw", "-O", "qcow2", &name, path_str(&copy)]);
    run_ok(&["compare", "-f", "raw", &name, path_str(&copy)]);
    let part = at(&dir, "part.raw");
    run_ok(&[
        "dd",
        "-f",
        "raw",
        &format!("if={name}"),
        &format!("of={}", path_str(&part)),
        "bs=1000",
        "skip=3",
        "count=9",
    ]);
    assert_eq!(std::fs::read(&part).unwrap()[..6000], contents()[3000..9000]);
    assert!(run_ok(&["map", "-f", "raw", &name]).contains("vhost-user"));
    if has_tool("qemu-img") {
        tool_ok("qemu-img", &["compare", "-f", "raw", path_str(&image), path_str(&copy)]);
    }
}

#[test]
fn a_servers_disk_is_a_target_and_holds_what_was_written() {
    let dir = directory();
    let (source, image) = (at(&dir, "source.raw"), at(&dir, "disk.qcow2"));
    std::fs::write(&source, contents()).unwrap();
    run_ok(&["create", "-f", "qcow2", path_str(&image), "4M"]);
    let (server, name) = serve(&dir, &image, "qcow2");
    // What was there before must not show through.
    let old = at(&dir, "old.raw");
    std::fs::write(&old, vec![9; 4 << 20]).unwrap();
    for arguments in [&["-n"][..], &[]] {
        let convert = |from: &Path| {
            let words = [&["convert", "-f", "raw", "-O", "raw"], arguments, &[path_str(from), &name]].concat();
            run_ok(&words);
        };
        convert(&old);
        convert(&source);
        assert!(run(&["compare", "-f", "raw", "-F", "raw", path_str(&source), &name]).status.code() == Some(1));
    }
    let found = at(&dir, "found.raw");
    run_ok(&["convert", "-f", "raw", "-O", "raw", &name, path_str(&found)]);
    let bytes = std::fs::read(&found).unwrap();
    assert!(bytes[..SIZE] == contents(), "the source");
    assert!(bytes[SIZE..].iter().all(|byte| *byte == 9), "what was behind it");
    let (status, said) = server.terminate();
    assert!(status.success(), "{said}");
    assert!(run_ok(&["check", path_str(&image)]).contains("No errors"));
    run_ok(&["compare", "-F", "raw", path_str(&image), path_str(&found)]);
}

#[test]
fn an_image_lies_in_a_servers_disk_as_in_a_device() {
    let dir = directory();
    let (source, inner, disk) = (at(&dir, "source.raw"), at(&dir, "inner.qcow2"), at(&dir, "disk.raw"));
    std::fs::write(&source, contents()).unwrap();
    run_ok(&["convert", "-f", "raw", "-O", "qcow2", path_str(&source), path_str(&inner)]);
    let mut bytes = std::fs::read(&inner).unwrap();
    bytes.resize(8 << 20, 0);
    std::fs::write(&disk, bytes).unwrap();
    let (_server, name) = serve(&dir, &disk, "raw");
    assert!(run_ok(&["info", &name]).contains("file format: qcow2"));
    run_ok(&["compare", "-F", "raw", &name, path_str(&source)]);
}

#[test]
fn what_a_servers_disk_cannot_be_is_refused_with_the_reason() {
    let dir = directory();
    let (small, large) = (at(&dir, "small.raw"), at(&dir, "large.raw"));
    std::fs::write(&small, [1; 4096]).unwrap();
    std::fs::write(&large, [1; 8192]).unwrap();
    let (_server, name) = serve(&dir, &small, "raw");
    let said = run_fails(1, &["convert", "-f", "raw", "-O", "raw", path_str(&large), &name]);
    assert!(said.contains("has 4096 bytes"), "{said}");
    let said = run_fails(1, &["convert", "-f", "raw", "-O", "qcow2", path_str(&large), &name]);
    assert!(said.contains("has 4096 bytes, and the image needs"), "{said}");
    let said = run_fails(1, &["info", "vhost-user:/nonexistent/s"]);
    assert!(said.contains("/nonexistent/s"), "{said}");
    assert!(!Path::new(&name).exists(), "no file of that name is made");
    let output = run(&["info", "-f", "raw", &name]);
    assert!(output.status.success(), "the server is as it was: {}", text(&output.stderr));
}

/// What a guest is told of its disk at this socket, by the driver's words.
fn shown(driver: &Driver) -> String {
    let (info, facts) = (driver.info(), driver.facts());
    let Topology { physical_block_bytes, minimum_io_bytes, optimal_io_bytes, .. } = info.topology;
    let geometry = facts.geometry;
    format!(
        "serial={} logical={} physical={physical_block_bytes} offset={} min={minimum_io_bytes} opt={optimal_io_bytes} \
         chs={}/{}/{} seg-max={} size-max={:?} discard={} granularity={} zeroes={} erase={} cache={} packed={}",
        info.serial,
        info.logical_block_bytes,
        facts.alignment_offset_bytes,
        geometry.cylinders,
        geometry.heads,
        geometry.sectors,
        facts.max_segments,
        facts.max_segment_bytes,
        info.discard,
        info.discard_granularity_bytes,
        info.write_zeroes,
        facts.secure_erase,
        info.volatile_cache,
        facts.packed,
    )
}

fn discard(offset: u64) -> Op {
    Op::Discard { offset, length: 8192 }
}

fn zeroes(offset: u64) -> Op {
    Op::WriteZeroes { offset, length: 8192, may_unmap: true, flags: OpFlags::NONE }
}

fn erase(offset: u64) -> Op {
    Op::SecureErase { offset, length: 8192 }
}

/// Carries operations out through the driver, one after the other.
fn carry_out(driver: &Arc<Driver>, ops: fn() -> Vec<Op>) -> Vec<IoResult> {
    let reactor = Reactor::spawn(ReactorConfig::default()).unwrap();
    let (sender, results) = std::sync::mpsc::channel();
    let disk = Arc::clone(driver);
    let begin = move |ctx: &Rc<dyn ReactorCtx>| {
        let io = DiskIo::open(disk.as_ref(), ctx).unwrap();
        ctx.spawn(Task::new(async move {
            for op in ops() {
                let _ = sender.send(io.run(op).await);
            }
        }));
    };
    run_and_wait(reactor.handle().as_ref(), begin).unwrap();
    let results = results.iter().collect();
    reactor.stop().unwrap();
    results
}

#[test]
fn each_socket_shows_its_guest_what_was_said_for_it_and_serves_it() {
    let dir = directory();
    let (image, control) = (at(&dir, "disk.raw"), at(&dir, "control"));
    std::fs::write(&image, vec![7; SIZE]).unwrap();
    let [own, second, third] = ["own", "second", "third"].map(|name| at(&dir, name));
    let drive = format!(
        "name=one,file={},format=raw,socket={},serial=12345678901234567890,physical-block-size=4096,\
         alignment-offset=3584,min-io-size=8192,opt-io-size=65536,cyls=7,heads=8,secs=9,seg-max=30,size-max=65536,\
         discard-granularity=8192,write-cache=off,secure-erase=on,packed=on",
        image.display(),
        own.display()
    );
    let server = Server::start(&["--control", path_str(&control), "--drive", &drive]);
    let export = |socket: &Path, shown: &[&str]| {
        let shown: Vec<_> = shown.iter().flat_map(|pair| ["--shown", pair]).collect();
        run(&[&["ctl", "--control", path_str(&control), "export", "one", "--socket", path_str(socket)], &shown[..]]
            .concat())
    };
    let differs =
        ["write-cache=on,secure-erase=off,packed=off", "logical-block-size=4096,alignment-offset=0", "seg-max=5"];
    let rest = ["size-max=8192", "discard-granularity=0", "cyls=1,heads=2,secs=3", "min-io-size=4096,opt-io-size=4096"];
    let output = export(&second, &[&differs[..], &rest].concat());
    assert!(output.status.success(), "{}", text(&output.stderr));
    let connect = |socket: &Path| Arc::new(Driver::connect(socket, DriverOptions::default()).unwrap());
    let (first, other) = (connect(&own), connect(&second));
    assert_eq!(
        shown(&first),
        "serial=12345678901234567890 logical=512 physical=4096 offset=3584 min=8192 opt=65536 chs=7/8/9 seg-max=30 \
         size-max=Some(65536) discard=true granularity=8192 zeroes=true erase=true cache=false packed=true"
    );
    assert_eq!(
        shown(&other),
        "serial=12345678901234567890 logical=4096 physical=4096 offset=0 min=4096 opt=4096 chs=1/2/3 seg-max=5 \
         size-max=Some(8192) discard=false granularity=0 zeroes=true erase=false cache=true packed=false"
    );

    let done = carry_out(&first, || vec![discard(0), zeroes(16384), erase(32768)]);
    assert_eq!(done, [Ok(()); 3]);
    let done = carry_out(&other, || vec![discard(49152), zeroes(65536), erase(81920)]);
    assert!(done[0].is_err() && done[1].is_ok() && done[2].is_err(), "{done:?}");
    for driver in [first, other] {
        driver.disconnect().unwrap();
    }
    let refused = export(&third, &["logical-block-size=8192"]);
    assert!(!refused.status.success() && text(&refused.stderr).contains("physical-block-size"), "{refused:?}");
    server.stop();
    let bytes = std::fs::read(&image).unwrap();
    for (offset, is_zero) in [(0, true), (16384, true), (32768, true), (49152, false), (65536, true), (81920, false)] {
        assert_eq!(bytes[offset..offset + 8192].iter().all(|byte| *byte == 0), is_zero, "at {offset}");
    }
}
