//! The checker agrees with qemu-img about sound images, and notices damage.

use ringdisk_testkit::qcow2_check;
use std::path::Path;
use std::process::Command;

/// False where the tool is missing: a counted skip by hand, an error in CI.
fn qemu(arguments: &[&str], directory: &Path) -> bool {
    match Command::new("qemu-img").args(arguments).current_dir(directory).output() {
        Ok(output) => {
            assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
            true
        }
        Err(_) => {
            assert!(std::env::var_os("CI").is_none(), "qemu-img is missing (Debian package qemu-utils)");
            eprintln!("skipped: qemu-img is missing (Debian package qemu-utils)");
            false
        }
    }
}

fn image(options: &str) -> Option<Vec<u8>> {
    let directory = tempfile::tempdir().unwrap();
    let at = directory.path();
    let raw: Vec<u8> = (0..1 << 20).map(|at: u32| if at % 65536 < 9000 { (at / 7) as u8 } else { 0 }).collect();
    std::fs::write(at.join("raw"), raw).unwrap();
    let compressed = options.starts_with("-c ");
    let options = options.trim_start_matches("-c ");
    let mut arguments = vec!["convert", "-f", "raw", "-O", "qcow2", "-o", options, "raw", "image"];
    if compressed {
        arguments.insert(1, "-c");
    }
    let made = qemu(&arguments, at) && qemu(&["snapshot", "-c", "one", "image"], at);
    made.then(|| std::fs::read(at.join("image")).unwrap())
}

#[test]
fn images_of_qemu_are_sound_and_without_leaks() {
    for options in [
        "cluster_size=64k",
        "cluster_size=512",
        "cluster_size=4k,refcount_bits=2",
        "cluster_size=4k,refcount_bits=64",
        "cluster_size=4k,compat=0.10",
        "cluster_size=2M",
        "-c cluster_size=64k",
        "-c cluster_size=4k,compression_type=zstd",
    ] {
        let Some(bytes) = image(options) else { return };
        let report = qcow2_check(&bytes).unwrap();
        report.sound().unwrap();
        assert!(report.leaked_clusters == 0 && report.used_clusters > 4, "{options}: {report:?}");
    }
}

#[test]
fn damage_is_told_from_leaks() {
    let Some(bytes) = image("cluster_size=4k,refcount_bits=8") else { return };
    let long = |at: usize| u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap()) & 0x00ff_ffff_ffff_fe00;
    let (refcount_block, l2) = (long(long(48) as usize) as usize, long(long(40) as usize) as usize);
    let data = (long(l2) / 4096) as usize;
    let broken = |at: usize, value: u8| {
        let mut bytes = bytes.clone();
        bytes[at] = value;
        qcow2_check(&bytes).unwrap()
    };
    assert!(!broken(refcount_block + data, 1).damage.is_empty(), "a refcount too low");
    let high = broken(refcount_block + data, 3);
    assert!(high.damage.is_empty() && high.leaked_clusters == 1, "{high:?}");
    let unused = broken(refcount_block + 4000, 1);
    assert!(unused.damage.is_empty() && unused.leaked_clusters == 1, "{unused:?}");
    assert!(!broken(l2 + 7, 2).damage.is_empty(), "a reserved bit");
    assert!(!broken(l2, 0x80).damage.is_empty(), "the copied flag with a refcount of two");
    assert!(!broken(l2 + 3, 1).damage.is_empty(), "a cluster behind the end of the file");
    let digest = |bytes: &[u8]| qcow2_check(bytes).unwrap().snapshots_digest;
    let mut changed = bytes.clone();
    changed[data * 4096 + 100] ^= 1;
    assert_ne!(digest(&changed), digest(&bytes), "a snapshot's data");
}
