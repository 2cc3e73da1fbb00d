//! Draws throughput and latency over depth as one self-contained SVG.

use crate::compare::Spread;
use crate::scale::{Scale, number};
use std::fmt::Write as _;

/// A plot of several targets.
#[derive(Debug, Clone, PartialEq)]
pub struct Plot {
    /// The workload.
    pub title: String,
    /// The method of measurement.
    pub subtitle: String,
    /// The size of a request, in bytes. Large requests are drawn as bytes a second, small ones as requests a second.
    pub block_bytes: u32,
    /// The targets' curves.
    pub curves: Vec<Curve>,
}

/// The curve of a target.
#[derive(Debug, Clone, PartialEq)]
pub struct Curve {
    /// Its label in the legend.
    pub label: String,
    /// Its points, in order of depth.
    pub points: Vec<Point>,
}

/// The figures of a target at one depth.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Point {
    /// Requests in flight on each queue.
    pub queue_depth: u32,
    /// Requests a second.
    pub iops: Spread,
    /// Median latency.
    pub p50_us: Spread,
    /// 99th percentile of latency.
    pub p99_us: Spread,
}

/// Colours that colour-blind people can distinguish (Okabe and Ito). Markers differ, too.
const COLOURS: [&str; 8] = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#7f7f7f"];
const WIDTH: f64 = 1000.0;
const LEGEND_TOP: f64 = 78.0;
const LEGEND_ROW: f64 = 20.0;
const PANEL_WIDTH: f64 = 400.0;
const PANEL_HEIGHT: f64 = 300.0;
const PANELS_LEFT: [f64; 2] = [80.0, 580.0];
/// The distance between the panel's sides and the first and last point.
const INSET: f64 = 14.0;
/// The most characters of a label in the legend.
const LABEL_MAX: usize = 110;
/// From this size on, requests are drawn as bandwidth.
const BANDWIDTH_FROM_BYTES: u32 = 64 << 10;
/// With more depths than this, not each is named on the axis.
const DEPTH_TICKS_MAX: usize = 10;

/// A line of a panel: its value of a point, and its style.
struct Line {
    value: Box<dyn Fn(&Point) -> Spread>,
    dashed: bool,
}

/// A panel's place, its scales and its texts.
struct Panel<'a> {
    left: f64,
    top: f64,
    title: &'a str,
    unit: &'a str,
    depths: &'a Scale,
    values: Scale,
    lines: Vec<Line>,
}

