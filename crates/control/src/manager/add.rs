//! New disks: opened, recorded, served.

use super::configured::written_by;
use super::exports::with_absolute_paths;
use super::{Manager, absolute_file, lock};
use crate::api::{AddDisk, AddExport, Disk, EventKind, FormerTop};
use crate::options::Options;
use crate::record::{RecordedDisk, Top, recorded_name, target_name, whole_name};
use block::{Error, ErrorKind, Result};
use daemon::{ExportId, NodeId};
use drive::{DriveOptions, FilterOptions};
use image::{FileName, ThrottleLimits};
use std::path::Path;

/// A disk that is to be opened and recorded.
pub(super) struct NewDisk<'a> {
    pub(super) drive: &'a DriveOptions,
    /// Its options in the record; `None` if JSON cannot hold them.
    pub(super) options: Option<Options>,
    /// Whether to serve it at the socket of its options.
    pub(super) own_export: bool,
    /// Its key, if it is configured.
    pub(super) configured: Option<&'a str>,
    pub(super) former_tops: &'a [FormerTop],
    /// Its other exports. They are recorded, and begun later.
    pub(super) exports: Vec<AddExport>,
    /// It is a disk that is away, and comes back by a reload.
    pub(super) comes_back: bool,
    /// Its record, if its image may not rest on the base that the record names.
    pub(super) moving: Option<&'a RecordedDisk>,
}

/// A disk that is open and recorded.
pub(super) struct Added {
    pub(super) node: NodeId,
    pub(super) name: String,
    /// Its other exports, which have not begun.
    pub(super) exports: Vec<AddExport>,
}

impl Manager {
    /// Opens a disk and, unless `request` says otherwise, serves it.
    pub fn add_disk(&self, request: AddDisk) -> Result<Disk> {
        let options = absolute_file(request.options)?;
        let mut drive = options.to_drive()?;
        drive.disk.former_tops = request.former_tops.len();
        drive.disk.bases = request.bases;
        let overlay = request.overlay.as_deref().map(target_name).transpose()?;
        let Added { node, name, .. } = self.add(NewDisk {
            drive: &drive,
            options: Some(options),
            own_export: request.export && overlay.is_none(),
            configured: None,
            former_tops: &request.former_tops,
            exports: Vec::new(),
            comes_back: false,
            moving: None,
        })?;
        if let Some(overlay) = overlay {
            let put_on = self.put_on(&[(name.clone(), node, overlay.clone())]);
            let served = put_on.and_then(|()| match request.export {
                true => self.export_as_added(&name, node, &drive),
                false => Ok(()),
            });
            served.inspect_err(|_| self.undo_layered(&name, node, &overlay))?;
        }
        self.disk_of(node)
    }

    /// Adds the export of the disk's own options.
    pub(super) fn export_as_added(&self, name: &str, node: NodeId, drive: &DriveOptions) -> Result<()> {
        let id = self.daemon.add_export(node, &drive.export)?;
        let export = self.daemon.exports().into_iter().find(|export| export.id == id);
        let socket = export.map(|export| export.attachment.socket);
        let record = |disk: &mut RecordedDisk| {
            disk.own_export = true;
            if let Some(socket) = &socket {
                disk.options.set("socket", socket.to_string_lossy());
            }
        };
        self.record_of(name, node).try_change(record).inspect_err(|_| self.undo_export(id))?;
        lock(&self.exports).insert(id, None);
        self.events.publish(EventKind::ExportAdded, Some(name), Some(id.number()), None);
        Ok(())
    }

    /// Opens a disk, records it, and begins the export of its own options.
    pub(super) fn add(&self, new: NewDisk<'_>) -> Result<Added> {
        self.records.check_doubt()?;
        self.refuse_if_away(&new)?;
        let may_come_back = !matches!(new.drive.disk.file, Some(FileName::Descriptor(_)));
        if self.records.is_durable() && !may_come_back && new.configured.is_none() {
            let message = "a passed descriptor (fd:N) cannot be served again after a restart: name a path, \
                           or serve it without a state directory";
            return Err(Error::new(ErrorKind::Unsupported, message));
        }
        let (node, own_export) = match (new.moving, new.own_export) {
            (Some(disk), own_export) => {
                let node = self.add_with_its_base(disk, &mut new.drive.disk.clone())?;
                let export = own_export.then(|| self.daemon.add_export(node, &new.drive.export)).transpose();
                (node, export.inspect_err(|_| self.undo_add(node))?)
            }
            (None, true) => self.daemon.add(new.drive).map(|(node, export)| (node, Some(export)))?,
            (None, false) => (self.daemon.add_disk(&new.drive.disk)?, None),
        };
        self.enter(new, node, own_export, may_come_back).inspect_err(|_| self.undo_add(node))
    }

