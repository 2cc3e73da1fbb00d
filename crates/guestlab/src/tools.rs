//! Programs of the host that a guest needs, and their Debian packages.

use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};

/// The host's programs that every guest runs.
#[derive(Debug, Clone)]
pub(crate) struct GuestTools {
    pub(crate) busybox: PathBuf,
    pub(crate) mke2fs: PathBuf,
    pub(crate) fio: PathBuf,
    /// The client for a guest's disk at an NBD server.
    pub(crate) nbd_client: Option<PathBuf>,
}

/// Finds the tools of every guest.
pub(crate) fn guest_tools() -> Result<GuestTools> {
    Ok(GuestTools {
        busybox: find("busybox", "busybox-static")?,
        mke2fs: find("mke2fs", "e2fsprogs")?,
        fio: find("fio", "fio")?,
        nbd_client: None,
    })
}

/// Finds the program `name` of the Debian package `package`. Also looks in Debian's directories for root's programs.
pub(crate) fn find(name: &str, package: &str) -> Result<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/sbin", "/sbin", "/usr/bin", "/bin"].into_iter().map(PathBuf::from))
        .map(|directory| directory.join(name))
        .find(|path| path.is_file())
        .with_context(|| format!("{name} is not installed; it is in the Debian package {package}"))
}

/// The files of a guest's kernel and modules.
#[derive(Debug, Clone)]
pub(crate) struct Kernel {
    pub(crate) image: PathBuf,
    pub(crate) modules: PathBuf,
}

/// The variable that names a directory with an unpacked Debian kernel package, to be used instead of the host's kernel.
pub(crate) const KERNEL_VARIABLE: &str = "RINGDISK_GUEST_KERNEL";

/// Finds a Debian kernel with its modules: in the directory that the variable names, or the newest that is installed.
pub(crate) fn debian_kernel() -> Result<Kernel> {
    let root = std::env::var_os(KERNEL_VARIABLE).map_or_else(|| PathBuf::from("/"), PathBuf::from);
    let mut images: Vec<PathBuf> = std::fs::read_dir(root.join("boot"))
        .map(|entries| entries.flatten().map(|entry| entry.path()).collect())
        .unwrap_or_default();
    images.sort();
    let kernel = images.iter().rev().find_map(|image| {
        let version = image.file_name()?.to_str()?.strip_prefix("vmlinuz-")?;
        let modules = ["lib/modules", "usr/lib/modules"].map(|directory| root.join(directory).join(version));
        let modules = modules.into_iter().find(|directory| directory.join("kernel").is_dir())?;
        std::fs::File::open(image).is_ok().then(|| Kernel { image: image.clone(), modules })
    });
    match kernel {
        Some(kernel) => Ok(kernel),
        None => bail!(
            "no kernel for the guest below {}; one is in the Debian package linux-image-cloud-amd64 (install it, or \
             unpack it with dpkg -x and name the directory in {KERNEL_VARIABLE})",
            root.join("boot").display()
        ),
    }
}

/// Finds the first file `name.ko` (perhaps compressed) below `directory`.
pub(crate) fn find_module(directory: &Path, name: &str) -> Option<PathBuf> {
    let wanted = [format!("{name}.ko"), format!("{name}.ko.xz")];
    let mut directories = vec![directory.to_path_buf()];
    while let Some(directory) = directories.pop() {
        for entry in std::fs::read_dir(directory).ok()?.flatten() {
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                directories.push(entry.path());
            } else if wanted.iter().any(|wanted| entry.file_name().to_string_lossy() == *wanted) {
                return Some(entry.path());
            }
        }
    }
    None
}
