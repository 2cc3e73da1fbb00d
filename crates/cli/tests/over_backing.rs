//! Conversions into overlays (`convert -B`), beside qemu-img's.

mod common;

use common::{assert_valid, at, directory, has_tool, path_str, run_ok, tool_ok};
use std::path::Path;

const DISK: &str = "64M";
/// The backing file ends within a cluster.
const BASE_BYTES: usize = (1 << 20) + 4096;

fn qemu_io(image: &Path, commands: &[&str]) {
    let commands = commands.iter().flat_map(|command| ["-c", command]);
    let arguments: Vec<&str> = ["-f", "qcow2"].into_iter().chain(commands).chain([path_str(image)]).collect();
    tool_ok("qemu-io", &arguments);
}

#[test]
fn zeros_behind_the_end_of_the_targets_backing_file_are_left_out() {
    let dir = directory();
    let [base, top, ours, theirs] = ["base.raw", "top.qcow2", "ours.qcow2", "theirs.qcow2"].map(|name| at(&dir, name));
    std::fs::write(&base, vec![7; BASE_BYTES]).unwrap();
    run_ok(&["create", "-f", "qcow2", "-b", "base.raw", "-F", "raw", path_str(&top), DISK]);
    let has_judge = has_tool("qemu-img") && has_tool("qemu-io");
    if has_judge {
        qemu_io(&top, &["write -z 960k 1M", "write -P 1 3M 64k", "write -z 3M 4k", "write -P 2 40M 512"]);
    }
    for (compat, sparse) in [("0.10", "4k"), ("0.10", "0"), ("1.1", "4k"), ("1.1", "0")] {
        let options = format!("compat={compat}");
        let head = ["convert", "-f", "qcow2", "-O", "qcow2", "-S", sparse, "-o", &options];
        let convert = [&head[..], &["-B", path_str(&base), "-F", "raw", path_str(&top)]].concat();
        run_ok(&[&convert[..], &[path_str(&ours)]].concat());
        let (what, length) = (format!("compat={compat} -S {sparse}"), std::fs::metadata(&ours).unwrap().len());
        assert!(length < 1 << 20, "{what}: {length} bytes");
        assert_eq!(run_ok(&["compare", path_str(&top), path_str(&ours)]), "Images are identical.\n", "{what}");
        if has_judge {
            assert_valid(&ours, false);
            tool_ok("qemu-img", &["compare", path_str(&top), path_str(&ours)]);
            tool_ok("qemu-img", &[&convert[..], &[path_str(&theirs)]].concat());
            let most = std::fs::metadata(&theirs).unwrap().len() + (2 << 16);
            assert!(length <= most, "{what}: {length} bytes, at most {most} expected");
        }
    }
}

#[test]
fn an_overlay_that_exists_is_zeroed_behind_the_end_of_its_backing_file() {
    if !has_tool("qemu-io") {
        return;
    }
    let dir = directory();
    let [base, top, target] = ["base.raw", "top.qcow2", "target.qcow2"].map(|name| at(&dir, name));
    std::fs::write(&base, vec![7; BASE_BYTES]).unwrap();
    for image in [&top, &target] {
        run_ok(&["create", "-f", "qcow2", "-b", "base.raw", "-F", "raw", path_str(image), "4M"]);
    }
    qemu_io(&top, &["write -P 1 3M 512"]);
    qemu_io(&target, &["write -P 9 0 4M"]);
    run_ok(&["convert", "-n", "-O", "qcow2", "-B", "base.raw", "-F", "raw", path_str(&top), path_str(&target)]);
    let raw = |image: &Path| {
        let copy = at(&dir, "copy");
        run_ok(&["convert", "-O", "raw", path_str(image), path_str(&copy)]);
        std::fs::read(copy).unwrap()
    };
    // As with qemu-img, what the top layer leaves out stays out only as far as the layers below it are alike there.
    assert!(raw(&target)[3 << 20..] == raw(&top)[3 << 20..]);
}
