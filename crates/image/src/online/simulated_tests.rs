//! Images in simulated storage, for tests.

use crate::chain::image::Image;
use crate::{CreateOptions, FileName, Format, ImageOptions, Opener, Role};
use block::{File, Result};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use testkit::{SimFileOptions, SimStorage};

/// The cluster size of [`image`].
pub(super) const CLUSTER_BYTES: u64 = 4096;

struct SimOpener(SimStorage);

impl Opener for SimOpener {
    fn open(&self, name: &FileName, _role: Role) -> Result<Arc<dyn File>> {
        Ok(self.0.file(&name.to_string()).unwrap())
    }

    fn canonical(&self, path: &Path) -> Result<PathBuf> {
        Ok(path.to_owned())
    }
}

/// Makes a new qcow2 image.
pub(super) fn image(storage: &SimStorage, name: &str, size_bytes: u64) -> Image {
    let file: Arc<dyn File> = storage.create(name, 0, SimFileOptions::default());
    let create = format_qcow2::CreateOptions::default().with(|options| {
        options.size_bytes = size_bytes;
        options.cluster_size = CLUSTER_BYTES;
    });
    crate::create(&file, &CreateOptions::Qcow2(create)).unwrap();
    let options = ImageOptions::new(name).with(|options| options.format = Some(Format::Qcow2));
    crate::open(&options, &SimOpener(storage.clone())).unwrap()
}
