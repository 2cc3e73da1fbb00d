//! `map`, `measure`, `convert`, `compare` and `resize`, with qemu-img as judge.

mod checks;
#[path = "../common/mod.rs"]
mod common;
mod compressed;

use common::{assert_valid, at, directory, has_tool, path_str, run, run_fails, run_ok, text, tool, tool_ok};
use serde_json::Value;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// Writes of data, zeros and holes, at places that fit no cluster.
const WRITES: [&str; 7] = [
    "write -P 1 64k 128k",
    "write -P 2 1000k 3k",
    "write -z 2M 192k",
    "write -P 3 3M 700k",
    "write -P 0 3200k 200k",
    "write -P 4 8191k 1k",
    "discard 3M 64k",
];

fn qemu_io(image: &Path, format: &str, commands: &[&str]) {
    let mut arguments = vec!["-f", format];
    commands.iter().for_each(|command| arguments.extend(["-c", command]));
    arguments.push(path_str(image));
    tool_ok("qemu-io", &arguments);
}

fn create(dir: &TempDir, name: &str, options: &[&str]) -> PathBuf {
    let image = at(dir, name);
    let mut arguments = vec!["create", "-q"];
    arguments.extend(options);
    arguments.extend([path_str(&image), "8M"]);
    tool_ok("qemu-img", &arguments);
    image
}

/// Images without extended L2 entries. Where parts of an allocated cluster hold nothing, qemu-img tells their place.
fn zoo_of_whole_clusters(dir: &TempDir) -> Vec<(PathBuf, &'static str)> {
    let in_parts =
        |image: &Path| matches!(image.file_name().and_then(|name| name.to_str()), Some("4.qcow2" | "5.qcow2"));
    zoo(dir).into_iter().filter(|(image, _)| !in_parts(image)).collect()
}

/// Images of every kind, with their formats.
fn zoo(dir: &TempDir) -> Vec<(PathBuf, &'static str)> {
    let mut images = Vec::new();
    let raw = create(dir, "disk.raw", &["-f", "raw"]);
    qemu_io(&raw, "raw", &WRITES);
    images.push((raw.clone(), "raw"));
    let kinds = [
        "cluster_size=64k",
        "cluster_size=512",
        "cluster_size=2M",
        "compat=0.10,cluster_size=4k",
        "extended_l2=on",
        "extended_l2=on,cluster_size=16k",
    ];
    for (index, options) in kinds.iter().enumerate() {
        let image = create(dir, &format!("{index}.qcow2"), &["-f", "qcow2", "-o", options]);
        let writes: Vec<&str> = WRITES.iter().filter(|w| index != 3 || !w.contains("-z")).copied().collect();
        qemu_io(&image, "qcow2", &writes);
        images.push((image, "qcow2"));
    }
    let snapshot = create(dir, "snapshot.qcow2", &["-f", "qcow2"]);
    qemu_io(&snapshot, "qcow2", &["write -P 1 0 4M", "write -z 2M 192k"]);
    tool_ok("qemu-img", &["snapshot", "-c", "one", path_str(&snapshot)]);
    qemu_io(&snapshot, "qcow2", &["write -P 9 64k 128k", "write -z 3M 64k"]);
    images.push((snapshot, "qcow2"));
    for compression in ["zlib", "zstd"] {
        let image = at(dir, &format!("{compression}.qcow2"));
        let option = format!("compression_type={compression}");
        tool_ok("qemu-img", &["convert", "-c", "-O", "qcow2", "-o", &option, path_str(&raw), path_str(&image)]);
        images.push((image, "qcow2"));
    }
    let base = create(dir, "base.qcow2", &["-f", "qcow2"]);
    qemu_io(&base, "qcow2", &["write -P 7 0 5M", "write -z 1M 1M"]);
    for (name, size) in [("overlay.qcow2", "8M"), ("longer.qcow2", "9M"), ("shorter.qcow2", "3M")] {
        let image = at(dir, name);
        let arguments = ["create", "-q", "-f", "qcow2", "-b", path_str(&base), "-F", "qcow2", path_str(&image), size];
        tool_ok("qemu-img", &arguments);
        qemu_io(&image, "qcow2", &["write -P 1 64k 128k", "write -z 2M 192k", "write -P 2 1000k 3k"]);
        images.push((image, "qcow2"));
    }
    images
}

