//! Connecting, and what is agreed on with the server.

use crate::uri::{NbdUri, Place};
use block::{Error, ErrorKind, Result};
use nbd_tls::{Credentials, in_words, relay, shake_hands, widen};
use nbd_wire::Reader;
use nbd_wire::numbers::{BASE_ALLOCATION, PAYLOAD_BYTES_MAX, answer, handshake, info, option};
use nbd_wire::option::{
    ANSWER_HEADER_BYTES, AnswerHeader, GREETING_BYTES, Info, InfoRequest, MetaRequest, put_option, read_greeting,
};
use nbd_wire::reply::Style;
use std::io::{self, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// How long a server may take over each message.
const PATIENCE: Duration = Duration::from_secs(10);
/// The longest answer that a server is believed.
const ANSWER_BYTES_MAX: u32 = 64 << 10;
/// Answers to one option.
const ANSWERS_MAX: usize = 64;

/// A stream to a server.
#[derive(Debug)]
pub(crate) enum Stream {
    Unix(UnixStream),
    Tcp(TcpStream),
}

impl Stream {
    fn connect(place: &Place) -> io::Result<Self> {
        match place {
            Place::Unix(path) => {
                let stream = UnixStream::connect(path)?;
                widen(&stream);
                stream.set_read_timeout(Some(PATIENCE))?;
                stream.set_write_timeout(Some(PATIENCE))?;
                Ok(Self::Unix(stream))
            }
            Place::Tcp(host, port) => {
                let mut last = io::Error::new(io::ErrorKind::NotFound, "the host has no address");
                for address in (host.as_str(), *port).to_socket_addrs()? {
                    match TcpStream::connect_timeout(&address, PATIENCE) {
                        Ok(stream) => {
                            stream.set_nodelay(true)?;
                            stream.set_read_timeout(Some(PATIENCE))?;
                            stream.set_write_timeout(Some(PATIENCE))?;
                            rustix::net::sockopt::set_socket_keepalive(&stream, true)?;
                            return Ok(Self::Tcp(stream));
                        }
                        Err(error) => last = error,
                    }
                }
                Err(last)
            }
        }
    }

    /// The same socket, whatever it is, as one that reads and writes bytes.
    fn any(&self) -> io::Result<UnixStream> {
        let copy = match self {
            Self::Unix(stream) => OwnedFd::from(stream.try_clone()?),
            Self::Tcp(stream) => OwnedFd::from(stream.try_clone()?),
        };
        Ok(copy.into())
    }

    pub(crate) fn set_nonblocking(&self) -> io::Result<()> {
        match self {
            Self::Unix(stream) => stream.set_nonblocking(true),
            Self::Tcp(stream) => stream.set_nonblocking(true),
        }
    }

    fn exactly(&mut self, length: usize) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; length];
        match self {
            Self::Unix(stream) => stream.read_exact(&mut bytes)?,
            Self::Tcp(stream) => stream.read_exact(&mut bytes)?,
        }
        Ok(bytes)
    }

    fn put(&mut self, bytes: &[u8]) -> io::Result<()> {
        match self {
            Self::Unix(stream) => stream.write_all(bytes),
            Self::Tcp(stream) => stream.write_all(bytes),
        }
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Unix(stream) => stream.as_fd(),
            Self::Tcp(stream) => stream.as_fd(),
        }
    }
}

/// What a server said of its disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Agreed {
    pub(crate) style: Style,
    pub(crate) size_bytes: u64,
    pub(crate) flags: u16,
    /// Offsets and lengths are multiples of it.
    pub(crate) block_bytes: u32,
    pub(crate) payload_bytes_max: u32,
    /// The number of `base:allocation`, where the server has it.
    pub(crate) allocation: Option<u32>,
}

/// Connects, and agrees on as much as the server knows.
pub(crate) fn connect(uri: &NbdUri) -> Result<(Stream, Agreed)> {
    let failed = |error| Error::io(format!("cannot connect to {} for '{uri}'", uri.place), error);
    let stream = Stream::connect(&uri.place).map_err(failed)?;
    let mut talk = Talk { stream, uri, tls: None };
    let agreed = talk.agree()?;
    if let Some(tls) = &talk.tls {
        tls.is_agreed.store(true, Ordering::Release);
    }
    talk.stream.set_nonblocking().map_err(failed)?;
    Ok((talk.stream, agreed))
}

