//! Gives memory that the recent load does not need back to the system when a reactor has time: before it sleeps.

use std::time::{Duration, Instant};

/// The interval at which a reactor that alternates between work and sleep looks at its pools.
const PERIOD: Duration = Duration::from_millis(100);

/// Decides when a reactor looks at its pools.
#[derive(Debug, Default)]
pub(crate) struct PoolTrim {
    looked: Option<Instant>,
    worked_since: bool,
    /// More memory can be given back later.
    again: bool,
}

impl PoolTrim {
    /// Notes that the reactor had work.
    pub(crate) fn worked(&mut self) {
        self.worked_since = true;
    }

    /// Gives memory back, before the reactor sleeps. Returns the longest time that it may sleep; `None` if nothing is
    /// to be given back later.
    pub(crate) fn before_sleep(&mut self, now: Instant) -> Option<Duration> {
        let ago = self.looked.map_or(PERIOD, |looked| now.saturating_duration_since(looked));
        let due = if self.worked_since { PERIOD } else { memory::DECAY_PERIOD };
        if ago < due {
            return (self.worked_since || self.again).then(|| due.saturating_sub(ago));
        }
        if self.worked_since || self.again {
            self.again = memory::maintain_pools();
        }
        self.looked = Some(now);
        self.worked_since = false;
        self.again.then_some(memory::DECAY_PERIOD)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One test: the pools are the whole process's.
    #[test]
    fn a_reactor_is_woken_for_memory_only_where_there_is_some_to_give_back() {
        let (mut trim, start) = (PoolTrim::default(), Instant::now());
        assert_eq!(trim.before_sleep(start), None, "nothing was done yet");
        trim.worked();
        assert_eq!(trim.before_sleep(start), None, "it has looked, and there is nothing");
        trim.worked();
        let soon = trim.before_sleep(start + PERIOD / 4);
        assert_eq!(soon, Some(PERIOD - PERIOD / 4), "work came since the last look");
        assert_eq!(trim.before_sleep(start + PERIOD), None);
        assert_eq!(trim.before_sleep(start + memory::DECAY_PERIOD * 2), None);

        let mut now = start + memory::DECAY_PERIOD * 2 + PERIOD;
        let buffers: Vec<_> = (0..200).map(|_| memory::IoBuf::from_pool(16 << 10).unwrap()).collect();
        trim.worked();
        drop(buffers);
        assert_eq!(trim.before_sleep(now), Some(memory::DECAY_PERIOD), "much will be surplus");
        now += memory::DECAY_PERIOD / 2;
        assert_eq!(trim.before_sleep(now), Some(memory::DECAY_PERIOD / 2), "woken too early: nothing happens");
    }
}
