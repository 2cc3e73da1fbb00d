//! Long work on disks in use: the list of jobs, and what they work with.

pub(crate) mod backup;
pub(crate) mod commit;
pub(crate) mod fleece;
pub(crate) mod layers;
pub(crate) mod list;
pub(crate) mod made;
