//! Small images that hold one of everything, and a map of where it lies.
//!
//! Some data clusters look like tables: a guest can write that, and a damaged entry may lead there.

use crate::common::{Base, Guest, NAME, blocking, created, open};
use block::block_on;
use ringdisk_format_qcow2::{BitmapAction, CreateOptions, NewSnapshot, create_snapshot, edit_bitmaps};
use testkit::{SimFileOptions, SimStorage, fill_seeded};

pub(crate) const MASK: u64 = 0x00ff_ffff_ffff_fe00;
pub(crate) const COPIED: u64 = 1 << 63;
pub(crate) const COMPRESSED: u64 = 1 << 62;
pub(crate) const ZERO: u64 = 1;

/// What an image is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) name: &'static str,
    cluster_size: u64,
    version: u32,
    refcount_bits: u32,
    extended_l2: bool,
    data_file: bool,
    snapshots: bool,
}

const PLAIN: Shape = Shape {
    name: "plain",
    cluster_size: 1024,
    version: 3,
    refcount_bits: 16,
    extended_l2: false,
    data_file: false,
    snapshots: true,
};

pub(crate) const SHAPES: [Shape; 6] = [
    PLAIN,
    Shape { name: "version 2", version: 2, ..PLAIN },
    Shape { name: "one bit", refcount_bits: 1, snapshots: false, ..PLAIN },
    Shape { name: "four bits", refcount_bits: 4, cluster_size: 4096, ..PLAIN },
    Shape { name: "extended", extended_l2: true, cluster_size: 16384, ..PLAIN },
    Shape { name: "data file", data_file: true, snapshots: false, ..PLAIN },
];

/// An image, and where its parts lie.
pub(crate) struct Image {
    pub(crate) shape: Shape,
    pub(crate) bytes: Vec<u8>,
    pub(crate) data: Option<Vec<u8>>,
    /// First byte and entries of each L1 table; the active one comes first.
    pub(crate) l1: Vec<(u64, u64)>,
    /// First byte of each L2 table.
    pub(crate) l2: Vec<u64>,
    /// First byte of each row of the snapshot table.
    pub(crate) rows: Vec<u64>,
    /// First byte of the bitmaps' extension, of the directory, of its one bitmap's table.
    pub(crate) bitmaps: Option<(u64, u64, u64)>,
    /// A host cluster of each kind, where an entry may lead.
    pub(crate) places: Vec<(&'static str, u64)>,
}

pub(crate) fn number(bytes: &[u8], at: u64, width: usize) -> u64 {
    let field = bytes.get(at as usize..at as usize + width).unwrap_or_default();
    field.iter().fold(0, |value, byte| value << 8 | u64::from(*byte))
}

pub(crate) fn word(bytes: &[u8], at: u64) -> u64 {
    number(bytes, at, 8)
}

impl Image {
    pub(crate) fn made(shape: Shape) -> Self {
        let (storage, l2_span) = written(shape);
        let bytes = storage.bytes(NAME);
        let data = shape.data_file.then(|| storage.bytes(crate::common::DATA));
        let mut image = Self {
            shape,
            bytes,
            data,
            l1: Vec::new(),
            l2: Vec::new(),
            rows: Vec::new(),
            bitmaps: None,
            places: Vec::new(),
        };
        image.find_tables();
        image.find_places(l2_span);
        image.disguise_data();
        image
    }

    pub(crate) fn cluster(&self) -> u64 {
        self.shape.cluster_size
    }

    /// Bytes of an L2 entry.
    pub(crate) fn entry_bytes(&self) -> u64 {
        if self.shape.extended_l2 { 16 } else { 8 }
    }

    /// Entries of an L2 table.
    pub(crate) fn l2_entries(&self) -> u64 {
        self.cluster() / self.entry_bytes()
    }

