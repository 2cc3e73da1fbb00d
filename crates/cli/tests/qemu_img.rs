//! The same command lines through both programs that are called qemu-img: the same output, exit codes and images.

mod common;

use common::{directory, has_tool, text, tool};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use tempfile::TempDir;

/// Command lines of qemu-img, or `io FORMAT FILE COMMAND` for qemu-io's, which is the same program in both worlds. Two
/// apostrophes are an empty word.
const BASIC: &[&str] = &[
    "create -q -f qcow2 a.qcow2 10M",
    "create -f raw a.raw 10M",
    "create -q -f qcow2 -o cluster_size=4k,compat=0.10 b.qcow2 8M",
    "io qcow2 a.qcow2 write -P 1 0 128k",
    "io qcow2 a.qcow2 write -z 1M 1M",
    "io raw a.raw write -P 1 0 128k",
    "info a.qcow2",
    "info --output=json a.qcow2",
    "info --output json a.raw",
    "info --out=json -f raw a.raw",
    "info a.raw",
    "info -U a.qcow2",
    "info --image-opts driver=qcow2,file.driver=file,file.filename=a.qcow2",
    "info --force-share -f raw a.raw",
    "map a.qcow2",
    "map --output=json a.qcow2",
    "map --output=json -f raw a.raw",
    "map -U --image-opts driver=raw,file.filename=a.raw",
    "map --start-offset=64k --max-length=1M --output=json a.qcow2",
    "map --start-offset=64k --max-length=64k a.qcow2",
    "check a.qcow2",
    "check -q a.qcow2",
    "check --output=json a.qcow2",
    "check a.raw",
    "check -T none -U a.qcow2",
    "check --image-opts driver=qcow2,file.filename=b.qcow2",
    "compare a.qcow2 a.raw",
    "compare -s a.qcow2 a.raw",
    "compare -q -f qcow2 -F raw a.qcow2 a.raw",
    "compare -p -T writeback -U a.qcow2 a.raw",
    "compare a.qcow2 b.qcow2",
    "measure -O qcow2 a.raw",
    "measure --output=json -O raw a.qcow2",
    "measure --size 1G -O qcow2",
    "resize -f raw a.raw +1M",
    "resize -f raw --shrink a.raw 9M",
    "resize -q -f raw a.raw 10M",
    "resize -f raw a.raw 1M",
];

const ERRORS: &[&str] = &[
    "",
    "frob",
    "info",
    "info missing",
    "info --output=xml a",
    "info --foo",
    "info -z",
    "convert",
    "convert x",
    "convert -t foo x y",
    "convert -m 99 x y",
    "compare x",
    "compare x missing",
    "check missing",
    "create",
    "create -f nope x 1M",
    "create -f qcow2 x",
    "create -f qcow2 x 1Q",
    "resize x",
    "resize missing 1M",
    "dd if=x",
    "dd foo=bar if=x of=y",
    "rebase x",
    "rebase -b foo",
    "commit x",
    "commit",
    "map missing",
    "measure",
    "measure --size foo",
    "bitmap x",
    "snapshot",
    "amend x",
    "create -q -f raw a.raw 1M",
    "rebase -b foo a.raw",
    "rebase -f raw -b '' a.raw",
    "commit -f raw a.raw",
    "info --image-opts a.raw",
    "info --image-opts -f raw driver=raw,file.filename=a.raw",
    "info --image-opts driver=raw,file.filename=a.raw,foo=1",
];

