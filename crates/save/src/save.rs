//! Saving.

mod into_image;

use crate::disks::{Daemon, Disks, Layer};
use crate::files::{free_name, sync_directory};
use crate::machine::Machine;
use crate::own_layers::OwnLayers;
use crate::progress::{Moment, Progress, Step};
use crate::qmp::Qmp;
use crate::record::{Record, SavedDisk, UnderWay, check_files, lock_directory, remove_states};
use crate::state_file::StateFile;
use block::{Error, ErrorKind, Result};
use control::Options;
use rustix::pipe::{PipeFlags, pipe_with};
use serde_json::{Value, json};
use std::fs::File;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Options of a save.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct SaveOptions {
    /// Keep the guest's writes since the last save in layers of their own.
    pub keep: bool,
    /// Save into an internal snapshot of this name in each disk's image instead. The first disk's snapshot keeps the
    /// machine's state.
    pub into_image: Option<String>,
}

impl SaveOptions {
    /// Makes options. The guest's writes go into its images, unless `keep` leaves them in their layers.
    #[must_use]
    pub fn new(keep: bool) -> Self {
        Self { keep, into_image: None }
    }
}

/// The result of a save.
#[derive(Debug)]
#[non_exhaustive]
pub struct Saved {
    /// The record.
    pub record: Record,
    /// Bytes of the machine's state.
    pub state_bytes: u64,
    /// How long the machine was stopped.
    pub paused: Duration,
    /// How long the save took.
    pub total: Duration,
    /// Notes for the user: disks whose layers could not be taken back.
    pub notes: Vec<String>,
}

/// How long to wait for QEMU's socket.
const PATIENCE: Duration = Duration::from_secs(2);
/// No limit, because the machine is stopped meanwhile.
const UNLIMITED_BYTES_PER_SECOND: u64 = 1 << 50;

/// Told where an earlier save has left the machine.
const BROKEN_OFF: &str = "an earlier save was broken off, and the machine may stand still until a save comes to its end; \
                          this one did not begin";

/// Saves a running machine, which then goes on. It also goes on after an error, and the previous pair stays valid. If
/// this program is killed, the machine stays stopped until the next save. If that save cannot finish the work of the
/// killed one, the machine stays stopped, so that its pair stays whole.
pub fn save(
    machine: &Machine,
    options: &SaveOptions,
    cancel: &AtomicBool,
    tell: &mut dyn FnMut(Moment),
) -> Result<Saved> {
    save_with(machine, &Daemon::new(&machine.control)?, options, cancel, tell)
}

/// Like [`save`], for a machine with these disks.
pub(crate) fn save_with(
    machine: &Machine,
    disks: &dyn Disks,
    options: &SaveOptions,
    cancel: &AtomicBool,
    tell: &mut dyn FnMut(Moment),
) -> Result<Saved> {
    let directory = &machine.state;
    let begun = Instant::now();
    let _lock = lock_directory(directory)?;
    let mut own_layers = OwnLayers::read(directory)?;
    let mut before = Record::read(directory)?;
    let names = if machine.disks.is_empty() { disks.names()? } else { machine.disks.clone() };
    // Saves that are impossible are refused before the machine stops.
    let under_way = UnderWay::read(directory)?;
    let check = |before: Option<&Record>| {
        let checked = match &options.into_image {
            Some(snapshot) => into_image::check(disks, &names, snapshot, before),
            None => names.iter().try_for_each(|name| {
                check_has_name(name, &disks.options(name)?)?;
                check_files(name, &disks.layers(name)?)
            }),
        };
        checked.map_err(|error| match under_way {
            None => error,
            Some(_) => error.in_context(BROKEN_OFF),
        })
    };
    check(before.as_ref())?;
    let mut qmp = Qmp::connect(&machine.qmp, PATIENCE)?;

    let mut progress = Progress::new(Step::SAVE, tell);
    progress.begin(Step::Stop);
    let was_running = under_way.is_some_and(|under_way| under_way.was_running) || qmp.is_running()?;
    // If this fails, nothing has changed: a machine that an earlier save has stopped stays stopped, and its pair is
    // whole.
    if finish_commit(disks, &mut qmp, before.as_mut(), under_way, directory, &mut own_layers)? {
        // The disks have new layers on top.
        check(before.as_ref())?;
    }
    let record = Record::next(before.as_ref(), was_running);
    UnderWay { was_running, number: record.number }.write(directory)?;
    let stopped = Instant::now();
    let notes = Vec::new();
    let mut saving = Saving { directory, options, cancel, before, record, disks, names, own_layers, notes };
    let done =
        leave_earlier(&mut qmp).and_then(|()| qmp.run("stop", json!({}))).and_then(|_| match &options.into_image {
            Some(snapshot) => saving.put_into_images(snapshot, &mut qmp, &mut progress),
            None => saving.pair(&mut qmp, &mut progress),
        });
    progress.begin(Step::Resume);
    let resumed = if was_running { go_on(machine, qmp) } else { Ok(()) };
    let paused = stopped.elapsed();
    // If the machine could not go on, the note stays for the next save.
    let resumed = resumed.and_then(|()| UnderWay::remove(directory));
    saving.end(done, resumed, paused, &mut progress).map(|saved| Saved { total: begun.elapsed(), ..saved })
}

