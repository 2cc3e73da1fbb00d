//! The Debian package, and the checks of what goes into it.

use crate::command::Program;
use crate::packages;
use crate::workspace;
use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};

/// The directory of the units.
const UNITS: &str = "dist/systemd";
/// The exposure that `systemd-analyze security` may find in a service, in tenths: 1.5 of 10.
const EXPOSURE_MAX_TENTHS: u32 = 15;
/// A word in systemd's message about a line that it does not understand and ignores.
const IGNORED: &str = "ignoring";

/// Builds the package below the build directory, and returns where it is. The program is a release build, or `binary`.
pub(crate) fn deb(binary: Option<&Path>) -> Result<PathBuf> {
    if !has_builder() {
        bail!("cargo-deb builds the package: cargo install --locked cargo-deb");
    }
    let program = workspace::target().join("release/ringdisk");
    match binary {
        Some(binary) => put_in_place(binary, &program)?,
        None => {
            let built = Program::cargo().args(["build", "--release", "--package", "ringdisk"]).watch()?;
            if !built.success() {
                bail!("the program does not build");
            }
        }
    }
    let generated = workspace::target().join("package");
    // Files of an earlier version must not be packed.
    let _ = std::fs::remove_dir_all(&generated);
    Program::new(program).args(["generate".as_ref(), generated.as_os_str()]).output_text()?;
    let packed = Program::cargo().args(["deb", "--package", "ringdisk", "--no-build"]).watch()?;
    if !packed.success() {
        bail!("cargo deb failed ({})", packed.status);
    }
    // The last line that names a package is the file's path.
    let is_package = |line: &&String| line.trim_end().ends_with(".deb");
    let package = packed.lines.iter().rev().find(is_package).context("cargo deb did not say what it wrote")?;
    Ok(PathBuf::from(package.trim()))
}

/// Whether cargo-deb is installed.
pub(crate) fn has_builder() -> bool {
    Program::cargo().args(["deb", "--version"]).succeeds()
}

/// Says what is missing to build the package and try it, if something is.
pub(crate) fn missing_for_a_trial() -> Option<&'static str> {
    if !rustix::process::geteuid().is_root() {
        return Some("only root can try the package in a Debian of its own");
    }
    packages::find_program("debootstrap").is_none().then_some("debootstrap is not installed")
}

/// Puts a program where cargo would. The next build of cargo's puts its own there again.
fn put_in_place(binary: &Path, program: &Path) -> Result<()> {
    let found = binary.canonicalize().with_context(|| format!("cannot find '{}'", binary.display()))?;
    if program.canonicalize().is_ok_and(|there| there == found) {
        return Ok(());
    }
    let directory = program.parent().context("the build directory has no parent")?;
    std::fs::create_dir_all(directory).with_context(|| format!("cannot make '{}'", directory.display()))?;
    // Cargo's program has another name elsewhere: its file is not to be written over.
    let _ = std::fs::remove_file(program);
    let failed = || format!("cannot copy '{}' to '{}'", found.display(), program.display());
    std::fs::copy(&found, program).map(drop).with_context(failed)
}

/// Complaints about the units: lines that systemd does not understand, and services that may do more than they need.
pub(crate) fn check_units() -> Result<Vec<String>> {
    let mut complaints = Vec::new();
    for unit in units()? {
        let name = unit.display().to_string();
        let checked = Program::new("systemd-analyze").args(["verify", "--man=no", name.as_str()]).watch()?;
        complaints.extend(checked.lines.into_iter().filter(|line| line.contains(IGNORED)));
        if unit.extension().is_none_or(|extension| extension != "service") {
            continue;
        }
        let threshold = format!("--threshold={EXPOSURE_MAX_TENTHS}");
        let checked =
            Program::new("systemd-analyze").args(["security", "--offline=true", &threshold, &name]).watch()?;
        if !checked.success() {
            complaints.push(format!("{name}: exposed by more than {EXPOSURE_MAX_TENTHS} tenths"));
        }
    }
    Ok(complaints)
}

fn units() -> Result<Vec<PathBuf>> {
    let entries = workspace::root().join(UNITS).read_dir().with_context(|| format!("cannot read {UNITS}"))?;
    let mut units: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    units.retain(|unit| unit.extension().is_some_and(|kind| kind == "service" || kind == "socket"));
    units.sort();
    if units.is_empty() {
        bail!("there are no units in {UNITS}");
    }
    Ok(units)
}
