//! The calls of GnuTLS that are used, as its headers declare them: the only module of this crate with `unsafe`. Other
//! modules see owned sessions, bytes and error numbers.
//!
//! A session never touches a socket: it reads arrived bytes that its caller lends it, and leaves bytes to be sent in
//! memory of its own.

use crate::keys::SharedKeys;
use block::{Error, ErrorKind, Result};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::ptr::{NonNull, null_mut};
use std::sync::{Arc, OnceLock};

/// The name of the library in Debian's package.
const LIBRARY: &str = "libgnutls.so.30";
/// Key exchanges with shared keys, and ephemeral keys in all of them: who learns a shared key later cannot read old
/// traffic. A shared key goes with suites of SHA-256 only. Of those, GnuTLS would choose ChaCha20, which takes five times
/// as long as AES where the processor has AES. So AES goes first, and a server chooses by its own order.
const PRIORITIES: &CStr = c"NORMAL:-KX-ALL:+ECDHE-PSK:+DHE-PSK:-VERS-ALL:+VERS-TLS1.3:+VERS-TLS1.2\
    :-CIPHER-ALL:+AES-128-GCM:+AES-256-GCM:+CHACHA20-POLY1305:%SERVER_PRECEDENCE";

const SERVER: c_uint = 1;
const CLIENT: c_uint = 1 << 1;
const NONBLOCK: c_uint = 1 << 3;
const NO_TICKETS: c_uint = 1 << 10;
const CRD_PSK: c_int = 4;
const PSK_KEY_RAW: c_int = 0;
const SHUT_WR: c_int = 1;
const E_MEMORY_ERROR: c_int = -25;
const EAGAIN: c_int = 11;

/// More bytes must arrive first.
pub(crate) const AGAIN: Code = -28;
/// The call must be repeated.
pub(crate) const INTERRUPTED: Code = -52;
/// The peer has sent a warning.
pub(crate) const WARNING_ALERT: Code = -16;
/// The peer has sent a fatal alert.
pub(crate) const FATAL_ALERT: Code = -12;

/// For a name without a key, the library goes on with a random one. So nobody learns which names there are.
const UNKNOWN_USER: c_int = 1;
/// What a server answers to a client with another key: bad record, illegal parameter, failed decryption, unknown name.
const ALERTS_OF_OTHER_KEYS: [c_int; 4] = [20, 47, 51, 115];
/// What it finds itself: failed decryption, an illegal parameter, no credentials.
const ERRORS_OF_OTHER_KEYS: [Code; 3] = [-24, -55, -32];

/// An error number of GnuTLS.
pub(crate) type Code = i32;

type Handle = *mut c_void;
type Push = unsafe extern "C" fn(Handle, *const c_void, usize) -> isize;
type Pull = unsafe extern "C" fn(Handle, *mut c_void, usize) -> isize;
type PullTimeout = unsafe extern "C" fn(Handle, c_uint) -> c_int;
type Find = unsafe extern "C" fn(Handle, *const c_char, *mut Datum) -> c_int;
type Malloc = unsafe extern "C" fn(usize) -> *mut c_void;

/// `gnutls_datum_t`.
#[repr(C)]
struct Datum {
    data: *mut u8,
    length: c_uint,
}

macro_rules! functions {
    ($($name:ident: ($($arg:ty),*) -> $ret:ty;)*) => {
        /// The functions by their names in C.
        struct Functions {
            $($name: unsafe extern "C" fn($($arg),*) -> $ret,)*
            /// A variable of the library: the allocator for keys that the library frees.
            gnutls_malloc: *const Malloc,
        }

        impl Functions {
            /// # Safety
            /// The library has these functions as GnuTLS's headers declare them.
            unsafe fn of(library: &Library) -> Result<Self, libloading::Error> {
                // SAFETY: the types are those of the headers, as the caller promises. The library is never unloaded.
                unsafe {
                    Ok(Self {
                        $($name: *library.get(concat!(stringify!($name), "\0").as_bytes())?,)*
                        gnutls_malloc: *library.get(b"gnutls_malloc\0")?,
                    })
                }
            }
        }
    };
}

