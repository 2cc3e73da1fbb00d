//! The output once guests can connect.

use daemon::{Attachment, Daemon, DiskStatus, ExportStatus};
use rustix::fs::fstat;
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::path::Path;

/// Returns the text for people: the disks, "ready", and how to attach each monitor, or how to add a disk to none. A
/// journal does not get the last part.
pub(super) fn human(daemon: &Daemon, control: Option<&Path>) -> String {
    let mut text = String::new();
    let mut attachments: Vec<Attachment> = Vec::new();
    let served = served(daemon);
    let serves_nothing = served.is_empty();
    for (disk, exports) in served {
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
    if is_journal() {
        return text;
    }
    if let (true, Some(control)) = (serves_nothing, control) {
        let control = drive::absolute(control).display().to_string();
        let control = daemon::quote(&control);
        let _ =
            writeln!(text, "\nNo disk is served yet. Add one with:\n  ringdisk ctl --control {control} add file=PATH");
    }
    if !attachments.is_empty() {
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

#[cfg(test)]
mod tests {
    use super::*;
    use daemon::DaemonConfig;

    #[test]
    fn without_a_disk_it_says_how_to_add_one() {
        let daemon = Daemon::start(DaemonConfig::default()).expect("a daemon");
        let text = human(&daemon, Some(Path::new("/run/my control")));
        assert!(text.starts_with("ready\n") && !text.contains("Attach"), "{text}");
        assert!(text.contains("ringdisk ctl --control '/run/my control' add file=PATH"), "{text}");
        daemon.shutdown().expect("an end");
    }
}
