//! The table at the end.

use super::measure::Cell;
use comfy_table::{CellAlignment, Table, presets};

/// One workload's rates, in bytes a second.
pub(super) struct Row {
    pub(super) cell: Cell,
    pub(super) guest: f64,
    pub(super) host: f64,
    /// The guest's rate on a disk without storage, if it was measured.
    pub(super) ceiling: Option<f64>,
}

/// Makes the table: guest rate, host rate, ratio, and the guest's highest rate.
pub(super) fn render(rows: &[Row]) -> String {
    let mut table = Table::new();
    let has_ceiling = rows.iter().any(|row| row.ceiling.is_some());
    let ceiling = has_ceiling.then_some("guest's ceiling");
    table.load_style(presets::UTF8_FULL_CONDENSED);
    table.set_header(["", "guest", "host", "guest/host"].into_iter().chain(ceiling));
    for row in rows {
        let rate = |bytes: f64| rate(&row.cell, bytes);
        let ratio = if row.host > 0.0 { format!("{:.2}", row.guest / row.host) } else { "-".to_owned() };
        let cells = [row.cell.label.to_owned(), rate(row.guest), rate(row.host), ratio];
        table.add_row(cells.into_iter().chain(row.ceiling.map(rate)));
    }
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    format!("{table}\n")
}

/// Formats a rate: random workloads in requests a second, sequential ones in bytes a second.
fn rate(cell: &Cell, bytes_per_second: f64) -> String {
    if cell.random {
        let iops = bytes_per_second / f64::from(cell.block_bytes);
        return if iops < 10_000.0 { format!("{iops:.0} IOPS") } else { format!("{:.1}k IOPS", iops / 1000.0) };
    }
    format!("{:.0} MiB/s", bytes_per_second / f64::from(1 << 20))
}
