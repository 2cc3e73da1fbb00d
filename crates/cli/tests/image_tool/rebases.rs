//! Rebases: what is copied, and what that takes.

use super::*;

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
