//! One target under libFuzzer: `RINGDISK_FUZZ_TARGET=write libfuzzer CORPUS`.
#![no_main]

use ringdisk_fuzz::Target;
use std::sync::OnceLock;

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    static TARGET: OnceLock<Target> = OnceLock::new();
    let target = TARGET.get_or_init(|| {
        let name = std::env::var("RINGDISK_FUZZ_TARGET").unwrap_or_default();
        Target::of_name(&name).expect("RINGDISK_FUZZ_TARGET must name a target")
    });
    target.run(input);
});
