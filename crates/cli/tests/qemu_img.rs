//! The same command lines through both programs that are called qemu-img: the same output, exit codes and images.

mod common;
mod qemu_img_lines;

use common::{directory, has_tool, numbered, text, tool, with_an_unreadable_cluster};
use qemu_img_lines::*;
use serde_json::Value;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use tempfile::TempDir;

const SALVAGE: &[&str] =
    &["convert --salvage bad.raw a.raw", "convert --salvage -O qcow2 -S 0 bad.raw b.qcow2", "check -q b.qcow2"];

/// A program and the directory that its commands work in.
struct World {
    program: PathBuf,
    directory: PathBuf,
}

impl World {
    fn run(&self, line: &str) -> Output {
        let words: Vec<&str> = line.split_whitespace().map(|word| if word == "''" { "" } else { word }).collect();
        let mut command = match words.split_first() {
            Some((&"io", rest)) => {
                let mut command = Command::new("qemu-io");
                command.args(["-f", rest[0], "-c", &rest[2..].join(" "), rest[1]]);
                command
            }
            _ => {
                let mut command = Command::new(&self.program);
                command.args(&words);
                command
            }
        };
        command.current_dir(&self.directory).env_remove("RUST_LOG").stdin(Stdio::null());
        command.output().expect("the program can be started")
    }
}

/// Output without what differs from run to run.
fn comparable(line: &str, output: &[u8]) -> String {
    let said = text(output);
    if let Ok(mut value) = serde_json::from_str::<Value>(&said) {
        forget(&mut value);
        return value.to_string();
    }
    let said = if line.split(' ').any(|word| word == "-p") { without_progress(&said) } else { said };
    let described = without_files(&said).filter(|line| !line.starts_with("disk size:"));
    let kept = described.map(|line| match line {
        line if line.starts_with("Run completed in") => "Run completed".to_owned(),
        line => common::without_columns(line),
    });
    kept.collect::<Vec<_>>().join("\n")
}

/// `info` without what newer versions say of the file that holds the image.
fn without_files(said: &str) -> impl Iterator<Item = &str> {
    let mut is_file = false;
    said.lines().filter(move |line| {
        is_file = line.starts_with("Child node") || (is_file && line.starts_with(' '));
        !is_file
    })
}

fn without_progress(said: &str) -> String {
    assert!(said.contains("    (100.00/100%)\r"), "no progress to its end: {said:?}");
    let parts = said.split('\r').filter(|part| !part.trim_start().starts_with('('));
    parts.collect::<String>().trim().to_owned()
}

/// The file system decides about allocation. Newer versions tell more.
fn forget(value: &mut Value) {
    match value {
        Value::Object(map) => {
            map.remove("actual-size");
            map.remove("compressed");
            map.remove("children");
            map.values_mut().for_each(forget);
        }
        Value::Array(values) => values.iter_mut().for_each(forget),
        _ => {}
    }
}

/// A map without the places in the files. If several tasks copied, the places are in no particular order. Runs that
/// differ only in their places are joined.
fn without_places(said: &str) -> Option<String> {
    let Ok(Value::Array(runs)) = serde_json::from_str::<Value>(said) else { return None };
    let mut merged: Vec<(u64, Value)> = Vec::new();
    for mut run in runs {
        let map = run.as_object_mut().filter(|map| map.contains_key("depth"))?;
        map.remove("offset");
        map.remove("start");
        let length = map.remove("length")?.as_u64()?;
        match merged.last_mut() {
            Some((bytes, last)) if *last == run => *bytes += length,
            _ => merged.push((length, run)),
        }
    }
    Some(format!("{merged:?}"))
}

fn worlds(dir: &TempDir) -> [World; 2] {
    let bin = dir.path().join("bin");
    std::fs::create_dir(&bin).unwrap();
    let ours = bin.join("qemu-img");
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_ringdisk"), &ours).unwrap();
    [("ours", ours), ("theirs", PathBuf::from("qemu-img"))].map(|(name, program)| {
        let directory = dir.path().join(name);
        std::fs::create_dir(&directory).unwrap();
        World { program, directory }
    })
}

fn agree(script: &[&str]) {
    agree_on(&[], script);
}

/// As `agree`, in directories that hold these files.
fn agree_on(files: &[(&str, Vec<u8>)], script: &[&str]) {
    agree_with(files, script, true);
}

