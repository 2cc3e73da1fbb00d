//! Files on a web server that is slow, fails, moves and changes.

use block::{File, FileOp, FileQueue, IoResult, PastEnd, block_on};
use memory::{BufferAccount, IoBuf};
use ringdisk_file_http::{HttpUrl, open, open_anew};
use rustix::fs::{FlockOperation, flock};
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use testkit::{Connection, Dice, WebServer};

fn content(length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    testkit::fill_seeded(7, &mut bytes);
    bytes
}

fn opened(text: &str) -> Arc<dyn File> {
    open(&HttpUrl::parse(text).unwrap(), true, &BufferAccount::UNLIMITED).unwrap()
}

fn refused(text: &str) -> String {
    open(&HttpUrl::parse(text).unwrap(), true, &BufferAccount::UNLIMITED).unwrap_err().to_string()
}

fn read(queue: &Rc<dyn FileQueue>, offset: u64, length: usize) -> IoResult<Vec<u8>> {
    let data = IoBuf::zeroed(length).whole();
    block_on(queue.start(FileOp::Read { offset, data: data.clone(), past_end: PastEnd::Fails }))?;
    Ok(data.to_vec())
}

fn whole(text: &str) -> Vec<u8> {
    let file = opened(text);
    let length = file.length_bytes().unwrap() as usize;
    read(&file.open_blocking().unwrap(), 0, length).unwrap()
}

fn cache_key(directory: &Path) -> String {
    format!("#cache={}", directory.display())
}

#[test]
fn any_range_is_what_the_server_has_whatever_the_server_does_meanwhile() {
    let bytes = content((3 << 20) + 777);
    let server = WebServer::start(&bytes);
    let file = opened(&server.url("/a"));
    assert_eq!(file.length_bytes().unwrap(), bytes.len() as u64);
    let (queue, mut dice) = (file.open_blocking().unwrap(), Dice::new(3));
    for round in 0..200 {
        if round % 20 == 0 {
            server.behaviour.cuts.store(2, Ordering::SeqCst);
            server.behaviour.refusals.store(1, Ordering::SeqCst);
        }
        let offset = dice.below(bytes.len() as u64) as usize;
        let length = 1 + dice.below(((bytes.len() - offset) as u64).min(300_000)) as usize;
        assert!(read(&queue, offset as u64, length).unwrap() == bytes[offset..offset + length], "{offset} {length}");
    }
    let data = IoBuf::zeroed(1024).whole();
    data.fill(9);
    let offset = bytes.len() as u64 - 24;
    block_on(queue.start(FileOp::Read { offset, data: data.clone(), past_end: PastEnd::Zeros })).unwrap();
    assert!(data.to_vec()[..24] == bytes[bytes.len() - 24..] && data.to_vec()[24..] == [0; 1000]);
    assert!(read(&queue, offset, 25).is_err());
    assert!(block_on(queue.start(FileOp::WriteZeroes { offset: 0, length: 512, may_unmap: true })).is_err());
}

#[test]
fn a_sequential_reader_has_several_requests_on_their_way() {
    let bytes = content(16 << 20);
    let server = WebServer::start(&bytes);
    server.behaviour.latency_ms.store(20, Ordering::SeqCst);
    let file = opened(&server.url("/a"));
    let queue = file.open_blocking().unwrap();
    for (index, part) in bytes.chunks(128 << 10).enumerate() {
        assert!(read(&queue, (index as u64) << 17, part.len()).unwrap() == part);
    }
    assert!(server.behaviour.at_once_max.load(Ordering::SeqCst) >= 2, "never two at once");
    assert!(server.requests() < 100, "{} requests for 128 reads", server.requests());
    assert_eq!(server.behaviour.sent_bytes.load(Ordering::SeqCst), bytes.len() as u64 + 1, "each byte once");
}