fn map_of(text: &str) -> Vec<Value> {
    let Value::Array(mut runs) = serde_json::from_str(text).unwrap() else { panic!("{text}") };
    for run in &mut runs {
        // Older versions of qemu-img do not say it.
        run.as_object_mut().unwrap().remove("compressed");
    }
    runs
}

#[test]
fn map_shows_what_qemu_img_shows() {
    if !has_tool("qemu-img") {
        return;
    }
    let dir = directory();
    for (image, format) in zoo_of_whole_clusters(&dir) {
        let json = ["map", "--output=json", "-f", format, path_str(&image)];
        assert_eq!(map_of(&run_ok(&json)), map_of(&tool_ok("qemu-img", &json)), "{}", image.display());
        let human = ["map", "-f", format, path_str(&image)];
        let (ours, theirs) = (run(&human), tool("qemu-img", &human));
        assert_eq!(text(&ours.stdout), text(&theirs.stdout), "{}", image.display());
        assert_eq!(ours.status.code(), theirs.status.code(), "{}", image.display());
    }
}

#[test]
fn measure_tells_the_sizes_that_qemu_img_tells() {
    if !has_tool("qemu-img") {
        return;
    }
    let dir = directory();
    let ours_and_theirs = |arguments: &[&str]| {
        let human: Vec<&str> = arguments.iter().filter(|word| !word.starts_with("--output")).copied().collect();
        assert_eq!(run_ok(&human), tool_ok("qemu-img", &human), "{human:?}");
        let parse = |text: String| serde_json::from_str::<Value>(&text).unwrap();
        let (ours, theirs) = (parse(run_ok(arguments)), parse(tool_ok("qemu-img", arguments)));
        assert_eq!(ours, theirs, "{arguments:?}");
    };
    for (image, format) in zoo(&dir) {
        for target in [&["-O", "raw"][..], &["-O", "qcow2"], &["-O", "qcow2", "-o", "cluster_size=4k,compat=0.10"]] {
            let mut arguments = vec!["measure", "--output=json", "-f", format];
            arguments.extend(target);
            arguments.push(path_str(&image));
            ours_and_theirs(&arguments);
        }
    }
    for size in ["0", "1000", "10G", "3T"] {
        for options in ["cluster_size=64k", "cluster_size=2M,refcount_bits=1", "cluster_size=4k,refcount_bits=64"] {
            if (size, options) != ("3T", "cluster_size=4k,refcount_bits=64") {
                ours_and_theirs(&["measure", "--output=json", "--size", size, "-O", "qcow2", "-o", options]);
            }
        }
    }
}

#[test]
fn converted_images_hold_the_same_are_valid_and_no_larger_than_qemu_imgs() {
    if !has_tool("qemu-img") {
        return;
    }
    let dir = directory();
    let (ours, theirs) = (at(&dir, "ours"), at(&dir, "theirs"));
    for (image, format) in zoo(&dir) {
        for (target, options) in
            [("raw", None), ("qcow2", None), ("qcow2", Some("cluster_size=4k")), ("qcow2", Some("cluster_size=2M"))]
        {
            let mut arguments = vec!["convert", "-f", format, "-O", target];
            arguments.extend(options.iter().flat_map(|options| ["-o", options]));
            arguments.push(path_str(&image));
            run_ok(&[&arguments[..], &[path_str(&ours)]].concat());
            tool_ok("qemu-img", &[&arguments[..], &[path_str(&theirs)]].concat());
            let what = format!("{} to {target} {options:?}", image.display());
            let compare = ["compare", "-f", format, "-F", target, path_str(&image), path_str(&ours)];
            tool_ok("qemu-img", &compare);
            assert_eq!(run_ok(&compare), "Images are identical.\n", "{what}");
            if target == "qcow2" {
                assert_valid(&ours, false);
            }
            let data = |image: &Path| {
                let runs = map_of(&tool_ok("qemu-img", &["map", "--output=json", "-f", target, path_str(image)]));
                let length = |run: &Value| run["length"].as_u64().unwrap();
                runs.iter().filter(|run| run["data"] == true).map(length).sum::<u64>()
            };
            assert!(data(&ours) <= data(&theirs), "{what}: {} and {}", data(&ours), data(&theirs));
        }
    }
}

