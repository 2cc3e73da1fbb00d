//! Persistent bitmaps as QEMU sees them.

use std::ops::Range;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// A longer wait means that something hangs.
const PATIENCE: Duration = Duration::from_secs(60);

/// Returns the ranges that a bitmap of a qcow2 image marks, as seen by an NBD client of QEMU. `directory` is for a
/// socket.
///
/// # Panics
///
/// If `qemu-nbd` or `qemu-img` fails or hangs.
#[must_use]
pub fn marked_as_qemu_sees(directory: &Path, image: &Path, bitmap: &str) -> Vec<Range<u64>> {
    let socket = directory.join(format!("nbd-{bitmap}"));
    let mut nbd = Command::new("qemu-nbd");
    nbd.args(["-r", "-f", "qcow2", "-B", bitmap, "-k"]).args([&socket, image]);
    // The server ends with its first client.
    let mut nbd = nbd.stdin(Stdio::null()).spawn().expect("qemu-nbd can be started");
    let deadline = Instant::now() + PATIENCE;
    while !socket.exists() {
        assert!(nbd.try_wait().expect("a child").is_none(), "qemu-nbd does not serve bitmap '{bitmap}'");
        assert!(Instant::now() < deadline, "qemu-nbd does not begin");
        std::thread::sleep(Duration::from_millis(5));
    }
    let context = format!("x-dirty-bitmap=qemu:dirty-bitmap:{bitmap}");
    let options = format!("driver=nbd,server.type=unix,server.path={},{context}", socket.display());
    let mut map = Command::new("qemu-img");
    map.args(["map", "--output=json", "--image-opts", &options]).stdin(Stdio::null());
    let map = map.output().expect("qemu-img can be started");
    assert!(map.status.success(), "qemu-img map: {}", String::from_utf8_lossy(&map.stderr));
    nbd.wait().expect("a child");
    // In this map, marked ranges are shown as no data.
    let rows = String::from_utf8_lossy(&map.stdout);
    rows.lines().filter(|row| row.contains("\"data\": false")).map(range_of).collect()
}

/// Parses the range of a row of a map.
fn range_of(row: &str) -> Range<u64> {
    let number = |key: &str| {
        let digits = row.split(&format!("\"{key}\": ")).nth(1).unwrap_or_default();
        let end = digits.find(|digit: char| !digit.is_ascii_digit()).unwrap_or(digits.len());
        digits[..end].parse::<u64>().expect("a number")
    };
    number("start")..number("start") + number("length")
}