#[test]
fn a_second_start_reads_nothing_from_the_network() {
    let (bytes, directory) = (content((2 << 20) + 5), tempfile::tempdir().unwrap());
    let server = WebServer::start(&bytes);
    let url = server.url(&format!("/a{}", cache_key(directory.path())));
    assert!(whole(&url) == bytes);
    let asked = server.requests();
    assert!(whole(&url) == bytes);
    assert_eq!(server.requests(), asked);
    // Not even where nobody is.
    server.behaviour.is_out.store(true, Ordering::SeqCst);
    assert!(whole(&url) == bytes);
    // A crash that has lost what was kept last: only that is fetched again.
    server.behaviour.is_out.store(false, Ordering::SeqCst);
    let files = std::fs::read_dir(directory.path()).unwrap().map(|entry| entry.unwrap().path());
    let data = files.into_iter().find(|path| path.extension().is_some_and(|kind| kind == "data")).unwrap();
    let kept = std::fs::OpenOptions::new().write(true).open(data).unwrap();
    // Reading ahead may hold the file, with its blocks in memory, for a moment longer than its last reader.
    while flock(&kept, FlockOperation::NonBlockingLockExclusive).is_err() {
        std::thread::sleep(Duration::from_millis(5));
    }
    flock(&kept, FlockOperation::Unlock).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&kept, &[0; 65536], 1 << 20).unwrap();
    let sent = server.behaviour.sent_bytes.load(Ordering::SeqCst);
    assert!(whole(&url) == bytes);
    // One block, and a byte of the search for the file.
    assert_eq!(server.behaviour.sent_bytes.load(Ordering::SeqCst) - sent, 65536 + 1);
}

#[test]
fn disks_that_share_a_file_fetch_each_block_once() {
    let (bytes, directory) = (content(4 << 20), tempfile::tempdir().unwrap());
    let server = WebServer::start(&bytes);
    let url = server.url(&format!("/a{}", cache_key(directory.path())));
    let files = [(); 4].map(|()| opened(&url));
    std::thread::scope(|scope| {
        for file in &files {
            let bytes = &bytes;
            scope.spawn(move || {
                let queue = file.open_blocking().unwrap();
                assert!(read(&queue, 0, bytes.len()).unwrap() == *bytes);
            });
        }
    });
    assert_eq!(server.behaviour.sent_bytes.load(Ordering::SeqCst), bytes.len() as u64 + 1);
}

#[test]
fn a_server_that_is_away_for_a_while_costs_no_error_and_one_that_stays_away_does() {
    let bytes = content(1 << 20);
    let server = WebServer::start(&bytes);
    let file = opened(&server.url("/a#read-ahead=0"));
    let queue = file.open_blocking().unwrap();
    server.behaviour.is_out.store(true, Ordering::SeqCst);
    let behaviour = Arc::clone(&server.behaviour);
    let back = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(700));
        behaviour.is_out.store(false, Ordering::SeqCst);
    });
    assert!(read(&queue, 0, 65536).unwrap() == bytes[..65536]);
    back.join().unwrap();
    let file = opened(&server.url("/b#read-ahead=0&retry-s=1"));
    let queue = file.open_blocking().unwrap();
    server.behaviour.is_out.store(true, Ordering::SeqCst);
    let began = Instant::now();
    assert!(read(&queue, 0, 65536).is_err());
    assert!(began.elapsed() < Duration::from_secs(60));
    // It is asked again for the next read.
    server.behaviour.is_out.store(false, Ordering::SeqCst);
    assert!(read(&queue, 0, 65536).unwrap() == bytes[..65536]);
}

#[test]
fn a_server_that_refuses_is_asked_less_and_less_often() {
    let server = WebServer::start(&content(100_000));
    let file = opened(&server.url("/a#read-ahead=0&retry-s=4"));
    server.behaviour.refusals.store(u64::MAX, Ordering::SeqCst);
    let before = server.requests();
    assert!(read(&file.open_blocking().unwrap(), 0, 512).is_err());
    let asked = server.requests() - before;
    // Without growing pauses it would be asked eighty times.
    assert!(asked <= 8, "{asked} times in four seconds");
}

