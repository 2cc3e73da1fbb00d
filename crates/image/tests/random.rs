//! Random requests over chains against the model disk, live and after reopening.

mod common;

use common::{Chain, Layer, made_by_qemu, name};
use memory::{BufferAccount, BufferBudget};
use testkit::{ModelDisk, Session, SimFileOptions, Workload, mix, qcow2_check};

/// Room for a request or two.
fn small_budget() -> BufferAccount {
    BufferBudget::new(64 << 10).account()
}

/// A chain of one to four layers with anything that the formats allow.
fn random_chain(seed: u64) -> Chain {
    let pick = |salt: u64, limit: u64| mix(seed, salt) % limit;
    let count = 1 + pick(0, 4);
    let mut layers = Vec::new();
    for index in 0..count {
        let salt = 10 * (index + 1);
        let size_bytes = (1 << 18) + 512 * pick(salt, 300) - (1 << 17) * pick(salt + 1, 2);
        let last = index + 1 == count && count > 1;
        layers.push(match pick(salt + 2, 4) {
            0 if last => Layer::Raw(size_bytes),
            3 if pick(salt + 5, 2) == 0 => Layer::Extended { size_bytes, cluster_size: 16384 << pick(salt + 3, 3) },
            2 if pick(salt + 5, 3) == 0 => {
                let (raw, extended) = (last && pick(salt + 6, 2) > 0, pick(salt + 7, 2) > 0);
                Layer::External { size_bytes, cluster_size: 16384 << pick(salt + 3, 3), raw, extended }
            }
            1 => Layer::Qcow2 { size_bytes, cluster_size: 512 << pick(salt + 3, 9), version: 2, refcount_bits: 16 },
            _ => Layer::Qcow2 {
                size_bytes,
                cluster_size: 512 << pick(salt + 3, 9),
                version: 3,
                refcount_bits: 1 << pick(salt + 4, 7),
            },
        });
    }
    let file = SimFileOptions {
        can_discard: pick(1, 4) > 0,
        discard_zeroes: pick(2, 4) > 0,
        fast_zeroes: pick(3, 2) > 0,
        grows_with_zeros: pick(4, 4) == 0,
        // Copies wait for each other.
        buffers: if pick(8, 2) == 0 { small_budget() } else { BufferAccount::default() },
        ..SimFileOptions::default()
    };
    let table_cache_bytes = (pick(6, 3) == 0).then_some(0);
    Chain { file, used: pick(5, 2) > 0, table_cache_bytes, seed, ..Chain::of(layers) }
}

fn play(chain: &Chain) -> Result<(), String> {
    let seed = chain.seed;
    let original = chain.storage();
    let storage = chain.storage();
    let open = |storage: &_| chain.open(storage);
    let contents = Session::open(&storage, &open, seed, 1)?.read_all()?;
    let mut model = ModelDisk::new(&contents, true);
    for round in 0..3 {
        let queues = 1 + (mix(seed, round) % 3) as usize;
        let mut session = Session::open(&storage, &open, mix(seed, round), queues)?;
        let workload = Workload {
            first_tag: 1 + (round << 32),
            depth: 1 + (mix(seed, 7) % 12) as usize,
            ..Workload::new(mix(seed, round), 150, chain.top().size_bytes(), chain.top().granule_bytes())
        };
        let ids = session.queues.clone();
        workload.run(&mut session.harness, &ids, &mut model, &|| 0)?;
        model.check_live(&session.read_all()?)?;
        session.close()?;
        chain.check(&storage, &original)?;
        let report = qcow2_check(&storage.bytes(&name(0)))?;
        if report.leaked_clusters > 0 {
            return Err(format!("{} clusters leak after closing in good order", report.leaked_clusters));
        }
        model
            .check_live(&Session::open(&storage, &open, seed, 1)?.read_all()?)
            .map_err(|wrong| format!("reopened: {wrong}"))?;
    }
    Ok(())
}

#[test]
fn random_requests_over_random_chains_read_as_the_model_says() {
    for seed in common::seeds(120) {
        let chain = random_chain(seed);
        play(&chain).unwrap_or_else(|wrong| panic!("RINGDISK_SEED={seed}: {wrong}\n{chain:?}"));
    }
}

#[test]
fn snapshots_and_compressed_clusters_of_qemu_survive_random_requests() {
    for chain in made_by_qemu() {
        for seed in common::seeds(5) {
            let file = SimFileOptions { buffers: small_budget(), ..SimFileOptions::default() };
            let chain = Chain { seed, file, ..chain.clone() };
            play(&chain).unwrap_or_else(|wrong| panic!("RINGDISK_SEED={seed}: {wrong}\n{:?}", chain.layers));
        }
    }
}
