//! Creating, changing and removing persistent bitmaps: all requested changes at once, or none.

use super::{Edit, EditWatch};
use crate::layout::bitmap::{
    AUTOCLEAR_BITMAPS, Bitmap, BitmapBits, EXTENSION_BITMAPS, MAX_BITMAPS, MAX_BITS_BYTES, MAX_NAME_BYTES,
    TABLE_ALL_ONES, bits, data_offset, directory, in_use, not_found, table,
};
use block::{Error, ErrorKind, File, IoResult, MetaIo, Result};

/// One change to a bitmap.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BitmapAction {
    /// Creates it, enabled and empty.
    Add {
        /// Bytes of the disk for each bit. The default is the cluster size, but at least 4 KiB and at most 64 KiB.
        granularity_bytes: Option<u64>,
    },
    /// Removes it.
    Remove,
    /// Clears all bits.
    Clear,
    /// Notes writes from now on.
    Enable,
    /// Notes no more writes.
    Disable,
    /// Adds the bits of another bitmap of the image.
    MergeOwn(String),
    /// Adds bits from elsewhere.
    Merge(BitmapBits),
}

impl BitmapAction {
    fn name(&self) -> &'static str {
        match self {
            Self::Add { .. } => "add",
            Self::Remove => "remove",
            Self::Clear => "clear",
            Self::Enable => "enable",
            Self::Disable => "disable",
            Self::MergeOwn(_) | Self::Merge(_) => "merge",
        }
    }
}

/// Carries out changes to named bitmaps, in order: either all of them or none. The image must not be in use.
pub async fn edit_bitmaps(
    io: &MetaIo,
    file: &dyn File,
    name: &str,
    actions: &[(String, BitmapAction)],
    watch: &mut EditWatch<'_>,
) -> Result<()> {
    let mut edit = Edit::open(io, file, name, watch).await?;
    let done = edit.change_bitmaps(actions).await;
    edit.end(done).await
}

/// As [`edit_bitmaps`], for an image that the caller has had open for writing and has just closed. References are not
/// checked first, which takes long in a large image: new tables go to space that the open image would have used for
/// data.
pub async fn edit_bitmaps_just_closed(
    io: &MetaIo,
    file: &dyn File,
    name: &str,
    actions: &[(String, BitmapAction)],
    watch: &mut EditWatch<'_>,
) -> Result<()> {
    let mut edit = Edit::open_again(io, file, name, watch).await?;
    let done = edit.change_bitmaps(actions).await;
    edit.end(done).await
}

/// The planned state of a bitmap.
struct Draft {
    bitmap: Bitmap,
    /// Its new bits; `None` if the bits in the file stay.
    bits: Option<BitmapBits>,
    /// Its row in the file, if it is there already.
    old: Option<Bitmap>,
}

impl Edit<'_, '_> {
    async fn change_bitmaps(&mut self, actions: &[(String, BitmapAction)]) -> Result<()> {
        if self.header.version < 3 {
            return self.refuse(ErrorKind::Unsupported, "Cannot store dirty bitmaps in qcow2 v2 files");
        }
        let found = directory(self.io, &self.header, &self.first_cluster, self.name).await?;
        let draft = |bitmap: &Bitmap| Draft { bitmap: bitmap.clone(), bits: None, old: Some(bitmap.clone()) };
        let mut drafts: Vec<Draft> = found.bitmaps.iter().map(draft).collect();
        let mut gone: Vec<Bitmap> = Vec::new();
        for (name, action) in actions {
            let done = self.draft(&mut drafts, &mut gone, name, action).await;
            done.map_err(|error| error.in_context(format!("Operation {} on bitmap {name} failed", action.name())))?;
        }
        for draft in &mut drafts {
            if let Some(bits) = draft.bits.take() {
                gone.extend(draft.old.take());
                self.write_bits(&mut draft.bitmap, &bits).await.map_err(|error| self.failed(error))?;
            }
        }
        for bitmap in gone {
            self.drop_bits(&bitmap).await?;
        }
        let rows: Vec<u8> = drafts.iter().flat_map(|draft| draft.bitmap.row()).collect();
        self.set_directory(&rows, drafts.len()).await?;
        self.drop_table(found.offset, found.bytes).await.map_err(|error| self.failed(error))
    }

