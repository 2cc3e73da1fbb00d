//! Writes qcow2 images with any number of clusters in use, in seconds. It writes all tables at once, from the format's
//! specification, and data only on request. An image of many terabytes takes only the space of its tables.

use anyhow::{Context, Result};
use std::io::{BufWriter, Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;

pub(super) const CLUSTER_BYTES: u64 = 1 << 16;
/// Clusters that one L2 table maps.
pub(super) const L2_ENTRIES: u64 = CLUSTER_BYTES / 8;
/// Clusters that one refcount block counts, in 16 bits each.
const BLOCK_ENTRIES: u64 = CLUSTER_BYTES / 2;
const COPIED: u64 = 1 << 63;
const HEADER_BYTES: u32 = 104;
/// The header field with the offset of the L1 table.
const L1_OFFSET_AT: u64 = 40;

/// The description of an image.
pub(super) struct Image<'a> {
    pub(super) size_bytes: u64,
    /// The name of the backing file, a qcow2 image, as the header has it.
    pub(super) backing: Option<&'a str>,
    /// Whether a guest cluster is in use.
    pub(super) in_use: &'a dyn Fn(u64) -> bool,
    /// Fills its clusters; without it the file has holes in place of data.
    pub(super) data: Option<Fill<'a>>,
}

/// Fills a cluster.
pub(super) type Fill<'a> = &'a mut dyn FnMut(&mut [u8]);

/// The layout in clusters: header, refcount table, L1 table, L2 tables, refcount blocks, data.
struct Layout {
    table_clusters: u64,
    l1_clusters: u64,
    l2_tables: u64,
    blocks: u64,
    data: u64,
    end: u64,
}

impl Layout {
    fn of(size_bytes: u64, used: u64) -> Self {
        let l2_tables = size_bytes.div_ceil(CLUSTER_BYTES * L2_ENTRIES);
        let l1_clusters = (l2_tables * 8).div_ceil(CLUSTER_BYTES);
        let (mut blocks, mut table_clusters) = (1, 1);
        loop {
            let data = 1 + table_clusters + l1_clusters + l2_tables + blocks;
            let end = data + used;
            let needed = (end.div_ceil(BLOCK_ENTRIES), (end.div_ceil(BLOCK_ENTRIES) * 8).div_ceil(CLUSTER_BYTES));
            if needed == (blocks, table_clusters) {
                return Self { table_clusters, l1_clusters, l2_tables, blocks, data, end };
            }
            (blocks, table_clusters) = needed;
        }
    }

    fn l1(&self) -> u64 {
        1 + self.table_clusters
    }

    fn l2(&self) -> u64 {
        self.l1() + self.l1_clusters
    }

    fn first_block(&self) -> u64 {
        self.l2() + self.l2_tables
    }
}

/// Writes `image` to a new file at `path`.
pub(super) fn write(path: &Path, image: Image<'_>) -> Result<()> {
    let clusters = image.size_bytes.div_ceil(CLUSTER_BYTES);
    let used = (0..clusters).filter(|cluster| (image.in_use)(*cluster)).count() as u64;
    let layout = Layout::of(image.size_bytes, used);
    let file = std::fs::File::create(path).with_context(|| format!("cannot create {}", path.display()))?;
    file.set_len(layout.end * CLUSTER_BYTES)?;
    let mut file = BufWriter::with_capacity(1 << 20, file);
    file.write_all(&header(&image, &layout))?;

    seek(&mut file, 1)?;
    words(&mut file, (0..layout.blocks).map(|at| (layout.first_block() + at) * CLUSTER_BYTES))?;
    seek(&mut file, layout.l1())?;
    words(&mut file, (0..layout.l2_tables).map(|at| ((layout.l2() + at) * CLUSTER_BYTES) | COPIED))?;
    seek(&mut file, layout.l2())?;
    let mut next = layout.data;
    words(
        &mut file,
        (0..layout.l2_tables * L2_ENTRIES).map(|cluster| {
            if cluster >= clusters || !(image.in_use)(cluster) {
                return 0;
            }
            next += 1;
            ((next - 1) * CLUSTER_BYTES) | COPIED
        }),
    )?;
    seek(&mut file, layout.first_block())?;
    let ones = [0, 1].repeat(BLOCK_ENTRIES as usize);
    for block in 0..layout.blocks {
        let counted = BLOCK_ENTRIES.min(layout.end - block * BLOCK_ENTRIES) as usize;
        file.write_all(&ones[..counted * 2])?;
    }
    if let Some(fill) = image.data {
        seek(&mut file, layout.data)?;
        let mut cluster = vec![0; CLUSTER_BYTES as usize];
        for _ in 0..used {
            fill(&mut cluster);
            file.write_all(&cluster)?;
        }
    }
    file.flush()?;
    Ok(())
}

