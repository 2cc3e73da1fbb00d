//! Puts values of any type into the pool's memory, even values that must stay on one thread.
//!
//! The pool holds only room: bytes without a value, so that any thread may take it. The owner makes the value when it
//! takes the room, and drops it before the room goes back.

use super::{Pool, PoolBox, PoolContext, Pooled, ThreadList};
use std::cell::Cell;
use std::marker::PhantomData;
use std::mem::{ManuallyDrop, MaybeUninit};
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::thread::LocalKey;

/// Room for one `T`, and for a count of its handles.
pub struct Room<T> {
    count: Cell<usize>,
    value: MaybeUninit<T>,
}

// SAFETY: nobody but its owner looks into a room, and the pool's rooms hold no value: they are memory only.
unsafe impl<T> Send for Room<T> {}

impl<T> std::fmt::Debug for Room<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Room")
    }
}

/// A type whose values have a pool of rooms. Implemented by [`room_for!`](crate::room_for).
pub trait HasRoom: Sized + 'static {
    /// Returns the pool of its rooms.
    fn pool() -> &'static Pool<Room<Self>>;

    /// Returns the calling thread's list of rooms.
    fn list() -> &'static LocalKey<ThreadList<Room<Self>>>;
}

/// Gives a type a pool of rooms for its values, with a name.
#[macro_export]
macro_rules! room_for {
    ($value:ty, $name:expr) => {
        impl $crate::HasRoom for $value {
            fn pool() -> &'static $crate::Pool<$crate::Room<Self>> {
                static POOL: ::std::sync::LazyLock<$crate::Pool<$crate::Room<$value>>> =
                    ::std::sync::LazyLock::new(|| $crate::Pool::new($name));
                &POOL
            }

            #[inline]
            fn list() -> &'static ::std::thread::LocalKey<$crate::ThreadList<$crate::Room<Self>>> {
                ::std::thread_local! {
                    static LIST: $crate::ThreadList<$crate::Room<$value>> = const { $crate::ThreadList::new() };
                }
                &LIST
            }
        }
    };
}

impl<T: HasRoom> PoolContext for Room<T> {
    fn create() -> Self {
        Self { count: Cell::new(0), value: MaybeUninit::uninit() }
    }
}

impl<T: HasRoom> Pooled for Room<T> {
    fn pool() -> &'static Pool<Self> {
        T::pool()
    }

    #[inline]
    fn list() -> &'static LocalKey<ThreadList<Self>> {
        T::list()
    }
}

/// Makes a room with `value` in it and a count of one.
#[inline]
fn place<T: HasRoom>(value: T) -> NonNull<Room<T>> {
    // In this crate's own unit tests the pool's atomics are the model checker's, which work only in a model.
    let room = match cfg!(test) {
        true => NonNull::from(Box::leak(Box::new(Room::create()))),
        false => PoolBox::<Room<T>>::take().into_raw(),
    };
    // SAFETY: the room is ours and holds no value.
    unsafe {
        (*room.as_ptr()).count.set(1);
        (*room.as_ptr()).value.write(value);
    }
    room
}

/// Gives a room back.
///
/// # Safety
/// The room came from [`place`], its value was dropped or moved out, and nobody else uses it any more.
#[inline]
unsafe fn give_back<T: HasRoom>(room: NonNull<Room<T>>) {
    if cfg!(test) {
        // SAFETY: as the caller says; `place` leaked a box.
        return drop(unsafe { Box::from_raw(room.as_ptr()) });
    }
    // SAFETY: as the caller says; `place` took it from the pool.
    drop(unsafe { PoolBox::from_raw(room) });
}

/// A value in a room of its own, in place of a `Box`.
pub struct Placed<T: HasRoom> {
    room: NonNull<Room<T>>,
    owns: PhantomData<T>,
}

impl<T: HasRoom> Placed<T> {
    /// Puts `value` into a room.
    #[must_use]
    #[inline]
    pub fn new(value: T) -> Self {
        Self { room: place(value), owns: PhantomData }
    }

