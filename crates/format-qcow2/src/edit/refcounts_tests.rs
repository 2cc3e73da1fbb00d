use super::*;
use crate::edit::create::{CreateOptions, create};
use crate::layout::entry::entries;
use crate::layout::header::Header;
use block::{File, block_on};
use std::sync::Arc;
use testkit::{SimFile, SimFileOptions, SimStorage};

/// An image with clusters of 512 bytes.
fn new_image(storage: &SimStorage) -> (Arc<SimFile>, MetaIo, Header) {
    let file = storage.create("disk", 0, SimFileOptions::default());
    let io = MetaIo::new(file.open_blocking().unwrap());
    let options = CreateOptions { size_bytes: 1 << 20, cluster_size: 512, ..CreateOptions::default() };
    block_on(create(&io, &options)).unwrap();
    let bytes = block_on(io.read(0, 512, PastEnd::Fails)).unwrap();
    (file, io, Header::parse(&bytes, "disk", true).unwrap())
}

#[test]
fn looking_at_all_refcounts_of_a_large_file_takes_little_memory() {
    let storage = SimStorage::new(1);
    let (blocks, clusters) = (400u64, 512 / 2);
    let (_file, io, header) = new_image(&storage);
    block_on(async {
        // A sparse file whose blocks are all one and the same, but for every other one, which is missing.
        let zeros = 512 * 1000;
        io.write(zeros, AlignedBuf::zeroed(512)).await.unwrap();
        let table = (0..blocks).map(|block| if block % 2 == 0 { 0 } else { zeros }).collect();
        let mut refs = Refs::new(&io, header.geometry(), table, header.refcount_table_offset, blocks * clusters * 512);
        refs.clean_bytes = 0;
        let mut end = refs.file_clusters;
        let mut is_found = false;
        while !is_found {
            (end, is_found) = refs.skip_free(end).await.unwrap();
        }
        assert_eq!(end, 0);
        assert!(refs.blocks.len() <= CLEAN_BLOCKS_MIN, "{} blocks are kept", refs.blocks.len());
        for block in 0..blocks {
            let looked_at = refs.require_kept(block * clusters..block * clusters + 1).await;
            assert_eq!(looked_at.unwrap_err().kind(), IoErrorKind::Corrupt, "it counts nothing");
            assert!(refs.blocks.len() <= CLEAN_BLOCKS_MIN, "{} blocks are kept", refs.blocks.len());
        }
        // What has changed is not dropped with them, and what was stored and read again has not changed.
        for block in (0..blocks).step_by(2) {
            refs.set(block * clusters + 5, 7).await.unwrap();
        }
        refs.blocks_bytes = 0;
        refs.relieve().await.unwrap();
        assert!(refs.blocks.is_empty());
        for block in 0..blocks {
            let expected = if block % 2 == 0 { 7 } else { 0 };
            assert_eq!(refs.get(block * clusters + 5).await.unwrap(), expected, "block {block}");
        }
        assert!(refs.blocks.len() <= CLEAN_BLOCKS_MIN, "{} blocks are kept", refs.blocks.len());
    });
}

#[test]
fn the_table_takes_its_place_before_single_blocks_fill_the_holes() {
    let storage = SimStorage::new(1);
    let file = storage.create("disk", 0, SimFileOptions::default());
    let io = MetaIo::new(file.open_blocking().unwrap());
    let geometry = Geometry {
        version: 3,
        size_bytes: 1 << 20,
        cluster_bits: 9,
        refcount_order: 4,
        has_backing: false,
        extended_l2: false,
        data_file: false,
    };
    // The table has two clusters and names four blocks. All that they count is in use, but for four clusters.
    let (blocks, clusters, free) = (4u64, 512 / 2, 10..14u64);
    let mut table = vec![0; 128];
    block_on(async {
        for block in 0..blocks {
            let mut bytes = vec![0; 512];
            for cluster in (block * clusters..(block + 1) * clusters).filter(|cluster| !free.contains(cluster)) {
                write_entry(&mut bytes, cluster - block * clusters, 4, 1);
            }
            let offset = (3 + block) * 512;
            io.write(offset, AlignedBuf::copy_of(&bytes)).await.unwrap();
            table[block as usize] = offset;
        }
        let mut refs = Refs::new(&io, geometry, table, 512, blocks * clusters * 512);
        for block in 0..blocks {
            let cluster = block * clusters + 100;
            refs.raise(cluster..cluster + 1, 1).await.unwrap();
        }
        let placed = refs.finish().await.unwrap().unwrap();
        assert_eq!((placed.offset, placed.clusters), (free.start * 512, 2));
    });
}

#[test]
fn refcount_blocks_that_move_while_a_long_run_is_counted_do_not_move_into_it() {
    let storage = SimStorage::new(1);
    let (file, io, header) = new_image(&storage);
    block_on(async {
        let table = io.read(header.refcount_table_offset, 512, PastEnd::Fails).await.unwrap();
        let table: Vec<u64> = entries(&table).collect();
        let bytes = file.length_bytes().unwrap();
        let mut refs = Refs::new(&io, header.geometry(), table, header.refcount_table_offset, bytes);
        refs.blocks_bytes = 4096;
        let count = 70_000;
        let first = refs.allocate_at_end(count).await.unwrap();
        assert!(refs.homes.len() > 200, "nothing moved meanwhile, so this shows nothing");
        refs.finish().await.unwrap();
        let run = first..first + count;
        let inside = refs.homes.values().filter(|home| run.contains(&(**home / 512))).count();
        assert_eq!(inside, 0, "refcount blocks lie in space that was given out for something else");
    });
}