functions! {
    gnutls_init: (*mut Handle, c_uint) -> c_int;
    gnutls_deinit: (Handle) -> ();
    gnutls_priority_set_direct: (Handle, *const c_char, *mut *const c_char) -> c_int;
    gnutls_psk_allocate_server_credentials: (*mut Handle) -> c_int;
    gnutls_psk_free_server_credentials: (Handle) -> ();
    gnutls_psk_set_server_credentials_function: (Handle, Find) -> ();
    gnutls_psk_allocate_client_credentials: (*mut Handle) -> c_int;
    gnutls_psk_free_client_credentials: (Handle) -> ();
    gnutls_psk_set_client_credentials: (Handle, *const c_char, *const Datum, c_int) -> c_int;
    gnutls_credentials_set: (Handle, c_int, Handle) -> c_int;
    gnutls_session_set_ptr: (Handle, Handle) -> ();
    gnutls_session_get_ptr: (Handle) -> Handle;
    gnutls_transport_set_ptr: (Handle, Handle) -> ();
    gnutls_transport_set_push_function: (Handle, Push) -> ();
    gnutls_transport_set_pull_function: (Handle, Pull) -> ();
    gnutls_transport_set_pull_timeout_function: (Handle, PullTimeout) -> ();
    gnutls_transport_set_errno: (Handle, c_int) -> ();
    gnutls_handshake: (Handle) -> c_int;
    gnutls_record_send: (Handle, *const c_void, usize) -> isize;
    gnutls_record_recv_packet: (Handle, *mut Handle) -> isize;
    gnutls_packet_get: (Handle, *mut Datum, *mut u8) -> ();
    gnutls_packet_deinit: (Handle) -> ();
    gnutls_bye: (Handle, c_int) -> c_int;
    gnutls_alert_get: (Handle) -> c_int;
    gnutls_alert_get_name: (c_int) -> *const c_char;
    gnutls_alert_send_appropriate: (Handle, c_int) -> c_int;
    gnutls_error_is_fatal: (c_int) -> c_int;
    gnutls_strerror: (c_int) -> *const c_char;
}

/// GnuTLS, loaded once and never unloaded.
pub(crate) struct Gnutls {
    functions: Functions,
    _library: Library,
}

// SAFETY: the functions may be called by any thread, and the variable behind the pointer is set by nobody here.
unsafe impl Send for Gnutls {}
// SAFETY: as above.
unsafe impl Sync for Gnutls {}

static LOADED: OnceLock<Gnutls> = OnceLock::new();

/// Returns the library; loads it at the first call.
pub(crate) fn gnutls() -> Result<&'static Gnutls> {
    if let Some(loaded) = LOADED.get() {
        return Ok(loaded);
    }
    let failed = |error: libloading::Error| {
        let message = format!(
            "TLS with shared keys: the library '{LIBRARY}' cannot be loaded: install Debian's package libgnutls30"
        );
        Error::with_source(ErrorKind::Unsupported, message, error)
    };
    // SAFETY: GnuTLS's initialisers expect nothing of a program. It is the system's own, as if it had been linked.
    let library = unsafe { Library::open(Some(LIBRARY), RTLD_NOW | RTLD_LOCAL) }.map_err(failed)?;
    // SAFETY: the name has the version of this interface, which GnuTLS only adds to.
    let functions = unsafe { Functions::of(&library) }.map_err(failed)?;
    Ok(LOADED.get_or_init(|| Gnutls { functions, _library: library }))
}

/// Bytes that have arrived for a session, and bytes that it wants to be sent.
struct Pipes {
    session: Handle,
    /// Lent by the caller of the function of the library that runs; empty while none runs.
    arrived: *const [u8],
    sealed: Vec<u8>,
}

