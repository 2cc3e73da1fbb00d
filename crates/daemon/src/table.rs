//! The table of disks and exports: which exist, which are being added or removed, and which export keeps which disk.
//!
//! Nothing here takes long. The caller opens and closes disks, and begins and ends exports, without the lock. Meanwhile
//! their entries say so, and keep the names.

use crate::fronts::front::Front;
use crate::state::attach::Attachment;
use crate::state::caller::{Caller, Switches};
use crate::state::place::PassedSocket;
use crate::state::status::{ExportId, ExportStatus, NodeId};
use block::{Error, ErrorKind, Result};
use drive::{DiskOptions, OpenedDisk, absolute};
use export_vhost_user::{QueueLatency, RingStats};
use image::{CopyWatch, FileName, Hold};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// The table. Every method returns at once, except those that wait.
#[derive(Default)]
pub(crate) struct Table {
    state: Mutex<State>,
    /// Notified when a disk or an export has gone, or a work has ended.
    gone: Condvar,
}

#[derive(Default)]
struct State {
    nodes: BTreeMap<NodeId, Node>,
    exports: BTreeMap<ExportId, Exported>,
    /// The works on disks at the moment.
    works: BTreeMap<u64, Working>,
    next_node: u64,
    next_export: u64,
    next_work: u64,
}

/// The phase of a disk's or an export's life.
enum Phase<T> {
    /// Its name is taken, and it is being made.
    Coming,
    Here(T),
    /// It is being ended.
    Going,
}

struct Node {
    name: String,
    /// The file's name, or a substitute for one.
    file: String,
    path: Option<PathBuf>,
    options: DiskOptions,
    disk: Phase<Arc<OpenedDisk>>,
    /// Requests of an export that was removed were given up. They may still be in flight.
    gave_up_requests: bool,
    past: Past,
}

/// The figures of a disk's exports that were removed: a disk's counters never fall.
#[derive(Default)]
pub(crate) struct Past {
    rings: RingStats,
    latency: QueueLatency,
}

struct Exported {
    node: NodeId,
    read_only: bool,
    attachment: Attachment,
    /// The socket, if it was passed.
    passed: Option<PassedSocket>,
    export: Phase<Front>,
    /// Holds requests of its guests, if the disk does.
    hold: Option<Hold>,
}

/// A disk that is open.
pub(crate) struct Found {
    pub(crate) id: NodeId,
    pub(crate) name: String,
    pub(crate) file: String,
    pub(crate) path: Option<PathBuf>,
    pub(crate) options: DiskOptions,
    pub(crate) disk: Arc<OpenedDisk>,
    /// What the rings of its removed exports have counted.
    pub(crate) past: RingStats,
}

struct Working {
    node: NodeId,
    what: String,
    /// Cancels it, if it takes long.
    watch: Option<Arc<CopyWatch>>,
    /// Who began it. A job goes on elsewhere.
    caller: Caller,
    /// It waits for storage that hangs, and nobody waits for it.
    is_left: bool,
}

/// A disk that was taken out. It is forgotten when this goes.
pub(crate) struct Going<'a> {
    table: &'a Table,
    id: NodeId,
}

impl Drop for Going<'_> {
    fn drop(&mut self) {
        self.table.forget_node(self.id);
    }
}

/// Something that is being done to a disk. The disk stays as long as this lives.
pub(crate) struct Work {
    table: Arc<Table>,
    number: u64,
}

impl Work {
    pub(crate) fn number(&self) -> u64 {
        self.number
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        self.table.lock().works.remove(&self.number);
        self.table.gone.notify_all();
    }
}

impl<T> Phase<T> {
    /// Takes out the value, if it is there. From then on the phase is `Going`.
    fn take(&mut self) -> Option<T> {
        match std::mem::replace(self, Self::Going) {
            Self::Here(value) => Some(value),
            Self::Going => None,
            Self::Coming => {
                *self = Self::Coming;
                None
            }
        }
    }
}

