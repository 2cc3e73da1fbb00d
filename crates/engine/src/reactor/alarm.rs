//! Wakes a sleeping reactor when its next timer is due, by a timer descriptor that is made when first needed. (The
//! limit of an epoll wait counts milliseconds before Linux 5.11.)

use rustix::event::epoll;
use rustix::time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec};
use std::cell::{Cell, OnceCell};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Alarm {
    /// Holds `None` if no timer descriptor could be made.
    timer: OnceCell<Option<OwnedFd>>,
    set_for: Cell<Option<Instant>>,
}

impl Alarm {
    /// Makes a wait on `epoll` end at `due` at the latest. If the timer cannot do that, returns how long the wait may
    /// take.
    pub(crate) fn set(&self, epoll: &OwnedFd, due: Option<Instant>) -> Option<Duration> {
        if self.set_for.get() == due {
            return None;
        }
        // A time of zero would turn the timer off.
        let left = due.map(|due| due.saturating_duration_since(Instant::now()).max(Duration::from_nanos(1)));
        let is_set = self.timer.get_or_init(|| make(epoll)).as_ref().is_some_and(|timer| {
            let once =
                Itimerspec { it_interval: timespec(Duration::ZERO), it_value: timespec(left.unwrap_or_default()) };
            rustix::time::timerfd_settime(timer, TimerfdTimerFlags::empty(), &once).is_ok()
        });
        self.set_for.set(due.filter(|_| is_set));
        left.filter(|_| !is_set)
    }
}

/// Makes the timer. It is watched for edges, so it is never read.
fn make(epoll: &OwnedFd) -> Option<OwnedFd> {
    let timer = rustix::time::timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC).ok()?;
    let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
    epoll::add(epoll, timer.as_fd(), epoll::EventData::new_u64(0), flags).ok()?;
    Some(timer)
}

fn timespec(duration: Duration) -> Timespec {
    Timespec::try_from(duration).unwrap_or(Timespec { tv_sec: i64::MAX, tv_nsec: 0 })
}
