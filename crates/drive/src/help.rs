//! The keys of a drive with their descriptions: the table of docs/drive-options.md, which a test compares.

/// Each key and its description.
const KEYS: [(&str, &str); 42] = [
    ("file", "the image: a path, `host_device:/dev/sdb`, or `fd:3` for a descriptor that the program was given"),
    (
        "format",
        "`raw`, `qcow2`, `scratch` (a kept overlay), or `null` (no file; needs `size`; reads give zeros, for measurements). Guessed if not given",
    ),
    ("name", "the name of the disk in the daemon; `id` means the same. By default `disk0`, `disk1`, ..."),
    ("readonly", "`on`: the guest cannot write"),
    (
        "snapshot",
        "`on`: writes go to temporary files in `TMPDIR`, and are gone with the disk; the image is opened read-only",
    ),
    (
        "keep",
        "with `snapshot=on`: the directory in which those files are kept, as `NAME.scratch` and `NAME.scratch.data`. Existing files are used again",
    ),
    ("serial", "the serial number that the guest reads, at most 20 bytes"),
    (
        "socket",
        "where the monitor connects: a path, or `fd:4` for a socket that the program was given. By default the image's name with `.sock` behind it",
    ),
    ("socket-mode", "who may connect: permissions in octal. By default `0600`; with `socket-group`, `0660`"),
    ("socket-group", "the group that the socket gets, by name or number"),
    ("fd", "a descriptor that the program was given: an image or a listening socket. May be given once for each"),
    ("cache", "`writeback`, `none`, `writethrough`, `directsync`, `unsafe`, as in QEMU"),
    ("sync", "`on`: every write is durable when it completes, through the page cache"),
    (
        "engine",
        "`auto`, `io_uring`, `linux-aio`, `threads`: how bytes reach the storage. `auto` looks at the kernel and the file",
    ),
    (
        "queues",
        "how many request queues the guest may use. By default one for each CPU of the host, at most 16; `num-queues` means the same",
    ),
    ("queue-size", "how long a queue may be: a power of two from 2 to 1024"),
    (
        "l2-cache-size",
        "memory for the tables of an image and its whole chain (`1M`, `256k`). By default what covers the disk, up to 32 MiB",
    ),
    (
        "lock-timeout-s",
        "how long to wait for a locked image that no living process seems to use, in seconds. 30 by default",
    ),
    (
        "poll-max-us",
        "how long an idle thread looks for work before it sleeps, in microseconds. 100 by default, 0 for never",
    ),
    ("fixed-buffers", "`on`: with io_uring, guest memory is registered with the kernel"),
    (
        "guest-memory",
        "what the guest's memory may lie in: `ram` (memfd, tmpfs, huge pages), `locked` (the same, and it is never swapped out), `any`. `ram` by default",
    ),
    ("guest-memory-max", "the most memory that a guest's monitor may share (`4G`)"),
    ("filter", "puts a filter above the image (see `filter=?`). May be given several times"),
    (
        "on-error",
        "what happens to a request that the storage fails: `report` (the guest gets an error) or `hold` (it waits for `ctl resume`)",
    ),
    ("on-no-space", "the same for writes that find no space left"),
    ("delay-ms", "short for `filter=delay:ms=N`, above all other filters"),
    ("size", "the size of a null disk"),
    ("packed", "`on`: packed rings are offered, too"),
    (
        "secure-erase",
        "`on`: secure erases are offered, which overwrite; for raw images in a file or device of this host",
    ),
    ("write-cache", "`on`, `off`: whether the guest's cache begins as write-back. The guest can switch it"),
    ("logical-block-size", "the smallest unit that the guest may address, in bytes"),
    ("physical-block-size", "the size of a physical block that the guest sees, in bytes"),
    ("alignment-offset", "the offset of the first physical block that the guest sees, in bytes"),
    ("min-io-size", "the smallest efficient I/O size that the guest sees"),
    ("opt-io-size", "the best I/O size that the guest sees"),
    ("discard-granularity", "alignment of discards; `0` offers none"),
    ("size-max", "the longest data segment of a request"),
    ("seg-max", "the most data segments of a request, at most `queue-size` less two"),
    ("cyls", "cylinders of a geometry; needs `heads` and `secs`"),
    ("heads", "heads of a geometry"),
    ("secs", "sectors a track of a geometry"),
    ("media", "`disk`, as QEMU has it"),
];

const TITLE: &str = "A drive is a list of key=value, separated by commas. A comma inside a value is written ',,'. format=? lists \
                     the values of a key.";
/// The width of the narrowest terminal, in columns.
const COLUMNS: usize = 80;
/// The start of the second column.
const INDENT: usize = 23;

/// Returns the keys of a drive, each with a description of its values.
#[must_use]
pub fn drive_keys() -> &'static [(&'static str, &'static str)] {
    &KEYS
}

/// Returns the names of all keys.
pub(crate) fn key_names() -> Vec<&'static str> {
    KEYS.iter().map(|(key, _)| *key).collect()
}

/// Returns the table for a terminal.
pub(crate) fn of_keys() -> String {
    let mut text = wrapped(TITLE, 0);
    for (key, takes) in KEYS {
        let cell = wrapped(&takes.replace('`', ""), INDENT);
        text += &format!("\n  {key:width$}{}", cell.trim_start(), width = INDENT - 2);
    }
    text
}

/// Wraps `text` into lines of at most [`COLUMNS`], each indented by `indent`.
fn wrapped(text: &str, indent: usize) -> String {
    let mut lines = vec![String::new()];
    for word in text.split_whitespace() {
        let last = lines.len() - 1;
        if !lines[last].is_empty() && indent + lines[last].len() + 1 + word.len() > COLUMNS {
            lines.push(word.to_owned());
            continue;
        }
        let gap = if lines[last].is_empty() { "" } else { " " };
        lines[last] += &format!("{gap}{word}");
    }
    let indented = lines.iter().map(|line| format!("{:indent$}{line}", ""));
    indented.collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_document_has_the_same_table() {
        let document = include_str!("../../../docs/drive-options.md");
        let rows: Vec<&str> = document.lines().filter(|line| line.starts_with("| `")).collect();
        let expected: Vec<String> = KEYS.iter().map(|(key, takes)| format!("| `{key}` | {takes} |")).collect();
        let keys = rows.get(..KEYS.len()).unwrap_or(&rows);
        assert_eq!(keys, expected);
    }

    #[test]
    fn the_table_for_a_terminal_has_every_key_and_no_line_too_long() {
        let text = of_keys();
        for key in key_names() {
            assert!(text.contains(&format!("\n  {key} ")), "{key}: {text}");
        }
        assert!(text.lines().all(|line| line.len() <= COLUMNS), "{text}");
        assert!(!text.contains('`'), "{text}");
    }
}
