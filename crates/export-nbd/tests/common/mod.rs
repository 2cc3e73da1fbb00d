//! A server over a real image on a real reactor, and a client that says just what a test wants.

#![allow(dead_code, unreachable_pub, reason = "each test file uses its part")]

use block::{Disk, ReactorHandle};
use drive::{DriveOptions, OpenedDisk, ParsedDrive, open_disk};
use engine::{Reactor, ReactorConfig, ReactorThread};
use image::BackingPolicy;
use nbd_wire::Reader;
use nbd_wire::numbers::{answer, handshake, option};
use nbd_wire::option::{ANSWER_HEADER_BYTES, AnswerHeader, GREETING_BYTES, InfoRequest, MetaRequest, put_option};
use nbd_wire::reply::{ReplyHead, Style};
use nbd_wire::request::Request;
use ringdisk_export_nbd::{NbdExport, NbdListener, NbdServer, ServerOptions};
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::Arc;
use std::time::Duration;

/// Whatever these tests wait for takes less time than this, unless it hangs.
pub const PATIENCE: Duration = Duration::from_secs(60);

pub struct Served {
    server: Option<NbdServer>,
    disks: Vec<OpenedDisk>,
    reactor: Option<ReactorThread>,
    pub directory: tempfile::TempDir,
    pub socket: PathBuf,
}

impl Served {
    /// Serves the images of `drives`, whose files are made in a directory by `prepare`.
    pub fn start(prepare: impl FnOnce(&Path) -> Vec<String>, options: ServerOptions) -> Self {
        let directory = tempfile::Builder::new().prefix("rd-").tempdir().unwrap();
        let drives = prepare(directory.path());
        let socket = directory.path().join("nbd");
        let reactor = Reactor::spawn(ReactorConfig::default()).unwrap();
        let (mut disks, mut exports) = (Vec::new(), Vec::new());
        for text in drives {
            let ParsedDrive::Drive(drive) = DriveOptions::parse(&text).unwrap() else { panic!("help") };
            let opened = open_disk(&drive.disk, BackingPolicy::SameDir, &[]).unwrap();
            let disk: Arc<dyn Disk> = Arc::clone(&opened.disk);
            exports.push(NbdExport::new(drive.disk.name.clone().unwrap_or_default(), disk).with(|export| {
                export.description = format!("the disk {}", export.name);
                export.read_only = drive.export.read_only;
            }));
            disks.push(opened);
        }
        let listener = NbdListener::Unix(UnixListener::bind(&socket).unwrap());
        let reactors: Vec<Arc<dyn ReactorHandle>> = vec![reactor.handle()];
        let server = NbdServer::start(listener, exports, reactors, options).unwrap();
        Self { server: Some(server), disks, reactor: Some(reactor), directory, socket }
    }

    /// One raw disk of so many bytes, under the name "disk".
    pub fn raw(size_bytes: u64, options: ServerOptions) -> Self {
        let prepare = |directory: &Path| {
            let file = directory.join("disk.raw");
            std::fs::File::create(&file).unwrap().set_len(size_bytes).unwrap();
            vec![format!("file={},format=raw,name=disk", file.display())]
        };
        Self::start(prepare, options)
    }

    pub fn disk(&self, index: usize) -> &OpenedDisk {
        &self.disks[index]
    }

    pub fn server(&self) -> &NbdServer {
        self.server.as_ref().unwrap()
    }

    pub fn uri(&self, export: &str) -> String {
        format!("nbd+unix:///{export}?socket={}", self.socket.display())
    }

    pub fn stop(&mut self) {
        self.server.take().unwrap().stop();
        for disk in self.disks.drain(..) {
            disk.close().unwrap();
        }
        self.reactor.take().unwrap().stop().unwrap();
    }

    pub fn connect(&self) -> UnixStream {
        let stream = UnixStream::connect(&self.socket).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream
    }
}

/// Where the distribution puts its tools: nbdsh needs the Python that it was made for.
const TOOLS: &str = "/usr/bin:/bin:/usr/sbin:/sbin";

/// Runs a tool, which must succeed.
pub fn tool(name: &str, arguments: &[&str]) -> String {
    let output = try_tool(name, arguments);
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{name} {arguments:?}: {}{}", text(&output.stdout), text(&output.stderr));
    text(&output.stdout)
}

