//! The output once guests can connect.

use daemon::{Attachment, Daemon, DiskStatus, ExportStatus};
use rustix::fs::fstat;
use serde_json::{Value, json};
use std::fmt::Write as _;

/// Returns the text for people: the disks, "ready", and how to attach each monitor. A journal does not get the last
/// part.
pub(super) fn human(daemon: &Daemon) -> String {
    let mut text = String::new();
    let mut attachments: Vec<Attachment> = Vec::new();
    for (disk, exports) in served(daemon) {
        for export in exports {
            let size = drive::human_size(disk.info.size_bytes);
            let mode = if export.read_only { ", read-only" } else { "" };
            let place = match &export.nbd {
                Some(nbd) => nbd.uri.clone(),
                None => export.attachment.socket.display().to_string(),
            };
            let _ = writeln!(text, "serving {} ({size}{mode}) at {place}", disk.file);
            // NBD clients are not monitors of guests.
            attachments.extend(export.nbd.is_none().then_some(export.attachment));
        }
        for layer in &disk.layers {
            let _ = writeln!(text, "  {layer}");
        }
    }
    let _ = writeln!(text, "ready");
    if !is_journal() {
        let _ = writeln!(text, "\nAttach with:\n{}", daemon::attach_flags(&attachments));
    }
    text
}

/// Returns one line for programs that says the same. When it is printed, every socket accepts connections.
pub(super) fn json(daemon: &Daemon) -> String {
    let export = |export: ExportStatus| {
        if let Some(nbd) = export.nbd {
            return json!({ "nbd": nbd.uri, "read-only": export.read_only });
        }
        let Attachment { socket, queues, queue_size } = export.attachment;
        json!({
            "socket": socket.to_string_lossy(),
            "queues": queues,
            "queue-size": queue_size,
            "read-only": export.read_only,
        })
    };
    let disk = |(disk, exports): (DiskStatus, Vec<ExportStatus>)| {
        json!({
            "name": disk.name,
            "file": disk.file,
            "size-bytes": disk.info.size_bytes,
            "read-only": disk.info.read_only,
            "serial": disk.info.serial,
            "layers": disk.layers,
            "exports": exports.into_iter().map(export).collect::<Vec<Value>>(),
        })
    };
    let disks: Vec<Value> = served(daemon).into_iter().map(disk).collect();
    format!("{}\n", json!({ "pid": std::process::id(), "disks": disks }))
}

/// Returns each disk with its exports.
fn served(daemon: &Daemon) -> Vec<(DiskStatus, Vec<ExportStatus>)> {
    let exports = daemon.exports();
    let with_exports = |disk: DiskStatus| {
        let of_it = exports.iter().filter(|export| export.node == disk.id).cloned().collect();
        (disk, of_it)
    };
    daemon.disks().into_iter().map(with_exports).collect()
}

/// Whether the output goes into the journal: then `JOURNAL_STREAM` names standard output (systemd.exec(5)).
fn is_journal() -> bool {
    let named = std::env::var("JOURNAL_STREAM").ok();
    let stat = fstat(std::io::stdout()).ok();
    named.zip(stat).is_some_and(|(named, stat)| named == format!("{}:{}", stat.st_dev, stat.st_ino))
}
