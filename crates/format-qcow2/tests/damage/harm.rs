//! Damage: every field of an image that says where or how much, with other values.

use crate::images::{COMPRESSED, COPIED, Image, MASK, ZERO, number, word};

/// One field with another value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Harm {
    pub(crate) what: String,
    pub(crate) at: u64,
    pub(crate) bytes: Vec<u8>,
}

impl Harm {
    pub(crate) fn apply(&self, image: &mut Vec<u8>) {
        let (at, end) = (self.at as usize, self.at as usize + self.bytes.len());
        if image.len() < end {
            image.resize(end, 0);
        }
        image[at..end].copy_from_slice(&self.bytes);
    }
}

/// What a field holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Holds {
    Number,
    Place,
    Entry,
}

struct Field {
    name: String,
    at: u64,
    width: usize,
    holds: Holds,
}

/// The header's fields: name, offset, width.
const HEADER: [(&str, u64, usize); 22] = [
    ("magic", 0, 4),
    ("version", 4, 4),
    ("backing_file_offset", 8, 8),
    ("backing_file_size", 16, 4),
    ("cluster_bits", 20, 4),
    ("size", 24, 8),
    ("crypt_method", 32, 4),
    ("l1_size", 36, 4),
    ("l1_table_offset", 40, 8),
    ("refcount_table_offset", 48, 8),
    ("refcount_table_clusters", 56, 4),
    ("nb_snapshots", 60, 4),
    ("snapshots_offset", 64, 8),
    ("incompatible_features", 72, 8),
    ("compatible_features", 80, 8),
    ("autoclear_features", 88, 8),
    ("refcount_order", 96, 4),
    ("header_length", 100, 4),
    ("compression_type", 104, 1),
    ("padding", 105, 7),
    ("first extension's type", 112, 4),
    ("first extension's length", 116, 4),
];
const SNAPSHOT_ROW: [(&str, u64, usize); 11] = [
    ("l1_table_offset", 0, 8),
    ("l1_size", 8, 4),
    ("id_str_size", 12, 2),
    ("name_size", 14, 2),
    ("date", 16, 8),
    ("vm_clock", 24, 8),
    ("vm_state_size", 32, 4),
    ("extra_data_size", 36, 4),
    ("vm_state_size_large", 40, 8),
    ("disk_size", 48, 8),
    ("icount", 56, 8),
];
const BITMAP_EXTENSION: [(&str, u64, usize); 4] =
    [("nb_bitmaps", 0, 4), ("reserved", 4, 4), ("directory_size", 8, 8), ("directory_offset", 16, 8)];
const BITMAP_ROW: [(&str, u64, usize); 7] = [
    ("table_offset", 0, 8),
    ("table_size", 8, 4),
    ("flags", 12, 4),
    ("type", 16, 1),
    ("granularity_bits", 17, 1),
    ("name_size", 18, 2),
    ("extra_data_size", 20, 4),
];

fn record(what: &str, start: u64, fields: &[(&str, u64, usize)]) -> Vec<Field> {
    let field = |(name, at, width): &(&str, u64, usize)| Field {
        name: format!("{what}{name}"),
        at: start + at,
        width: *width,
        holds: if name.ends_with("offset") { Holds::Place } else { Holds::Number },
    };
    fields.iter().map(field).collect()
}

fn fields(image: &Image) -> Vec<Field> {
    let mut fields = record("header ", 0, if image.shape.is_old() { &HEADER[..13] } else { &HEADER });
    for (index, row) in image.rows.iter().enumerate() {
        fields.extend(record(&format!("snapshot {index} "), *row, &SNAPSHOT_ROW));
    }
    if let Some((extension, directory, table)) = image.bitmaps {
        fields.extend(record("bitmaps ", extension, &BITMAP_EXTENSION));
        fields.extend(record("bitmap ", directory, &BITMAP_ROW));
        fields.extend([table, table + 8].map(|at| Field {
            name: format!("bitmap table entry at {at:#x}"),
            at,
            width: 8,
            holds: Holds::Entry,
        }));
    }
    let mut entry = |name: String, at: u64| fields.push(Field { name, at, width: 8, holds: Holds::Entry });
    for (which, (l1, entries)) in image.l1.iter().enumerate() {
        (0..*entries).for_each(|index| entry(format!("L1 {which} entry {index}"), l1 + index * 8));
    }
    let table = word(&image.bytes, 48);
    (0..3).for_each(|index| entry(format!("refcount table entry {index}"), table + index * 8));
    for l2 in &image.l2 {
        let used = |index: &u64| word(&image.bytes, l2 + index * image.entry_bytes()) != 0;
        let unused = (0..image.l2_entries()).find(|index| !used(index));
        for index in (0..image.l2_entries()).filter(used).chain(unused) {
            entry(format!("L2 at {l2:#x} entry {index}"), l2 + index * image.entry_bytes());
        }
    }
    if image.shape.is_extended() {
        for (l2, index) in image.l2.iter().flat_map(|l2| (0..10).map(move |index| (l2, index))) {
            let (name, at) = (format!("L2 at {l2:#x} bitmap {index}"), l2 + index * 16 + 8);
            fields.push(Field { name, at, width: 8, holds: Holds::Number });
        }
    }
    let block = word(&image.bytes, table) & MASK;
    let counted = image.bytes.len() as u64 / image.cluster();
    let bytes = (counted * image.refcount_bits()).div_ceil(8);
    let width = (image.refcount_bits() as usize / 8).max(1);
    for at in (block..block + bytes).step_by(width) {
        fields.push(Field { name: format!("refcount at {at:#x}"), at, width, holds: Holds::Number });
    }
    fields
}

impl Field {
    /// Other values that it might have.
    fn values(&self, image: &Image) -> Vec<(String, u64)> {
        let old = number(&image.bytes, self.at, self.width);
        let mut values: Vec<(String, u64)> = [0, 1, 2, 3, old.wrapping_add(1), old.wrapping_sub(1), old << 1, u64::MAX]
            .map(|value| (format!("{value:#x}"), value))
            .into();
        values.extend((0..self.width * 8).map(|bit| (format!("with bit {bit} turned"), old ^ 1 << bit)));
        let flags: &[u64] = match self.holds {
            Holds::Number => &[],
            Holds::Place => &[0],
            Holds::Entry => &[
                0,
                COPIED,
                ZERO,
                COPIED | ZERO,
                0x200,
                COPIED | 0x200,
                0x200 | ZERO,
                COMPRESSED,
                COMPRESSED | 0x155,
                COMPRESSED | COPIED,
                COMPRESSED | 0x3f << 56,
            ],
        };
        for (kind, place) in &image.places {
            values.extend(flags.iter().map(|flags| (format!("{kind} at {place:#x}, flags {flags:#x}"), place | flags)));
        }
        let mask = if self.width == 8 { u64::MAX } else { (1 << (self.width * 8)) - 1 };
        let mut values: Vec<_> = values.into_iter().map(|(what, value)| (what, value & mask)).collect();
        values.retain(|(_, value)| *value != old);
        values.sort_by_key(|(_, value)| *value);
        values.dedup_by_key(|(_, value)| *value);
        values
    }
}

/// Every field with every other value that is worth a look.
pub(crate) fn all(image: &Image) -> Vec<Harm> {
    let mut harms = Vec::new();
    for field in fields(image) {
        for (value, number) in field.values(image) {
            harms.push(Harm {
                what: format!("{} is {value}", field.name),
                at: field.at,
                bytes: number.to_be_bytes()[8 - field.width..].to_vec(),
            });
        }
    }
    harms
}