    fn find_tables(&mut self) {
        let bytes = &self.bytes;
        self.l1.push((word(bytes, 40), number(bytes, 36, 4)));
        let mut row = word(bytes, 64);
        for _ in 0..number(bytes, 60, 4) {
            self.rows.push(row);
            self.l1.push((word(bytes, row), number(bytes, row + 8, 4)));
            let names = number(bytes, row + 12, 2) + number(bytes, row + 14, 2);
            row = (row + 40 + number(bytes, row + 36, 4) + names).next_multiple_of(8);
        }
        for (l1, entries) in &self.l1 {
            let tables = (0..*entries).map(|index| word(bytes, l1 + index * 8) & MASK);
            self.l2.extend(tables.filter(|table| *table != 0));
        }
        self.l2.sort_unstable();
        self.l2.dedup();
        let mut at = if self.shape.version == 3 { number(bytes, 100, 4) } else { 72 };
        while number(bytes, at, 4) != 0 {
            if number(bytes, at, 4) == 0x2385_2875 {
                let directory = word(bytes, at + 8 + 16);
                self.bitmaps = Some((at + 8, directory, word(bytes, directory)));
            }
            at = (at + 8 + number(bytes, at + 4, 4)).next_multiple_of(8);
        }
    }

    /// The host clusters of plain data that one L2 table leads to.
    fn data_of(&self, l2: u64) -> Vec<u64> {
        let entries = (0..self.l2_entries()).map(|index| word(&self.bytes, l2 + index * self.entry_bytes()));
        let plain = entries.filter(|entry| entry & (COMPRESSED | ZERO) == 0 && entry & MASK != 0);
        plain.map(|entry| entry & MASK).collect()
    }

    fn find_places(&mut self, l2_span: u64) {
        let bytes = &self.bytes;
        let end = (bytes.len() as u64).next_multiple_of(self.cluster());
        let table = word(bytes, 48);
        let mut places = vec![
            ("the header", 0),
            ("the refcount table", table),
            ("a refcount block", word(bytes, table)),
            ("the end of the file", end),
            ("behind the end of the file", end + 3 * self.cluster()),
            ("far behind the file", 1 << 44),
            ("where no file reaches", MASK & !(self.cluster() - 1)),
        ];
        for (index, (l1, _)) in self.l1.iter().enumerate() {
            places.push((["the L1 table", "a snapshot's L1 table"][index.min(1)], *l1));
        }
        places.extend(self.rows.first().map(|row| ("the snapshot table", *row)));
        places.extend(self.l2.iter().map(|l2| ("an L2 table", *l2)));
        if let Some((_, directory, table)) = self.bitmaps {
            places.extend([("the bitmaps' directory", directory), ("a bitmap's table", table)]);
            places.push(("a bitmap's bits", word(bytes, table) & MASK));
        }
        if !self.shape.data_file {
            places.extend(self.l2.iter().flat_map(|l2| self.data_of(*l2)).map(|host| ("data", host)));
        }
        places.sort_by_key(|(_, place)| *place);
        places.dedup_by_key(|(_, place)| *place);
        assert!(l2_span > 0);
        self.places = places;
    }