fn agree_with(files: &[(&str, Vec<u8>)], script: &[&str], places: bool) {
    if !has_tool("qemu-img") || !has_tool("qemu-io") {
        return;
    }
    let dir = directory();
    let [ours, theirs] = worlds(&dir);
    for (name, bytes) in files {
        [&ours, &theirs].into_iter().for_each(|world| std::fs::write(world.directory.join(name), bytes).unwrap());
    }
    for line in script {
        let (own, judge) = (ours.run(line), theirs.run(line));
        let said = format!("{line}\nours: {}\ntheirs: {}", text(&own.stderr), text(&judge.stderr));
        assert_eq!(own.status.code(), judge.status.code(), "{said}");
        if !line.starts_with("io ") {
            let [shown, expected] = [&own, &judge].map(|output| comparable(line, &output.stdout));
            if shown != expected {
                let [shown, expected] =
                    [&shown, &expected].map(|text| (!places).then(|| without_places(text)).flatten());
                assert!(
                    shown.is_some() && shown == expected,
                    "{said}\nours: {}theirs: {}",
                    text(&own.stdout),
                    text(&judge.stdout)
                );
            }
            let warned = |output: &Output| !text(&output.stderr).trim().is_empty();
            assert_eq!(warned(&own), warned(&judge), "{said}");
        }
    }
    let names = |world: &World| {
        let entries = std::fs::read_dir(&world.directory).unwrap();
        let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    };
    assert_eq!(names(&ours), names(&theirs));
    for name in names(&ours) {
        same_image(&ours.directory.join(&name), &theirs.directory.join(&name));
    }
}

fn same_image(ours: &Path, theirs: &Path) {
    let format = ours.extension().and_then(|extension| extension.to_str()).unwrap_or("raw");
    if format == "external" {
        // qemu-img looks for the data file from its working directory. That file is compared by itself.
        return;
    }
    let [ours, theirs] = [ours, theirs].map(common::path_str);
    let said = tool("qemu-img", &["compare", "-s", "-f", format, "-F", format, ours, theirs]);
    // Not strict if only allocation differs: the file system decides about it, or it has become better.
    let said = match said.status.code() {
        Some(1) => tool("qemu-img", &["compare", "-f", format, "-F", format, ours, theirs]),
        _ => said,
    };
    assert!(said.status.success(), "{ours}: {}{}", text(&said.stdout), text(&said.stderr));
    let length = |path| std::fs::metadata(path).unwrap().len();
    match format {
        "qcow2" => common::assert_valid(Path::new(ours), false),
        _ => assert_eq!(length(ours), length(theirs), "{ours}"),
    }
}

#[test]
fn info_map_check_compare_measure_and_resize_are_qemu_imgs() {
    agree(BASIC);
}

#[test]
fn wrong_usage_is_told_with_qemu_imgs_exit_codes() {
    agree(ERRORS);
}

#[test]
fn what_qemu_img_refuses_is_refused_and_leaves_the_files_as_they_were() {
    agree(REFUSED);
}

#[test]
fn convert_is_qemu_imgs() {
    agree(CONVERT);
}

#[test]
fn zeros_are_written_above_a_backing_file_where_the_source_has_them_itself() {
    agree_with(&[], ZEROS_ABOVE_A_BACKING_FILE, false);
}

#[test]
fn a_target_is_made_as_the_options_say_and_holds_what_the_sources_hold() {
    agree(TARGET_BY_OPTIONS);
}

#[test]
fn names_with_a_protocol_are_taken_as_in_qemu_img_and_never_for_local_files() {
    agree(NAMES);
}