const CONVERT: &[&str] = &[
    "create -q -f raw s.raw 8M",
    "io raw s.raw write -P 1 0 128k",
    "io raw s.raw write -P 2 3000k 3k",
    "io raw s.raw write -z 5M 1M",
    "convert -f raw -O qcow2 s.raw s.qcow2",
    "convert -O raw s.qcow2 t.raw",
    "convert -p -f raw -O qcow2 -o cluster_size=4k s.raw u.qcow2",
    "convert -q -W -m 4 -S 64k -T none -t none -O qcow2 s.qcow2 v.qcow2",
    "create -q -f raw n.raw 8M",
    "convert -n -f raw -O raw s.raw n.raw",
    "convert -n --target-is-zero -f raw -O raw s.raw n.raw",
    "convert --target-is-zero -f raw -O raw s.raw n.raw",
    "convert -S 0 -f raw -O qcow2 s.raw full.qcow2",
    "convert -U -f raw -O qcow2 s.raw share.qcow2",
    "convert --image-opts -O qcow2 driver=raw,file.filename=s.raw io.qcow2",
    "convert -t unsafe -O qcow2 s.qcow2 w.qcow2",
    "convert -C -f raw -O raw s.raw c.raw",
    "convert -C -S 4k -f raw -O raw s.raw d.raw",
    "convert -r 500M -f raw -O raw s.raw r.raw",
    "convert -r foo -f raw -O raw s.raw q.raw",
    "convert -f raw -O qcow2 -B s.raw -F raw s.raw over.qcow2",
    "convert -C -f raw -O qcow2 s.raw c.qcow2",
    "convert -C -O raw s.qcow2 d.raw",
    "convert -C -c -f raw -O qcow2 s.raw e.qcow2",
    "convert -C --salvage -f raw -O qcow2 s.raw e.qcow2",
    "convert --salvage -f raw -O qcow2 s.raw f.qcow2",
    "create -q -f qcow2 to.qcow2 8M",
    "convert --target-image-opts -f raw s.raw driver=qcow2,file.filename=to.qcow2",
    "convert -n --target-image-opts -f raw s.raw driver=qcow2,file.filename=to.qcow2",
    "convert -n --target-image-opts -O qcow2 -f raw s.raw driver=qcow2,file.filename=to.qcow2",
    "convert -n --target-image-opts --image-opts driver=raw,file.filename=s.raw driver=raw,file.filename=n.raw",
    "convert -n --target-image-opts -f raw s.raw driver=qcow2,file.filename=missing",
    "convert -n --target-image-opts -f raw s.raw to.qcow2",
    "convert -n -o cluster_size=4k -f raw -O qcow2 s.raw to.qcow2",
];

const CONCATENATE: &[&str] = &[
    "create -q -f qcow2 q.qcow2 1M",
    "io qcow2 q.qcow2 write -P 5 100k 300k",
    "convert -f raw odd.raw big.raw two.raw",
    "convert -p -f raw -O qcow2 odd.raw big.raw odd.raw three.qcow2",
    "convert -f raw -c -O qcow2 odd.raw big.raw packed.qcow2",
    "convert -f raw -C -O qcow2 -o cluster_size=4k big.raw odd.raw big.raw host.qcow2",
    "convert -f raw -S 0 odd.raw odd.raw full.raw",
    "convert q.qcow2 q.qcow2 twice.raw",
    "convert -f qcow2 q.qcow2 big.raw bad.raw",
    "convert -f raw big.raw missing.raw bad.raw",
    "convert -f raw -O qcow2 -B big.raw -F raw odd.raw big.raw over.qcow2",
    "create -q -f raw small.raw 1M",
    "convert -n -f raw big.raw odd.raw small.raw",
    "snapshot -c one q.qcow2",
    "io qcow2 q.qcow2 write -P 6 0 1M",
    "convert -l one q.qcow2 q.qcow2 s.raw",
    "convert -l snapshot.name=one q.qcow2 q.qcow2 t.raw",
    "convert --image-opts driver=raw,file.filename=odd.raw driver=qcow2,file.filename=q.qcow2 u.raw",
];

const SALVAGE: &[&str] =
    &["convert --salvage bad.raw a.raw", "convert --salvage -O qcow2 -S 0 bad.raw b.qcow2", "check -q b.qcow2"];

const COMMIT: &[&str] = &[
    "create -q -f raw base.raw 4M",
    "io raw base.raw write -P 9 0 4M",
    "create -q -f qcow2 -b base.raw -F raw mid.qcow2 6M",
    "io qcow2 mid.qcow2 write -P 3 1M 2M",
    "io qcow2 mid.qcow2 write -z 512k 64k",
    "create -q -f qcow2 -b mid.qcow2 -F qcow2 top.qcow2",
    "io qcow2 top.qcow2 write -P 4 2M 2M",
    "info --backing-chain top.qcow2",
    "info --backing-chain --output=json top.qcow2",
    "map --output=json top.qcow2",
    "commit -d top.qcow2",
    "map top.qcow2",
    "commit top.qcow2",
    "map --output=json top.qcow2",
    "io qcow2 top.qcow2 write -P 5 5M 64k",
    "commit -b nowhere top.qcow2",
    "commit -q -b base.raw top.qcow2",
    "map --output=json top.qcow2",
    "commit -p -r 100M -t writeback mid.qcow2",
    "commit -f qcow2 mid.qcow2",
    "map --output=json top.qcow2",
    "commit base.raw",
];