    /// Fills data clusters with what a table might hold: entries of every kind that lead to every place.
    fn disguise_data(&mut self) {
        let data: Vec<u64> = self.places.iter().filter(|(kind, _)| *kind == "data").map(|(_, host)| *host).collect();
        let flags = [COPIED, 0, ZERO, COPIED | ZERO, 0x200 | ZERO, COPIED | 0x200 | ZERO, 0x200, COMPRESSED, 1 << 60];
        let flags = flags.iter().cycle();
        let entries: Vec<u64> =
            self.places.iter().cycle().zip(flags).take(4096).map(|((_, at), flag)| at | flag).collect();
        for (index, host) in data.into_iter().enumerate() {
            let cluster = &mut self.bytes[host as usize..][..self.shape.cluster_size as usize];
            match index % 5 {
                0 => cluster.fill(0x25),
                1 => cluster.fill(0x80),
                2 => {
                    for (at, word) in cluster.chunks_exact_mut(8).enumerate() {
                        word.copy_from_slice(&entries[(at * 7 + index) % entries.len()].to_be_bytes());
                    }
                }
                3 => cluster[8..].fill(0),
                _ => {}
            }
        }
    }
}

/// The image as the product makes it, and how much of the disk an L2 table maps.
fn written(shape: Shape) -> (SimStorage, u64) {
    let entry_bytes = if shape.extended_l2 { 16 } else { 8 };
    let l2_span = shape.cluster_size / entry_bytes * shape.cluster_size;
    let options = CreateOptions::default().with(|options| {
        options.size_bytes = 2 * l2_span + 20 * shape.cluster_size;
        options.cluster_size = shape.cluster_size;
        options.version = shape.version;
        options.refcount_bits = shape.refcount_bits;
        options.extended_l2 = shape.extended_l2;
        options.data_file = shape.data_file.then(|| crate::common::DATA.to_owned());
    });
    let (storage, _) = created(&options, SimFileOptions::default());
    let cluster = shape.cluster_size;
    let fill = |guest: &Guest, index: u64, count: u64| {
        let mut data = vec![0; (count * cluster) as usize];
        fill_seeded(index, &mut data);
        block_on(guest.write(index * cluster, &data)).unwrap();
    };
    let per_l2 = l2_span / cluster;
    let with_guest = |act: &dyn Fn(&Guest)| {
        let guest = open(&storage.file(NAME).unwrap(), Base::default());
        act(&guest);
        block_on(guest.close()).unwrap();
    };
    with_guest(&|guest| {
        fill(guest, 0, 5);
        fill(guest, per_l2, 3);
        fill(guest, 2 * per_l2, 2);
        block_on(async {
            guest.write_zeroes(4 * cluster, cluster, false).await.unwrap();
            guest.write_zeroes(6 * cluster, cluster, true).await.unwrap();
            if shape.extended_l2 {
                // Parts of clusters: some with data, some zero.
                guest.write(7 * cluster + 512, &[0x77; 1024]).await.unwrap();
                guest.write_zeroes(7 * cluster + 4096, 2048, true).await.unwrap();
            }
            if !shape.data_file {
                let mut data = [vec![0x33; cluster as usize], vec![0x44; cluster as usize]].concat();
                fill_seeded(3, &mut data[..cluster as usize / 3]);
                guest.write_compressed(8 * cluster, &data).await.unwrap();
            }
        });
    });
    if shape.snapshots {
        for (name, again) in [("one", 0), ("two", 1)] {
            let file = storage.file(NAME).unwrap();
            let new = NewSnapshot::new(name);
            block_on(create_snapshot(&blocking(&file), file.as_ref(), NAME, &new, &mut |_, _| true)).unwrap();
            with_guest(&|guest| {
                fill(guest, again, 2);
                if again == 0 {
                    fill(guest, per_l2 + 1, 1);
                }
            });
        }
    }
    if shape.version == 3 {
        let file = storage.file(NAME).unwrap();
        let add = ("bits".to_owned(), BitmapAction::Add { granularity_bytes: Some(512) });
        block_on(edit_bitmaps(&blocking(&file), file.as_ref(), NAME, &[add], &mut |_, _| true)).unwrap();
        with_guest(&|guest| fill(guest, 2, 1));
    }
    (storage, l2_span)
}

impl Shape {
    pub(crate) fn is_old(&self) -> bool {
        self.version == 2
    }

    pub(crate) fn is_extended(&self) -> bool {
        self.extended_l2
    }

    pub(crate) fn has_data_file(&self) -> bool {
        self.data_file
    }
}

impl Image {
    pub(crate) fn refcount_bits(&self) -> u64 {
        u64::from(self.shape.refcount_bits)
    }
}
