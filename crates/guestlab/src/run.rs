//! Boots a guest of either kind and waits for its report.

use crate::options::{GuestKind, GuestOptions};
use crate::report::GuestReport;
use crate::{console, qemu, tools, uml};
use anyhow::{Context, Result, ensure};
use std::os::unix::fs::FileTypeExt;

/// Fails with the name of the missing package if the guest cannot run on this machine.
pub fn check_tools(kind: GuestKind) -> Result<()> {
    tools::guest_tools()?;
    match kind {
        GuestKind::Uml => uml::check_tools(),
        GuestKind::Qemu => qemu::check_tools(),
    }
}

/// Boots the guest. Returns its report after it has powered itself off. `progress` gets each step.
pub fn run(options: &GuestOptions, progress: &mut dyn FnMut(&str)) -> Result<GuestReport> {
    check_tools(options.kind)?;
    for socket in &options.sockets {
        let there = std::fs::metadata(socket).is_ok_and(|metadata| metadata.file_type().is_socket());
        ensure!(there, "there is no socket {}: is the disk served?", socket.display());
    }
    with_or_without_kvm(options, progress, boot)
}

/// Boots the guest once.
fn boot(options: &GuestOptions, progress: &mut dyn FnMut(&str)) -> Result<GuestReport> {
    let directory = tempfile::Builder::new().prefix("ringdisk-guest-").tempdir();
    let directory = directory.context("cannot make a temporary directory for the guest")?;
    let (command, prepare) = match options.kind {
        GuestKind::Uml => uml::command(options, directory.path())?,
        GuestKind::Qemu => (qemu::command(options, directory.path())?, (|| Ok(())) as console::Prepare),
    };
    console::run(command, prepare, options, progress)
}

/// Runs the guest again without KVM if the host's KVM fails.
fn with_or_without_kvm(
    options: &GuestOptions,
    progress: &mut dyn FnMut(&str),
    mut boot: impl FnMut(&GuestOptions, &mut dyn FnMut(&str)) -> Result<GuestReport>,
) -> Result<GuestReport> {
    match boot(options, progress) {
        Err(error) if options.kvm && console::is_by_kvm(&error) => {
            progress("KVM failed on this host: starting the guest again without it");
            let report = boot(&GuestOptions { kvm: false, ..options.clone() }, progress)?;
            Ok(GuestReport { kvm_failed: true, ..report })
        }
        ended => ended,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;
    use std::time::Duration;

    /// A guest that is a script for the shell; it gets far less time than the script takes if nobody notices its end.
    fn run_script(script: &'static str, kvm: bool) -> (Result<GuestReport>, Vec<String>) {
        let mut options = GuestOptions::new(GuestKind::Qemu, Vec::new());
        (options.kvm, options.time_limit) = (kvm, Duration::from_secs(20));
        let mut steps = Vec::new();
        let mut progress = |step: &str| steps.push(step.to_owned());
        let ended = with_or_without_kvm(&options, &mut progress, |options, progress| {
            let mut command = Command::new("sh");
            command.args(["-c", script]).env("KVM", if options.kvm { "on" } else { "off" });
            console::run(command, || Ok(()), options, progress)
        });
        (ended, steps)
    }

    const STOPS_UNDER_KVM: &str = r#"
        if [ $KVM = on ]; then
            echo "KVM internal error. Suberror: 3" >&2
            exec sleep 1000
        fi
        echo "@ringdisk kernel release=6.1.0 cpus=1"
        echo "@ringdisk end"
    "#;

    #[test]
    fn a_guest_that_kvm_stopped_is_run_again_without_it_and_the_report_says_so() {
        let (ended, steps) = run_script(STOPS_UNDER_KVM, true);
        let report = ended.unwrap();
        assert_eq!((report.kernel.as_str(), report.kvm_failed), ("6.1.0", true));
        assert!(steps.iter().any(|step| step.contains("without")), "{steps:?}");

        let (ended, steps) = run_script(STOPS_UNDER_KVM, false);
        assert!(!ended.unwrap().kvm_failed && steps.is_empty());
    }

    #[test]
    fn a_guest_that_died_is_told_of_though_its_console_stays_open() {
        let (ended, _) = run_script("echo going; sleep 1000 & exit 3", false);
        let said = format!("{:#}", ended.unwrap_err());
        let lines: Vec<&str> = said.lines().collect();
        assert!(lines[0].contains("stopped before its work was done"), "{said}");
        assert_eq!(lines[1..], ["The guest's last lines:", "    going"], "{said}");
    }
}
