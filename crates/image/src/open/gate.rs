//! The gate: an image never makes the daemon open a file that its user did not allow.
//!
//! Every file that is opened because an image names it passes the [`Gate`]. Images name files by path; `file:` and
//! `host_device:` may stand before a backing file's. The disk or file of a server passes only if the user named the same
//! one, or allowed all. Other protocols and `json:` descriptions inside images are refused under every policy.

use super::temporary_files::TemporaryFiles;
use crate::file_name::{self, FileName};
use block::{Error, ErrorKind, File, Result};
use format_qcow2::{escaped_byte, os_name};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// What a file is opened for. This decides the mode and the locks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// A disk that its guest writes. Nobody else may write it.
    Writable,
    /// A disk that is only read. Nobody may write it meanwhile.
    ReadOnly,
    /// A layer below, shared with other overlays. Nobody may write it meanwhile.
    Backing,
}

/// The name of the layer below an image, in messages and for the gate.
pub(crate) const BACKING_FILE: &str = "backing file";

/// Opens files by name: programs implement it with engines and locks, tests with simulated storage.
pub trait Opener {
    /// Opens the file `name` for `role`.
    fn open(&self, name: &FileName, role: Role) -> Result<Arc<dyn File>>;

    /// Makes the empty file `path` and opens it for writing; `None` if the name exists. After an error the file may be there:
    /// from the moment that it was made, others may use it.
    fn make(&self, path: &Path) -> Result<Option<Arc<dyn File>>> {
        Err(Error::new(ErrorKind::Unsupported, format!("'{}' cannot be made here", path.display())))
    }

    /// Removes a file that [`Opener::make`] has made, if possible.
    fn unmake(&self, path: &Path) {
        let _ = path;
    }

    /// Makes the name of a file durable that [`Opener::make`] has made.
    fn sync_directory_of(&self, path: &Path) -> Result<()> {
        let _ = path;
        Ok(())
    }

    /// Returns the maker of temporary files.
    fn temporary(&self) -> Result<Box<dyn TemporaryFiles>> {
        Err(Error::new(ErrorKind::Unsupported, "temporary files cannot be made here"))
    }

    /// Returns a path's only form: absolute, with symbolic links followed. All paths of a file become equal.
    fn canonical(&self, path: &Path) -> Result<PathBuf> {
        std::fs::canonicalize(path).map_err(|error| Error::io(format!("Could not open '{}'", path.display()), error))
    }
}

/// A function that opens files is enough for images that nobody creates, and that need no temporary files.
impl<F: Fn(&FileName, Role) -> Result<Arc<dyn File>>> Opener for F {
    fn open(&self, name: &FileName, role: Role) -> Result<Arc<dyn File>> {
        self(name, role)
    }
}

/// Which files an image may name and have opened.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum BackingPolicy {
    /// None.
    Deny,
    /// Files in the directory of the image that the user named, or below it, and files that the user named.
    #[default]
    SameDir,
    /// Only files that the user named.
    Listed,
    /// Any file.
    Any,
    /// Any file, and what lies at servers and in clusters: `nbd://`, `nbd+unix://`, `http://`, `https://`, `rbd:`.
    Anywhere,
}

impl std::str::FromStr for BackingPolicy {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        match name {
            "deny" => Ok(Self::Deny),
            "same-dir" => Ok(Self::SameDir),
            "listed" => Ok(Self::Listed),
            "any" => Ok(Self::Any),
            "anywhere" => Ok(Self::Anywhere),
            _ => Err(Error::new(
                ErrorKind::BadOption,
                format!("unknown backing policy '{name}': valid are deny, same-dir, listed, any, anywhere"),
            )),
        }
    }
}

/// Prepares a name from an image for display: nothing in it steers a terminal, and bytes that are not text show as
/// `\xff`.
fn show_name(name: &str) -> String {
    let show = |char: char| match escaped_byte(char) {
        Some(byte) => format!("\\x{byte:02x}"),
        None => char.escape_debug().to_string(),
    };
    name.chars().map(show).collect()
}