impl Table {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reserves a name for a disk that is going to be opened.
    pub(crate) fn reserve_node(&self, options: &DiskOptions) -> Result<NodeId> {
        let mut state = self.lock();
        let id = NodeId(state.next_node);
        let is_taken = |name: &str| state.nodes.values().any(|node| node.name == name);
        let name = match &options.name {
            Some(name) if is_taken(name) => return Err(bad(format!("there is a disk '{name}' already"))),
            Some(name) => name.clone(),
            None => (id.0..).map(|number| format!("disk{number}")).find(|name| !is_taken(name)).unwrap_or_default(),
        };
        let path = options.file.as_ref().and_then(|file| file.path()).map(Path::to_owned);
        state.next_node += 1;
        let (file, options) = (shown_name(options), options.clone());
        let past = Past::default();
        let node = Node { name, file, path, options, disk: Phase::Coming, gave_up_requests: false, past };
        state.nodes.insert(id, node);
        Ok(id)
    }

    /// Enters an open disk.
    pub(crate) fn node_is_here(&self, id: NodeId, disk: OpenedDisk) {
        if let Some(node) = self.lock().nodes.get_mut(&id) {
            node.disk = Phase::Here(Arc::new(disk));
        }
    }

    /// Removes a disk that could not be opened, or is closed.
    pub(crate) fn forget_node(&self, id: NodeId) {
        self.lock().nodes.remove(&id);
        self.gone.notify_all();
    }

