//! What finding a place costs in one layer and in sixteen.
//!
//! `cargo bench -p ringdisk-image --bench chain_lookup` prints nanoseconds a lookup, as the median of interleaved rounds.
//! On a machine with other work count instructions instead: run the program under
//! `valgrind --tool=callgrind --toggle-collect='*look_up_all*'`, with the name of one case as its argument, and divide by
//! the lookups that it prints.

use block::{Error, ErrorKind, File, MetaIo, Result, block_on};
use format_qcow2::{CreateOptions, OpenOptions, Prepared, Qcow2};
use ringdisk_image::{FileName, Format, Image, ImageOptions, Opener, Role};
use std::hint::black_box;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;
use testkit::{Dice, SimFileOptions, SimStorage};

const CLUSTER: u64 = 4096;
const CLUSTERS: u64 = 4096;
const LAYERS: u64 = 16;
const LOOKUPS: usize = 1 << 16;
const ROUNDS: usize = 11;

/// A name, how many layers there are, and which of them has a cluster.
type Case = (&'static str, u64, fn(u64) -> u64);

struct Files(SimStorage);

impl Opener for Files {
    fn open(&self, name: &FileName, _role: Role) -> Result<Arc<dyn File>> {
        let name = name.to_string();
        Ok(self.0.file(&name).ok_or_else(|| Error::new(ErrorKind::Io, format!("no file '{name}'")))?)
    }

    fn canonical(&self, path: &Path) -> Result<PathBuf> {
        Ok(path.to_owned())
    }
}

/// A chain of `layers` in which `holds` says which layer (0 is the top) has a cluster.
fn chain(layers: u64, holds: impl Fn(u64) -> u64) -> Image {
    let storage = SimStorage::new(1);
    for layer in (0..layers).rev() {
        let file = storage.create(&format!("layer{layer}"), 0, SimFileOptions::default());
        let below = (layer + 1 < layers).then(|| format!("layer{}", layer + 1));
        let options = CreateOptions::default().with(|options| {
            options.size_bytes = CLUSTERS * CLUSTER;
            options.cluster_size = CLUSTER;
            options.backing_format = below.as_ref().map(|_| "qcow2".to_owned());
            options.backing_file = below;
        });
        let io = MetaIo::new(file.open_blocking().expect("a queue"));
        block_on(async {
            format_qcow2::create(&io, &options).await.expect("an image");
            let open = OpenOptions::new("layer", false);
            let qcow2 = Qcow2::open(&io, file.info(), open).await.expect("the image");
            for cluster in (0..CLUSTERS).filter(|cluster| holds(*cluster) == layer) {
                let prepared = qcow2.prepare_write(&io, cluster * CLUSTER, CLUSTER).await.expect("space");
                let Prepared::New(allocation) = prepared else { panic!("a cluster is there already") };
                qcow2.commit_write(&io, allocation).await.expect("a mapping");
            }
            qcow2.close(&io).await.expect("the end");
        });
    }
    let options = ImageOptions::new("layer0").with(|options| {
        options.format = Some(Format::Qcow2);
        options.read_only = true;
    });
    ringdisk_image::open(&options, &Files(storage)).expect("the chain")
}

#[inline(never)]
fn look_up_all(image: &Image, places: &[u64]) -> u64 {
    let look_up = image.lookups_for_bench();
    places.iter().map(|offset| look_up(*offset, CLUSTER).unwrap_or(0)).fold(0, u64::wrapping_add)
}

fn main() {
    let wanted = std::env::args().skip(1).find(|argument| !argument.starts_with('-'));
    let all: [Case; 3] = [
        ("one layer", 1, |_| 0),
        ("sixteen, spread", LAYERS, |cluster| cluster % LAYERS),
        ("sixteen, in the base", LAYERS, |_| LAYERS - 1),
    ];
    let cases: Vec<_> =
        all.into_iter().filter(|(name, ..)| wanted.as_deref().is_none_or(|wanted| wanted == *name)).collect();
    let mut dice = Dice::new(1);
    let places: Vec<u64> = (0..LOOKUPS).map(|_| dice.below(CLUSTERS) * CLUSTER).collect();
    let images: Vec<Image> = cases.iter().map(|(_, layers, holds)| chain(*layers, holds)).collect();
    for image in &images {
        image.warm_up_for_bench().expect("tables");
    }
    let mut rounds = vec![Vec::new(); cases.len()];
    for _ in 0..ROUNDS {
        for (image, times) in images.iter().zip(&mut rounds) {
            let start = Instant::now();
            black_box(look_up_all(image, &places));
            times.push(start.elapsed().as_secs_f64() * 1e9 / LOOKUPS as f64);
        }
    }
    for ((name, ..), times) in cases.iter().zip(&mut rounds) {
        times.sort_by(f64::total_cmp);
        println!("{name:<22} {:>7.1} ns a lookup, {} lookups", times[ROUNDS / 2], LOOKUPS * ROUNDS);
    }
}
