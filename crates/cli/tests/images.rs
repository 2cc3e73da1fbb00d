//! `create` and `info`, with qemu-img as judge.

mod common;

use common::{assert_valid, at, directory, has_tool, path_str, run, run_fails, run_ok, text, tool_ok};
use serde_json::Value;
use std::path::Path;

fn ours(image: &Path) -> Value {
    serde_json::from_str(&run_ok(&["info", "--output=json", path_str(image)])).unwrap()
}

fn theirs(image: &Path) -> Value {
    serde_json::from_str(&tool_ok("qemu-img", &["info", "--output=json", path_str(image)])).unwrap()
}

/// Everything that qemu-img says, we say the same.
fn assert_agree(image: &Path) {
    let (ours, theirs) = (ours(image), theirs(image));
    for (key, value) in theirs.as_object().unwrap() {
        assert_eq!(&ours[key], value, "{key} of {}", image.display());
    }
    assert!(ours["ringdisk"]["engine"].as_str().is_some_and(|engine| !engine.is_empty()));
    let lines = |text: String| text.lines().map(str::to_owned).collect::<Vec<_>>();
    let said = lines(run_ok(&["info", path_str(image)]));
    for line in lines(tool_ok("qemu-img", &["info", path_str(image)])) {
        assert!(said.contains(&line), "{}: '{line}' is missing in {said:#?}", image.display());
    }
}

#[test]
fn what_we_create_qemu_img_finds_valid_and_describes_as_we_do() {
    if !has_tool("qemu-img") {
        return;
    }
    let dir = directory();
    for (index, options) in [
        "cluster_size=64k",
        "cluster_size=512",
        "cluster_size=2M,refcount_bits=1",
        "compat=0.10",
        "compat=0.10,cluster_size=4k",
        "refcount_bits=64,compression_type=zstd",
        "compat=1.1,refcount_bits=8,cluster_size=16k",
    ]
    .into_iter()
    .enumerate()
    {
        for size in ["1000", "1.5M", "20G"] {
            let image = at(&dir, &format!("{index}-{size}.qcow2"));
            run_ok(&["create", "-f", "qcow2", "-o", options, path_str(&image), size]);
            assert_valid(&image, false);
            assert_agree(&image);
        }
    }
    let raw = at(&dir, "disk.raw");
    run_ok(&["create", "-f", "raw", path_str(&raw), "3M"]);
    let said = tool_ok("qemu-img", &["info", "-f", "raw", path_str(&raw)]);
    assert!(said.contains("virtual size: 3 MiB (3145728 bytes)"), "{said}");
}

#[test]
fn the_same_line_makes_and_says_the_same() {
    if !has_tool("qemu-img") {
        return;
    }
    let dir = directory();
    let image = at(&dir, "disk.qcow2");
    let (data, base) = (at(&dir, "data.raw"), at(&dir, "base.raw"));
    run_ok(&["create", "-q", path_str(&base), "3M"]);
    // qemu-img looks for a data file from its working directory, we look from the image's directory. A full path is the
    // same for both.
    let (data_raw, data_falloc, data_base) = (
        format!("data_file={},data_file_raw=on", path_str(&data)),
        format!("data_file={},preallocation=falloc,extended_l2=on,nocow=off", path_str(&data)),
        format!("data_file={},backing_file=base.raw,backing_fmt=raw", path_str(&data)),
    );
    for options in [
        "compat=1.1",
        "lazy_refcounts=on,refcount_bits=8",
        "extended_l2=on,cluster_size=128k",
        "preallocation=off",
        "preallocation=metadata",
        "preallocation=falloc,cluster_size=4k",
        "preallocation=full",
        "preallocation=metadata,extended_l2=on,backing_file=base.raw,backing_fmt=raw",
        data_raw.as_str(),
        data_falloc.as_str(),
        data_base.as_str(),
    ] {
        let line = ["create", "-f", "qcow2", "-o", options, path_str(&image), "3M"];
        let sizes = || {
            let size = |path: &std::path::Path| {
                let meta = std::fs::metadata(path).ok();
                meta.map(|meta| (meta.len(), std::os::unix::fs::MetadataExt::blocks(&meta) * 512))
            };
            (size(&image).unwrap(), size(&data))
        };
        let (said, ours) = (run_ok(&line), sizes());
        assert_valid(&image, false);
        assert_agree(&image);
        run_ok(&["check", path_str(&image)]);
        let reads = tool_ok("qemu-img", &["compare", "-f", "qcow2", "-F", "raw", path_str(&image), path_str(&base)]);
        assert_eq!(reads, "Images are identical.\n", "{options}");
        std::fs::remove_file(&image).unwrap();
        let _ = std::fs::remove_file(&data);
        assert_eq!(said, tool_ok("qemu-img", &line));
        let theirs = sizes();
        assert_eq!(ours.1.map(|size| size.0), theirs.1.map(|size| size.0), "{options}: the data file's length");
        let near = |ours: u64, theirs: u64| ours.abs_diff(theirs) <= 512 << 10;
        assert!(near(ours.0.0, theirs.0.0) && near(ours.0.1, theirs.0.1), "{options}: {ours:?} and {theirs:?}");
    }
    for (options, reason) in [
        ("extended_l2=on,cluster_size=4k", "16384"),
        ("extended_l2=on,compat=0.10", "compatibility level 1.1"),
        ("data_file_raw=on", "data-file-raw requires data-file"),
        ("data_file=x,data_file_raw=on,backing_file=base.raw,backing_fmt=raw", "cannot be used at the same time"),
        ("preallocation=metadata,backing_file=base.raw,backing_fmt=raw", "if extended_l2 is on"),
        ("preallocation=some", "off, metadata, falloc, full"),
        ("encrypt.format=luks", "not supported"),
        ("encryption=on", "not supported"),
        ("extent_size_hint=4G", "less than 4G"),
    ] {
        let refused = at(&dir, "refused.qcow2");
        let output = run(&["create", "-q", "-f", "qcow2", "-o", options, path_str(&refused), "3M"]);
        assert!(!output.status.success() && !refused.exists(), "{options}");
        assert!(text(&output.stderr).contains(reason), "{options}: {}", text(&output.stderr));
    }
}

