//! The flags that attach a served disk to a monitor, ready to copy.

use std::borrow::Cow;
use std::fmt::Write as _;
use std::path::PathBuf;

/// What a monitor must know about one served disk.
#[derive(Debug, Clone)]
pub struct Attachment {
    /// Absolute path of the socket. A passed socket without a path has a substitute here.
    pub socket: PathBuf,
    /// Queues that the disk offers.
    pub queues: u16,
    /// Largest ring that it accepts.
    pub queue_size: u16,
}

/// How often QEMU tries to connect again.
const RECONNECT_MS: u32 = 1000;
/// The longest ring that works well with Cloud Hypervisor.
const CLOUD_HYPERVISOR_QUEUE_SIZE_MAX: u16 = 256;

/// A function that writes one monitor's flags.
type Flags = fn(&[Attachment]) -> String;

/// Returns the flags for each known monitor, for all `disks` at once. Monitors connect to paths, so sockets without one
/// are left out.
#[must_use]
pub fn attach_flags(disks: &[Attachment]) -> String {
    let disks: Vec<Attachment> = disks.iter().filter(|disk| disk.socket.is_absolute()).cloned().collect();
    if disks.is_empty() {
        return "(no socket has a path that a monitor could connect to)\n".to_owned();
    }
    let sections: [(&str, Flags); 5] = [
        ("QEMU (size= is the guest's memory; before QEMU 9.2 write reconnect=1 for reconnect-ms=1000)", qemu),
        ("Cloud Hypervisor (num_queues= can be as much as --cpus boot=, and as the disk's queues)", cloud_hypervisor),
        ("Firecracker (one PUT /drives/{drive_id} a disk, before the guest starts)", firecracker),
        ("crosvm", crosvm),
        ("User Mode Linux (on the kernel's command line; it uses one queue)", user_mode_linux),
    ];
    let mut text = String::new();
    for (title, flags) in sections {
        let _ = writeln!(text, "{title}:");
        for line in flags(&disks).lines() {
            let _ = writeln!(text, "  {line}");
        }
    }
    text
}

