//! The Debian packages that the tests need beyond Rust and a C compiler.

use crate::command::Program;
use crate::workspace;
use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};

/// The programs that the tests run, each with its package.
const PROGRAMS: &[(&str, &str)] = &[
    ("qemu-img", "qemu-utils"),
    ("qemu-io", "qemu-utils"),
    ("qemu-storage-daemon", "qemu-system-common"),
    ("qemu-system-x86_64", "qemu-system-x86"),
    ("linux.uml", "user-mode-linux"),
    ("busybox", "busybox-static"),
    ("mke2fs", "e2fsprogs"),
    ("e2fsck", "e2fsprogs"),
    ("debugfs", "e2fsprogs"),
    ("nbdinfo", "libnbd-bin"),
    ("nbdcopy", "libnbd-bin"),
    ("nbdsh", "python3-libnbd"),
    ("qemu-nbd", "qemu-utils"),
    // No program, but found in the same directories.
    ("../lib/x86_64-linux-gnu/qemu/block-rbd.so", "qemu-block-extra"),
    ("nbdkit", "nbdkit"),
    ("nbd-client", "nbd-client"),
    ("slirp-fullbolt", "slirp"),
    ("ceph-mon", "ceph-mon"),
    ("ceph-mgr", "ceph-mgr"),
    ("ceph-osd", "ceph-osd"),
    ("ceph", "ceph-common"),
    ("fio", "fio"),
    ("curl", "curl"),
    ("fincore", "util-linux-extra"),
    ("systemd-analyze", "systemd"),
    ("systemd-socket-activate", "systemd"),
    ("bwrap", "bubblewrap"),
    ("prlimit", "util-linux"),
    ("mkfs.btrfs", "btrfs-progs"),
    ("../lib/python3/dist-packages/jsonschema/__init__.py", "python3-jsonschema"),
];

/// The keys that sign Debian's archive.
const DEBIAN_KEYS: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// The kernel that QEMU boots. It is never installed: only its files are used.
const KERNEL_PACKAGE: &str = "linux-image-cloud-amd64";

/// Installs missing packages if this process may, and otherwise names them.
pub(crate) fn install() -> Result<Vec<String>> {
    let mut missing: Vec<&str> =
        PROGRAMS.iter().filter(|(program, _)| find_program(program).is_none()).map(|(_, package)| *package).collect();
    missing.dedup();
    if missing.is_empty() {
        println!("all programs are here");
    } else if !rustix::process::geteuid().is_root() {
        return Ok(vec![format!("missing Debian packages; as root: apt-get install {}", missing.join(" "))]);
    } else {
        apt_get(["update"])?;
        let (qemu, others): (Vec<&str>, Vec<&str>) =
            missing.into_iter().partition(|package| package.starts_with("qemu-"));
        apt_install(&[], &others)?;
        install_qemu(&qemu)?;
    }
    Ok(PROGRAMS
        .iter()
        .filter(|(program, _)| find_program(program).is_none())
        .map(|(program, package)| format!("{program} is not in PATH although {package} should have it"))
        .collect())
}

/// Installs packages of QEMU. They must all have one version: if some come from Debian's backports, the others must
/// come from there, too.
fn install_qemu(packages: &[&str]) -> Result<()> {
    let installed = Program::new("dpkg-query").args(["--show", "--showformat=${Version}\n", "qemu-*"]).output_text();
    if !installed.unwrap_or_default().contains("~bpo") {
        return apt_install(&[], packages);
    }
    let codename = codename()?;
    let backports = format!("{codename}-backports");
    let sources = apt_sources()?;
    if archive_of(&sources, &backports).is_some() {
        return apt_install(&["-t", &backports], packages);
    }
    let archive = main_archive(&sources, &codename)?;
    println!("asking {backports}, as some of QEMU is from there; the system's own sources stay as they are");
    let own = std::fs::read_to_string("/etc/apt/sources.list").unwrap_or_default();
    let signed = if Path::new(DEBIAN_KEYS).exists() { format!("[signed-by={DEBIAN_KEYS}] ") } else { String::new() };
    let list = workspace::target().join("backports.list");
    std::fs::create_dir_all(workspace::target())?;
    std::fs::write(&list, format!("{own}\ndeb {signed}{archive} {backports} main\n"))?;
    let sources = format!("Dir::Etc::sourcelist={}", list.display());
    apt_get(["-o", &sources, "update"])?;
    apt_install(&["-o", &sources, "-t", &backports], packages)
}

