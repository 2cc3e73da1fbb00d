//! Cuts the power at every moment of a series of saves, and checks that the old pair or the new one is there, whole.
//!
//! A save runs with a simulated monitor and simulated disks, and its changes of the directory are recorded
//! ([`Change`]). Then the directory of each moment is built as a file system may leave it, with any part of the names
//! and bytes that were not synced.

use crate::disks::{Disks, Layer};
use crate::files::Change;
use crate::machine::Machine;
use crate::record::{Record, UnderWay};
use crate::save::{SaveOptions, Saved, save_with};
use crate::state_file::StateFile;
use block::{Error, ErrorKind, Result};
use control::Options;
use control::api::{FormerTop, InternalSnapshot};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use serde_json::{Value, json};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::AtomicBool;

/// The contents of a disk's file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Held {
    /// Nothing of its own: the file below shows.
    Nothing,
    /// Everything, as the guest last wrote it.
    All(u64),
    /// A part of the data that are being copied there.
    Torn,
}

/// The disk's files: the contents of each, and the file below it.
type View = BTreeMap<PathBuf, (Held, Option<PathBuf>)>;

#[derive(Debug, Clone)]
enum Moment {
    Directory(Change),
    Disk(View),
    /// A save has ended well.
    Saved(u64),
}

static JOURNALS: Mutex<BTreeMap<PathBuf, Vec<Moment>>> = Mutex::new(BTreeMap::new());

fn with_journal(directory: &Path, moment: Moment) {
    if let Some(journal) = JOURNALS.lock().unwrap().get_mut(directory) {
        journal.push(moment);
    }
}

/// Records a change of a directory.
pub(crate) fn note(directory: &Path, change: Change) {
    with_journal(directory, Moment::Directory(change));
}

/// Returns the contents that a file shows.
fn shown(view: &View, file: &Path) -> Held {
    match view.get(file) {
        Some((Held::Nothing, Some(below))) => shown(view, below),
        Some((held, _)) => *held,
        None => Held::Nothing,
    }
}

/// A simulated daemon with one disk. It records each step.
pub(crate) struct MadeUp {
    saved: PathBuf,
    state: RefCell<(Vec<Layer>, View)>,
    /// How many more freezes succeed.
    pub(crate) freezes: Cell<u32>,
}

impl MadeUp {
    pub(crate) fn new(directory: &Path, saved: &Path) -> Self {
        let image = directory.join("image");
        std::fs::write(&image, "").unwrap();
        let view = BTreeMap::from([(image.clone(), (Held::All(0), None))]);
        let layers = vec![Layer { format: "qcow2".to_owned(), file: image }];
        Self { saved: saved.to_owned(), state: RefCell::new((layers, view)), freezes: Cell::new(u32::MAX) }
    }

    fn change(&self, change: impl FnOnce(&mut Vec<Layer>, &mut View)) {
        let (layers, view) = &mut *self.state.borrow_mut();
        change(layers, view);
        with_journal(&self.saved, Moment::Disk(view.clone()));
    }

    pub(crate) fn guest_writes(&self, what: u64) {
        self.change(|layers, view| view.get_mut(&layers[0].file).unwrap().0 = Held::All(what));
    }
}

impl Disks for MadeUp {
    fn names(&self) -> Result<Vec<String>> {
        Ok(vec!["root".to_owned()])
    }

    fn options(&self, _name: &str) -> Result<Options> {
        Ok(Options::default())
    }

    fn layers(&self, _name: &str) -> Result<Vec<Layer>> {
        Ok(self.state.borrow().0.clone())
    }

    fn freeze(&self, overlays: Vec<(String, PathBuf)>) -> Result<()> {
        let left = self.freezes.get().checked_sub(1);
        self.freezes.set(left.ok_or_else(|| Error::new(ErrorKind::Io, "no space for a layer"))?);
        for (_, file) in overlays {
            std::fs::write(&file, "").unwrap();
            self.change(|layers, view| {
                view.insert(file.clone(), (Held::Nothing, Some(layers[0].file.clone())));
                layers.insert(0, Layer { format: "qcow2".to_owned(), file });
            });
        }
        Ok(())
    }

    fn snapshots(&self, _name: &str) -> Result<Vec<InternalSnapshot>> {
        Ok(Vec::new())
    }

    fn take_snapshot(&self, _name: &str, _snapshot: &str, _state: Option<(&Path, u64)>) -> Result<()> {
        panic!("no test saves into an image")
    }

    fn delete_snapshot(&self, _name: &str, _snapshot: &str) -> Result<()> {
        Ok(())
    }

    fn commit(&self, _name: &str, count: usize, _: &AtomicBool, told: &mut dyn FnMut(u64, u64)) -> Result<()> {
        for index in 0..count {
            let (top, below) = {
                let layers = &self.state.borrow().0;
                (layers[0].file.clone(), layers[1].file.clone())
            };
            let held = self.state.borrow().1[&top].0;
            if held != Held::Nothing {
                for step in [Held::Torn, held] {
                    self.change(|_, view| view.get_mut(&below).unwrap().0 = step);
                }
            }
            self.change(|layers, _| drop(layers.remove(0)));
            told(index as u64 + 1, count as u64);
        }
        Ok(())
    }