/// Writes `-object`, `-machine`, `-chardev` and `-device`. QEMU connects again by itself after a restart of the daemon.
fn qemu(disks: &[Attachment]) -> String {
    let mut text =
        "-m 1G -object memory-backend-memfd,id=mem0,size=1G,share=on -machine memory-backend=mem0".to_owned();
    for (index, disk) in disks.iter().enumerate() {
        let socket = format!("socket,id=ringdisk{index},path={}", drive::escape(&disk.socket.to_string_lossy()));
        let socket = format!("{socket},reconnect-ms={RECONNECT_MS}");
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
        let size = disk.queue_size.min(CLOUD_HYPERVISOR_QUEUE_SIZE_MAX);
        // It starts no guest that has fewer processors than queues, and by default a guest has one.
        let flag = format!("vhost_user=true,socket={socket},num_queues=1,queue_size={size}");
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
        // Its own default, 32768, is more than most servers take.
        let size = disk.queue_size;
        format!("--vhost-user {}", quote(&format!("type=block,socket={socket},max-queue-size={size}")))
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

/// Returns `text` as one word of a POSIX shell.
#[must_use]
pub fn quote(text: &str) -> Cow<'_, str> {
    // Quotes that no shell needs make long options hard to read.
    let plain = |char: char| char.is_ascii_alphanumeric() || "-_./,:=@%+".contains(char);
    if !text.is_empty() && text.chars().all(plain) {
        return Cow::Borrowed(text);
    }
    // This fails only for a zero byte, which no path has.
    shlex::try_quote(text).unwrap_or(Cow::Borrowed(text))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    /// Paths that options, shells and JSON read in their own way.
    const SOCKETS: [&str; 6] =
        ["/run/a.sock", "/run/it's a,b.sock", "/run/x=y [1]", "/run/\"q\"", "/run/back\\slash", "/run/$HOME;`id`"];

    fn disks() -> Vec<Attachment> {
        let disk = |socket: &&str| Attachment { socket: PathBuf::from(socket), queues: 4, queue_size: 1024 };
        SOCKETS.iter().map(disk).collect()
    }

    /// The words that a shell makes of printed lines, and what follows each `flag`.
    fn values_of(lines: &str, flag: &str) -> Vec<String> {
        let words = shlex::split(&lines.replace("\\\n", " ")).expect("a shell reads it");
        let at = |(index, _)| words.get(index + 1).cloned();
        words.iter().enumerate().filter(|(_, word)| *word == flag).filter_map(at).collect()
    }

    /// QEMU's options: `key=value`, where a doubled comma is one; the first value may stand without its key.
    fn of_qemu(text: &str, first_key: &str) -> BTreeMap<String, String> {
        let text = format!("{first_key}={text}");
        drive::parse_key_values(&text).unwrap().into_iter().map(|pair| (pair.key, pair.value)).collect()
    }

    /// Options that commas part where they stand in no double quotes and no brackets.
    fn of_quoted(text: &str, has_escapes: bool) -> BTreeMap<String, String> {
        let (mut pairs, mut part, mut is_quoted, mut chars) = (BTreeMap::new(), String::new(), false, text.chars());
        let mut end = |part: &mut String| {
            let (key, value) = part.split_once('=').expect("key=value");
            assert!(pairs.insert(key.to_owned(), value.to_owned()).is_none(), "{key} comes twice");
            part.clear();
        };
        while let Some(char) = chars.next() {
            match char {
                '"' => is_quoted = !is_quoted,
                '\\' if has_escapes && is_quoted => part.extend(chars.next()),
                ',' if !is_quoted => end(&mut part),
                '[' | ']' if !is_quoted => panic!("a list begins in {text}"),
                other => part.push(other),
            }
        }
        end(&mut part);
        assert!(!is_quoted, "{text}");
        pairs
    }

    fn assert_pairs(pairs: &BTreeMap<String, String>, expected: &[(&str, &str)]) {
        let expected = expected.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        assert_eq!(*pairs, expected);
    }

    #[test]
    fn qemu_reads_its_flags() {
        let text = qemu(&disks());
        let backend = of_qemu(&values_of(&text, "-object")[0], "driver");
        assert_pairs(&backend, &[("driver", "memory-backend-memfd"), ("id", "mem0"), ("size", "1G"), ("share", "on")]);
        assert_eq!(values_of(&text, "-machine"), ["memory-backend=mem0"]);
        let (sockets, devices) = (values_of(&text, "-chardev"), values_of(&text, "-device"));
        assert_eq!((sockets.len(), devices.len()), (SOCKETS.len(), SOCKETS.len()));
        for (index, path) in SOCKETS.iter().enumerate() {
            let id = format!("ringdisk{index}");
            let socket = of_qemu(&sockets[index], "backend");
            assert_pairs(&socket, &[("backend", "socket"), ("id", &id), ("path", path), ("reconnect-ms", "1000")]);
            let device = of_qemu(&devices[index], "driver");
            assert_pairs(&device, &[("driver", "vhost-user-blk-pci"), ("chardev", &id), ("num-queues", "4")]);
        }
    }

    #[test]
    fn cloud_hypervisor_reads_its_flags() {
        // Its parser knows no way to write a double quote.
        let disks: Vec<Attachment> = disks().into_iter().filter(|disk| !disk.socket.ends_with("\"q\"")).collect();
        let text = cloud_hypervisor(&disks);
        assert_pairs(&of_quoted(&values_of(&text, "--memory")[0], false), &[("size", "1G"), ("shared", "on")]);
        let words = shlex::split(&text.replace("\\\n", " ")).unwrap();
        let flags = words.iter().skip_while(|word| *word != "--disk").skip(1);
        for (flag, disk) in flags.zip(&disks) {
            let path = disk.socket.to_string_lossy();
            let pairs = of_quoted(flag, false);
            let expected = [("vhost_user", "true"), ("socket", &*path), ("num_queues", "1"), ("queue_size", "256")];
            assert_pairs(&pairs, &expected);
        }
    }

    #[test]
    fn crosvm_reads_its_flags() {
        for (flag, path) in values_of(&crosvm(&disks()), "--vhost-user").iter().zip(SOCKETS) {
            assert_pairs(&of_quoted(flag, true), &[("type", "block"), ("socket", path), ("max-queue-size", "1024")]);
        }
    }

    #[test]
    fn firecracker_reads_its_requests() {
        for (line, path) in firecracker(&disks()).lines().zip(SOCKETS) {
            let body: serde_json::Value = serde_json::from_str(line).unwrap();
            assert_eq!((body["socket"].as_str(), body["cache_type"].as_str()), (Some(path), Some("Writeback")));
            // What belongs to a disk that is a file (`path_on_host`, `is_read_only`) is refused beside a socket.
            let keys: Vec<&str> = body.as_object().unwrap().keys().map(String::as_str).collect();
            assert_eq!(keys, ["cache_type", "drive_id", "is_root_device", "socket"]);
        }
    }

    #[test]
    fn user_mode_linux_is_given_the_paths_that_its_command_line_can_express() {
        for disk in disks() {
            let path = disk.socket.to_string_lossy().into_owned();
            let text = user_mode_linux(&[disk]);
            match path.contains([' ', ':', '"']) {
                true => assert!(text.contains("cannot express") && text.contains(&path), "{text}"),
                false => assert_eq!(shlex::split(&text).unwrap(), [format!("virtio_uml.device={path}:2")]),
            }
        }
    }

    #[test]
    fn the_text_for_people_has_every_monitor() {
        let disk = Attachment { socket: PathBuf::from("/run/a.sock"), queues: 4, queue_size: 1024 };
        let text = attach_flags(&[disk]);
        for name in ["QEMU", "Cloud Hypervisor", "Firecracker", "crosvm", "User Mode Linux"] {
            assert!(text.contains(name), "{text}");
        }
        assert!(text.contains("path=/run/a.sock,reconnect-ms=1000 \\\n"), "no quotes without need: {text}");
        assert_eq!(quote(""), "''");
        let abstract_name = Attachment { socket: PathBuf::from("@name"), queues: 4, queue_size: 1024 };
        assert!(!attach_flags(&[abstract_name]).contains("@name"));
    }
}
