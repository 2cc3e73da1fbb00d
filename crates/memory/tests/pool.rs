//! Request contexts under load: the whole pool as its users get it. Every test has types, and so pools, of its own.

use ringdisk_memory::{Pool, PoolBox, PoolContext, PoolStats, Pooled, pooled};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::mpsc::{Receiver, Sender, channel, sync_channel};
use std::thread;

trait Counted {
    fn counters() -> &'static [AtomicU64; 2];

    fn created() -> u64 {
        Self::counters()[0].load(SeqCst)
    }

    fn dropped() -> u64 {
        Self::counters()[1].load(SeqCst)
    }
}

/// Declares a context with counters of its creations and destructions.
macro_rules! counted {
    ($name:ident) => {
        struct $name {
            live: AtomicBool,
        }

        impl Counted for $name {
            fn counters() -> &'static [AtomicU64; 2] {
                static COUNTERS: [AtomicU64; 2] = [AtomicU64::new(0), AtomicU64::new(0)];
                &COUNTERS
            }
        }

        impl PoolContext for $name {
            fn create() -> Self {
                Self::counters()[0].fetch_add(1, SeqCst);
                Self { live: AtomicBool::new(true) }
            }
        }

        impl Drop for $name {
            fn drop(&mut self) {
                assert!(self.live.swap(false, SeqCst), "dropped twice");
                Self::counters()[1].fetch_add(1, SeqCst);
            }
        }

        pooled!($name);
    };
}

fn total<T: Pooled>() -> u64 {
    T::pool().stats().total
}

/// Ends decay periods until nothing is remembered, as if time passed.
fn forget_the_load<T: Pooled>(pool: &Pool<T>) {
    for _ in 0..2 {
        pool.end_period();
    }
    pool.maintain();
}

/// The threads are ordinary ones, not scoped: joining waits until their lists are gone too.
fn on_a_thread<R: Send + 'static>(work: impl FnOnce() -> R + Send + 'static) -> R {
    thread::spawn(work).join().unwrap()
}

#[test]
fn one_thread_creates_as_many_as_it_holds_at_once() {
    counted!(Context);
    on_a_thread(|| {
        for round in 0..1000 {
            let held: Vec<_> = (0..round % 100).map(|_| PoolBox::<Context>::take()).collect();
            assert!(held.iter().all(|context| context.live.load(SeqCst)));
        }
        assert_eq!(Context::created(), 99);
    });
}

#[test]
fn a_context_comes_back_reset_with_its_memory() {
    struct Context(Vec<u8>);
    impl PoolContext for Context {
        fn create() -> Self {
            Self(Vec::new())
        }
        fn reset(&mut self) {
            self.0.clear();
        }
    }
    pooled!(Context);
    on_a_thread(|| {
        let mut context = PoolBox::<Context>::take();
        context.0.extend([1; 1000]);
        let address = context.0.as_ptr();
        drop(context);
        let context = PoolBox::<Context>::take();
        assert!(context.0.is_empty() && context.0.capacity() >= 1000 && context.0.as_ptr() == address);
    });
}

/// A thread that takes up to `depth` contexts and one that frees them, for `requests` requests after warm-up. Returns
/// how many contexts existed after warm-up.
fn hand_over<T: Pooled + Counted>(depth: u64, requests: u64) -> u64 {
    let (sender, receiver): (Sender<PoolBox<T>>, Receiver<_>) = channel();
    let in_flight = Arc::new(AtomicU64::new(0));
    let freed = Arc::clone(&in_flight);
    let freer = thread::spawn(move || {
        for context in receiver {
            drop(context);
            freed.fetch_sub(1, SeqCst);
        }
    });
    let wait_for_fewer_than = |limit| {
        while in_flight.load(SeqCst) >= limit {
            thread::yield_now();
        }
    };
    let send = |context| {
        in_flight.fetch_add(1, SeqCst);
        sender.send(context).unwrap();
    };
    // Warm-up: all in flight but one while the freer's list is as long as it can get. It grows one by one.
    let mut held: VecDeque<_> = (0..depth).map(|_| PoolBox::take()).collect();
    for _ in 0..depth {
        held.pop_front().into_iter().for_each(&send);
        wait_for_fewer_than(1);
        held.push_back(PoolBox::take());
    }
    let warm = total::<T>();
    held.into_iter().for_each(send);
    for _ in 0..requests {
        wait_for_fewer_than(depth);
        send(PoolBox::take());
    }
    drop(sender);
    freer.join().unwrap();
    warm
}

