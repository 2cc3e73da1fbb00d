//! Times as people write them.

use crate::output::usage;

const UNITS: [(&str, f64); 4] = [("ms", 1.0), ("s", 1e3), ("m", 6e4), ("h", 3.6e6)];

/// Reads `30s`, `500ms`, `1.5m` or `2h`. Returns milliseconds, at least one.
pub(super) fn parse_ms(text: &str) -> anyhow::Result<u64> {
    let split = text.find(|char: char| !char.is_ascii_digit() && char != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let unit = UNITS.iter().find(|(name, _)| *name == unit).map(|(_, ms)| ms);
    let ms = number.parse::<f64>().ok().zip(unit).map(|(number, unit)| (number * unit).round());
    match ms {
        Some(ms) if (1.0..=1e15).contains(&ms) => Ok(ms as u64),
        _ => Err(usage(format!("'{text}' is no time: write 30s, 500ms, 5m or 2h"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_a_unit() {
        let good = [("30s", 30_000), ("50ms", 50), ("1.5m", 90_000), ("2h", 7_200_000)];
        good.into_iter().for_each(|(text, ms)| assert_eq!(parse_ms(text).unwrap(), ms, "{text}"));
        ["30", "", "s", "-1s", "0ms", "1d", "1e3s", "..s"]
            .into_iter()
            .for_each(|text| assert!(parse_ms(text).is_err()));
    }
}
