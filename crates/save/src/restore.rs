//! Restoring: finds the pair that is whole, and lets the machine go on from it.

use crate::disks::{Daemon, Disks};
use crate::files::free_name;
use crate::machine::Machine;
use crate::own_layers::OwnLayers;
use crate::progress::{Moment, Progress, Step};
use crate::qmp::Qmp;
use crate::record::{Record, UnderWay, lock_directory};
use crate::save::stands_since;
use crate::state_file::StateFile;
use block::{Error, ErrorKind, Result};
use control::Options;
use rustix::pipe::{PipeFlags, pipe_with};
use serde_json::json;
use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// A saved pair that is whole.
#[derive(Debug)]
pub struct Restore {
    /// The record of the save.
    pub record: Record,
    /// The machine's state.
    pub state: StateFile,
    /// The file of the state.
    pub state_path: PathBuf,
    /// A later save was begun and did not end.
    pub was_broken_off: bool,
    /// Notes for the user: files with later writes of the machine, which only the user may still need.
    pub notes: Vec<String>,
}

/// How long a QEMU may take to open its monitor.
const START_PATIENCE: Duration = Duration::from_secs(30);

/// Finds the last save and checks it: the state against its checksum, the disks against the record. With `force`, disks
/// that a save has not frozen again are taken as they are. `tell` hears of the first step of a restore; setting
/// `cancel` ends it.
pub fn find(machine: &Machine, force: bool, cancel: &AtomicBool, tell: &mut dyn FnMut(Moment)) -> Result<Restore> {
    let directory = &machine.state;
    let record = Record::read(directory)?
        .ok_or_else(|| Error::new(ErrorKind::NotFound, format!("no machine was saved in '{}'", directory.display())))?;
    let state_path = record.state_path(directory);
    let state = StateFile::open(&state_path)?;
    let mut progress = Progress::new(Step::RESTORE, tell);
    progress.begin(Step::Look);
    state.extract_telling(&mut std::io::sink(), &mut |bytes| {
        progress.moved(bytes, state.stream_bytes);
        check(cancel)
    })?;
    record.check_disks(force)?;
    let under_way = UnderWay::read(directory)?;
    if !record.is_finished() && !force && !stands(machine, &record, under_way) {
        let what = "the save was broken off while it took layers back, and nothing shows that the machine has not run since. If \
                    it has not run since, use --force; if it has, what was saved is lost";
        return Err(Error::new(ErrorKind::BadImage, format!("'{}': {what}", directory.display())));
    }
    Ok(Restore { record, state, state_path, was_broken_off: under_way.is_some(), notes: Vec::new() })
}

fn check(cancel: &AtomicBool) -> Result<()> {
    match cancel.load(Ordering::Relaxed) {
        true => Err(Error::new(ErrorKind::Cancelled, "interrupted")),
        false => Ok(()),
    }
}

/// Whether the machine says that it has not run since the state of `record` was written.
fn stands(machine: &Machine, record: &Record, under_way: Option<UnderWay>) -> bool {
    let qmp = Qmp::connect(&machine.qmp, Duration::ZERO);
    qmp.and_then(|mut qmp| stands_since(record, under_way, &mut qmp)).unwrap_or(false)
}

impl Restore {
    /// Returns the options of each disk before the machine writes to it: the saved file is the top.
    fn drives(&self) -> impl Iterator<Item = (&str, Options)> {
        self.record.disks.iter().map(|disk| {
            let mut options = disk.options.clone();
            // The file that was saved holds the scratch overlay's contents, or is the overlay itself.
            if options.get("keep").is_some() {
                options.remove(&["snapshot", "keep"]);
            }
            options.set("name", disk.name.as_str());
            options.set("file", disk.file.to_string_lossy());
            options.set("format", disk.format.as_str());
            (disk.name.as_str(), options)
        })
    }

    /// Returns the command that starts the machine, with arguments for receiving its state.
    #[must_use]
    pub fn command(&self, machine: &Machine, program: &Path) -> Vec<String> {
        let extract = format!("exec:{} state extract {} -", quoted(program), quoted(&self.state_path));
        machine.qemu.iter().cloned().chain(["-incoming".to_owned(), extract]).collect()
    }
}

/// Quotes a path for a shell.
fn quoted(path: &Path) -> String {
    format!("'{}'", path.to_string_lossy().replace('\'', "'\\''"))
}

/// Refuses disks in use. Without a monitor to ask, the machine itself may be the user, and would lose them.
fn refuse_used<'a>(names: impl IntoIterator<Item = &'a str>, is_used: impl Fn(&str) -> Result<bool>) -> Result<()> {
    for name in names {
        if is_used(name)? {
            let what = "is in use, and whoever uses it would lose it";
            let hint = "end the machine first, or say where its monitor would be (qmp), or use --force";
            return Err(Error::new(ErrorKind::Locked, format!("disk '{name}' {what}: {hint}")));
        }
    }
    Ok(())
}

