//! Options that change while a disk runs.

use super::{Manager, lock};
use crate::api::{ChangeDisk, Disk, EventKind};
use crate::options::Options;
use crate::record::Record;
use block::{Error, ErrorKind, Result};
use daemon::NodeId;
use drive::{DiskOptions, DriveOptions, RunningChange, THROTTLING, ThrottleOptions};
use image::{ErrorPolicy, HoldControl, ThrottleMember};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, Weak};

/// Locks of those who change running disks.
#[derive(Debug, Default)]
pub(super) struct Changing {
    /// Held from when limits are read until new ones are recorded and in force. A group's are those of several disks.
    pub(super) limits: Mutex<()>,
    /// Held while the files of a disk are opened in another way, which its storage may make long.
    files: Mutex<BTreeMap<NodeId, Weak<Mutex<()>>>>,
}

impl Changing {
    /// Returns the lock of those who change how the files of a disk are opened.
    pub(super) fn files_of(&self, node: NodeId) -> Arc<Mutex<()>> {
        let mut files = lock(&self.files);
        files.retain(|_, lock| lock.strong_count() > 0);
        let present = files.get(&node).and_then(Weak::upgrade);
        present.unwrap_or_else(|| {
            let new = Arc::default();
            files.insert(node, Arc::downgrade(&new));
            new
        })
    }
}

type Pairs<'a> = Vec<(&'a str, &'a str)>;

/// The changes of a call, by how they are made.
#[derive(Default)]
struct Changes<'a> {
    limits: Pairs<'a>,
    policies: Pairs<'a>,
    files: Pairs<'a>,
}

impl<'a> Changes<'a> {
    fn of(options: &'a Options) -> Result<Self> {
        let mut changes = Self::default();
        for (key, value) in options.pairs() {
            match RunningChange::of_key(key)? {
                RunningChange::Limit => changes.limits.push((key.strip_prefix(THROTTLING).unwrap_or(key), value)),
                RunningChange::Policy => {
                    DriveOptions::check_value(key, value)?;
                    changes.policies.push((key, value));
                }
                RunningChange::Files => changes.files.push((key, value)),
            }
        }
        Ok(changes)
    }

    /// Writes the changes into the record of the disk `name`, and the limits of a group into those of all its disks.
    fn note(&self, record: &mut Record, name: &str, limits: Option<&ThrottleOptions>) {
        let Some(disk) = record.disk_mut(name) else { return };
        self.policies.iter().chain(&self.files).for_each(|(key, value)| disk.options.set(key, *value));
        let Some(limits) = limits else { return };
        let is_throttle = |text: &str| text == "throttle" || text.starts_with("throttle:");
        let old = disk.options.pairs().find(|(key, value)| *key == "filter" && is_throttle(value));
        let group = old.and_then(|(_, text)| text.split(':').find_map(|part| part.strip_prefix("group=")));
        match group.map(str::to_owned) {
            Some(group) => record.set_group_limits(&group, limits.limits),
            None => disk.options.replace("filter", is_throttle, &limits.to_text()),
        }
    }

    /// Returns the new value of a policy, if the call changes it.
    fn policy(&self, wanted: &str) -> Option<ErrorPolicy> {
        let value = self.policies.iter().find(|(key, _)| *key == wanted).map(|(_, value)| *value)?;
        ErrorPolicy::NAMES.into_iter().find(|(name, _)| *name == value).map(|(_, policy)| policy)
    }

    fn to_text(&self) -> String {
        let limits = self.limits.iter().map(|(key, value)| format!("{THROTTLING}{key}={value}"));
        let others = self.policies.iter().chain(&self.files).map(|(key, value)| format!("{key}={value}"));
        limits.chain(others).collect::<Vec<_>>().join(",")
    }
}

impl Manager {
    /// Changes options of a disk while it runs: the limits of its filter `throttle` (`throttling.iops-total` and the
    /// like), what happens when storage fails (`on-error`, `on-no-space`), and how its files are opened (`cache`,
    /// `engine` and others), for which they are reopened. Either all of them are changed or none.
    pub fn change_disk(&self, name: &str, request: &ChangeDisk) -> Result<Disk> {
        let changes = Changes::of(&request.options)?;
        let node = self.node(name)?;
        // What is wrong is found before anything changes.
        self.limits_to_be(name, node, &changes.limits)?;
        let hold = self.hold_to_be(name, node, &changes.policies)?;
        let files = self.changes.files_of(node);
        let _files = (!changes.files.is_empty()).then(|| lock(&files));
        let before = self.daemon.disk_options(node)?;
        let after = before.with_files_as(&changes.files)?;
        // The step that can fail comes first.
        self.open_files_as(node, &before, &after)?;
        self.change_recorded(name, node, &changes).inspect_err(|_| {
            if let Err(error) = self.open_files_as(node, &after, &before) {
                tracing::error!(disk = name, "its files stay opened as the record does not say: {error}");
            }
        })?;
        if let Some(hold) = hold {
            hold.set_policies(changes.policy("on-error"), changes.policy("on-no-space"));
        }
        self.events.publish(EventKind::DiskChanged, Some(name), None, Some(changes.to_text()));
        self.disk_of(node)
    }

    /// Records changes, and sets limits. Limits of a disk or of a group that two calls change at once are both changed.
    fn change_recorded(&self, name: &str, node: NodeId, changes: &Changes<'_>) -> Result<()> {
        let _limits = lock(&self.changes.limits);
        let limits = self.limits_to_be(name, node, &changes.limits)?;
        let new = limits.as_ref().map(|(_, limits)| limits);
        self.record_of(name, node).try_change_with(|record| changes.note(record, name, new))?;
        if let Some((throttle, limits)) = limits {
            throttle.group().set_limits(limits.limits);
        }
        Ok(())
    }

    /// Reopens the files of a disk, unless the options are the same.
    pub(super) fn open_files_as(&self, node: NodeId, before: &DiskOptions, after: &DiskOptions) -> Result<()> {
        if before == after { Ok(()) } else { self.daemon.reopen_as(node, after) }
    }

    /// Returns the throttle that gets new limits, and all its limits afterwards.
    fn limits_to_be(
        &self,
        name: &str,
        node: NodeId,
        changes: &[(&str, &str)],
    ) -> Result<Option<(Arc<ThrottleMember>, ThrottleOptions)>> {
        let Some((first, _)) = changes.first() else { return Ok(None) };
        let throttle = self.daemon.throttles(node)?.into_iter().next().ok_or_else(|| {
            let message = format!(
                "{THROTTLING}{first}: the disk '{name}' has no filter that bounds its rate: add it with filter=throttle"
            );
            Error::new(ErrorKind::Unsupported, message)
        })?;
        let mut limits = ThrottleOptions::of_limits(throttle.group().limits());
        changes.iter().try_for_each(|(key, value)| limits.set(key, value))?;
        Ok(Some((throttle, limits)))
    }

    /// Returns the control of held requests that gets new policies.
    fn hold_to_be(&self, name: &str, node: NodeId, changes: &[(&str, &str)]) -> Result<Option<Arc<HoldControl>>> {
        let Some((key, _)) = changes.first() else { return Ok(None) };
        let hold = self.daemon.hold(node)?;
        if hold.is_none() {
            let message = format!("{key}: the disk '{name}' was added without {key}=hold: remove it and add it anew");
            return Err(Error::new(ErrorKind::Unsupported, message));
        }
        Ok(hold)
    }
}
