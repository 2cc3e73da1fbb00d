//! Facts about a block device that the kernel shows under /sys: sizes to align to, and how worn it is.

use block::{Lifetime, Topology};
use rustix::fs::Stat;
use std::path::{Path, PathBuf};

/// Returns the directory in which the kernel shows the block device of `stat`.
pub(crate) fn directory(stat: &Stat) -> PathBuf {
    let (major, minor) = (rustix::fs::major(stat.st_rdev), rustix::fs::minor(stat.st_rdev));
    PathBuf::from(format!("/sys/dev/block/{major}:{minor}"))
}

/// Reads a file of the device or, if the device is a partition, of the whole disk.
fn read(device: &Path, name: &str) -> Option<String> {
    let text = std::fs::read_to_string(device.join(name));
    // Not `join`: the directory is a link, and `..` must go up from the link's target.
    let text = text.or_else(|_| std::fs::read_to_string(format!("{}/../{name}", device.display())));
    Some(text.ok()?.trim().to_owned())
}

pub(crate) fn topology(device: &Path) -> Topology {
    let number = |name: &str| read(device, name).and_then(|text| text.parse().ok()).unwrap_or(0);
    Topology {
        physical_block_bytes: number("queue/physical_block_size"),
        minimum_io_bytes: number("queue/minimum_io_size"),
        optimal_io_bytes: number("queue/optimal_io_size"),
        // A partition has an offset of its own. A device without any alignment says -1, which counts as unknown.
        alignment_offset_bytes: number("alignment_offset"),
    }
}

/// Reads the wear of an eMMC, the only device that tells it: two numbers of wear, and one of the reserve, all
/// hexadecimal.
pub(crate) fn lifetime(device: &Path) -> Option<Lifetime> {
    let number = |text: &str| u16::from_str_radix(text.trim_start_matches("0x"), 16).ok();
    let wear = read(device, "device/life_time")?;
    let mut wear = wear.split_whitespace().map(number);
    let (worn_a, worn_b) = (wear.next()??, wear.next()??);
    let end_of_life = read(device, "device/pre_eol_info").and_then(|text| number(&text)).unwrap_or(0);
    Some(Lifetime { end_of_life, worn_a, worn_b })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_partition_has_its_own_alignment_and_its_disks_sizes_and_wear() {
        let directory = tempfile::tempdir().unwrap();
        let disk = directory.path().join("mmcblk0");
        let partition = disk.join("mmcblk0p1");
        for folder in ["queue", "device", "mmcblk0p1"] {
            std::fs::create_dir_all(disk.join(folder)).unwrap();
        }
        let files = [
            ("queue/physical_block_size", "4096"),
            ("queue/minimum_io_size", "8192"),
            ("queue/optimal_io_size", "65536"),
            ("alignment_offset", "0"),
            ("mmcblk0p1/alignment_offset", "3584"),
            ("device/life_time", "0x02 0x0b"),
            ("device/pre_eol_info", "0x03"),
        ];
        for (name, text) in files {
            std::fs::write(disk.join(name), format!("{text}\n")).unwrap();
        }
        let worn = Some(Lifetime { end_of_life: 3, worn_a: 2, worn_b: 11 });
        for (device, alignment_offset_bytes) in [(&disk, 0), (&partition, 3584)] {
            let (minimum_io_bytes, optimal_io_bytes) = (8192, 65536);
            let expected =
                Topology { physical_block_bytes: 4096, minimum_io_bytes, optimal_io_bytes, alignment_offset_bytes };
            assert_eq!(topology(device), expected);
            assert_eq!(lifetime(device), worn);
        }
        std::fs::write(disk.join("alignment_offset"), "-1\n").unwrap();
        assert_eq!(topology(&disk).alignment_offset_bytes, 0);
        assert_eq!((topology(directory.path()), lifetime(directory.path())), (Topology::default(), None));
    }
}
