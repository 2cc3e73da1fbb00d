//! Values and futures of one thread in the pool's memory: each is dropped once, by its owner, and the memory is used
//! again, also by other threads. Every test that looks at counters has a type, and so a pool, of its own.

use ringdisk_memory::{HasRoom, IoBuf, Placed, PoolRc, PoolStats, PooledFuture, pools, room_for};
use std::cell::Cell;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::thread;

fn stats<T: HasRoom>() -> PoolStats {
    T::pool().stats()
}

fn named(name: &str) -> PoolStats {
    pools().into_iter().find(|(other, _)| *other == name).unwrap().1
}

#[test]
fn a_value_is_dropped_by_its_owner_and_its_room_serves_the_next() {
    struct Value(Rc<Cell<u32>>);
    impl Drop for Value {
        fn drop(&mut self) {
            self.0.set(self.0.get() + 1);
        }
    }
    room_for!(Value, "a test's value");
    thread::spawn(|| {
        let drops = Rc::new(Cell::new(0));
        for round in 0..100 {
            let mut kept = Placed::new(Value(Rc::clone(&drops)));
            kept.0 = Rc::clone(&drops);
            assert_eq!(drops.get(), 2 * round);
            let out = Placed::new(Value(Rc::clone(&drops))).into_inner();
            assert_eq!(drops.get(), 2 * round, "moved out, not dropped");
            drop((kept, out));
        }
        assert_eq!((drops.get(), Rc::strong_count(&drops)), (200, 1));
        assert_eq!(stats::<Value>().created, 2);
    })
    .join()
    .unwrap();
    assert_eq!(named("a test's value"), stats::<Value>());
    // The rooms of a thread that has ended serve another, whose values are its own.
    thread::spawn(|| drop(Placed::new(Value(Rc::default())))).join().unwrap();
    assert_eq!(stats::<Value>().created, 2);
}

#[test]
fn a_shared_value_lives_as_long_as_its_last_handle() {
    struct Shared(Rc<()>, u32);
    room_for!(Shared, "a test's shared value");
    let witness = Rc::new(());
    let mut one = PoolRc::new(Shared(Rc::clone(&witness), 1));
    PoolRc::get_mut(&mut one).unwrap().1 = 2;
    let other = one.clone();
    assert!(PoolRc::get_mut(&mut one).is_none() && PoolRc::strong_count(&other) == 2);
    let Err(one) = PoolRc::try_unwrap(one) else { panic!("there is another handle") };
    drop(one);
    assert_eq!((other.1, Rc::strong_count(&witness)), (2, 2));
    let Ok(Shared(inside, _)) = PoolRc::try_unwrap(other) else { panic!("this was the last handle") };
    drop(inside);
    assert_eq!(Rc::strong_count(&witness), 1);
    assert_eq!(stats::<Shared>().total, 1);
}

/// A future of some size that is pending once, and notes what it holds when it goes.
async fn work<const BYTES: usize>(witness: Rc<Cell<usize>>) {
    let bytes = [BYTES as u8; BYTES];
    let place = std::ptr::from_ref(&bytes).addr();
    let mut waited = false;
    poll_fn(|_| match std::mem::replace(&mut waited, true) {
        true => Poll::Ready(()),
        false => Poll::Pending,
    })
    .await;
    assert!(place == std::ptr::from_ref(&bytes).addr() && bytes.iter().all(|byte| *byte == BYTES as u8));
    witness.set(witness.get() + BYTES);
}

fn poll(future: &mut PooledFuture) -> Poll<()> {
    Pin::new(future).poll(&mut Context::from_waker(Waker::noop()))
}

#[test]
fn futures_of_any_size_run_where_they_were_put_and_may_be_dropped_half_way() {
    let witness = Rc::new(Cell::new(0));
    let make = || {
        [
            PooledFuture::new(work::<1>(Rc::clone(&witness))),
            PooledFuture::new(work::<1000>(Rc::clone(&witness))),
            PooledFuture::new(work::<5000>(Rc::clone(&witness))),
            PooledFuture::new(work::<20_000>(Rc::clone(&witness))),
        ]
    };
    for mut future in make() {
        assert!(poll(&mut future).is_pending());
        let mut moved = Box::new(future);
        assert!(poll(&mut moved).is_ready());
    }
    assert_eq!(witness.get(), 26_001);
    for mut future in make() {
        assert!(poll(&mut future).is_pending());
    }
    assert_eq!((witness.get(), Rc::strong_count(&witness)), (26_001, 1), "what they held was dropped");
    #[repr(align(256))]
    struct Aligned(Cell<u32>);
    let mut wide = PooledFuture::new(async {
        let aligned = Aligned(Cell::new(7));
        std::future::ready(()).await;
        assert_eq!((std::ptr::from_ref(&aligned).addr() % 256, aligned.0.get()), (0, 7));
    });
    assert!(poll(&mut wide).is_ready());
    drop(PooledFuture::new(std::future::ready(())));
}

#[test]
fn a_buffer_from_the_pool_is_aligned_as_long_as_asked_for_and_used_again() {
    let buffer_pool = "buffer of 262144 bytes";
    let first = IoBuf::from_pool(200_000).unwrap().whole();
    let address = first.single_segment().unwrap().as_ptr().addr();
    assert_eq!((address % ringdisk_memory::PAGE_BYTES, first.length_bytes()), (0, 200_000));
    first.fill(1);
    let part = first.slice(100_000, 100_000);
    drop(first);
    let second = IoBuf::from_pool(262_144).unwrap().whole();
    assert_ne!(second.single_segment().unwrap().as_ptr().addr(), address, "a part of the first is still in use");
    assert_eq!(part.to_vec(), vec![1; 100_000]);
    drop((part, second));
    let created = named(buffer_pool).created;
    for _ in 0..100 {
        assert_eq!(IoBuf::from_pool(131_072).unwrap().segments().len(), 1);
    }
    assert_eq!(named(buffer_pool).created, created);
    assert_eq!(IoBuf::from_pool(3 << 20).unwrap().length_bytes(), 3 << 20, "longer ones are allocated");
    assert!(IoBuf::from_pool(0).unwrap().segments().is_empty());
    assert!(IoBuf::from_pool(10).unwrap().into_aligned().is_err(), "its memory is the pool's");
}
