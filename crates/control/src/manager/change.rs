//! Options that change while a disk runs.

use super::Manager;
use crate::api::{ChangeDisk, Disk, EventKind};
use block::{Error, ErrorKind, Result};
use drive::{DriveOptions, ThrottleOptions};

/// What stands before a key of the filter `throttle`, as in QEMU's drive options.
const THROTTLING: &str = "throttling.";
const POLICIES: [&str; 2] = ["on-error", "on-no-space"];

impl Manager {
    /// Changes options of a disk while it runs: the limits of its filter `throttle` (`throttling.iops-total` and the like),
    /// and what happens when storage fails (`on-error`, `on-no-space`). Either all of them are changed or none.
    pub fn change_disk(&self, name: &str, request: &ChangeDisk) -> Result<Disk> {
        let (mut limits, mut policies) = (Vec::new(), Vec::new());
        for (key, value) in request.options.pairs() {
            match key.strip_prefix(THROTTLING) {
                Some(key) => limits.push((key, value)),
                None if POLICIES.contains(&key) => {
                    DriveOptions::check_value(key, value)?;
                    policies.push((key, value));
                }
                None => {
                    let message = format!(
                        "{key}: cannot be changed while the disk runs (can: {THROTTLING}iops-total and the like, {}); \
                         remove the disk and add it anew",
                        POLICIES.join(", ")
                    );
                    return Err(Error::new(ErrorKind::Unsupported, message));
                }
            }
        }
        let change_limits = self.limits_to_be(name, &limits)?;
        let change_policies = self.policies_to_be(name, &policies)?;
        change_limits()?;
        change_policies()?;
        self.disk(name)
    }

    /// Checks new limits. The result puts them in force.
    fn limits_to_be<'a>(&'a self, name: &'a str, changes: &[(&str, &str)]) -> Result<impl FnOnce() -> Result<()> + 'a> {
        let throttles = self.daemon.throttles(self.node(name)?)?;
        let mut new = None;
        if let Some((first, _)) = changes.first() {
            let throttle = throttles.into_iter().next().ok_or_else(|| {
                let message = format!(
                    "{THROTTLING}{first}: the disk '{name}' has no filter that bounds its rate: add it with filter=throttle"
                );
                Error::new(ErrorKind::Unsupported, message)
            })?;
            let mut limits = ThrottleOptions::of_limits(throttle.group().limits());
            changes.iter().try_for_each(|(key, value)| limits.set(key, value))?;
            new = Some((throttle, limits));
        }
        Ok(move || {
            let Some((throttle, mut limits)) = new else { return Ok(()) };
            // Others of its group that are added or restored later bring their own words: these are the last.
            self.records.change(|record| {
                let Some(disk) = record.disk_mut(name) else { return };
                let is_throttle = |text: &str| text == "throttle" || text.starts_with("throttle:");
                let old = disk.options.pairs().find(|(key, value)| *key == "filter" && is_throttle(value));
                let group = old.and_then(|(_, text)| text.split(':').find_map(|part| part.strip_prefix("group=")));
                limits.group = group.map(str::to_owned);
                disk.options.replace("filter", is_throttle, &limits.to_text());
            })?;
            throttle.group().set_limits(limits.limits);
            self.events.publish(EventKind::DiskChanged, Some(name), None, Some(limits.to_text()));
            Ok(())
        })
    }

    /// Checks new policies. The result puts them in force.
    fn policies_to_be<'a>(
        &'a self,
        name: &'a str,
        changes: &[(&'a str, &'a str)],
    ) -> Result<impl FnOnce() -> Result<()> + 'a> {
        let hold = self.daemon.hold(self.node(name)?)?;
        if let (Some((key, _)), None) = (changes.first(), &hold) {
            let message = format!("{key}: the disk '{name}' was added without {key}=hold: remove it and add it anew");
            return Err(Error::new(ErrorKind::Unsupported, message));
        }
        let changes = changes.to_vec();
        Ok(move || {
            let Some(hold) = hold.filter(|_| !changes.is_empty()) else { return Ok(()) };
            self.records.change(|record| {
                let Some(disk) = record.disk_mut(name) else { return };
                changes.iter().for_each(|(key, value)| disk.options.set(key, *value));
            })?;
            let policy = |wanted: &str| {
                let value = changes.iter().find(|(key, _)| *key == wanted).map(|(_, value)| *value)?;
                image::ErrorPolicy::NAMES.into_iter().find(|(name, _)| *name == value).map(|(_, policy)| policy)
            };
            hold.set_policies(policy("on-error"), policy("on-no-space"));
            let what: Vec<String> = changes.iter().map(|(key, value)| format!("{key}={value}")).collect();
            self.events.publish(EventKind::DiskChanged, Some(name), None, Some(what.join(",")));
            Ok(())
        })
    }
}
