//! Installs the Debian package in a new Debian and tries it there.

use crate::command::Program;
use crate::packages;
use anyhow::{Context, Result, bail};
use std::path::Path;

/// The steps of the trial; it ends at the first that fails.
const SCRIPT: &str = include_str!("try_package.sh");
/// Packages that a user has beside those of every Debian.
const WITH: &str = "--include=man-db,bash-completion,systemd,zsh,ca-certificates";

/// Installs `package` in a new Debian in a temporary directory, and tries all of its parts there. Nothing of it stays.
pub(crate) fn run(package: &Path) -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        bail!("only root can make a Debian of its own: run this as root");
    }
    if packages::find_program("debootstrap").is_none() {
        bail!("debootstrap makes the Debian to try the package in; as root: apt-get install debootstrap");
    }
    let package = package.canonicalize().with_context(|| format!("cannot find '{}'", package.display()))?;
    let directory = tempfile::Builder::new().prefix("ringdisk-deb-").tempdir()?;
    let (codename, archive) = (packages::codename()?, packages::archive()?);
    let root = directory.path().join("debian");
    let made = Program::new("debootstrap").args(["--variant=minbase", WITH, &codename]).args([root.as_os_str()]);
    if !made.args([&archive]).watch()?.success() {
        bail!("debootstrap failed");
    }
    std::fs::copy(&package, root.join("opt/ringdisk.deb")).context("cannot copy the package")?;
    std::fs::write(root.join("opt/try.sh"), SCRIPT)?;
    // Mounts and started processes end with the namespaces.
    let tried = Program::new("unshare")
        .args(["--mount", "--pid", "--fork", "--kill-child", "sh", "-ec"])
        .args(["mount -t proc proc \"$1/proc\"; exec chroot \"$1\" sh -eu /opt/try.sh", "sh"])
        .args([root.as_os_str()])
        .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
        .env("LC_ALL", "C.UTF-8")
        .watch()?;
    if !tried.success() {
        bail!("the package does not work in a new Debian ({codename})");
    }
    println!("the package was installed, tried and removed in a new Debian ({codename})");
    Ok(())
}
