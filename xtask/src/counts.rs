//! Counts of tests, read from the output of `cargo test` and `cargo nextest`.

/// Numbers of tests (or checks) by their result.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Counts {
    pub(crate) passed: u64,
    pub(crate) failed: u64,
    pub(crate) skipped: u64,
    /// How many of those that passed had failed first.
    pub(crate) flaky: u64,
}

impl Counts {
    /// Counts one check.
    pub(crate) fn one(passed: bool) -> Self {
        Self { passed: passed.into(), failed: (!passed).into(), ..Self::default() }
    }

    pub(crate) fn add(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
        self.flaky += other.flaky;
    }

    /// So many of the tests that passed were skipped.
    pub(crate) fn skip(&mut self, tests: u64) {
        let tests = tests.min(self.passed);
        self.passed -= tests;
        self.skipped += tests;
    }

    /// Sums the summary lines among `lines`.
    pub(crate) fn parse<'a>(lines: impl IntoIterator<Item = &'a str>) -> Self {
        let mut counts = Self::default();
        for line in lines {
            // nextest quotes the output of a failed test, indented. That may hold such a line of the test's own binary.
            if let Some((_, rest)) = line.strip_prefix("test result: ").and_then(|line| line.split_once(". ")) {
                counts.add(Self::parse_list(rest.split(';')));
            } else if line.trim_start().starts_with("Summary [")
                && let Some((_, rest)) = line.split_once("run:")
            {
                counts.add(Self::parse_list(rest.split([',', '('])));
            }
        }
        counts
    }

    /// Reads `3 passed`, `1 failed`, `2 ignored` and the like; nextest adds remarks in brackets and rarer results.
    fn parse_list<'a>(items: impl Iterator<Item = &'a str>) -> Self {
        let mut counts = Self::default();
        for item in items {
            let Some((number, what)) = item.trim_matches([' ', ')']).split_once(' ') else { continue };
            let Ok(number) = number.parse::<u64>() else { continue };
            match what.trim() {
                "passed" => counts.passed += number,
                "failed" | "timed out" | "exec failed" => counts.failed += number,
                "ignored" | "skipped" => counts.skipped += number,
                "flaky" => counts.flaky += number,
                _ => {}
            }
        }
        counts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cargo_tests_binaries_add_up() {
        let lines = [
            "running 3 tests",
            "test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 5 filtered out; finished in 0.00s",
            "test result: FAILED. 1 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s",
        ];
        assert_eq!(Counts::parse(lines), Counts { passed: 4, failed: 2, skipped: 1, flaky: 0 });
    }

    #[test]
    fn what_was_skipped_has_not_passed() {
        let mut counts = Counts { passed: 4, failed: 1, skipped: 2, flaky: 0 };
        counts.skip(3);
        assert_eq!(counts, Counts { passed: 1, failed: 1, skipped: 5, flaky: 0 });
    }

    #[test]
    fn nextest_summary_is_understood() {
        let line =
            "     Summary [   1.020s] 12 tests run: 8 passed (2 slow, 1 leaky), 3 failed, 1 timed out, 7 skipped";
        assert_eq!(Counts::parse([line]), Counts { passed: 8, failed: 4, skipped: 7, flaky: 0 });
        let line = "     Summary [   1.020s] 12 tests run: 12 passed (2 slow, 3 flaky), 0 skipped";
        assert_eq!(Counts::parse([line]), Counts { passed: 12, failed: 0, skipped: 0, flaky: 3 });
    }
}
