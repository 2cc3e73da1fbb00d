//! The flags that attach a served disk to a monitor, ready to copy.

use std::borrow::Cow;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

/// What a monitor has to know about one served disk.
#[derive(Debug, Clone)]
pub struct Attachment {
    /// Absolute path of the socket.
    pub socket: PathBuf,
    /// Queues that the disk offers.
    pub queues: u16,
    /// Largest ring that it accepts.
    pub queue_size: u16,
}

/// Writes one monitor's flags.
type Flags = fn(&[Attachment]) -> String;

/// The flags for every monitor we know, for all `disks` at once.
#[must_use]
pub fn attach_flags(disks: &[Attachment]) -> String {
    let sections: [(&str, Flags); 5] = [
        ("QEMU (give the memory backend the size of the guest's memory)", qemu),
        ("Cloud Hypervisor", cloud_hypervisor),
        ("Firecracker (one PUT /drives/{drive_id} a disk, before the guest starts)", firecracker),
        ("crosvm", crosvm),
        ("User Mode Linux (on the kernel's command line; it uses one queue)", user_mode_linux),
    ];
    let mut text = String::new();
    for (title, flags) in sections {
        let _ = writeln!(text, "{title}:");
        for line in flags(disks).lines() {
            let _ = writeln!(text, "  {line}");
        }
    }
    text
}

/// `-object`, `-machine`, `-chardev` and `-device`.
#[must_use]
pub fn qemu(disks: &[Attachment]) -> String {
    let mut text =
        "-m 1G -object memory-backend-memfd,id=mem0,size=1G,share=on -machine memory-backend=mem0".to_owned();
    for (index, disk) in disks.iter().enumerate() {
        let socket = format!("socket,id=ringdisk{index},path={}", drive::escape(&disk.socket.to_string_lossy()));
        let _ = write!(text, " \\\n-chardev {}", quote(&socket));
        let _ = write!(text, " \\\n-device vhost-user-blk-pci,chardev=ringdisk{index},num-queues={}", disk.queues);
    }
    text
}

fn cloud_hypervisor(disks: &[Attachment]) -> String {
    let mut text = "--memory size=1G,shared=on --disk".to_owned();
    for disk in disks {
        // Its option parser takes a value with commas in double quotes.
        let socket = disk.socket.to_string_lossy();
        let socket = if socket.contains([',', '=', '[', ']']) { format!("\"{socket}\"") } else { socket.into_owned() };
        let size = disk.queue_size.min(256);
        let flag = format!("vhost_user=true,socket={socket},num_queues={},queue_size={size}", disk.queues);
        let _ = write!(text, " \\\n{}", quote(&flag));
    }
    text
}

fn firecracker(disks: &[Attachment]) -> String {
    let body = |(index, disk): (usize, &Attachment)| {
        // Writeback, because with Firecracker's default ("Unsafe") its guest never negotiates flush, and a disk that
        // cannot be told to flush has to make every write durable.
        let id = format!("ringdisk{index}");
        let socket = disk.socket.to_string_lossy();
        serde_json::json!({"drive_id": id, "is_root_device": false, "cache_type": "Writeback", "socket": socket})
            .to_string()
    };
    disks.iter().enumerate().map(body).collect::<Vec<_>>().join("\n")
}

fn crosvm(disks: &[Attachment]) -> String {
    let flag = |disk: &Attachment| {
        let socket = disk.socket.to_string_lossy();
        let socket = if socket.contains([',', '"', '[', ']']) { format!("{socket:?}") } else { socket.into_owned() };
        format!("--vhost-user {}", quote(&format!("type=block,socket={socket}")))
    };
    disks.iter().map(flag).collect::<Vec<_>>().join(" \\\n")
}

fn user_mode_linux(disks: &[Attachment]) -> String {
    let flag = |disk: &Attachment| {
        let socket = disk.socket.to_string_lossy();
        if socket.contains([':', ' ', '"']) {
            // Its parser ends the path at the first colon, the kernel's command line ends an argument at a space.
            return format!("(cannot express '{socket}': choose a --socket path without colons, spaces and quotes)");
        }
        quote(&format!("virtio_uml.device={socket}:2")).into_owned()
    };
    disks.iter().map(flag).collect::<Vec<_>>().join(" ")
}

/// `text` as one word of a POSIX shell.
#[must_use]
pub fn quote(text: &str) -> Cow<'_, str> {
    let plain = |char: char| char.is_ascii_alphanumeric() || "-_./,:=@%+".contains(char);
    if !text.is_empty() && text.chars().all(plain) {
        return Cow::Borrowed(text);
    }
    Cow::Owned(format!("'{}'", text.replace('\'', r"'\''")))
}

/// `path` made absolute without asking the file system about its last part (the socket may not exist yet).
#[must_use]
pub fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn disk(socket: &str) -> Attachment {
        Attachment { socket: PathBuf::from(socket), queues: 4, queue_size: 1024 }
    }

    #[test]
    fn every_monitor_gets_the_socket_of_every_disk() {
        let text = attach_flags(&[disk("/run/a.sock"), disk("/run/b.sock")]);
        for expected in [
            "-chardev socket,id=ringdisk0,path=/run/a.sock",
            "-device vhost-user-blk-pci,chardev=ringdisk1,num-queues=4",
            "memory-backend-memfd,id=mem0,size=1G,share=on",
            "vhost_user=true,socket=/run/b.sock,num_queues=4,queue_size=256",
            "--memory size=1G,shared=on",
            r#""socket":"/run/a.sock""#,
            "--vhost-user type=block,socket=/run/b.sock",
            "virtio_uml.device=/run/a.sock:2 virtio_uml.device=/run/b.sock:2",
        ] {
            assert!(text.contains(expected), "{expected} is missing in\n{text}");
        }
    }

    #[test]
    fn strange_paths_survive_the_monitor_and_the_shell() {
        let disks = [disk("/run/it's a,b.sock")];
        assert!(qemu(&disks).contains(r"'socket,id=ringdisk0,path=/run/it'\''s a,,b.sock'"), "{}", qemu(&disks));
        assert!(cloud_hypervisor(&disks).contains(r#"socket="/run/it'\''s a,b.sock","#));
        assert!(user_mode_linux(&disks).contains("cannot express"));
        assert_eq!(quote(""), "''");
    }
}
