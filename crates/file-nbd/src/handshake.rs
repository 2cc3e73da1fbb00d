//! Connecting to a server, and the handshake.

use crate::stream::Stream;
use crate::uri::NbdUri;
use block::{Error, ErrorKind, Result};
use nbd_tls::{ClientTls, in_words};
use nbd_wire::Reader;
use nbd_wire::numbers::{BASE_ALLOCATION, PAYLOAD_BYTES_MAX, answer, handshake, info, option};
use nbd_wire::option::{
    ANSWER_HEADER_BYTES, AnswerHeader, GREETING_BYTES, Info, InfoRequest, MetaRequest, put_option, read_greeting,
};
use nbd_wire::reply::Style;
use std::io::{self, Read, Write};
use std::time::{Duration, Instant};

/// How long connecting may take in all.
const PATIENCE: Duration = Duration::from_secs(20);
/// The longest answer that is accepted.
const ANSWER_BYTES_MAX: u32 = 64 << 10;
/// The most answers to one option.
const ANSWERS_MAX: usize = 64;

/// Returns the deadline for connecting, from now on.
pub(crate) fn end_of_patience() -> Instant {
    let now = Instant::now();
    now.checked_add(PATIENCE).unwrap_or(now)
}

/// The result of the handshake.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Agreed {
    pub(crate) style: Style,
    pub(crate) size_bytes: u64,
    pub(crate) flags: u16,
    /// Offsets and lengths of requests are multiples of this.
    pub(crate) block_bytes: u32,
    pub(crate) payload_bytes_max: u32,
    /// The number of the context `base:allocation`, if the server has it.
    pub(crate) allocation: Option<u32>,
}

impl Agreed {
    pub(crate) fn is_extended(&self) -> bool {
        self.style == Style::Extended
    }
}

/// Connects by `until`, and negotiates the best that the server offers.
pub(crate) fn connect(uri: &NbdUri, until: Instant) -> Result<(Stream, Agreed)> {
    let failed = |error| Error::io(format!("cannot connect to {} for '{uri}'", uri.server), error);
    let stream = Stream::connect(&uri.server, until).map_err(failed)?;
    let mut talk = Talk { stream, uri, until }.greet()?;
    if let Some((tls, host)) = &uri.tls {
        talk = talk.start_tls(tls, host)?;
    }
    let agreed = talk.agree()?;
    talk.stream.set_nonblocking().map_err(failed)?;
    Ok((talk.stream, agreed))
}

/// The answers to an option: all but the last, with their kinds; then the last one's header and data.
type Answers = (Vec<(u32, Vec<u8>)>, AnswerHeader, Vec<u8>);

struct Talk<'a> {
    stream: Stream,
    uri: &'a NbdUri,
    until: Instant,
}