const REBASE: &[&str] = &[
    "create -q -f raw base.raw 4M",
    "io raw base.raw write -P 9 0 4M",
    "create -q -f raw other.raw 3M",
    "io raw other.raw write -P 9 0 1M",
    "create -q -f qcow2 -b base.raw -F raw top.qcow2 6M",
    "io qcow2 top.qcow2 write -P 3 1M 512k",
    "rebase -b other.raw top.qcow2",
    "rebase -b other.raw -F raw top.qcow2",
    "info top.qcow2",
    "rebase -p -b base.raw -F raw -t none -T none top.qcow2",
    "rebase -u -b nonexistent -F raw top.qcow2",
    "info top.qcow2",
    "rebase -b base.raw -F raw top.qcow2",
    "rebase -u -b base.raw -F raw top.qcow2",
    "rebase -b missing.raw -F raw top.qcow2",
    "rebase -b top.qcow2 -F qcow2 top.qcow2",
    "rebase -q -U -b '' top.qcow2",
    "info --output=json top.qcow2",
    "rebase -b base.raw -F raw top.qcow2",
    "rebase -u top.qcow2",
];

const DD: &[&str] = &[
    "create -q -f raw s.raw 1M",
    "io raw s.raw write -P 1 0 600k",
    "dd -f raw if=s.raw of=a.raw",
    "dd -f raw if=s.raw of=b.raw bs=1000 count=3",
    "dd -f raw if=s.raw of=c.raw bs=4k skip=3",
    "dd -f raw if=s.raw of=d.raw bs=4k skip=3 count=10",
    "dd -f raw if=s.raw of=e.raw bs=1k skip=5000",
    "dd -f raw -O qcow2 if=s.raw of=f.qcow2 bs=64k",
    "dd -U --image-opts -O qcow2 if=driver=raw,file.filename=s.raw of=g.qcow2 count=8 bs=1k",
    "dd -f raw if=s.raw of=g.raw bs=0",
    "dd -f raw if=s.raw",
    "dd -f raw if=missing of=x",
];

const BENCH: &[&str] = &[
    "create -q -f raw s.raw 1M",
    "bench -f raw -c 100 s.raw",
    "bench -f raw -w -c 100 -d 8 -s 8k -S 64k -o 4k --pattern=7 --flush-interval=16 s.raw",
    "bench -f raw -w -c 100 --no-drain --flush-interval=64 -i threads -t writeback s.raw",
    "bench -f raw -q -U -n -t none -c 3 s.raw",
    "bench -f raw -c 3 -s 2M s.raw",
    "bench -f raw -c 3 --flush-interval=2 s.raw",
    "bench -f raw -c 3 -i nope s.raw",
];

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

/// Output without what no two runs have in common.
fn comparable(line: &str, output: &[u8]) -> String {
    let said = text(output);
    if let Ok(mut value) = serde_json::from_str::<Value>(&said) {
        forget(&mut value);
        return value.to_string();
    }
    let said = if line.split(' ').any(|word| word == "-p") { without_progress(&said) } else { said };
    let kept = said.lines().filter(|line| !line.starts_with("disk size:")).map(|line| match line {
        line if line.starts_with("Run completed in") => "Run completed",
        line => line,
    });
    kept.collect::<Vec<_>>().join("\n")
}

fn without_progress(said: &str) -> String {
    assert!(said.contains("    (100.00/100%)\r"), "no progress to its end: {said:?}");
    let parts = said.split('\r').filter(|part| !part.trim_start().starts_with('('));
    parts.collect::<String>().trim().to_owned()
}