    async fn draft(
        &mut self,
        drafts: &mut Vec<Draft>,
        gone: &mut Vec<Bitmap>,
        name: &str,
        action: &BitmapAction,
    ) -> Result<()> {
        let place = drafts.iter().position(|draft| draft.bitmap.name == name);
        if let BitmapAction::Add { granularity_bytes } = action {
            if place.is_some() {
                return Err(Error::new(ErrorKind::BadOption, format!("Bitmap already exists: {name}")));
            }
            drafts.push(self.new_bitmap(name, *granularity_bytes, drafts.len())?);
            return Ok(());
        }
        let index = place.ok_or_else(|| not_found(name))?;
        if *action == BitmapAction::Remove {
            gone.extend(drafts.remove(index).old);
            return Ok(());
        }
        let added = match action {
            BitmapAction::MergeOwn(source) => {
                let source =
                    drafts.iter().position(|draft| draft.bitmap.name == *source).ok_or_else(|| not_found(source))?;
                Some(self.bits_of(drafts.get(source)).await?)
            }
            BitmapAction::Merge(bits) => Some(bits.clone()),
            _ => None,
        };
        let own = match added {
            Some(_) => Some(self.bits_of(drafts.get(index)).await?),
            None => None,
        };
        let Some(draft) = drafts.get_mut(index) else { return Ok(()) };
        if draft.bitmap.in_use {
            return Err(in_use(name));
        }
        match action {
            BitmapAction::Enable => draft.bitmap.enabled = true,
            BitmapAction::Disable => draft.bitmap.enabled = false,
            BitmapAction::Clear => draft.bits = Some(self.no_bits(&draft.bitmap)),
            _ => {
                if let (Some(mut bits), Some(added)) = (own, added) {
                    if added.size_bytes != bits.size_bytes {
                        return Err(Error::new(ErrorKind::BadOption, "Bitmaps are of different sizes"));
                    }
                    added.ranges().iter().for_each(|range| bits.set(range));
                    draft.bits = Some(bits);
                }
            }
        }
        Ok(())
    }

    fn new_bitmap(&self, name: &str, granularity_bytes: Option<u64>, count: usize) -> Result<Draft> {
        let bad = |what: &str| Err(Error::new(ErrorKind::BadOption, what));
        let granularity = granularity_bytes.unwrap_or(self.geometry.cluster_bytes().clamp(4 << 10, 64 << 10));
        if !granularity.is_power_of_two() || granularity < 512 {
            return bad("Granularity must be power of 2 and at least 512");
        }
        let granularity_bits = granularity.trailing_zeros();
        let bitmap = Bitmap {
            name: name.to_owned(),
            granularity_bits: granularity_bits as u8,
            in_use: false,
            enabled: true,
            extra: Vec::new(),
            table_offset: 0,
            table_entries: 0,
        };
        match () {
            () if granularity_bits > 31 => bad("Granularity exceeds maximum (2147483648 bytes)"),
            () if name.is_empty() => bad("Bitmap name cannot be empty"),
            () if name.len() > MAX_NAME_BYTES => bad("Bitmap name is too long"),
            () if count as u64 >= u64::from(MAX_BITMAPS) => {
                bad("Maximum number of persistent bitmaps is already reached")
            }
            () if bitmap.bits_bytes(self.geometry.size_bytes) > MAX_BITS_BYTES => {
                bad("Too much space will be occupied by the bitmap. Use larger granularity")
            }
            () => {
                let bits = self.no_bits(&bitmap);
                Ok(Draft { bitmap, bits: Some(bits), old: None })
            }
        }
    }

    fn no_bits(&self, bitmap: &Bitmap) -> BitmapBits {
        let length = usize::try_from(bitmap.bits_bytes(self.geometry.size_bytes)).unwrap_or(0);
        let size_bytes = self.geometry.size_bytes;
        BitmapBits { granularity_bits: bitmap.granularity_bits, size_bytes, bytes: vec![0; length] }
    }

    async fn bits_of(&self, draft: Option<&Draft>) -> Result<BitmapBits> {
        match draft {
            Some(Draft { bitmap: Bitmap { in_use: true, name, .. }, .. }) => Err(in_use(name)),
            Some(Draft { bits: Some(bits), .. }) => Ok(bits.clone()),
            Some(Draft { bitmap, .. }) => bits(self.io, &self.geometry, bitmap, self.name).await,
            None => Err(not_found("")),
        }
    }

