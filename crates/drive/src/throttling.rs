//! The limits of a drive's filter `throttle`: `filter=throttle:iops-total=500:bps-read=10M:group=web`.

use crate::keyval;
use crate::size::{parse_integer, parse_size};
use block::{Error, ErrorKind, Result};
use image::{Rate, ThrottleGroup, ThrottleLimits};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// The options of a filter `throttle`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct ThrottleOptions {
    /// The group whose limits the disk shares with others. Without a name, the disk has its own limits.
    pub group: Option<String>,
    /// The limits. In a group, the last disk that gives limits sets them for all. A disk that gives none takes the
    /// group's.
    pub limits: ThrottleLimits,
}

/// A key, and the limit that it sets.
type Bound = (&'static str, fn(&mut ThrottleLimits) -> &mut Rate);

const BOUNDS: [Bound; 6] = [
    ("iops-total", |limits| &mut limits.total.requests),
    ("iops-read", |limits| &mut limits.reads.requests),
    ("iops-write", |limits| &mut limits.writes.requests),
    ("bps-total", |limits| &mut limits.total.bytes),
    ("bps-read", |limits| &mut limits.reads.bytes),
    ("bps-write", |limits| &mut limits.writes.bytes),
];
/// The suffix of a limit's key for its burst.
const BURST: &str = "-burst";
pub(crate) const THROTTLE_KEYS: [&str; 13] = [
    "group",
    "iops-total",
    "iops-read",
    "iops-write",
    "bps-total",
    "bps-read",
    "bps-write",
    "iops-total-burst",
    "iops-read-burst",
    "iops-write-burst",
    "bps-total-burst",
    "bps-read-burst",
    "bps-write-burst",
];

/// The named groups. They live as long as a disk belongs to them.
static GROUPS: Mutex<BTreeMap<String, Weak<ThrottleGroup>>> = Mutex::new(BTreeMap::new());

impl ThrottleOptions {
    /// Makes options of these limits for one disk alone.
    #[must_use]
    pub fn of_limits(limits: ThrottleLimits) -> Self {
        Self { group: None, limits }
    }

    pub(crate) fn parse(pairs: &[(&str, &str)]) -> Result<Self> {
        let mut options = Self::default();
        for (key, value) in pairs {
            match *key {
                "group" if value.is_empty() => return Err(bad("group= needs a name".to_owned())),
                "group" => options.group = Some((*value).to_owned()),
                key => options.set(key, value)?,
            }
        }
        Ok(options)
    }

    /// Changes one limit: `iops-total`, `bps-read-burst`... Zero removes a limit.
    pub fn set(&mut self, key: &str, value: &str) -> Result<()> {
        let (name, is_burst) = key.strip_suffix(BURST).map_or((key, false), |name| (name, true));
        let Some((_, bound)) = BOUNDS.iter().find(|(other, _)| *other == name) else {
            return Err(keyval::unknown("key of the filter 'throttle':", key, &THROTTLE_KEYS));
        };
        let parsed = if name.starts_with("bps") { parse_size(value) } else { parse_integer(value) };
        let number = parsed.map_err(|error| error.in_context(key))?;
        let rate = bound(&mut self.limits);
        match (is_burst, number) {
            (true, number) => rate.burst = number,
            (false, 0) => *rate = Rate::default(),
            (false, number) => rate.per_second = Some(number),
        }
        Ok(())
    }

    /// Returns the filter as a drive option.
    #[must_use]
    pub fn to_text(&self) -> String {
        let mut limits = self.limits;
        let mut text = "throttle".to_owned();
        for (key, bound) in BOUNDS {
            let Rate { per_second, burst } = *bound(&mut limits);
            if let Some(per_second) = per_second {
                text += &format!(":{key}={per_second}");
            }
            if burst > 0 {
                text += &format!(":{key}{BURST}={burst}");
            }
        }
        match &self.group {
            Some(group) => text + ":group=" + group,
            None => text,
        }
    }

    /// Returns the group that these options name, with their limits; without a name, a new group.
    pub(crate) fn group(&self) -> Arc<ThrottleGroup> {
        let Some(name) = &self.group else { return ThrottleGroup::new(self.limits) };
        let mut groups = GROUPS.lock().unwrap_or_else(PoisonError::into_inner);
        groups.retain(|_, group| group.strong_count() > 0);
        match groups.get(name).and_then(Weak::upgrade) {
            Some(group) => {
                if self.limits != ThrottleLimits::default() {
                    group.set_limits(self.limits);
                }
                group
            }
            None => {
                let group = ThrottleGroup::new(self.limits);
                groups.insert(name.clone(), Arc::downgrade(&group));
                group
            }
        }
    }
}

fn bad(message: String) -> Error {
    Error::new(ErrorKind::BadOption, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_survive_their_text() {
        let pairs = [("iops-total", "500"), ("bps-read", "10M"), ("bps-read-burst", "1M"), ("group", "web")];
        let options = ThrottleOptions::parse(&pairs).unwrap();
        assert_eq!(options.limits.total.requests, Rate::of(500));
        assert_eq!(options.limits.reads.bytes, Rate { per_second: Some(10 << 20), burst: 1 << 20 });
        let text = options.to_text();
        assert_eq!(text, "throttle:iops-total=500:bps-read=10485760:bps-read-burst=1048576:group=web");
        let again: Vec<(&str, &str)> = text.split(':').skip(1).filter_map(|pair| pair.split_once('=')).collect();
        assert_eq!(ThrottleOptions::parse(&again).unwrap(), options);
    }

    #[test]
    fn zero_takes_a_bound_away_and_an_unknown_key_is_refused() {
        let mut options = ThrottleOptions::parse(&[("iops-write", "10"), ("iops-write-burst", "5")]).unwrap();
        options.set("iops-write", "0").unwrap();
        assert_eq!(options, ThrottleOptions::default());
        assert!(options.set("iops-toral", "1").unwrap_err().to_string().contains("did you mean 'iops-total'"));
        assert!(options.set("iops-total", "1M").is_err());
        assert!(ThrottleOptions::parse(&[("group", "")]).is_err());
    }

    #[test]
    fn disks_of_one_name_share_a_group_while_one_is_in_it() {
        let name = format!("test-{}", std::process::id());
        let mut options = ThrottleOptions { group: Some(name), ..ThrottleOptions::default() };
        options.set("iops-total", "100").unwrap();
        let first = options.group();
        options.limits = ThrottleLimits::default();
        let second = options.group();
        assert!(Arc::ptr_eq(&first, &second));
        assert_eq!(second.limits().total.requests, Rate::of(100));
        options.set("iops-total", "200").unwrap();
        assert!(Arc::ptr_eq(&first, &options.group()));
        assert_eq!(first.limits().total.requests, Rate::of(200));
        drop((first, second));
        options.limits = ThrottleLimits::default();
        assert_eq!(options.group().limits(), ThrottleLimits::default());
    }
}
