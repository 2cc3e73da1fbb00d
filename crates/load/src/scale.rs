//! Axes: the positions of values, and the values that get a tick.

/// About how many ticks a linear axis has.
const LINEAR_TICKS: f64 = 5.0;
/// With more ticks than this, a logarithmic axis has ticks only at powers of ten.
const LOG_TICKS_MAX: usize = 10;
/// Replaces zero, which has no logarithm.
const LEAST: f64 = 1e-3;

/// Maps a value to its position on an axis, from 0 to 1.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Scale {
    low: f64,
    high: f64,
    is_logarithmic: bool,
    ticks: Vec<f64>,
}

impl Scale {
    /// Makes a scale from zero to a round number that is at least `most`.
    pub(crate) fn from_zero(most: f64) -> Self {
        let most = if most > 0.0 { most } else { 1.0 };
        let step = round_step(most / LINEAR_TICKS);
        // A value just above a step because of rounding does not need another step.
        let count = (most / step - 1e-9).ceil().max(1.0) as u32;
        let ticks = (0..=count).map(|index| f64::from(index) * step).collect();
        Self { low: 0.0, high: f64::from(count) * step, is_logarithmic: false, ticks }
    }

    /// Makes a logarithmic scale between numbers of the form 1, 2, 5 x 10^n that enclose `least` and `most`.
    pub(crate) fn logarithmic(least: f64, most: f64) -> Self {
        let most = most.max(LEAST);
        let least = least.clamp(LEAST, most);
        let powers = least.log10().floor() as i32..=most.log10().ceil() as i32;
        let candidates: Vec<f64> =
            powers.flat_map(|power| [1.0, 2.0, 5.0].map(|digit| digit * 10f64.powi(power))).collect();
        let low = candidates.iter().copied().filter(|tick| *tick <= least * (1.0 + 1e-9)).fold(LEAST / 10.0, f64::max);
        let above = |tick: &f64| *tick >= most * (1.0 - 1e-9) && *tick > low;
        let high = candidates.iter().copied().filter(above).fold(f64::MAX, f64::min).min(low.max(most) * 10.0);
        let mut ticks: Vec<f64> = candidates.into_iter().filter(|tick| (low..=high).contains(tick)).collect();
        if ticks.len() > LOG_TICKS_MAX {
            ticks.retain(|tick| (tick.log10() - tick.log10().round()).abs() < 1e-9);
        }
        Self { low, high, is_logarithmic: true, ticks }
    }

    /// Makes a logarithmic scale with a tick at each measured depth.
    pub(crate) fn depths(depths: impl Iterator<Item = u32>) -> Self {
        let mut ticks: Vec<f64> = depths.map(|depth| f64::from(depth.max(1))).collect();
        ticks.sort_by(f64::total_cmp);
        ticks.dedup();
        let (low, high) = (ticks.first().copied().unwrap_or(1.0), ticks.last().copied().unwrap_or(1.0));
        Self { low, high, is_logarithmic: true, ticks }
    }

    /// Returns the values with a tick.
    pub(crate) fn ticks(&self) -> &[f64] {
        &self.ticks
    }

    /// Returns 0 at the low end, 1 at the high end, and the middle if there is only one value.
    pub(crate) fn position(&self, value: f64) -> f64 {
        let of = |value: f64| if self.is_logarithmic { value.max(LEAST).ln() } else { value };
        let (low, high) = (of(self.low), of(self.high));
        if high > low { ((of(value) - low) / (high - low)).clamp(0.0, 1.0) } else { 0.5 }
    }
}

/// Returns the least of 1, 2, 2.5, 5 x 10^n that is at least `step`.
fn round_step(step: f64) -> f64 {
    let power = 10f64.powi(step.log10().floor() as i32);
    let digits = [1.0, 2.0, 2.5, 5.0];
    digits.into_iter().map(|digit| digit * power).find(|round| *round >= step * (1.0 - 1e-9)).unwrap_or(power * 10.0)
}

/// Returns the label of a tick, with no more digits than needed.
pub(crate) fn number(value: f64) -> String {
    let text = format!("{value:.4}");
    match text.trim_end_matches('0').trim_end_matches('.') {
        "" => "0".to_owned(),
        short => short.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(scale: &Scale) -> Vec<String> {
        scale.ticks().iter().map(|tick| number(*tick)).collect()
    }

    #[test]
    fn axes_end_at_round_numbers_that_hold_all_values() {
        assert_eq!(names(&Scale::from_zero(880.0)), ["0", "200", "400", "600", "800", "1000"]);
        assert_eq!(names(&Scale::from_zero(3.1)), ["0", "1", "2", "3", "4"]);
        assert_eq!(names(&Scale::from_zero(0.5)), ["0", "0.1", "0.2", "0.3", "0.4", "0.5"]);
        assert_eq!(names(&Scale::logarithmic(11.0, 180.0)), ["10", "20", "50", "100", "200"]);
        assert_eq!(names(&Scale::logarithmic(0.4, 9000.0)), ["1", "10", "100", "1000", "10000"]);
        assert_eq!(names(&Scale::depths([8, 1, 3, 8].into_iter())), ["1", "3", "8"]);
    }

    #[test]
    fn values_stand_in_order_and_within_the_axis() {
        for (least, most) in [(0.0, 0.0), (1.0, 1.0), (0.2, 0.3), (3.0, 1e9), (5.0, 2.0)] {
            for scale in [Scale::from_zero(most), Scale::logarithmic(least, most)] {
                let values = [least, f64::midpoint(least, most), most];
                let places = values.map(|value| scale.position(value));
                assert!(places.iter().all(|place| (0.0..=1.0).contains(place)), "{scale:?} {places:?}");
                assert!(least > most || places.is_sorted(), "{scale:?} {places:?}");
            }
        }
        let doubling = Scale::depths([1, 128].into_iter());
        assert!((doubling.position(8.0) - 3.0 / 7.0).abs() < 1e-9);
        assert_eq!(Scale::depths([4].into_iter()).position(4.0), 0.5);
    }
}
