//! An idea's table, as Markdown.

use super::Figures;
use super::cells::{Idea, Shows, Verdict};
use crate::bench::page::rate;
use crate::bench::statistics::{median, quantile, ratios};
use std::fmt::Write as _;

/// Returns one line for a person who watches.
pub(super) fn brief(idea: &Idea, figures: &Figures) -> String {
    let words = idea.columns.iter().map(|column| format!("{} {}", column.heading, cell(column.shows, figures)));
    words.collect::<Vec<_>>().join(", ")
}

pub(super) fn write(idea: &Idea, rows: &[(String, Figures)]) -> String {
    let mut text = format!("## {}\n\n{}\n\n", idea.title, wrapped(idea.words));
    let headings = idea.columns.iter().map(|column| column.heading).collect::<Vec<_>>().join(" | ");
    let _ = writeln!(text, "| | {headings} |\n|---|{}", "--:|".repeat(idea.columns.len()));
    for (name, figures) in rows {
        let cells = idea.columns.iter().map(|column| cell(column.shows, figures)).collect::<Vec<_>>().join(" | ");
        let _ = writeln!(text, "| {name} | {cells} |");
    }
    let conclusions: Vec<String> = idea.verdicts.iter().filter_map(|verdict| conclusion(verdict, rows)).collect();
    for paragraph in [conclusions.join(" "), idea.why.to_owned()] {
        if !paragraph.is_empty() {
            let _ = writeln!(text, "\n{}", wrapped(&paragraph));
        }
    }
    text
}

fn cell(shows: Shows, figures: &Figures) -> String {
    match shows {
        Shows::Rate(side) => rate(figures.median(side, "/iops")),
        Shows::Ratio(one, other, what) => {
            let all = ratios(&figures.values(one, what), &figures.values(other, what));
            format!("{:.2} ({:.2}-{:.2})", median(&all), quantile(&all, 0.25), quantile(&all, 0.75))
        }
        Shows::Figure(side, what) => short(figures.median(side, what)),
    }
}

/// Returns a sentence with the median of the cells' medians, if there are such cells.
fn conclusion(verdict: &Verdict, rows: &[(String, Figures)]) -> Option<String> {
    let Verdict { of, what, sides: (one, other), below, above } = verdict;
    let of_cells: Vec<f64> = rows
        .iter()
        .filter(|(name, _)| name.contains(of))
        .map(|(_, figures)| median(&ratios(&figures.values(*one, what), &figures.values(*other, what))))
        .collect();
    let which = if of.is_empty() { "all cells".to_owned() } else { format!("the cells \"{of}\"") };
    // As printed: 0.998 is no loss.
    let middle = (median(&of_cells) * 100.0).round() / 100.0;
    let says = if middle < 1.0 { below } else { above };
    (!of_cells.is_empty()).then(|| format!("Over {which} the median is {middle:.2}: {says}."))
}

/// Formats a figure with three significant digits.
fn short(value: f64) -> String {
    match value {
        0.0 => "0".to_owned(),
        value if value >= 100.0 => format!("{value:.0}"),
        value if value >= 10.0 => format!("{value:.1}"),
        value if value >= 0.1 => format!("{value:.2}"),
        value => format!("{value:.4}"),
    }
}

/// Wraps a text into lines of a page.
pub(super) fn wrapped(words: &str) -> String {
    let mut lines = vec![String::new()];
    for word in words.split_whitespace() {
        let last = lines.last().map_or(0, |line| line.chars().count());
        if last + word.chars().count() >= 118 {
            lines.push(String::new());
        }
        if let Some(line) = lines.last_mut() {
            if !line.is_empty() {
                line.push(' ');
            }
            line.push_str(word);
        }
    }
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::ideas::cells::ideas;
    use serde_json::json;

    #[test]
    fn every_idea_has_a_table_with_its_verdict() {
        let run = |iops: f64| {
            let counters = json!([{"name": "ring_requests", "per_request": 0.125}]);
            json!({"iops": iops, "servers": [{"us_per_request": 2.0}], "counters": counters})
        };
        let side = |iops| json!({"runs": [run(iops), run(iops * 2.0)]});
        let series = json!({"depths": [{"sides": [side(1000.0), side(500.0), side(250.0), side(200.0)]}]});
        for idea in ideas() {
            let rows = idea.cells.iter().map(|cell| (cell.name.clone(), Figures::of(&series).unwrap()));
            let text = write(&idea, &rows.collect::<Vec<_>>());
            assert!(text.starts_with("## ") && text.contains(&format!("| {} | 1.5K |", idea.cells[0].name)), "{text}");
            let joined = text.replace('\n', " ");
            assert_eq!(joined.matches("the median is").count(), idea.verdicts.len(), "every verdict has cells: {text}");
            assert!(joined.contains(idea.why), "{text}");
        }
        let figures = Figures::of(&series).unwrap();
        assert_eq!(cell(Shows::Ratio(0, 1, "/iops"), &figures), "2.00 (2.00-2.00)");
        assert_eq!(cell(Shows::Figure(0, "ring_requests"), &figures), "0.12");
        assert_eq!(cell(Shows::Figure(0, "/latency_us/p99"), &figures), "0");
    }
}
