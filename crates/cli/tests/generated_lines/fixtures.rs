//! The images that each script begins with: made once by qemu-img, and damaged by hand.

use crate::common::numbered;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Stdio};

/// Lines of qemu-img, or `io FORMAT FILE COMMAND` for qemu-io.
const LINES: &[&str] = &[
    "create -q -f raw base.raw 1M",
    "io raw base.raw write -P 7 64k 128k",
    "io raw base.raw write -P 3 700k 4k",
    "create -q -f qcow2 plain.qcow2 1M",
    "io qcow2 plain.qcow2 write -P 7 64k 128k",
    "io qcow2 plain.qcow2 write -P 3 700k 4k",
    "io qcow2 plain.qcow2 write -z 256k 64k",
    "create -q -f qcow2 -o cluster_size=4k small.qcow2 1001k",
    "io qcow2 small.qcow2 write -P 9 10k 30k",
    "io qcow2 small.qcow2 write -P 9 990k 11k",
    "create -q -f qcow2 -o compat=0.10,cluster_size=1k old.qcow2 300k",
    "io qcow2 old.qcow2 write -P 5 1k 7k",
    "create -q -f qcow2 -o extended_l2=on,lazy_refcounts=on ext.qcow2 1M",
    "io qcow2 ext.qcow2 write -P 1 10k 4k",
    "io qcow2 ext.qcow2 write -P 2 300k 200k",
    "io qcow2 ext.qcow2 write -z 310k 20k",
    "convert -c -f raw -O qcow2 base.raw packed.qcow2",
    "convert -c -f raw -O qcow2 -o compression_type=zstd,cluster_size=16k base.raw zstd.qcow2",
    "create -q -f qcow2 -b base.raw -F raw over.qcow2",
    "io qcow2 over.qcow2 write -P 4 128k 64k",
    "io qcow2 over.qcow2 write -z 640k 64k",
    "create -q -f qcow2 -b over.qcow2 -F qcow2 -o cluster_size=32k top.qcow2 2M",
    "io qcow2 top.qcow2 write -P 6 1900k 32k",
    "io qcow2 top.qcow2 write -P 6 96k 32k",
    "create -q -f qcow2 -u -b gone.raw -F raw orphan.qcow2 1M",
    "create -q -f qcow2 -u -b /x/y.vmdk -F vmdk foreign.qcow2 1M",
    "create -q -f qcow2 snap.qcow2 512k",
    "io qcow2 snap.qcow2 write -P 1 0 100k",
    "snapshot -c one snap.qcow2",
    "io qcow2 snap.qcow2 write -P 2 64k 100k",
    "snapshot -c two snap.qcow2",
    "create -q -f qcow2 bits.qcow2 1M",
    "bitmap --add -g 4k bits.qcow2 fine",
    "bitmap --add bits.qcow2 coarse",
    "io qcow2 bits.qcow2 write -P 8 300k 100k",
    "bitmap --disable bits.qcow2 coarse",
    "create -q -f qcow2 -o preallocation=metadata,cluster_size=16k pre.qcow2 768k",
    "create -q -f qcow2 -o data_file=data.bin ext-data.qcow2 512k",
    "io qcow2 ext-data.qcow2 write -P 3 0 64k",
    "create -q -f qcow2 leak.qcow2 1M",
    "io qcow2 leak.qcow2 write -P 1 0 192k",
    "create -q --object secret,id=s,data=abc -f qcow2 -o encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10 luks.qcow2 64k",
    "create -q --object secret,id=s,data=abc -f qcow2 -o encrypt.format=aes,encrypt.key-secret=s aes.qcow2 64k",
    "create -q -f vmdk x.vmdk 64k",
    "create -q -f vdi x.vdi 64k",
    "create -q -f vpc x.vpc 64k",
    "create -q -f qed x.qed 64k",
    "create -q -f qcow x.qcow 64k",
    "create -q -f parallels x.parallels 1M",
];

/// Big-endian, in the header (qcow2 specification, "Header").
const INCOMPATIBLE_FEATURES: usize = 72;
const L1_OFFSET: usize = 40;
const REFCOUNT_TABLE_OFFSET: usize = 48;

/// Files with names, as bytes.
pub(crate) struct Fixtures(Vec<(String, Vec<u8>)>);