/// The plain bytes of a record, where the library has put them.
pub(crate) struct Record {
    library: &'static Gnutls,
    packet: NonNull<c_void>,
    bytes: NonNull<[u8]>,
}

// SAFETY: the memory belongs to nothing else, and any thread may free it.
unsafe impl Send for Record {}

impl std::fmt::Debug for Record {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Record").field("length_bytes", &self.bytes.len()).finish_non_exhaustive()
    }
}

impl Record {
    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: the packet has these bytes as long as it lives, and nobody changes them.
        unsafe { self.bytes.as_ref() }
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        // SAFETY: nobody else has the packet.
        unsafe { (self.library.functions.gnutls_packet_deinit)(self.packet.as_ptr()) };
    }
}

/// The role that the credentials were allocated for: they are freed by a function of that role.
enum Credentials {
    Server,
    Client,
}

/// A session with shared keys.
pub(crate) struct Session {
    library: &'static Gnutls,
    session: NonNull<c_void>,
    credentials: NonNull<c_void>,
    role: Credentials,
    /// From `Box::into_raw`. Borrowed by the callbacks while a function of the library runs, and by methods while none does.
    pipes: NonNull<Pipes>,
    /// The keys among which the callback looks for the client's.
    keys: Arc<SharedKeys>,
}

// SAFETY: GnuTLS lets any one thread at a time use a session, and each method that calls it takes `&mut self`.
unsafe impl Send for Session {}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Session").finish_non_exhaustive()
    }
}

fn check(returned: c_int) -> Result<(), Code> {
    if returned < 0 { Err(returned) } else { Ok(()) }
}

fn count(returned: isize) -> Result<usize, Code> {
    usize::try_from(returned).map_err(|_| Code::try_from(returned).unwrap_or(E_MEMORY_ERROR))
}

/// No bytes.
const NONE: &[u8] = &[];

/// Callback: takes the bytes that the session sends.
unsafe extern "C" fn push(pipes: Handle, bytes: *const c_void, length: usize) -> isize {
    // SAFETY: the pointer is the session's `pipes`, which live as long as it, and no method borrows them while a function of
    // the library runs. The bytes are readable, as the header says of this callback.
    let (pipes, bytes) =
        unsafe { (&mut *pipes.cast::<Pipes>(), std::slice::from_raw_parts(bytes.cast::<u8>(), length)) };
    pipes.sealed.extend_from_slice(bytes);
    length.cast_signed()
}

/// Callback: gives the session bytes that have arrived.
unsafe extern "C" fn pull(pipes: Handle, room: *mut c_void, length: usize) -> isize {
    // SAFETY: as in `push`; the room is writable.
    let (pipes, room) =
        unsafe { (&mut *pipes.cast::<Pipes>(), std::slice::from_raw_parts_mut(room.cast::<u8>(), length)) };
    // SAFETY: they are lent as long as a function of the library runs, which calls this.
    let arrived = unsafe { &*pipes.arrived };
    if arrived.is_empty() {
        if let Some(library) = LOADED.get() {
            // SAFETY: the handle is the session that calls this.
            unsafe { (library.functions.gnutls_transport_set_errno)(pipes.session, EAGAIN) };
        }
        return -1;
    }
    let taken = crate::copy_to(room, arrived);
    pipes.arrived = arrived.get(taken..).unwrap_or_default();
    taken.cast_signed()
}

unsafe extern "C" fn pull_timeout(pipes: Handle, _ms: c_uint) -> c_int {
    // SAFETY: as in `push`, shared.
    let pipes = unsafe { &*pipes.cast::<Pipes>() };
    c_int::from(!pipes.arrived.is_empty())
}

