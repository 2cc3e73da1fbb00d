//! Tests that this host does not let run.

use std::io::Write;

/// The variable that names a file for skipped tests, a line for each.
const FILE_VARIABLE: &str = "RINGDISK_SKIPS_FILE";

/// Prints why a test is skipped. A test that returns counts as passed, so `cargo xtask ci` counts these lines.
pub fn skipped(why: &str) {
    eprintln!("skipped: {why}");
    let Some(file) = std::env::var_os(FILE_VARIABLE) else { return };
    let mut file = std::fs::File::options().append(true).create(true).open(file).expect("the file for skips");
    let test = std::thread::current().name().unwrap_or_default().to_owned();
    // In one piece: other tests write, too.
    file.write_all(format!("{test}: {why}\n").as_bytes()).expect("a line in the file for skips");
}