/// Readers go on while their server is away for `outage`: by the cache, or by waiting.
fn read_over_an_outage(outage: Duration) {
    let (bytes, directory) = (content(8 << 20), tempfile::tempdir().unwrap());
    let server = WebServer::start(&bytes);
    server.behaviour.latency_ms.store(20, Ordering::SeqCst);
    // Requests are retried for as long as they are by default.
    let file = opened(&server.url(&format!("/a{}&read-ahead=0", cache_key(directory.path()))));
    // The first half is in the cache.
    let half = bytes.len() / 2;
    assert!(read(&file.open_blocking().unwrap(), 0, half).unwrap() == bytes[..half]);
    server.behaviour.is_out.store(true, Ordering::SeqCst);
    let until = Instant::now() + outage;
    std::thread::scope(|scope| {
        for reader in 0..4_u64 {
            let (file, bytes) = (&file, &bytes);
            scope.spawn(move || {
                let (queue, mut dice) = (file.open_blocking().unwrap(), Dice::new(reader));
                // Two of them read what nobody has yet, and wait for it; the others notice nothing.
                let (start, least) = if reader < 2 { (half, 8) } else { (0, 100) };
                let mut done = 0;
                while done < least || Instant::now() < until {
                    let offset = start + dice.below((half - 65536) as u64) as usize;
                    let length = 1 + dice.below(65536) as usize;
                    let found = read(&queue, offset as u64, length);
                    assert!(found.unwrap() == bytes[offset..offset + length], "reader {reader}, {offset}, {length}");
                    done += 1;
                    // A minute of nothing else would keep a processor from other tests.
                    std::thread::sleep(Duration::from_millis(1));
                }
            });
        }
        std::thread::sleep(until.saturating_duration_since(Instant::now()));
        server.behaviour.is_out.store(false, Ordering::SeqCst);
    });
}

#[test]
fn readers_go_on_over_an_outage_by_the_cache_or_by_waiting() {
    read_over_an_outage(Duration::from_millis(1500));
}

#[test]
#[ignore = "takes a minute; run by cargo xtask ci"]
fn readers_go_on_over_an_outage_of_a_minute() {
    read_over_an_outage(Duration::from_secs(60));
}

#[test]
fn a_file_that_changes_is_an_error_and_never_a_mix() {
    let (bytes, directory) = (content(1 << 20), tempfile::tempdir().unwrap());
    let server = WebServer::start(&bytes);
    let change = |tag: &str, date: &str, length: usize| {
        *server.behaviour.tag.lock().unwrap() = tag.into();
        *server.behaviour.date.lock().unwrap() = date.into();
        *server.behaviour.bytes.lock().unwrap() = vec![1; length];
    };
    for (path, tag, date, length) in
        [("/tag", "\"two\"", "", 1 << 20), ("/date", "", "later", 1 << 20), ("/length", "", "", (1 << 20) - 1)]
    {
        let tag_before = if tag.is_empty() { "" } else { "\"one\"" };
        change(tag_before, if date.is_empty() { "" } else { "now" }, 1 << 20);
        *server.behaviour.bytes.lock().unwrap() = bytes.clone();
        let file = opened(&server.url(&format!("{path}#read-ahead=0")));
        let queue = file.open_blocking().unwrap();
        assert!(read(&queue, 0, 65536).unwrap() == bytes[..65536]);
        change(tag, date, length);
        assert!(read(&queue, 65536, 65536).is_err(), "{path}");
        assert!(read(&queue, 0, 65536).unwrap() == bytes[..65536], "what was read is of the old one");
        // Whoever opens it anew has the new one.
        let anew = opened(&server.url(&format!("{path}#read-ahead=0")));
        assert_eq!(read(&anew.open_blocking().unwrap(), 65536, 100).unwrap(), [1; 100]);
    }
    // What is kept says which file it is of.
    change("\"one\"", "", 1 << 20);
    *server.behaviour.bytes.lock().unwrap() = bytes.clone();
    let url = server.url(&format!("/kept{}&read-ahead=0", cache_key(directory.path())));
    assert!(read(&opened(&url).open_blocking().unwrap(), 0, 65536).unwrap() == bytes[..65536]);
    change("\"two\"", "", 1 << 20);
    let queue = opened(&url).open_blocking().unwrap();
    assert!(read(&queue, 0, 65536).unwrap() == bytes[..65536]);
    assert!(read(&queue, 65536, 65536).is_err());
    let anew = opened(&format!("{url}&revalidate=on")).open_blocking().unwrap();
    assert_eq!((read(&anew, 0, 100).unwrap(), read(&anew, 65536, 100).unwrap()), (vec![1; 100], vec![1; 100]));
}