    /// Forgets a disk that was taken out when the result goes.
    pub(crate) fn going(&self, id: NodeId) -> Going<'_> {
        Going { table: self, id }
    }

    /// Waits for the disks that are being removed.
    pub(crate) fn wait_for_those_going(&self) {
        let goes = |state: &mut State| state.nodes.values().any(|node| matches!(node.disk, Phase::Going));
        drop(self.gone.wait_while(self.lock(), goes).unwrap_or_else(PoisonError::into_inner));
    }

    /// Returns names and paths of the disks that are open or being closed.
    pub(crate) fn open_paths(&self) -> Vec<(String, PathBuf)> {
        let is_open = |node: &&Node| !matches!(node.disk, Phase::Coming);
        let name_and_path = |node: &Node| Some((node.name.clone(), node.path.clone()?));
        self.lock().nodes.values().filter(is_open).filter_map(name_and_path).collect()
    }

    /// Returns the disk of this number, if it is open.
    pub(crate) fn find(&self, id: NodeId) -> Result<Found> {
        let state = self.lock();
        let node = state.nodes.get(&id).ok_or_else(|| no_disk(id))?;
        node.found(id).ok_or_else(|| node.not_now())
    }

    /// Returns the number of the disk with this name.
    pub(crate) fn id_of(&self, name: &str) -> Option<NodeId> {
        self.lock().nodes.iter().find(|(_, node)| node.name == name).map(|(id, _)| *id)
    }

    /// Returns the open disks, in the order in which they came.
    pub(crate) fn nodes(&self) -> Vec<Found> {
        self.lock().nodes.iter().filter_map(|(id, node)| node.found(*id)).collect()
    }

    /// Keeps a disk for a work on it. The `watch` is cancelled if the disk is taken out by force.
    pub(crate) fn begin_work(
        table: &Arc<Self>,
        node: NodeId,
        what: String,
        watch: Option<Arc<CopyWatch>>,
    ) -> Result<Work> {
        let mut state = table.lock();
        let found = state.nodes.get(&node).ok_or_else(|| no_disk(node))?;
        if !matches!(found.disk, Phase::Here(_)) {
            return Err(found.not_now());
        }
        let number = state.next_work;
        state.next_work += 1;
        state.works.insert(number, Working { node, what, watch, caller: Caller::this(), is_left: false });
        Ok(Work { table: Arc::clone(table), number })
    }

    /// From here on nobody waits for this work. It still keeps its disk from being removed without force. Returns whether
    /// it is still being done.
    pub(crate) fn leave_work(&self, number: u64) -> bool {
        let mut state = self.lock();
        let Some(work) = state.works.get_mut(&number) else { return false };
        if !std::mem::replace(&mut work.is_left, true) {
            work.what.push_str(", which was given up and still waits for the storage");
        }
        drop(state);
        self.gone.notify_all();
        true
    }

    /// Whether something is still being done to a disk that nobody waits for.
    pub(crate) fn has_left_works(&self, id: NodeId) -> bool {
        self.lock().works.values().any(|work| work.node == id && work.is_left)
    }

    /// Returns what is being done to a disk that is waited for, by number, with how often its thread has waited.
    pub(crate) fn callers_of(&self, id: NodeId) -> Vec<(u64, Option<Switches>)> {
        let state = self.lock();
        let works = state.works.iter().filter(|(_, work)| work.node == id && !work.is_left);
        let callers: Vec<(u64, Caller)> = works.map(|(number, work)| (*number, work.caller)).collect();
        drop(state);
        callers.into_iter().map(|(number, caller)| (number, caller.switches())).collect()
    }

    /// The disk has another top layer.
    pub(crate) fn has_new_top(&self, id: NodeId, top: Option<FileName>) {
        if let (Some(node), Some(top)) = (self.lock().nodes.get_mut(&id), top) {
            (node.file, node.path) = (top.to_string(), top.path().map(Path::to_owned));
        }
    }

    /// Notes that the disk's files are opened with other options.
    pub(crate) fn has_new_options(&self, id: NodeId, options: DiskOptions) {
        if let Some(node) = self.lock().nodes.get_mut(&id) {
            // The bases belong to the disk, and are said when it is added.
            let bases = std::mem::take(&mut node.options.bases);
            node.options = options;
            node.options.bases = bases;
        }
    }

    /// Reserves an export of a disk. The disk stays as long as the export does. Returns the export's number, and
    /// whether the disk has others.
    pub(crate) fn reserve_export(
        &self,
        node: NodeId,
        read_only: bool,
        attachment: Attachment,
        passed: Option<PassedSocket>,
    ) -> Result<(ExportId, bool)> {
        let mut state = self.lock();
        let found = state.nodes.get(&node).ok_or_else(|| no_disk(node))?;
        if !matches!(found.disk, Phase::Here(_)) {
            return Err(found.not_now());
        }
        let is_taken = |passed: PassedSocket| {
            state.exports.values().filter_map(|other| other.passed).any(|other| passed.collides_with(other))
        };
        if passed.is_some_and(is_taken) {
            let socket = attachment.socket.display();
            return Err(bad(format!("the passed socket '{socket}' serves another export already: pass one for each")));
        }
        let has_others = state.exports.values().any(|other| other.node == node);
        let id = ExportId(state.next_export);
        state.next_export += 1;
        let (export, hold) = (Phase::Coming, None);
        state.exports.insert(id, Exported { node, read_only, attachment, passed, export, hold });
        Ok((id, has_others))
    }

    /// Returns a number that no export has or will have.
    pub(crate) fn spare_export_id(&self) -> ExportId {
        let mut state = self.lock();
        state.next_export += 1;
        ExportId(state.next_export - 1)
    }

    /// Enters an export that serves. If its disk is going meanwhile, the export is given back, and the caller ends it.
    pub(crate) fn export_is_here(&self, id: ExportId, export: Front, hold: Option<Hold>) -> Result<(), Front> {
        let mut guard = self.lock();
        let state = &mut *guard;
        match state.exports.get_mut(&id) {
            Some(entry) if state.nodes.get(&entry.node).is_some_and(|node| matches!(node.disk, Phase::Here(_))) => {
                (entry.export, entry.hold) = (Phase::Here(export), hold);
                Ok(())
            }
            _ => Err(export),
        }
    }

    /// Takes an export out to be ended, with its disk and what holds its requests. [`Table::forget_export`] follows when it
    /// has.
    pub(crate) fn take_export(&self, id: ExportId) -> Result<(NodeId, Front, Option<Hold>)> {
        let mut state = self.lock();
        let entry = state.exports.get_mut(&id).ok_or_else(|| bad(format!("there is no export {id}")))?;
        let busy = || bad(format!("export {id} is being added or removed just now"));
        Ok((entry.node, entry.export.take().ok_or_else(busy)?, entry.hold.take()))
    }

    /// Requests of an export of this disk are given up.
    pub(crate) fn has_given_up_requests(&self, id: NodeId) {
        if let Some(node) = self.lock().nodes.get_mut(&id) {
            node.gave_up_requests = true;
        }
    }

    /// Whether requests of an export that was removed were given up.
    pub(crate) fn gave_up_requests(&self, id: NodeId) -> bool {
        self.lock().nodes.get(&id).is_some_and(|node| node.gave_up_requests)
    }

    /// As [`Table::forget_export`]. The disk keeps the export's figures.
    pub(crate) fn forget_export_but_for(&self, id: ExportId, (rings, latency): (Vec<RingStats>, QueueLatency)) {
        let mut guard = self.lock();
        let state = &mut *guard;
        let node = state.exports.remove(&id).and_then(|entry| state.nodes.get_mut(&entry.node));
        if let Some(Node { past, .. }) = node {
            rings.iter().for_each(|ring| past.rings.merge(ring));
            // None of its requests is in flight any more.
            past.latency.merge(QueueLatency { oldest_ns: 0, ..latency });
        }
        drop(guard);
        self.gone.notify_all();
    }

    /// Removes an export that could not begin, or has ended with its disk.
    pub(crate) fn forget_export(&self, id: ExportId) {
        self.lock().exports.remove(&id);
        self.gone.notify_all();
    }

    /// Returns the exports that serve, in the order in which they came.
    pub(crate) fn exports(&self) -> Vec<ExportStatus> {
        let status = |(id, entry): (&ExportId, &Exported)| match &entry.export {
            Phase::Here(export) => Some(ExportStatus {
                id: *id,
                node: entry.node,
                read_only: entry.read_only,
                connected: export.is_connected(),
                attachment: entry.attachment.clone(),
                rings: export.rings(),
                nbd: export.nbd(),
            }),
            Phase::Coming | Phase::Going => None,
        };
        self.lock().exports.iter().filter_map(status).collect()
    }

    /// Returns the largest logical block that a guest of this disk sees, in bytes; zero without guests.
    pub(crate) fn block_bytes_of(&self, node: NodeId) -> u32 {
        let state = self.lock();
        let of_node = state.exports.values().filter(|entry| entry.node == node);
        let blocks = of_node.filter_map(|entry| match &entry.export {
            Phase::Here(front) => Some(front.block_bytes()),
            Phase::Coming | Phase::Going => None,
        });
        blocks.max().unwrap_or(0)
    }

    /// Returns the socket at which a guest is connected to a disk, if one is.
    pub(crate) fn guest_of(&self, node: NodeId) -> Option<PathBuf> {
        let state = self.lock();
        let mut exports = state.exports.values().filter(|entry| entry.node == node);
        let busy = exports.find(|entry| match &entry.export {
            Phase::Here(export) => export.is_connected(),
            Phase::Coming | Phase::Going => false,
        });
        busy.map(|entry| entry.attachment.socket.clone())
    }

    /// Returns how long the requests of each disk take, over all its exports. Rings that are awake get `time` to note
    /// their oldest request.
    pub(crate) fn latencies(&self, time: Duration) -> BTreeMap<NodeId, QueueLatency> {
        let here = |entry: &Exported, look: &mut dyn FnMut(&Front)| {
            if let Phase::Here(export) = &entry.export {
                look(export);
            }
        };
        self.lock().exports.values().for_each(|entry| here(entry, &mut Front::ask_for_oldest));
        std::thread::sleep(time);
        let state = self.lock();
        let past = state.nodes.iter().map(|(id, node)| (*id, node.past.latency.clone()));
        let mut sums: BTreeMap<NodeId, QueueLatency> = past.collect();
        for entry in state.exports.values() {
            here(entry, &mut |export| sums.entry(entry.node).or_default().merge(export.latency()));
        }
        sums
    }

    /// Takes a disk out to be closed, with its exports, which have to end before. Without `force`, this fails if somebody
    /// is connected at one of them, or the disk has works. With it, works that can be cancelled are. No export of the disk
    /// can begin any more. [`Table::going`], [`Table::wait_for_exports`] and [`Table::wait_for_works`] follow.
    pub(crate) fn take_node(&self, id: NodeId, force: bool) -> Result<(Found, Vec<(ExportId, Front)>)> {
        let mut guard = self.lock();
        let state = &mut *guard;
        let node = state.nodes.get_mut(&id).ok_or_else(|| no_disk(id))?;
        let found = node.found(id).ok_or_else(|| node.not_now())?;
        let exports = state.exports.iter().filter(|(_, entry)| entry.node == id);
        let works = state.works.values().filter(|work| work.node == id);
        if !force {
            let users = exports.filter_map(|(id, entry)| entry.user(*id));
            let users: Vec<String> = users.chain(works.clone().map(|work| work.what.clone())).collect();
            if !users.is_empty() {
                let message = format!("the disk '{}' is used by {}: end that first", found.name, users.join(", "));
                return Err(Error::new(ErrorKind::Locked, message));
            }
        }
        node.disk = Phase::Going;
        works.filter_map(|work| work.watch.as_ref()).for_each(|watch| watch.cancel());
        let exports = state.exports.iter_mut().filter(|(_, entry)| entry.node == id);
        Ok((found, exports.filter_map(|(id, entry)| Some((*id, entry.export.take()?))).collect()))
    }

    /// Waits until a disk that was taken out has no export left: other threads may be ending some.
    pub(crate) fn wait_for_exports(&self, id: NodeId) {
        let is_used = |state: &mut State| state.exports.values().any(|entry| entry.node == id);
        drop(self.gone.wait_while(self.lock(), is_used).unwrap_or_else(PoisonError::into_inner));
    }

    /// Waits until nothing is done any more to a disk that was taken out, but for what was given up; at most until the `limit`.
    /// Returns whether that is so.
    pub(crate) fn wait_for_works(&self, id: NodeId, limit: Option<Duration>) -> bool {
        let is_used = |state: &mut State| state.works.values().any(|work| work.node == id && !work.is_left);
        match limit {
            None => drop(self.gone.wait_while(self.lock(), is_used).unwrap_or_else(PoisonError::into_inner)),
            Some(limit) => drop(self.gone.wait_timeout_while(self.lock(), limit, is_used)),
        }
        !is_used(&mut self.lock())
    }
}

