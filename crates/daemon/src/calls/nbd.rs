//! Disks for NBD clients.

use crate::daemon::Daemon;
use crate::fronts::front::Front;
use crate::fronts::servers::NbdFront;
use crate::state::nbd_options::NbdOptions;
use crate::state::status::{ExportId, NodeId};
use crate::table::Found;
use block::{DirtyBitmaps, Disk, Error, ErrorKind, Result};
use export_nbd::{NbdBitmap, NbdExport};
use image::Image;
use std::sync::Arc;

impl Daemon {
    /// Serves a disk to NBD clients. When this returns, they can connect. Several disks can be at one address, under
    /// names of their own. A client that names no export gets the first.
    pub fn add_nbd_export(&self, node: NodeId, options: &NbdOptions) -> Result<ExportId> {
        let found = self.table.find(node)?;
        let (disk, hold) = found.disk.for_export();
        let export = export_of(&found, disk, options)?;
        let name = export.name.clone();
        let begin = || {
            self.servers.add(options, &export, self.reactor_handles())?;
            let (servers, address) = (Arc::clone(&self.servers), options.address.clone());
            Ok(Front::Nbd(Box::new(NbdFront { servers, address, has_tls: options.tls.is_some(), export })))
        };
        let id = self.begin_nbd(&found, options, hold, begin)?;
        let unknown_to_clients = found.options.shown.keys();
        if !unknown_to_clients.is_empty() {
            let keys = unknown_to_clients.join(", ");
            tracing::warn!(disk = %found.name, export = %name, "these options do not hold for NBD clients: {keys}");
        }
        tracing::info!(disk = %found.name, export = %name, "served to NBD clients at '{}'", options.address);
        Ok(id)
    }
}

fn export_of(found: &Found, disk: Arc<dyn Disk>, options: &NbdOptions) -> Result<NbdExport> {
    let mut bitmaps = Vec::new();
    for name in &options.bitmaps {
        let none = || Error::new(ErrorKind::Unsupported, format!("the disk '{}' has no bitmaps", found.name));
        let image: &Arc<Image> = found.disk.image.as_ref().ok_or_else(none)?;
        match image.dirty_bitmap(name) {
            Ok(_) => {}
            Err(error) if options.allows_unreadable_bitmaps => {
                tracing::warn!(disk = %found.name, "NBD clients cannot ask for the bitmap '{name}': {error}");
            }
            Err(error) => return Err(error.in_context(&found.file)),
        }
        bitmaps.push(NbdBitmap { name: name.clone(), source: Arc::clone(image) as Arc<dyn DirtyBitmaps> });
    }
    let name = options.name.clone().unwrap_or_else(|| found.name.clone());
    Ok(NbdExport::new(name, disk).with(|export| {
        export.description.clone_from(&options.description);
        export.read_only = options.read_only;
        export.bitmaps = bitmaps;
        export.disk_name = Some(found.name_in_logs());
    }))
}