/// Callback of a server: finds the key of a client.
unsafe extern "C" fn find(session: Handle, user: *const c_char, key: *mut Datum) -> c_int {
    let Some(library) = LOADED.get() else { return E_MEMORY_ERROR };
    // SAFETY: the pointer of a session was set to its keys, which it holds. The name is a text, as the header says.
    let (keys, user) =
        unsafe { (&*(library.functions.gnutls_session_get_ptr)(session).cast::<SharedKeys>(), CStr::from_ptr(user)) };
    let Some(found) = keys.of(user.to_bytes()) else { return UNKNOWN_USER };
    let Ok(length) = c_uint::try_from(found.len()) else { return -1 };
    // SAFETY: the variable holds the function that the library frees such memory for.
    let copy = unsafe { (*library.functions.gnutls_malloc)(found.len()) }.cast::<u8>();
    if copy.is_null() {
        return E_MEMORY_ERROR;
    }
    // SAFETY: the memory was made with this length, and the library takes it over with the datum, which is its own.
    unsafe {
        std::ptr::copy_nonoverlapping(found.as_ptr(), copy, found.len());
        *key = Datum { data: copy, length };
    }
    0
}

impl Session {
    /// Makes a server's session, for any client with one of the keys.
    pub(crate) fn server(keys: &Arc<SharedKeys>) -> Result<Self> {
        let library = gnutls()?;
        let functions = &library.functions;
        let mut credentials = null_mut();
        // SAFETY: it writes a handle.
        let made = unsafe { (functions.gnutls_psk_allocate_server_credentials)(&raw mut credentials) };
        let credentials = handle(library, made, credentials)?;
        // SAFETY: the handle is one of a server. The callback may be called as long as a session uses it.
        unsafe { (functions.gnutls_psk_set_server_credentials_function)(credentials.as_ptr(), find) };
        Self::begin(library, credentials, Credentials::Server, keys)
    }

    /// Makes a client's session with this key.
    pub(crate) fn client(user: &CString, key: &[u8]) -> Result<Self> {
        let library = gnutls()?;
        let functions = &library.functions;
        let mut credentials = null_mut();
        // SAFETY: it writes a handle.
        let made = unsafe { (functions.gnutls_psk_allocate_client_credentials)(&raw mut credentials) };
        let credentials = handle(library, made, credentials)?;
        let datum = Datum { data: key.as_ptr().cast_mut(), length: c_uint::try_from(key.len()).unwrap_or(0) };
        // From here on the session frees them.
        let session = Self::begin(library, credentials, Credentials::Client, &Arc::default())?;
        // SAFETY: the library copies the name and the key, and writes to neither.
        let set = unsafe {
            (functions.gnutls_psk_set_client_credentials)(
                credentials.as_ptr(),
                user.as_ptr(),
                &raw const datum,
                PSK_KEY_RAW,
            )
        };
        check(set).map_err(|code| failed(library, code))?;
        Ok(session)
    }

    fn begin(
        library: &'static Gnutls,
        credentials: NonNull<c_void>,
        role: Credentials,
        keys: &Arc<SharedKeys>,
    ) -> Result<Self> {
        let functions = &library.functions;
        let flags = NONBLOCK | NO_TICKETS | if matches!(role, Credentials::Server) { SERVER } else { CLIENT };
        let mut session = null_mut();
        // SAFETY: it writes a handle.
        let made = unsafe { (functions.gnutls_init)(&raw mut session, flags) };
        let session = match handle(library, made, session) {
            Ok(session) => session,
            Err(error) => {
                free(library, &role, credentials);
                return Err(error);
            }
        };
        let pipes = Pipes { session: session.as_ptr(), arrived: NONE, sealed: Vec::new() };
        let pipes = NonNull::from(Box::leak(Box::new(pipes)));
        let session = Self { library, session, credentials, role, pipes, keys: Arc::clone(keys) };
        let raw = session.session.as_ptr();
        // SAFETY: the handles are live, and what the pointers lead to lives until `drop` has ended the session.
        let set =
            unsafe {
                (functions.gnutls_session_set_ptr)(raw, Arc::as_ptr(&session.keys).cast_mut().cast());
                (functions.gnutls_transport_set_ptr)(raw, pipes.as_ptr().cast());
                (functions.gnutls_transport_set_push_function)(raw, push);
                (functions.gnutls_transport_set_pull_function)(raw, pull);
                (functions.gnutls_transport_set_pull_timeout_function)(raw, pull_timeout);
                check((functions.gnutls_priority_set_direct)(raw, PRIORITIES.as_ptr(), null_mut()))
                    .and(check((functions.gnutls_credentials_set)(raw, CRD_PSK, credentials.as_ptr())))
            };
        set.map_err(|code| failed(library, code))?;
        Ok(session)
    }

