//! The progress of a save or a restore: step by step, and as a whole.

/// The steps of a save are, in order, those from [`Step::Stop`] to [`Step::Resume`]. A restore checks, serves, starts,
/// reads the state and resumes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// The saved state and disks are compared with the record.
    Look,
    /// The disks are served as they were saved.
    Serve,
    /// The machine's program starts.
    Start,
    /// The machine stops.
    Stop,
    /// The machine's state is written, or read.
    State,
    /// The disks get new layers.
    Freeze,
    /// The record names the new pair.
    Publish,
    /// The data since the last save go into the images.
    Commit,
    /// The machine goes on.
    Resume,
}

impl Step {
    /// The steps of a save, with their parts of the whole.
    pub(crate) const SAVE: &[(Self, f64)] = &[
        (Self::Stop, 0.02),
        (Self::State, 0.58),
        (Self::Freeze, 0.05),
        (Self::Publish, 0.02),
        (Self::Commit, 0.30),
        (Self::Resume, 0.03),
    ];

    /// The steps of a restore.
    pub(crate) const RESTORE: &[(Self, f64)] =
        &[(Self::Look, 0.25), (Self::Serve, 0.10), (Self::Start, 0.10), (Self::State, 0.53), (Self::Resume, 0.02)];

    /// Returns the step's name, for people and programs.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Look => "look",
            Self::Serve => "serve",
            Self::Start => "start",
            Self::Stop => "stop",
            Self::State => "state",
            Self::Freeze => "freeze",
            Self::Publish => "publish",
            Self::Commit => "commit",
            Self::Resume => "resume",
        }
    }
}

/// A moment of a save or a restore.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Moment {
    /// The current step.
    pub step: Step,
    /// The bytes of this step that are done, if it moves bytes.
    pub done_bytes: u64,
    /// Bytes of this step in all, as far as that is known. Rises only.
    pub total_bytes: u64,
    /// `whole` times `all_total_bytes`. Only rises.
    pub all_done_bytes: u64,
    /// Bytes of all steps, as far as they are known. Rises only.
    pub all_total_bytes: u64,
    /// The part of the whole that is done: from 0 to 1, and never less than before.
    pub whole: f64,
}

/// Reports moments, so that their figures only rise.
pub(crate) struct Progress<'a> {
    tell: &'a mut dyn FnMut(Moment),
    steps: &'static [(Step, f64)],
    step: Step,
    step_total: u64,
    step_done: u64,
    /// Bytes of the steps before.
    bytes_before: u64,
    /// The totals that were reported for all steps.
    all_done: u64,
    all_total: u64,
    whole: f64,
}

impl<'a> Progress<'a> {
    /// Makes the progress of these steps, with their parts of the whole.
    pub(crate) fn new(steps: &'static [(Step, f64)], tell: &'a mut dyn FnMut(Moment)) -> Self {
        let step = steps.first().map_or(Step::Stop, |(step, _)| *step);
        Self { tell, steps, step, step_total: 0, step_done: 0, bytes_before: 0, all_done: 0, all_total: 0, whole: 0.0 }
    }

    /// Continues after another progress that has reported all of the first step, of `step_bytes`.
    pub(crate) fn behind_first(
        steps: &'static [(Step, f64)],
        step_bytes: u64,
        tell: &'a mut dyn FnMut(Moment),
    ) -> Self {
        let whole = steps.first().map_or(0.0, |(_, part)| *part);
        let all_done = (step_bytes as f64 * whole) as u64;
        let new = Self::new(steps, tell);
        Self { step_total: step_bytes, step_done: step_bytes, all_total: step_bytes, all_done, whole, ..new }
    }

    /// Begins a step.
    pub(crate) fn begin(&mut self, step: Step) {
        self.bytes_before = self.bytes_before.saturating_add(self.step_total);
        (self.step, self.step_total, self.step_done) = (step, 0, 0);
        self.moved(0, 0);
    }

