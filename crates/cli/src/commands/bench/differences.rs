//! Differences between the targets of a comparison, other than the measured program.

use super::target::Target;
use drive::DiskOptions;

/// An option of a disk, and how it is read from the options.
type DiskOption = (&'static str, fn(&DiskOptions) -> String);

const OPTIONS: [DiskOption; 3] = [
    ("cache", |disk| disk.cache.to_string()),
    ("engine", |disk| disk.engine.to_string()),
    ("sync", |disk| on_or_off(disk.sync)),
];

fn on_or_off(is_on: bool) -> String {
    if is_on { "on" } else { "off" }.to_owned()
}

/// Returns the options in which the targets differ, one a line: `cache: A none, B writeback`. A server's options are
/// not known.
pub(super) fn differences(targets: &[Target]) -> Vec<String> {
    let line = |(name, value): &DiskOption| {
        let values: Vec<(&str, Option<String>)> =
            targets.iter().map(|target| (target.name.as_str(), target.disk_options().map(value))).collect();
        let first = values.iter().find_map(|(_, value)| value.as_ref())?;
        let is_same = values.iter().all(|(_, value)| value.as_ref().is_none_or(|value| value == first));
        let known = |(name, value): &(&str, Option<String>)| match value {
            Some(value) => format!("{name} {value}"),
            None => format!("{name} not known (the server's)"),
        };
        let is_partly_known = values.iter().any(|(_, value)| value.is_none());
        (!is_same || is_partly_known)
            .then(|| format!("{name}: {}", values.iter().map(known).collect::<Vec<_>>().join(", ")))
    };
    // Unknown values are shown for the first two options only.
    let matters = |index: usize, line: &String| index < 2 || !line.contains("not known");
    let lines = OPTIONS.iter().enumerate().filter_map(|(index, option)| Some((index, line(option)?)));
    lines.filter(|(index, line)| matters(*index, line)).map(|(_, line)| line).collect()
}
