//! Images that are named through a symbolic link in another directory: what they name lies beside the link, for every
//! verb, as in qemu-img.

mod common;

use common::{at, directory, has_tool, path_str, run_fails, run_ok, tool_ok};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

const DISK_BYTES: usize = 1 << 20;

/// Two directories with raw files of the same names but other contents: a file in `pool` holds its number, one in
/// `store` its number and ten. In `pool` there is also a link to an image in `store`, or to where one will be.
fn pool_and_store(dir: &TempDir, filled: &[(&str, u8)]) -> [PathBuf; 2] {
    let [pool, store] = ["pool", "store"].map(|name| at(dir, name));
    for (place, more) in [(&pool, 0), (&store, 10)] {
        std::fs::create_dir(place).unwrap();
        for (name, byte) in filled {
            std::fs::write(place.join(name), vec![byte + more; DISK_BYTES]).unwrap();
        }
    }
    symlink("../store/vm.qcow2", pool.join("vm.qcow2")).unwrap();
    [pool.join("vm.qcow2"), store.join("vm.qcow2")]
}

/// What the guest sees, by us and by qemu-img.
fn assert_holds(dir: &TempDir, image: &Path, byte: u8) {
    let copy = at(dir, "copy");
    run_ok(&["convert", "-f", "qcow2", "-O", "raw", path_str(image), path_str(&copy)]);
    assert!(std::fs::read(&copy).unwrap() == vec![byte; DISK_BYTES], "{} does not hold {byte}", image.display());
    if has_tool("qemu-img") {
        tool_ok("qemu-img", &["compare", "-f", "qcow2", "-F", "raw", path_str(image), path_str(&copy)]);
    }
}

#[test]
fn a_new_image_is_opened_over_the_backing_file_that_it_was_made_with() {
    let dir = directory();
    let [link, image] = pool_and_store(&dir, &[("base.raw", 1)]);
    run_ok(&["create", "-f", "qcow2", "-b", "base.raw", "-F", "raw", path_str(&link)]);
    assert_holds(&dir, &link, 1);
    assert_holds(&dir, &image, 11);
    let listed = run_ok(&["info", "--backing-chain", path_str(&link)]);
    let base = path_str(&link).replace("vm.qcow2", "base.raw");
    assert!(listed.contains(&format!("image: {base}\n")), "{listed}");
}

#[test]
fn a_rebase_compares_with_the_file_that_is_opened_later() {
    let dir = directory();
    let [link, image] = pool_and_store(&dir, &[("base.raw", 1), ("new.raw", 1)]);
    std::fs::write(link.with_file_name("new.raw"), vec![2; DISK_BYTES]).unwrap();
    run_ok(&["create", "-f", "qcow2", "-b", "base.raw", "-F", "raw", path_str(&image), "1M"]);
    for new in ["new.raw", "base.raw"] {
        run_ok(&["rebase", "-b", new, "-F", "raw", path_str(&link)]);
        assert_holds(&dir, &link, 1);
    }
}

#[test]
fn the_data_file_that_is_written_is_the_one_that_was_made() {
    let dir = directory();
    let [link, image] = pool_and_store(&dir, &[("d.raw", 3), ("source.raw", 4)]);
    let [mine, other] = [&link, &image].map(|path| path.with_file_name("d.raw"));
    std::fs::remove_file(&mine).unwrap();
    let source = link.with_file_name("source.raw");
    run_ok(&["convert", "-O", "qcow2", "-o", "data_file=d.raw", "-f", "raw", path_str(&source), path_str(&link)]);
    assert!(std::fs::read(&other).unwrap() == vec![13; DISK_BYTES]);
    assert!(std::fs::read(&mine).unwrap() == vec![4; DISK_BYTES]);
    // qemu-img would look for it from its working directory.
    let compare = ["compare", "-f", "qcow2", "-F", "raw", path_str(&link), path_str(&source)];
    assert_eq!(run_ok(&compare), "Images are identical.\n");
}

#[test]
fn a_commit_writes_to_the_file_that_was_named() {
    let dir = directory();
    let [link, image] = pool_and_store(&dir, &[("base.raw", 1), ("source.raw", 5)]);
    let [mine, other] = [&link, &image].map(|path| path.with_file_name("base.raw"));
    let source = link.with_file_name("source.raw");
    run_ok(&["create", "-f", "qcow2", "-b", "base.raw", "-F", "raw", path_str(&link)]);
    run_ok(&["convert", "-n", "-O", "qcow2", "-f", "raw", path_str(&source), path_str(&link)]);
    run_fails(2, &["commit", "-b", path_str(&other), path_str(&link)]);
    run_ok(&["commit", "-b", path_str(&mine), path_str(&link)]);
    assert!(std::fs::read(&other).unwrap() == vec![11; DISK_BYTES]);
    assert!(std::fs::read(&mine).unwrap() == vec![5; DISK_BYTES]);
}

/// Every layer is a link to another directory, and names the next by the name of its link.
#[test]
fn a_commit_into_a_layer_that_is_a_link_finds_what_lies_below_it() {
    let dir = directory();
    let [link, image] = pool_and_store(&dir, &[("base.raw", 1), ("source.raw", 5)]);
    symlink("../store/mid.qcow2", link.with_file_name("mid.qcow2")).unwrap();
    std::fs::remove_file(image.with_file_name("base.raw")).unwrap();
    let (mid, source) = (link.with_file_name("mid.qcow2"), image.with_file_name("source.raw"));
    run_ok(&["create", "-f", "qcow2", "-b", "base.raw", "-F", "raw", path_str(&mid)]);
    run_ok(&["create", "-f", "qcow2", "-b", "mid.qcow2", "-F", "qcow2", path_str(&link)]);
    assert_holds(&dir, &link, 1);
    run_ok(&["convert", "-n", "-O", "qcow2", "-f", "raw", path_str(&source), path_str(&link)]);
    run_ok(&["commit", path_str(&link)]);
    assert_holds(&dir, &mid, 15);
    assert_holds(&dir, &link, 15);
}
