//! The calls of librbd and librados that are used, as their headers declare them: the only module of this crate with
//! `unsafe`. Everything outside sees owned handles, owned buffers and error numbers.
//!
//! Both libraries' handles may be used by any thread. What closes a handle blocks, so owners choose where they drop it.

use block::{Error, ErrorKind, Result};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use memory::AlignedBuf;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::Path;
use std::ptr::{NonNull, null, null_mut};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// What Debian's package has.
const LIBRARY: &str = "librbd.so.1";
/// Tests name another library here.
const LIBRARY_VARIABLE: &str = "RINGDISK_LIBRBD";

type Handle = *mut c_void;
type Callback = unsafe extern "C" fn(completion: Handle, arg: Handle);
type DiffCallback = unsafe extern "C" fn(offset: u64, length: usize, exists: c_int, arg: Handle) -> c_int;

/// `rbd_image_watcher_t`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Watcher {
    address: *mut c_char,
    id: i64,
    cookie: u64,
}

/// `rbd_image_info_t`.
#[repr(C)]
struct Info {
    size_bytes: u64,
    object_bytes: u64,
    objects: u64,
    order: c_int,
    block_name_prefix: [c_char; 24],
    parent_pool: i64,
    parent_name: [c_char; 96],
}

macro_rules! functions {
    ($($name:ident: ($($arg:ty),*) -> $ret:ty;)*) => {
        /// The functions by their names in C.
        struct Functions {
            $($name: unsafe extern "C" fn($($arg),*) -> $ret,)*
            /// Since version 16.
            rbd_aio_write_zeroes: Option<unsafe extern "C" fn(Handle, u64, usize, Handle, c_int, c_int) -> c_int>,
        }

        impl Functions {
            /// # Safety
            /// The library has these functions as Ceph's headers declare them.
            unsafe fn of(library: &Library) -> Result<Self, libloading::Error> {
                // SAFETY: the types are those of the headers, as the caller promises. The library is never unloaded.
                unsafe {
                    Ok(Self {
                        $($name: *library.get(concat!(stringify!($name), "\0").as_bytes())?,)*
                        rbd_aio_write_zeroes: library.get(b"rbd_aio_write_zeroes\0").ok().map(|found| *found),
                    })
                }
            }
        }
    };
}

functions! {
    rados_create: (*mut Handle, *const c_char) -> c_int;
    rados_conf_read_file: (Handle, *const c_char) -> c_int;
    rados_conf_set: (Handle, *const c_char, *const c_char) -> c_int;
    rados_conf_get: (Handle, *const c_char, *mut c_char, usize) -> c_int;
    rados_connect: (Handle) -> c_int;
    rados_shutdown: (Handle) -> ();
    rados_ioctx_create: (Handle, *const c_char, *mut Handle) -> c_int;
    rados_ioctx_set_namespace: (Handle, *const c_char) -> ();
    rados_ioctx_destroy: (Handle) -> ();
    rbd_version: (*mut c_int, *mut c_int, *mut c_int) -> ();
    rbd_create: (Handle, *const c_char, u64, *mut c_int) -> c_int;
    rbd_remove: (Handle, *const c_char) -> c_int;
    rbd_open: (Handle, *const c_char, *mut Handle, *const c_char) -> c_int;
    rbd_open_read_only: (Handle, *const c_char, *mut Handle, *const c_char) -> c_int;
    rbd_close: (Handle) -> c_int;
    rbd_stat: (Handle, *mut Info, usize) -> c_int;
    rbd_resize: (Handle, u64) -> c_int;
    rbd_get_features: (Handle, *mut u64) -> c_int;
    rbd_get_flags: (Handle, *mut u64) -> c_int;
    rbd_get_overlap: (Handle, *mut u64) -> c_int;
    rbd_lock_acquire: (Handle, c_int) -> c_int;
    rbd_lock_get_owners: (Handle, *mut c_int, *mut *mut c_char, *mut usize) -> c_int;
    rbd_lock_get_owners_cleanup: (*mut *mut c_char, usize) -> ();
    rbd_watchers_list: (Handle, *mut Watcher, *mut usize) -> c_int;
    rbd_watchers_list_cleanup: (*mut Watcher, usize) -> ();
    rbd_diff_iterate2: (Handle, *const c_char, u64, u64, u8, u8, DiffCallback, Handle) -> c_int;
    rbd_aio_create_completion: (Handle, Callback, *mut Handle) -> c_int;
    rbd_aio_get_return_value: (Handle) -> isize;
    rbd_aio_release: (Handle) -> ();
    rbd_aio_read: (Handle, u64, usize, *mut c_char, Handle) -> c_int;
    rbd_aio_write: (Handle, u64, usize, *const c_char, Handle) -> c_int;
    rbd_aio_discard: (Handle, u64, u64, Handle) -> c_int;
    rbd_aio_flush: (Handle, Handle) -> c_int;
}