#[test]
fn convert_writes_into_images_that_hold_something_and_over_a_backing_file() {
    if !has_tool("qemu-img") {
        return;
    }
    let dir = directory();
    let images = zoo(&dir);
    for (format, old) in [("raw", "old.raw"), ("qcow2", "old.qcow2")] {
        for (image, source_format) in &images {
            let target = at(&dir, old);
            tool_ok("qemu-img", &["create", "-q", "-f", format, path_str(&target), "9M"]);
            qemu_io(&target, format, &["write -P 77 0 9M"]);
            run_ok(&["convert", "-n", "-f", source_format, "-O", format, path_str(image), path_str(&target)]);
            let compare = ["compare", "-f", source_format, "-F", format, path_str(image), path_str(&target)];
            let said = tool("qemu-img", &compare);
            // Nobody asked for what lies behind the copy.
            let size = if image.ends_with("longer.qcow2") {
                9
            } else if image.ends_with("shorter.qcow2") {
                3
            } else {
                8
            };
            let expected = match size {
                9 => "Images are identical.\n".to_owned(),
                size => format!("Warning: Image size mismatch!\nContent mismatch at offset {}!\n", size << 20),
            };
            assert_eq!(text(&said.stdout), expected, "{} into {format}", image.display());
            let said = run(&compare);
            assert_eq!(text(&said.stdout), expected, "{} into {format}", image.display());
        }
    }
    let (overlay, copy) = (at(&dir, "overlay.qcow2"), at(&dir, "copy.qcow2"));
    let base = at(&dir, "base.qcow2");
    // Sources that rest on nothing, or on something shorter, hide the backing file with zeros.
    for source in ["0.qcow2", "disk.raw", "zlib.qcow2", "longer.qcow2", "overlay.qcow2"].map(|name| at(&dir, name)) {
        let format = if source.ends_with("disk.raw") { "raw" } else { "qcow2" };
        let arguments = ["-f", format, "-O", "qcow2", "-B", path_str(&base), "-F", "qcow2", path_str(&source)];
        run_ok(&[&["convert"][..], &arguments, &[path_str(&copy)]].concat());
        assert_valid(&copy, false);
        tool_ok("qemu-img", &["compare", "-f", format, path_str(&source), path_str(&copy)]);
    }
    let map = |image: &Path| map_of(&tool_ok("qemu-img", &["map", "--output=json", path_str(image)]));
    let own = |image| {
        let own = map(image).into_iter().filter(|run| run["depth"] == 0 && run["data"] == true);
        own.map(|run| run["length"].as_u64().unwrap()).sum::<u64>()
    };
    assert_eq!(own(&copy), own(&overlay), "what the backing file holds is not copied");
}

#[test]
fn compare_says_what_qemu_img_says() {
    if !has_tool("qemu-img") {
        return;
    }
    let dir = directory();
    let images = zoo_of_whole_clusters(&dir);
    let missing = (at(&dir, "missing"), "raw");
    for (first, first_format) in images.iter().chain([&missing]) {
        for (second, second_format) in &images {
            for flags in [&[][..], &["-s"], &["-q"]] {
                let mut arguments = vec!["compare", "-f", first_format, "-F", second_format];
                arguments.extend(flags);
                arguments.extend([path_str(first), path_str(second)]);
                let (ours, theirs) = (run(&arguments), tool("qemu-img", &arguments));
                assert_eq!(text(&ours.stdout), text(&theirs.stdout), "{arguments:?}");
                assert_eq!(ours.status.code(), theirs.status.code(), "{arguments:?}: {}", text(&ours.stderr));
            }
        }
    }
}

