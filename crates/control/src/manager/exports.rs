//! Requested exports: how the daemon adds them, and how the interface describes them.

use super::{Manager, counters_of, lock};
use crate::api::{AddExport, AddNbd, AddTls, EventKind, Export, FailedExport, GuestMemory, NbdExport};
use crate::record::RecordedDisk;
use block::{Error, ErrorKind, Result};
use daemon::{ExportId, ExportStatus, NbdAddress, NbdOptions, NbdTls, NodeId, SocketAccess};
use drive::{ExportOptions, PassedDescriptors, Placement, ShownOptions, absolute};
use std::collections::BTreeSet;
use std::os::fd::RawFd;
use std::path::Path;

/// A recorded export that could not begin.
pub(super) struct NotServed {
    pub(super) id: u64,
    pub(super) node: NodeId,
    pub(super) request: AddExport,
    error: String,
}

impl Manager {
    /// Starts an export.
    pub(super) fn begin_export(&self, node: NodeId, request: &AddExport) -> Result<ExportId> {
        match &request.nbd {
            None => self.daemon.add_export(node, &export_options(request)?),
            Some(nbd) => self.daemon.add_nbd_export(node, &nbd_options(request, nbd)?),
        }
    }

    /// Starts the exports of a restored disk.
    pub(super) fn restore_exports(&self, node: NodeId, disk: &RecordedDisk) {
        for export in &disk.exports {
            let begun = self.restore_export(node, export);
            // Why it failed is logged and listed.
            let _ = self.note_begun(node, export, begun);
        }
    }

    /// Starts an export that is in the record already. An export may fail, because its port, certificates or bitmap are
    /// gone. The disk and the other exports are still served. The failed export is logged, listed with its error, and
    /// tried again at the next start.
    pub(super) fn begin_recorded(&self, node: NodeId, export: &AddExport) -> Result<()> {
        let begun = self.begin_export(node, export);
        self.note_begun(node, export, begun)
    }

    fn note_begun(&self, node: NodeId, export: &AddExport, begun: Result<ExportId>) -> Result<()> {
        match begun {
            Ok(id) => {
                lock(&self.exports).insert(id, Some(export.clone()));
                self.events.publish(EventKind::ExportAdded, Some(&export.disk), Some(id.number()), None);
                Ok(())
            }
            Err(error) => {
                tracing::error!(disk = %export.disk, "an export is not served: {error}");
                let (id, request) = (self.daemon.spare_export_id().number(), export.clone());
                lock(&self.failed_exports).push(NotServed { id, node, request, error: error.to_string() });
                Err(error)
            }
        }
    }

    /// Returns the recorded exports that failed at the start.
    #[must_use]
    pub fn failed_exports(&self) -> Vec<FailedExport> {
        let to_failed = |NotServed { id, request, error, .. }: &NotServed| FailedExport {
            id: *id,
            disk: request.disk.clone(),
            error: error.clone(),
        };
        lock(&self.failed_exports).iter().map(to_failed).collect()
    }

    /// Removes an export that failed at the start from the record. Returns the name of its disk, if there is such an
    /// export.
    pub(super) fn forget_failed_export(&self, is_it: impl Fn(&NotServed) -> bool) -> Result<Option<String>> {
        let found = lock(&self.failed_exports)
            .iter()
            .find(|export| is_it(export))
            .map(|export| (export.node, export.request.clone()));
        let Some((node, request)) = found else { return Ok(None) };
        self.record_of(&request.disk, node).change(|disk| disk.exports.retain(|other| *other != request))?;
        lock(&self.failed_exports).retain(|export| export.node != node || export.request != request);
        Ok(Some(request.disk))
    }

    /// Returns the recorded exports of a disk that failed. They are no longer listed: they are begun again, or go.
    pub(super) fn take_failed_exports(&self, node: NodeId) -> Vec<AddExport> {
        let mut failed = lock(&self.failed_exports);
        failed.extract_if(.., |export| export.node == node).map(|export| export.request).collect()
    }

    /// Returns the export of a disk that was made by this request.
    pub(super) fn export_of(&self, node: NodeId, request: &AddExport) -> Option<ExportId> {
        let exports = lock(&self.exports);
        let of_disk = self.daemon.exports().into_iter().filter(|export| export.node == node);
        of_disk.map(|export| export.id).find(|id| exports.get(id).is_some_and(|how| how.as_ref() == Some(request)))
    }

    /// Forgets how exports were made that have ended with their disks.
    pub(super) fn forget_ended_exports(&self) {
        // Whoever notes a new export after this lock has begun it before: the daemon lists it.
        let mut exports = lock(&self.exports);
        let served: BTreeSet<ExportId> = self.daemon.exports().into_iter().map(|export| export.id).collect();
        exports.retain(|id, _| served.contains(id));
    }

    fn restore_export(&self, node: NodeId, request: &AddExport) -> Result<ExportId> {
        let Some(nbd) = &request.nbd else { return self.begin_export(node, request) };
        let mut options = nbd_options(request, nbd)?;
        // A bitmap that recorded when the daemon was killed stays marked as in use.
        options.allows_unreadable_bitmaps = true;
        self.daemon.add_nbd_export(node, &options)
    }
}