    fn wait_for_jobs(&self, _name: &str) -> Result<()> {
        Ok(())
    }

    fn replace(&self, _: &str, _: Options, _: Vec<FormerTop>, _: Vec<PathBuf>, _: PathBuf) -> Result<()> {
        Ok(())
    }
}

/// Answers as a simulated monitor, whose machine has `status` and the state `state`. Returns when its client has gone.
pub(crate) fn answer(mut stream: UnixStream, status: &mut &'static str, state: &[u8]) {
    let (mut passed, mut text): (Option<OwnedFd>, _) = (None, Vec::new());
    stream.write_all(b"{\"QMP\": {}}\n").unwrap();
    loop {
        let mut bytes = [0; 4096];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let got = recvmsg(stream.as_fd(), &mut [IoSliceMut::new(&mut bytes)], &mut control, RecvFlags::CMSG_CLOEXEC);
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(mut descriptors) = message {
                passed = descriptors.next();
            }
        }
        match got {
            Ok(got) if got.bytes > 0 => text.extend_from_slice(&bytes[..got.bytes]),
            _ => return,
        }
        while let Some(end) = text.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = text.drain(..=end).collect();
            let message: Value = serde_json::from_slice(&line).unwrap();
            let mut said = json!({});
            match message["execute"].as_str().unwrap() {
                "query-status" => said = json!({ "running": *status == "running", "status": *status }),
                "query-migrate" if *status == "postmigrate" => said = json!({ "status": "completed" }),
                "stop" => *status = "paused",
                "cont" => *status = "running",
                "migrate" => {
                    File::from(passed.take().unwrap()).write_all(state).unwrap();
                    *status = "postmigrate";
                }
                _ => {}
            }
            writeln!(stream, "{}", json!({ "return": said })).unwrap();
        }
    }
}

/// Saves with the simulated monitor and disks.
fn saved(machine: &Machine, disks: &MadeUp, keep: bool, state: &[u8]) -> Saved {
    let _ = std::fs::remove_file(&machine.qmp);
    let monitor = UnixListener::bind(&machine.qmp).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| answer(monitor.accept().unwrap().0, &mut "running", state));
        let saved = save_with(machine, disks, &SaveOptions::new(keep), &AtomicBool::new(false), &mut |_| {});
        let saved = saved.unwrap();
        with_journal(&machine.state, Moment::Saved(saved.record.number));
        saved
    })
}

/// A file: its written bytes, and the number of durable ones.
#[derive(Debug, Clone, Default)]
struct Inode {
    bytes: Vec<u8>,
    durable_bytes: usize,
}

/// A change of names: each name becomes that file, or is removed.
type Names = Vec<(String, Option<usize>)>;

/// A directory on a disk with a cache.
#[derive(Debug, Clone, Default)]
struct Directory {
    inodes: Vec<Inode>,
    now: BTreeMap<String, usize>,
    durable: BTreeMap<String, usize>,
    pending: Vec<Names>,
}

impl Directory {
    fn apply(&mut self, change: &Change) {
        match change {
            Change::Create(name) => {
                self.inodes.push(Inode::default());
                self.rename(vec![(name.clone(), Some(self.inodes.len() - 1))]);
            }
            Change::Write(name, bytes) => self.inodes[self.now[name]].bytes.extend_from_slice(bytes),
            Change::Sync(name) => {
                let inode = &mut self.inodes[self.now[name]];
                inode.durable_bytes = inode.bytes.len();
            }
            Change::Rename(from, to) => {
                let inode = self.now[from];
                self.rename(vec![(from.clone(), None), (to.clone(), Some(inode))]);
            }
            Change::Remove(name) => self.rename(vec![(name.clone(), None)]),
            Change::SyncDirectory => {
                self.durable.clone_from(&self.now);
                self.pending.clear();
            }
        }
    }

    fn rename(&mut self, names: Names) {
        put(&mut self.now, &names);
        self.pending.push(names);
    }

