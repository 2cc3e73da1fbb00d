//! Before an edit: a look at all references.
//!
//! An edit puts new tables into space that the refcounts call free, and gives back to the host what they call unused. So
//! an image whose refcounts deny data that are there is refused: it would lose them.

use super::Edit;
use crate::check::walk::Walk;
use block::{Error, ErrorKind, Result};

impl Edit<'_, '_> {
    /// Fails where something has fewer counts than references. Writes nothing.
    pub(super) async fn look_first(&self) -> Result<()> {
        let name = self.name;
        let failed = |error| Error::with_source(ErrorKind::Io, format!("'{name}': cannot read the tables"), error);
        let mut silent = |_| true;
        let mut walk = Walk::begin(self.io, &self.header, self.file_bytes, &mut silent).await.map_err(failed)?;
        walk.bitmaps = crate::layout::bitmap::space(self.io, &self.header, &self.first_cluster, name).await?;
        walk.count_all().await.map_err(failed)?;
        walk.compare().await;
        let denied = walk.mismatches.iter().find(|mismatch| mismatch.refcount < mismatch.references);
        let denied = denied.map(|mismatch| mismatch.cluster).or_else(|| walk.overcounted.first().copied());
        match denied {
            None => Ok(()),
            Some(cluster) => {
                let offset = self.geometry.start_of(cluster);
                let what = format!(
                    "its refcounts deny what lies at {offset:#x}, and an edit would overwrite it. Nothing was changed; \
                     repair the image first (check -r all)"
                );
                self.refuse(ErrorKind::BadImage, what)
            }
        }
    }
}
