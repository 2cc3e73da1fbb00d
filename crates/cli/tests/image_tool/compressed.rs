//! Compressed clusters: `convert -c`, `rebase -c`, and the type of compression.

use super::common::{assert_valid, at, directory, has_tool, path_str, run, run_fails, run_ok, text, tool, tool_ok};
use super::{create, qemu_io};
use serde_json::Value;
use std::path::Path;

/// Text, noise, zeros and an odd end: clusters that get much smaller, a little, or not at all.
fn mixed(length: usize) -> Vec<u8> {
    let mut bytes = vec![0u8; length];
    let mut noise = 1u64;
    for (index, byte) in bytes.iter_mut().enumerate() {
        noise = noise.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        *byte = match index >> 18 & 3 {
            0 => b"a line of text that comes back now and then, with a number "[index % 59] ^ (index >> 12) as u8,
            1 if index & 0x100 == 0 => (noise >> 60) as u8,
            2 => (noise >> 56) as u8,
            _ => 0,
        };
    }
    bytes
}

#[test]
fn compressed_images_hold_the_same_are_valid_and_no_larger_than_qemu_imgs() {
    if !has_tool("qemu-img") {
        return;
    }
    let dir = directory();
    let raw = at(&dir, "source.raw");
    std::fs::write(&raw, mixed((6 << 20) + 7 * 512)).unwrap();
    for options in [
        "compression_type=zlib",
        "compression_type=zstd",
        "cluster_size=4k,refcount_bits=8",
        "cluster_size=2M,compat=0.10",
    ] {
        let (ours, theirs) = (at(&dir, "ours.qcow2"), at(&dir, "theirs.qcow2"));
        let convert = ["convert", "-c", "-f", "raw", "-O", "qcow2", "-o", options, path_str(&raw)];
        let length = |image: &Path| std::fs::metadata(image).unwrap().len();
        tool_ok("qemu-img", &[&convert[..], &[path_str(&theirs)]].concat());
        // How tightly clusters lie depends a little on who writes first. So not every try must come out small.
        let is_small = |_| {
            run_ok(&[&convert[..], &["-m", "4", "-W", path_str(&ours)]].concat());
            length(&ours) * 100 <= length(&theirs) * 102
        };
        let small = (0..3).any(is_small);
        assert!(small, "{options}: {} bytes, {}", length(&ours), length(&theirs));
        assert_valid(&ours, false);
        tool_ok("qemu-img", &["compare", path_str(&raw), path_str(&ours)]);
        run_ok(&["compare", path_str(&theirs), path_str(&ours)]);
        let compressed = |image: &Path| {
            let found: Value = serde_json::from_str(&run_ok(&["check", "--output=json", path_str(image)])).unwrap();
            found["compressed-clusters"].as_u64().unwrap()
        };
        // If only a few bytes can be saved, one library saves them and the other does not.
        assert!(compressed(&ours) > 0 && compressed(&ours).abs_diff(compressed(&theirs)) <= compressed(&theirs) / 20);
        // What a guest writes into a compressed cluster leaves the rest of it as it was.
        let back = at(&dir, "back.raw");
        qemu_io(&ours, "qcow2", &["write -P 7 100k 3k"]);
        run_ok(&["convert", "-f", "qcow2", "-O", "raw", path_str(&ours), path_str(&back)]);
        tool_ok("qemu-img", &["compare", "-f", "raw", "-F", "qcow2", path_str(&back), path_str(&ours)]);
    }
    let refused = run_fails(1, &["convert", "-c", "-O", "raw", path_str(&raw), path_str(&at(&dir, "none.raw"))]);
    assert!(refused.contains("Compression not supported for this file format"), "{refused}");
    assert!(!at(&dir, "none.raw").exists());
}

#[test]
fn whole_clusters_are_compressed_wherever_in_them_data_begin() {
    if !has_tool("qemu-img") {
        return;
    }
    let dir = directory();
    let (raw, target) = (at(&dir, "source.raw"), at(&dir, "target.qcow2"));
    let file = std::fs::File::create(&raw).unwrap();
    file.set_len(2 << 20).unwrap();
    for (start, length) in [(60, 8), (200, 4), (252, 70), (1020, 1)] {
        std::os::unix::fs::FileExt::write_all_at(&file, &vec![start as u8; length << 10], start << 10).unwrap();
    }
    let convert = ["convert", "-c", "-f", "raw", "-O", "qcow2", path_str(&raw), path_str(&target)];
    let compare = ["compare", "-f", "raw", "-F", "qcow2", path_str(&raw), path_str(&target)];
    run_ok(&convert);
    tool_ok("qemu-img", &compare);
    assert_valid(&target, false);
    let found: Value = serde_json::from_str(&run_ok(&["check", "--output=json", path_str(&target)])).unwrap();
    assert_eq!((&found["compressed-clusters"], &found["allocated-clusters"]), (&Value::from(6), &Value::from(6)));
    // Above another image, the zeros beside them count as well.
    qemu_io(&target, "qcow2", &["write -P 77 0 2M"]);
    run_ok(&[&["convert", "-n"], &convert[1..]].concat());
    tool_ok("qemu-img", &compare);
    assert_valid(&target, true);
}