    fn pipes(&mut self) -> &mut Pipes {
        // SAFETY: they live as long as the session, and no function of the library runs.
        unsafe { self.pipes.as_mut() }
    }

    /// Returns the bytes to be sent.
    pub(crate) fn sealed(&mut self) -> &mut Vec<u8> {
        &mut self.pipes().sealed
    }

    /// Whether there are bytes to be sent.
    pub(crate) fn has_sealed(&self) -> bool {
        // SAFETY: as in `pipes`, shared.
        unsafe { !self.pipes.as_ref().sealed.is_empty() }
    }

    fn call<T>(&mut self, call: impl FnOnce(&Functions, Handle) -> T) -> T {
        call(&self.library.functions, self.session.as_ptr())
    }

    /// Calls a function that reads of `arrived`, which is left with what was not read.
    fn read<T>(&mut self, arrived: &mut &[u8], call: impl FnOnce(&Functions, Handle) -> T) -> T {
        self.pipes().arrived = *arrived;
        let returned = self.call(call);
        let left = std::mem::replace(&mut self.pipes().arrived, NONE).len();
        *arrived = arrived.get(arrived.len().saturating_sub(left)..).unwrap_or_default();
        returned
    }

    /// Goes on with the handshake.
    pub(crate) fn handshake(&mut self, arrived: &mut &[u8]) -> Result<(), Code> {
        // SAFETY: the handle is live, and its callbacks are set.
        check(self.read(arrived, |functions, session| unsafe { (functions.gnutls_handshake)(session) }))
    }

    /// Opens a record. `None` means that the peer has ended. After a message that is no data, such as a new key, the
    /// error is [`AGAIN`], too, and bytes may be left in `arrived`.
    pub(crate) fn receive(&mut self, arrived: &mut &[u8]) -> Result<Option<Record>, Code> {
        let mut packet = null_mut();
        // SAFETY: as in `handshake`; it writes a handle.
        count(self.read(arrived, |functions, session| unsafe {
            (functions.gnutls_record_recv_packet)(session, &raw mut packet)
        }))?;
        let Some(packet) = NonNull::new(packet) else { return Ok(None) };
        let mut datum = Datum { data: null_mut(), length: 0 };
        // SAFETY: the packet is live, and it writes where its bytes are. A number of it is not asked for.
        unsafe { (self.library.functions.gnutls_packet_get)(packet.as_ptr(), &raw mut datum, null_mut()) };
        let bytes = NonNull::new(datum.data).unwrap_or(NonNull::dangling());
        let bytes = NonNull::slice_from_raw_parts(bytes, usize::try_from(datum.length).unwrap_or(0));
        Ok(Some(Record { library: self.library, packet, bytes }))
    }

    /// Seals the first of the bytes; returns how many.
    pub(crate) fn send(&mut self, bytes: &[u8]) -> Result<usize, Code> {
        // SAFETY: as in `handshake`; the bytes are readable.
        count(self.call(|functions, session| unsafe {
            (functions.gnutls_record_send)(session, bytes.as_ptr().cast(), bytes.len())
        }))
    }

