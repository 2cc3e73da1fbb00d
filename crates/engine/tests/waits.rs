//! What a reactor's tasks and pollers wait for besides storage: times, descriptors, and work from other threads.

mod common;

use block::{Interest, Poller, ReactorCtx, Timer, Watch, run_and_wait};
use common::{reactor, run_task, wait_until_idle};
use ringdisk_engine::{Reactor, ReactorConfig, ReactorThread};
use std::cell::RefCell;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::rc::Rc;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

/// One that never spins: it sleeps, and each wake-up is a turn.
fn sleeper() -> ReactorThread {
    Reactor::spawn(ReactorConfig::default().with(|config| config.poll_max_us = 0)).unwrap()
}

/// Keeps a reactor from sleeping.
struct Busy;

impl Poller for Busy {
    fn poll(&mut self) -> bool {
        true
    }
}

fn keep_busy(reactor: &ReactorThread) {
    run_and_wait(&*reactor.handle(), |ctx| ctx.add_poller(Rc::new(RefCell::new(Busy))).map(drop)).unwrap().unwrap();
}

#[test]
fn sleepers_wake_in_order_and_not_early_on_a_reactor_that_sleeps_and_on_one_that_does_not() {
    for is_busy in [false, true] {
        let reactor = sleeper();
        if is_busy {
            keep_busy(&reactor);
        }
        let woken = run_task(&reactor, |ctx| async move {
            let (start, woken) = (ctx.now(), Rc::new(RefCell::new(Vec::new())));
            // Below a millisecond, too; the last wakes this task.
            for micros in [30_000_u64, 300, 0, 5_000, 700, 301] {
                let (woken, their_ctx) = (Rc::clone(&woken), Rc::clone(&ctx));
                ctx.spawn(block::Task::new(async move {
                    let due = start + Duration::from_micros(micros);
                    their_ctx.sleep_until(due).await;
                    assert!(Instant::now() >= due);
                    woken.borrow_mut().push(micros);
                }));
            }
            ctx.sleep_until(start + Duration::from_millis(40)).await;
            woken.take()
        });
        assert_eq!(woken, [0, 300, 301, 700, 5_000, 30_000]);
        reactor.stop().unwrap();
    }
}

#[test]
fn a_reactor_that_waits_for_a_timer_sleeps_and_one_whose_timers_are_over_sleeps_for_ever() {
    let reactor = sleeper();
    for _ in 0..3 {
        let before = wait_until_idle(&reactor);
        run_task(&reactor, |ctx| async move {
            // A limit that is given up.
            let limit = ctx.sleep(Duration::from_secs(3600));
            ctx.sleep(Duration::from_millis(300)).await;
            drop(limit);
        });
        let turns = wait_until_idle(&reactor).turns - before.turns;
        assert!(turns < 50, "{turns} turns for one timer");
    }
    reactor.stop().unwrap();
}

/// Counts each time that its timer is due, and sets it again.
struct Ticks {
    timer: Timer,
    left: u32,
    ended: mpsc::Sender<()>,
}

impl Poller for Ticks {
    fn poll(&mut self) -> bool {
        if !self.timer.is_due() {
            return false;
        }
        self.timer.clear();
        self.left = self.left.saturating_sub(1);
        match self.left {
            0 => self.ended.send(()).unwrap(),
            _ => self.timer.set(self.timer.now() + Duration::from_micros(200)),
        }
        true
    }
}

#[test]
fn a_poller_is_polled_when_its_timer_is_due() {
    let reactor = sleeper();
    let (ended, end) = mpsc::channel();
    let add = move |ctx: &Rc<dyn ReactorCtx>| {
        let mut ticks = Ticks { timer: ctx.timer(), left: 100, ended };
        ticks.timer.set(ctx.now());
        ctx.add_poller(Rc::new(RefCell::new(ticks))).map(drop)
    };
    run_and_wait(&*reactor.handle(), add).unwrap().unwrap();
    end.recv().unwrap();
    reactor.stop().unwrap();
}

#[test]
fn a_stopping_reactor_does_not_wait_for_sleepers() {
    let reactor = sleeper();
    let (dropped, drops) = mpsc::channel::<()>();
    let spawn = move |ctx: &Rc<dyn ReactorCtx>| {
        let sleep = ctx.sleep(Duration::from_secs(3600));
        ctx.spawn(block::Task::new(async move {
            let _dropped = dropped;
            sleep.await;
        }));
    };
    run_and_wait(&*reactor.handle(), spawn).unwrap();
    reactor.stop().unwrap();
    assert!(drops.recv().is_err(), "the task is gone");
}

