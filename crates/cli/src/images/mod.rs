//! Images as the user names and describes them: opening, creating, and checks before they are written.

mod bitmaps;
mod create;
mod file_id;
mod name;
mod new_image;
mod open;
mod own_backing;
mod target;

pub(crate) use bitmaps::{copy_bitmaps, refuse_misfits, refuse_without_bitmaps};
pub(crate) use create::{create, create_target};
pub(crate) use name::{
    backing_name, beside_image, file_name, image_name, opened_name, parse_format, path_of, remote_name,
};
pub(crate) use new_image::{NewImage, asks_for_help, check_backing_format, options_help, switch};
pub(crate) use open::{
    BackingArgs, LOCK_TIMEOUT_VARIABLE, OpenArgs, files, name_force_share, open_to_overwrite, open_writable, opener,
    set_lock_timeout,
};
pub(crate) use target::{
    INCOMPLETE, holds_old_bytes, leave_page_cache, refuse_same_file, remove_target, sync_directory, with_fate,
};