/// Lets the machine go on, even if its monitor was left in the middle of a command.
fn go_on(machine: &Machine, mut qmp: Qmp) -> Result<()> {
    let gone = match qmp.run("cont", json!({})) {
        Ok(_) => return Ok(()),
        Err(error) => error,
    };
    tracing::warn!("{gone}; connects once more");
    // QEMU talks to one client at a time.
    drop(qmp);
    let again = Qmp::connect(&machine.qmp, PATIENCE).and_then(|mut qmp| qmp.run("cont", json!({})));
    again.map(drop).map_err(|error| error.in_context("the machine does not go on; save it again"))
}

/// Returns the name of a new layer on this image.
fn new_layer(number: u64, base: &Path) -> Result<PathBuf> {
    free_name(base, |more| if more == 0 { format!(".save-{number}") } else { format!(".save-{number}-{more}") })
}

/// Freezes disks again after layers were taken back: the present top must not be written to.
fn freeze_again(disks: &dyn Disks, record: &mut Record, directory: &Path, own_layers: &mut OwnLayers) -> Result<()> {
    let (mut overlays, mut chains) = (Vec::new(), Vec::new());
    for disk in &mut record.disks {
        let layers = disks.layers(&disk.name)?;
        // However far taking it back has come, the top shows the saved contents.
        if !layers.iter().any(|layer| layer.file == disk.file)
            && let Some(top) = layers.first()
        {
            (disk.file, disk.format) = (top.file.clone(), top.format.clone());
        }
        if layers.first().is_some_and(|top| top.file == disk.file) {
            overlays.push((disk.name.clone(), new_layer(record.number, &disk.base)?));
        }
        chains.push(layers);
    }
    if !overlays.is_empty() {
        own_layers.note(directory, overlays.iter().map(|(_, file)| file.as_path()))?;
        disks.freeze(overlays)?;
    }
    for (disk, layers) in record.disks.iter_mut().zip(&chains) {
        disk.look(layers)?;
    }
    record.publish(directory)
}

/// Finishes a save that was killed while layers were taken back, before the machine may go on. The daemon has gone on
/// with its part. `under_way` is the note of the last save that was broken off. Returns whether there was a save to
/// finish.
fn finish_commit(
    disks: &dyn Disks,
    qmp: &mut Qmp,
    before: Option<&mut Record>,
    under_way: Option<UnderWay>,
    directory: &Path,
    own_layers: &mut OwnLayers,
) -> Result<bool> {
    let Some(before) = before.filter(|before| !before.is_finished()) else {
        return Ok(false);
    };
    before.disks.iter().try_for_each(|disk| disks.wait_for_jobs(&disk.name))?;
    if !stands_since(before, under_way, qmp)? {
        // The machine's writes may be in the saved files, so these never count as whole.
        return Ok(false);
    }
    freeze_again(disks, before, directory, own_layers)?;
    Ok(true)
}