/// Allocation is the file system's affair; newer versions tell more.
fn forget(value: &mut Value) {
    match value {
        Value::Object(map) => {
            map.remove("actual-size");
            map.remove("compressed");
            map.values_mut().for_each(forget);
        }
        Value::Array(values) => values.iter_mut().for_each(forget),
        _ => {}
    }
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
            assert_eq!(comparable(line, &own.stdout), comparable(line, &judge.stdout), "{said}");
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
    let [ours, theirs] = [ours, theirs].map(common::path_str);
    let said = tool("qemu-img", &["compare", "-s", "-f", format, "-F", format, ours, theirs]);
    // Not strict where only allocation differs: it is the file system's affair, or better than it was.
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
fn convert_is_qemu_imgs() {
    agree(CONVERT);
}

/// Bytes that are not alike, and `length` of them.
fn numbered(length: usize) -> Vec<u8> {
    (0..length).map(|index| (index / 512 % 251) as u8 + 1).collect()
}

#[test]
fn several_sources_become_one_disk_as_in_qemu_img() {
    // Neither is a whole number of sectors, nor of clusters.
    agree_on(&[("odd.raw", numbered(1000)), ("big.raw", numbered((3 << 20) + 5000))], CONCATENATE);
}

/// An image whose second cluster, compressed, cannot be decompressed.
fn with_an_unreadable_cluster() -> Vec<u8> {
    let dir = directory();
    let [raw, image] = ["s.raw", "s.qcow2"].map(|name| common::at(&dir, name));
    std::fs::write(&raw, numbered(300_000)).unwrap();
    let convert = ["convert", "-c", "-f", "raw", "-O", "qcow2", common::path_str(&raw), common::path_str(&image)];
    common::tool_ok("qemu-img", &convert);
    let mut bytes = std::fs::read(image).unwrap();
    let word = |bytes: &[u8], at: usize| u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap());
    let l1 = word(&bytes, 40) as usize;
    let l2 = (word(&bytes, l1) & 0x00ff_ffff_ffff_fe00) as usize;
    let entry = word(&bytes, l2 + 8);
    assert_eq!(entry >> 62, 1, "compressed");
    // A block of a type that there is not.
    bytes[(entry & ((1 << 54) - 1)) as usize] = 0xff;
    bytes
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
    // A table that leads nowhere takes with it what it leads to, and nothing else.
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
    agree(COMMIT);
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

const BITMAP: &[&str] = &[
    "create -q -f qcow2 bm.qcow2 10M",
    "create -q -f qcow2 -o cluster_size=4k bm2.qcow2 10M",
    "create -q -f qcow2 -o compat=0.10 old.qcow2 10M",
    "create -q -f raw bm.raw 10M",
    "bitmap --add bm.qcow2 b0",
    "bitmap --add -g 4k bm.qcow2 b1",
    "bitmap --add bm.qcow2 b0",
    "bitmap --add --disable bm.qcow2 b2",
    "info bm.qcow2",
    "info --output=json bm.qcow2",
    "bitmap --remove bm.qcow2 nope",
    "io qcow2 bm2.qcow2 write -P 1 100k 64k",
    "bitmap --add -g 512 -f qcow2 bm2.qcow2 b1",
    "check -q bm2.qcow2",
    "bitmap --merge b1 -b bm2.qcow2 -F qcow2 bm.qcow2 b0",
    "bitmap --merge nope bm.qcow2 b0",
    "bitmap --merge b1 --enable bm.qcow2 b2",
    "bitmap --clear bm.qcow2 b2",
    "bitmap bm.qcow2 b0",
    "bitmap --add -g 3k bm.qcow2 b9",
    "bitmap --add -g 1 bm.qcow2 b9",
    "bitmap --add -f raw bm.raw b0",
    "bitmap --add old.qcow2 b0",
    "bitmap --add -b bm2.qcow2 bm.qcow2 b7",
    "bitmap --clear -g 4k bm.qcow2 b1",
    "bitmap --add --enable --disable --clear --image-opts driver=qcow2,file.filename=bm.qcow2 b5",
    "bitmap --remove --add bm.qcow2 b5",
    "info bm.qcow2",
    "check -q bm.qcow2",
    "measure -O qcow2 bm.qcow2",
    "measure --output=json -O qcow2 -o cluster_size=4k bm.qcow2",
    "convert --bitmaps -O qcow2 bm.qcow2 copy.qcow2",
    "info copy.qcow2",
    "convert --bitmaps -f raw -O qcow2 bm.raw copy2.qcow2",
    "bitmap --remove bm.qcow2 b0",
    "bitmap --remove bm.qcow2 b1",
    "bitmap --remove bm.qcow2 b2",
    "bitmap --remove bm.qcow2 b5",
    "info bm.qcow2",
];

#[test]
fn bitmap_is_qemu_imgs() {
    agree(BITMAP);
}

#[test]
fn bitmaps_that_each_program_writes_are_what_the_other_reads() {
    if !has_tool("qemu-img") || !has_tool("qemu-io") {
        return;
    }
    let dir = directory();
    let [ours, theirs] = worlds(&dir);
    // What QEMU notes while it writes comes through our merge, clear and copy, and QEMU goes on with it.
    for line in [
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
    ] {
        for world in [&ours, &theirs] {
            let output = world.run(line);
            assert!(output.status.success(), "{line}: {}", text(&output.stderr));
        }
    }
    let [own, judge] = [&ours, &theirs].map(|world| world.directory.join("a.qcow2"));
    for name in ["fine", "coarse", "sum"] {
        let bits = |path: &Path| {
            let file = image::Opener::open(&daemon::EngineOpener::default(), path, image::Role::ReadOnly).unwrap();
            image::read_bitmap(&file, image::Format::Qcow2, name).unwrap()
        };
        assert_eq!(bits(&own), bits(&judge), "{name}");
    }
}
