//! Rows of cells as text.

use comfy_table::{CellAlignment, Table, presets};

pub(super) fn table(
    header: &[&str],
    rows: impl IntoIterator<Item = Vec<String>>,
    numbers: std::ops::Range<usize>,
) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_header(header.to_vec());
    for row in rows {
        table.add_row(row);
    }
    for index in numbers {
        if let Some(column) = table.column_mut(index) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table.lines().map(|line| format!("{}\n", line.trim())).collect()
}