#[test]
fn what_qemu_img_creates_we_describe_as_it_does() {
    if !has_tool("qemu-img") {
        return;
    }
    let dir = directory();
    let base = at(&dir, "base.raw");
    tool_ok("qemu-img", &["create", "-q", "-f", "raw", path_str(&base), "10M"]);
    for (index, options) in [
        "compat=0.10",
        "lazy_refcounts=on",
        "cluster_size=1M,compression_type=zstd",
        "refcount_bits=32",
        "extended_l2=on",
    ]
    .into_iter()
    .enumerate()
    {
        let image = at(&dir, &format!("{index}.qcow2"));
        tool_ok("qemu-img", &["create", "-q", "-f", "qcow2", "-o", options, path_str(&image), "1G"]);
        assert_agree(&image);
        let overlay = at(&dir, &format!("{index}-overlay.qcow2"));
        let below = format!("backing_file=base.raw,backing_fmt=raw,{options}");
        tool_ok("qemu-img", &["create", "-q", "-f", "qcow2", "-o", &below, path_str(&overlay)]);
        assert_agree(&overlay);
    }
}

#[test]
fn an_overlay_takes_its_size_from_its_base_and_info_opens_the_base_only_when_asked() {
    if !has_tool("qemu-img") {
        return;
    }
    let dir = directory();
    let (base, overlay) = (at(&dir, "base.qcow2"), at(&dir, "overlay.qcow2"));
    run_ok(&["create", "-f", "qcow2", path_str(&base), "12M"]);
    let said = run_fails(2, &["create", "-f", "qcow2", "-b", "base.qcow2", path_str(&overlay)]);
    assert!(said.contains("-F qcow2") && !overlay.exists(), "{said}");
    run_ok(&["create", "-f", "qcow2", "-b", "base.qcow2", "-F", "qcow2", path_str(&overlay)]);
    assert_agree(&overlay);
    assert_eq!(ours(&overlay)["virtual-size"], 12 << 20);
    let chain: Value =
        serde_json::from_str(&run_ok(&["info", "--output=json", "--backing-chain", path_str(&overlay)])).unwrap();
    assert_eq!(chain.as_array().map(Vec::len), Some(2));
    std::fs::remove_file(&base).unwrap();
    run_ok(&["info", path_str(&overlay)]);
    let said = run_fails(1, &["info", "--backing-chain", path_str(&overlay)]);
    assert!(said.contains("base.qcow2"), "{said}");
}

#[test]
fn a_backing_file_with_a_protocol_is_found_from_the_working_directory_as_by_qemu() {
    let dir = directory();
    run_ok(&["create", "-q", path_str(&at(&dir, "base.raw")), "3M"]);
    std::fs::create_dir(at(&dir, "sub")).unwrap();
    for overlay in ["here.qcow2", "sub/there.qcow2"] {
        let here = |mut command: std::process::Command| command.current_dir(dir.path()).output().unwrap();
        let ours = |arguments: &[&str]| {
            let mut command = common::ringdisk();
            command.args(arguments);
            here(command)
        };
        let made = ours(&["create", "-q", "-f", "qcow2", "-b", "file:base.raw", "-F", "raw", overlay]);
        assert!(made.status.success(), "{}", text(&made.stderr));
        let map = ["map", "--output=json", "--allow-backing=any", overlay];
        let said = ours(&map);
        assert!(text(&said.stdout).contains("3145728"), "{}", text(&said.stderr));
        if has_tool("qemu-img") {
            let mut command = std::process::Command::new("qemu-img");
            command.args(["map", overlay]);
            assert!(here(command).status.success(), "{overlay}");
        }
        let elsewhere = run_fails(1, &["map", "--allow-backing=any", path_str(&at(&dir, overlay))]);
        assert!(elsewhere.contains("'base.raw'"), "{elsewhere}");
    }
}

