//! Checks the image that a guest left, with other projects' tools.

use crate::tools;
use anyhow::{Context, Result, bail};
use std::path::Path;
use std::process::Command;

/// The format of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ImageFormat {
    /// Raw.
    Raw,
    /// qcow2, perhaps with layers below.
    Qcow2,
}

/// Checks three things. qemu-img must find a qcow2 image clean, without leaks. e2fsck must find the ext4 file system on
/// it clean. The files on it, extracted without any kernel, must have the contents that the guest gave them. The image
/// must not be open.
pub fn verify_image(image: &Path, format: ImageFormat) -> Result<()> {
    let directory = tempfile::Builder::new().prefix("ringdisk-check-").tempdir();
    let directory = directory.context("cannot make a temporary directory")?;
    let raw = match format {
        ImageFormat::Raw => image.to_path_buf(),
        ImageFormat::Qcow2 => {
            let qemu_img = tools::find("qemu-img", "qemu-utils")?;
            succeed(Command::new(&qemu_img).args(["check", "-f", "qcow2"]).arg(image))?;
            let raw = directory.path().join("raw");
            succeed(Command::new(&qemu_img).args(["convert", "-f", "qcow2", "-O", "raw"]).args([image, &raw]))?;
            raw
        }
    };
    succeed(Command::new(tools::find("e2fsck", "e2fsprogs")?).arg("-fn").arg(&raw))?;
    for dump in ["rdump data .", "dump sums sums"] {
        let mut debugfs = Command::new(tools::find("debugfs", "e2fsprogs")?);
        succeed(debugfs.args(["-R", dump]).arg(std::path::absolute(&raw)?).current_dir(&directory))?;
    }
    let mut sha256sum = Command::new(tools::find("sha256sum", "coreutils")?);
    succeed(sha256sum.args(["--check", "--quiet", "--strict", "../sums"]).current_dir(directory.path().join("data")))
}

fn succeed(command: &mut Command) -> Result<()> {
    let words: Vec<_> = std::iter::once(command.get_program()).chain(command.get_args()).collect();
    let words = words.iter().map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ");
    let output = command.output().with_context(|| format!("cannot run {words}"))?;
    if !output.status.success() {
        let text = [output.stdout, output.stderr].concat();
        bail!("{words}: {}\n{}", output.status, String::from_utf8_lossy(&text).trim_end());
    }
    Ok(())
}