/// Returns the codename of this Debian.
pub(crate) fn codename() -> Result<String> {
    let release = std::fs::read_to_string("/etc/os-release")?;
    let codename = release.lines().find_map(|line| line.strip_prefix("VERSION_CODENAME="));
    Ok(codename.unwrap_or("stable").to_owned())
}

/// Returns the address of this Debian's archive.
pub(crate) fn archive() -> Result<String> {
    Ok(main_archive(&apt_sources()?, &codename()?)?.to_owned())
}

/// Returns the address, suite and component of each of apt's sources.
fn apt_sources() -> Result<String> {
    let format = "$(REPO_URI) $(RELEASE) $(COMPONENT)";
    Program::new("apt-get").args(["indextargets", "--format", format, "Created-By: Packages"]).output_text()
}

fn archive_of<'a>(sources: &'a str, suite: &str) -> Option<&'a str> {
    sources.lines().find_map(|line| line.strip_suffix(&format!(" {suite} main")))
}

fn main_archive<'a>(sources: &'a str, codename: &str) -> Result<&'a str> {
    // Other archives may have a suite of this name, but only the main one also has a suite for its updates.
    let archive = archive_of(sources, &format!("{codename}-updates")).or_else(|| archive_of(sources, codename));
    archive.with_context(|| format!("apt has no source with {codename} main"))
}

/// Returns a directory with the kernel and the modules for QEMU's guest, unpacked below the build directory on first
/// use.
pub(crate) fn guest_kernel() -> Result<PathBuf> {
    let directory = workspace::target().join("guest-kernel");
    if has_kernel(&directory) {
        return Ok(directory);
    }
    let download = workspace::target().join("guest-kernel-download");
    let archive = download_kernel(&download).or_else(|error| {
        // The lists of packages may be missing or old, and the archive keeps only the newest kernel.
        println!("{error:#}");
        apt_get(["update"])?;
        download_kernel(&download)
    })?;
    let unpacked = download.join("unpacked");
    Program::new("dpkg").args(["-x".as_ref(), archive.as_os_str(), unpacked.as_os_str()]).output_text()?;
    let _ = std::fs::remove_dir_all(&directory);
    std::fs::rename(&unpacked, &directory)?;
    std::fs::remove_dir_all(&download)?;
    Ok(directory)
}

/// Downloads the kernel's package, as the only file in `directory`.
fn download_kernel(directory: &Path) -> Result<PathBuf> {
    let _ = std::fs::remove_dir_all(directory);
    std::fs::create_dir_all(directory)?;
    let package = kernel_package()?;
    let fetch = Program::new("apt-get").args(["download", package.as_str()]).directory(directory).watch()?;
    if !fetch.success() {
        bail!("apt-get download {package} failed");
    }
    std::fs::read_dir(directory)?
        .flatten()
        .map(|entry| entry.path())
        .find(|path| path.extension().is_some_and(|extension| extension == "deb"))
        .with_context(|| format!("apt-get download {package} left no package behind"))
}

fn has_kernel(directory: &Path) -> bool {
    directory
        .join("boot")
        .read_dir()
        .is_ok_and(|entries| entries.flatten().any(|entry| entry.file_name().to_string_lossy().starts_with("vmlinuz-")))
}

/// Returns the package of the newest kernel, on which the metapackage depends.
fn kernel_package() -> Result<String> {
    let text = Program::new("apt-cache").args(["depends", KERNEL_PACKAGE]).output_text()?;
    text.lines()
        .filter_map(|line| line.trim().strip_prefix("Depends: "))
        .find(|name| name.starts_with("linux-image-"))
        .map(str::to_owned)
        .with_context(|| format!("apt knows no kernel behind {KERNEL_PACKAGE}"))
}

fn apt_install(options: &[&str], packages: &[&str]) -> Result<()> {
    if packages.is_empty() {
        return Ok(());
    }
    let install = ["install", "--yes", "--no-remove", "--no-install-recommends"];
    apt_get(install.iter().chain(options).chain(packages).copied())
}

fn apt_get<'a>(arguments: impl IntoIterator<Item = &'a str>) -> Result<()> {
    let run = Program::new("apt-get").args(arguments).env("DEBIAN_FRONTEND", "noninteractive").watch()?;
    if !run.success() {
        bail!("apt-get failed ({})", run.status);
    }
    Ok(())
}

/// Finds a program where login shells look, and where Debian keeps programs for root.
pub(crate) fn find_program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/sbin", "/sbin", "/usr/bin", "/bin"].into_iter().map(PathBuf::from))
        .map(|directory| directory.join(name))
        .find(|path| path.is_file())
}
