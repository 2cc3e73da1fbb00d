//! With cache mode none, tools leave the host's page cache as it was.

mod common;

use common::{has_tool, path_str, run, run_ok, text, tool_ok};
use std::path::Path;

const BYTES: usize = 6 << 20;
/// In the end the kernel decides what the page cache holds, above all if memory is short.
const TRIES: u32 = 5;

/// How many bytes of a file are in the page cache.
fn cached_bytes(path: &Path) -> u64 {
    let said = tool_ok("fincore", &["--bytes", "--noheadings", "--output", "RES", path_str(path)]);
    said.trim().parse().unwrap()
}

/// How many of its bytes are in the page cache, if that is right; otherwise a complaint.
fn cached(path: &Path, is_right: impl Fn(u64) -> bool) -> Result<u64, String> {
    let bytes = cached_bytes(path);
    is_right(bytes).then_some(bytes).ok_or_else(|| format!("{}: {bytes} bytes in the page cache", path.display()))
}

/// Makes the file durable and forgets its pages.
fn forget(path: &Path) {
    tool_ok("sync", &[path_str(path)]);
    tool_ok("dd", &[&format!("if={}", path_str(path)), "iflag=nocache", "count=0", "status=none"]);
}

#[test]
fn copying_and_comparing_past_the_page_cache_leave_nothing_in_it_and_throw_nothing_out() {
    if !has_tool("fincore") || !has_tool("dd") {
        return;
    }
    let mut complaints = Vec::new();
    for _ in 0..TRIES {
        // This is where the build lies. Directories of temporary files may have no direct I/O.
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        match past_the_page_cache(dir.path()) {
            Ok(()) => return,
            Err(complaint) => complaints.push(complaint),
        }
    }
    panic!("something in every one of {TRIES} tries:\n{}", complaints.join("\n"));
}

/// Runs it in an empty directory. Only the page cache may be wrong at first; everything else must be right at once.
fn past_the_page_cache(dir: &Path) -> Result<(), String> {
    let at = |name: &str| dir.join(name);
    let raw = at("s.raw");
    std::fs::write(&raw, (0..BYTES).map(|index| (index / 777 % 255) as u8).collect::<Vec<_>>()).unwrap();
    forget(&raw);
    let convert = |flags: &[&str], source: &Path, format: &str, target: &Path| {
        let formats = ["-f", if format == "raw" { "qcow2" } else { "raw" }, "-O", format];
        run(&[&["convert"], flags, &formats, &[path_str(source), path_str(target)]].concat())
    };
    let direct = ["-T", "none", "-t", "none"];
    let [qcow2, packed, back, part] = ["t.qcow2", "c.qcow2", "t.raw", "p.raw"].map(at);
    let first = convert(&direct, &raw, "qcow2", &qcow2);
    if !first.status.success() && text(&first.stderr).contains("no direct I/O") {
        // It says so, and leaves no half of a target.
        assert!(!qcow2.exists());
        return Ok(());
    }
    assert!(first.status.success(), "{}", text(&first.stderr));
    assert!(convert(&[&direct[..], &["-c"]].concat(), &raw, "qcow2", &packed).status.success());
    assert!(convert(&direct, &qcow2, "raw", &back).status.success());
    run_ok(&[
        "dd",
        "-T",
        "none",
        "-t",
        "none",
        "-f",
        "raw",
        "bs=1M",
        "skip=1",
        &format!("if={}", path_str(&raw)),
        &format!("of={}", path_str(&part)),
    ]);
    let same = ["compare", "-T", "none", "-f", "raw", "-F", "qcow2", path_str(&raw)];
    for image in [&qcow2, &packed] {
        assert_eq!(run_ok(&[&same[..], &[path_str(image)]].concat()), "Images are identical.\n");
    }
    for path in [&raw, &qcow2, &packed, &back, &part] {
        cached(path, |bytes| bytes == 0)?;
    }
    // What was there stays there.
    assert_eq!(std::fs::read(&raw).unwrap().len(), BYTES);
    let before = cached(&raw, |bytes| bytes >= BYTES as u64)?;
    assert!(convert(&direct, &raw, "qcow2", &qcow2).status.success());
    cached(&raw, |after| after * 2 >= before)?;
    cached(&qcow2, |bytes| bytes == 0)?;
    // The test can tell the difference: without the option, the page cache takes part.
    forget(&raw);
    assert!(convert(&[], &raw, "qcow2", &qcow2).status.success());
    for path in [&raw, &qcow2] {
        cached(path, |bytes| bytes > 0)?;
    }
    Ok(())
}