#[test]
fn what_cannot_be_opened_says_why() {
    let bytes = content(1 << 20);
    let server = WebServer::start(&bytes);
    assert!(refused(&server.url("/missing?secret")).contains("404"));
    assert!(!refused(&server.url("/missing?secret")).contains("secret"));
    *server.behaviour.moved_to.lock().unwrap() = "/moved".into();
    assert!(refused(&server.url("/moved")).contains("more than 10 times"));
    *server.behaviour.moved_to.lock().unwrap() = "file:///etc/passwd".into();
    assert!(refused(&server.url("/moved")).contains("leads to"));
    server.behaviour.has_no_ranges.store(true, Ordering::SeqCst);
    assert!(refused(&server.url("/a")).contains("does not serve ranges"));
    server.behaviour.has_no_ranges.store(false, Ordering::SeqCst);
    let writable = open(&HttpUrl::parse(&server.url("/a")).unwrap(), false, &BufferAccount::UNLIMITED).unwrap_err();
    assert!(writable.is_only_for_writing() && writable.to_string().contains("overlay"));
    server.behaviour.tag.lock().unwrap().clear();
    let directory = tempfile::tempdir().unwrap();
    assert!(refused(&server.url(&format!("/a{}", cache_key(directory.path())))).contains("cannot be cached"));
    *server.behaviour.bytes.lock().unwrap() = Vec::new();
    assert_eq!(opened(&server.url("/empty")).length_bytes().unwrap(), 0);
    *server.behaviour.wanted_line.lock().unwrap() = "authorization: basic bwu6eci=".into();
    assert!(refused(&server.url("/a")).contains("netrc-file"));
    // Somebody else may get the port of a server that has gone.
    let is_refused = || {
        let address = WebServer::start(&bytes).address;
        refused(&format!("http://{address}/a#retry-s=0")).contains("refused")
    };
    assert!((0..10).any(|_| is_refused()));
}

#[test]
fn redirects_are_followed_once_and_again_when_their_target_has_expired() {
    let bytes = content(1 << 20);
    let (server, target) = (WebServer::start(&bytes), WebServer::start(&bytes));
    *server.behaviour.moved_to.lock().unwrap() = target.url("/a?signature=1");
    let file = opened(&server.url("/moved#read-ahead=0"));
    let queue = file.open_blocking().unwrap();
    for at in 0..4 {
        assert!(read(&queue, at << 16, 65536).unwrap() == bytes[(at as usize) << 16..][..65536]);
    }
    assert_eq!((server.requests(), target.requests()), (1, 5));
    *target.behaviour.wanted_line.lock().unwrap() = "x: y".into();
    let other = WebServer::start(&bytes);
    *server.behaviour.moved_to.lock().unwrap() = other.url("/b");
    assert!(read(&queue, 8 << 16, 65536).unwrap() == bytes[8 << 16..9 << 16]);
    assert_eq!(server.requests(), 2);
}