/// Returns the backing file that the image at `overlay` names as `name`, or will name. Refuses all but plain names and
/// files of servers. Does not ask the policy.
pub fn backing_path(overlay: &FileName, name: &str) -> Result<FileName> {
    match remote(name) {
        Some(remote) => Ok(remote),
        None => named_path(overlay, BACKING_FILE, name).map(FileName::File),
    }
}

/// Returns the path in a name with the protocol of a file of the host; `None` if it is another name. As in QEMU, it is
/// relative to the working directory, not to the image.
#[must_use]
pub fn path_with_protocol(name: &str) -> Option<&str> {
    ["file:", "host_device:"].iter().find_map(|protocol| name.strip_prefix(protocol))
}

/// Parses the name as a server's disk or file; `None` if it is none.
fn remote(name: &str) -> Option<FileName> {
    FileName::parse(name).ok().filter(FileName::is_remote)
}

/// Returns the path of a file that the image at `overlay` names as `name`. `what` says which file: its backing file, or
/// its data file. Refuses all but plain names.
pub(crate) fn named_path(overlay: &FileName, what: &str, name: &str) -> Result<PathBuf> {
    let shown = show_name(&file_name::shown(name));
    let first_part = name.split('/').next().unwrap_or_default();
    let with_protocol = path_with_protocol(name).filter(|_| what == BACKING_FILE);
    if first_part.contains(':') && with_protocol.is_none() {
        if what == BACKING_FILE && name.starts_with("nbd") && name != file_name::without_secrets(name) {
            let message = format!("'{overlay}' names its {what} as '{shown}': a name of an NBD disk has no password");
            return Err(Error::new(ErrorKind::Denied, message));
        }
        let known = FileName::PROTOCOLS.join(", ");
        let message = format!(
            "'{overlay}' names its {what} as '{shown}': names with a protocol (known are {known}) and json: \
             descriptions are not followed inside an image, which may name files by path only"
        );
        return Err(Error::new(ErrorKind::Denied, message));
    }
    if with_protocol.unwrap_or(name).is_empty() || name.contains('\0') {
        return Err(Error::new(ErrorKind::BadImage, format!("'{overlay}' has an impossible {what} name '{shown}'")));
    }
    if let Some(path) = with_protocol {
        return Ok(PathBuf::from(os_name(path)));
    }
    match overlay.path() {
        Some(path) => Ok(path.parent().unwrap_or(Path::new("")).join(os_name(name))),
        None if Path::new(name).is_absolute() => Ok(PathBuf::from(os_name(name))),
        None => {
            let message = format!(
                "'{overlay}' names its {what} as '{shown}', which is relative to the image's directory, and an image \
                 that was passed as a descriptor or lies at a server has none"
            );
            Err(Error::new(ErrorKind::Denied, message))
        }
    }
}

/// Returns the canonical name of the backing file that the image at `overlay` names as `name`, if the policy allows it.
/// `top` is the image that the user named, `listed` are other files that the user named.
pub fn pass_gate(
    policy: &BackingPolicy,
    top: impl Into<FileName>,
    listed: &[PathBuf],
    overlay: impl Into<FileName>,
    name: &str,
    opener: &dyn Opener,
) -> Result<FileName> {
    Ok(Gate::new(policy, &top.into(), listed, opener)?.pass(&overlay.into(), BACKING_FILE, name)?.0)
}

/// Decides which of the files that images name may be opened.
pub(crate) struct Gate<'a> {
    policy: &'a BackingPolicy,
    /// The canonical name of the image that the user named.
    pub(crate) top: FileName,
    /// The directory of that image. If the user named a symbolic link, also the link's. A descriptor is in no
    /// directory.
    near: Vec<PathBuf>,
    /// The canonical names of other files that the user named.
    listed: Vec<PathBuf>,
    /// The servers' files that the user named.
    listed_remotes: Vec<FileName>,
    opener: &'a dyn Opener,
}

