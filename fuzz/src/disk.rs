//! One image on simulated storage, opened as a guest's disk.

use block::{Error, ErrorKind, File, Result};
use image::{FileName, Format, Image, ImageOptions, Opener, Role};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use testkit::{Harness, Reply, Request, SimFileOptions, SimHarness, SimStorage};

/// The byte of a guest's payload: a sector of it in a table comes from the guest.
pub(crate) const MARK: u8 = 0xa7;

const NAME: &str = "image";
/// No image makes a file longer than this.
const FILE_BYTES_MAX: u64 = 8 << 20;

struct OneFile(SimStorage);

impl Opener for OneFile {
    fn open(&self, name: &FileName, _role: Role) -> Result<Arc<dyn File>> {
        // Other files that an image names do not exist.
        let missing = || Error::new(ErrorKind::Io, format!("no file '{name}'"));
        Ok(self.0.file(&name.to_string()).ok_or_else(missing)?)
    }

    fn canonical(&self, path: &Path) -> Result<PathBuf> {
        Ok(path.to_owned())
    }
}

/// Makes a file of these bytes that grows with zeros, as on a file system. So the missing end of an image that was cut
/// off reads as zeros, before and after.
pub(crate) fn storage_of(bytes: &[u8]) -> SimStorage {
    storage(bytes, true)
}

fn storage(bytes: &[u8], grows_with_zeros: bool) -> SimStorage {
    let storage = SimStorage::new(1);
    let options = SimFileOptions { max_length_bytes: FILE_BYTES_MAX, grows_with_zeros, ..SimFileOptions::default() };
    storage.create_with(NAME, bytes, options);
    storage
}

/// Returns the only file of a storage.
pub(crate) fn file_of(storage: &SimStorage) -> Arc<dyn File> {
    match storage.file(NAME) {
        Some(file) => file,
        None => panic!("the storage has no image"),
    }
}

pub(crate) struct Disk {
    storage: SimStorage,
    image: Arc<Image>,
    harness: SimHarness,
    queue: u64,
    tags: u64,
}

impl Disk {
    /// Opens the image on storage where unwritten space holds anything.
    pub(crate) fn open(bytes: &[u8], read_only: bool) -> Result<Self> {
        Self::open_in(storage(bytes, false), read_only)
    }

    pub(crate) fn open_in(storage: SimStorage, read_only: bool) -> Result<Self> {
        let options = ImageOptions::new(NAME).with(|options| {
            options.format = Some(Format::Qcow2);
            options.read_only = read_only;
        });
        let image = Arc::new(image::open(&options, &OneFile(storage.clone()))?);
        let mut harness = SimHarness::new(1, 1);
        let disk = Arc::clone(&image) as Arc<dyn block::Disk>;
        let queue = harness.open(&disk, 0)?;
        Ok(Self { storage, image, harness, queue, tags: 0 })
    }

    pub(crate) fn size_bytes(&self) -> u64 {
        block::Disk::info(&*self.image).size_bytes
    }

    /// Submits all requests at once and waits for their replies.
    pub(crate) fn ask(&mut self, requests: Vec<Request>) -> Vec<Reply> {
        let tagged = requests.into_iter().map(|request| {
            self.tags += 1;
            (self.tags, request)
        });
        let tagged = tagged.collect::<Vec<_>>();
        let expected = tagged.len();
        self.harness.submit(self.queue, tagged);
        let mut replies = Vec::new();
        while replies.len() < expected {
            let turn = self.harness.turn();
            replies.extend(turn.replies.into_iter().map(|(_, reply)| reply));
            assert!(!turn.idle || replies.len() == expected, "{} of {expected} replies: stuck", replies.len());
        }
        let violations = self.harness.violations(self.queue);
        assert!(violations.is_empty(), "{violations:?}");
        replies
    }

    /// Closes queue and image. A damaged image may refuse that.
    pub(crate) fn close(&mut self) {
        self.harness.close(self.queue);
        self.harness.settle();
        drop(self.image.close());
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        self.storage.bytes(NAME)
    }
}
