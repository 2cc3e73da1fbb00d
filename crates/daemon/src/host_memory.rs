//! How much memory the daemon may have, and the part of it that requests' buffers get where nobody says how much.

use std::path::Path;

/// The least and the most that buffers get unasked.
const BUFFERS_MIN: usize = 16 << 20;
const BUFFERS_MAX: usize = 256 << 20;
const CGROUPS: &str = "/sys/fs/cgroup";

/// A sixteenth of what there is, within bounds.
pub(crate) fn default_buffer_memory() -> usize {
    (memory_bytes() / 16).clamp(BUFFERS_MIN, BUFFERS_MAX)
}

/// What the indexes of kept overlays get: a quarter of what there is.
pub(crate) fn default_index_memory() -> usize {
    memory_bytes() / 4
}

fn memory_bytes() -> usize {
    let info = rustix::system::sysinfo();
    let host_bytes = usize::try_from(info.totalram).unwrap_or(usize::MAX).saturating_mul(info.mem_unit as usize);
    cgroup_limit().map_or(host_bytes, |limit| limit.min(host_bytes))
}

/// The least limit of this process' control group (version 2) and of those above it.
fn cgroup_limit() -> Option<usize> {
    let groups = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    let own = groups.lines().find_map(|line| line.strip_prefix("0::/"))?;
    let limit = |group: &Path| std::fs::read_to_string(group.join("memory.max")).ok()?.trim().parse::<usize>().ok();
    let directory = Path::new(CGROUPS).join(own);
    directory.ancestors().take_while(|group| group.starts_with(CGROUPS)).filter_map(limit).min()
}
