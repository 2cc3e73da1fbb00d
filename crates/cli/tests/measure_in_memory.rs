//! `measure` of files in memory, which looks once for each cluster of the target, with qemu-img as judge.

mod common;

use common::{at, has_tool, path_str, run_ok, tool_ok};
use std::path::Path;

fn write(image: &Path, format: &str, commands: &[&str]) {
    let mut arguments = vec!["-f", format];
    commands.iter().for_each(|command| arguments.extend(["-c", command]));
    arguments.push(path_str(image));
    tool_ok("qemu-io", &arguments);
}

#[test]
fn measure_counts_the_data_of_raw_files_in_memory_as_qemu_img_does() {
    let Ok(dir) = tempfile::tempdir_in("/dev/shm") else {
        assert!(std::env::var_os("CI").is_none(), "there is no tmpfs at /dev/shm, and this is CI");
        return eprintln!("SKIPPED: there is no tmpfs at /dev/shm");
    };
    if !has_tool("qemu-img") {
        return;
    }
    let (raw, overlay) = (at(&dir, "disk.raw"), at(&dir, "overlay.qcow2"));
    tool_ok("qemu-img", &["create", "-q", "-f", "raw", path_str(&raw), "9000k"]);
    let writes =
        ["write 0 4k", "write 124k 8k", "write 1020k 100k", "write 2044k 2052k", "write 6200k 4k", "write 8996k 4k"];
    write(&raw, "raw", &writes);
    let over = ["create", "-q", "-f", "qcow2", "-b", path_str(&raw), "-F", "raw", path_str(&overlay), "10M"];
    tool_ok("qemu-img", &over);
    write(&overlay, "qcow2", &["write 64k 64k", "write -z 2M 192k"]);
    for (image, format) in [(&raw, "raw"), (&overlay, "qcow2")] {
        for cluster in ["512", "4k", "32k", "64k", "2M"] {
            let options = format!("cluster_size={cluster}");
            let arguments = ["measure", "-f", format, "-O", "qcow2", "-o", &options, path_str(image)];
            assert_eq!(run_ok(&arguments), tool_ok("qemu-img", &arguments), "{arguments:?}");
        }
    }
}