    /// Notes that a part of the step is done.
    pub(crate) fn moved(&mut self, done_bytes: u64, total_bytes: u64) {
        self.step_total = self.step_total.max(total_bytes).max(done_bytes);
        self.step_done = self.step_done.max(done_bytes);
        let before: f64 = self.steps.iter().take_while(|(step, _)| *step != self.step).map(|(_, part)| part).sum();
        let part = self.steps.iter().find(|(step, _)| *step == self.step).map_or(0.0, |(_, part)| *part);
        let fraction = if self.step_total == 0 { 0.0 } else { self.step_done as f64 / self.step_total as f64 };
        self.whole = self.whole.max(before + part * fraction).min(1.0);
        self.tell();
    }

    /// Notes that everything is done.
    pub(crate) fn end(&mut self) {
        (self.step_done, self.whole) = (self.step_total, 1.0);
        self.tell();
    }

    fn tell(&mut self) {
        let Self { step, step_done: done_bytes, step_total: total_bytes, whole, .. } = *self;
        let all_total_bytes = self.bytes_before.saturating_add(total_bytes);
        // The part that was reported, of a total that may be larger now.
        let told = u128::from(self.all_done) * u128::from(all_total_bytes);
        let told = u64::try_from(told.div_ceil(u128::from(self.all_total.max(1)))).unwrap_or(u64::MAX);
        let all_done_bytes = ((all_total_bytes as f64 * whole) as u64).max(told).min(all_total_bytes);
        (self.all_done, self.all_total) = (all_done_bytes, all_total_bytes);
        (self.tell)(Moment { step, done_bytes, total_bytes, all_done_bytes, all_total_bytes, whole });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_whole_rises_only_and_ends_at_one_whatever_a_step_says() {
        for steps in [Step::SAVE, Step::RESTORE] {
            let mut told = Vec::new();
            let mut tell = |moment: Moment| told.push(moment);
            let mut progress = Progress::new(steps, &mut tell);
            for (step, _) in steps {
                progress.begin(*step);
                for (done, total) in [(1, 10), (5, 8), (4, 20), (30, 20)] {
                    progress.moved(done, total);
                }
            }
            progress.end();
            assert!(told.windows(2).all(|pair| pair[0].whole <= pair[1].whole));
            assert!(told.windows(2).all(|pair| {
                pair[0].all_done_bytes <= pair[1].all_done_bytes && pair[0].all_total_bytes <= pair[1].all_total_bytes
            }));
            let last = told.last().unwrap();
            assert_eq!((last.all_done_bytes, last.all_total_bytes), (30 * steps.len() as u64, 30 * steps.len() as u64));
            assert!(told.iter().all(|moment| moment.done_bytes <= moment.total_bytes && moment.whole <= 1.0));
            assert_eq!(told.last().map(|moment| moment.whole), Some(1.0));
            let parts: f64 = steps.iter().map(|(_, part)| part).sum();
            assert!((parts - 1.0).abs() < 1e-9);
        }
    }

    #[test]
    fn what_goes_on_behind_the_first_step_goes_not_back() {
        let mut told = Vec::new();
        let mut tell = |moment: Moment| told.push(moment);
        let mut progress = Progress::new(Step::RESTORE, &mut tell);
        progress.begin(Step::Look);
        progress.moved(1001, 1001);
        let mut progress = Progress::behind_first(Step::RESTORE, 1001, &mut tell);
        progress.begin(Step::Serve);
        progress.begin(Step::State);
        progress.moved(500, 1001);
        progress.end();
        assert!(told.windows(2).all(|pair| pair[0].whole <= pair[1].whole));
        assert!(told.windows(2).all(|pair| pair[0].all_done_bytes <= pair[1].all_done_bytes));
        assert_eq!(told.last().map(|last| (last.all_done_bytes, last.all_total_bytes)), Some((2002, 2002)));
    }
}
