//! Restoring: which pair is whole, and how the machine goes on from it.

use crate::disks::Disks;
use crate::machine::Machine;
use crate::qmp::Qmp;
use crate::record::{Record, Seen};
use crate::state_file::StateFile;
use block::{Error, ErrorKind, Result};
use control::Options;
use rustix::pipe::{PipeFlags, pipe_with};
use serde_json::json;
use std::fs::File;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::Duration;

/// A pair that is whole.
#[derive(Debug)]
pub struct Restore {
    /// What was saved.
    pub record: Record,
    /// The machine's state.
    pub state: StateFile,
    /// Where that is.
    pub state_path: PathBuf,
}

/// How long a QEMU may take to open its monitor.
const START_PATIENCE: Duration = Duration::from_secs(30);

/// Finds what was saved last, and looks whether it is whole: the state against its checksum, the disks against what was
/// noted of them.
pub fn find(machine: &Machine) -> Result<Restore> {
    let directory = &machine.state;
    let record = Record::read(directory)?.ok_or_else(|| {
        Error::new(ErrorKind::BadOption, format!("no machine was saved in '{}'", directory.display()))
    })?;
    let state_path = record.state_path(directory);
    let state = StateFile::open(&state_path)?;
    state.check()?;
    record.disks.iter().try_for_each(|disk| disk.check())?;
    Ok(Restore { record, state, state_path })
}

impl Restore {
    /// The options of each disk as they are before the machine writes to it: the file that was saved is the top.
    fn drives(&self) -> impl Iterator<Item = (&str, Options)> {
        self.record.disks.iter().map(|disk| {
            let mut options = disk.options.clone();
            options.set("name", disk.name.as_str());
            options.set("file", disk.file.to_string_lossy());
            options.set("format", disk.format.as_str());
            (disk.name.as_str(), options)
        })
    }

    /// The command that starts the machine, with the arguments that let it take its state.
    #[must_use]
    pub fn command(&self, machine: &Machine, program: &Path) -> Vec<String> {
        let extract = format!("exec:{} state extract {} -", quoted(program), quoted(&self.state_path));
        machine.qemu.iter().cloned().chain(["-incoming".to_owned(), extract]).collect()
    }
}

/// A path as a shell takes it.
fn quoted(path: &Path) -> String {
    format!("'{}'", path.to_string_lossy().replace('\'', "'\\''"))
}

/// Serves the disks as they were saved, each under a new layer for what the machine writes from here on. The daemon runs.
fn serve(machine: &Machine, restore: &mut Restore) -> Result<()> {
    let disks = Disks::new(&machine.control)?;
    for (name, options) in restore.drives() {
        disks.replace(name, options)?;
    }
    let mut overlays = Vec::new();
    for disk in &restore.record.disks {
        let named = |number: u32| {
            let mut name = disk.base.as_os_str().to_owned();
            name.push(format!(".restored-{number}"));
            PathBuf::from(name)
        };
        let free = (1..1000).map(named).find(|path| !path.exists());
        let free = free.ok_or_else(|| {
            let what = format!("'{}.restored-1' and a thousand more exist: remove those", disk.base.display());
            Error::new(ErrorKind::BadOption, what)
        })?;
        overlays.push((disk.name.clone(), free));
    }
    disks.freeze(overlays)?;
    // Opening an image for writing changes its times, and no byte that a guest sees.
    for disk in &mut restore.record.disks {
        disk.seen = Some(Seen::of(&disk.file)?);
    }
    restore.record.publish(&machine.state)
}

/// Starts the machine again from what was saved. The daemon must run; its disks are put back first.
pub fn run(machine: &Machine, restore: &mut Restore) -> Result<Child> {
    const NAME: &str = "ringdisk-state";
    let Some((program, arguments)) = machine.qemu.split_first() else {
        let what = "which command starts the machine is not known: give it in the machine's description (qemu = [...])";
        return Err(Error::new(ErrorKind::BadOption, what));
    };
    serve(machine, restore)?;
    let child = Command::new(program).args(arguments).args(["-incoming", "defer"]).spawn();
    let mut child = child.map_err(|error| Error::io(format!("cannot start '{program}'"), error))?;
    let begun = (|| {
        let mut qmp = Qmp::connect(&machine.qmp, START_PATIENCE)?;
        let pipe = pipe_with(PipeFlags::CLOEXEC);
        let (source, target) = pipe.map_err(|errno| Error::io("cannot make a pipe", errno.into()))?;
        qmp.pass(NAME, source.as_fd())?;
        drop(source);
        qmp.run("migrate-incoming", json!({ "uri": format!("fd:{NAME}") }))?;
        restore.state.extract(&mut File::from(target))?;
        while qmp.status()? == "inmigrate" {
            std::thread::sleep(Duration::from_millis(20));
        }
        if restore.record.was_running {
            qmp.run("cont", json!({}))?;
        }
        Ok(())
    })();
    if let Err(error) = begun {
        // It has taken half a state: nothing of it is of use.
        let _ = child.kill();
        let _ = child.wait();
        return Err(error);
    }
    Ok(child)
}