impl Plot {
    /// Draws the plot.
    #[must_use]
    pub fn to_svg(&self) -> String {
        let top = LEGEND_TOP + LEGEND_ROW * self.curves.len() as f64 + 34.0;
        let height = top + PANEL_HEIGHT + 62.0;
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" \
             viewBox=\"0 0 {WIDTH} {height}\" font-family=\"'DejaVu Sans', Verdana, Helvetica, sans-serif\" \
             font-size=\"12\" fill=\"#222\">\n<title>{title}</title>\n\
             <rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n\
             <text x=\"24\" y=\"34\" font-size=\"18\" font-weight=\"bold\">{title}</text>\n\
             <text x=\"24\" y=\"55\" fill=\"#666\">{subtitle}</text>\n",
            title = escape(&self.title),
            subtitle = escape(&self.subtitle),
        );
        self.legend(&mut svg);
        let depths = Scale::depths(self.points().map(|point| point.queue_depth));
        for panel in [self.throughput(top, &depths), self.latency(top, &depths)] {
            panel.frame(&mut svg);
            for (index, curve) in self.curves.iter().enumerate() {
                panel.lines.iter().for_each(|line| panel.draw(&mut svg, line, index, curve));
            }
        }
        svg.push_str("</svg>\n");
        svg
    }

    fn points(&self) -> impl Iterator<Item = &Point> {
        self.curves.iter().flat_map(|curve| &curve.points)
    }

    fn legend(&self, svg: &mut String) {
        for (index, curve) in self.curves.iter().enumerate() {
            let y = LEGEND_TOP + LEGEND_ROW * index as f64;
            let colour = colour(index);
            let _ = writeln!(
                svg,
                "<line x1=\"24\" y1=\"{y}\" x2=\"54\" y2=\"{y}\" stroke=\"{colour}\" stroke-width=\"2\"/>\n{}\n\
                 <text x=\"62\" y=\"{}\">{}</text>",
                marker(index, 39.0, y),
                y + 4.0,
                escape(&shorten(&curve.label)),
            );
        }
    }

    fn throughput<'a>(&self, top: f64, depths: &'a Scale) -> Panel<'a> {
        let most = self.points().map(|point| point.iops.max).fold(0.0, f64::max);
        let (unit, factor) = if self.block_bytes >= BANDWIDTH_FROM_BYTES {
            ("MiB/s", f64::from(self.block_bytes) / f64::from(1 << 20))
        } else if most >= 2e6 {
            ("million requests/s", 1e-6)
        } else if most >= 2e3 {
            ("thousand requests/s", 1e-3)
        } else {
            ("requests/s", 1.0)
        };
        let line = Line { value: Box::new(move |point| scaled(point.iops, factor)), dashed: false };
        let values = Scale::from_zero(most * factor);
        Panel { left: PANELS_LEFT[0], top, title: "Throughput", unit, depths, values, lines: vec![line] }
    }

    fn latency<'a>(&self, top: f64, depths: &'a Scale) -> Panel<'a> {
        let most = self.points().map(|point| point.p99_us.max).fold(0.0, f64::max);
        let least = self.points().map(|point| point.p50_us.min).fold(f64::MAX, f64::min);
        let (unit, factor) = if most >= 10_000.0 { ("ms, log scale", 1e-3) } else { ("µs, log scale", 1.0) };
        let lines = vec![
            Line { value: Box::new(move |point| scaled(point.p50_us, factor)), dashed: false },
            Line { value: Box::new(move |point| scaled(point.p99_us, factor)), dashed: true },
        ];
        let values = Scale::logarithmic(least * factor, most * factor);
        Panel { left: PANELS_LEFT[1], top, title: "Latency", unit, depths, values, lines }
    }
}