/// librbd, loaded once and never unloaded: it has threads of its own.
pub(crate) struct Librbd {
    functions: Functions,
    _library: Library,
}

static LOADED: Mutex<Option<&'static Librbd>> = Mutex::new(None);

/// The library, loaded if it was not.
pub(crate) fn librbd() -> Result<&'static Librbd> {
    let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
    match *loaded {
        Some(library) => Ok(library),
        None => {
            let name = std::env::var_os(LIBRARY_VARIABLE).unwrap_or_else(|| LIBRARY.into());
            Ok(*loaded.insert(load(Path::new(&name))?))
        }
    }
}

/// For tests: takes another library in the place of librbd, if none was loaded yet.
#[doc(hidden)]
pub fn load_from(path: &Path) -> Result<()> {
    let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
    if loaded.is_none() {
        *loaded = Some(load(path)?);
    }
    Ok(())
}

fn load(path: &Path) -> Result<&'static Librbd> {
    let failed = |error: libloading::Error| {
        let message = format!("Ceph's library '{}' cannot be loaded: install Debian's package librbd1", path.display());
        Error::with_source(ErrorKind::Unsupported, message, error)
    };
    // SAFETY: librbd's initialisers expect nothing of a program. It is the system's own, as if it had been linked.
    let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) }.map_err(failed)?;
    // SAFETY: the name has the version of this interface, which Ceph only adds to. librados, on which librbd depends, is
    // found through it.
    let functions = unsafe { Functions::of(&library) }.map_err(failed)?;
    Ok(Box::leak(Box::new(Librbd { functions, _library: library })))
}

impl Librbd {
    /// librbd's version.
    pub(crate) fn version(&self) -> String {
        let (mut major, mut minor, mut extra) = (0, 0, 0);
        // SAFETY: it writes three numbers.
        unsafe { (self.functions.rbd_version)(&raw mut major, &raw mut minor, &raw mut extra) };
        format!("{major}.{minor}.{extra}")
    }

    /// Whether it writes zeroes without a buffer.
    pub(crate) fn has_write_zeroes(&self) -> bool {
        self.functions.rbd_aio_write_zeroes.is_some()
    }
}

/// An error number of a call; not negative.
pub(crate) type Errno = i32;

fn check(returned: c_int) -> Result<(), Errno> {
    if returned < 0 { Err(returned.saturating_neg()) } else { Ok(()) }
}

fn pointer(text: Option<&CStr>) -> *const c_char {
    text.map_or(null(), CStr::as_ptr)
}

fn handle(made: Handle) -> Result<NonNull<c_void>, Errno> {
    NonNull::new(made).ok_or(EIO)
}

const EIO: Errno = 5;
pub(crate) const ERANGE: Errno = 34;
/// The cluster has shut this client out: another one has broken its lock.
pub(crate) const EBLOCKLISTED: Errno = 108;

/// A connection to a cluster, shut down when it is dropped, which may take time.
pub(crate) struct Cluster {
    pub(crate) librbd: &'static Librbd,
    raw: NonNull<c_void>,
    /// The cluster has shut this connection out. It forgets that after an hour or so, but the locks are others' by then.
    is_shut_out: AtomicBool,
}

// SAFETY: librados says that a handle may be used by several threads at once.
unsafe impl Send for Cluster {}
// SAFETY: as above.
unsafe impl Sync for Cluster {}

