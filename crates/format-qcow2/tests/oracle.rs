//! Images written here are read by qemu-img identically, and the other way round.
#![allow(clippy::unwrap_used)]

mod common;

use block::block_on;
use common::{Base, Guest, created, has_tool, judged_by_qemu, open, open_bytes, run};
use ringdisk_format_qcow2::{Compression, CreateOptions};
use std::path::Path;
use testkit::{Dice, SimFileOptions, fill_seeded};

/// What the disk should hold.
struct Model(Vec<u8>);

/// Random requests on a guest and on the model; ends with everything compared.
fn exercise(guest: &Guest, model: &mut Model, dice: &mut Dice, requests: usize) {
    let size = model.0.len() as u64;
    for request in 0..requests {
        let most = if dice.chance(20) { size / 3 } else { 20_000 };
        let offset = dice.below(size / 512) * 512;
        let length = ((1 + dice.below(most / 512)) * 512).min(size - offset);
        let range = offset as usize..(offset + length) as usize;
        block_on(async {
            match dice.below(20) {
                0..10 => {
                    fill_seeded(dice.seed(), &mut model.0[range.clone()]);
                    guest.write(offset, &model.0[range]).await.unwrap();
                }
                10..13 => {
                    model.0[range].fill(0);
                    guest.write_zeroes(offset, length, dice.chance(50)).await.unwrap();
                }
                13..15 => {
                    guest.discard(offset, length).await.unwrap();
                    let now = guest.read(offset, length as usize).await.unwrap();
                    model.0[range].copy_from_slice(&now);
                }
                15..18 => assert!(guest.read(offset, length as usize).await.unwrap() == model.0[range], "{request}"),
                _ => guest.flush().await.unwrap(),
            }
        });
    }
    assert!(block_on(guest.read_all()).unwrap() == model.0);
}

fn options(cluster_size: u64, version: u32, refcount_bits: u32) -> CreateOptions {
    CreateOptions::default().with(|options| {
        options.size_bytes = 3 << 20;
        options.cluster_size = cluster_size;
        options.version = version;
        options.refcount_bits = refcount_bits;
    })
}

#[test]
fn random_writes_read_back_and_qemu_agrees_for_all_cluster_sizes_versions_and_refcount_widths() {
    if !has_tool("qemu-img") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let widths = [1, 2, 4, 8, 16, 32, 64];
    for (number, cluster_bits) in (9..=21).enumerate() {
        for (version, refcount_bits) in [(2, 16), (3, 16), (3, widths[number % widths.len()])] {
            let seed = number as u64 * 100 + u64::from(version * 10) + u64::from(refcount_bits);
            let mut dice = Dice::new(seed);
            let (storage, file) = created(&options(1 << cluster_bits, version, refcount_bits), sim_options(seed));
            let mut model = Model(vec![0; 3 << 20]);
            for _ in 0..2 {
                let guest = open(&file, Base::default());
                exercise(&guest, &mut model, &mut dice, 60);
                block_on(guest.close()).unwrap();
                let image = storage.bytes(common::NAME);
                let what = format!("clusters of {} bytes, version {version}, {refcount_bits} bits", 1 << cluster_bits);
                assert!(judged_by_qemu(directory.path(), &image) == model.0, "{what}");
            }
        }
    }
}

#[test]
fn clusters_in_parts_read_back_and_qemu_agrees() {
    if !has_tool("qemu-img") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    for (seed, cluster_bits) in [14, 15, 16, 18, 21].into_iter().enumerate() {
        let seed = seed as u64;
        let mut dice = Dice::new(seed);
        let wanted = options(1 << cluster_bits, 3, 16).with(|options| options.extended_l2 = true);
        let (storage, file) = created(&wanted, sim_options(seed));
        let mut model = Model(vec![0; 3 << 20]);
        for _ in 0..2 {
            let guest = open(&file, Base::default());
            exercise(&guest, &mut model, &mut dice, 60);
            let start = (dice.below(3 << 20 >> cluster_bits) << cluster_bits) as usize;
            let end = (start + (1 << cluster_bits)).min(3 << 20);
            model.0[start..end].fill(seed as u8);
            block_on(guest.write_compressed(start as u64, &model.0[start..end])).unwrap();
            exercise(&guest, &mut model, &mut dice, 60);
            block_on(guest.close()).unwrap();
            let image = storage.bytes(common::NAME);
            testkit::qcow2_check(&image).unwrap().sound().unwrap();
            assert!(judged_by_qemu(directory.path(), &image) == model.0, "clusters of {} bytes", 1 << cluster_bits);
        }
    }
}

