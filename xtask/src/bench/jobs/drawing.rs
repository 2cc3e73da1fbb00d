//! The longest latency of each ten milliseconds, over time, a panel a side.

use super::servers::Side;
use super::{Course, Job};
use anyhow::{Result, anyhow};
use plotters::prelude::*;
use std::path::Path;

const SIZE: (u32, u32) = (1000, 640);
/// As in the other drawings (Okabe and Ito).
const LONGEST: RGBColor = RGBColor(0xd5, 0x5e, 0x00);
const SLOWEST: RGBColor = RGBColor(0x00, 0x72, 0xb2);
const IN_JOB: RGBColor = RGBColor(0xe8, 0xe8, 0xe8);
/// Latencies are drawn from here on.
const LEAST_MS: f64 = 0.05;

pub(super) fn draw(path: &Path, job: Job, courses: &[(Side, Course)]) -> Result<()> {
    let longest = courses.iter().flat_map(|(_, course)| &course.moments).map(|moment| moment.max_us / 1e3);
    let most_ms = longest.fold(1.0, f64::max) * 1.5;
    let ends = courses.iter().filter_map(|(_, course)| course.moments.last());
    let end_s = ends.map(|moment| moment.start_ms / 1e3).fold(1.0, f64::max);
    let drawn = draw_all(path, job, courses, (most_ms, end_s));
    drawn.map_err(|error| anyhow!("cannot draw {}: {error}", path.display()))
}

fn draw_all(
    path: &Path,
    job: Job,
    courses: &[(Side, Course)],
    (most_ms, end_s): (f64, f64),
) -> Result<(), Box<dyn std::error::Error>> {
    let root = SVGBackend::new(path, SIZE).into_drawing_area();
    root.fill(&WHITE)?;
    let panels = root.split_evenly((courses.len(), 1));
    for (panel, (side, course)) in panels.iter().zip(courses) {
        let title = format!("{}: {side}", job.name());
        let mut chart = ChartBuilder::on(panel)
            .caption(title, ("sans-serif", 18))
            .margin(12)
            .x_label_area_size(36)
            .y_label_area_size(64)
            .build_cartesian_2d(0.0..end_s, (LEAST_MS..most_ms).log_scale())?;
        let (begin, end) = (course.job_ms.0 / 1e3, course.job_ms.1 / 1e3);
        chart.draw_series([Rectangle::new([(begin, LEAST_MS), (end, most_ms)], IN_JOB.filled())])?;
        chart
            .configure_mesh()
            .disable_x_mesh()
            .light_line_style(WHITE)
            .x_desc("seconds; the job runs in the grey part")
            .y_desc("latency, ms")
            .y_label_formatter(&|ms| format!("{ms}"))
            .draw()?;
        let at = |ms: f64| ms / 1e3;
        let maxima = course.moments.iter().filter(|moment| moment.requests > 0);
        let p99s = maxima.clone().map(|moment| (at(moment.start_ms), (moment.p99_us / 1e3).max(LEAST_MS)));
        let maxima = maxima.map(|moment| (at(moment.start_ms), (moment.max_us / 1e3).max(LEAST_MS)));
        let key = |colour: RGBColor| move |(x, y)| PathElement::new([(x, y), (x + 16, y)], colour.stroke_width(2));
        chart.draw_series(LineSeries::new(maxima, LONGEST))?.label("longest of 10 ms").legend(key(LONGEST));
        chart.draw_series(LineSeries::new(p99s, SLOWEST))?.label("p99 of 10 ms").legend(key(SLOWEST));
        chart.configure_series_labels().background_style(WHITE.mix(0.8)).border_style(IN_JOB).draw()?;
    }
    root.present()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::Moment;
    use super::*;

    #[test]
    fn a_drawing_has_a_panel_a_side_and_no_place_that_is_no_number() {
        let moment = |piece: u32| Moment {
            start_ms: f64::from(piece) * 10.0,
            requests: u64::from(piece % 3),
            p99_us: 0.0,
            max_us: f64::from(piece) * 10.0,
        };
        let course = Course { moments: (0..300).map(moment).collect(), job_ms: (1000.0, 2000.0), is_late: false };
        let courses = Side::ALL.map(|side| (side, course.clone()));
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("jobs.svg");
        draw(&path, Job::Mirror, &courses).unwrap();
        let svg = std::fs::read_to_string(path).unwrap();
        assert!(svg.contains("mirror: Ringdisk") && svg.contains("mirror: qemu-storage-daemon"));
        assert!(!svg.contains("NaN") && !svg.contains("inf"));
    }
}
