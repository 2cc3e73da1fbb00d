//! Who may know the formats of images: other files ask for what a format can do, so that a new one needs no visit there.
//!
//! A file names a format by a variant, or by a call into the format's crate. In the room `image`, the types of formats'
//! crates are its own vocabulary, and no name of a format. Above it, the crates themselves are not named either.

use std::path::{Path, PathBuf};

/// Files, and folders (with a slash at the end), that may name formats, and why.
const MAY: &[(&str, &str)] = &[
    ("crates/image/src/guess.rs", "names and magics of formats"),
    ("crates/image/src/chain/mapping/", "open layers"),
    ("crates/image/src/offline/formats.rs", "images that nobody uses, and what each format can do"),
    ("crates/image/src/online/compact.rs", "only qcow2 has clusters that can move"),
    ("crates/drive/src/options.rs", "format=, which can also say that there is no image"),
    ("crates/drive/src/options/values.rs", "the values of format="),
    ("crates/drive/src/image_name.rs", "driver=file, which is a raw image"),
    ("crates/cli/src/images/create.rs", "options of a new image"),
    ("crates/cli/src/images/new_image.rs", "options of a new image"),
    ("crates/cli/src/commands/create.rs", "options of a new image"),
    ("crates/cli/src/commands/check.rs", "qemu-img's words for a check, which only qcow2 has"),
    ("crates/cli/src/commands/bitmap.rs", "qemu-img's words for bitmaps, which only qcow2 keeps"),
    ("crates/cli/src/images/bitmaps.rs", "copies of bitmaps, which only qcow2 keeps"),
    ("crates/cli/src/commands/info/", "qemu-img's words for a qcow2 header"),
    ("crates/cli/src/commands/try_it/", "its own two images"),
    ("crates/cli/src/commands/bench/target.rs", "the host's own file, which is raw"),
];

/// Rooms where formats may be known, by the beginning of their files' paths: the formats themselves, and programs that
/// are tests.
const APART: &[&str] = &["crates/format-", "crates/guestlab/", "crates/testkit/"];

const VARIANTS: &[&str] = &["Format::", "Mapping::", "CreateOptions::"];
/// Gives the image of one format.
const OF_MAPPING: &str = "mapping.qcow2()";
const FORMATS: &[&str] = &["Raw", "Qcow2", "Scratch"];
const CRATES: &[&str] = &["format_raw::", "format_qcow2::", "format_scratch::"];

/// Complains about files that name a format and may not, and about files that may and do not.
pub(crate) fn check(texts: &[(PathBuf, String)]) -> Vec<String> {
    let mut complaints = Vec::new();
    let mut used = vec![false; MAY.len()];
    for (path, text) in texts {
        let name = path.to_string_lossy().replace('\\', "/");
        let Some((line, word)) = named(&name, text) else { continue };
        match MAY.iter().position(|(file, _)| name == *file || file.ends_with('/') && name.starts_with(file)) {
            Some(place) => used[place] = true,
            None => complaints.push(format!("{name}:{line}: '{word}': ask what the format can do, or list the file")),
        }
    }
    let unused = MAY.iter().zip(used).filter(|(_, used)| !used);
    complaints.extend(unused.map(|((file, _), _)| format!("{file} names no format any more: take it off the list")));
    complaints
}

/// Returns the first name of a format in the code of a program, with its line.
fn named(name: &str, text: &str) -> Option<(usize, &'static str)> {
    let is_code = name.starts_with("crates/") && name.contains("/src/") && name.ends_with(".rs");
    let stem = Path::new(name).file_stem()?.to_string_lossy();
    let is_test = stem == "tests" || stem.ends_with("_tests") || name.contains("/tests/");
    if !is_code || is_test || APART.iter().any(|apart| name.starts_with(apart)) {
        return None;
    }
    let is_in_image = name.starts_with("crates/image/");
    let code = text.split("\n#[cfg(test)]\nmod tests {").next().unwrap_or_default();
    code.lines().enumerate().find_map(|(index, line)| {
        let line = line.split("//").next().unwrap_or_default();
        let is_import = ["use ", "pub use ", "pub(crate) use "].iter().any(|start| line.starts_with(start));
        let a_variant = VARIANTS.iter().find(|kind| is_one_of_formats(line, kind));
        let a_crate = CRATES.iter().find(|room| match is_in_image {
            true => !is_import && is_followed_by(line, room, |next| next.is_ascii_lowercase()),
            false => line.contains(*room),
        });
        let of_mapping = Some(&OF_MAPPING).filter(|word| line.contains(**word));
        a_variant.or(a_crate).or(of_mapping).map(|word| (index + 1, *word))
    })
}

fn is_one_of_formats(line: &str, kind: &str) -> bool {
    line.split(kind).skip(1).any(|rest| {
        let end = rest.find(|letter: char| !letter.is_alphanumeric()).unwrap_or(rest.len());
        FORMATS.contains(&&rest[..end])
    })
}

fn is_followed_by(line: &str, word: &str, is: impl Fn(char) -> bool) -> bool {
    line.split(word).skip(1).any(|rest| rest.starts_with(&is))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_names_a_format_is_found() {
        let cases = [
            ("crates/jobs/src/a.rs", "x;\nif format == Format::Qcow2 {", true),
            ("crates/daemon/src/a.rs", "use format_qcow2::Header;", true),
            ("crates/daemon/src/a.rs", "DriveFormat::Raw", true),
            ("crates/image/src/a.rs", "use format_qcow2::Header;", false),
            ("crates/image/src/a.rs", "let a: format_qcow2::Header;", false),
            ("crates/image/src/a.rs", "block_on(format_qcow2::check(io))", true),
            ("crates/image/src/a.rs", "Mapping::Raw(_) => 1", true),
            ("crates/image/src/a.rs", "top.mapping.qcow2().is_some()", true),
            ("crates/image/src/a.rs", "#[cfg(test)]\nmod tests;\nFormat::Raw", true),
            ("crates/jobs/src/a.rs", "// as Format::Qcow2", false),
            ("crates/jobs/src/a.rs", "Format::OF_OVERLAYS, Format::Qcow2Like", false),
            ("crates/jobs/src/a.rs", "\n#[cfg(test)]\nmod tests {\nFormat::Raw", false),
            ("crates/jobs/src/a_tests.rs", "Format::Raw", false),
            ("crates/jobs/tests/a.rs", "Format::Raw", false),
            ("crates/format-qcow2/src/a.rs", "Format::Raw", false),
        ];
        for (name, text, is_found) in cases {
            assert_eq!(named(name, text).is_some(), is_found, "{name}: {text}");
        }
        assert_eq!(named("crates/jobs/src/a.rs", "x;\nFormat::Raw").unwrap().0, 2);
    }

    #[test]
    fn a_list_that_is_longer_than_the_files_is_found() {
        let complaints = check(&[("crates/image/src/guess.rs".into(), "Format::Raw".to_owned())]);
        assert_eq!(complaints.len(), MAY.len() - 1, "{complaints:?}");
    }
}