#[test]
fn sigusr1_asks_how_far_it_is_as_in_qemu_img() {
    let dir = directory();
    let [ours, _] = worlds(&dir);
    std::fs::write(ours.directory.join("a.raw"), vec![7; 4 << 20]).unwrap();
    let mut command = Command::new(&ours.program);
    command.args(["convert", "-r", "4M", "-f", "raw", "-O", "raw", "a.raw", "b.raw"]);
    let mut child = command.current_dir(&ours.directory).stderr(Stdio::piped()).spawn().unwrap();
    let target = ours.directory.join("b.raw");
    while !target.exists() {
        assert!(child.try_wait().unwrap().is_none(), "it ended without a target");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    tool("kill", &["-USR1", &child.id().to_string()]);
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{:?}", output.status);
    let said = text(&output.stderr);
    assert!(said.starts_with("    (") && said.ends_with("/100%)\n"), "{said:?}");
    assert_eq!(std::fs::read(target).unwrap(), vec![7; 4 << 20]);
}

#[test]
fn several_sources_become_one_disk_as_in_qemu_img() {
    // Neither is a whole number of sectors, nor of clusters.
    agree_on(&[("odd.raw", numbered(1000)), ("big.raw", numbered((3 << 20) + 5000))], CONCATENATE);
}

#[test]
fn salvage_takes_what_cannot_be_read_for_zeros_as_qemu_img_does() {
    if !has_tool("qemu-img") {
        return;
    }
    let bad = with_an_unreadable_cluster();
    agree_on(&[("bad.raw", bad.clone())], SALVAGE);
    let dir = directory();
    let [image, target] = ["bad.qcow2", "good.raw"].map(|name| common::at(&dir, name));
    std::fs::write(&image, &bad).unwrap();
    let paths = [common::path_str(&image), common::path_str(&target)];
    let said = common::run_fails(1, &["convert", paths[0], paths[1]]);
    assert!(said.contains("error while reading at byte 0"), "{said}");
    let output = common::run(&["convert", "--salvage", paths[0], paths[1]]);
    let said = text(&output.stderr);
    assert!(output.status.success() && said.contains("65536 bytes at offset 65536"), "{said}");
    let mut expected = numbered(300_000);
    expected[65536..131_072].fill(0);
    expected.resize(300_032, 0);
    assert!(std::fs::read(&target).unwrap() == expected);
    // A table that leads nowhere takes along what it leads to, and nothing else.
    let mut bytes = bad;
    let l1 = u64::from_be_bytes(bytes[40..48].try_into().unwrap()) as usize;
    bytes[l1..l1 + 8].copy_from_slice(&(1u64 << 40 | 1 << 63).to_be_bytes());
    std::fs::write(&image, &bytes).unwrap();
    common::run_fails(1, &["convert", paths[0], paths[1]]);
    let output = common::run(&["convert", "--salvage", paths[0], paths[1]]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(std::fs::read(&target).unwrap() == vec![0; 300_032]);
}

#[test]
fn commit_is_qemu_imgs() {
    // Several tasks write at once, and the base's new clusters lie in the order in which they came.
    agree_with(&[], COMMIT, false);
}

#[test]
fn a_base_that_is_shorter_than_the_overlay_grows_as_in_qemu_img() {
    agree_with(&[], COMMIT_INTO_LARGER, false);
}

#[test]
fn raw_images_are_preallocated_as_in_qemu_img() {
    agree(RAW_PREALLOCATION);
}

#[test]
fn options_of_new_images_are_qemu_imgs() {
    agree(CREATE_OPTIONS);
}

#[test]
fn headers_of_new_images_are_qemu_imgs_byte_by_byte() {
    if !has_tool("qemu-img") {
        return;
    }
    let dir = directory();
    let [ours, theirs] = worlds(&dir);
    for options in [
        "-o compat=1.1",
        "-o compat=0.10",
        "-u -b base.raw -F raw",
        "-o compat=0.10 -u -b base.raw -F raw",
        "-o extended_l2=on",
        "-o data_file=d.bin,data_file_raw=on",
        "-o compression_type=zstd",
        "-o lazy_refcounts=on,refcount_bits=1",
    ] {
        let headers = [&ours, &theirs].map(|world| {
            let output = world.run(&format!("create -q -f qcow2 {options} new.qcow2 1M"));
            assert!(output.status.success(), "{options}: {}", text(&output.stderr));
            std::fs::read(world.directory.join("new.qcow2")).unwrap()[..65536].to_vec()
        });
        assert!(headers[0] == headers[1], "{options}");
    }
}

#[test]
fn a_backing_format_that_is_not_served_is_a_name_as_in_qemu_img() {
    agree(FOREIGN_BACKING);
}

#[test]
fn measure_takes_the_options_that_create_takes_as_qemu_img_does() {
    let source = numbered((3 << 20) + 5000);
    let lines = MEASURE_OPTIONS.iter().flat_map(|options| {
        ["--size 1M", "--output=json --size 1000", "-f raw s.raw", "--output=json s.raw"]
            .map(|what| format!("measure {options} {what}"))
    });
    let lines: Vec<String> = lines.collect();
    agree_on(&[("s.raw", source)], &lines.iter().map(String::as_str).collect::<Vec<_>>());
}

/// Reads the options of a format from its help: the heading, and each line's key with what it takes.
fn listed(said: &str) -> (String, Vec<String>) {
    let mut lines = said.lines();
    let heading = lines.next().unwrap_or_default().to_owned();
    let keys = lines.filter_map(|line| Some(line.strip_prefix("  ")?.split_once(" - ")?.0.trim_end().to_owned()));
    (heading, keys.collect())
}

#[test]
fn help_with_options_needs_no_image_and_lists_what_qemu_img_lists() {
    if !has_tool("qemu-img") {
        return;
    }
    let dir = directory();
    let [ours, theirs] = worlds(&dir);
    for line in OPTIONS_HELP {
        let (own, judge) = (ours.run(line), theirs.run(line));
        let said = format!("{line}\n{}{}", text(&own.stdout), text(&own.stderr));
        assert_eq!(own.status.code(), judge.status.code(), "{said}");
        let (heading, keys) = listed(&text(&own.stdout));
        let (expected_heading, expected) = listed(&text(&judge.stdout));
        assert_eq!(heading, expected_heading, "{said}");
        for key in expected.iter().filter(|key| !key.starts_with("encrypt.")) {
            assert!(keys.contains(key), "{key} is missing: {said}");
        }
    }
    assert_eq!(std::fs::read_dir(&ours.directory).unwrap().count(), 0, "an image was made");
}

#[test]
fn rebase_is_qemu_imgs() {
    agree(REBASE);
}

#[test]
fn dd_is_qemu_imgs() {
    agree(DD);
}

#[test]
fn bench_is_qemu_imgs() {
    agree(BENCH);
}

#[test]
fn values_are_read_and_refused_as_in_qemu_img() {
    agree_on(&[("none.raw", Vec::new())], VALUES);
}

#[test]
fn the_options_before_the_verb_are_qemu_imgs() {
    if !has_tool("qemu-img") {
        return;
    }
    let dir = directory();
    let [ours, theirs] = worlds(&dir);
    for line in ["--version", "-V", "--help", "-h", "info --help", "--nope info x", "-T * create -q a.raw 1M"] {
        let (own, judge) = (ours.run(line), theirs.run(line));
        assert_eq!(own.status.code(), judge.status.code(), "{line}: {}", text(&own.stderr));
        assert_eq!(own.stdout.is_empty(), judge.stdout.is_empty(), "{line}");
    }
    assert!(text(&ours.run("--version").stdout).starts_with("qemu-img version "));
    for (line, named) in
        [("info --object secret,id=x,data=y a.raw", "--object"), ("--trace file=log info a.raw", "file=log")]
    {
        let output = ours.run(line);
        assert_eq!(output.status.code(), Some(1), "{line}");
        assert!(text(&output.stderr).contains(named), "{line}: {}", text(&output.stderr));
    }
}

#[test]
fn extended_l2_entries_are_qemu_imgs() {
    agree(EXTENDED_L2);
}

#[test]
fn external_data_files_are_qemu_imgs() {
    agree(DATA_FILE);
}

#[test]
fn snapshots_are_followed_by_zeros_on_a_disk_that_has_grown_since() {
    agree(SNAPSHOT_SIZES);
}

#[test]
fn bitmap_is_qemu_imgs() {
    agree(BITMAP);
}

/// Runs the same lines in both worlds, to the same end, and compares the bitmaps of an image. Ours call these ranges
/// dirty as well (`img-compat`: bitmaps-after-growth).
fn agree_on_bitmaps(script: &[&str], image: &str, bitmaps: &[(&str, Range<u64>)]) {
    if !has_tool("qemu-img") || !has_tool("qemu-io") {
        return;
    }
    let dir = directory();
    let worlds = worlds(&dir);
    for line in script {
        let [own, judge] = [0, 1].map(|world: usize| worlds[world].run(line));
        let said = format!("{line}\nours: {}\ntheirs: {}", text(&own.stderr), text(&judge.stderr));
        assert_eq!(own.status.code(), judge.status.code(), "{said}");
    }
    let [own, judge] = worlds.map(|world| world.directory.join(image));
    let said = |path: &Path| {
        let said = tool("qemu-img", &["info", common::path_str(path)]);
        let said = text(&said.stdout);
        without_files(&said).skip_while(|line| !line.contains("bitmaps")).map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(said(&own), said(&judge));
    for (name, added) in bitmaps {
        let bits = |path: &Path| {
            let file =
                image::Opener::open(&drive::EngineOpener::default(), &path.into(), image::Role::ReadOnly).unwrap();
            image::read_bitmap(&file, image::Format::Qcow2, name).unwrap()
        };
        let (own, judge) = (bits(&own), bits(&judge));
        assert_eq!((own.granularity_bits, own.size_bytes), (judge.granularity_bits, judge.size_bytes), "{name}");
        let granule = 1 << judge.granularity_bits;
        for at in (0..judge.size_bytes).step_by(granule as usize) {
            let is_added = at < added.end && at + granule > added.start;
            assert_eq!(own.is_set(at), judge.is_set(at) || is_added, "{name} at {at}");
        }
    }
    same_image(&own, &judge);
}

#[test]
fn bitmaps_that_each_program_writes_are_what_the_other_reads() {
    // Bitmaps that QEMU fills while it writes pass through our merge, clear and copy. Then QEMU goes on with them.
    let script = [
        "create -q -f qcow2 a.qcow2 64M",
        "bitmap --add -g 512 a.qcow2 fine",
        "bitmap --add -g 64k a.qcow2 coarse",
        "io qcow2 a.qcow2 write -P 1 1000k 3M",
        "io qcow2 a.qcow2 write -P 1 40M 512",
        "bitmap --add a.qcow2 sum",
        "bitmap --merge fine a.qcow2 sum",
        "bitmap --disable a.qcow2 coarse",
        "io qcow2 a.qcow2 write -P 1 50M 1M",
        "check a.qcow2",
    ];
    agree_on_bitmaps(&script, "a.qcow2", &[("fine", 0..0), ("coarse", 0..0), ("sum", 0..0)]);
}

#[test]
fn bitmaps_follow_the_disk_through_resize_amend_and_commit_as_qemu_imgs_do() {
    let script = [
        "create -q -f qcow2 a.qcow2 10M",
        "bitmap --add -g 4k a.qcow2 on",
        "bitmap --add -g 64k a.qcow2 off",
        "io qcow2 a.qcow2 write -P 1 9M 1M",
        "bitmap --disable a.qcow2 off",
        "resize a.qcow2 +5M",
        "io qcow2 a.qcow2 write -P 1 12M 64k",
        "resize --shrink a.qcow2 9536k",
        "amend -o size=20M a.qcow2",
        "amend -o lazy_refcounts=on a.qcow2",
        "create -q -f qcow2 -b a.qcow2 -F qcow2 over.qcow2 25M",
        "io qcow2 over.qcow2 write -P 3 1M 128k",
        "io qcow2 over.qcow2 write -P 4 24M 64k",
        "commit over.qcow2",
        "check a.qcow2",
    ];
    agree_on_bitmaps(&script, "a.qcow2", &[("on", 9536 << 10..25 << 20), ("off", 0..0)]);
}

/// As qemu-img makes them; `{secret}` is what their key is named by.
const ENCRYPTED: &[&str] = &[
    "-f qcow2 -o encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10 luks.qcow2 1M",
    "-f qcow2 -o encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10,encrypt.cipher-mode=cbc,encrypt.ivgen-alg=essiv,encrypt.ivgen-hash-alg=sha256 essiv.qcow2 1M",
    "-f qcow2 -o encrypt.format=aes,encrypt.key-secret=s aes.qcow2 1M",
];

#[test]
fn info_shows_an_encrypted_image_as_qemu_img_does_and_everything_else_refuses_it() {
    if !has_tool("qemu-img") {
        return;
    }
    let dir = directory();
    let [ours, theirs] = worlds(&dir);
    let without_version =
        |said: &str| said.lines().filter(|line| !line.contains("detached")).collect::<Vec<_>>().join("\n");
    for line in ENCRYPTED {
        let name = line.split(' ').rev().nth(1).unwrap();
        assert!(theirs.run(&format!("create -q --object secret,id=s,data=abc {line}")).status.success(), "{line}");
        std::fs::copy(theirs.directory.join(name), ours.directory.join(name)).unwrap();
        for form in ["info", "info --output=json"] {
            let (own, judge) = (ours.run(&format!("{form} {name}")), theirs.run(&format!("{form} {name}")));
            assert_eq!(own.status.code(), Some(0), "{}", text(&own.stderr));
            let [shown, expected] = [&own, &judge].map(|output| without_version(&comparable(form, &output.stdout)));
            assert_eq!(
                shown.replace("\"detached-header\":false,", ""),
                expected.replace("\"detached-header\":false,", "")
            );
        }
        for verb in ["check", "map", "measure", "snapshot -l", "amend -o size=2M", "convert -O raw"] {
            let target = if verb.starts_with("convert") { " never.raw" } else { "" };
            let output = ours.run(&format!("{verb} {name}{target}"));
            let said = text(&output.stderr);
            assert!(output.status.code() == Some(1) && said.contains("encrypted"), "{verb} {name}: {said}");
        }
    }
}

#[test]
fn amend_takes_a_size_of_zero_for_the_size_that_is_there() {
    agree(&[
        "create -q -f qcow2 a.qcow2 1M",
        "io qcow2 a.qcow2 write -P 1 0 1M",
        "amend -o size=0 a.qcow2",
        "amend -o size=0,lazy_refcounts=on a.qcow2",
        "info a.qcow2",
    ]);
}
