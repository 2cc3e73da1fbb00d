//! A small web server with faults.

use std::io::{BufRead as _, BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// The faults of a server, and its counters.
#[derive(Default)]
pub struct Behaviour {
    /// The contents of the file.
    pub bytes: Mutex<Vec<u8>>,
    /// The header `ETag`; empty for none.
    pub tag: Mutex<String>,
    /// The header `Last-Modified`; empty for none.
    pub date: Mutex<String>,
    /// The time before each answer.
    pub latency_ms: AtomicU64,
    /// The number of requests that end in the middle of their body.
    pub cuts: AtomicU64,
    /// The number of requests that get status 503.
    pub refusals: AtomicU64,
    /// Whether connections are closed at once.
    pub is_out: AtomicBool,
    /// Whether only whole files are sent.
    pub has_no_ranges: AtomicBool,
    /// A header line that requests must have.
    pub wanted_line: Mutex<String>,
    /// The number of requests so far.
    pub requests: AtomicU64,
    /// Bytes sent in bodies of partial answers.
    pub sent_bytes: AtomicU64,
    /// The most requests that were answered at the same time.
    pub at_once_max: AtomicU64,
    at_once: AtomicU64,
    /// The target to which `/moved` redirects.
    pub moved_to: Mutex<String>,
}

/// A server of one file under every path, on a port of its own. Dropping this ends it.
pub struct WebServer {
    /// Its faults and counters.
    pub behaviour: Arc<Behaviour>,
    /// The address at which it listens.
    pub address: SocketAddr,
    stop: Arc<AtomicBool>,
}

/// Makes a connection of a socket.
pub type Wrap = Arc<dyn Fn(TcpStream) -> Option<Box<dyn Connection>> + Send + Sync>;

/// A connection of a client.
pub trait Connection: Read + Write + Send {}
impl<T: Read + Write + Send> Connection for T {}

impl WebServer {
    /// Starts a server of `bytes`, with the tag "one".
    pub fn start(bytes: &[u8]) -> Self {
        Self::start_with(bytes, Arc::new(|stream| Some(Box::new(stream) as Box<dyn Connection>)))
    }

    /// As [`WebServer::start`]. `wrap` makes connections of sockets, perhaps with TLS.
    pub fn start_with(bytes: &[u8], wrap: Wrap) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let behaviour = Arc::new(Behaviour::default());
        *behaviour.bytes.lock().unwrap() = bytes.to_vec();
        *behaviour.tag.lock().unwrap() = "\"one\"".into();
        let (address, stop) = (listener.local_addr().unwrap(), Arc::new(AtomicBool::new(false)));
        let server = Self { behaviour: Arc::clone(&behaviour), address, stop: Arc::clone(&stop) };
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                if stop.load(Ordering::SeqCst) {
                    return;
                }
                let (behaviour, wrap) = (Arc::clone(&behaviour), Arc::clone(&wrap));
                std::thread::spawn(move || {
                    let raw = stream.try_clone().unwrap();
                    if !behaviour.is_out.load(Ordering::SeqCst)
                        && let Some(connection) = wrap(stream)
                    {
                        // A client that disconnects is no failure.
                        let _ = serve(&behaviour, connection);
                    }
                    let _ = raw.shutdown(Shutdown::Both);
                });
            }
        });
        server
    }

    /// Returns the URL of a file on it.
    pub fn url(&self, path_and_keys: &str) -> String {
        format!("http://{}{path_and_keys}", self.address)
    }

    /// Returns the number of requests so far.
    pub fn requests(&self) -> u64 {
        self.behaviour.requests.load(Ordering::SeqCst)
    }
}

impl Drop for WebServer {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        let _ = TcpStream::connect(self.address);
    }
}