impl Cluster {
    /// Not connected yet. Without a name the user is `admin`.
    pub(crate) fn new(librbd: &'static Librbd, user: Option<&CStr>) -> Result<Self, Errno> {
        let mut raw = null_mut();
        // SAFETY: it writes a handle, and copies the text.
        check(unsafe { (librbd.functions.rados_create)(&raw mut raw, pointer(user)) })?;
        Ok(Self { librbd, raw: handle(raw)?, is_shut_out: AtomicBool::new(false) })
    }

    pub(crate) fn is_shut_out(&self) -> bool {
        self.is_shut_out.load(Ordering::Relaxed)
    }

    /// Reads a configuration file; without a name those of Ceph's usual places.
    pub(crate) fn read_conf(&self, path: Option<&CStr>) -> Result<(), Errno> {
        // SAFETY: the handle is open, and the text ends with a zero byte.
        check(unsafe { (self.librbd.functions.rados_conf_read_file)(self.raw.as_ptr(), pointer(path)) })
    }

    pub(crate) fn set(&self, key: &CStr, value: &CStr) -> Result<(), Errno> {
        // SAFETY: the handle is open, and both texts end with zero bytes and are copied.
        check(unsafe { (self.librbd.functions.rados_conf_set)(self.raw.as_ptr(), key.as_ptr(), value.as_ptr()) })
    }

    pub(crate) fn get(&self, key: &CStr) -> Option<CString> {
        let mut value = [0_u8; 256];
        let place = value.as_mut_ptr().cast();
        // SAFETY: the handle is open, and at most so many bytes are written there.
        let got =
            unsafe { (self.librbd.functions.rados_conf_get)(self.raw.as_ptr(), key.as_ptr(), place, value.len()) };
        check(got).ok()?;
        CStr::from_bytes_until_nul(&value).ok().map(CStr::to_owned)
    }

    /// Blocks until the cluster answers, or its time is over.
    pub(crate) fn connect(&self) -> Result<(), Errno> {
        // SAFETY: the handle is open.
        check(unsafe { (self.librbd.functions.rados_connect)(self.raw.as_ptr()) })
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        // SAFETY: nothing else has the handle: pools hold their cluster.
        unsafe { (self.librbd.functions.rados_shutdown)(self.raw.as_ptr()) }
    }
}

/// A pool of a cluster.
pub(crate) struct Pool {
    cluster: Arc<Cluster>,
    raw: NonNull<c_void>,
}

// SAFETY: librados says that a handle may be used by several threads at once; the namespace is set before there are any.
unsafe impl Send for Pool {}
// SAFETY: as above.
unsafe impl Sync for Pool {}

impl Pool {
    pub(crate) fn new(cluster: Arc<Cluster>, name: &CStr, namespace: Option<&CStr>) -> Result<Self, Errno> {
        let functions = &cluster.librbd.functions;
        let mut raw = null_mut();
        // SAFETY: the cluster is connected; it writes a handle.
        check(unsafe { (functions.rados_ioctx_create)(cluster.raw.as_ptr(), name.as_ptr(), &raw mut raw) })?;
        let raw = handle(raw)?;
        if let Some(namespace) = namespace {
            // SAFETY: the handle is open and ours alone, and the text is copied.
            unsafe { (functions.rados_ioctx_set_namespace)(raw.as_ptr(), namespace.as_ptr()) }
        }
        Ok(Self { cluster, raw })
    }

    /// Makes an image with the cluster's own defaults.
    pub(crate) fn create(&self, name: &CStr, size_bytes: u64) -> Result<(), Errno> {
        let mut order = 0;
        // SAFETY: the handle is open, and it reads and writes the order.
        self.noted(unsafe {
            (self.cluster.librbd.functions.rbd_create)(self.raw.as_ptr(), name.as_ptr(), size_bytes, &raw mut order)
        })
    }

    pub(crate) fn remove(&self, name: &CStr) -> Result<(), Errno> {
        // SAFETY: the handle is open.
        self.noted(unsafe { (self.cluster.librbd.functions.rbd_remove)(self.raw.as_ptr(), name.as_ptr()) })
    }

