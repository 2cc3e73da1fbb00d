//! User Mode Linux: the host's files are its root, so the host's programs run inside.

use crate::options::GuestOptions;
use crate::script::{self, Places};
use crate::{console, tools};
use anyhow::{Context, Result, ensure};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

const PACKAGE: &str = "user-mode-linux";
const MODULES: &str = "/usr/lib/uml/modules";
/// The kernel's command line splits words at blanks, and the device's name at a colon.
const FORBIDDEN: [char; 4] = [' ', '\t', ':', ','];

pub(crate) fn check_tools() -> Result<()> {
    tools::find("linux.uml", PACKAGE)?;
    ensure!(
        tools::find_module(Path::new(MODULES), "virtio_blk").is_some(),
        "no virtio_blk module below {MODULES}; it is in the Debian package {PACKAGE}"
    );
    Ok(())
}

/// Returns the guest's process, and a function that the thread that starts it must call first. `directory` is empty and
/// lives as long as the guest.
pub(crate) fn command(options: &GuestOptions, directory: &Path) -> Result<(Command, console::Prepare)> {
    ensure!(
        !directory.to_string_lossy().contains(FORBIDDEN),
        "User Mode Linux cannot work in {}: set TMPDIR to a path without blanks, commas and colons",
        directory.display()
    );
    let scratch = directory.join("scratch");
    std::fs::create_dir(&scratch)?;
    let mut modules = format!("{MODULES}/$release/kernel/drivers/block/virtio_blk.ko*");
    let mut tools = tools::guest_tools()?;
    if options.nbd.is_some() {
        modules = format!("{modules} {}", modules.replace("virtio_blk", "nbd"));
        tools.nbd_client = Some(tools::find("nbd-client", "nbd-client")?);
    }
    let places = Places { scratch: &scratch.to_string_lossy(), modules: &modules };
    let init = directory.join("init");
    std::fs::write(&init, script::init(options, &tools, &places))?;
    std::fs::set_permissions(&init, std::fs::Permissions::from_mode(0o755))?;

    let program = tools::find("linux.uml", PACKAGE)?;
    let mut command = console::command(&program);
    command
        .arg(format!("mem={}M", options.memory_mib))
        .args(["root=/dev/root", "rootfstype=hostfs", "rootflags=/", "ro", "quiet", "con=null", "con0=null,fd:1"])
        .args(script::QUIET_WATCHDOGS)
        .arg(format!("init={}", init.display()))
        .arg(format!("uml_dir={}", directory.display()))
        .arg("umid=guest");
    let mut prepare: console::Prepare = || Ok(());
    if has_too_many_registers(&program)? {
        command.arg(OLD_REGISTERS_ONLY);
        prepare = hide_registers;
    }
    for (number, socket) in options.sockets.iter().enumerate() {
        let link = directory.join(format!("disk{number}"));
        let socket = std::path::absolute(socket)?;
        std::os::unix::fs::symlink(&socket, &link).context("cannot link the disk's socket")?;
        command.arg(format!("virtio_uml.device={}:2", link.display()));
    }
    if options.nbd.is_some() {
        let network = tools::find("slirp-fullbolt", "slirp")?;
        command.arg(format!("eth0=slirp,,{}", network.display()));
    }
    command.env("TMPDIR", memory_directory(options.memory_mib, directory));
    Ok((command, prepare))
}

/// The first kernel that asks the host for the size of a processor's registers.
const ANY_REGISTERS: (u32, u32) = (6, 13);
/// The call `ptrace`, its request `PTRACE_GETREGSET`, and the set of all registers (x86-64: asm/unistd_64.h,
/// linux/ptrace.h, linux/elf.h). `ENODEV` says that there is no such set.
const PTRACE: i64 = 101;
const PTRACE_GETREGSET: u64 = 0x4204;
const NT_X86_XSTATE: u64 = 0x202;
const ENODEV: u32 = 19;

/// Keeps programs from using registers that are not saved: glibc chooses its copying loops accordingly. The kernel
/// passes unknown words of its command line to init, and init to its children.
const OLD_REGISTERS_ONLY: &str =
    "GLIBC_TUNABLES=glibc.cpu.hwcaps=-AVX,-AVX2,-AVX512F,-AVX512VL,-AVX512BW,-AVX512DQ,-AVX_Fast_Unaligned_Load";

/// Whether the kernel cannot save the host's registers. Older kernels keep 2.7 KB for a processor's registers, and die
/// if the host's take more, as with AMX.
fn has_too_many_registers(program: &Path) -> Result<bool> {
    let processors = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    if !processors.contains(" amx_tile") {
        return Ok(false);
    }
    let output = Command::new(program).arg("--version").output()?;
    Ok(kernel_version(&String::from_utf8_lossy(&output.stdout))? < ANY_REGISTERS)
}

/// Hides the set of all registers from the calling thread's children. So the kernel saves only the oldest (x87, SSE),
/// which have a call of their own.
fn hide_registers() -> Result<()> {
    let is = |argument, value| SeccompCondition::new(argument, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, value);
    let all_registers = SeccompRule::new(vec![is(0, PTRACE_GETREGSET)?, is(2, NT_X86_XSTATE)?])?;
    let rules = [(PTRACE, vec![all_registers])].into();
    let arch = std::env::consts::ARCH.try_into()?;
    let filter = SeccompFilter::new(rules, SeccompAction::Allow, SeccompAction::Errno(ENODEV), arch)?;
    seccompiler::apply_filter(&BpfProgram::try_from(filter)?).context("cannot filter User Mode Linux's system calls")
}

/// Parses major and minor version from the output of `linux.uml --version`.
fn kernel_version(text: &str) -> Result<(u32, u32)> {
    let mut numbers = text.trim().split(|mark: char| !mark.is_ascii_digit()).map(str::parse);
    match (numbers.next(), numbers.next()) {
        (Some(Ok(major)), Some(Ok(minor))) => Ok((major, minor)),
        _ => anyhow::bail!("linux.uml --version says '{}'", text.trim()),
    }
}

/// Returns the directory for its memory: a file that is deleted at once. Shared memory is best, but small in some
/// containers.
fn memory_directory(memory_mib: u32, otherwise: &Path) -> PathBuf {
    let shared = Path::new("/dev/shm");
    let free_mib =
        rustix::fs::statvfs(shared).map_or(0, |status| status.f_bavail.saturating_mul(status.f_frsize) >> 20);
    if free_mib > u64::from(memory_mib) + 64 { shared.to_path_buf() } else { otherwise.to_path_buf() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernels_version_is_its_first_two_numbers() {
        assert_eq!(kernel_version("6.1.176\n").unwrap(), (6, 1));
        assert!(kernel_version("6.12-rc1").unwrap() < ANY_REGISTERS);
        assert!(kernel_version("7.0.1").unwrap() > ANY_REGISTERS);
        assert!(kernel_version("").is_err());
    }
}
