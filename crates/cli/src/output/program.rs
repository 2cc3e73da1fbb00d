//! The name that the program was called by: its own, or qemu-img.

use std::path::Path;

/// The program's own name.
const RINGDISK: &str = "ringdisk";
/// The other name. Under it the program has qemu-img's words, output and exit codes.
pub(crate) const QEMU_IMG: &str = "qemu-img";

/// Whether the program was called as qemu-img.
pub(crate) fn is_qemu_img() -> bool {
    std::env::args_os().next().is_some_and(|name| Path::new(&name).file_name().is_some_and(|name| name == QEMU_IMG))
}

/// Returns the name at the beginning of error messages.
pub(crate) fn name() -> &'static str {
    if is_qemu_img() { QEMU_IMG } else { RINGDISK }
}
