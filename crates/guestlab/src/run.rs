//! Boots a guest, of either kind, and waits for its report.

use crate::options::{GuestKind, GuestOptions};
use crate::report::GuestReport;
use crate::{console, qemu, tools, uml};
use anyhow::{Context, Result, ensure};
use std::os::unix::fs::FileTypeExt;

/// Fails with the missing package's name where the guest cannot be run on this machine.
pub fn check_tools(kind: GuestKind) -> Result<()> {
    tools::guest_tools()?;
    match kind {
        GuestKind::Uml => uml::check_tools(),
        GuestKind::Qemu => qemu::check_tools(),
    }
}

/// Boots the guest and returns its report once it has powered itself off. `progress` is told of each step in it.
pub fn run(options: &GuestOptions, progress: &mut dyn FnMut(&str)) -> Result<GuestReport> {
    check_tools(options.kind)?;
    for socket in &options.sockets {
        let there = std::fs::metadata(socket).is_ok_and(|metadata| metadata.file_type().is_socket());
        ensure!(there, "there is no socket {}: is the disk served?", socket.display());
    }
    let directory = tempfile::Builder::new().prefix("ringdisk-guest-").tempdir();
    let directory = directory.context("cannot make a temporary directory for the guest")?;
    let (command, prepare) = match options.kind {
        GuestKind::Uml => uml::command(options, directory.path())?,
        GuestKind::Qemu => (qemu::command(options, directory.path())?, (|| Ok(())) as console::Prepare),
    };
    console::run(command, prepare, options, progress)
}
