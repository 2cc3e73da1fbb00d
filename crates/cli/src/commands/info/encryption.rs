//! What `info` shows about an image's encryption, as qemu-img does.

use crate::output::printable;
use format_qcow2::{Encryption, Luks, LuksSlot};
use image::Description;
use serde_json::{Value, json};
use std::fmt::Write as _;

pub(super) fn is_encrypted(description: &Description) -> bool {
    description.qcow2.as_ref().is_some_and(|header| header.encryption.is_some())
}

/// Returns the lines for the part that is specific to the format.
pub(super) fn human(description: &Description) -> String {
    let Some(method) = description.qcow2.as_ref().and_then(|header| header.encryption) else { return String::new() };
    let mut text = "    encrypt:\n".to_owned();
    let mut line = |depth: usize, line: String| {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{:width$}{line}", "", width = 4 * depth);
    };
    match (method, &description.luks) {
        (Encryption::Luks { .. }, Some(luks)) => human_luks(luks, &mut line),
        (Encryption::Luks { .. }, None) => line(2, "format: luks".to_owned()),
        (Encryption::Aes, _) => line(2, "format: aes".to_owned()),
    }
    text
}

fn human_luks(luks: &Luks, line: &mut dyn FnMut(usize, String)) {
    line(2, format!("ivgen alg: {}", printable(&luks.ivgen)));
    line(2, "detached header: false".to_owned());
    line(2, format!("hash alg: {}", printable(&luks.hash)));
    line(2, format!("cipher alg: {}", printable(&luks.cipher_and_bits())));
    line(2, format!("uuid: {}", printable(&luks.uuid)));
    if let Some(hash) = &luks.ivgen_hash {
        line(2, format!("ivgen hash alg: {}", printable(hash)));
    }
    line(2, "format: luks".to_owned());
    line(2, format!("cipher mode: {}", printable(&luks.mode)));
    line(2, "slots:".to_owned());
    for (index, LuksSlot { active, key_offset }) in luks.slots.iter().enumerate() {
        line(3, format!("[{index}]:"));
        line(4, format!("active: {}", active.is_some()));
        if let Some((iterations, _)) = active {
            line(4, format!("iters: {iterations}"));
        }
        line(4, format!("key offset: {key_offset}"));
        if let Some((_, stripes)) = active {
            line(4, format!("stripes: {stripes}"));
        }
    }
    line(2, format!("payload offset: {}", luks.payload_offset));
    line(2, format!("master key iters: {}", luks.iterations));
}

/// Returns the JSON value under `encrypt`.
pub(super) fn machine(description: &Description) -> Option<Value> {
    let method = description.qcow2.as_ref().and_then(|header| header.encryption)?;
    Some(match (method, &description.luks) {
        (Encryption::Luks { .. }, Some(luks)) => machine_luks(luks),
        (Encryption::Luks { .. }, None) => json!({ "format": "luks" }),
        (Encryption::Aes, _) => json!({ "format": "aes" }),
    })
}

fn machine_luks(luks: &Luks) -> Value {
    let slot = |LuksSlot { active, key_offset }: &LuksSlot| match active {
        Some((iterations, stripes)) => {
            json!({ "active": true, "iters": iterations, "key-offset": key_offset, "stripes": stripes })
        }
        None => json!({ "active": false, "key-offset": key_offset }),
    };
    let mut value = json!({
        "ivgen-alg": luks.ivgen,
        "detached-header": false,
        "hash-alg": luks.hash,
        "cipher-alg": luks.cipher_and_bits(),
        "uuid": luks.uuid,
        "format": "luks",
        "cipher-mode": luks.mode,
        "slots": luks.slots.iter().map(slot).collect::<Vec<_>>(),
        "payload-offset": luks.payload_offset,
        "master-key-iters": luks.iterations,
    });
    if let Some(hash) = &luks.ivgen_hash {
        value["ivgen-hash-alg"] = json!(hash);
    }
    value
}