fn serve(behaviour: &Behaviour, connection: Box<dyn Connection>) -> std::io::Result<()> {
    let mut connection = BufReader::new(connection);
    loop {
        let mut lines = Vec::new();
        loop {
            let mut line = String::new();
            if connection.read_line(&mut line)? == 0 {
                return Ok(());
            }
            if line.trim().is_empty() {
                break;
            }
            lines.push(line.trim().to_ascii_lowercase());
        }
        if behaviour.is_out.load(Ordering::SeqCst) {
            return Ok(());
        }
        behaviour.requests.fetch_add(1, Ordering::SeqCst);
        let at_once = behaviour.at_once.fetch_add(1, Ordering::SeqCst) + 1;
        behaviour.at_once_max.fetch_max(at_once, Ordering::SeqCst);
        std::thread::sleep(Duration::from_millis(behaviour.latency_ms.load(Ordering::SeqCst)));
        let answered = answer(behaviour, connection.get_mut(), &lines);
        behaviour.at_once.fetch_sub(1, Ordering::SeqCst);
        if !answered? {
            return Ok(());
        }
    }
}

/// Takes one from a count. Returns false if it was zero.
fn take(count: &AtomicU64) -> bool {
    count.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |count| count.checked_sub(1)).is_ok()
}

/// Answers a request. Returns false if the connection ends after it.
fn answer(behaviour: &Behaviour, to: &mut dyn Connection, lines: &[String]) -> std::io::Result<bool> {
    let bytes = behaviour.bytes.lock().unwrap().clone();
    let wanted = behaviour.wanted_line.lock().unwrap().clone();
    if !wanted.is_empty() && !lines.contains(&wanted) {
        to.write_all(b"HTTP/1.1 401 No\r\nContent-Length: 0\r\n\r\n")?;
        return Ok(true);
    }
    if take(&behaviour.refusals) {
        to.write_all(b"HTTP/1.1 503 Later\r\nRetry-After: 0\r\nContent-Length: 0\r\n\r\n")?;
        return Ok(true);
    }
    if lines[0].starts_with("get /moved") {
        let place = behaviour.moved_to.lock().unwrap().clone();
        write!(to, "HTTP/1.1 302 There\r\nLocation: {place}\r\nContent-Length: 0\r\n\r\n")?;
        return Ok(true);
    }
    if lines[0].starts_with("get /missing") {
        to.write_all(b"HTTP/1.1 404 None\r\nContent-Length: 0\r\n\r\n")?;
        return Ok(true);
    }
    let (tag, date) = (behaviour.tag.lock().unwrap().clone(), behaviour.date.lock().unwrap().clone());
    let mut head = String::new();
    for (name, value) in [("ETag", tag), ("Last-Modified", date)] {
        if !value.is_empty() {
            head += &format!("{name}: {value}\r\n");
        }
    }
    let range = lines.iter().find_map(|line| line.strip_prefix("range: bytes=")?.split_once('-'));
    let range = range.filter(|_| !behaviour.has_no_ranges.load(Ordering::SeqCst));
    let Some((first, last)) = range.map(|(first, last)| (first.parse::<usize>(), last.parse::<usize>())) else {
        write!(to, "HTTP/1.1 200 All\r\n{head}Content-Length: {}\r\n\r\n", bytes.len())?;
        to.write_all(&bytes)?;
        return Ok(true);
    };
    let (first, last) = (first.unwrap(), last.unwrap().min(bytes.len().saturating_sub(1)));
    if first >= bytes.len() {
        write!(
            to,
            "HTTP/1.1 416 Outside\r\n{head}Content-Range: bytes */{}\r\nContent-Length: 0\r\n\r\n",
            bytes.len()
        )?;
        return Ok(true);
    }
    let part = &bytes[first..=last];
    let range = format!("Content-Range: bytes {first}-{last}/{}", bytes.len());
    write!(to, "HTTP/1.1 206 Part\r\n{head}{range}\r\nContent-Length: {}\r\n\r\n", part.len())?;
    let is_cut = part.len() > 1 && take(&behaviour.cuts);
    let sent = if is_cut { &part[..part.len() / 2] } else { part };
    behaviour.sent_bytes.fetch_add(sent.len() as u64, Ordering::SeqCst);
    to.write_all(sent)?;
    to.flush()?;
    Ok(!is_cut)
}