    /// Builds the directory as it may be after a power cut.
    fn leave(&self, target: &Path, seed: u64) {
        let mut state = seed;
        let mut dice = |sides: usize| {
            // SplitMix64, as in its reference implementation.
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mixed = (state ^ state >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
            ((mixed ^ mixed >> 31) % sides as u64) as usize
        };
        let mut names = self.durable.clone();
        let in_order = dice(2) == 0;
        let first_that_is_lost = dice(self.pending.len() + 1);
        for (index, change) in self.pending.iter().enumerate() {
            let is_there = if in_order { index < first_that_is_lost } else { dice(2) == 0 };
            if is_there {
                put(&mut names, change);
            }
        }
        for (name, inode) in names {
            let inode = &self.inodes[inode];
            let mut bytes = inode.bytes.clone();
            let lost = inode.durable_bytes + dice(bytes.len() - inode.durable_bytes + 1);
            match dice(3) {
                // The new length may survive without the bytes.
                0 => bytes[lost..].fill(0),
                _ => bytes.truncate(lost),
            }
            std::fs::write(target.join(name), bytes).unwrap();
        }
    }
}

fn put(names: &mut BTreeMap<String, usize>, change: &Names) {
    for (name, inode) in change {
        match inode {
            Some(inode) => drop(names.insert(name.clone(), *inode)),
            None => drop(names.remove(name)),
        }
    }
}

/// Returns the number of the present pair, after checking that it is whole; `None` if there is none.
fn whole_pair(directory: &Path, disk: &View, wanted: &BTreeMap<u64, u64>) -> Option<u64> {
    let record = Record::read(directory).unwrap()?;
    let state = StateFile::open(&record.state_path(directory)).unwrap();
    state.check().unwrap();
    let mut stream = Vec::new();
    state.extract(&mut stream).unwrap();
    assert_eq!(stream, state_of(record.number), "the state of another pair");
    let held = shown(disk, &record.disks[0].file);
    assert_eq!(held, Held::All(wanted[&record.number]), "pair {} has another disk: {record:?}", record.number);
    Some(record.number)
}

fn state_of(number: u64) -> Vec<u8> {
    format!("the state of save {number}, ").repeat(300).into_bytes()
}

#[test]
fn a_power_cut_at_any_moment_of_a_save_leaves_the_old_pair_or_the_new_one() {
    let dir = tempfile::tempdir().unwrap();
    let machine = Machine { state: dir.path().join("saved"), qmp: dir.path().join("qmp"), ..Machine::nothing() };
    JOURNALS.lock().unwrap().insert(machine.state.clone(), Vec::new());
    let disks = MadeUp::new(dir.path(), &machine.state);
    let mut wanted = BTreeMap::new();
    for (number, keep) in (1..).zip([false, false, true, true, false, false]) {
        disks.guest_writes(number * 10);
        wanted.insert(number, number * 10);
        assert_eq!(saved(&machine, &disks, keep, &state_of(number)).record.number, number);
        disks.guest_writes(number * 10 + 1);
    }

    let journal = JOURNALS.lock().unwrap().remove(&machine.state).unwrap();
    let (mut directory, mut disk, mut last, mut seen) = (Directory::default(), View::new(), None, 0);
    for (at, moment) in journal.iter().enumerate() {
        match moment {
            Moment::Directory(change) => directory.apply(change),
            Moment::Disk(view) => disk.clone_from(view),
            Moment::Saved(number) => last = Some(*number),
        }
        for seed in 0..12 {
            let target = tempfile::tempdir().unwrap();
            directory.leave(target.path(), (at as u64) << 8 | seed);
            let found = whole_pair(target.path(), &disk, &wanted);
            let is_under_way = UnderWay::read(target.path()).is_ok_and(|note| note.is_some());
            assert!(
                !(is_under_way && matches!(moment, Moment::Saved(_))),
                "{at}: a save that is over is under way again"
            );
            assert!(found >= last, "{at}: pair {last:?} was saved, and now there is {found:?}");
            assert!(found <= last.map_or(Some(1), |last| Some(last + 1)), "{at}: {found:?} after {last:?}");
            seen += u32::from(found.is_some());
        }
    }
    assert!(journal.len() > 60 && seen > 0, "{} moments", journal.len());
}

#[test]
fn a_layer_that_the_user_put_on_is_not_taken_back_and_what_lies_below_it_stays_as_it_was() {
    // Also where it has a name as a save would give it.
    for own in ["monday", "image.save-77", "image.restored-2"] {
        stays(own);
    }
}

fn stays(own: &str) {
    let dir = tempfile::tempdir().unwrap();
    let machine = Machine { state: dir.path().join("saved"), qmp: dir.path().join("qmp"), ..Machine::nothing() };
    let disks = MadeUp::new(dir.path(), &machine.state);
    let shown = |file: &str| shown(&disks.state.borrow().1, &dir.path().join(file));
    disks.guest_writes(1);
    assert_eq!(saved(&machine, &disks, false, b"1").notes, [""; 0]);
    disks.guest_writes(2);
    disks.freeze(vec![("root".to_owned(), dir.path().join(own))]).unwrap();
    for (number, made) in [(3, "image.save-2"), (4, "image.save-3-1")] {
        disks.guest_writes(number);
        let saved = saved(&machine, &disks, false, b"state");
        assert!(saved.notes[0].contains(&format!("{own}' stays")), "{:?}", saved.notes);
        let files: Vec<_> = disks.layers("root").unwrap().into_iter().map(|layer| layer.file).collect();
        assert_eq!(files, [made, own, "image.save-1", "image"].map(|name| dir.path().join(name)));
        assert!(files.iter().all(|file| file.exists()));
        assert_eq!(
            (shown("image.save-1"), shown(own), shown(made)),
            (Held::All(2), Held::All(number), Held::All(number))
        );
        assert_eq!(saved.record.disks[0].file, dir.path().join(own));
    }
    assert!(["image.save-2", "image.save-3"].iter().all(|gone| !dir.path().join(gone).exists()));
}