/// Serves the saved disks, each under a new layer for the machine's later writes. The daemon must run. An interruption
/// leaves the pair as it was. With `force`, disks in use are not refused.
fn serve_disks(
    machine: &Machine,
    restore: &mut Restore,
    force: bool,
    cancel: &AtomicBool,
    progress: &mut Progress<'_>,
) -> Result<()> {
    progress.begin(Step::Serve);
    let disks = Daemon::new(&machine.control)?;
    let mut own_layers = OwnLayers::read(&machine.state)?;
    let present = disks.names()?;
    if machine.qmp.as_os_str().is_empty() && !force {
        let saved = restore.record.disks.iter().map(|disk| &disk.name).filter(|name| present.contains(name));
        refuse_used(saved.map(String::as_str), |name| disks.is_used(name))?;
    }
    // Opening an image for writing may change its times, but no byte that a guest sees. So each disk is recorded anew:
    // an interrupted restore must not make the pair look changed.
    restore.record.is_being_restored = true;
    restore.record.publish(&machine.state)?;
    let drives: Vec<(String, Options)> = restore.drives().map(|(name, options)| (name.to_owned(), options)).collect();
    for (index, (name, options)) in drives.into_iter().enumerate() {
        let Some(disk) = restore.record.disks.get_mut(index) else { break };
        if let Err(error) = check(cancel) {
            // The disks that were served already have new records.
            restore.record.is_being_restored = false;
            restore.record.publish(&machine.state)?;
            return Err(error);
        }
        if present.contains(&name) {
            let tops = disks.layers(&name).unwrap_or_default();
            let above = tops.iter().map(|layer| &layer.file).take_while(|file| **file != disk.file);
            restore.notes.extend(above.filter(|file| own_layers.has(file)).map(|file| {
                let file = file.display();
                format!(
                    "disk '{name}': '{file}' has what the machine wrote after the save; remove it if nobody needs that"
                )
            }));
        }
        let layer = free_name(&disk.base, |number| format!(".restored-{}", number + 1))?;
        own_layers.note(&machine.state, [layer.as_path()])?;
        disks.replace(&name, options, disk.former_tops(), disk.bases(), layer)?;
        disk.look_again()?;
        restore.record.publish(&machine.state)?;
    }
    restore.record.is_being_restored = false;
    restore.record.publish(&machine.state)?;
    // A machine that a broken-off save has stopped has lost its disks, and nobody lets it go on.
    UnderWay::remove(&machine.state)
}

/// Locks the directory, and checks that the machine may be given its disks.
fn begin(machine: &Machine, restore: &Restore) -> Result<File> {
    let lock = lock_directory(&machine.state)?;
    if Record::read(&machine.state)?.as_ref() != Some(&restore.record) {
        let what = "was saved to meanwhile: try again";
        return Err(Error::new(ErrorKind::Locked, format!("'{}' {what}", machine.state.display())));
    }
    if UnixStream::connect(&machine.qmp).is_ok() {
        let what = "a machine is there already (qmp): end it first, it would lose its disks";
        return Err(Error::new(ErrorKind::Locked, format!("'{}': {what}", machine.qmp.display())));
    }
    Ok(lock)
}

/// Makes the daemon serve the saved disks, each under a new layer, and leaves starting the machine to the caller. The
/// daemon must run. If no monitor is known, disks in use are refused, unless `force` takes them away.
pub fn serve(
    machine: &Machine,
    restore: &mut Restore,
    force: bool,
    cancel: &AtomicBool,
    tell: &mut dyn FnMut(Moment),
) -> Result<()> {
    let _lock = begin(machine, restore)?;
    let mut progress = Progress::behind_first(Step::RESTORE, restore.state.stream_bytes, tell);
    serve_disks(machine, restore, force, cancel, &mut progress)?;
    progress.end();
    Ok(())
}

/// Waits for the monitor of a starting machine.
fn connect(child: &mut Child, machine: &Machine, cancel: &AtomicBool) -> Result<Qmp> {
    let begun = Instant::now();
    loop {
        check(cancel)?;
        if let Ok(Some(status)) = child.try_wait() {
            return Err(Error::new(ErrorKind::Io, format!("the machine ended as it started, with {status}")));
        }
        match Qmp::connect(&machine.qmp, Duration::ZERO) {
            Err(_) if begun.elapsed() < START_PATIENCE => std::thread::sleep(Duration::from_millis(20)),
            connected => return connected,
        }
    }
}