    /// Takes the value out.
    #[must_use]
    #[inline]
    pub fn into_inner(self) -> T {
        let this = ManuallyDrop::new(self);
        // SAFETY: the room is ours and holds a value, which is moved out once: `this` is not dropped.
        unsafe {
            let value = (*this.room.as_ptr()).value.assume_init_read();
            give_back(this.room);
            value
        }
    }
}

impl<T: HasRoom> Drop for Placed<T> {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: the room is ours and holds a value, which nobody sees again.
        unsafe {
            (*self.room.as_ptr()).value.assume_init_drop();
            give_back(self.room);
        }
    }
}

impl<T: HasRoom> Deref for Placed<T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: the room is ours and holds a value.
        unsafe { (*self.room.as_ptr()).value.assume_init_ref() }
    }
}

impl<T: HasRoom> DerefMut for Placed<T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: the room is ours and holds a value; `&mut self` makes the access exclusive.
        unsafe { (*self.room.as_ptr()).value.assume_init_mut() }
    }
}

impl<T: HasRoom + std::fmt::Debug> std::fmt::Debug for Placed<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        (**self).fmt(f)
    }
}

/// A value in a room of its own, with a count of its handles, which stay on one thread. In place of an `Rc`.
pub struct PoolRc<T: HasRoom> {
    room: NonNull<Room<T>>,
    owns: PhantomData<T>,
}

impl<T: HasRoom> PoolRc<T> {
    /// Puts `value` into a room.
    #[must_use]
    #[inline]
    pub fn new(value: T) -> Self {
        Self { room: place(value), owns: PhantomData }
    }

    #[inline]
    fn count(this: &Self) -> &Cell<usize> {
        // SAFETY: the room exists as long as any handle; handles stay on one thread.
        unsafe { &(*this.room.as_ptr()).count }
    }

    /// Returns how many handles there are.
    #[must_use]
    #[inline]
    pub fn strong_count(this: &Self) -> usize {
        Self::count(this).get()
    }

    /// Returns the value, if this is the only handle.
    #[inline]
    pub fn get_mut(this: &mut Self) -> Option<&mut T> {
        // SAFETY: with a count of one nobody else reaches the value, and `this` is borrowed exclusively.
        (Self::strong_count(this) == 1).then(|| unsafe { (*this.room.as_ptr()).value.assume_init_mut() })
    }

    /// Takes the value out, if this is the only handle.
    pub fn try_unwrap(this: Self) -> Result<T, Self> {
        if Self::strong_count(&this) > 1 {
            return Err(this);
        }
        let this = ManuallyDrop::new(this);
        // SAFETY: this is the only handle, and it is not dropped: the value is moved out once.
        unsafe {
            let value = (*this.room.as_ptr()).value.assume_init_read();
            give_back(this.room);
            Ok(value)
        }
    }
}

impl<T: HasRoom> Clone for PoolRc<T> {
    #[inline]
    fn clone(&self) -> Self {
        let count = Self::count(self);
        // Forgetting handles in a loop must not wrap it round.
        assert!(count.get() < usize::MAX, "too many handles");
        count.set(count.get() + 1);
        Self { room: self.room, owns: PhantomData }
    }
}

impl<T: HasRoom> Drop for PoolRc<T> {
    #[inline]
    fn drop(&mut self) {
        let count = Self::count(self);
        count.set(count.get() - 1);
        if count.get() > 0 {
            return;
        }
        // SAFETY: this was the last handle. The value is dropped once, and nobody sees the room again.
        unsafe {
            (*self.room.as_ptr()).value.assume_init_drop();
            give_back(self.room);
        }
    }
}

impl<T: HasRoom> Deref for PoolRc<T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: the room holds a value as long as any handle exists; it is changed through the only handle only.
        unsafe { (*self.room.as_ptr()).value.assume_init_ref() }
    }
}

impl<T: HasRoom + Default> Default for PoolRc<T> {
    fn default() -> Self {
        Self::new(T::default())
    }
}

impl<T: HasRoom + std::fmt::Debug> std::fmt::Debug for PoolRc<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        (**self).fmt(f)
    }
}