    /// Adapts the bitmaps to a disk of another size, or with other contents. Bitmaps that are in use mean nothing, so
    /// they stay as they are. A disabled bitmap stays as it is if only the contents change.
    ///
    /// Enabled bitmaps note added space as written. An earlier change may have cut off data there, with its bits, and
    /// the last backup has the data still.
    pub(super) async fn fit_bitmaps(&mut self, size_bytes: u64, all_written: bool) -> Result<()> {
        if !self.has_bitmaps() {
            return Ok(());
        }
        let found = directory(self.io, &self.header, &self.first_cluster, self.name).await?;
        if size_bytes == 0 && !found.bitmaps.is_empty() {
            return self.refuse(ErrorKind::Unsupported, "a disk without any bytes has no persistent bitmaps");
        }
        let written = if all_written { 0 } else { self.geometry.size_bytes }..size_bytes;
        let mut rows = Vec::new();
        for old in &found.bitmaps {
            let mut new = old.clone();
            let all_written = all_written && old.enabled;
            if !old.in_use && (all_written || size_bytes != self.geometry.size_bytes) {
                if old.bits_bytes(size_bytes) > MAX_BITS_BYTES {
                    let what =
                        format_args!("bitmap '{}' would be too large; make it anew with larger granules", old.name);
                    return self.refuse(ErrorKind::Unsupported, what);
                }
                let mut bits = bits(self.io, &self.geometry, old, self.name).await?.of_size(size_bytes);
                if old.enabled {
                    bits.set(&written);
                }
                self.write_bits(&mut new, &bits).await.map_err(|error| self.failed(error))?;
                self.drop_bits(old).await?;
            }
            rows.extend(new.row());
        }
        self.set_directory(&rows, found.bitmaps.len()).await?;
        self.drop_table(found.offset, found.bytes).await.map_err(|error| self.failed(error))
    }

    /// Refuses images with a bitmap in use: its bits mean nothing, and do not go with another size.
    pub(super) async fn refuse_bitmaps_in_use(&self) -> Result<()> {
        let found = directory(self.io, &self.header, &self.first_cluster, self.name).await?;
        match found.bitmaps.iter().find(|bitmap| bitmap.in_use) {
            Some(bitmap) => Err(in_use(&bitmap.name)),
            None => Ok(()),
        }
    }

    /// Writes bits to new space.
    async fn write_bits(&mut self, bitmap: &mut Bitmap, bits: &BitmapBits) -> IoResult {
        let cluster_bytes = usize::try_from(self.geometry.cluster_bytes()).unwrap_or(usize::MAX);
        let mut table = Vec::new();
        for part in bits.bytes.chunks(cluster_bytes) {
            let entry = match part {
                part if part.iter().all(|byte| *byte == 0) => 0,
                part if part.len() == cluster_bytes && part.iter().all(|byte| *byte == 0xff) => TABLE_ALL_ONES,
                part => self.add_table(part, 1).await?,
            };
            table.push(entry);
        }
        let bytes: Vec<u8> = table.iter().flat_map(|entry| entry.to_be_bytes()).collect();
        bitmap.table_offset = if bytes.is_empty() { 0 } else { self.add_table(&bytes, 1).await? };
        bitmap.table_entries = u32::try_from(table.len()).unwrap_or(0);
        Ok(())
    }

    /// Frees the space of a bitmap in the file.
    async fn drop_bits(&mut self, bitmap: &Bitmap) -> Result<()> {
        let entries = match table(self.io, &self.geometry, bitmap, self.name).await {
            // Its table cannot be read, so the space of its bits leaks.
            Err(error) if error.kind() == ErrorKind::BadImage => Vec::new(),
            read => read?,
        };
        let cluster_bytes = self.geometry.cluster_bytes();
        for offset in entries.into_iter().filter_map(data_offset) {
            self.drop_table(offset, cluster_bytes).await.map_err(|error| self.failed(error))?;
        }
        self.drop_table(bitmap.table_offset, bitmap.table_bytes()).await.map_err(|error| self.failed(error))
    }

    /// Makes the header name a new directory, or none if there are no bitmaps.
    async fn set_directory(&mut self, rows: &[u8], count: usize) -> Result<()> {
        let extension = match count {
            0 => None,
            _ => {
                let offset = self.add_table(rows, 1).await.map_err(|error| self.failed(error))?;
                let mut data = u32::try_from(count).unwrap_or(0).to_be_bytes().to_vec();
                data.extend([0; 4]);
                data.extend((rows.len() as u64).to_be_bytes());
                data.extend(offset.to_be_bytes());
                Some(data)
            }
        };
        let mut header = self.header_edit()?;
        let autoclear = header.autoclear() & !AUTOCLEAR_BITMAPS;
        header.set_autoclear(if extension.is_some() { autoclear | AUTOCLEAR_BITMAPS } else { autoclear });
        header.set_extension(EXTENSION_BITMAPS, extension);
        header.put_into(&mut self.first_cluster)
    }
}