#[test]
fn a_failed_convert_removes_its_target_and_one_onto_its_source_is_refused() {
    let dir = directory();
    let (source, target) = (at(&dir, "source.qcow2"), at(&dir, "target"));
    run_ok(&["create", "-q", "-f", "qcow2", path_str(&source), "64M"]);
    // An L1 entry that leads nowhere. It is found only when the copy gets there.
    let mut bytes = std::fs::read(&source).unwrap();
    let l1 = u64::from_be_bytes(bytes[40..48].try_into().unwrap()) as usize;
    bytes[l1..l1 + 8].copy_from_slice(&(1u64 << 40 | 1 << 63).to_be_bytes());
    std::fs::write(&source, bytes).unwrap();
    let said = run_fails(1, &["convert", "-O", "raw", path_str(&source), path_str(&target)]);
    assert!(said.contains("was removed again"), "{said}");
    assert!(said.matches(path_str(&target)).count() <= 1, "it is named once: {said}");
    assert!(!target.exists());
    let said = run_fails(1, &["convert", "-O", "qcow2", path_str(&source), path_str(&source)]);
    assert!(said.contains("is the source"), "{said}");
}

#[test]
fn a_source_under_another_name_is_not_overwritten_either() {
    let dir = directory();
    let (source, link, target) = (at(&dir, "source.raw"), at(&dir, "link.raw"), at(&dir, "target.qcow2"));
    std::fs::write(&source, [7; 65536]).unwrap();
    std::fs::hard_link(&source, &link).unwrap();
    let data_file = format!("data_file={}", path_str(&link));
    let in_use = path_str(&source);
    for rest in
        [&["-O", "raw", in_use, path_str(&link)][..], &["-O", "qcow2", "-o", &data_file, in_use, path_str(&target)]]
    {
        // No lock tells that it is the same file.
        let arguments: Vec<&str> = ["convert", "-U", "-f", "raw"].iter().chain(rest).copied().collect();
        let said = run_fails(1, &arguments);
        assert!(said.contains("is the source"), "{said}");
        assert_eq!(std::fs::read(&source).unwrap(), [7; 65536]);
    }
}

/// The device is larger than what is written to it. It keeps what lies behind that.
#[test]
fn zeros_reach_a_device_that_held_something_else() {
    let dir = directory();
    let (source, under) = (at(&dir, "source.qcow2"), at(&dir, "under"));
    std::fs::write(&under, vec![0xee; 2 << 20]).unwrap();
    let attached = std::process::Command::new("losetup").args(["--find", "--show"]).arg(&under).output();
    let Some(attached) = attached.ok().filter(|output| output.status.success()) else { return };
    let device = text(&attached.stdout).trim().to_owned();
    tool_ok("qemu-img", &["create", "-q", "-f", "qcow2", path_str(&source), "1M"]);
    qemu_io(&source, "qcow2", &["write -P 1 64k 64k"]);
    let convert = run(&["convert", "-O", "raw", path_str(&source), &device]);
    let converted = std::fs::read(&device).unwrap();
    std::fs::write(&device, vec![0xee; 2 << 20]).unwrap();
    let (from, to) = (format!("if={}", path_str(&source)), format!("of={device}"));
    let copy = run(&["dd", "-f", "qcow2", "-O", "raw", "bs=64k", &from, &to]);
    let copied = std::fs::read(&device).unwrap();
    let (image, option) = (at(&dir, "image.qcow2"), format!("data_file={device}"));
    let create = |size| run(&["create", "-f", "qcow2", "-o", &option, path_str(&image), size]);
    let (beside, larger) = (create("1M"), create("3M"));
    tool_ok("losetup", &["--detach", &device]);
    let mut expected: Vec<u8> = (0..1 << 20).map(|at| u8::from((65536..131072).contains(&at))).collect();
    expected.resize(2 << 20, 0xee);
    assert!(convert.status.success() && converted == expected, "{}", text(&convert.stderr));
    assert!(copy.status.success() && copied == expected, "{}", text(&copy.stderr));
    assert!(beside.status.success(), "{}", text(&beside.stderr));
    assert!(text(&larger.stderr).contains("3145728 are needed"), "{}", text(&larger.stderr));
}

