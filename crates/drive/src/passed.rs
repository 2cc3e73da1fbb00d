//! Descriptors passed to this program at its start: found by number, or by the name that a service manager gave them.

use block::{Error, ErrorKind, Result};
use std::os::fd::RawFd;
use std::os::unix::fs::FileTypeExt;

/// The first one (sd_listen_fds(3)).
const FIRST: RawFd = 3;
/// An upper limit of descriptors: no manager passes more.
const COUNT_MAX: RawFd = 4096;
/// The name of unnamed descriptors in sd_listen_fds_with_names(3).
const UNNAMED: &str = "unknown";

/// Descriptors that a service manager passed, in its order: `LISTEN_FDS` descriptors from number 3 on, with the names
/// in `LISTEN_FDNAMES`. A name may come several times.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PassedDescriptors(Vec<(RawFd, String)>);

impl PassedDescriptors {
    /// Returns the descriptors of this process; none if no manager passed any, or passed them to another process.
    pub fn of_this_process() -> Result<Self> {
        Self::read(std::process::id(), |name| std::env::var(name).ok())
    }

    fn read(process: u32, variable: impl Fn(&str) -> Option<String>) -> Result<Self> {
        let Some(count) = variable("LISTEN_FDS") else { return Ok(Self::default()) };
        if variable("LISTEN_PID").and_then(|pid| pid.parse().ok()) != Some(process) {
            return Ok(Self::default());
        }
        let known = count.parse::<RawFd>().ok().filter(|count| (0..=COUNT_MAX).contains(count));
        let count = known.ok_or_else(|| bad(format!("LISTEN_FDS={count} is not a number of descriptors")))?;
        let names = variable("LISTEN_FDNAMES").unwrap_or_default();
        let names = names.split(':').chain(std::iter::repeat(UNNAMED));
        let named = |name: &str| if name.is_empty() { UNNAMED.to_owned() } else { name.to_owned() };
        Ok(Self((FIRST..FIRST + count).zip(names.map(named)).collect()))
    }

    /// Returns the numbers and names of the descriptors that are sockets.
    pub fn sockets(&self) -> impl Iterator<Item = (RawFd, &str)> {
        let sockets = self.0.iter().filter(|(number, _)| is_socket(*number).unwrap_or(false));
        sockets.map(|(number, name)| (*number, name.as_str()))
    }

    /// Returns the number of a descriptor that a user names by number or, if a manager passed it, by name.
    pub fn number_of(&self, word: &str) -> Result<RawFd> {
        if let Ok(number) = word.parse::<RawFd>() {
            return if number >= 0 {
                Ok(number)
            } else {
                Err(bad(format!("fd:{word}: no descriptor has this number")))
            };
        }
        let mut named = self.0.iter().filter(|(_, name)| name == word);
        match (named.next(), named.next()) {
            (Some((number, _)), None) => Ok(*number),
            (Some(_), Some(_)) => {
                Err(bad(format!("fd:{word}: several descriptors were passed under this name: give its number")))
            }
            (None, _) => Err(bad(format!(
                "fd:{word}: takes the number of a descriptor that was passed, for example fd:3, or its name ({})",
                self.names()
            ))),
        }
    }

    fn names(&self) -> String {
        let names: Vec<&str> = self.0.iter().map(|(_, name)| name.as_str()).collect();
        if names.is_empty() { "none was passed with one".to_owned() } else { names.join(", ") }
    }
}

/// Whether the open descriptor `number` is a socket; `None` if nothing is open there.
pub(crate) fn is_socket(number: RawFd) -> Option<bool> {
    let metadata = std::fs::metadata(format!("/proc/self/fd/{number}")).ok()?;
    Some(metadata.file_type().is_socket())
}

fn bad(message: String) -> Error {
    Error::new(ErrorKind::BadOption, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn passed(variables: &[(&str, &str)]) -> Result<PassedDescriptors> {
        let value = |name: &str| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
        PassedDescriptors::read(77, value)
    }

    #[test]
    fn descriptors_have_the_manager_s_names_in_its_order() {
        let named = [("LISTEN_PID", "77"), ("LISTEN_FDS", "3"), ("LISTEN_FDNAMES", "root:data")];
        let three = passed(&named).unwrap();
        let expected = [(3, "root"), (4, "data"), (5, "unknown")].map(|(number, name)| (number, name.to_owned()));
        assert_eq!(three.0, expected);
        assert_eq!((three.number_of("data").unwrap(), three.number_of("17").unwrap()), (4, 17));
        let message = three.number_of("swap").unwrap_err().to_string();
        assert!(message.contains("root, data, unknown"), "{message}");
        let twice = passed(&[("LISTEN_PID", "77"), ("LISTEN_FDS", "2"), ("LISTEN_FDNAMES", "a:a")]).unwrap();
        assert!(twice.number_of("a").unwrap_err().to_string().contains("several"));
        assert!(twice.number_of("-1").is_err());
    }

    #[test]
    fn descriptors_of_another_process_are_not_ours() {
        for variables in [&[] as &[(&str, &str)], &[("LISTEN_FDS", "2")], &[("LISTEN_PID", "78"), ("LISTEN_FDS", "2")]]
        {
            assert_eq!(passed(variables).unwrap(), PassedDescriptors::default());
        }
        for count in ["-1", "two", "99999999999"] {
            let message = passed(&[("LISTEN_PID", "77"), ("LISTEN_FDS", count)]).unwrap_err().to_string();
            assert!(message.contains("LISTEN_FDS"), "{message}");
        }
    }
}