impl Panel<'_> {
    fn x(&self, depth: f64) -> f64 {
        self.left + INSET + self.depths.position(depth) * (PANEL_WIDTH - 2.0 * INSET)
    }

    fn y(&self, value: f64) -> f64 {
        self.top + (1.0 - self.values.position(value)) * PANEL_HEIGHT
    }

    /// Draws titles, grid and ticks.
    fn frame(&self, svg: &mut String) {
        let (left, top, right, bottom) = (self.left, self.top, self.left + PANEL_WIDTH, self.top + PANEL_HEIGHT);
        let _ = writeln!(svg, "<text x=\"{left}\" y=\"{}\" font-weight=\"bold\">{}</text>", top - 12.0, self.title);
        if self.lines.len() > 1 {
            let (y, text_y) = (top - 16.0, top - 12.0);
            for (x, name, dash) in [(right - 150.0, "p50", ""), (right - 68.0, "p99", " stroke-dasharray=\"5 4\"")] {
                let _ = writeln!(
                    svg,
                    "<line x1=\"{x}\" y1=\"{y}\" x2=\"{}\" y2=\"{y}\" stroke=\"#444\" stroke-width=\"2\"{dash}/>\
                     <text x=\"{}\" y=\"{text_y}\">{name}</text>",
                    x + 34.0,
                    x + 41.0,
                );
            }
        }
        for tick in self.values.ticks() {
            let y = self.y(*tick);
            let _ = writeln!(
                svg,
                "<line x1=\"{left}\" y1=\"{y:.1}\" x2=\"{right}\" y2=\"{y:.1}\" stroke=\"#e4e4e4\"/>\
                 <text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
                left - 8.0,
                y + 4.0,
                number(*tick),
            );
        }
        let ticks = self.depths.ticks();
        for tick in ticks.iter().step_by(ticks.len().div_ceil(DEPTH_TICKS_MAX).max(1)) {
            let x = self.x(*tick);
            let _ = writeln!(
                svg,
                "<line x1=\"{x:.1}\" y1=\"{bottom}\" x2=\"{x:.1}\" y2=\"{}\" stroke=\"#888\"/>\
                 <text x=\"{x:.1}\" y=\"{}\" text-anchor=\"middle\">{tick}</text>",
                bottom + 5.0,
                bottom + 19.0,
            );
        }
        let (middle_x, middle_y) = (f64::midpoint(left, right), f64::midpoint(top, bottom));
        let title_x = left - 56.0;
        let _ = writeln!(
            svg,
            "<path d=\"M{left} {top}V{bottom}H{right}\" fill=\"none\" stroke=\"#888\"/>\n\
             <text x=\"{middle_x}\" y=\"{}\" text-anchor=\"middle\">Requests in flight on each queue (log scale)</text>\n\
             <text transform=\"translate({title_x} {middle_y}) rotate(-90)\" text-anchor=\"middle\">{} ({})</text>",
            bottom + 42.0,
            self.title,
            self.unit,
        );
    }

    /// Draws the spread as a band, and the medians as a line with markers.
    fn draw(&self, svg: &mut String, line: &Line, index: usize, curve: &Curve) {
        let colour = colour(index);
        let at = |point: &Point, pick: fn(&Spread) -> f64| {
            (self.x(f64::from(point.queue_depth)), self.y(pick(&(line.value)(point))))
        };
        let upper = curve.points.iter().map(|point| at(point, |spread| spread.max));
        let lower = curve.points.iter().rev().map(|point| at(point, |spread| spread.min));
        let medians: Vec<(f64, f64)> = curve.points.iter().map(|point| at(point, |spread| spread.median)).collect();
        let (dash, opacity) = if line.dashed { (" stroke-dasharray=\"5 4\"", 0.08) } else { ("", 0.14) };
        let _ = writeln!(
            svg,
            "<polygon points=\"{}\" fill=\"{colour}\" fill-opacity=\"{opacity}\"/>\n\
             <polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\" \
             stroke-linejoin=\"round\"{dash}/>",
            coordinates(upper.chain(lower)),
            coordinates(medians.iter().copied()),
        );
        for (x, y) in medians {
            let _ = writeln!(svg, "{}", marker(index, x, y));
        }
    }
}

fn coordinates(points: impl Iterator<Item = (f64, f64)>) -> String {
    points.map(|(x, y)| format!("{x:.1},{y:.1}")).collect::<Vec<_>>().join(" ")
}

fn colour(index: usize) -> &'static str {
    COLOURS.get(index % COLOURS.len()).copied().unwrap_or("#000000")
}

/// Draws a marker: a shape for each target, filled with its colour.
fn marker(index: usize, x: f64, y: f64) -> String {
    let colour = colour(index);
    let polygon = |points: &[(f64, f64)]| {
        let points = coordinates(points.iter().map(|(dx, dy)| (x + dx, y + dy)));
        format!("<polygon points=\"{points}\" fill=\"{colour}\"/>")
    };
    match index % 4 {
        0 => format!("<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3.5\" fill=\"{colour}\"/>"),
        1 => polygon(&[(-3.3, -3.3), (3.3, -3.3), (3.3, 3.3), (-3.3, 3.3)]),
        2 => polygon(&[(0.0, -4.4), (4.2, 3.2), (-4.2, 3.2)]),
        _ => polygon(&[(0.0, -4.8), (4.8, 0.0), (0.0, 4.8), (-4.8, 0.0)]),
    }
}

fn scaled(spread: Spread, factor: f64) -> Spread {
    Spread { median: spread.median * factor, min: spread.min * factor, max: spread.max * factor }
}