    /// Tells the peer that nothing more comes.
    pub(crate) fn end(&mut self) {
        // SAFETY: as in `handshake`. All that is pushed is taken, so it never has to be called again.
        self.call(|functions, session| unsafe { (functions.gnutls_bye)(session, SHUT_WR) });
    }

    /// Tells the peer why this side ends.
    pub(crate) fn alert(&mut self, code: Code) {
        // SAFETY: as in `handshake`.
        self.call(|functions, session| unsafe { (functions.gnutls_alert_send_appropriate)(session, code) });
    }

    /// Changes the keys that this side sends with.
    #[cfg(test)]
    pub(crate) fn renew_keys(&mut self) {
        // SAFETY: the library is the one that is loaded already, and the type is that of its header.
        let renewed = unsafe {
            let library = Library::open(Some(LIBRARY), RTLD_NOW | RTLD_LOCAL).unwrap();
            let renew = library.get::<unsafe extern "C" fn(Handle, c_uint) -> c_int>(b"gnutls_session_key_update\0");
            (renew.unwrap())(self.session.as_ptr(), 0)
        };
        assert_eq!(renewed, 0);
    }

    /// Whether the session is over after this error.
    pub(crate) fn is_fatal(&self, code: Code) -> bool {
        // SAFETY: it takes a number.
        unsafe { (self.library.functions.gnutls_error_is_fatal)(code) != 0 }
    }

    /// Whether a handshake has failed by this error because the peers have different keys, or different names for them.
    pub(crate) fn is_of_other_keys(&self, code: Code) -> bool {
        match code {
            // SAFETY: the handle is live.
            FATAL_ALERT => ALERTS_OF_OTHER_KEYS
                .contains(&unsafe { (self.library.functions.gnutls_alert_get)(self.session.as_ptr()) }),
            code => ERRORS_OF_OTHER_KEYS.contains(&code),
        }
    }

    /// Puts an error into words.
    pub(crate) fn in_words(&self, code: Code) -> String {
        let functions = &self.library.functions;
        if code == FATAL_ALERT {
            // SAFETY: the handle is live; the name is a text of the library's own, if there is one.
            let name =
                unsafe { (functions.gnutls_alert_get_name)((functions.gnutls_alert_get)(self.session.as_ptr())) };
            if !name.is_null() {
                // SAFETY: as above.
                return format!("the peer says: {}", unsafe { CStr::from_ptr(name) }.to_string_lossy());
            }
        }
        words(self.library, code)
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // SAFETY: nobody else has the handle. It is ended before what it uses.
        unsafe { (self.library.functions.gnutls_deinit)(self.session.as_ptr()) };
        free(self.library, &self.role, self.credentials);
        // SAFETY: from `Box::leak`, and the session that knew it has ended.
        drop(unsafe { Box::from_raw(self.pipes.as_ptr()) });
    }
}

fn free(library: &Gnutls, role: &Credentials, credentials: NonNull<c_void>) {
    let free = match role {
        Credentials::Server => library.functions.gnutls_psk_free_server_credentials,
        Credentials::Client => library.functions.gnutls_psk_free_client_credentials,
    };
    // SAFETY: they are of that kind, and the session that used them has ended.
    unsafe { free(credentials.as_ptr()) };
}

fn words(library: &Gnutls, code: Code) -> String {
    // SAFETY: it takes a number, and gives a text of the library's own.
    unsafe { CStr::from_ptr((library.functions.gnutls_strerror)(code)) }.to_string_lossy().into_owned()
}

fn failed(library: &Gnutls, code: Code) -> Error {
    Error::new(ErrorKind::Unsupported, format!("TLS with shared keys: {}", words(library, code)))
}

fn handle(library: &Gnutls, returned: c_int, made: Handle) -> Result<NonNull<c_void>> {
    check(returned).map_err(|code| failed(library, code))?;
    NonNull::new(made).ok_or_else(|| failed(library, E_MEMORY_ERROR))
}
