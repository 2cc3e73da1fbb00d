//! Long computations. As many run at once as there are processors, and files take turns.

use block::Work;
use std::collections::VecDeque;

/// The computations that wait. A file with many does not keep a file with few waiting.
pub(crate) struct Computations {
    /// A list for each file with computations; the file to be served next is first.
    files: VecDeque<(u64, VecDeque<Work>)>,
    waiting: usize,
    at_work: usize,
    most: usize,
}

impl Default for Computations {
    fn default() -> Self {
        let most = std::thread::available_parallelism().map_or(1, usize::from);
        Self { files: VecDeque::new(), waiting: 0, at_work: 0, most }
    }
}

impl Computations {
    pub(crate) fn add(&mut self, file: u64, work: Work) {
        self.waiting += 1;
        match self.files.iter_mut().find(|(other, _)| *other == file) {
            Some((_, list)) => list.push_back(work),
            None => self.files.push_back((file, VecDeque::from([work]))),
        }
    }

    /// Returns how many computations can begin.
    pub(crate) fn ready(&self) -> usize {
        self.waiting.min(self.most.saturating_sub(self.at_work))
    }

    pub(crate) fn take(&mut self) -> Option<Work> {
        if self.ready() == 0 {
            return None;
        }
        let (file, mut list) = self.files.pop_front()?;
        let work = list.pop_front()?;
        if !list.is_empty() {
            self.files.push_back((file, list));
        }
        self.waiting -= 1;
        self.at_work += 1;
        Some(work)
    }

    /// Notes that a computation has ended.
    pub(crate) fn ended(&mut self) {
        self.at_work -= 1;
    }

    /// Returns how many computations wait or are at work.
    pub(crate) fn live(&self) -> usize {
        self.waiting + self.at_work
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Arc, Mutex};

    #[test]
    fn a_file_with_much_to_compute_takes_turns_with_others_and_no_more_run_than_there_are_processors() {
        let order = Arc::new(Mutex::new(Vec::new()));
        let mut queue = Computations { most: 2, ..Computations::default() };
        let work = |number: u32| {
            let order = Arc::clone(&order);
            Box::new(move || order.lock().unwrap().push(number)) as Work
        };
        (0..5).for_each(|number| queue.add(7, work(number)));
        queue.add(8, work(10));
        assert_eq!((queue.ready(), queue.live()), (2, 6));
        queue.take().unwrap()();
        queue.take().unwrap()();
        assert!(queue.take().is_none(), "two are at work");
        queue.ended();
        assert_eq!(queue.ready(), 1);
        queue.take().unwrap()();
        assert_eq!(*order.lock().unwrap(), [0, 10, 1]);
        queue.ended();
        queue.ended();
        assert_eq!((queue.ready(), queue.live()), (2, 3));
    }
}