/// Cuts the middle out of a label that is too long for the legend.
fn shorten(label: &str) -> String {
    let chars: Vec<char> = label.chars().collect();
    if chars.len() <= LABEL_MAX {
        return label.to_owned();
    }
    let half = LABEL_MAX / 2;
    let (begin, end) = (chars.iter().take(half), chars.iter().skip(chars.len() - half));
    begin.chain(&['…']).chain(end).collect()
}

/// Escapes XML text. Characters that XML does not allow become replacement characters.
fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for char in text.chars() {
        match char {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            char if char.is_control() => escaped.push('\u{fffd}'),
            char => escaped.push(char),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    fn point(queue_depth: u32, iops: f64) -> Point {
        let spread = |value: f64| Spread { median: value, min: value * 0.9, max: value * 1.1 };
        let us = 1e6 * f64::from(queue_depth) / iops;
        Point { queue_depth, iops: spread(iops), p50_us: spread(us), p99_us: spread(us * 3.0) }
    }

    fn plot(labels: &[&str]) -> Plot {
        let curve = |label: &&str| Curve {
            label: (*label).to_owned(),
            points: (0..8).map(|power| point(1 << power, 1e5 * f64::from(power + 1))).collect(),
        };
        Plot {
            title: "4 KiB random read".to_owned(),
            subtitle: "medians of 5".to_owned(),
            block_bytes: 4096,
            curves: labels.iter().map(curve).collect(),
        }
    }

    /// The points of all lines, by drawing order: throughput of each target, then p50 and p99 of each.
    fn lines(svg: &str) -> Vec<Vec<(f64, f64)>> {
        let pair = |text: &str| {
            let (x, y) = text.split_once(',').unwrap();
            (x.parse().unwrap(), y.parse().unwrap())
        };
        let points = |text: &str| text.split('"').next().unwrap().split(' ').map(pair).collect();
        svg.split("<polyline points=\"").skip(1).map(points).collect()
    }

    #[test]
    fn each_target_has_its_lines_where_its_figures_are() {
        let lines = lines(&plot(&["A", "B"]).to_svg());
        assert_eq!(lines.len(), 6);
        for line in &lines {
            assert_eq!(line.len(), 8);
            // Depths double, so on an axis of logarithms they stand evenly.
            let steps: Vec<f64> = line.windows(2).map(|pair| pair[1].0 - pair[0].0).collect();
            assert!(steps.iter().all(|step| (step - steps[0]).abs() < 0.2), "{steps:?}");
        }
        // 800 000 requests a second of an axis that ends at 1000 thousand; lines go up, where y is less.
        let (first, last) = (lines[0][0].1, lines[0][7].1);
        let height_of_100k = (first - last) / 7.0;
        assert!((height_of_100k - PANEL_HEIGHT / 10.0).abs() < 0.2, "{height_of_100k}");
        let (p50, p99) = (&lines[2], &lines[3]);
        assert!(p50.iter().zip(p99).all(|(p50, p99)| p99.1 < p50.1 && p99.0 == p50.0));
    }

    #[test]
    fn labels_cannot_break_the_drawing() {
        let svg = plot(&["<a> & \"b\"\u{1}", &"x".repeat(500)]).to_svg();
        assert!(svg.contains("&lt;a&gt; &amp; &quot;b&quot;\u{fffd}") && !svg.contains("<a>"));
        assert!(!svg.contains(&"x".repeat(LABEL_MAX)));
        assert!(!svg.contains("NaN") && !svg.contains("inf"), "every place is a number");
    }

    #[test]
    fn one_depth_and_nothing_measured_can_be_drawn_too() {
        let mut one = plot(&["A"]);
        one.curves[0].points.truncate(1);
        let mut none = plot(&["A"]);
        none.curves[0].points = vec![point(1, 1.0)];
        let zero = Spread::default();
        none.curves[0].points[0] = Point { queue_depth: 1, iops: zero, p50_us: zero, p99_us: zero };
        let mut empty = plot(&[]);
        empty.curves.clear();
        for plot in [one, none, empty] {
            let svg = plot.to_svg();
            assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
        }
    }
}