/// The answers to an option: those before the last, with their kinds, and the last one.
type Answers = (Vec<(u32, Vec<u8>)>, AnswerHeader, Vec<u8>);

struct Talk<'a> {
    stream: Stream,
    uri: &'a NbdUri,
    tls: Option<UnderTls>,
}

/// The thread that carries bytes to and from a server under TLS.
struct UnderTls {
    thread: JoinHandle<io::Result<()>>,
    /// From then on the thread itself says why it ends. Before, whoever opens the disk is told.
    is_agreed: Arc<AtomicBool>,
}

impl Talk<'_> {
    fn broken(&self, error: impl std::fmt::Display) -> Error {
        Error::new(ErrorKind::Protocol, format!("'{}': {error}", self.uri))
    }

    fn exactly(&mut self, length: usize) -> Result<Vec<u8>> {
        let read = self.stream.exactly(length);
        read.map_err(|error| self.left(error, "no answer from the server"))
    }

    fn put(&mut self, bytes: &[u8]) -> Result<()> {
        let put = self.stream.put(bytes);
        put.map_err(|error| self.left(error, "cannot ask the server"))
    }

    /// The error of a server that does not talk, or not any more.
    fn left(&mut self, error: io::Error, otherwise: &str) -> Error {
        use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
        if !matches!(error.kind(), UnexpectedEof | BrokenPipe | ConnectionReset) {
            return Error::io(format!("'{}': {otherwise}", self.uri), error);
        }
        // The thread has closed its end, so it is about to end.
        let ended = self.tls.take().map(|tls| tls.thread.join());
        match ended {
            Some(Ok(Err(why))) => self.broken(format_args!("TLS: {}", in_words(&why))),
            _ => self.broken("the server closed the connection before it served a disk"),
        }
    }

    fn agree(&mut self) -> Result<Agreed> {
        let greeting = self.exactly(GREETING_BYTES)?;
        let flags = read_greeting(&mut Reader::new(&greeting)).map_err(|error| self.broken(error))?;
        if flags & handshake::FIXED_NEWSTYLE == 0 {
            return Err(self.broken("the server does not know the fixed newstyle handshake, which is needed"));
        }
        let ours = u32::from(flags & (handshake::FIXED_NEWSTYLE | handshake::NO_ZEROES));
        self.put(&ours.to_be_bytes())?;
        if let Some((credentials, host)) = &self.uri.tls {
            self.start_tls(credentials, host)?;
        }
        let style = if self.is_accepted(option::EXTENDED_HEADERS)? {
            Style::Extended
        } else if self.is_accepted(option::STRUCTURED_REPLY)? {
            Style::Structured
        } else {
            Style::Simple
        };
        let allocation = if style == Style::Simple { None } else { self.allocation()? };
        self.go(style, allocation)
    }

    /// Everything after this is under TLS: a thread carries it to and from a socket that stands for the connection.
    fn start_tls(&mut self, credentials: &Credentials, host: &str) -> Result<()> {
        let (_, last, _) = self.ask(option::STARTTLS, &[])?;
        if last.is_error() {
            return Err(self.broken("the server does not serve with TLS"));
        }
        let failed = |error| Error::io(format!("'{}': TLS", self.uri), error);
        let refused = |error| Error::new(ErrorKind::Protocol, format!("'{}': TLS: {}", self.uri, in_words(&error)));
        let mut session = credentials.connect(host).map_err(|error| error.in_context(format!("'{}'", self.uri)))?;
        let mut outer = self.stream.any().map_err(failed)?;
        shake_hands(&mut session, &mut outer).map_err(refused)?;
        let (inner, own) = UnixStream::pair().map_err(failed)?;
        [&inner, &own].into_iter().for_each(widen);
        own.set_read_timeout(Some(PATIENCE)).map_err(failed)?;
        own.set_write_timeout(Some(PATIENCE)).map_err(failed)?;
        let (name, is_agreed) = (self.uri.to_string(), Arc::new(AtomicBool::new(false)));
        let says = Arc::clone(&is_agreed);
        let carry = move || {
            let ended = relay(session, outer, inner);
            if let (Err(error), true) = (&ended, says.load(Ordering::Acquire)) {
                tracing::warn!("'{name}': TLS: {}", in_words(error));
            }
            ended
        };
        let thread = std::thread::Builder::new().name("nbd-tls".into()).spawn(carry).map_err(failed)?;
        self.tls = Some(UnderTls { thread, is_agreed });
        self.stream = Stream::Unix(own);
        Ok(())
    }

    /// The answers to an option, without the last, and the last one's kind.
    fn ask(&mut self, option: u32, data: &[u8]) -> Result<Answers> {
        let mut bytes = Vec::new();
        put_option(&mut bytes, option, data);
        self.put(&bytes)?;
        let mut answers = Vec::new();
        loop {
            let head = self.exactly(ANSWER_HEADER_BYTES)?;
            let head = AnswerHeader::read(&mut Reader::new(&head)).map_err(|error| self.broken(error))?;
            if head.option != option || head.length_bytes > ANSWER_BYTES_MAX || answers.len() > ANSWERS_MAX {
                return Err(self.broken("the server's answer fits no option, or is too long"));
            }
            let data = self.exactly(usize::try_from(head.length_bytes).unwrap_or(0))?;
            if head.kind == answer::ACK || head.is_error() {
                return Ok((answers, head, data));
            }
            answers.push((head.kind, data));
        }
    }

    fn is_accepted(&mut self, option: u32) -> Result<bool> {
        Ok(!self.ask(option, &[])?.1.is_error())
    }

    fn allocation(&mut self) -> Result<Option<u32>> {
        let request = MetaRequest { name: &self.uri.export, queries: vec![BASE_ALLOCATION.as_bytes()] };
        let (answers, ..) = self.ask(option::SET_META_CONTEXT, &request.to_bytes())?;
        let id = |(kind, data): &(u32, Vec<u8>)| {
            let mut reader = Reader::new(data);
            let id = reader.u32()?;
            (*kind == answer::META_CONTEXT && reader.rest() == BASE_ALLOCATION.as_bytes()).then_some(id)
        };
        Ok(answers.iter().find_map(id))
    }

    fn go(&mut self, style: Style, allocation: Option<u32>) -> Result<Agreed> {
        let request = InfoRequest { name: &self.uri.export, wanted: vec![info::BLOCK_SIZE] };
        let (answers, last, text) = self.ask(option::GO, &request.to_bytes())?;
        if last.is_error() {
            let text: String = String::from_utf8_lossy(&text).escape_debug().take(200).collect();
            let known = match last.kind {
                answer::ERR_UNKNOWN => "the server has no such export (nbdinfo --list shows what it has)",
                answer::ERR_TLS_REQD => "the server serves with TLS only: name it as nbds:// or nbds+unix://",
                answer::ERR_UNSUP => "the server is too old: it does not know NBD_OPT_GO",
                // What the server says to these is all that is known.
                answer::ERR_POLICY if text.is_empty() => "the server does not allow it",
                _ if text.is_empty() => "the server refuses it",
                _ => return Err(self.broken(format_args!("the server refuses it: {text}"))),
            };
            return Err(self.broken(known));
        }
        let (mut export, mut sizes) = (None, (1, PAYLOAD_BYTES_MAX));
        for (_, data) in answers.iter().filter(|(kind, _)| *kind == answer::INFO) {
            match Info::read(data) {
                Some(Info::Export { size_bytes, flags }) => export = Some((size_bytes, flags)),
                Some(Info::BlockSize { minimum, maximum, .. }) => sizes = (minimum, maximum),
                _ => {}
            }
        }
        let (size_bytes, flags) = export.ok_or_else(|| self.broken("the server does not say how large the disk is"))?;
        let (block_bytes, maximum) = sizes;
        if !block_bytes.is_power_of_two() || block_bytes > 64 << 10 || maximum < block_bytes.max(4096) {
            return Err(self.broken("the server names impossible sizes of requests"));
        }
        Ok(Agreed { style, size_bytes, flags, block_bytes, payload_bytes_max: maximum, allocation })
    }
}