/// A loop device; none where they cannot be made.
struct LoopDevice(String);

impl LoopDevice {
    fn over(file: &Path) -> Option<Self> {
        let attached = std::process::Command::new("losetup").args(["--find", "--show"]).arg(file).output();
        let attached = attached.ok().filter(|output| output.status.success())?;
        Some(Self(text(&attached.stdout).trim().to_owned()))
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = std::process::Command::new("losetup").args(["--detach", &self.0]).status();
    }
}

#[test]
fn a_device_that_is_too_small_is_no_wrong_usage_and_a_load_asks_before_it_overwrites_one() {
    let dir = directory();
    let under = at(&dir, "under");
    std::fs::write(&under, vec![0; 1 << 20]).unwrap();
    let Some(device) = LoopDevice::over(&under) else { return };
    let said = run_fails(1, &["create", "-f", "raw", &device.0, "2M"]);
    assert!(said.contains(&device.0), "{said}");
    let write = ["bench", "--host", &device.0, "--rw", "write", "--bs", "4k", "--count", "4"];
    let said = run_fails(2, &write);
    assert!(said.contains("is a device") && said.contains("--destroy"), "{said}");
    assert!(std::fs::read(&under).unwrap().iter().all(|byte| *byte == 0), "it was written");
    run_ok(&[&write[..], &["--destroy"]].concat());
}

#[test]
fn an_interrupted_convert_removes_its_target_and_leaves_its_source() {
    let dir = directory();
    let (source, target) = (at(&dir, "source.raw"), at(&dir, "target.raw"));
    // It is so large that it is never finished, one durable write after the other.
    std::fs::File::create(&source).and_then(|file| file.set_len(1 << 40)).unwrap();
    let arguments = ["convert", "-f", "raw", "-S", "0", "-t", "writethrough", "-m", "1"];
    let mut command = common::ringdisk();
    command.args(arguments).args([&source, &target]).stderr(std::process::Stdio::piped());
    let child = command.spawn().unwrap();
    let written = || std::fs::metadata(&target).is_ok_and(|meta| std::os::unix::fs::MetadataExt::blocks(&meta) > 0);
    let started = std::time::Instant::now();
    while !written() {
        assert!(started.elapsed() < common::PATIENCE, "nothing is ever written");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    tool_ok("kill", &["-INT", &child.id().to_string()]);
    let output = child.wait_with_output().unwrap();
    let said = text(&output.stderr);
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&output.status), Some(2), "{said}");
    let expected = format!("ringdisk: interrupted: '{}' was removed again\n", target.display());
    assert!(said.ends_with(&expected), "{said}");
    assert!(!target.exists());
    assert_eq!(std::fs::metadata(&source).unwrap().len(), 1 << 40);
}

