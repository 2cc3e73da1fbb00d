//! Header extensions, between the header's fields and the backing file's name.

use crate::layout::header::EXTENSION_END;

const EXTENSION_HEAD_BYTES: usize = 8;
pub(crate) const OFFSET_BACKING: usize = 8;
const OFFSET_HEADER_LENGTH: usize = 100;
const V2_HEADER_BYTES: usize = 72;

/// Returns the length of the fields in front of the extensions.
pub(crate) fn header_bytes(cluster: &[u8], version: u32) -> usize {
    if version == 2 { V2_HEADER_BYTES } else { field_u32(cluster, OFFSET_HEADER_LENGTH) as usize }
}

/// Reads the extensions of a header that was parsed, from its first cluster.
pub(crate) fn header_extensions(cluster: &[u8], version: u32) -> Vec<(u32, Vec<u8>)> {
    let end = match field_u64(cluster, OFFSET_BACKING) as usize {
        0 => cluster.len(),
        end => end,
    };
    extensions(cluster.get(..end).unwrap_or(cluster), header_bytes(cluster, version)).0
}

/// Returns the extensions in `area`, which starts with the header's fields, and where they end.
pub(crate) fn extensions(area: &[u8], header_bytes: usize) -> (Vec<(u32, Vec<u8>)>, usize) {
    let (mut found, mut at) = (Vec::new(), header_bytes);
    while let Some(head) = area.get(at..at.saturating_add(EXTENSION_HEAD_BYTES)) {
        let (kind, length) = (field_u32(head, 0), field_u32(head, 4) as usize);
        let start = at.saturating_add(EXTENSION_HEAD_BYTES);
        if kind == EXTENSION_END {
            return (found, start);
        }
        // The header was checked before. An extension that does not fit ends the list.
        let Some(data) = area.get(start..start.saturating_add(length)) else { break };
        found.push((kind, data.to_vec()));
        at = start.saturating_add(length.next_multiple_of(8));
    }
    (found, at.min(area.len()))
}

pub(crate) fn field_u32(bytes: &[u8], offset: usize) -> u32 {
    let field = bytes.get(offset..offset.saturating_add(4)).and_then(|bytes| bytes.try_into().ok());
    u32::from_be_bytes(field.unwrap_or([0; 4]))
}

pub(crate) fn field_u64(bytes: &[u8], offset: usize) -> u64 {
    let field = bytes.get(offset..offset.saturating_add(8)).and_then(|bytes| bytes.try_into().ok());
    u64::from_be_bytes(field.unwrap_or([0; 8]))
}
