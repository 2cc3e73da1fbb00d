//! Images that are described, and images whose tables were made in advance, beside qemu-img.

mod common;

use common::{has_tool, path_str, run, run_ok, text, tool, tool_ok};
use std::os::unix::fs::FileExt;
use std::path::Path;

/// The same line for both programs: what they print, and how they end.
fn same(line: &[&str]) {
    let [ours, theirs] = [run(line), tool("qemu-img", line)];
    let said = |output: &std::process::Output| (output.status.code(), text(&output.stdout));
    assert_eq!(said(&ours), said(&theirs), "{line:?}: {}{}", text(&ours.stderr), text(&theirs.stderr));
}

fn raw_image(path: &Path) {
    tool_ok("qemu-img", &["create", "-q", "-f", "raw", path_str(path), "1M"]);
    tool_ok("qemu-io", &["-f", "raw", "-c", "write -P 7 0 256k", "-c", "write -P 8 256k 4k", path_str(path)]);
}

#[test]
fn a_part_of_a_raw_file_is_a_disk_as_for_qemu_img() {
    if !has_tool("qemu-img") || !has_tool("qemu-io") {
        return;
    }
    let dir = common::directory();
    let at = |name: &str| dir.path().join(name);
    raw_image(&at("base.raw"));
    let base = at("base.raw").display().to_string();
    for (place, is_good) in [
        (r#""offset":131072,"size":262144,"#, true),
        (r#""size":"64k","#, true),
        (r#""offset":260096,"#, true),
        (r#""offset":1048576,"#, true),
        (r#""offset":1049088,"#, false),
        (r#""size":1049088,"#, false),
        (r#""offset":512,"size":18446744073709551104,"#, false),
        (r#""size":100,"#, false),
    ] {
        let name = format!(r#"json:{{"driver":"raw",{place}"file":{{"driver":"file","filename":"{base}"}}}}"#);
        let lines = [&["map", "--output=json", &name][..], &["map", &name], &["measure", "-O", "qcow2", &name]];
        lines.into_iter().filter(|_| is_good).for_each(same);
        let (ours, theirs) = (at("ours"), at("theirs"));
        let made = run(&["convert", "-O", "raw", &name, path_str(&ours)]);
        assert_eq!(made.status.success(), is_good, "{place}: {}", text(&made.stderr));
        if is_good {
            tool_ok("qemu-img", &["convert", "-O", "raw", &name, path_str(&theirs)]);
            assert!(std::fs::read(&ours).unwrap() == std::fs::read(&theirs).unwrap(), "{place}");
        }
    }
    let part = format!(r#"json:{{"driver":"raw","offset":512,"size":"64k","file.filename":"{base}"}}"#);
    let shown = run_ok(&["info", "--output=json", &part]);
    assert!(shown.contains("\"virtual-size\": 65536"), "{shown}");
    let before = std::fs::read(&base).unwrap();
    assert!(!run(&["resize", &part, "1M"]).status.success(), "only what reads takes a part");
    assert!(std::fs::read(&base).unwrap() == before);
}

#[test]
fn a_part_that_does_not_end_at_a_sector_ends_in_zeros_as_for_qemu_img() {
    if !has_tool("qemu-img") || !has_tool("qemu-io") {
        return;
    }
    let dir = common::directory();
    let at = |name: &str| dir.path().join(name);
    let bytes: Vec<u8> = (0..200_100_u32).map(|index| (index % 251) as u8 + 1).collect();
    std::fs::write(at("odd.raw"), &bytes).unwrap();
    let odd = at("odd.raw").display().to_string();
    let last = r#""offset":199680,"size":512,"#;
    for place in [r#""offset":512,"#, r#""offset":0,"#, r#""offset":512,"size":1536,"#, last] {
        let name = format!(r#"json:{{"driver":"raw",{place}"file":{{"driver":"file","filename":"{odd}"}}}}"#);
        let (ours, theirs) = (at("ours"), at("theirs"));
        run_ok(&["convert", "-O", "raw", &name, path_str(&ours)]);
        tool_ok("qemu-img", &["convert", "-O", "raw", &name, path_str(&theirs)]);
        assert!(std::fs::read(&ours).unwrap() == std::fs::read(&theirs).unwrap(), "{place}");
    }
    // An image in a part, whose last cluster the part cuts off: what stands behind it is not the image's.
    let inner = at("inner.qcow2");
    tool_ok("qemu-img", &["create", "-q", "-f", "qcow2", path_str(&inner), "64k"]);
    tool_ok("qemu-io", &["-c", "write -P 5 0 64k", path_str(&inner)]);
    let image = std::fs::read(&inner).unwrap();
    let cut = image.len() - 4096;
    let behind = [&[9; 512][..], &image[..cut], &[0xee; 65536][..]].concat();
    std::fs::write(at("holds.raw"), behind).unwrap();
    let part = format!(r#""driver":"raw","offset":512,"size":{cut},"file.filename":"{}""#, at("holds.raw").display());
    let name = format!(r#"json:{{"driver":"qcow2","file":{{{part}}}}}"#);
    let ours = at("cut");
    if run(&["convert", "-O", "raw", &name, path_str(&ours)]).status.success() {
        assert!(!std::fs::read(&ours).unwrap().contains(&0xee), "the bytes behind the part were read");
    }
}

#[test]
fn an_image_is_seen_without_its_backing_file_where_that_is_null() {
    if !has_tool("qemu-img") || !has_tool("qemu-io") {
        return;
    }
    let dir = common::directory();
    let at = |name: &str| dir.path().join(name);
    raw_image(&at("base.raw"));
    let over = at("over.qcow2");
    tool_ok(
        "qemu-img",
        &["create", "-q", "-f", "qcow2", "-b", path_str(&at("base.raw")), "-F", "raw", path_str(&over)],
    );
    tool_ok("qemu-io", &["-c", "write -P 9 64k 64k", path_str(&over)]);
    let name = format!(r#"json:{{"driver":"qcow2","backing":null,"file":{{"filename":"{}"}}}}"#, over.display());
    same(&["map", "--output=json", &name]);
    same(&["measure", "-O", "qcow2", &name]);
    same(&["check", &name]);
    for program in ["ours", "theirs"] {
        let line = ["convert", "-O", "raw", &name, path_str(&at(program))].map(str::to_owned);
        let line: Vec<&str> = line.iter().map(String::as_str).collect();
        if program == "ours" {
            run_ok(&line)
        } else {
            tool_ok("qemu-img", &line)
        };
    }
    assert!(std::fs::read(at("ours")).unwrap() == std::fs::read(at("theirs")).unwrap());
    std::fs::remove_file(at("base.raw")).unwrap();
    run_ok(&["convert", "-O", "raw", &name, path_str(&at("alone"))]);
}

#[test]
fn holes_under_tables_that_were_made_in_advance_are_zeros_as_for_qemu_img() {
    if !has_tool("qemu-img") || !has_tool("qemu-io") {
        return;
    }
    let dir = common::directory();
    for (index, options) in [
        "preallocation=metadata",
        "preallocation=metadata,cluster_size=4k",
        "preallocation=metadata,refcount_bits=1,cluster_size=512",
        "preallocation=metadata,extended_l2=on",
        "preallocation=falloc",
        "cluster_size=64k",
    ]
    .into_iter()
    .enumerate()
    {
        let path = dir.path().join(format!("{index}.qcow2"));
        let name = path_str(&path);
        tool_ok("qemu-img", &["create", "-q", "-f", "qcow2", "-o", options, name, "4M"]);
        tool_ok("qemu-io", &["-c", "write -P 7 1M 192k", "-c", "write -P 3 3000k 3k", name]);
        same(&["map", "--output=json", name]);
        same(&["map", name]);
        same(&["measure", "-O", "qcow2", "--output=json", name]);
        same(&["measure", "-O", "raw", name]);
        let copy = dir.path().join(format!("{index}.copy"));
        run_ok(&["convert", "-O", "qcow2", name, path_str(&copy)]);
        tool_ok("qemu-img", &["compare", name, path_str(&copy)]);
        same(&["compare", name, path_str(&copy)]);
    }
}

#[test]
fn a_compressing_rebase_beside_a_data_file_fails_only_where_something_has_to_be_written() {
    if !has_tool("qemu-img") || !has_tool("qemu-io") {
        return;
    }
    let dir = common::directory();
    let at = |name: &str| dir.path().join(name);
    raw_image(&at("base.raw"));
    std::fs::copy(at("base.raw"), at("same.raw")).unwrap();
    tool_ok("qemu-img", &["create", "-q", "-f", "raw", path_str(&at("other.raw")), "1M"]);
    let (over, data) = (at("over.qcow2"), at("data.bin"));
    let options = format!("data_file={},backing_file={},backing_fmt=raw", data.display(), at("base.raw").display());
    tool_ok("qemu-img", &["create", "-q", "-f", "qcow2", "-o", &options, path_str(&over)]);
    let rebase = |onto: &str| run(&["rebase", "-c", "-F", "raw", "-b", path_str(&at(onto)), path_str(&over)]);
    let said = text(&rebase("other.raw").stderr);
    assert!(said.contains("Error while writing to COW image: Operation not supported"), "{said}");
    let backing = || tool_ok("qemu-img", &["info", path_str(&over)]);
    assert!(backing().contains("base.raw"), "nothing was changed");
    assert!(rebase("same.raw").status.success());
    assert!(backing().contains("same.raw"));
}

#[test]
fn snapshots_that_a_header_claims_without_a_table_are_discarded_by_a_repair() {
    if !has_tool("qemu-img") {
        return;
    }
    let dir = common::directory();
    let path = dir.path().join("a.qcow2");
    for count in [1_u32, 0xffff, u32::MAX] {
        let _ = std::fs::remove_file(&path);
        tool_ok("qemu-img", &["create", "-q", "-f", "qcow2", path_str(&path), "1M"]);
        let file = std::fs::File::options().write(true).open(&path).unwrap();
        // Of the header: how many snapshots there are.
        file.write_all_at(&count.to_be_bytes(), 60).unwrap();
        assert!(!run(&["check", path_str(&path)]).status.success(), "{count}");
        let repaired = run(&["check", "-r", "all", path_str(&path)]);
        assert!(repaired.status.success(), "{count}: {}", text(&repaired.stderr));
        tool_ok("qemu-img", &["check", path_str(&path)]);
    }
}