    /// Notes it if the cluster has shut its connection out: whoever tries again gets another one.
    fn noted(&self, returned: c_int) -> Result<(), Errno> {
        let result = check(returned);
        if result == Err(EBLOCKLISTED) {
            self.cluster.is_shut_out.store(true, Ordering::Relaxed);
        }
        result
    }

    /// Opens an image, or a snapshot of it.
    pub(crate) fn open(self, name: &CStr, snapshot: Option<&CStr>, read_only: bool) -> Result<Image, Errno> {
        let functions = &self.cluster.librbd.functions;
        let open = if read_only { functions.rbd_open_read_only } else { functions.rbd_open };
        let mut raw = null_mut();
        // SAFETY: the handle is open; it writes another one, and copies the texts.
        self.noted(unsafe { open(self.raw.as_ptr(), name.as_ptr(), &raw mut raw, pointer(snapshot)) })?;
        Ok(Image { raw: handle(raw)?, pool: self })
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        // SAFETY: nothing else has the handle: an image holds its pool, and is closed before.
        unsafe { (self.cluster.librbd.functions.rados_ioctx_destroy)(self.raw.as_ptr()) }
    }
}

/// An open image. Dropping it closes it, which waits for the cluster. Never drop one where librbd calls us.
pub(crate) struct Image {
    raw: NonNull<c_void>,
    pool: Pool,
}

// SAFETY: librbd says that an image may be used by several threads at once.
unsafe impl Send for Image {}
// SAFETY: as above.
unsafe impl Sync for Image {}

impl Drop for Image {
    fn drop(&mut self) {
        // SAFETY: nothing else has the handle: each request in flight holds the image.
        let closed = check(unsafe { (self.functions().rbd_close)(self.raw.as_ptr()) });
        if let Err(errno) = closed {
            tracing::warn!("librbd failed to close an image: {}", std::io::Error::from_raw_os_error(errno));
        }
    }
}

/// What an image is.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ImageFacts {
    pub(crate) size_bytes: u64,
    pub(crate) object_bytes: u64,
    pub(crate) features: u64,
    pub(crate) flags: u64,
    /// How much of it lies over a parent.
    pub(crate) overlap_bytes: u64,
}

/// What librbd is to do.
#[derive(Debug)]
pub(crate) enum Request {
    /// Fill this.
    Read(AlignedBuf),
    /// Store this.
    Write(AlignedBuf),
    Discard(u64),
    /// So many bytes; whether the space is kept.
    Zero(usize, bool),
    Flush,
}

/// How it ended: a count or a negative error number, and the buffer. The image may be the last handle to it.
pub(crate) struct Ended {
    pub(crate) returned: i64,
    pub(crate) buffer: Option<AlignedBuf>,
    pub(crate) image: Arc<Image>,
}

/// A request that librbd has. It owns all that librbd may still touch.
struct Flight {
    image: Arc<Image>,
    buffer: Option<AlignedBuf>,
    tell: Box<dyn FnOnce(Ended) + Send>,
}

impl Flight {
    fn end(self, returned: i64) {
        (self.tell)(Ended { returned, buffer: self.buffer, image: self.image });
    }
}

/// librbd calls this once for each request that it took, on a thread of its own.
unsafe extern "C" fn ended(completion: Handle, arg: Handle) {
    // SAFETY: `arg` is what `Image::start` made of a box, and this is the only call with it.
    let flight = unsafe { Box::from_raw(arg.cast::<Flight>()) };
    let functions = flight.image.functions();
    // SAFETY: the completion has ended, and nobody uses it after this.
    let returned = unsafe {
        let returned = (functions.rbd_aio_get_return_value)(completion);
        (functions.rbd_aio_release)(completion);
        returned
    };
    flight.end(returned as i64);
}

