//! Medians and spreads of a few samples.

/// Returns the median of `values`; zero if there are none.
pub(super) fn median(values: &[f64]) -> f64 {
    quantile(values, 0.5)
}

/// Returns the value below which `fraction` of `values` lie, interpolated between neighbours.
pub(super) fn quantile(values: &[f64], fraction: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let Some(last) = sorted.len().checked_sub(1) else { return 0.0 };
    let place = fraction * last as f64;
    let below = sorted[place.floor() as usize];
    let above = sorted[place.ceil() as usize];
    below + (above - below) * place.fract()
}

/// Returns the ratio of each pair.
pub(super) fn ratios(ours: &[f64], theirs: &[f64]) -> Vec<f64> {
    ours.iter().zip(theirs).filter(|(_, theirs)| **theirs > 0.0).map(|(ours, theirs)| ours / theirs).collect()
}

/// The middle of some ratios, and how far they go.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Spread {
    pub(super) middle: f64,
    least: f64,
    most: f64,
}

impl Spread {
    /// Of the ratios of pairs.
    pub(super) fn of_ratios(ours: &[f64], theirs: &[f64]) -> Self {
        let ratios = ratios(ours, theirs);
        Self { middle: median(&ratios), least: quantile(&ratios, 0.0), most: quantile(&ratios, 1.0) }
    }
}

impl std::fmt::Display for Spread {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:.2} ({:.2} to {:.2})", self.middle, self.least, self.most)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_of_few_values() {
        let values = [4.0, 1.0, 3.0, 2.0];
        assert_eq!(median(&values), 2.5);
        assert_eq!((quantile(&values, 0.0), quantile(&values, 1.0)), (1.0, 4.0));
        assert_eq!(median(&[]), 0.0);
        assert_eq!(ratios(&[2.0, 9.0, 1.0], &[1.0, 3.0, 0.0]), [2.0, 3.0]);
        assert_eq!(Spread::of_ratios(&[2.0, 9.0, 1.0], &[1.0, 3.0, 0.0]).to_string(), "2.50 (2.00 to 3.00)");
    }
}