#[test]
fn a_thread_that_only_frees_feeds_one_that_only_takes_within_a_tenth_of_the_peak() {
    counted!(Context);
    for depth in [128, 256, 1024] {
        on_a_thread(move || {
            let warm = hand_over::<Context>(depth, 100_000);
            let stats = Context::pool().stats();
            let PoolStats { total, peak_in_flight, .. } = stats;
            assert_eq!(total, warm, "contexts created after warm-up");
            assert!(total >= depth && total * 10 <= depth * 11, "{total} contexts for {depth} in flight");
            assert_eq!(total, Context::created() - Context::dropped());
            assert!(peak_in_flight * 10 >= depth * 9 && peak_in_flight <= total, "{stats:?}");
        });
        assert_eq!(Context::pool().stats().in_flight, 0);
        forget_the_load(Context::pool());
        Context::pool().clear();
    }
    assert_eq!(Context::created(), Context::dropped());
}

/// A queue as a reactor runs it: filled up to its depth, then completions in bursts. It works in steps of a few
/// requests, so that another queue may work between any two of them.
struct Queue {
    random: Box<dyn FnMut() -> usize + Send>,
    completions_left: usize,
}

impl Queue {
    const DEPTH: usize = 128;

    fn new(seed: u64) -> Self {
        Self { random: Box::new(fastrand(seed)), completions_left: 0 }
    }

    fn step<T: Pooled>(&mut self, in_flight: &mut VecDeque<PoolBox<T>>) {
        let some = 1 + (self.random)() % 16;
        if self.completions_left > 0 {
            let some = some.min(self.completions_left);
            in_flight.drain(..some);
            self.completions_left -= some;
        } else {
            in_flight.extend((in_flight.len()..Self::DEPTH).take(some).map(|_| PoolBox::take()));
            if in_flight.len() == Self::DEPTH {
                self.completions_left = 1 + (self.random)() % Self::DEPTH;
            }
        }
    }
}

/// The steps of two reactors. A seed decides their order, because what one finds depends on what the other holds idle
/// at that moment.
#[test]
fn two_reactors_at_depth_128_need_at_most_273_contexts_and_create_none_after_warm_up() {
    counted!(Context);
    for seed in 0..4 {
        let (done, is_done) = sync_channel(0);
        let reactor = |index: u64| {
            let (order, orders) = sync_channel::<()>(0);
            let done = done.clone();
            let thread = thread::spawn(move || {
                let mut queue = Queue::new(2 * seed + index);
                let mut in_flight = VecDeque::<PoolBox<Context>>::new();
                for () in orders {
                    queue.step(&mut in_flight);
                    done.send(()).unwrap();
                }
            });
            (order, thread)
        };
        let (orders, threads): (Vec<_>, Vec<_>) = [0, 1].map(reactor).into_iter().unzip();
        let mut random = fastrand(100 + seed);
        let before = Context::created();
        let mut after_warm_up = 0;
        for step in 0..60_000 {
            if step == 20_000 {
                after_warm_up = Context::created() - before;
            }
            orders[random() % 2].send(()).unwrap();
            is_done.recv().unwrap();
        }
        let at_the_end = Context::created() - before;
        assert_eq!(after_warm_up, at_the_end, "contexts created after warm-up, seed {seed}");
        assert!((256..=273).contains(&at_the_end), "{at_the_end} contexts for 256 in flight, seed {seed}");
        drop(orders);
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        forget_the_load(Context::pool());
        Context::pool().clear();
    }
}

/// Real threads, whose bursts are out of step, but in lockstep so that the peak is known. The machine decides when they
/// hinder each other. So contexts may be created late, but not more of them.
#[test]
fn two_reactors_that_run_freely_need_at_most_273_contexts_too() {
    counted!(Context);
    let step = Arc::new(std::sync::Barrier::new(2));
    let reactor = |index: u64| {
        let step = Arc::clone(&step);
        move || {
            let mut random = fastrand(index);
            let mut queue: VecDeque<_> = VecDeque::new();
            for _ in 0..20_000 {
                while queue.len() < Queue::DEPTH {
                    queue.push_back(PoolBox::<Context>::take());
                }
                step.wait();
                queue.drain(..1 + random() % Queue::DEPTH);
            }
            step.wait();
            Context::created()
        }
    };
    let threads = [thread::spawn(reactor(1)), thread::spawn(reactor(2))];
    for thread in threads {
        let created = thread.join().unwrap();
        assert!((256..=273).contains(&created), "{created} contexts for 256 in flight");
    }
}

