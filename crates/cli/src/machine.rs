//! The machine of `save` and `restore`, as the user names it.

use crate::output::usage;
use save::Machine;
use std::ffi::OsString;
use std::path::PathBuf;

/// Names the daemon's socket where neither an option nor the machine's description does.
const CONTROL_VARIABLE: &str = "RINGDISK_CONTROL";

/// Options that name a machine: a file that describes it, options, or both.
#[derive(clap::Args)]
pub(crate) struct MachineArgs {
    /// A description of the machine: qmp, control, state, disks, qemu. The options here override it.
    #[arg(value_name = "MACHINE.toml")]
    machine: Option<PathBuf>,
    /// The socket of QEMU's monitor (-qmp unix:SOCKET,server=on,wait=off).
    #[arg(long, value_name = "SOCKET")]
    qmp: Option<PathBuf>,
    /// The control socket of the daemon that serves the disks [default: what the description says, or else
    /// $RINGDISK_CONTROL].
    #[arg(long, value_name = "SOCKET")]
    control: Option<PathBuf>,
    /// The directory in which the machine is saved.
    #[arg(long, value_name = "DIRECTORY")]
    state: Option<PathBuf>,
    /// A disk of the machine, by its name in the daemon. May be given several times [default: all disks].
    #[arg(long = "disk", value_name = "NAME")]
    disks: Vec<String>,
}

impl MachineArgs {
    /// Returns the machine. The settings in `needs` must be given.
    pub(crate) fn machine(&self, needs: &[&str]) -> anyhow::Result<Machine> {
        self.machine_in(needs, std::env::var_os(CONTROL_VARIABLE))
    }

    /// As `machine`, where the environment says this of the daemon's socket.
    fn machine_in(&self, needs: &[&str], control: Option<OsString>) -> anyhow::Result<Machine> {
        let mut said = Machine::nothing();
        said.qmp = self.qmp.clone().unwrap_or_default();
        said.control = self.control.clone().unwrap_or_default();
        said.state = self.state.clone().unwrap_or_default();
        said.disks.clone_from(&self.disks);
        let described = match &self.machine {
            Some(file) => said.or(Machine::read(file)?),
            None => said,
        };
        let mut environment = Machine::nothing();
        environment.control = control.unwrap_or_default().into();
        let machine = described.or(environment);
        let known = [("qmp", &machine.qmp), ("control", &machine.control), ("state", &machine.state)];
        for (key, path) in known {
            if needs.contains(&key) && path.as_os_str().is_empty() {
                return Err(usage(format!(
                    "--{key} is missing: give it here, or '{key}' in the machine's description"
                )));
            }
        }
        Ok(machine)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Command {
        #[command(flatten)]
        machine: MachineArgs,
    }

    #[test]
    fn an_option_goes_before_the_description_and_that_before_the_environment() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("vm.toml");
        std::fs::write(&file, "qmp = '/q'\ncontrol = '/described'\nstate = '/s'\n").unwrap();
        let control = |words: &[&str], environment: Option<&str>| {
            let command = Command::try_parse_from([&["save"], words].concat()).unwrap();
            command.machine.machine_in(&["control"], environment.map(OsString::from)).map(|machine| machine.control)
        };
        let file = file.to_str().unwrap();
        for (words, environment, expected) in [
            (&[file][..], Some("/environment"), "/described"),
            (&[file, "--control", "/option"], Some("/environment"), "/option"),
            (&["--control", "/option"], Some("/environment"), "/option"),
            (&[], Some("/environment"), "/environment"),
        ] {
            assert_eq!(control(words, environment).unwrap(), PathBuf::from(expected), "{words:?}");
        }
        assert!(control(&[], None).unwrap_err().to_string().contains("--control is missing"));
    }
}