#[test]
fn rebase_compresses_what_it_copies_if_told_to() {
    let dir = directory();
    std::fs::write(at(&dir, "base.raw"), mixed(3 << 20)).unwrap();
    for (name, options) in [("plain", &[][..]), ("packed", &["-c"])] {
        let top = create(&dir, &format!("{name}.qcow2"), &["-f", "qcow2", "-b", "base.raw", "-F", "raw"]);
        // The guest's own data in a part of a cluster stay what they are.
        if has_tool("qemu-io") {
            qemu_io(&top, "qcow2", &["write -P 9 1000k 100k"]);
        }
        run_ok(&[&["rebase", "-b", ""][..], options, &[path_str(&top)]].concat());
        assert_valid(&top, false);
    }
    let [plain, packed] = ["plain.qcow2", "packed.qcow2"].map(|name| at(&dir, name));
    assert_eq!(run_ok(&["compare", path_str(&plain), path_str(&packed)]), "Images are identical.\n");
    let [plain, packed] = [plain, packed].map(|image| std::fs::metadata(image).unwrap().len());
    assert!(packed < plain * 3 / 4, "{packed} bytes of {plain}");
}

#[test]
fn zeros_that_hide_a_new_backing_file_take_no_space() {
    let dir = directory();
    std::fs::write(at(&dir, "base.raw"), mixed(3 << 20)).unwrap();
    for (name, options) in [("plain", &[][..]), ("packed", &["-c"])] {
        let [top, blank] = [name, "blank"].map(|name| at(&dir, &format!("{name}.qcow2")));
        for image in [&top, &blank] {
            run_ok(&["create", "-q", "-f", "qcow2", path_str(image), "3M"]);
        }
        run_ok(&[&["rebase", "-b", "base.raw", "-F", "raw"][..], options, &[path_str(&top)]].concat());
        assert_valid(&top, false);
        assert_eq!(run_ok(&["compare", path_str(&top), path_str(&blank)]), "Images are identical.\n");
        let bytes = std::fs::metadata(&top).unwrap().len();
        assert!(bytes < 1 << 20, "{bytes} bytes");
    }
}

#[test]
fn a_rebase_of_an_image_whose_refcounts_deny_data_is_refused_and_changes_nothing() {
    if !has_tool("qemu-io") {
        return;
    }
    let dir = directory();
    std::fs::write(at(&dir, "base.raw"), mixed(3 << 20)).unwrap();
    let top = create(&dir, "top.qcow2", &["-f", "qcow2", "-b", "base.raw", "-F", "raw"]);
    qemu_io(&top, "qcow2", &["write -P 9 1M 64k"]);
    let mut bytes = std::fs::read(&top).unwrap();
    let word = |at: usize| u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap()) as usize & 0x00ff_ffff_ffff_fe00;
    let (data, block) = (word(word(word(40)) + 16 * 8), word(word(48)));
    bytes[block + data / 65536 * 2..][..2].fill(0);
    std::fs::write(&top, &bytes).unwrap();
    let said = run_fails(1, &["rebase", "-b", "", path_str(&top)]);
    assert!(said.contains("check -r all"), "{said}");
    assert!(std::fs::read(&top).unwrap() == bytes, "the image has changed");
    run_ok(&["check", "-q", "-r", "all", path_str(&top)]);
    run_ok(&["rebase", "-b", "", path_str(&top)]);
    assert_valid(&top, false);
    qemu_io(&top, "qcow2", &["read -P 9 1M 64k"]);
}

#[test]
fn an_image_that_may_have_zstd_clusters_and_has_none_becomes_one_of_the_old_version_as_in_qemu_img() {
    if !has_tool("qemu-img") {
        return;
    }
    let dir = directory();
    let [ours, theirs, full] = ["ours", "theirs", "full"].map(|name| at(&dir, name));
    let source = at(&dir, "source.raw");
    std::fs::write(&source, vec![7; 1 << 20]).unwrap();
    for image in [&ours, &theirs] {
        let create = ["create", "-q", "-f", "qcow2", "-o", "compression_type=zstd", path_str(image), "1M"];
        tool_ok("qemu-img", &create);
    }
    let amend = |image| ["amend", "-o", "compat=0.10", image];
    let ended = run(&amend(path_str(&ours)));
    let expected = tool("qemu-img", &amend(path_str(&theirs)));
    assert_eq!(ended.status.code(), expected.status.code(), "{}", text(&expected.stderr));
    let info = |image: &Path| -> Value {
        let mut info: Value =
            serde_json::from_str(&tool_ok("qemu-img", &["info", "--output=json", path_str(image)])).unwrap();
        info["format-specific"].take()
    };
    assert_eq!(info(&ours), info(&theirs));
    assert_valid(&ours, false);
    let convert = ["convert", "-q", "-c", "-f", "raw", "-O", "qcow2", "-o", "compression_type=zstd"];
    run_ok(&[&convert[..], &[path_str(&source), path_str(&full)]].concat());
    run_fails(2, &["amend", "-o", "compat=0.10", path_str(&full)]);
}