#[test]
fn tls_is_believed_with_a_named_authority_only_and_users_are_known_by_files() {
    let bytes = content(300_000);
    let names = vec!["localhost".to_owned()];
    let rcgen::CertifiedKey { cert, signing_key } = rcgen::generate_simple_self_signed(names).unwrap();
    let key = rustls::pki_types::PrivateKeyDer::try_from(signing_key.serialize_der()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
    let config = config.with_no_client_auth().with_single_cert(vec![cert.der().clone()], key).unwrap();
    let config = Arc::new(config);
    let wrap = move |stream| {
        let session = rustls::ServerConnection::new(Arc::clone(&config)).ok()?;
        Some(Box::new(rustls::StreamOwned::new(session, stream)) as Box<dyn Connection>)
    };
    let server = WebServer::start_with(&bytes, Arc::new(wrap));
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    std::fs::write(path("ca.pem"), cert.pem()).unwrap();
    std::fs::write(path("netrc"), "machine localhost login user password secret\n").unwrap();
    *server.behaviour.wanted_line.lock().unwrap() = "authorization: basic dxnlcjpzzwnyzxq=".into();
    let url = format!("https://localhost:{}/a", server.address.port());
    assert!(refused(&url).contains("ca-file"), "{}", refused(&url));
    let trusted = format!("{url}#ca-file={}", path("ca.pem").display());
    assert!(refused(&trusted).contains("401"));
    assert!(whole(&format!("{trusted}&netrc-file={}", path("netrc").display())) == bytes);
    std::fs::write(path("headers"), "Authorization: Basic dXNlcjpzZWNyZXQ=\n").unwrap();
    assert!(whole(&format!("{trusted}&headers-file={}", path("headers").display())) == bytes);
    assert!(refused(&format!("{url}#ca-file={}", path("netrc").display())).contains("no certificate"));
}

#[test]
fn a_server_that_does_not_answer_keeps_nobody_from_opening_files_of_others() {
    let bytes = content(100_000);
    let server = WebServer::start(&bytes);
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/a#retry-s=0", silent.local_addr().unwrap());
    let waits = std::thread::spawn(move || refused(&url));
    let asked = silent.accept().unwrap();
    assert!(whole(&server.url("/a")) == bytes);
    assert!(!waits.is_finished());
    drop((asked, silent));
    waits.join().unwrap();
}

#[test]
fn a_file_that_is_given_up_ends_its_reads_and_no_others() {
    let bytes = content(4 << 20);
    let server = WebServer::start(&bytes);
    let (given_up, kept) = (opened(&server.url("/a")), opened(&server.url("/a")));
    // Asked again and again, for longer than anybody waits.
    server.behaviour.refusals.store(u64::MAX, Ordering::SeqCst);
    let reads = {
        let file = Arc::clone(&given_up);
        std::thread::spawn(move || read(&file.open_blocking().unwrap(), 0, 65536))
    };
    let deadline = Instant::now() + Duration::from_secs(60);
    while server.requests() < 4 && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(!reads.is_finished() && given_up.cancel());
    assert!(reads.join().unwrap().is_err());
    assert!(read(&given_up.open_blocking().unwrap(), 1 << 20, 512).is_err());
    server.behaviour.refusals.store(0, Ordering::SeqCst);
    assert!(read(&kept.open_blocking().unwrap(), 0, 65536).unwrap() == bytes[..65536]);
}

#[test]
fn a_file_that_is_opened_anew_is_what_the_server_has_now_although_the_old_one_is_open() {
    let directory = tempfile::tempdir().unwrap();
    for (keys, is_named) in [(String::new(), true), (String::new(), false), (cache_key(directory.path()), true)] {
        let server = WebServer::start(&[1; 8192]);
        let tag = |tag: &str| *server.behaviour.tag.lock().unwrap() = if is_named { tag.into() } else { String::new() };
        tag("\"one\"");
        let url = server.url(&format!("/a{keys}"));
        let anew = || {
            let file = open_anew(&HttpUrl::parse(&url).unwrap(), true, &BufferAccount::UNLIMITED).unwrap();
            read(&file.open_blocking().unwrap(), 0, 4096).unwrap()
        };
        let old = opened(&url);
        assert_eq!(read(&old.open_blocking().unwrap(), 0, 4096).unwrap(), [1; 4096]);
        assert_eq!(anew(), [1; 4096]);
        *server.behaviour.bytes.lock().unwrap() = vec![2; 8192];
        tag("\"two\"");
        assert_eq!(anew(), [2; 4096], "{keys} {is_named}");
        // What is remembered of the old one stays with the old one.
        assert_eq!(read(&old.open_blocking().unwrap(), 0, 4096).unwrap(), [1; 4096], "{keys} {is_named}");
    }
}