impl Fixtures {
    /// Makes them in the new directory `directory`.
    pub(crate) fn make(directory: &Path) -> Self {
        std::fs::create_dir(directory).expect("a new directory");
        LINES.iter().for_each(|line| run(directory, line));
        let mut files: Vec<(String, Vec<u8>)> = std::fs::read_dir(directory)
            .expect("a directory")
            .map(|entry| entry.expect("an entry"))
            .map(|entry| (entry.file_name().into_string().expect("text"), std::fs::read(entry.path()).expect("a file")))
            .collect();
        files.push(("odd.raw".to_owned(), numbered(1000)));
        files.push(("empty.raw".to_owned(), Vec::new()));
        let plain = bytes_of(&files, "plain.qcow2");
        let mut damaged = |name: &str, of: &[u8], damage: &dyn Fn(&mut Vec<u8>)| {
            let mut bytes = of.to_vec();
            damage(&mut bytes);
            files.push((name.to_owned(), bytes));
        };
        // A feature that nobody knows, and one that is in no table of names either.
        damaged("unknown.qcow2", &plain, &|bytes| bytes[INCOMPATIBLE_FEATURES + 6] |= 1);
        damaged("named.qcow2", &plain, &|bytes| {
            bytes[INCOMPATIBLE_FEATURES + 6] |= 2;
            let name = bytes.windows(14).position(|window| window == b"lazy refcounts").expect("a table of names");
            bytes[name - 2..name].copy_from_slice(&[0, 9]);
        });
        damaged("marked.qcow2", &plain, &|bytes| bytes[INCOMPATIBLE_FEATURES + 7] |= 2);
        damaged("dirty.qcow2", &plain, &|bytes| bytes[INCOMPATIBLE_FEATURES + 7] |= 1);
        damaged("cut.qcow2", &plain, &|bytes| bytes.truncate(100));
        damaged("version.qcow2", &plain, &|bytes| bytes[7] = 9);
        damaged("huge.qcow2", &plain, &|bytes| bytes[23] = 63);
        damaged("leaking.qcow2", &plain, &|bytes| {
            let (table, _) = l2_table(bytes);
            bytes[table + 8..table + 16].fill(0);
        });
        damaged("uncounted.qcow2", &plain, &|bytes| {
            let (table, _) = l2_table(bytes);
            let cluster = (word(bytes, table + 8) & 0x00ff_ffff_ffff_fe00) as usize >> 16;
            let block = word(bytes, word(bytes, REFCOUNT_TABLE_OFFSET) as usize) as usize;
            bytes[block + 2 * cluster..block + 2 * cluster + 2].fill(0);
        });
        Self(files)
    }

    /// Their copies, in a new directory. What is zeros is a hole, but in an image with tables, where it would look as if
    /// space had been made in advance.
    pub(super) fn copy_to(&self, directory: &Path) {
        std::fs::create_dir(directory).expect("a new directory");
        for (name, bytes) in &self.0 {
            let file = File::create_new(directory.join(name)).expect("a new file");
            file.set_len(bytes.len() as u64).expect("space");
            let is_hole = |block: &[u8]| !bytes.starts_with(b"QFI\xfb") && block.iter().all(|byte| *byte == 0);
            for (index, block) in bytes.chunks(4096).enumerate().filter(|(_, block)| !is_hole(block)) {
                file.write_all_at(block, index as u64 * 4096).expect("space");
            }
        }
    }
}

fn bytes_of(files: &[(String, Vec<u8>)], name: &str) -> Vec<u8> {
    files.iter().find(|(own, _)| own == name).expect("a fixture").1.clone()
}

fn word(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

/// Where the first L2 table lies, and the L1 table.
fn l2_table(bytes: &[u8]) -> (usize, usize) {
    let l1 = word(bytes, L1_OFFSET) as usize;
    ((word(bytes, l1) & 0x00ff_ffff_ffff_fe00) as usize, l1)
}

fn run(directory: &Path, line: &str) {
    let words: Vec<&str> = line.split(' ').collect();
    let mut command = match words[..] {
        ["io", format, file, ..] => {
            let mut command = Command::new("qemu-io");
            command.args(["-f", format, "-c", &words[3..].join(" "), file]);
            command
        }
        _ => {
            let mut command = Command::new("qemu-img");
            command.args(&words);
            command
        }
    };
    let output = command.current_dir(directory).stdin(Stdio::null()).output().expect("the program can be started");
    assert!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
}
