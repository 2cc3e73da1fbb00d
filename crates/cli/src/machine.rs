//! The machine of `save` and `restore`, as the user names it.

use crate::output::usage;
use save::Machine;
use std::path::PathBuf;

/// Options that name a machine: a file that describes it, options, or both.
#[derive(clap::Args)]
pub(crate) struct MachineArgs {
    /// A description of the machine: qmp, control, state, disks, qemu. The options here override it.
    #[arg(value_name = "MACHINE.toml")]
    machine: Option<PathBuf>,
    /// The socket of QEMU's monitor (-qmp unix:SOCKET,server=on,wait=off).
    #[arg(long, value_name = "SOCKET")]
    qmp: Option<PathBuf>,
    /// The control socket of the daemon that serves the disks.
    #[arg(long, value_name = "SOCKET", env = "RINGDISK_CONTROL")]
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
        let mut said = Machine::nothing();
        said.qmp = self.qmp.clone().unwrap_or_default();
        said.control = self.control.clone().unwrap_or_default();
        said.state = self.state.clone().unwrap_or_default();
        said.disks.clone_from(&self.disks);
        let machine = match &self.machine {
            Some(file) => said.or(Machine::read(file)?),
            None => said,
        };
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