/// Refuses a disk whose writes go into a temporary file without a name.
fn check_has_name(name: &str, options: &Options) -> Result<()> {
    if options.get("snapshot") != Some("on") || options.get("keep").is_some() {
        return Ok(());
    }
    let what = "it has snapshot=on without keep=, so its writes are in a file that has no name";
    let remedy = "give it keep=FILE, or name the other disks with --disk";
    Err(Error::new(ErrorKind::Unsupported, format!("disk '{name}' cannot be saved: {what}; {remedy}")))
}

/// Whether the machine has stood still since the state of `record` was written. QEMU has the status `postmigrate` from
/// the end of any migration until it runs. So the save of this record must also be the last one that was begun: a later
/// one may have let the machine run, and may have written another state.
pub(crate) fn stands_since(record: &Record, under_way: Option<UnderWay>, qmp: &mut Qmp) -> Result<bool> {
    Ok(under_way.is_some_and(|last| last.number == record.number) && qmp.status()? == "postmigrate")
}

/// Ends the migration of a killed save. QEMU may be in the middle of it, or past its end; in both states it starts no
/// other.
fn leave_earlier(qmp: &mut Qmp) -> Result<()> {
    let is_under_way = |answer: &Value| {
        let ended = ["none", "completed", "failed", "cancelled"];
        answer.get("status").and_then(Value::as_str).is_some_and(|status| !ended.contains(&status))
    };
    if is_under_way(&qmp.run("query-migrate", json!({}))?) {
        qmp.run("migrate_cancel", json!({}))?;
        while is_under_way(&qmp.run("query-migrate", json!({}))?) {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
    if qmp.status()? == "postmigrate" {
        qmp.run("cont", json!({}))?;
    }
    Ok(())
}

pub(crate) struct Saving<'a> {
    pub(crate) directory: &'a Path,
    options: &'a SaveOptions,
    cancel: &'a AtomicBool,
    pub(crate) before: Option<Record>,
    pub(crate) record: Record,
    pub(crate) disks: &'a dyn Disks,
    pub(crate) names: Vec<String>,
    own_layers: OwnLayers,
    pub(crate) notes: Vec<String>,
}

impl Saving<'_> {
    /// Decides the result of the save, when the machine goes on or cannot.
    fn end(
        self,
        done: Result<u64>,
        resumed: Result<()>,
        paused: Duration,
        progress: &mut Progress<'_>,
    ) -> Result<Saved> {
        let error = match (done, resumed) {
            (Ok(state_bytes), Ok(())) => {
                if self.options.into_image.is_none() {
                    let removed = self.record.remove_others(self.directory);
                    removed.map_err(|error| error.in_context("the machine is saved; but"))?;
                }
                progress.end();
                let total = paused;
                return Ok(Saved { record: self.record, state_bytes, paused, total, notes: self.notes });
            }
            (Ok(_), Err(error)) => return Err(error.in_context("the machine is saved; but")),
            (Err(error), Ok(())) => error,
            (Err(error), Err(second)) => error.in_context(second.to_string()),
        };
        // A record that cannot be read may be the new one, so the new state stays.
        let published = match Record::read(self.directory) {
            Ok(Some(record)) if record.number == self.record.number => Some(record.is_finished()),
            Ok(_) => None,
            Err(_) => Some(false),
        };
        match published {
            Some(true) => Err(error.in_context("the machine is saved; but")),
            Some(false) => Err(error.in_context("what was saved may not be whole, save it again")),
            None => {
                remove_states(self.directory, self.before.as_ref().map(|before| before.state.as_str()))?;
                Err(error.in_context("the machine was not saved"))
            }
        }
    }

    /// Makes the new pair while the machine is stopped; returns the bytes of its state.
    fn pair(&mut self, qmp: &mut Qmp, progress: &mut Progress<'_>) -> Result<u64> {
        progress.begin(Step::State);
        remove_states(self.directory, self.before.as_ref().map(|before| before.state.as_str()))?;
        let state = self.state(qmp, progress)?;
        self.check()?;

        progress.begin(Step::Freeze);
        let (mut saved, mut overlays, mut chains) = (Vec::new(), Vec::new(), Vec::new());
        for name in &self.names {
            let layers = self.disks.layers(name)?;
            let disk = self.saved_disk(name, &layers)?;
            overlays.push((name.clone(), new_layer(self.record.number, &disk.base)?));
            saved.push(disk);
            chains.push(layers);
        }
        self.own_layers.note(self.directory, overlays.iter().map(|(_, file)| file.as_path()))?;
        self.disks.freeze(overlays)?;
        for (disk, layers) in saved.iter_mut().zip(&chains) {
            disk.look(layers)?;
        }

        progress.begin(Step::Publish);
        self.record.disks = saved;
        sync_directory(self.directory)?;
        self.record.publish(self.directory)?;

        progress.begin(Step::Commit);
        if !self.options.keep {
            self.commit(progress)?;
        }
        Ok(state)
    }

    pub(crate) fn check(&self) -> Result<()> {
        match self.cancel.load(Ordering::Relaxed) {
            true => Err(Error::new(ErrorKind::Cancelled, "interrupted")),
            false => Ok(()),
        }
    }

    /// Returns the record of a disk that is to be saved.
    fn saved_disk(&self, name: &str, layers: &[Layer]) -> Result<SavedDisk> {
        let missing = || Error::new(ErrorKind::Unsupported, format!("disk '{name}' has no file that could be saved"));
        let top = layers.first().ok_or_else(missing)?;
        let before = self.before.as_ref().and_then(|before| before.disks.iter().find(|disk| disk.name == name));
        // The base of earlier saves, or else the present top.
        let base = before.map(|before| &before.base).filter(|base| layers.iter().any(|layer| layer.file == **base));
        Ok(SavedDisk {
            name: name.to_owned(),
            file: top.file.clone(),
            format: top.format.clone(),
            base: base.unwrap_or(&top.file).clone(),
            options: self.disks.options(name)?,
            seen: None,
            below: Vec::new(),
            others: Vec::new(),
        })
    }

    /// Takes layers of saves and restores back into the layers below them, and freezes those. A layer of another user
    /// stays, because that user may want to keep the state below it.
    fn commit(&mut self, progress: &mut Progress<'_>) -> Result<()> {
        let mut counts = Vec::new();
        for disk in &self.record.disks {
            let layers = self.disks.layers(&disk.name)?;
            let above = layers.iter().position(|layer| layer.file == disk.base).unwrap_or(0);
            let other = layers.iter().take(above).position(|layer| !self.own_layers.has(&layer.file));
            if let Some(layer) = other.and_then(|other| layers.get(other)) {
                let (name, file) = (&disk.name, layer.file.display());
                self.notes.push(format!("disk '{name}': '{file}' stays, because no save or restore has put it on"));
            }
            counts.push((layers, other.unwrap_or(above)));
        }
        // The new layer alone is empty.
        if counts.iter().all(|(_, count)| *count < 2) {
            return Ok(());
        }
        // From here on, the layers and the image show the same contents, however far taking back has come.
        self.record.disks.iter_mut().for_each(SavedDisk::is_taken_back);
        self.record.publish(self.directory)?;
        let all = counts.iter().filter(|(_, count)| *count >= 2).count() as u64;
        let mut gone = Vec::new();
        for (index, (disk, (layers, count))) in
            self.record.disks.iter().zip(&counts).filter(|(_, (_, count))| *count >= 2).enumerate()
        {
            let mut told = |done: u64, total: u64| {
                // Each disk counts as an equal part, measured in the bytes of this one.
                progress.moved((index as u64).saturating_mul(total).saturating_add(done), total.saturating_mul(all));
            };
            if let Err(error) = self.disks.commit(&disk.name, *count, self.cancel, &mut told) {
                self.notes.push(format!("disk '{}' keeps its layers: {error}", disk.name));
            }
            gone.extend(layers.iter().take(*count).map(|layer| (disk.name.clone(), layer.file.clone())));
        }
        freeze_again(self.disks, &mut self.record, self.directory, &mut self.own_layers)?;
        for (name, file) in gone {
            // Files in use stay. A file that cannot be removed does no harm.
            if self.disks.layers(&name)?.iter().all(|layer| layer.file != file) {
                let _ = std::fs::remove_file(file);
            }
        }
        Ok(())
    }

    /// Writes the machine's state, which QEMU sends through a pipe. Returns its size, in bytes.
    pub(crate) fn state(&self, qmp: &mut Qmp, progress: &mut Progress<'_>) -> Result<u64> {
        const NAME: &str = "ringdisk-state";
        let pipe = pipe_with(PipeFlags::CLOEXEC);
        let (source, target) = pipe.map_err(|errno| Error::io("cannot make a pipe", errno.into()))?;
        qmp.pass(NAME, target.as_fd())?;
        drop(target);
        let bandwidth = prepare(qmp)?;
        qmp.run("migrate", json!({ "uri": format!("fd:{NAME}") }))?;
        let path = self.record.state_path(self.directory);
        let written_bytes = AtomicU64::new(0);
        // QEMU answers no command while its pipe is not read.
        let (written, ended) = std::thread::scope(|scope| {
            let mut told = |bytes| {
                written_bytes.store(bytes, Ordering::Relaxed);
                Ok(())
            };
            let writer = scope.spawn(move || StateFile::write(&path, &mut File::from(source), &mut told));
            let ended = self.watch_migration(qmp, progress, &written_bytes);
            if ended.is_err() {
                // So that the writer ends, too.
                let _ = qmp.run("migrate_cancel", json!({}));
            }
            let fell_over = |_| Err(Error::new(ErrorKind::Io, "the thread that writes the machine's state has failed"));
            (writer.join().unwrap_or_else(fell_over), ended)
        });
        // Later migrations by other users must not be affected.
        for parameter in [json!({ "mode": "normal" }), json!({ "max-bandwidth": bandwidth })] {
            let _ = qmp.run("migrate-set-parameters", parameter);
        }
        let written = match (written, ended) {
            // QEMU was told to stop, or it fails because its output is not read.
            (_, Err(error)) if error.kind() == ErrorKind::Cancelled => return Err(error),
            (Err(error), _) | (Ok(_), Err(error)) => return Err(error),
            (Ok(written), Ok(())) => written,
        };
        Ok(written.stream_bytes)
    }

    /// Waits until QEMU says how the migration ended.
    fn watch_migration(&self, qmp: &mut Qmp, progress: &mut Progress<'_>, written_bytes: &AtomicU64) -> Result<()> {
        loop {
            self.check()?;
            let answer = qmp.run("query-migrate", json!({}))?;
            match answer.get("status").and_then(Value::as_str) {
                Some("completed") => return Ok(()),
                Some("failed" | "cancelled") => {
                    let why = answer.get("error-desc").and_then(Value::as_str).unwrap_or("it does not say why");
                    return Err(qmp.wrong(&format!("it cannot write its state: {why}")));
                }
                _ => {}
            }
            // These are figures of the machine's memory. Zero pages take hardly any space in the file.
            let memory = |what: &str| answer.pointer(&format!("/ram/{what}")).and_then(Value::as_u64).unwrap_or(0);
            let total = memory("total");
            let seen = total.saturating_sub(memory("remaining"));
            progress.moved(seen.max(written_bytes.load(Ordering::Relaxed)).min(total), total);
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// Sets how QEMU writes the state. Returns QEMU's former limit, in bytes a second. Ringdisk keeps no log of the memory
/// that it writes; a QEMU that knows the mode `cpr-reboot` needs none while the machine is stopped.
fn prepare(qmp: &mut Qmp) -> Result<Value> {
    let before = qmp.run("query-migrate-parameters", json!({}))?;
    qmp.run("migrate-set-parameters", json!({ "max-bandwidth": UNLIMITED_BYTES_PER_SECOND }))?;
    if let Err(error) = qmp.run("migrate-set-parameters", json!({ "mode": "cpr-reboot" })) {
        tracing::warn!("{error}; a QEMU before 9.0 may refuse to save a machine with vhost-user disks");
    }
    Ok(before.get("max-bandwidth").cloned().unwrap_or_else(|| json!(128 << 20)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_whose_writes_have_no_name_is_refused_with_the_reason() {
        let of = |text: &str| check_has_name("tmp", &Options::parse(text).unwrap());
        let error = of("file=image,format=raw,snapshot=on").unwrap_err().to_string();
        assert!(["'tmp'", "snapshot=on", "--disk"].iter().all(|part| error.contains(part)), "{error}");
        of("file=image,format=raw,snapshot=on,keep=image.scratch").unwrap();
        of("file=image,format=raw,snapshot=off").unwrap();
    }
}