/// How many bytes the host copied by itself.
fn offloaded(arguments: &[&str]) -> u64 {
    let output = common::ringdisk().args(arguments).env("RUST_LOG", "info").output().unwrap();
    let said = text(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {said}");
    let number = said.split("offloaded_bytes=").nth(1).expect("it is told");
    number.split_whitespace().next().unwrap().parse().unwrap()
}

#[test]
fn the_host_copies_by_itself_what_lies_in_files_as_it_is() {
    if !has_tool("qemu-img") {
        return;
    }
    let dir = directory();
    for (image, format) in zoo(&dir) {
        for (target, options) in [("raw", None), ("qcow2", None), ("qcow2", Some("cluster_size=512"))] {
            let copy = at(&dir, "copy");
            let mut arguments = vec!["convert", "-C", "-f", format, "-O", target];
            arguments.extend(options.iter().flat_map(|options| ["-o", options]));
            arguments.extend([path_str(&image), path_str(&copy)]);
            let bytes = offloaded(&arguments);
            let what = format!("{} to {target} {options:?}: {bytes} bytes", image.display());
            let is_compressed = image.ends_with("zlib.qcow2") || image.ends_with("zstd.qcow2");
            assert_eq!(bytes == 0, is_compressed, "{what}");
            tool_ok("qemu-img", &["compare", "-f", format, "-F", target, path_str(&image), path_str(&copy)]);
            if target == "qcow2" {
                assert_valid(&copy, false);
            }
        }
    }
    // The kernel does not copy past the page cache. The bytes go through memory, and the result is the same.
    let (raw, copy) = (at(&dir, "disk.raw"), at(&dir, "copy"));
    let direct = run(&["convert", "-C", "-t", "none", "-T", "none", "-f", "raw", path_str(&raw), path_str(&copy)]);
    match direct.status.success() {
        true => assert_eq!(run_ok(&["compare", path_str(&raw), path_str(&copy)]), "Images are identical.\n"),
        false => assert!(text(&direct.stderr).contains("direct I/O"), "{}", text(&direct.stderr)),
    }
}

#[test]
fn progress_is_json_lines_on_standard_error() {
    let dir = directory();
    let (source, target) = (at(&dir, "source.raw"), at(&dir, "target.qcow2"));
    std::fs::write(&source, vec![1u8; 4 << 20]).unwrap();
    let arguments = ["convert", "--progress=json", "-f", "raw", "-O", "qcow2", path_str(&source), path_str(&target)];
    let output = run(&arguments);
    assert!(output.status.success() && output.stdout.is_empty());
    let lines: Vec<Value> =
        text(&output.stderr).lines().map(|line| serde_json::from_str(line).expect("a line of JSON")).collect();
    let last = lines.last().expect("the end is told");
    assert_eq!((&last["done-bytes"], &last["left-bytes"]), (&Value::from(4 << 20), &Value::from(0)));
    // Several sources are one disk.
    let sources = [path_str(&source), path_str(&source), path_str(&target)];
    let output = run(&[&["convert", "--progress=json", "-C", "-f", "raw", "-O", "qcow2"], &sources[..]].concat());
    let said = text(&output.stderr);
    let last: Value = serde_json::from_str(said.lines().last().expect("the end is told")).unwrap();
    assert_eq!(last["done-bytes"], Value::from(8 << 20), "{said}");
}

#[test]
fn raw_images_grow_and_shrink_as_qemu_img_does_it() {
    if !has_tool("qemu-img") {
        return;
    }
    let dir = directory();
    for (size, flags) in [("+1M", &[][..]), ("10M", &[]), ("-1M", &["--shrink"]), ("3000", &["--shrink"]), ("1M", &[])]
    {
        let (ours, theirs) = (at(&dir, "ours.raw"), at(&dir, "theirs.raw"));
        for image in [&ours, &theirs] {
            std::fs::write(image, vec![5u8; 4 << 20]).unwrap();
        }
        let arguments = |image| [&["resize", "-f", "raw"][..], flags, &[path_str(image), size]].concat();
        let (mine, judge) = (run(&arguments(&ours)), tool("qemu-img", &arguments(&theirs)));
        assert_eq!(mine.status.code() == Some(0), judge.status.success(), "{size}: {}", text(&mine.stderr));
        assert_eq!(text(&mine.stdout), text(&judge.stdout), "{size}");
        assert!(std::fs::read(&ours).unwrap() == std::fs::read(&theirs).unwrap(), "{size}");
    }
}

#[test]
fn verbs_that_only_read_do_not_warn_of_a_format_that_was_guessed() {
    let dir = directory();
    let disk = at(&dir, "disk");
    std::fs::write(&disk, [7; 4096]).unwrap();
    let (disk, target) = (path_str(&disk), at(&dir, "target"));
    for arguments in [
        &["info", disk][..],
        &["map", disk],
        &["measure", "-O", "qcow2", disk],
        &["compare", disk, disk],
        &["convert", "-O", "qcow2", disk, path_str(&target)],
    ] {
        let output = run(arguments);
        assert!(output.status.success() && output.stderr.is_empty(), "{arguments:?}: {}", text(&output.stderr));
    }
}
