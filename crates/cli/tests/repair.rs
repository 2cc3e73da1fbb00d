//! `check -r`, with qemu-img as judge: the same counts, text and exit codes, and images that it finds clean.

mod common;

use common::{at, directory, has_tool, path_str, run, run_fails, text, tool, tool_ok};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Output;

const MASK: u64 = 0x00ff_ffff_ffff_fe00;
const COPIED: u64 = 1 << 63;

fn u64_at(bytes: &[u8], at: u64) -> u64 {
    u64::from_be_bytes(bytes[at as usize..at as usize + 8].try_into().unwrap())
}

/// Small images: with a snapshot, of version 2, with the narrowest refcounts, with lazy ones, with extended L2 entries.
fn images(dir: &Path) -> Vec<(&'static str, PathBuf)> {
    let all = [
        ("plain", "cluster_size=64k"),
        ("snapshot", "cluster_size=64k"),
        ("version 2", "compat=0.10,cluster_size=4k"),
        ("one bit", "cluster_size=4k,refcount_bits=1"),
        ("lazy", "cluster_size=4k,lazy_refcounts=on"),
        ("extended", "cluster_size=16k,extended_l2=on"),
    ];
    let made = all.map(|(name, options)| {
        let path = dir.join(format!("{name}.qcow2"));
        tool_ok("qemu-img", &["create", "-q", "-f", "qcow2", "-o", options, path_str(&path), "8M"]);
        let writes = ["-c", "write -P 1 64k 128k", "-c", "write -P 2 1000k 3k", "-c", "write -P 3 3M 300k"];
        tool_ok("qemu-io", &[&["-f", "qcow2"][..], &writes, &[path_str(&path)]].concat());
        if name == "snapshot" {
            tool_ok("qemu-img", &["snapshot", "-c", "one", path_str(&path)]);
            tool_ok("qemu-io", &["-f", "qcow2", "-c", "write -P 9 64k 70k", path_str(&path)]);
        }
        (name, path)
    });
    made.into()
}

/// What is done to an image: which words go to which offsets.
fn harm(good: &[u8]) -> Vec<(&'static str, Vec<(u64, u64)>)> {
    let (l1, table) = (u64_at(good, 40), u64_at(good, 48));
    let (l2, block) = (u64_at(good, l1) & MASK, u64_at(good, table));
    let cluster = 1u64 << good[23];
    let used = (0..).map(|index| l2 + index * 8).find(|at| u64_at(good, *at) & MASK != 0).unwrap();
    let entry = u64_at(good, used);
    let end = (good.len() as u64).next_multiple_of(cluster);
    let mut cases = vec![
        ("nothing", vec![]),
        ("a wrong flag of a cluster", vec![(used, entry ^ COPIED)]),
        ("a wrong flag of a table", vec![(l1, u64_at(good, l1) ^ COPIED)]),
        ("a cluster is forgotten", vec![(used, 0)]),
        ("two entries lead to one cluster", vec![(used, u64_at(good, used + 8))]),
        ("an entry leads into L1", vec![(used, l1 | COPIED)]),
        ("an entry leads behind the end", vec![(used, (end + 16 * cluster) | COPIED)]),
        ("refcounts are zero", vec![(block, 0)]),
        ("refcounts are wrong", vec![(block, 0x0002_0003_0004_0005)]),
        ("a table is forgotten", vec![(l1, 0)]),
        ("a reserved bit", vec![(used, 1 << 56)]),
        ("a cluster that the file ends before", vec![(used, end | COPIED)]),
        ("no refcount block", vec![(table, 0)]),
        ("a refcount block behind the file", vec![(table + 8, end + 64 * cluster)]),
        (
            "a refcount block behind the file that is counted",
            vec![(table + 56, end + cluster), (block + (end / cluster + 1) / 4 * 8, 0x0003_0003_0003_0003)],
        ),
        ("a refcount block in an L2 table", vec![(table + 8, l2)]),
        ("a preallocated cluster off the clusters", vec![(used, (entry & MASK) + 512 + 1)]),
        ("a data cluster off the clusters", vec![(used, entry + 512)]),
    ];
    if good[79] & 16 != 0 {
        let bitmap = u64_at(good, used + 8);
        cases.extend([
            ("a part is both", vec![(used + 8, bitmap | bitmap << 32)]),
            ("parts of a cluster that is not there", vec![(used, 0), (used + 8, bitmap)]),
            ("zero parts off the clusters", vec![(used, entry + 512), (used + 8, !0 << 32)]),
            ("a zero flag", vec![(used, entry | 1)]),
            ("a compressed cluster with parts", vec![(used, 1 << 62 | (entry & MASK))]),
        ]);
    }
    if good[7] == 3 {
        cases.push(("marked corrupt", vec![(72, 2)]));
        cases.push((
            "dirty, with leaks and low refcounts",
            vec![(72, 1), (used, 0), (block + 16, 0x0001_0000_0001_0001)],
        ));
    }
    cases
}

struct Outcome {
    output: Output,
    /// What qemu-img finds and reads afterwards.
    after: (Option<i32>, Value),
    data: Option<Vec<u8>>,
}

fn outcome(bytes: &[u8], image: &Path, arguments: &[&str], repair: impl Fn(&[&str]) -> Output) -> Outcome {
    std::fs::write(image, bytes).unwrap();
    let output = repair(&[arguments, &[path_str(image)]].concat());
    let judged = tool("qemu-img", &["check", "--output=json", "-f", "qcow2", path_str(image)]);
    let raw = image.with_extension("raw");
    let read = tool("qemu-img", &["convert", "-f", "qcow2", "-O", "raw", path_str(image), path_str(&raw)]);
    let json = serde_json::from_slice(&judged.stdout).unwrap_or(Value::Null);
    let data = read.status.success().then(|| std::fs::read(&raw).unwrap());
    Outcome { output, after: (judged.status.code(), json), data }
}

