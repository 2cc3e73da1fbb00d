//! Kept scratch overlays: a damaged index over data and an image whose pages are all known.
//!
//! The checks, whatever the index says: a guest reads a page of the image, a page of the data, zeros, or its own
//! writes; or the read fails. The image below is never written, and nothing is written if the overlay was opened for
//! reading.

use crate::disk::MARK;
use arbitrary::{Result, Unstructured};
use block::{Disk as _, Error, ErrorKind, File, OpFlags};
use image::{BackingPolicy, FileName, Format, Image, ImageOptions, Opener, Role};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use testkit::{Harness, Reply, Request, SimFileOptions, SimHarness, SimStorage};

const BASE: &str = "base";
const INDEX: &str = "disk.scratch";
const DATA: &str = "disk.scratch.data";
const PAGE: usize = 4096;
/// Two parts of the disk: one with a table, and a piece of one that is wholly zero.
const SIZE: u64 = (4 << 20) + (64 << 10);
/// No index makes a file longer than this.
const FILE_BYTES_MAX: u64 = 8 << 20;
/// Pages of the index: the header, zero parts, owners, and a table.
const PAGES: usize = 4;
/// The data of the overlay, and some beyond.
const DATA_BYTES: usize = 16 * PAGE;
const CHANGES_MAX: usize = 8;
const REQUESTS_MAX: usize = 12;

struct Files(SimStorage);

impl Opener for Files {
    fn open(&self, name: &FileName, role: Role) -> block::Result<Arc<dyn File>> {
        let name = name.to_string();
        assert!(name != BASE || role != Role::Writable, "the image below is opened for writing");
        let missing = || Error::new(ErrorKind::Io, format!("no file '{name}'"));
        Ok(self.0.file(&name).ok_or_else(missing)?)
    }

    fn make(&self, path: &Path) -> block::Result<Option<Arc<dyn File>>> {
        let name = path.to_string_lossy();
        if self.0.file(&name).is_some() {
            return Ok(None);
        }
        Ok(Some(self.0.create(&name, 0, SimFileOptions::default())))
    }

    fn canonical(&self, path: &Path) -> block::Result<PathBuf> {
        Ok(path.to_owned())
    }
}

/// Makes a page whose bytes name their place: `kind` in the first half, the number everywhere.
fn known(kind: u8, number: usize) -> Vec<u8> {
    let mut page = vec![kind; PAGE];
    for word in page.chunks_exact_mut(8) {
        word[..2].copy_from_slice(&(number as u16).to_le_bytes());
    }
    page
}

const OF_BASE: u8 = 0xb5;
const OF_DATA: u8 = 0xd4;

struct Golden {
    base: Vec<u8>,
    index: Vec<u8>,
    data: Vec<u8>,
}

struct Disk {
    image: Arc<Image>,
    harness: SimHarness,
    queue: u64,
    tags: u64,
}

impl Disk {
    fn open(storage: &SimStorage, options: &ImageOptions) -> block::Result<Self> {
        let image = Arc::new(image::open(options, &Files(storage.clone()))?);
        let mut harness = SimHarness::new(1, 1);
        let disk = Arc::clone(&image) as Arc<dyn block::Disk>;
        let queue = harness.open(&disk, 0)?;
        Ok(Self { image, harness, queue, tags: 0 })
    }

    fn ask(&mut self, request: Request) -> Reply {
        self.tags += 1;
        self.harness.submit(self.queue, vec![(self.tags, request)]);
        loop {
            let turn = self.harness.turn();
            if let Some((_, reply)) = turn.replies.into_iter().next() {
                let violations = self.harness.violations(self.queue);
                assert!(violations.is_empty(), "{violations:?}");
                return reply;
            }
            assert!(!turn.idle, "stuck");
        }
    }

    /// Closes queue and overlay. A damaged overlay may refuse that.
    fn close(mut self) {
        self.harness.close(self.queue);
        self.harness.settle();
        drop(self.image.close());
    }
}

fn storage_of(base: &[u8], files: Option<(&[u8], &[u8])>) -> SimStorage {
    let storage = SimStorage::new(1);
    let options = || SimFileOptions { max_length_bytes: FILE_BYTES_MAX, ..SimFileOptions::default() };
    storage.create_with(BASE, base, options());
    if let Some((index, data)) = files {
        storage.create_with(INDEX, index, options());
        storage.create_with(DATA, data, options());
    }
    storage
}

fn made() -> block::Result<Golden> {
    let base: Vec<u8> = (0..SIZE as usize / PAGE).flat_map(|page| known(OF_BASE, page)).collect();
    let storage = storage_of(&base, None);
    let options = ImageOptions::new(BASE).with(|options| {
        options.format = Some(Format::Raw);
        options.scratch = true;
        options.keep = Some(INDEX.into());
    });
    let mut disk = Disk::open(&storage, &options)?;
    let mut do_it = |request: Request| {
        let failed = |error| Error::with_source(ErrorKind::Io, "the overlay cannot be filled", error);
        disk.ask(request).result.map_err(failed)
    };
    let part = 4 << 20;
    for (page, offset) in [0, 1, 2, 7, 8, 1023].map(|page| page * PAGE as u64).into_iter().enumerate() {
        do_it(Request::write(offset, known(OF_DATA, page)))?;
    }
    let zeroes = |offset, length| Request::WriteZeroes { offset, length, may_unmap: true, flags: OpFlags::NONE };
    do_it(zeroes(3 * PAGE as u64, 2 * PAGE as u64))?;
    do_it(zeroes(part, SIZE - part))?;
    disk.close();
    let (index, mut data) = (storage.bytes(INDEX), storage.bytes(DATA));
    data.truncate(DATA_BYTES);
    assert!(index.len() >= PAGES * PAGE && storage.bytes(BASE) == base);
    Ok(Golden { base, index, data })
}

