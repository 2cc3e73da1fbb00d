//! Compares several targets under the same load, one after the other: figures, medians, and ratios with their spread.

use crate::report::BenchReport;
use serde::{Serialize, Serializer};

/// A number of a run, with its name and its heading.
#[derive(Debug, Clone, PartialEq)]
pub struct Figure {
    /// Its name in JSON: `iops`, `p99_us`, `kicks_per_request`.
    pub name: String,
    /// Its heading in a table: "p99, us".
    pub label: String,
    /// The number.
    pub value: f64,
}

/// The spread of several measurements.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Spread {
    /// The median.
    pub median: f64,
    /// The smallest.
    pub min: f64,
    /// The largest.
    pub max: f64,
}

impl Spread {
    /// Returns the spread of some measurements; zeros if there are none.
    #[must_use]
    pub fn of(mut values: Vec<f64>) -> Self {
        values.sort_by(f64::total_cmp);
        let at = |index: usize| values.get(index).copied().unwrap_or_default();
        let last = values.len().saturating_sub(1);
        Self { median: f64::midpoint(at(last / 2), at(last.div_ceil(2))), min: at(0), max: at(last) }
    }
}

/// A figure over several runs.
#[derive(Debug, Clone, PartialEq)]
pub struct FigureSpread {
    /// Its name in JSON.
    pub name: String,
    /// Its heading in a table.
    pub label: String,
    /// Its spread over the runs.
    pub spread: Spread,
}

/// The results of a target.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Side {
    /// The target's name in the tables.
    pub name: String,
    /// The spread of each figure over all runs.
    #[serde(serialize_with = "by_name")]
    pub figures: Vec<FigureSpread>,
    /// The runs in order.
    pub runs: Vec<BenchReport>,
}

/// The figures of the first target divided by those of another, run by run.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Ratios {
    /// The first target.
    pub of: String,
    /// The other.
    pub to: String,
    /// The spread of the ratios of each figure that both have, with one ratio a round.
    #[serde(serialize_with = "by_name")]
    pub figures: Vec<FigureSpread>,
}

/// The results of all targets at one depth.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Comparison {
    /// Requests in flight on each queue.
    pub queue_depth: u32,
    /// The targets, in the order given.
    pub sides: Vec<Side>,
    /// The first target's figures divided by those of each other target.
    pub ratios: Vec<Ratios>,
}

impl Side {
    /// Returns a figure by its name in JSON.
    #[must_use]
    pub fn figure(&self, name: &str) -> Option<Spread> {
        find(&self.figures, name)
    }
}

impl Ratios {
    /// Returns the ratio of a figure by its name in JSON.
    #[must_use]
    pub fn figure(&self, name: &str) -> Option<Spread> {
        find(&self.figures, name)
    }
}

fn find(figures: &[FigureSpread], name: &str) -> Option<Spread> {
    figures.iter().find(|figure| figure.name == name).map(|figure| figure.spread)
}

fn by_name<S: Serializer>(figures: &[FigureSpread], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(figures.iter().map(|figure| (&figure.name, &figure.spread)))
}

impl BenchReport {
    /// Returns the figures by which runs are compared.
    #[must_use]
    pub fn figures(&self) -> Vec<Figure> {
        let figure = |name: &str, label: &str, value| Figure { name: name.to_owned(), label: label.to_owned(), value };
        let mut figures = vec![
            figure("iops", "IOPS", self.iops),
            figure("mib_per_second", "MiB/s", self.bytes_per_second / f64::from(1 << 20)),
            figure("mean_us", "latency mean, us", self.latency_us.mean),
            figure("deviation_us", "latency deviation, us", self.latency_us.deviation),
            figure("p50_us", "latency p50, us", self.latency_us.p50),
            figure("p99_us", "latency p99, us", self.latency_us.p99),
            figure("client_us_per_request", "client CPU, us/request", self.client_us_per_request),
            figure(
                "client_voluntary_switches_per_request",
                "client voluntary switches/request",
                self.client_voluntary_switches_per_request,
            ),
        ];
        if !self.servers.is_empty() {
            let cpu = self.servers.iter().map(|server| server.us_per_request).sum();
            let switches = self.servers.iter().map(|server| server.voluntary_switches_per_request).sum();
            figures.push(figure("server_us_per_request", "server CPU, us/request", cpu));
            figures.push(figure(
                "server_voluntary_switches_per_request",
                "server voluntary switches/request",
                switches,
            ));
        }
        figures.push(figure("completions_per_harvest", "completions/harvest", self.batches.mean));
        if let Some(harvests) = &self.engine_harvests {
            figures.extend([
                figure("engine_completions_per_harvest", "engine completions/harvest", harvests.mean),
                figure("engine_harvest_p10", "engine harvest p10", harvests.p10 as f64),
                figure("engine_harvest_p50", "engine harvest p50", harvests.p50 as f64),
                figure("engine_harvest_p90", "engine harvest p90", harvests.p90 as f64),
                figure("engine_harvest_full_percent", "engine harvests of a full queue, %", harvests.full_percent),
            ]);
        }
        figures.extend(self.counters.iter().map(|counter| Figure {
            name: format!("{}_per_request", counter.name),
            label: format!("{}/request", counter.name.replace('_', " ")),
            value: counter.per_request,
        }));
        figures
    }
}

