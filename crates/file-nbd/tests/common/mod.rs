//! Servers that tests write themselves.

#![allow(dead_code, reason = "each test file uses its part")]

use block::File;
use memory::BufferAccount;
use nbd_wire::Reader;
use nbd_wire::numbers::{answer, command, export, handshake, option};
use nbd_wire::option::{Info, OPTION_HEADER_BYTES, OptionHeader, put_answer, put_greeting};
use nbd_wire::reply::simple;
use nbd_wire::request::{COMPACT_BYTES, Request};
use ringdisk_file_nbd::{NbdUri, open};
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The size of a disk whose size nobody says.
pub(crate) const SIZE_BYTES: u64 = 1 << 30;

/// A server of a test: each connection is served by a function, which gets the connection's number.
pub(crate) struct Fake {
    _directory: tempfile::TempDir,
    socket: PathBuf,
}

impl Fake {
    pub(crate) fn start(serve: impl Fn(u64, UnixStream) + Send + Sync + 'static) -> Self {
        let directory = tempfile::Builder::new().prefix("rd-").tempdir().unwrap();
        let socket = directory.path().join("nbd");
        let (listener, serve) = (UnixListener::bind(&socket).unwrap(), Arc::new(serve));
        std::thread::spawn(move || {
            for (number, stream) in (0..).zip(listener.incoming().map_while(Result::ok)) {
                let serve = Arc::clone(&serve);
                std::thread::spawn(move || serve(number, stream));
            }
        });
        Self { _directory: directory, socket }
    }

    pub(crate) fn open(&self, more: &str, buffers: &BufferAccount) -> Arc<dyn File> {
        let uri = format!("nbd+unix:///?socket={}{more}", Path::new(&self.socket).display());
        open(&NbdUri::parse(&uri).unwrap(), false, buffers).unwrap()
    }
}

pub(crate) fn exactly(stream: &mut UnixStream, length: usize) -> Option<Vec<u8>> {
    let mut bytes = vec![0; length];
    stream.read_exact(&mut bytes).ok().map(|()| bytes)
}

/// The handshake of a server that knows simple replies only.
pub(crate) fn shake_hands(stream: &mut UnixStream, flags: u16) -> Option<()> {
    shake_hands_with(stream, flags, &[])
}

/// The handshake of a server that knows these options, too.
pub(crate) fn shake_hands_with(stream: &mut UnixStream, flags: u16, options: &[u32]) -> Option<()> {
    shake_hands_as_long_as(SIZE_BYTES, stream, flags, options)
}

/// The handshake of a server whose disk is so long.
pub(crate) fn shake_hands_as_long_as(
    size_bytes: u64,
    stream: &mut UnixStream,
    flags: u16,
    options: &[u32],
) -> Option<()> {
    let mut out = Vec::new();
    put_greeting(&mut out, handshake::FIXED_NEWSTYLE | handshake::NO_ZEROES);
    stream.write_all(&out).ok()?;
    exactly(stream, 4)?;
    loop {
        let head = exactly(stream, OPTION_HEADER_BYTES)?;
        let head = OptionHeader::read(&mut Reader::new(&head)).unwrap().unwrap();
        exactly(stream, head.length_bytes as usize)?;
        let mut out = Vec::new();
        let goes = head.option == option::GO;
        if goes {
            let info = Info::Export { size_bytes, flags: flags | export::HAS_FLAGS };
            put_answer(&mut out, option::GO, answer::INFO, &info.to_bytes());
        }
        let is_known = goes || options.contains(&head.option);
        put_answer(&mut out, head.option, if is_known { answer::ACK } else { answer::ERR_UNSUP }, &[]);
        stream.write_all(&out).ok()?;
        if goes {
            return Some(());
        }
    }
}

/// The next request. Its data are thrown away.
pub(crate) fn next_request(stream: &mut UnixStream) -> Option<Request> {
    let head = exactly(stream, COMPACT_BYTES)?;
    let request = Request::read(&mut Reader::new(&head), false).unwrap().unwrap();
    if request.command == command::WRITE {
        exactly(stream, request.length_bytes as usize)?;
    }
    Some(request)
}

pub(crate) fn reply(stream: &mut UnixStream, cookie: u64, error: u32) -> bool {
    stream.write_all(simple(cookie, error).as_bytes()).is_ok()
}