/// Starts the saved machine again. The daemon must run; the machine's disks are put back first. If this program is
/// killed, the pair is as before. The machine's program may then still run; end it before the next try. Setting
/// `cancel` ends that program, and the pair is as before.
pub fn run(
    machine: &Machine,
    restore: &mut Restore,
    cancel: &AtomicBool,
    tell: &mut dyn FnMut(Moment),
) -> Result<Child> {
    const NAME: &str = "ringdisk-state";
    let Some((program, arguments)) = machine.qemu.split_first() else {
        let what = "which command starts the machine is not known: give it in the machine's description (qemu = [...])";
        return Err(Error::new(ErrorKind::BadOption, what));
    };
    let _lock = begin(machine, restore)?;
    let mut progress = Progress::behind_first(Step::RESTORE, restore.state.stream_bytes, tell);
    serve_disks(machine, restore, false, cancel, &mut progress)?;
    progress.begin(Step::Start);
    check(cancel)?;
    let child = Command::new(program).args(arguments).args(["-incoming", "defer"]).spawn();
    let mut child = child.map_err(|error| Error::io(format!("cannot start '{program}'"), error))?;
    let begun = (|| {
        let mut qmp = connect(&mut child, machine, cancel)?;
        let pipe = pipe_with(PipeFlags::CLOEXEC);
        let (source, target) = pipe.map_err(|errno| Error::io("cannot make a pipe", errno.into()))?;
        qmp.pass(NAME, source.as_fd())?;
        drop(source);
        qmp.run("migrate-incoming", json!({ "uri": format!("fd:{NAME}") }))?;
        progress.begin(Step::State);
        let total = restore.state.stream_bytes;
        restore.state.extract_telling(&mut File::from(target), &mut |bytes| {
            progress.moved(bytes, total);
            check(cancel)
        })?;
        while qmp.status()? == "inmigrate" {
            check(cancel)?;
            std::thread::sleep(Duration::from_millis(20));
        }
        progress.begin(Step::Resume);
        check(cancel)?;
        if restore.record.was_running {
            qmp.run("cont", json!({}))?;
        }
        Ok(())
    })();
    if let Err(error) = begun {
        // It has taken only half of the state, so it is useless.
        let _ = child.kill();
        let _ = child.wait();
        return Err(error);
    }
    progress.end();
    Ok(child)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::SavedDisk;

    #[test]
    fn a_pair_whose_layers_were_being_taken_back_is_refused_unless_its_machine_still_stands() {
        let dir = tempfile::tempdir().unwrap();
        let machine = Machine { state: dir.path().to_owned(), qmp: dir.path().join("qmp"), ..Machine::nothing() };
        let image = dir.path().join("image");
        std::fs::write(&image, "one").unwrap();
        let mut record = Record::next(None, true);
        StateFile::write(&record.state_path(dir.path()), &mut [1u8; 100].as_slice(), &mut |_| Ok(())).unwrap();
        record.disks.push(SavedDisk {
            name: "root".to_owned(),
            file: image.clone(),
            format: "scratch".to_owned(),
            base: image,
            options: Options::parse("file=/below,snapshot=on,keep=/kept,cache=none").unwrap(),
            seen: None,
            below: Vec::new(),
            others: Vec::new(),
        });
        record.publish(dir.path()).unwrap();
        let error = find(&machine, false, &AtomicBool::new(false), &mut |_| {}).unwrap_err().to_string();
        assert!(error.contains("--force"), "{error}");
        let restore = find(&machine, true, &AtomicBool::new(false), &mut |_| {}).unwrap();
        let (_, options) = restore.drives().next().unwrap();
        assert_eq!(
            (options.get("format"), options.get("keep"), options.get("snapshot")),
            (Some("scratch"), None, None)
        );
        // Whoever answers is in the way.
        let _monitor = std::os::unix::net::UnixListener::bind(&machine.qmp).unwrap();
        let machine = Machine { qemu: vec!["false".to_owned()], ..machine };
        let mut restore = find(&machine, true, &AtomicBool::new(false), &mut |_| {}).unwrap();
        let go_on = AtomicBool::new(false);
        let error = run(&machine, &mut restore, &go_on, &mut |_| {}).unwrap_err().to_string();
        assert!(error.contains("end it first"), "{error}");
        let error = serve(&machine, &mut restore, false, &go_on, &mut |_| {}).unwrap_err().to_string();
        assert!(error.contains("end it first"), "{error}");
        let error = find(&machine, true, &AtomicBool::new(true), &mut |_| {}).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Cancelled);
    }

    #[test]
    fn disks_that_somebody_uses_are_not_taken_away_unasked() {
        let names = ["a", "b", "c"];
        refuse_used(names, |_| Ok(false)).unwrap();
        let error = refuse_used(names, |name| Ok(name == "b")).unwrap_err();
        let said = error.to_string();
        assert!(said.contains("'b'") && said.contains("--force") && said.contains("qmp"), "{said}");
        assert_eq!(error.kind(), ErrorKind::Locked);
        let unknown = |_: &str| Err(Error::new(ErrorKind::Io, "the daemon says nothing"));
        assert_eq!(refuse_used(names, unknown).unwrap_err().kind(), ErrorKind::Io);
    }
}