#[test]
fn tasks_wait_for_room_to_write_and_for_something_to_read() {
    const BYTES: usize = 4 << 20;
    for is_busy in [false, true] {
        let reactor = reactor("sockets");
        if is_busy {
            keep_busy(&reactor);
        }
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        let peer = std::thread::spawn(move || {
            let mut bytes = vec![0; BYTES];
            // Slowly at first, so that the sender finds no room.
            std::thread::sleep(Duration::from_millis(50));
            theirs.read_exact(&mut bytes).unwrap();
            std::thread::sleep(Duration::from_millis(50));
            theirs.write_all(&bytes).unwrap();
        });
        let (blocked, received) = run_task(&reactor, |ctx| async move {
            let watch = Watch::new(&ctx, ours).unwrap();
            let (mut sent, mut blocked) = (0, [0, 0]);
            let pattern: Vec<u8> = (0..BYTES).map(|index| (index / 251) as u8).collect();
            while sent < BYTES {
                let write = |mut socket: &UnixStream| {
                    socket.write(&pattern[sent..]).inspect_err(|error| {
                        blocked[0] += u32::from(error.kind() == ErrorKind::WouldBlock);
                    })
                };
                sent += watch.io(Interest::Write, write).await.unwrap();
            }
            let mut received = Vec::new();
            let mut part = [0; 1 << 16];
            loop {
                let read = |mut socket: &UnixStream| {
                    socket.read(&mut part).inspect_err(|error| {
                        blocked[1] += u32::from(error.kind() == ErrorKind::WouldBlock);
                    })
                };
                match watch.io(Interest::Read, read).await.unwrap() {
                    // The other end has hung up.
                    0 => break,
                    count => received.extend_from_slice(&part[..count]),
                }
            }
            assert!(received == pattern);
            (blocked, received.len())
        });
        assert_eq!(received, BYTES);
        assert!(blocked[0] > 0 && blocked[1] > 0, "it waited both ways: {blocked:?}");
        peer.join().unwrap();
        reactor.stop().unwrap();
    }
}

#[test]
fn a_watch_that_is_dropped_is_over_and_another_of_the_same_socket_begins() {
    let reactor = sleeper();
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    ours.set_nonblocking(true).unwrap();
    run_task(&reactor, move |ctx| async move {
        // The duplicate keeps the socket itself open.
        let duplicate = ours.try_clone().unwrap();
        drop(Watch::new(&ctx, duplicate).unwrap());
        let watch = Watch::new(&ctx, ours).unwrap();
        assert!(Watch::new(&ctx, std::fs::File::open("/dev/null").unwrap()).is_err(), "nobody can wait for that");
        watch.not_ready(Interest::Read);
        theirs.write_all(&[1]).unwrap();
        watch.ready(Interest::Read).await;
    });
    let idle = wait_until_idle(&reactor);
    assert!(idle.sleeps > 0);
    reactor.stop().unwrap();
}

#[test]
fn what_a_peer_takes_wakes_nobody_up_who_does_not_wait_for_room() {
    const MESSAGES: usize = 200;
    let reactor = sleeper();
    let (ours, theirs) = UnixStream::pair().unwrap();
    ours.set_nonblocking(true).unwrap();
    // The watch stays with a task that waits for what never comes.
    let spawn = move |ctx: &Rc<dyn ReactorCtx>| {
        let watch = Watch::new(ctx, ours).unwrap();
        ctx.spawn(block::Task::new(async move {
            for _ in 0..MESSAGES {
                watch.io(Interest::Write, |mut socket: &UnixStream| socket.write(&[1; 64])).await.unwrap();
            }
            watch.not_ready(Interest::Read);
            watch.ready(Interest::Read).await;
        }));
    };
    run_and_wait(&*reactor.handle(), spawn).unwrap();
    let mut theirs = &theirs;
    theirs.read_exact(&mut [0; 64]).unwrap();
    let before = wait_until_idle(&reactor).sleeps;
    for _ in 1..MESSAGES {
        theirs.read_exact(&mut [0; 64]).unwrap();
        std::thread::sleep(Duration::from_millis(1));
    }
    let woken = wait_until_idle(&reactor).sleeps - before;
    assert!(woken < MESSAGES as u64 / 4, "it has slept {woken} times");
    reactor.stop().unwrap();
}

#[test]
fn an_end_that_comes_with_the_last_bytes_is_not_missed() {
    for sleeps_between in [false, true] {
        let reactor = reactor("ends");
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        run_task(&reactor, move |ctx| async move {
            let watch = Watch::new(&ctx, ours).unwrap();
            watch.not_ready(Interest::Read);
            theirs.write_all(&[1; 3]).unwrap();
            if sleeps_between {
                watch.ready(Interest::Read).await;
            }
            drop(theirs);
            watch.ready(Interest::Read).await;
            let mut bytes = [0; 64];
            assert_eq!(watch.get_ref().read(&mut bytes).unwrap(), 3);
            watch.is_drained();
            watch.ready(Interest::Read).await;
            assert_eq!(watch.get_ref().read(&mut bytes).unwrap(), 0);
        });
        reactor.stop().unwrap();
    }
}

#[test]
fn jobs_of_a_thread_run_in_its_order_and_none_is_lost_or_run_after_the_end() {
    const JOBS: usize = 2000;
    for reactor in [sleeper(), reactor("jobs")] {
        let handle = reactor.handle();
        let (sender, ran) = mpsc::channel();
        let threads: Vec<_> = (0..4)
            .map(|thread| {
                let (handle, sender) = (Arc::clone(&handle), sender.clone());
                std::thread::spawn(move || {
                    for job in 0..JOBS {
                        let sender = sender.clone();
                        handle.run(Box::new(move |_| sender.send((thread, job)).unwrap())).unwrap();
                        // Now and then long enough for the reactor to fall asleep.
                        if job % 500 == thread {
                            std::thread::sleep(Duration::from_millis(5));
                        }
                    }
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        // What was given before the stop is run.
        reactor.stop().unwrap();
        drop(sender);
        let mut next = [0; 4];
        for (thread, job) in ran {
            assert_eq!(job, next[thread]);
            next[thread] += 1;
        }
        assert_eq!(next, [JOBS; 4]);
        assert!(handle.run(Box::new(|_| panic!("the reactor has ended"))).is_err());
    }
}