impl Exported {
    /// Says who uses it, if somebody does.
    fn user(&self, id: ExportId) -> Option<String> {
        let how = match &self.export {
            Phase::Here(export) if !export.is_connected() => return None,
            Phase::Here(Front::VhostUser(_)) => "where a guest is connected",
            Phase::Here(Front::Nbd(_)) => "where a client is connected",
            Phase::Coming => "which is being added",
            Phase::Going => "which is being removed",
        };
        Some(format!("export {id} at '{}', {how}", self.attachment.socket.display()))
    }
}

impl Found {
    /// Returns the disk's name in logs: the name or the serial that its user gave it, otherwise its file.
    pub(crate) fn name_in_logs(&self) -> String {
        let DiskOptions { name, serial, .. } = &self.options;
        let serial = Some(serial).filter(|serial| !serial.is_empty());
        name.as_ref().or(serial).unwrap_or(&self.file).escape_debug().to_string()
    }
}

impl Node {
    fn found(&self, id: NodeId) -> Option<Found> {
        let Phase::Here(disk) = &self.disk else { return None };
        let (name, file, path) = (self.name.clone(), self.file.clone(), self.path.clone());
        let (options, past) = (self.options.clone(), self.past.rings);
        Some(Found { id, name, file, path, options, disk: Arc::clone(disk), past })
    }

    fn not_now(&self) -> Error {
        let what = if matches!(self.disk, Phase::Coming) { "added" } else { "removed" };
        Error::new(ErrorKind::Locked, format!("the disk '{}' is being {what} just now", self.name))
    }
}

/// Returns the file's name, or a substitute: whoever reads it may have another working directory.
fn shown_name(options: &DiskOptions) -> String {
    match &options.file {
        Some(FileName::File(path) | FileName::HostDevice(path)) => absolute(path).display().to_string(),
        _ => options.display_name(),
    }
}

fn no_disk(id: NodeId) -> Error {
    bad(format!("there is no disk {id}"))
}

fn bad(message: String) -> Error {
    Error::new(ErrorKind::BadOption, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_is_shown_with_the_whole_path_of_its_file() {
        let here = std::env::current_dir().unwrap();
        let shown = |file: &str| shown_name(&DiskOptions::of_file(FileName::parse(file).unwrap()));
        assert_eq!(shown("a.raw"), here.join("a.raw").display().to_string());
        assert_eq!(shown("/images/a.raw"), "/images/a.raw");
        assert_eq!(shown("nbd://host/disk"), "nbd://host/disk");
        assert_eq!(shown_name(&DiskOptions::null(512)), "null disk");
    }
}
