//! What images of a cluster are called, in QEMU's words.

use block::{Error, ErrorKind, Result};
use std::ffi::CString;
use std::fmt;

/// The name of an image: `rbd:POOL/[NAMESPACE/]IMAGE[@SNAPSHOT][:KEY=VALUE...]`.
///
/// `id=` is the user, `conf=` the configuration file; every other key is an option of Ceph. A backslash takes a `:`, `/`, `@`
/// or `=` for a part of a name.
#[derive(Clone, PartialEq, Eq)]
pub struct RbdName {
    pub(crate) pool: CString,
    pub(crate) namespace: Option<CString>,
    pub(crate) image: CString,
    pub(crate) snapshot: Option<CString>,
    pub(crate) access: Access,
}

/// Which cluster, and as whom.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub(crate) struct Access {
    pub(crate) user: Option<CString>,
    pub(crate) conf: Option<CString>,
    pub(crate) options: Vec<(CString, CString)>,
}

impl RbdName {
    /// Reads a name. A key itself is refused, as it would stand in the list of processes.
    pub fn parse(text: &str) -> Result<Self> {
        let rest = text.strip_prefix("rbd:").unwrap_or(text);
        let (place, options) = split(rest, ':');
        let shown = format!("rbd:{place}");
        let bad = |why: &str| {
            Error::new(
                ErrorKind::BadOption,
                format!("'{shown}': {why} (an image is named as rbd:POOL/IMAGE[@SNAPSHOT])"),
            )
        };
        let text_of = |part: &str| CString::new(unescaped(part)).map_err(|_| bad("a name has no zero bytes"));
        let (pool, image) = split(place, '/');
        let image = image.ok_or_else(|| bad("a pool and an image belong there, with a '/' between them"))?;
        let (image, snapshot) = split(image, '@');
        let (namespace, image) = match split(image, '/') {
            (namespace, Some(image)) => (Some(namespace), image),
            (image, None) => (None, image),
        };
        if pool.is_empty() || image.is_empty() || snapshot == Some("") {
            return Err(bad("a part of the name is empty"));
        }
        Ok(Self {
            pool: text_of(pool)?,
            namespace: namespace.filter(|namespace| !namespace.is_empty()).map(text_of).transpose()?,
            image: text_of(image)?,
            snapshot: snapshot.map(text_of).transpose()?,
            access: Access::parse(options, bad)?,
        })
    }
}

impl Access {
    fn parse(mut rest: Option<&str>, bad: impl Fn(&str) -> Error) -> Result<Self> {
        let mut access = Self::default();
        while let Some(text) = rest {
            let (pair, more) = split(text, ':');
            rest = more;
            let (key, value) = split(pair, '=');
            let key = unescaped(key);
            let Some(value) = value else { return Err(bad(&format!("the option '{key}' has no value"))) };
            let zero = |_| bad(&format!("the value of '{key}' has a zero byte"));
            let value = CString::new(unescaped(value)).map_err(zero)?;
            match key.trim().replace(['-', ' '], "_").as_str() {
                "" => return Err(bad("an option has no name")),
                "id" => access.user = Some(value),
                "conf" => access.conf = Some(value),
                "key" => {
                    return Err(bad("a key would stand in the list of processes: name a file that has it by keyring="));
                }
                _ => {
                    let key = CString::new(key.as_str()).map_err(|_| bad("the name of an option has a zero byte"))?;
                    access.options.push((key, value));
                }
            }
        }
        Ok(access)
    }
}

/// What is before the first such character that no backslash precedes, and what is behind it.
fn split(text: &str, at: char) -> (&str, Option<&str>) {
    let mut is_escaped = false;
    for (place, char) in text.char_indices() {
        match char {
            _ if is_escaped => is_escaped = false,
            '\\' => is_escaped = true,
            char if char == at => {
                let (before, behind) = text.split_at(place);
                return (before, behind.strip_prefix(at));
            }
            _ => {}
        }
    }
    (text, None)
}

fn unescaped(text: &str) -> String {
    let mut chars = text.chars();
    let mut plain = String::with_capacity(text.len());
    while let Some(char) = chars.next() {
        plain.extend(if char == '\\' { chars.next() } else { Some(char) });
    }
    plain
}

/// The image, without what is said about the cluster: for messages.
impl fmt::Display for RbdName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rbd:{}/", self.pool.to_string_lossy())?;
        if let Some(namespace) = &self.namespace {
            write!(f, "{}/", namespace.to_string_lossy())?;
        }
        f.write_str(&self.image.to_string_lossy())?;
        match &self.snapshot {
            Some(snapshot) => write!(f, "@{}", snapshot.to_string_lossy()),
            None => Ok(()),
        }
    }
}

/// As for messages: what Ceph is told may be secret.
impl fmt::Debug for RbdName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RbdName({self})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(value: &CString) -> &str {
        value.to_str().unwrap()
    }

    #[test]
    fn names_say_which_image_and_which_cluster() {
        let name = RbdName::parse(r"rbd:a\/b/n/im\@ge@sn\:ap:id=me:conf=/c\:d:mon_host=h1,h2:x=y=z").unwrap();
        assert_eq!((text(&name.pool), text(&name.image)), ("a/b", "im@ge"));
        assert_eq!(name.namespace.as_ref().map(text), Some("n"));
        assert_eq!(name.snapshot.as_ref().map(text), Some("sn:ap"));
        assert_eq!(name.access.user.as_ref().map(text), Some("me"));
        assert_eq!(name.access.conf.as_ref().map(text), Some("/c:d"));
        let options: Vec<_> = name.access.options.iter().map(|(key, value)| (text(key), text(value))).collect();
        assert_eq!(options, [("mon_host", "h1,h2"), ("x", "y=z")]);
        let short = RbdName::parse("rbd:pool/image").unwrap();
        assert_eq!((short.to_string(), short.access.clone()), ("rbd:pool/image".to_owned(), Access::default()));
        assert!(short.namespace.is_none() && short.snapshot.is_none());
    }

    #[test]
    fn names_that_lead_nowhere_say_what_is_right_and_show_no_secret() {
        for (name, hint) in [
            ("rbd:image", "a pool and an image"),
            ("rbd:/image", "empty"),
            ("rbd:pool/", "empty"),
            ("rbd:pool/image@", "empty"),
            ("rbd:pool/image:id", "'id' has no value"),
            ("rbd:pool/image:=x", "no name"),
            ("rbd:pool/image:key=AQsecret==", "keyring="),
            ("rbd:pool/image: key =AQsecret==", "keyring="),
            ("rbd:pool/image\0", "zero"),
        ] {
            let error = RbdName::parse(name).unwrap_err().to_string();
            assert!(error.contains(hint) && error.contains("rbd:POOL/IMAGE") && !error.contains("secret"), "{error}");
        }
        let name = RbdName::parse("rbd:pool/image:some_password=secret").unwrap();
        assert!(!format!("{name} {name:?}").contains("secret"));
    }
}