#[test]
fn names_out_of_images_do_not_steer_a_terminal() {
    let dir = directory();
    let (evil, image) = ("evil\u{1b}]0;x\u{7}\u{9b}1m", at(&dir, "disk.qcow2"));
    let base = at(&dir, evil);
    std::fs::write(&base, [7; 65536]).unwrap();
    let options = format!("data_file={evil}.data");
    let data = at(&dir, "data.qcow2");
    run_ok(&["create", "-q", "-f", "qcow2", "-b", evil, "-F", "raw", path_str(&image)]);
    run_ok(&["create", "-q", "-f", "qcow2", "-o", &options, path_str(&data), "1M"]);
    run_ok(&["bitmap", "--add", path_str(&image), evil]);
    for arguments in
        [&["info", "--backing-chain", path_str(&image)][..], &["map", path_str(&image)], &["info", path_str(&data)]]
    {
        let said = run_ok(arguments);
        assert!(said.contains("evil\\u{1b}]0;x\\u{7}\\u{9b}1m"), "{said:?}");
        assert!(!said.chars().any(|char| char.is_control() && char != '\n'), "{said:?}");
    }
    std::fs::remove_file(&base).unwrap();
    let said = run_fails(1, &["map", path_str(&image)]);
    assert!(said.contains("evil\\u{1b}") && !said.contains('\u{1b}'), "{said:?}");
}

#[test]
fn create_replaces_what_was_there() {
    let dir = directory();
    let image = at(&dir, "disk");
    run_ok(&["create", "-q", "-f", "qcow2", path_str(&image), "5M"]);
    run_ok(&["create", "-q", "-f", "raw", path_str(&image), "2M"]);
    let bytes = std::fs::read(&image).unwrap();
    assert_eq!(bytes.len(), 2 << 20);
    assert!(bytes.iter().all(|byte| *byte == 0), "the old image's header is still there");
    run_ok(&["create", "-q", "-f", "qcow2", path_str(&image), "3M"]);
    assert_eq!(ours(&image)["virtual-size"], 3 << 20);
}

#[test]
fn a_chain_that_loops_is_refused() {
    if !has_tool("qemu-img") {
        return;
    }
    let dir = directory();
    let (one, two) = (at(&dir, "one.qcow2"), at(&dir, "two.qcow2"));
    let create = |image: &Path, below: &str| {
        run_ok(&["create", "-q", "-u", "-f", "qcow2", "-b", below, "-F", "qcow2", path_str(image), "1M"]);
    };
    create(&one, "two.qcow2");
    create(&two, "one.qcow2");
    for command in [&["info", "--backing-chain"] as &[&str], &["serve"]] {
        let said = run_fails(1, &[command, &[path_str(&one)]].concat());
        assert!(said.contains("loop"), "{command:?}: {said}");
    }
}

#[test]
fn what_opens_only_the_named_file_takes_a_backing_format_that_is_not_served_and_what_opens_the_chain_refuses_it() {
    if !has_tool("qemu-img") {
        return;
    }
    let dir = directory();
    let (image, target) = (at(&dir, "vm.qcow2"), at(&dir, "copy.raw"));
    std::fs::write(at(&dir, "y.vmdk"), [0; 512]).unwrap();
    tool_ok("qemu-img", &["create", "-q", "-f", "qcow2", "-u", "-b", "y.vmdk", "-F", "vmdk", path_str(&image), "1M"]);
    assert_agree(&image);
    assert_eq!(ours(&image)["backing-filename-format"], "vmdk");
    run_ok(&["snapshot", "-l", path_str(&image)]);
    run_ok(&["bitmap", "--add", path_str(&image), "b0"]);
    assert_agree(&image);
    for command in [&["info", "--backing-chain"] as &[&str], &["map"], &["serve"]] {
        let said = run_fails(2, &[command, &[path_str(&image)]].concat());
        assert!(said.contains("'vmdk'") && said.contains(path_str(&image)), "{command:?}: {said}");
    }
    let said = run_fails(2, &["convert", "-O", "raw", path_str(&image), path_str(&target)]);
    assert!(said.contains("'vmdk'") && !target.exists(), "{said}");
}
