//! Results on their way to their owners.

/// Results that an engine has taken and hands on one by one. If the owner of a request panics over its result, the next
/// harvest hands on the others. So no request waits for ever for a result that is here.
#[derive(Debug)]
pub(crate) struct Harvest<T> {
    results: Vec<T>,
    /// How many results were handed on.
    next: usize,
}

impl<T: Copy> Harvest<T> {
    pub(crate) fn with_capacity(count: usize) -> Self {
        Self { results: Vec::with_capacity(count), next: 0 }
    }

    /// Returns the list for new results. It is empty unless an earlier harvest was interrupted.
    pub(crate) fn list(&mut self) -> &mut Vec<T> {
        if self.next == self.results.len() {
            self.results.clear();
            self.next = 0;
        }
        &mut self.results
    }

    /// Returns the results that wait to be handed on.
    pub(crate) fn waiting(&self) -> &[T] {
        &self.results[self.next..]
    }

    /// Takes the next result, which then counts as handed on.
    pub(crate) fn next(&mut self) -> Option<T> {
        let result = self.results.get(self.next).copied()?;
        self.next += 1;
        Some(result)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_panic_leaves_is_handed_on_before_what_comes_later() {
        let mut harvest = Harvest::with_capacity(4);
        harvest.list().extend([1, 2, 3]);
        let broken = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            while let Some(result) = harvest.next() {
                assert!(result != 2, "an owner panics");
            }
        }));
        assert!(broken.is_err() && harvest.waiting() == [3]);
        harvest.list().push(4);
        assert_eq!((harvest.next(), harvest.next(), harvest.next()), (Some(3), Some(4), None));
        assert!(harvest.list().is_empty());
    }
}