/// Sums up `rounds`. A round is one run of each target; `names` are the targets' names. Rounds that lack a target are
/// ignored.
#[must_use]
pub fn compare(names: &[String], rounds: &[Vec<BenchReport>]) -> Comparison {
    let rounds: Vec<&Vec<BenchReport>> = rounds.iter().filter(|round| round.len() == names.len()).collect();
    let sides = names.iter().enumerate().map(|(index, name)| {
        let runs: Vec<BenchReport> = rounds.iter().filter_map(|round| round.get(index)).cloned().collect();
        Side { name: name.clone(), figures: spreads(&runs), runs }
    });
    let sides: Vec<Side> = sides.collect();
    let ratios = match sides.split_first() {
        Some((first, others)) => others.iter().map(|other| ratios(first, other)).collect(),
        None => Vec::new(),
    };
    let depth = |round: &&Vec<BenchReport>| round.first().map(|report| report.queue_depth);
    Comparison { queue_depth: rounds.first().and_then(depth).unwrap_or(0), sides, ratios }
}

fn spreads(runs: &[BenchReport]) -> Vec<FigureSpread> {
    let of_runs: Vec<Vec<Figure>> = runs.iter().map(BenchReport::figures).collect();
    let spread = |Figure { name, label, .. }: &Figure| {
        let values = of_runs.iter().filter_map(|figures| value_of(figures, name)).collect();
        FigureSpread { name: name.clone(), label: label.clone(), spread: Spread::of(values) }
    };
    of_runs.first().map(|figures| figures.iter().map(spread).collect()).unwrap_or_default()
}

fn value_of(figures: &[Figure], name: &str) -> Option<f64> {
    figures.iter().find(|figure| figure.name == name).map(|figure| figure.value)
}

/// Computes the ratios of figures that are not zero in any round.
fn ratios(first: &Side, other: &Side) -> Ratios {
    let pairs: Vec<(Vec<Figure>, Vec<Figure>)> =
        first.runs.iter().zip(&other.runs).map(|(first, other)| (first.figures(), other.figures())).collect();
    let ratio = |FigureSpread { name, label, .. }: &FigureSpread| {
        let of_pair = |(first, other): &(Vec<Figure>, Vec<Figure>)| {
            let (first, other) = (value_of(first, name)?, value_of(other, name)?);
            (first > 0.0 && other > 0.0).then(|| first / other)
        };
        let values = pairs.iter().map(of_pair).collect::<Option<Vec<f64>>>()?;
        Some(FigureSpread { name: name.clone(), label: label.clone(), spread: Spread::of(values) })
    };
    let figures = first.figures.iter().filter_map(ratio).collect();
    Ratios { of: first.name.clone(), to: other.name.clone(), figures }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::CounterGrowth;

    fn report(iops: f64, kicks: f64) -> BenchReport {
        let counters = vec![CounterGrowth { name: "kicks".to_owned(), total: 0, per_request: kicks }];
        BenchReport { queue_depth: 8, iops, counters, ..BenchReport::default() }
    }

    #[test]
    fn ratios_are_taken_within_a_round() {
        // Both targets drift by far more than they differ from each other.
        let rounds: Vec<_> = [100.0, 300.0, 200.0].map(|iops| vec![report(iops * 1.5, 0.0), report(iops, 0.5)]).into();
        let names = ["A".to_owned(), "B".to_owned()];
        let comparison = compare(&names, &rounds);
        let iops = comparison.sides[1].figure("iops");
        assert_eq!(iops, Some(Spread { median: 200.0, min: 100.0, max: 300.0 }));
        let ratios = &comparison.ratios[0];
        assert_eq!(ratios.figure("iops"), Some(Spread { median: 1.5, min: 1.5, max: 1.5 }));
        assert_eq!(ratios.figure("kicks_per_request"), None, "nothing by something says nothing");
        assert_eq!(comparison.sides[1].figure("kicks_per_request").map(|kicks| kicks.median), Some(0.5));
    }

    #[test]
    fn a_round_cut_short_does_not_count() {
        let names = ["A".to_owned(), "B".to_owned()];
        let rounds = [vec![report(4.0, 0.0), report(2.0, 0.0)], vec![report(9.0, 0.0)]];
        let comparison = compare(&names, &rounds);
        assert_eq!(comparison.sides[0].runs.len(), 1);
        assert_eq!(comparison.ratios[0].figure("iops").map(|iops| iops.max), Some(2.0));
        assert_eq!(Spread::of(vec![4.0, 1.0, 2.0, 3.0]), Spread { median: 2.5, min: 1.0, max: 4.0 });
    }
}
