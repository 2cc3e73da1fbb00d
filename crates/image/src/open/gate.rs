//! The gate: an image never makes the daemon open a file that its user did not allow.
//!
//! Every file that is opened because an image names it passes the [`Gate`]. Protocol names and `json:` descriptions
//! inside images are refused under every policy.

use block::{Error, ErrorKind, File, Result};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// What a file is opened for: decides mode and locks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// A disk that its guest writes: nobody else may.
    Writable,
    /// A disk that is only read: nobody may write it meanwhile.
    ReadOnly,
    /// A layer below, shared with other overlays: nobody may write it meanwhile.
    Backing,
}

/// Opens files by name: the daemon does it with engines and locks, tests with simulated storage.
pub trait Opener {
    /// Opens `path` for `role`.
    fn open(&self, path: &Path, role: Role) -> Result<Arc<dyn File>>;

    /// The one true name of `path`: absolute, symbolic links followed. Two names of a file are equal after this.
    fn canonical(&self, path: &Path) -> Result<PathBuf> {
        std::fs::canonicalize(path).map_err(|error| Error::io(format!("cannot find '{}'", path.display()), error))
    }
}

/// Which files an image may make us open.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum BackingPolicy {
    /// None.
    Deny,
    /// Those in the directory of the image that the user named, or below it, and those the user named.
    #[default]
    SameDir,
    /// Only those the user named.
    Listed,
    /// Any.
    Any,
}

impl std::str::FromStr for BackingPolicy {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        match name {
            "deny" => Ok(Self::Deny),
            "same-dir" => Ok(Self::SameDir),
            "listed" => Ok(Self::Listed),
            "any" => Ok(Self::Any),
            _ => Err(Error::new(
                ErrorKind::BadOption,
                format!("unknown backing policy '{name}': valid are deny, same-dir, listed, any"),
            )),
        }
    }
}

/// The name of a file (`what`: its backing file, its data file) as an image at `overlay` gives it, as a path; refused if
/// it is anything but a plain name.
pub(crate) fn named_path(overlay: &Path, what: &str, name: &str) -> Result<PathBuf> {
    let first_part = name.split('/').next().unwrap_or_default();
    if first_part.contains(':') {
        return Err(Error::new(
            ErrorKind::Denied,
            format!(
                "'{}' names its {what} as '{}': protocol and json: names inside an image are not followed",
                overlay.display(),
                name.escape_debug()
            ),
        ));
    }
    if name.is_empty() || name.contains('\0') {
        return Err(Error::new(
            ErrorKind::BadImage,
            format!("'{}' has an impossible {what} name '{}'", overlay.display(), name.escape_debug()),
        ));
    }
    let directory = overlay.parent().unwrap_or(Path::new(""));
    Ok(directory.join(name))
}

/// The canonical name of the backing file that the image at `overlay` names as `name`, if the policy allows to open it.
/// `top` is the image that the user named, `listed` are other files that the user named.
pub fn pass_gate(
    policy: &BackingPolicy,
    top: &Path,
    listed: &[PathBuf],
    overlay: &Path,
    name: &str,
    opener: &dyn Opener,
) -> Result<PathBuf> {
    Ok(Gate::new(policy, top, listed, opener)?.pass(overlay, "backing file", name)?.0)
}

/// What files that an image names have to pass.
pub(crate) struct Gate<'a> {
    policy: &'a BackingPolicy,
    /// The canonical name of the image that the user named.
    pub(crate) top: PathBuf,
    /// Its directory; where the user named a symbolic link, also the link's.
    near: Vec<PathBuf>,
    /// The canonical names of other files that the user named.
    listed: Vec<PathBuf>,
    opener: &'a dyn Opener,
}

impl<'a> Gate<'a> {
    /// `top` and `listed` are as the user named them.
    pub(crate) fn new(
        policy: &'a BackingPolicy,
        top: &Path,
        listed: &[PathBuf],
        opener: &'a dyn Opener,
    ) -> Result<Self> {
        let own = opener.canonical(top)?;
        let said = top.parent().map(|directory| if directory == Path::new("") { Path::new(".") } else { directory });
        let said = said.and_then(|directory| opener.canonical(directory).ok());
        let near = own.parent().map(Path::to_owned).into_iter().chain(said).collect();
        let listed = listed.iter().filter_map(|path| opener.canonical(path).ok()).collect();
        Ok(Self { policy, top: own, near, listed, opener })
    }

