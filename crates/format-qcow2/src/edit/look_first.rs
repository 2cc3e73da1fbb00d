//! Before an edit: a look at all references.
//!
//! An edit puts new tables into space that the refcounts call free, and frees clusters that they call unused. If
//! refcounts are too low, the edit would destroy data. So such an image is refused.

use super::{Edit, EditWatch};
use crate::check::report::CheckEvent;
use crate::check::walk::Walk;
use block::{Error, ErrorKind, File, MetaIo, Result};

/// Refuses an image whose refcounts are too low, before a caller writes to it in other ways than by an edit. A dirty
/// image is repaired first.
pub async fn look_before_writing(io: &MetaIo, file: &dyn File, name: &str, watch: &mut EditWatch<'_>) -> Result<()> {
    Edit::open(io, file, name, watch).await.map(drop)
}

impl Edit<'_, '_> {
    /// Fails if anything has fewer counts than references. Writes nothing.
    pub(super) async fn look_first(&mut self) -> Result<()> {
        let (name, tell) = (self.name, &mut *self.watch);
        let failed = |error| Error::with_source(ErrorKind::Io, format!("'{name}': cannot read the tables"), error);
        // The user may give up; the edit itself has not begun.
        let mut watch = |event| match event {
            CheckEvent::Progress(_, total) => tell(0, total),
            CheckEvent::Finding(_) => true,
        };
        let mut walk = Walk::begin(self.io, &self.header, self.file_bytes, &mut watch).await.map_err(failed)?;
        walk.bitmaps = crate::layout::bitmap::space(self.io, &self.header, &self.first_cluster, name).await?;
        walk.count_all().await.map_err(failed)?;
        walk.compare().await;
        walk.go_on().map_err(|error| error.in_context(format!("'{name}'")))?;
        let denied = walk.mismatches.iter().find(|mismatch| mismatch.refcount < mismatch.references);
        let denied = denied.map(|mismatch| mismatch.cluster).or_else(|| walk.overcounted.first().copied());
        self.has_compressed = walk.has_compressed;
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
