//! Persistent bitmaps that are copied along with an image.

use super::name::opened_name;
use super::open::files;
use crate::output;
use anyhow::bail;
use block::Disk;
use format_qcow2::{Bitmap, BitmapAction};
use image::{Format, Image, Opener, Role};
use std::path::Path;

/// Refuses a copy with bitmaps that cannot work, before it begins. With `skip_broken`, inconsistent bitmaps are left
/// out instead.
pub(crate) fn refuse_without_bitmaps(source: &Image, target: Option<Format>, skip_broken: bool) -> anyhow::Result<()> {
    if source.qcow2_header().is_none_or(|header| header.version < 3) {
        bail!("Source lacks bitmap support");
    }
    if let Some(format) = target.filter(|format| !format.has_bitmaps()) {
        bail!("Format driver '{format}' does not support bitmaps");
    }
    match source.bitmaps()?.iter().find(|bitmap| bitmap.in_use && !skip_broken) {
        Some(bitmap) => bail!(
            "Cannot copy inconsistent bitmap '{}'\nTry --skip-broken-bitmaps, or use 'bitmap --remove' to delete it",
            bitmap.name
        ),
        None => Ok(()),
    }
}

/// Returns the bitmaps to copy, and the inconsistent ones.
fn believed(source: &Image) -> anyhow::Result<(Vec<Bitmap>, Vec<Bitmap>)> {
    Ok(source.bitmaps()?.into_iter().partition(|bitmap| !bitmap.in_use))
}

/// Refuses an existing target that could not take the bitmaps, before anything is written to it.
pub(crate) fn refuse_misfits(source: &Image, target: &Image) -> anyhow::Result<()> {
    let (bitmaps, _) = believed(source)?;
    let Some(first) = bitmaps.first() else { return Ok(()) };
    match target.qcow2_header() {
        None => bail!("Format driver 'raw' does not support bitmaps"),
        Some(header) if header.version < 3 => bail!("Cannot store dirty bitmaps in qcow2 v2 files"),
        Some(_) => {}
    }
    let own = target.bitmaps()?;
    if let Some(bitmap) = bitmaps.iter().find(|bitmap| own.iter().any(|own| own.name == bitmap.name)) {
        bail!("Failed to create bitmap {}: Bitmap already exists: {0}", bitmap.name);
    }
    let (from, to) = (source.info().size_bytes, target.info().size_bytes);
    if from != to {
        let what = format!("the source has {from} bytes, the target {to}");
        bail!("Failed to populate bitmap {}: Bitmaps are of different sizes: {what}", first.name);
    }
    Ok(())
}

/// Copies all bitmaps of an image to another, except inconsistent ones.
pub(crate) fn copy_bitmaps(source: &Image, target: &Path) -> anyhow::Result<()> {
    let mut actions = Vec::new();
    let (bitmaps, broken) = believed(source)?;
    for bitmap in &broken {
        output::warn(&format!("warning: Skipping inconsistent bitmap '{}'", bitmap.name));
    }
    for bitmap in bitmaps {
        let granularity_bytes = Some(bitmap.granularity_bytes());
        let bits = source.read_bitmap(&bitmap.name)?;
        actions.push((bitmap.name.clone(), BitmapAction::Add { granularity_bytes }));
        actions.push((bitmap.name.clone(), BitmapAction::Merge(bits)));
        if !bitmap.enabled {
            actions.push((bitmap.name, BitmapAction::Disable));
        }
    }
    if actions.is_empty() {
        return Ok(());
    }
    let file = files().open(&opened_name(target), Role::Writable)?;
    Ok(image::edit_bitmaps(&file, Format::Qcow2, &actions, &mut |_, _| true)?)
}