impl Talk<'_> {
    fn broken(&self, error: impl std::fmt::Display) -> Error {
        Error::new(ErrorKind::Protocol, format!("'{}': {error}", self.uri))
    }

    fn exactly(&mut self, length: usize) -> Result<Vec<u8>> {
        let mut bytes = vec![0; length];
        let read = self.stream.until(self.until).read_exact(&mut bytes).map(|()| bytes);
        read.map_err(|error| self.left(error, "no answer from the server"))
    }

    fn put(&mut self, bytes: &[u8]) -> Result<()> {
        let put = self.stream.until(self.until).write_all(bytes);
        put.map_err(|error| self.left(error, "cannot ask the server"))
    }

    /// Returns the error to report when the server does not speak NBD or closes the connection.
    fn left(&mut self, error: io::Error, otherwise: &str) -> Error {
        use io::ErrorKind::{BrokenPipe, ConnectionReset, InvalidData, UnexpectedEof};
        // A server that refuses a certificate sends an alert before it goes; it may have arrived.
        let said = match error.kind() {
            BrokenPipe | ConnectionReset => self.stream.until(self.until).read(&mut [0; 1]).err(),
            _ => None,
        };
        match said.filter(|said| said.kind() == InvalidData).unwrap_or(error) {
            error if error.kind() == InvalidData => self.broken(error),
            error if matches!(error.kind(), UnexpectedEof | BrokenPipe | ConnectionReset) => {
                self.broken("the server closed the connection before it served a disk")
            }
            error => Error::io(format!("'{}': {otherwise}", self.uri), error),
        }
    }

    fn greet(mut self) -> Result<Self> {
        let greeting = self.exactly(GREETING_BYTES)?;
        let flags = read_greeting(&mut Reader::new(&greeting)).map_err(|error| self.broken(error))?;
        if flags & handshake::FIXED_NEWSTYLE == 0 {
            return Err(self.broken("the server does not know the fixed newstyle handshake, which is needed"));
        }
        let ours = u32::from(flags & (handshake::FIXED_NEWSTYLE | handshake::NO_ZEROES));
        self.put(&ours.to_be_bytes())?;
        Ok(self)
    }

    fn agree(&mut self) -> Result<Agreed> {
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

    /// Starts TLS; all later messages are encrypted.
    fn start_tls(mut self, tls: &ClientTls, host: &str) -> Result<Self> {
        let (_, last, _) = self.ask(option::STARTTLS, &[])?;
        if last.is_error() {
            return Err(self.broken("the server does not serve with TLS"));
        }
        let session = tls.begin(host).map_err(|error| error.in_context(format!("'{}'", self.uri)))?;
        let refused = |error| Error::new(ErrorKind::Protocol, format!("'{}': TLS: {}", self.uri, in_words(&error)));
        let channel = session.run(&mut self.stream.until(self.until)).map_err(refused)?;
        let stream = self.stream.secured(channel);
        Ok(Self { stream, ..self })
    }

    /// Sends an option; returns its answers.
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
                // For these, the server's own text is better, if there is one.
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

#[cfg(test)]
mod tests {
    use super::*;
    use nbd_wire::numbers::export;
    use nbd_wire::option::{put_answer, put_greeting};
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};
    use std::os::unix::net::{UnixListener, UnixStream};

    /// All that a server says; `to_tls` is its answer to STARTTLS, if it has one.
    fn words(to_tls: Option<u32>) -> Vec<u8> {
        let mut words = Vec::new();
        put_greeting(&mut words, handshake::FIXED_NEWSTYLE | handshake::NO_ZEROES);
        to_tls.into_iter().for_each(|kind| put_answer(&mut words, option::STARTTLS, kind, &[]));
        put_answer(&mut words, option::EXTENDED_HEADERS, answer::ERR_UNSUP, &[]);
        put_answer(&mut words, option::STRUCTURED_REPLY, answer::ERR_UNSUP, &[]);
        let info = Info::Export { size_bytes: 4096, flags: export::HAS_FLAGS };
        put_answer(&mut words, option::GO, answer::INFO, &info.to_bytes());
        put_answer(&mut words, option::GO, answer::ACK, &[]);
        words
    }

    /// Says it byte by byte; it does not listen.
    fn say_slowly(mut stream: UnixStream, pause: Duration) {
        for byte in words(None) {
            if stream.write_all(&[byte]).is_err() {
                return;
            }
            std::thread::sleep(pause);
        }
        let _ = stream.read_to_end(&mut Vec::new());
    }

    #[test]
    fn a_server_that_says_all_slowly_has_a_limit_in_all() {
        let directory = tempfile::Builder::new().prefix("rd-").tempdir().unwrap();
        let socket = directory.path().join("nbd");
        let listener = UnixListener::bind(&socket).unwrap();
        let uri = NbdUri::parse(&format!("nbd+unix:///?socket={}", socket.display())).unwrap();
        std::thread::spawn(move || {
            // More than 100 bytes: two seconds and more.
            say_slowly(listener.accept().unwrap().0, Duration::from_millis(20));
            say_slowly(listener.accept().unwrap().0, Duration::ZERO);
        });
        let failed = connect(&uri, Instant::now() + Duration::from_millis(500)).unwrap_err();
        assert!(failed.to_string().contains("timed out"), "{failed}");
        assert_eq!(connect(&uri, end_of_patience()).unwrap().1.size_bytes, 4096);
    }

    #[test]
    fn who_wants_tls_hears_nothing_that_is_said_in_plain() {
        let directory = tempfile::Builder::new().prefix("rd-").tempdir().unwrap();
        let (socket, keys) = (directory.path().join("nbd"), directory.path().join("keys"));
        std::fs::write(&keys, "me:00112233445566778899aabbccddeeff\n").unwrap();
        let listener = UnixListener::bind(&socket).unwrap();
        let (socket, keys) = (socket.display(), keys.display());
        let uri = NbdUri::parse(&format!("nbds+unix:///?socket={socket}&tls-psk-file={keys}")).unwrap();
        for (to_tls, told) in [(answer::ACK, "TLS: "), (answer::ERR_UNSUP, "does not serve with TLS")] {
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    let mut stream = listener.accept().unwrap().0;
                    stream.write_all(&words(Some(to_tls))).unwrap();
                    let _ = stream.read_to_end(&mut Vec::new());
                });
                let failed = connect(&uri, end_of_patience()).unwrap_err();
                assert!(failed.to_string().contains(told), "{failed}");
            });
        }
    }

    #[test]
    fn a_server_that_accepts_nobody_has_a_limit() {
        let directory = tempfile::Builder::new().prefix("rd-").tempdir().unwrap();
        let socket = directory.path().join("nbd");
        let listener = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
        rustix::net::bind(&listener, &SocketAddrUnix::new(&socket).unwrap()).unwrap();
        rustix::net::listen(&listener, 0).unwrap();
        let _queued = UnixStream::connect(&socket).unwrap();
        let uri = NbdUri::parse(&format!("nbd+unix:///?socket={}", socket.display())).unwrap();
        let failed = connect(&uri, Instant::now() + Duration::from_millis(100)).unwrap_err();
        assert!(failed.to_string().contains("cannot connect"), "{failed}");
    }
}