/// A small generator: the test depends on variety, not on quality.
fn fastrand(seed: u64) -> impl FnMut() -> usize {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 33) as usize
    }
}

#[test]
fn memory_is_given_back_when_the_load_falls() {
    counted!(Context);
    on_a_thread(|| {
        let pool = Context::pool();
        let kept: Vec<_> = (0..10).map(|_| PoolBox::<Context>::take()).collect();
        drop((0..2000).map(|_| PoolBox::<Context>::take()).collect::<Vec<_>>());
        assert_eq!(total::<Context>(), 2010);
        pool.end_period();
        assert!(pool.maintain(), "most of them will be surplus once the peak is forgotten");
        assert_eq!(total::<Context>(), 2010, "a peak is remembered for a period at least");
        forget_the_load(pool);
        assert!(!pool.maintain(), "nothing more to come");
        assert!(total::<Context>() <= 10 + 200, "{} contexts for 10 in flight", total::<Context>());
        assert_eq!(Context::dropped(), 2010 - total::<Context>());
        assert!(kept.iter().all(|context| context.live.load(SeqCst)));
    });
}

#[test]
fn a_thread_that_ends_leaves_its_contexts_to_the_others_and_each_is_dropped_once() {
    counted!(Context);
    let (sender, receiver) = sync_channel::<PoolBox<Context>>(256);
    let takers: Vec<_> = (0..8)
        .map(|index| {
            let sender = sender.clone();
            thread::spawn(move || {
                let mut random = fastrand(index);
                for _ in 0..2_000 {
                    let held: Vec<_> = (0..random() % 50).map(|_| PoolBox::<Context>::take()).collect();
                    // Some are freed by a thread that outlives this one.
                    for context in held.into_iter().filter(|_| random().is_multiple_of(4)) {
                        sender.send(context).unwrap();
                    }
                }
            })
        })
        .collect();
    drop(sender);
    let freer = thread::spawn(move || receiver.into_iter().count());
    for thread in takers {
        thread.join().unwrap();
    }
    assert!(freer.join().unwrap() > 0);
    let stats = Context::pool().stats();
    assert_eq!((stats.in_flight, stats.created, stats.freed), (0, Context::created(), Context::dropped()));
    on_a_thread(move || {
        let all: Vec<_> = (0..stats.total).map(|_| PoolBox::<Context>::take()).collect();
        let live = Context::created() - Context::dropped();
        assert_eq!(live, stats.total, "contexts of the dead threads are out of reach");
        drop(all);
    });
    Context::pool().clear();
    assert_eq!((Context::dropped(), total::<Context>()), (Context::created(), 0));
}

/// Thread-local destructors run in no fixed order, so a context may outlive its thread's list.
#[test]
fn a_context_that_outlives_its_threads_list_is_freed() {
    counted!(Context);
    thread_local! {
        static LAST: std::cell::RefCell<Option<PoolBox<Context>>> = const { std::cell::RefCell::new(None) };
    }
    on_a_thread(|| {
        // Registered first, so destroyed last.
        LAST.with(|last| drop(last.borrow_mut().take()));
        LAST.with(|last| *last.borrow_mut() = Some(PoolBox::take()));
    });
    on_a_thread(|| {
        let early = PoolBox::take();
        LAST.with(|last| *last.borrow_mut() = Some(early));
    });
    Context::pool().clear();
    let stats = Context::pool().stats();
    assert_eq!((stats.in_flight, stats.total), (0, 0), "{stats:?}");
    assert_eq!(Context::created(), Context::dropped());
}

/// Contexts that hold contexts, taken and freed while the outer one is made and reset.
#[test]
fn a_context_may_hold_others() {
    counted!(Inner);
    #[derive(Default)]
    struct Outer(Option<PoolBox<Inner>>, Option<PoolBox<Outer>>);
    impl PoolContext for Outer {
        fn create() -> Self {
            Self(Some(PoolBox::take()), None)
        }
        fn reset(&mut self) {
            *self = Self(Some(PoolBox::take()), None);
        }
    }
    pooled!(Outer);
    on_a_thread(|| {
        let mut chain = PoolBox::<Outer>::take();
        for _ in 0..300 {
            let mut next = PoolBox::<Outer>::take();
            next.1 = Some(chain);
            chain = next;
        }
        assert!(chain.0.is_some());
        drop(chain);
        assert_eq!(total::<Outer>(), 301);
    });
    on_a_thread(|| Outer::pool().clear());
    Inner::pool().clear();
    assert_eq!(Inner::created(), Inner::dropped());
}