    /// Checks and records a disk that is open.
    fn enter(
        &self,
        mut new: NewDisk<'_>,
        node: NodeId,
        own_export: Option<ExportId>,
        may_come_back: bool,
    ) -> Result<Added> {
        // While it was opened, a disk may have gone away and let go of its files.
        self.refuse_if_away(&new)?;
        let name = self.name_of(node)?;
        self.records.is_of(&name, node);
        self.check_former_tops(node, new.drive, new.former_tops)?;
        self.listen_to_hold(node, &name);
        let of_disk = |export: AddExport| match export.disk.is_empty() {
            true => AddExport { disk: name.clone(), ..export },
            false => export,
        };
        let exports: Vec<AddExport> =
            std::mem::take(&mut new.exports).into_iter().map(of_disk).map(with_absolute_paths).collect();
        let socket = self.daemon.exports().into_iter().find(|export| Some(export.id) == own_export);
        let socket = socket.map(|export| export.attachment.socket);
        let record = may_come_back.then(|| record_of(&new, &name, &exports, socket.as_deref())).flatten();
        self.records.change(|changed| {
            record.into_iter().for_each(|disk| changed.put(disk));
            limits_of_groups(new.drive).for_each(|(group, limits)| changed.set_group_limits(group, limits));
        })?;
        if new.configured.is_some() {
            lock(&self.configured).insert(name.clone(), node);
        }
        self.events.publish(EventKind::DiskAdded, Some(&name), None, None);
        if let Some(id) = own_export {
            lock(&self.exports).insert(id, None);
            self.events.publish(EventKind::ExportAdded, Some(&name), Some(id.number()), None);
        }
        Ok(Added { node, name, exports })
    }

    fn refuse_if_away(&self, new: &NewDisk<'_>) -> Result<()> {
        let disk = &new.drive.disk;
        if let Some(name) = disk.name.as_deref().filter(|_| !new.comes_back) {
            self.away.refuse_name(name)?;
        }
        let mut written: Vec<String> = written_by(disk).into_iter().collect();
        if !disk.read_only && !disk.snapshot {
            written.extend(new.former_tops.iter().map(|top| whole_name(&top.file)));
        }
        self.refuse_writing_below(disk.name.as_deref(), &written)
    }

    /// Refuses former tops that are not the layers below: those are open for writing now, and have not been written to.
    fn check_former_tops(&self, node: NodeId, drive: &DriveOptions, tops: &[FormerTop]) -> Result<()> {
        if tops.is_empty() {
            return Ok(());
        }
        let layers = self.daemon.layer_files(node)?;
        let below =
            layers.iter().skip(if drive.disk.snapshot { 2 } else { 1 }).map(Some).chain(std::iter::repeat(None));
        for (top, layer) in tops.iter().zip(below) {
            let top = whole_name(&top.file);
            let file = FileName::parse(&top)?;
            let canonical = file.path().and_then(|path| path.canonicalize().ok()).map_or(file.clone(), FileName::from);
            if layer.is_none_or(|layer| !layer.is_same_file(&canonical)) {
                let instead = layer.map_or_else(|| "no other layer".to_owned(), |layer| format!("'{layer}'"));
                let what = format!("'{file}' is no former top of the disk: the images name {instead} there");
                return Err(Error::new(ErrorKind::BadOption, what));
            }
        }
        Ok(())
    }

    /// Undoes an addition with a first layer: the file of that layer is removed, too.
    fn undo_layered(&self, name: &str, node: NodeId, overlay: &FileName) {
        let record = self.record_of(name, node);
        let is_on_top = record.check().is_ok()
            && self.records.current().disk(name).is_some_and(|disk| disk.has_top(&recorded_name(overlay)));
        // Another caller may have exported the disk by its name.
        let has_guests = self.daemon.exports().iter().any(|export| export.node == node);
        self.undo_add_of(name, node);
        if is_on_top
            && !has_guests
            && let Some(path) = overlay.path()
            && let Err(error) = std::fs::remove_file(path)
        {
            tracing::warn!("cannot remove '{overlay}', which is not used: {error}");
        }
    }

    /// Removes the disk from the record even if another call or the end of the daemon has removed it: half of the
    /// request must not come back.
    pub(super) fn undo_add_of(&self, name: &str, node: NodeId) {
        self.undo_add(node);
        self.forget_ended_exports();
        if let Err(error) = self.records.forget(name, Some(node), None) {
            tracing::error!("{error}");
        }
        self.events.publish(EventKind::DiskRemoved, Some(name), None, None);
    }

    pub(super) fn undo_add(&self, node: NodeId) {
        if let Err(error) = self.daemon.remove_disk(node, true) {
            tracing::error!("{error}");
        }
    }
}

fn record_of(new: &NewDisk<'_>, name: &str, exports: &[AddExport], socket: Option<&Path>) -> Option<RecordedDisk> {
    let mut options = new.options.clone()?;
    if let Some(socket) = socket {
        // The default socket lies beside the top layer's file, which may change.
        options.set("socket", socket.to_string_lossy());
    }
    let mut recorded = RecordedDisk {
        name: name.to_owned(),
        options,
        own_export: new.own_export,
        exports: exports.to_vec(),
        former_tops: new.former_tops.iter().rev().map(Top::from).collect(),
        bases: Vec::new(),
        moved_from: None,
        unfinished: Vec::new(),
        unfinished_made: None,
        leaving_tops: Vec::new(),
        leaving_below: 0,
        last_backups: Vec::new(),
        fleeces: Vec::new(),
        kept_in: None,
        configured: new.configured.map(str::to_owned),
    };
    recorded.may_rest_on(&new.drive.disk.bases);
    Some(recorded)
}

/// Returns the limits that a drive gives to groups of filters `throttle`.
fn limits_of_groups(drive: &DriveOptions) -> impl Iterator<Item = (&str, ThrottleLimits)> {
    drive.disk.filters.iter().filter_map(|filter| match filter {
        FilterOptions::Throttle(options) if options.limits != ThrottleLimits::default() => {
            Some((options.group.as_deref()?, options.limits))
        }
        _ => None,
    })
}