impl<'a> Gate<'a> {
    /// Makes a gate. `top` and `listed` are as the user named them.
    pub(crate) fn new(
        policy: &'a BackingPolicy,
        top: &FileName,
        listed: &[PathBuf],
        opener: &'a dyn Opener,
    ) -> Result<Self> {
        let own = top.try_map_path(|path| opener.canonical(path))?;
        let said = top
            .path()
            .and_then(Path::parent)
            .map(|directory| if directory == Path::new("") { Path::new(".") } else { directory });
        let said = said.and_then(|directory| opener.canonical(directory).ok());
        let near = own.path().and_then(Path::parent).map(Path::to_owned).into_iter().chain(said).collect();
        let listed_remotes = listed.iter().filter_map(|path| remote(path.to_str()?)).collect();
        let listed = listed.iter().filter_map(|path| opener.canonical(path).ok()).collect();
        Ok(Self { policy, top: own, near, listed, listed_remotes, opener })
    }

    /// Returns the canonical name of the file that the image at `overlay` names, and its uncanonical name, if it may be
    /// opened. As in QEMU, the file lies beside `overlay` as that was named: beside a symbolic link, not beside the
    /// link's target.
    pub(crate) fn pass(&self, overlay: &FileName, what: &str, name: &str) -> Result<(FileName, FileName)> {
        if let Some(remote) = remote(name) {
            if what != BACKING_FILE {
                // A data file is opened for writing. A user who lets a server's disk be read has not allowed that.
                let message = format!(
                    "'{}' names its {what} as '{}': a server's file can be a backing file only",
                    self.top,
                    show_name(&remote.to_string())
                );
                return Err(Error::new(ErrorKind::Denied, message));
            }
            let allowed = self.allow_remote(what, &remote)?;
            return Ok((allowed.clone(), allowed));
        }
        let said = named_path(overlay, what, name)?;
        let in_context = |error: Error| error.in_context(format!("Could not open {what}"));
        let target = self.opener.canonical(&said).map_err(in_context)?;
        self.allow(what, &target)?;
        Ok((target.into(), said.into()))
    }

    /// Decides whether a server's file may be opened because an image names it. Returns the user's name for it if there
    /// is one: a user may give options that an image may not.
    fn allow_remote(&self, what: &str, remote: &FileName) -> Result<FileName> {
        let address = remote.address().unwrap_or_default();
        let listed = self.listed_remotes.iter().find(|listed| match listed {
            FileName::Nbd(_) => listed.is_same_file(remote),
            _ => listed.address().as_deref() == Some(&*address),
        });
        match (self.policy, listed) {
            (BackingPolicy::Deny, _) | (_, None) if *self.policy != BackingPolicy::Anywhere => {
                let shown = show_name(&remote.to_string());
                let message = format!(
                    "'{}' wants the {what} '{shown}' of a server, which the policy does not allow: names of servers are \
                     not followed inside an image, unless you name the same one, too (--backing), or use --allow-backing \
                     anywhere if you trust the image",
                    self.top
                );
                Err(Error::new(ErrorKind::Denied, message))
            }
            (_, Some(listed)) => Ok(listed.clone()),
            (_, None) if address.starts_with("nbds") => {
                let message = format!(
                    "'{}' wants the {what} '{}', which needs certificates that an image cannot name: name the same one with \
                     tls-certificates= (--backing)",
                    self.top,
                    show_name(&address)
                );
                Err(Error::new(ErrorKind::Denied, message))
            }
            // Options of an image could make us write or read files here.
            (_, None) => FileName::parse(&*address),
        }
    }