/// Unmaps the first guest cluster again; its host cluster is leaked.
pub(super) fn drop_first_cluster(path: &Path) -> Result<()> {
    let file = std::fs::File::options().read(true).write(true).open(path)?;
    let word = |offset| -> Result<u64> {
        let mut bytes = [0; 8];
        file.read_exact_at(&mut bytes, offset)?;
        Ok(u64::from_be_bytes(bytes))
    };
    let l2_offset = word(word(L1_OFFSET_AT)?)? & !COPIED;
    file.write_all_at(&[0; 8], l2_offset)?;
    Ok(())
}

/// Returns a header of version 3, without features.
fn header(image: &Image<'_>, layout: &Layout) -> Vec<u8> {
    let name = image.backing.unwrap_or_default();
    // Behind the header: the extension that names the backing file's format, the end of extensions, the name.
    let extension: &[u8] = if name.is_empty() { &[] } else { b"\xe2\x79\x2a\xca\0\0\0\x05qcow2\0\0\0" };
    let name_offset = if name.is_empty() { 0 } else { u64::from(HEADER_BYTES) + extension.len() as u64 + 8 };
    let mut bytes = Vec::new();
    bytes.extend(b"QFI\xfb");
    bytes.extend(3_u32.to_be_bytes());
    bytes.extend(name_offset.to_be_bytes());
    bytes.extend((name.len() as u32).to_be_bytes());
    bytes.extend(CLUSTER_BYTES.trailing_zeros().to_be_bytes());
    bytes.extend(image.size_bytes.to_be_bytes());
    bytes.extend(0_u32.to_be_bytes());
    bytes.extend((layout.l2_tables as u32).to_be_bytes());
    bytes.extend((layout.l1() * CLUSTER_BYTES).to_be_bytes());
    bytes.extend(CLUSTER_BYTES.to_be_bytes());
    bytes.extend((layout.table_clusters as u32).to_be_bytes());
    // No snapshots, and none of the feature bits.
    bytes.extend([0; 4 + 8 + 8 + 8 + 8]);
    bytes.extend(4_u32.to_be_bytes());
    bytes.extend(HEADER_BYTES.to_be_bytes());
    bytes.extend(extension);
    bytes.extend([0; 8]);
    bytes.extend(name.as_bytes());
    bytes
}

fn seek(file: &mut BufWriter<std::fs::File>, cluster: u64) -> Result<()> {
    file.seek(SeekFrom::Start(cluster * CLUSTER_BYTES))?;
    Ok(())
}

fn words(file: &mut impl Write, words: impl Iterator<Item = u64>) -> Result<()> {
    for word in words {
        file.write_all(&word.to_be_bytes())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::Program;
    use crate::packages;

    #[test]
    fn qemu_img_finds_such_an_image_sound_and_reads_from_it_what_was_written() {
        if packages::find_program("qemu-img").is_none() {
            eprintln!("skipped: qemu-img is missing");
            return;
        }
        let path = std::env::temp_dir().join(format!("ringdisk-xtask-{}.qcow2", std::process::id()));
        let mut fill = |cluster: &mut [u8]| cluster.fill(7);
        let image =
            Image { size_bytes: 3 << 30, backing: None, in_use: &|cluster| cluster % 97 == 5, data: Some(&mut fill) };
        write(&path, image).unwrap();
        let name = path.display().to_string();
        let checked = Program::new("qemu-img").args(["check", "-f", "qcow2", &name]).output_text();
        let read = ["-f", "qcow2", "-r", "-c", "read -P 7 327680 64k", "-c", "read -P 0 0 64k", &name];
        let read = Program::new("qemu-io").args(read).output_text();
        std::fs::remove_file(&path).unwrap();
        assert!(checked.unwrap().contains("No errors"));
        assert!(!read.unwrap().contains("Pattern verification failed"));
    }
}