pub fn try_tool(name: &str, arguments: &[&str]) -> Output {
    Command::new(name)
        .args(arguments)
        .env("PATH", TOOLS)
        .stdin(Stdio::null())
        .output()
        .unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// A client that has chosen its export.
pub struct Client {
    pub stream: UnixStream,
    pub style: Style,
    cookie: u64,
}

pub fn read_exactly(stream: &mut UnixStream, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    stream.read_exact(&mut bytes).unwrap();
    bytes
}

/// Reads answers up to the one that ends an option.
pub fn answers(stream: &mut UnixStream) -> Vec<(u32, Vec<u8>)> {
    let mut all = Vec::new();
    loop {
        let head = read_exactly(stream, ANSWER_HEADER_BYTES);
        let head = AnswerHeader::read(&mut Reader::new(&head)).unwrap();
        let data = read_exactly(stream, head.length_bytes as usize);
        all.push((head.kind, data));
        if head.kind == answer::ACK || head.is_error() {
            return all;
        }
    }
}

pub fn ask(stream: &mut UnixStream, option: u32, data: &[u8]) -> Vec<(u32, Vec<u8>)> {
    let mut bytes = Vec::new();
    put_option(&mut bytes, option, data);
    stream.write_all(&bytes).unwrap();
    answers(stream)
}

/// Greets the server.
pub fn greet(mut stream: UnixStream) -> UnixStream {
    read_exactly(&mut stream, GREETING_BYTES);
    let flags = u32::from(handshake::FIXED_NEWSTYLE | handshake::NO_ZEROES);
    stream.write_all(&flags.to_be_bytes()).unwrap();
    stream
}

impl Client {
    pub fn connect(served: &Served, style: Style, contexts: &[&str]) -> Self {
        Self::connect_to(served, "disk", style, contexts)
    }

    pub fn connect_to(served: &Served, export: &str, style: Style, contexts: &[&str]) -> Self {
        let name = export.as_bytes();
        let mut stream = greet(served.connect());
        let chosen = match style {
            Style::Simple => None,
            Style::Structured => Some(option::STRUCTURED_REPLY),
            Style::Extended => Some(option::EXTENDED_HEADERS),
        };
        if let Some(option) = chosen {
            assert_eq!(ask(&mut stream, option, &[])[0].0, answer::ACK);
        }
        if !contexts.is_empty() {
            let queries = contexts.iter().map(|context| context.as_bytes()).collect();
            let data = MetaRequest { name, queries }.to_bytes();
            assert_eq!(ask(&mut stream, option::SET_META_CONTEXT, &data).len(), contexts.len() + 1);
        }
        let go = ask(&mut stream, option::GO, &InfoRequest { name, wanted: vec![] }.to_bytes());
        assert_eq!(go.last().unwrap().0, answer::ACK);
        Self { stream, style, cookie: 0 }
    }

    pub fn send(&mut self, command: u16, flags: u16, offset: u64, length_bytes: u64, payload: &[u8]) -> u64 {
        self.cookie += 1;
        let mut bytes = Vec::new();
        let request = Request { flags, command, cookie: self.cookie, offset, length_bytes };
        request.put(&mut bytes, self.style == Style::Extended);
        bytes.extend_from_slice(payload);
        self.stream.write_all(&bytes).unwrap();
        self.cookie
    }

    /// The next header.
    pub fn head(&mut self) -> ReplyHead {
        let mut bytes = Vec::new();
        loop {
            if let Some(head) = ReplyHead::read(&mut Reader::new(&bytes), self.style).unwrap() {
                return head;
            }
            bytes.extend(read_exactly(&mut self.stream, 1));
        }
    }

    /// The next reply, of one chunk: its kind and payload. Of simple replies the error number.
    pub fn reply(&mut self) -> (u16, u64, Vec<u8>) {
        match self.head() {
            ReplyHead::Simple { error, cookie } => (error as u16, cookie, Vec::new()),
            ReplyHead::Chunk(chunk) => {
                let payload = read_exactly(&mut self.stream, chunk.length_bytes as usize);
                (chunk.kind, chunk.cookie, payload)
            }
        }
    }
}

/// A server's certificate that is its own authority.
pub fn self_signed(directory: &Path) {
    let rcgen::CertifiedKey { cert, signing_key } = rcgen::generate_simple_self_signed(["localhost".into()]).unwrap();
    for (name, text) in
        [("ca-cert", cert.pem()), ("server-cert", cert.pem()), ("server-key", signing_key.serialize_pem())]
    {
        std::fs::write(directory.join(format!("{name}.pem")), text).unwrap();
    }
}