fn golden() -> &'static Golden {
    static GOLDEN: OnceLock<Golden> = OnceLock::new();
    GOLDEN.get_or_init(|| match made() {
        Ok(golden) => golden,
        Err(error) => panic!("no golden overlay: {error}"),
    })
}

fn word(golden: &Golden, u: &mut Unstructured<'_>) -> Result<u32> {
    let data_pages = (golden.data.len() / PAGE) as u32;
    Ok(match u.int_in_range(0..=5)? {
        0 => *u.choose(&[0, 1, 2, 3, u32::MAX, u32::MAX - 1, 1 << 31])?,
        1 => u.int_in_range(2..=data_pages.saturating_add(3))?,
        2 => u.int_in_range(0..=8)?,
        3 => data_pages.saturating_add(u.int_in_range(0..=4096)?),
        4 => u.int_in_range(1020..=1030)?,
        _ => u.arbitrary()?,
    })
}

fn damaged(golden: &Golden, u: &mut Unstructured<'_>) -> Result<Vec<u8>> {
    let mut index = golden.index.clone();
    for _ in 0..u.int_in_range(0..=CHANGES_MAX)? {
        let page = u.int_in_range(0..=PAGES)?.min(PAGES - 1);
        let inside = match page {
            // Fields of the header, or its names.
            0 if u.ratio(3u8, 4u8)? => u.int_in_range(0..=10)?,
            0 => u.int_in_range(128..=140)?,
            _ if u.ratio(3u8, 4u8)? => u.int_in_range(0..=16)?,
            _ => u.int_in_range(0..=1023)?,
        };
        let at = page * PAGE + inside * 4;
        let new = match u.int_in_range(0..=3)? {
            0 => {
                let old = index.get(at..at + 4).and_then(|bytes| bytes.first_chunk()).copied().unwrap_or_default();
                u32::from_le_bytes(old) ^ 1 << u.int_in_range(0..=31)?
            }
            _ => word(golden, u)?,
        };
        index.iter_mut().skip(at).zip(new.to_le_bytes()).for_each(|(byte, new)| *byte = new);
    }
    if u.ratio(1u8, 16u8)? {
        let length = u.int_in_range(0..=index.len())?;
        index.truncate(length);
    }
    Ok(index)
}

/// Checks the result of reading whole pages. Pages written before must have the written data.
fn check(golden: &Golden, first: u64, bytes: &[u8], written: &[u64]) {
    for (page, bytes) in (first..).zip(bytes.chunks_exact(PAGE)) {
        let is_mark = bytes.iter().all(|byte| *byte == MARK);
        if written.contains(&page) {
            assert!(is_mark, "page {page} was written, and shows something else");
            continue;
        }
        let own = golden.base.chunks_exact(PAGE).nth(page as usize);
        let is_known = own == Some(bytes)
            || bytes.iter().all(|byte| *byte == 0)
            || golden.data.chunks_exact(PAGE).any(|data| data == bytes);
        assert!(is_known, "page {page} shows what is none of its own: {:02x?}", bytes.get(..16));
    }
}

pub(crate) fn scratch(u: &mut Unstructured<'_>) -> Result<()> {
    let golden = golden();
    let index = damaged(golden, u)?;
    let data_pages = golden.data.len() / PAGE;
    let data_bytes = if u.ratio(1u8, 8u8)? { u.int_in_range(0..=data_pages)? * PAGE } else { golden.data.len() };
    let data = golden.data.get(..data_bytes).unwrap_or_default();
    for read_only in [true, false] {
        let storage = storage_of(&golden.base, Some((&index, data)));
        let options = ImageOptions::new(INDEX).with(|options| {
            options.format = Some(Format::Scratch);
            options.allow_backing = BackingPolicy::Any;
            options.read_only = read_only;
        });
        match Disk::open(&storage, &options) {
            Err(error) => {
                let said = error.to_string();
                assert!(said.contains('\'') && said.len() > 20, "an error that says nothing: {said}");
            }
            Ok(disk) => use_it(disk, golden, read_only, u)?,
        }
        assert!(storage.bytes(BASE) == golden.base, "the image below was written");
        if read_only {
            assert!(storage.bytes(INDEX) == index && storage.bytes(DATA) == data, "reading has changed a file");
        }
    }
    Ok(())
}

fn use_it(mut disk: Disk, golden: &Golden, read_only: bool, u: &mut Unstructured<'_>) -> Result<()> {
    let pages = disk.image.info().size_bytes / PAGE as u64;
    let mut written = Vec::new();
    for _ in 0..u.int_in_range(1..=REQUESTS_MAX)? {
        // Near the pages of the golden overlay: the first pages of each part, and the last ones of the first.
        let part = *u.choose(&[0, 0, 0, 1016, 1024])?;
        let first = (part + u.int_in_range(0..=12u64)?).min(pages.saturating_sub(1));
        let count = u.int_in_range(1..=6u64)?.min(pages.saturating_sub(first));
        let (offset, length) = (first * PAGE as u64, count as usize * PAGE);
        match u.int_in_range(0..=3)? {
            0 if !read_only => {
                let ended = disk.ask(Request::write(offset, vec![MARK; length]));
                written.retain(|page| !(first..first + count).contains(page));
                match ended.result {
                    Ok(()) => written.extend(first..first + count),
                    // Half of it may be written.
                    Err(_) => break,
                }
            }
            1 if !read_only => drop(disk.ask(Request::Flush)),
            _ => {
                let reply = disk.ask(Request::read(offset, length));
                if reply.result.is_ok() {
                    check(golden, first, &reply.data, &written);
                }
            }
        }
    }
    disk.close();
    Ok(())
}