/// Storage that promises more or less.
fn sim_options(seed: u64) -> SimFileOptions {
    SimFileOptions {
        can_discard: !seed.is_multiple_of(3),
        discard_zeroes: seed.is_multiple_of(2),
        ..SimFileOptions::default()
    }
}

#[test]
fn every_width_and_size_of_new_image_checks_clean_and_says_what_was_asked() {
    if !has_tool("qemu-img") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("new.qcow2");
    let path = path.to_str().unwrap();
    for cluster_bits in 9..=21 {
        for order in 0..=6 {
            // With the smallest clusters the L1 table alone needs many refcount blocks.
            let size_bytes = if cluster_bits < 12 { 1 << 30 } else { 5 << 40 };
            let mut wanted = options(1 << cluster_bits, 3, 1 << order);
            wanted = wanted.with(|options| options.size_bytes = size_bytes);
            if order == 3 {
                wanted.compression = Compression::Zstd;
                wanted.lazy_refcounts = true;
                wanted.backing_file = Some("base.raw".to_owned());
                wanted.backing_format = Some("raw".to_owned());
            }
            let (storage, _) = created(&wanted, SimFileOptions::default());
            std::fs::write(path, storage.bytes(common::NAME)).unwrap();
            if order == 3 {
                std::fs::File::create(directory.path().join("base.raw")).unwrap().set_len(1 << 20).unwrap();
            }
            run("qemu-img", &["check", path]);
            let info = run("qemu-img", &["info", "--output=json", path]);
            let says = |text: &str| assert!(info.contains(text), "{text} not in {info}");
            says(&format!("\"virtual-size\": {size_bytes}"));
            says(&format!("\"cluster-size\": {}", 1u64 << cluster_bits));
            says(&format!("\"refcount-bits\": {}", 1 << order));
            says(if order == 3 { "\"compression-type\": \"zstd\"" } else { "\"compression-type\": \"zlib\"" });
            says(if order == 3 { "\"lazy-refcounts\": true" } else { "\"lazy-refcounts\": false" });
            if order == 3 {
                says("\"backing-filename\": \"base.raw\"");
                says("\"backing-filename-format\": \"raw\"");
            }
        }
    }
}

#[test]
fn compressed_writes_among_others_read_back_and_qemu_agrees() {
    if !has_tool("qemu-img") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    for (seed, (cluster_bits, refcount_bits)) in [(9, 8), (12, 1), (16, 16), (16, 2), (21, 64)].into_iter().enumerate()
    {
        for compression in [Compression::Zlib, Compression::Zstd] {
            let mut dice = Dice::new(seed as u64);
            let wanted = options(1 << cluster_bits, 3, refcount_bits).with(|options| options.compression = compression);
            let (storage, file) = created(&wanted, sim_options(seed as u64));
            let mut model = Model(vec![0; 3 << 20]);
            for _ in 0..2 {
                let guest = open(&file, Base::default());
                let clusters = (3u64 << 20 >> cluster_bits).max(1);
                for _ in 0..20 {
                    let first = dice.below(clusters);
                    let start = (first << cluster_bits) as usize;
                    let end = (start + (1 + dice.below(9) as usize) * (1 << cluster_bits)).min(3 << 20);
                    for (index, byte) in model.0[start..end].iter_mut().enumerate() {
                        *byte = (index / 37 % 251) as u8 ^ (first as u8);
                    }
                    // What does not get smaller is not compressed.
                    fill_seeded(first, &mut model.0[start..start + (end - start) / 5]);
                    block_on(guest.write_compressed(start as u64, &model.0[start..end])).unwrap();
                }
                exercise(&guest, &mut model, &mut dice, 20);
                block_on(guest.close()).unwrap();
                let image = storage.bytes(common::NAME);
                let what = format!("{compression:?}, clusters of {} bytes, {refcount_bits} bits", 1 << cluster_bits);
                assert!(judged_by_qemu(directory.path(), &image) == model.0, "{what}");
            }
        }
    }
}

