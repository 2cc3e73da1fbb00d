//! The table of an image's internal snapshots.

use super::text::printable;
use chrono::{DateTime, Local};
use drive::human_size;
use image::Snapshot;
use std::fmt::Write as _;

/// Returns the table as qemu-img 10 shows it; an empty text if there are no snapshots.
pub(crate) fn snapshot_table(snapshots: &[Snapshot]) -> String {
    if snapshots.is_empty() {
        return String::new();
    }
    let mut text = format!(
        "Snapshot list:\n{:<7} {:<16} {:>8} {:>19} {:>15} {:>10}\n",
        "ID", "TAG", "VM_SIZE", "DATE", "VM_CLOCK", "ICOUNT"
    );
    for snapshot in snapshots {
        let date = DateTime::from_timestamp(i64::from(snapshot.date_seconds), 0).unwrap_or_default();
        let date = date.with_timezone(&Local).format("%Y-%m-%d %H:%M:%S").to_string();
        let seconds = snapshot.vm_clock_nanoseconds / 1_000_000_000;
        let (hours, minutes) = (seconds / 3600, seconds / 60 % 60);
        let milliseconds = snapshot.vm_clock_nanoseconds / 1_000_000 % 1000;
        let clock = format!("{hours:04}:{minutes:02}:{:02}.{milliseconds:03}", seconds % 60);
        let icount = snapshot.icount.map_or_else(|| "--".to_owned(), |count| count.to_string());
        let size = human_size(snapshot.vm_state_bytes);
        let (id, name) = (printable(&snapshot.id), printable(&snapshot.name));
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{id:<7} {name:<16} {size:>8} {date:>19} {clock:>15} {icount:>10}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_columns_are_those_of_qemu_img_10() {
        let mut snapshot = Snapshot::default();
        (snapshot.id, snapshot.name) = ("1".to_owned(), "a-name-that-is-longer".to_owned());
        (snapshot.vm_state_bytes, snapshot.vm_clock_nanoseconds) = (3 << 20, 3_723_004_000_000);
        let text = snapshot_table(&[snapshot]);
        let (head, row) = text.trim_end().rsplit_once('\n').unwrap();
        assert_eq!(
            head,
            "Snapshot list:\nID      TAG               VM_SIZE                DATE        VM_CLOCK     ICOUNT"
        );
        assert!(row.starts_with("1       a-name-that-is-longer    3 MiB "), "{row}");
        assert!(row.ends_with(":00  0001:02:03.004         --"), "{row}");
    }
}