#[test]
fn check_repairs_what_qemu_img_repairs_with_the_same_counts_and_the_same_guest_data() {
    if !has_tool("qemu-img") {
        return;
    }
    let dir = directory();
    let image = at(&dir, "damaged.qcow2");
    let mut gave_up = 0;
    for (name, path) in images(dir.path()) {
        let good = std::fs::read(path).unwrap();
        for (index, (harm, changes)) in harm(&good).into_iter().enumerate() {
            let mut bytes = good.clone();
            for (at, value) in changes {
                bytes[at as usize..at as usize + 8].copy_from_slice(&value.to_be_bytes());
            }
            // Both programs run on each, once with output for people and once with output for programs.
            for (how, form) in [("leaks", index % 2 == 0), ("all", index % 2 == 1)] {
                if how == "leaks" && !["plain", "lazy"].contains(&name) {
                    continue;
                }
                let form = if form { "--output=human" } else { "--output=json" };
                let arguments = ["check", form, "-f", "qcow2", "-r", how];
                let theirs = outcome(&bytes, &image, &arguments, |arguments| tool("qemu-img", arguments));
                let ours = outcome(&bytes, &image, &arguments, run);
                let said =
                    |outcome: &Outcome| format!("{}{}", text(&outcome.output.stdout), text(&outcome.output.stderr));
                let what = format!("{name}: {harm}, -r {how}\nours: {}\ntheirs: {}", said(&ours), said(&theirs));
                if !theirs.output.status.success() && ours.output.status.success() {
                    // qemu-img does not always get to the end of what it can repair.
                    assert_eq!(ours.after.0, Some(0), "{what}");
                    assert!(
                        theirs.data.is_none() || ours.data == theirs.data,
                        "{what}: the guest reads something else"
                    );
                    gave_up += 1;
                    continue;
                }
                assert_eq!(ours.output.status.code(), theirs.output.status.code(), "{what}");
                if form == "--output=human" {
                    assert_eq!(text(&ours.output.stdout), text(&theirs.output.stdout), "{what}");
                } else {
                    let parse = |outcome: &Outcome| serde_json::from_slice::<Value>(&outcome.output.stdout).ok();
                    assert_eq!(parse(&ours), parse(&theirs), "{what}");
                }
                assert_eq!(ours.after, theirs.after, "{what}");
                assert!(ours.data == theirs.data, "{what}: the guest reads something else");
            }
        }
    }
    assert!(gave_up < 10, "{gave_up} times nothing was compared");
    let said = run_fails(1, &["check", "-r", "some", path_str(&image)]);
    assert!(said.contains("leaks or all"), "{said}");
}

#[test]
fn nothing_is_copied_into_an_image_whose_refcounts_deny_data_that_are_there() {
    if !has_tool("qemu-img") || !has_tool("qemu-io") {
        return;
    }
    let dir = directory();
    let at = |name: &str| dir.path().join(name);
    let (base, over, raw) = (at("base.qcow2"), at("over.qcow2"), at("new.raw"));
    tool_ok("qemu-img", &["create", "-q", "-f", "qcow2", path_str(&base), "1M"]);
    tool_ok("qemu-io", &["-f", "qcow2", "-c", "write -P 7 0 128k", path_str(&base)]);
    tool_ok("qemu-img", &["create", "-q", "-f", "qcow2", "-b", path_str(&base), "-F", "qcow2", path_str(&over)]);
    tool_ok("qemu-io", &["-f", "qcow2", "-c", "write -P 9 512k 128k", path_str(&over)]);
    std::fs::write(&raw, vec![5_u8; 1 << 20]).unwrap();
    let mut bytes = std::fs::read(&base).unwrap();
    let block = u64_at(&bytes, u64_at(&bytes, 48)) as usize;
    // Of the two clusters of data: they are the last ones.
    assert!(bytes[block + 8..block + 14] == [0, 1, 0, 1, 0, 1], "the last two are data");
    bytes[block + 10..block + 14].fill(0);
    std::fs::write(&base, &bytes).unwrap();
    let commit = ["commit", path_str(&over)];
    for line in [&commit[..], &["convert", "-n", "-f", "raw", "-O", "qcow2", path_str(&raw), path_str(&base)]] {
        let said = run_fails(1, line);
        assert!(said.contains("refcounts deny"), "{line:?}: {said}");
        assert!(std::fs::read(&base).unwrap() == bytes, "{line:?} has changed it");
    }
    if has_tool("nbdkit") {
        // The same at a server.
        let socket = at("nbd");
        let (uri, file) = (format!("nbd+unix:///?socket={}", path_str(&socket)), format!("file={}", path_str(&base)));
        let mut server = std::process::Command::new("nbdkit");
        server.args(["-f", "-U", path_str(&socket), "file", &file]);
        let mut server = server.spawn().unwrap();
        while !socket.exists() {
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        let said = run_fails(1, &["convert", "-n", "-f", "raw", "-O", "qcow2", path_str(&raw), &uri]);
        server.kill().unwrap();
        server.wait().unwrap();
        assert!(said.contains("refcounts deny"), "{said}");
        assert!(std::fs::read(&base).unwrap() == bytes, "it was changed at the server");
    }
    assert!(run(&["check", "-r", "all", path_str(&base)]).status.success());
    assert!(run(&commit).status.success());
    let reads = tool_ok("qemu-io", &["-r", "-c", "read -P 7 0 128k", "-c", "read -P 9 512k 128k", path_str(&base)]);
    assert!(!reads.contains("failed"), "{reads}");
}