    /// Decides whether the file `target` (canonical) may be opened because an image names it.
    fn allow(&self, what: &str, target: &Path) -> Result<()> {
        let is_listed = self.listed.iter().any(|path| path == target);
        let is_near = self.near.iter().any(|directory| target.starts_with(directory));
        let allowed = match self.policy {
            BackingPolicy::Deny => false,
            BackingPolicy::SameDir => is_listed || is_near,
            BackingPolicy::Listed => is_listed,
            BackingPolicy::Any | BackingPolicy::Anywhere => true,
        };
        if allowed {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::Denied,
            format!(
                "'{}' wants the {what} '{}', which the policy does not allow; \
                 name that file on the command line too, or use --allow-backing any if you trust the image",
                self.top,
                target.display()
            ),
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An opener in whose file system a link leads to the image.
    struct Linked;

    impl Opener for Linked {
        fn open(&self, name: &FileName, _role: Role) -> Result<Arc<dyn File>> {
            unreachable!("'{name}' is opened")
        }

        fn canonical(&self, path: &Path) -> Result<PathBuf> {
            let is_link = path == Path::new("/links/disk.qcow2");
            Ok(if is_link { PathBuf::from("/vms/a/disk.qcow2") } else { path.to_owned() })
        }
    }

    fn check_of(top: &str, policy: &BackingPolicy, target: &str) -> bool {
        let listed = [PathBuf::from("/bases/one.qcow2")];
        let gate = Gate::new(policy, &top.into(), &listed, &Linked).unwrap();
        gate.pass(&"/elsewhere/a.qcow2".into(), "backing file", target).is_ok()
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
        let link = FileName::from("/links/disk.qcow2");
        let gate = Gate::new(&BackingPolicy::SameDir, &link, &[], &Linked).unwrap();
        let passed = gate.pass(&link, "backing file", "base.raw").unwrap();
        assert_eq!(passed.0, "/links/base.raw".into());
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
        let overlay = FileName::from("/vms/a/disk.qcow2");
        let path = |name: &str| named_path(&overlay, "backing file", name);
        for name in ["json:{\"driver\":\"file\"}", "File:x", "fd:3", "vhost-user:/run/x", "ssh://h/x", "base:1/x"] {
            let error = path(name).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Denied, "{name}");
            assert!(error.to_string().contains("file, host_device, fd"), "{error}");
        }
        assert!(path("").is_err() && path("a\0b").is_err());
        assert_eq!(path("sub/a:b").unwrap(), Path::new("/vms/a/sub/a:b"));
        assert_eq!(path("/abs").unwrap(), Path::new("/abs"));
        assert_eq!(path("file:/abs:1").unwrap(), Path::new("/abs:1"));
        // As in QEMU, relative to the working directory.
        assert_eq!(path("file:sub/x").unwrap(), Path::new("sub/x"));
        assert_eq!(path("host_device:/dev/sdb").unwrap(), Path::new("/dev/sdb"));
        assert!(path("file:").is_err() && path("file:a\0b").is_err());
        assert!(named_path(&overlay, "data file", "file:/abs").is_err());
    }

    #[test]
    fn a_refused_name_is_shown_without_its_password_and_with_the_reason() {
        let overlay = FileName::from("/vms/a/disk.qcow2");
        for (name, shown, reason) in [
            ("nbd://u:secret@h/x", "nbd://u@h/x", "password"),
            ("nbd+unix://u:secret@/x?socket=/s", "nbd+unix://u@/x?socket=/s", "password"),
            ("nbds+unix://:secret@/x", "nbds+unix://@/x", "password"),
            (r#"json:{"url":"https://u:secret@h/x"}"#, "https://h/x", "not followed"),
        ] {
            for what in [BACKING_FILE, "data file"] {
                let error = named_path(&overlay, what, name).unwrap_err();
                let (kind, said) = (error.kind(), error.to_string());
                assert!(kind == ErrorKind::Denied && said.contains(shown) && !said.contains("secret"), "{said}");
                assert!(said.contains(if what == BACKING_FILE { reason } else { "not followed" }), "{said}");
            }
        }
    }

    #[test]
    fn what_a_server_has_passes_only_where_the_user_named_it_and_then_as_the_user_said_it() {
        let overlay = FileName::from("/vms/a/disk.qcow2");
        let listed = [
            PathBuf::from("https://h/base?v=1#cache=/c"),
            PathBuf::from("nbd://h/x?reconnect-s=60"),
            PathBuf::from("rbd:p/i:conf=/c"),
        ];
        let pass = |policy: BackingPolicy, listed: &[PathBuf], name: &str| {
            Gate::new(&policy, &overlay, listed, &Linked).unwrap().pass(&overlay, "backing file", name)
        };
        let said = |name: &str| FileName::parse(name).unwrap();
        for policy in [BackingPolicy::SameDir, BackingPolicy::Listed, BackingPolicy::Any] {
            for name in ["https://h/base?v=1", "https://h/base?v=1#cache=/etc"] {
                let passed = pass(policy.clone(), &listed, name).unwrap();
                assert_eq!(passed.0, said("https://h/base?v=1#cache=/c"));
            }
            for name in ["nbd://h/x", "nbd://H:10809/%78?connections=16", "nbds://h/x?tls-certificates=/etc"] {
                let passed = pass(policy.clone(), &listed, name).unwrap();
                assert_eq!(passed.0, said("nbd://h/x?reconnect-s=60"), "{name}");
            }
            for name in ["rbd:p/i", "rbd:p/i:mon_host=evil:conf=/etc"] {
                assert_eq!(pass(policy.clone(), &listed, name).unwrap().0, said("rbd:p/i:conf=/c"));
            }
            for name in ["https://h/base?v=2", "http://h/base?v=1", "nbd://h/y", "rbd:p/i@s", "rbd:p/j"] {
                let error = pass(policy.clone(), &listed, name).unwrap_err();
                assert!(error.kind() == ErrorKind::Denied && !error.to_string().contains("v=2"), "{error}");
            }
        }
        assert!(pass(BackingPolicy::Deny, &listed, "nbd://h/x").is_err());
        let anywhere = pass(BackingPolicy::Anywhere, &[], "https://h/other#cache=/etc").unwrap();
        assert_eq!(anywhere.0, said("https://h/other"));
        let anywhere = pass(BackingPolicy::Anywhere, &[], "rbd:p/other:mon_host=evil").unwrap();
        assert_eq!(anywhere.0, said("rbd:p/other"));
        let anywhere = pass(BackingPolicy::Anywhere, &[], "nbd+unix:///x?connections=9&socket=/s").unwrap();
        assert_eq!(anywhere.0, said("nbd+unix:///x?socket=/s"));
        let error = pass(BackingPolicy::Anywhere, &[], "nbds://h/x?tls-certificates=/pki/me").unwrap_err();
        assert!(error.to_string().contains("'nbds://h/x'") && error.to_string().contains("--backing"), "{error}");
    }

    #[test]
    fn what_a_server_has_is_never_a_data_file_which_would_be_written() {
        let overlay = FileName::from("/vms/a/disk.qcow2");
        let listed = ["nbd://h/x", "https://h/base", "rbd:p/i"].map(PathBuf::from);
        for policy in [BackingPolicy::SameDir, BackingPolicy::Listed, BackingPolicy::Any, BackingPolicy::Anywhere] {
            let gate = Gate::new(&policy, &overlay, &listed, &Linked).unwrap();
            for name in ["nbd://h/x", "https://h/base", "rbd:p/i"] {
                assert!(gate.pass(&overlay, BACKING_FILE, name).is_ok());
                let error = gate.pass(&overlay, "data file", name).unwrap_err();
                assert!(
                    error.kind() == ErrorKind::Denied && error.to_string().contains("backing file only"),
                    "{error}"
                );
            }
        }
    }

    #[test]
    fn an_image_behind_a_descriptor_is_near_nothing() {
        let image = FileName::Descriptor(3);
        let listed = [PathBuf::from("/bases/one.qcow2")];
        let pass = |policy: &BackingPolicy, name: &str| {
            Gate::new(policy, &image, &listed, &Linked)
                .unwrap()
                .pass(&image, "backing file", name)
                .map(|passed| passed.0)
        };
        for policy in [BackingPolicy::SameDir, BackingPolicy::Listed] {
            assert_eq!(pass(&policy, "/bases/one.qcow2").unwrap(), "/bases/one.qcow2".into());
            assert!(pass(&policy, "/bases/other.qcow2").is_err());
        }
        assert!(pass(&BackingPolicy::Any, "/bases/other.qcow2").is_ok());
        let message = pass(&BackingPolicy::Any, "other.qcow2").unwrap_err().to_string();
        assert!(message.contains("relative") && message.contains("fd:3"), "{message}");
    }
}