/// An image made by qemu-img: compressed clusters, then data, zeroes and discards on top, and internal snapshots.
fn made_by_qemu(directory: &Path, create_options: &str, seed: u64) -> Vec<u8> {
    let path = directory.join("qemu.qcow2");
    let raw = directory.join("source.raw");
    let mut source = vec![0; 3 << 20];
    fill_seeded(seed, &mut source[..1 << 20]);
    source[(1 << 20)..(2 << 20)].iter_mut().enumerate().for_each(|(index, byte)| *byte = (index / 1000) as u8);
    std::fs::write(&raw, &source).unwrap();
    let (path, raw) = (path.to_str().unwrap(), raw.to_str().unwrap());
    run("qemu-img", &["convert", "-c", "-O", "qcow2", "-o", create_options, raw, path]);
    let io = |commands: &[&str]| {
        let mut arguments = vec!["-f", "qcow2"];
        commands.iter().for_each(|command| arguments.extend(["-c", command]));
        arguments.push(path);
        run("qemu-io", &arguments);
    };
    io(&["write -P 0x11 100k 300k", "write -z 1500k 200k", "discard 2100k 300k", "write -P 0x22 2500k 64k"]);
    run("qemu-img", &["snapshot", "-c", "first", path]);
    io(&["write -P 0x33 150k 20k", "write -z -u 2500k 32k"]);
    run("qemu-img", &["snapshot", "-c", "second", path]);
    io(&["write -P 0x44 1000k 100k"]);
    std::fs::read(path).unwrap()
}

#[test]
fn images_made_by_qemu_read_the_same_and_survive_our_writes_with_their_snapshots() {
    if !has_tool("qemu-img") || !has_tool("qemu-io") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let kinds = [
        "compat=0.10",
        "compat=1.1",
        "compat=1.1,cluster_size=512",
        "compat=0.10,cluster_size=4096",
        "compat=1.1,cluster_size=2M,refcount_bits=8",
        "compat=1.1,cluster_size=8k,refcount_bits=64,compression_type=zstd",
        "compat=1.1,compression_type=zstd,lazy_refcounts=on",
        "extended_l2=on",
        "extended_l2=on,cluster_size=16k,refcount_bits=8,compression_type=zstd",
        "extended_l2=on,cluster_size=1M",
    ];
    for (number, kind) in kinds.into_iter().enumerate() {
        let seed = number as u64;
        let image = made_by_qemu(directory.path(), kind, seed);
        let expected = judged_by_qemu(directory.path(), &image);
        let snapshot = |image: &[u8], name: &str| {
            let (path, raw) = (directory.path().join("snapshot.qcow2"), directory.path().join("snapshot.raw"));
            std::fs::write(&path, image).unwrap();
            let (path, raw) = (path.to_str().unwrap(), raw.to_str().unwrap());
            run("qemu-img", &["convert", "-l", name, "-O", "raw", path, raw]);
            std::fs::read(raw).unwrap()
        };
        let (storage, guest) = open_bytes(&image, Base::default());
        assert!(block_on(guest.read_all()).unwrap() == expected, "{kind}");
        let mut model = Model(expected);
        exercise(&guest, &mut model, &mut Dice::new(seed), 80);
        block_on(guest.close()).unwrap();
        let after = storage.bytes(common::NAME);
        assert!(judged_by_qemu(directory.path(), &after) == model.0, "{kind}");
        for name in ["first", "second"] {
            assert!(snapshot(&after, name) == snapshot(&image, name), "{kind}: snapshot {name}");
        }
    }
}
