//! The default memory for requests' buffers and for the indexes of kept overlays: parts of what the daemon may have.

use std::path::Path;

/// The least and the most memory that buffers get by default.
const BUFFERS_MIN: usize = 16 << 20;
const BUFFERS_MAX: usize = 256 << 20;
const CGROUPS: &str = "/sys/fs/cgroup";

/// Returns a sixteenth of the host's or the control group's memory, within bounds.
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

/// Returns the lowest limit of this process's control group (version 2) and of those above it.
fn cgroup_limit() -> Option<usize> {
    let groups = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    let own = groups.lines().find_map(|line| line.strip_prefix("0::/"))?;
    let limit = |group: &Path| std::fs::read_to_string(group.join("memory.max")).ok()?.trim().parse::<usize>().ok();
    let directory = Path::new(CGROUPS).join(own);
    directory.ancestors().take_while(|group| group.starts_with(CGROUPS)).filter_map(limit).min()
}