/// Makes paths absolute: another run of the daemon may have another working directory.
pub(super) fn with_absolute_paths(mut request: AddExport) -> AddExport {
    request.socket =
        request.socket.map(|socket| if passed_word(&socket).is_some() { socket } else { absolute(&socket) });
    if let Some(tls) = request.nbd.as_mut().and_then(|nbd| nbd.tls.as_mut()) {
        tls.credentials = absolute(&tls.credentials);
    }
    request
}

/// Returns how a socket that was passed to the daemon is named, if it is one: `fd:NAME`.
pub(crate) fn passed_word(socket: &Path) -> Option<&str> {
    socket.to_str()?.strip_prefix("fd:")
}

/// Refuses a passed socket that another run of the daemon could not find: numbers mean another one then.
pub(super) fn refuse_number_of_passed(request: &AddExport) -> Result<()> {
    let word = request.socket.as_deref().and_then(passed_word);
    match word.filter(|word| word.parse::<RawFd>().is_ok()) {
        None => Ok(()),
        Some(number) => {
            let what = format!(
                "socket fd:{number}: after a restart another socket may have this number: name it as the service manager \
                 does (fd:NAME), or serve it without a state directory"
            );
            Err(Error::new(ErrorKind::Unsupported, what))
        }
    }
}

fn access_of(request: &AddExport) -> Result<SocketAccess> {
    Ok(SocketAccess {
        mode: request.socket_mode.as_deref().map(drive::parse_socket_mode).transpose()?,
        group: request.socket_group.as_deref().map(drive::parse_socket_group).transpose()?,
    })
}

fn export_options(request: &AddExport) -> Result<ExportOptions> {
    let mut options = ExportOptions::default();
    match request.socket.as_deref().and_then(passed_word) {
        Some(word) => {
            options.socket_descriptor = Some(PassedDescriptors::of_this_process()?.number_of(word)?);
            if request.socket_mode.is_some() || request.socket_group.is_some() {
                let what =
                    "socket-mode and socket-group are for a socket that is made here, not for one that was passed";
                return Err(Error::new(ErrorKind::BadOption, what));
            }
        }
        None => options.socket.clone_from(&request.socket),
    }
    let access = access_of(request)?;
    (options.socket_mode, options.socket_group) = (access.mode, access.group);
    options.read_only = request.read_only;
    options.queues = request.queues;
    options.queue_size = request.queue_size;
    options.fixed_buffers = request.fixed_buffers;
    options.guest_memory = match request.guest_memory {
        GuestMemory::Ram => Placement::Ram,
        GuestMemory::Locked => Placement::Locked,
        GuestMemory::Any => Placement::Any,
    };
    options.guest_memory_max_bytes = request.guest_memory_max;
    options.shown = ShownOptions::parse(request.shown.pairs())?;
    Ok(options)
}

fn nbd_options(request: &AddExport, nbd: &AddNbd) -> Result<NbdOptions> {
    let bad = |what: &str| Err(Error::new(ErrorKind::BadOption, what));
    let address = match (&request.socket, &nbd.listen) {
        (Some(path), None) => match passed_word(path) {
            Some(word) => NbdAddress::passed(PassedDescriptors::of_this_process()?.number_of(word)?)?,
            None => NbdAddress::Unix(absolute(path)),
        },
        (None, Some(address)) => NbdAddress::Tcp(address.clone()),
        _ => return bad("an NBD export needs a socket, or an address to listen at, and not both"),
    };
    if request.queues.is_some() || request.queue_size.is_some() || request.fixed_buffers {
        return bad("queues, queue-size and fixed-buffers are for vhost-user: NBD clients have connections");
    }
    if request.guest_memory != GuestMemory::Ram || request.guest_memory_max.is_some() {
        return bad("guest-memory and guest-memory-max are for vhost-user: NBD clients share no memory");
    }
    if let Some((key, _)) = request.shown.pairs().next() {
        return bad(&format!("{key} is for vhost-user: NBD clients are not told"));
    }
    if nbd.connections == Some(0) {
        return bad("an NBD export needs at least one connection");
    }
    let mut options = NbdOptions::at(address);
    options.access = access_of(request)?;
    options.name.clone_from(&nbd.name);
    options.description.clone_from(&nbd.description);
    options.read_only = request.read_only;
    options.bitmaps.clone_from(&nbd.bitmaps);
    options.connections = nbd.connections;
    options.tls = nbd.tls.as_ref().map(|AddTls { credentials, required, verify_peer }| {
        let mut tls = NbdTls::new(credentials);
        (tls.is_required, tls.verifies_peers) = (*required, *verify_peer);
        tls
    });
    Ok(options)
}

pub(super) fn to_export(status: &ExportStatus, disk: String) -> Export {
    let nbd = status.nbd.as_ref().map(|nbd| NbdExport {
        uri: nbd.uri.clone(),
        name: nbd.name.clone(),
        description: nbd.description.clone(),
        bitmaps: nbd.bitmaps.clone(),
        tls: nbd.has_tls,
        connections: nbd.connections as u64,
    });
    let first_flush_ns = status.rings.iter().map(|ring| ring.own_flush_ns).max().filter(|ns| *ns > 0);
    Export {
        id: status.id.number(),
        disk,
        socket: status.attachment.socket.clone(),
        read_only: status.read_only,
        queues: status.attachment.queues,
        queue_size: status.attachment.queue_size,
        connected: status.connected,
        first_flush_us: first_flush_ns.map(|ns| ns / 1000),
        counters: counters_of(status),
        nbd,
    }
}