    /// The canonical name of the file that the image at `overlay` names, if it may be opened, and its name as it is said.
    /// As in QEMU it lies beside `overlay` as that was named: beside a symbolic link, not beside what the link leads to.
    pub(crate) fn pass(&self, overlay: &Path, what: &str, name: &str) -> Result<(PathBuf, PathBuf)> {
        let said = named_path(overlay, what, name)?;
        let in_context = |error: Error| error.in_context(format!("{what} of '{}'", overlay.display()));
        let target = self.opener.canonical(&said).map_err(in_context)?;
        self.allow(what, &target)?;
        Ok((target, said))
    }

    /// Decides whether the file `target` (canonical) may be opened because an image says so.
    fn allow(&self, what: &str, target: &Path) -> Result<()> {
        let is_listed = self.listed.iter().any(|path| path == target);
        let is_near = self.near.iter().any(|directory| target.starts_with(directory));
        let allowed = match self.policy {
            BackingPolicy::Deny => false,
            BackingPolicy::SameDir => is_listed || is_near,
            BackingPolicy::Listed => is_listed,
            BackingPolicy::Any => true,
        };
        if allowed {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::Denied,
            format!(
                "'{}' wants the {what} '{}', which the policy does not allow; \
                 name that file on the command line too, or use --allow-backing any if you trust the image",
                self.top.display(),
                target.display()
            ),
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Where a link leads to the image.
    struct Linked;

    impl Opener for Linked {
        fn open(&self, path: &Path, _role: Role) -> Result<Arc<dyn File>> {
            unreachable!("'{}' is opened", path.display())
        }

        fn canonical(&self, path: &Path) -> Result<PathBuf> {
            let is_link = path == Path::new("/links/disk.qcow2");
            Ok(if is_link { PathBuf::from("/vms/a/disk.qcow2") } else { path.to_owned() })
        }
    }

    fn check_of(top: &str, policy: &BackingPolicy, target: &str) -> bool {
        let listed = [PathBuf::from("/bases/one.qcow2")];
        let gate = Gate::new(policy, Path::new(top), &listed, &Linked).unwrap();
        gate.pass(Path::new("/elsewhere/a.qcow2"), "backing file", target).is_ok()
    }

    fn check(policy: BackingPolicy, target: &str) -> bool {
        check_of("/vms/a/disk.qcow2", &policy, target)
    }

    #[test]
    fn near_a_link_is_where_it_lies_and_where_it_leads() {
        for (target, near) in
            [("/links/base.raw", true), ("/vms/a/base.raw", true), ("/vms/base.raw", false), ("/base.raw", false)]
        {
            assert_eq!(check_of("/links/disk.qcow2", &BackingPolicy::SameDir, target), near, "{target}");
            assert!(!check_of("/links/disk.qcow2", &BackingPolicy::Listed, target), "{target}");
        }
        let gate = Gate::new(&BackingPolicy::SameDir, Path::new("/links/disk.qcow2"), &[], &Linked).unwrap();
        let passed = gate.pass(Path::new("/links/disk.qcow2"), "backing file", "base.raw").unwrap();
        assert_eq!(passed.0, Path::new("/links/base.raw"));
    }

    #[test]
    fn the_default_allows_the_directory_below_and_what_was_named() {
        for (target, near, listed) in [
            ("/vms/a/base.raw", true, false),
            ("/vms/a/sub/base.raw", true, false),
            ("/vms/ab/base.raw", false, false),
            ("/etc/shadow", false, false),
            ("/bases/one.qcow2", true, true),
        ] {
            assert_eq!(check(BackingPolicy::SameDir, target), near, "{target}");
            assert_eq!(check(BackingPolicy::Listed, target), listed, "{target}");
            assert!(!check(BackingPolicy::Deny, target) && check(BackingPolicy::Any, target));
        }
    }

    #[test]
    fn protocol_and_json_names_are_refused_and_plain_ones_are_relative_to_the_overlay() {
        let overlay = Path::new("/vms/a/disk.qcow2");
        for name in ["json:{\"driver\":\"file\"}", "nbd://host/x", "http://h/x", "file:x", "", "a\0b"] {
            assert!(named_path(overlay, "backing file", name).is_err(), "{name:?}");
        }
        assert!(named_path(overlay, "backing file", "base:1/x").is_err());
        assert_eq!(named_path(overlay, "backing file", "sub/a:b").unwrap(), Path::new("/vms/a/sub/a:b"));
        assert_eq!(named_path(overlay, "backing file", "/abs").unwrap(), Path::new("/abs"));
    }
}