impl Image {
    fn functions(&self) -> &'static Functions {
        &self.librbd().functions
    }

    pub(crate) fn librbd(&self) -> &'static Librbd {
        self.pool.cluster.librbd
    }

    /// Whether the cluster has shut its connection out, which other images may have noticed.
    pub(crate) fn is_shut_out(&self) -> bool {
        self.pool.cluster.is_shut_out()
    }

    /// Notes that the cluster has shut its connection out. Returns whether that is news.
    pub(crate) fn notes_shut_out(&self) -> bool {
        !self.pool.cluster.is_shut_out.swap(true, Ordering::Relaxed)
    }

    /// Gives librbd a request, without waiting. `tell` is called once, by this thread or by one of librbd's; it does not
    /// block.
    pub(crate) fn start(self: &Arc<Self>, offset: u64, request: Request, tell: Box<dyn FnOnce(Ended) + Send>) {
        let functions = self.functions();
        let (mut buffer, request) = match request {
            Request::Read(buffer) => (Some(buffer), Request::Read(AlignedBuf::zeroed(0))),
            Request::Write(buffer) => (Some(buffer), Request::Write(AlignedBuf::zeroed(0))),
            other => (None, other),
        };
        let (data, length) = buffer.as_mut().map_or((null_mut(), 0), |buffer| (buffer.as_mut_ptr(), buffer.len()));
        let flight = Box::into_raw(Box::new(Flight { image: Arc::clone(self), buffer, tell }));
        let (raw, mut completion) = (self.raw.as_ptr(), null_mut());
        // SAFETY: the argument lives until `ended` has been called.
        let made = unsafe { (functions.rbd_aio_create_completion)(flight.cast(), ended, &raw mut completion) };
        if made < 0 {
            // SAFETY: nobody has it but us.
            return unsafe { Box::from_raw(flight) }.end(made.into());
        }
        // SAFETY: image and completion are open. The buffer is at `data` with `length` bytes and belongs to the flight, which
        // `ended` frees when librbd is done with both. Nothing else reads or writes it meanwhile.
        let started = unsafe {
            match request {
                Request::Read(_) => (functions.rbd_aio_read)(raw, offset, length, data.cast(), completion),
                Request::Write(_) => {
                    (functions.rbd_aio_write)(raw, offset, length, data.cast_const().cast(), completion)
                }
                Request::Discard(length) => (functions.rbd_aio_discard)(raw, offset, length, completion),
                Request::Zero(length, keeps_space) => functions
                    .rbd_aio_write_zeroes
                    .map_or(-EOPNOTSUPP, |zero| zero(raw, offset, length, completion, c_int::from(keeps_space), 0)),
                Request::Flush => (functions.rbd_aio_flush)(raw, completion),
            }
        };
        if started < 0 {
            // SAFETY: librbd refused the request, so it calls nobody and keeps neither.
            let flight = unsafe {
                (functions.rbd_aio_release)(completion);
                Box::from_raw(flight)
            };
            flight.end(started.into());
        }
    }

    pub(crate) fn facts(&self) -> Result<ImageFacts, Errno> {
        let (functions, raw) = (self.functions(), self.raw.as_ptr());
        let (mut features, mut flags, mut overlap_bytes) = (0, 0, 0);
        let mut info = Info {
            size_bytes: 0,
            object_bytes: 0,
            objects: 0,
            order: 0,
            block_name_prefix: [0; 24],
            parent_pool: 0,
            parent_name: [0; 96],
        };
        // SAFETY: the image is open, and each call writes what it is given.
        unsafe {
            check((functions.rbd_stat)(raw, &raw mut info, size_of::<Info>()))?;
            check((functions.rbd_get_features)(raw, &raw mut features))?;
            check((functions.rbd_get_flags)(raw, &raw mut flags))?;
            check((functions.rbd_get_overlap)(raw, &raw mut overlap_bytes))?;
        }
        let Info { size_bytes, object_bytes, .. } = info;
        Ok(ImageFacts { size_bytes, object_bytes, features, flags, overlap_bytes })
    }

    /// Blocks.
    pub(crate) fn resize(&self, size_bytes: u64) -> Result<(), Errno> {
        // SAFETY: the image is open.
        check(unsafe { (self.functions().rbd_resize)(self.raw.as_ptr(), size_bytes) })
    }

    /// Takes the exclusive lock, and keeps it from others until the image is closed. Blocks.
    pub(crate) fn acquire_lock(&self) -> Result<(), Errno> {
        const EXCLUSIVE: c_int = 0;
        // SAFETY: the image is open.
        check(unsafe { (self.functions().rbd_lock_acquire)(self.raw.as_ptr(), EXCLUSIVE) })
    }

    /// The addresses of those who have the exclusive lock. Blocks.
    pub(crate) fn lock_owners(&self) -> Result<Vec<String>, Errno> {
        const ENOENT: Errno = 2;
        let functions = self.functions();
        let mut owners = [null_mut(); 8];
        let (mut mode, mut count) = (0, owners.len());
        // SAFETY: the image is open, and at most so many pointers are written there.
        let got = unsafe {
            (functions.rbd_lock_get_owners)(self.raw.as_ptr(), &raw mut mode, owners.as_mut_ptr(), &raw mut count)
        };
        match check(got) {
            Err(ENOENT) => return Ok(Vec::new()),
            other => other?,
        }
        let count = count.min(owners.len());
        // SAFETY: so many texts were given, which the next call frees.
        let texts = owners.iter().take(count).map(|owner| unsafe { text_at(*owner) }).collect();
        // SAFETY: these are what the call above gave.
        unsafe { (functions.rbd_lock_get_owners_cleanup)(owners.as_mut_ptr(), count) }
        Ok(texts)
    }

    /// The addresses of those who have the image open for writing, or did until lately. Blocks.
    pub(crate) fn watchers(&self) -> Result<Vec<String>, Errno> {
        const WATCHERS_MAX: usize = 1024;
        let functions = self.functions();
        let mut watchers = vec![Watcher { address: null_mut(), id: 0, cookie: 0 }; WATCHERS_MAX];
        let mut count = watchers.len();
        // SAFETY: the image is open, and at most so many are written there.
        check(unsafe { (functions.rbd_watchers_list)(self.raw.as_ptr(), watchers.as_mut_ptr(), &raw mut count) })?;
        let count = count.min(watchers.len());
        // SAFETY: so many were given, which the next call frees.
        let texts = watchers.iter().take(count).map(|watcher| unsafe { text_at(watcher.address) }).collect();
        // SAFETY: these are what the call above gave.
        unsafe { (functions.rbd_watchers_list_cleanup)(watchers.as_mut_ptr(), count) }
        Ok(texts)
    }

    /// Where there are data: first byte and bytes, in the order in which librbd tells them. `whole_objects` is cheaper and
    /// coarser. More than `extents_max` are an error. Blocks.
    pub(crate) fn data_extents(
        &self,
        offset: u64,
        length: u64,
        whole_objects: bool,
        extents_max: usize,
    ) -> Result<Vec<(u64, u64)>, Errno> {
        let mut found = Found { extents: Vec::new(), extents_max };
        let arg = (&raw mut found).cast();
        let (from, with_parent) = (null(), 1);
        // SAFETY: the image is open. `add_extent` is called before this returns only, by one thread at a time, with `arg`.
        check(unsafe {
            let iterate = self.functions().rbd_diff_iterate2;
            iterate(self.raw.as_ptr(), from, offset, length, with_parent, whole_objects.into(), add_extent, arg)
        })?;
        Ok(found.extents)
    }
}

const EOPNOTSUPP: c_int = 95;

struct Found {
    extents: Vec<(u64, u64)>,
    extents_max: usize,
}

unsafe extern "C" fn add_extent(offset: u64, length: usize, exists: c_int, arg: Handle) -> c_int {
    // SAFETY: `arg` is the exclusive borrow of `Image::data_extents`, which waits for the end of these calls.
    let found = unsafe { &mut *arg.cast::<Found>() };
    if found.extents.len() >= found.extents_max {
        return ERANGE.saturating_neg();
    }
    if exists != 0 {
        found.extents.push((offset, length as u64));
    }
    0
}

/// # Safety
/// `text` is null, or ends with a zero byte and lives during the call.
unsafe fn text_at(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: as the caller promises.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}
