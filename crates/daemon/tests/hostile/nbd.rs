//! Hostile clients of NBD. What they say comes from the fuzzers: their generators are files of that crate.

#[path = "../../../../fuzz/src/nbd/peer.rs"]
#[allow(dead_code)]
mod peer;
#[path = "../../../../fuzz/src/nbd/talk.rs"]
#[allow(dead_code)]
mod talk;

use super::dice::Dice;
use super::session::Tally;
use arbitrary::Unstructured;
use nbd_wire::numbers::command;
use nbd_wire::reply::Style;
use nbd_wire::request::Request;
use peer::{choose, hear, replies};
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;
use talk::{Talk, put_any_option};

/// So long a client waits for an answer: the server is busy, or it has hung up.
const PATIENCE: Duration = Duration::from_secs(60);
/// So long one waits that does not read what it is told.
const IMPATIENCE: Duration = Duration::from_millis(100);
/// The generators take their choices from so many bytes.
const CHOICES_BYTES: usize = 4096;
const OPTIONS_MAX: u64 = 24;

fn connect(socket: &Path, patience: Duration) -> std::io::Result<UnixStream> {
    let stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(patience))?;
    stream.set_write_timeout(Some(patience))?;
    Ok(stream)
}

/// Plays one session: a client that comes again and again, until it has made `wanted` requests, or that gets nowhere.
pub(crate) fn play(socket: &Path, dice: &mut Dice, wanted: u64, tally: &mut Tally) {
    tally.sessions += 1;
    tally.nbd += 1;
    match dice.below(8) {
        0 => {
            let length = dice.below(5000) as usize;
            say(socket, &dice.bytes(length), dice);
        }
        1 | 2 => {
            let mut said = (dice.below(5) as u32).to_be_bytes().to_vec();
            let choices = dice.bytes(CHOICES_BYTES);
            let mut choices = Unstructured::new(&choices);
            for _ in 0..dice.below(OPTIONS_MAX) {
                tally.messages += 1;
                // Choices that are used up end the talk.
                let _ = put_any_option(&mut choices, &mut said);
            }
            say(socket, &said, dice);
        }
        _ => {
            let mut made = 0;
            while made < wanted.max(1) {
                made += requests(socket, dice);
            }
            tally.requests += made;
        }
    }
}

/// Says something from the first byte on, and leaves at once or hears the server out.
fn say(socket: &Path, bytes: &[u8], dice: &mut Dice) {
    let Ok(stream) = connect(socket, PATIENCE) else { return };
    // A server that has left takes nothing.
    let _ = (&stream).write_all(bytes);
    if dice.percent(50) {
        let _ = stream.shutdown(Shutdown::Write);
        let _ = (&stream).read_to_end(&mut Vec::new());
    }
}

/// Chooses the export and asks for anything. Returns how many requests that were.
fn requests(socket: &Path, dice: &mut Dice) -> u64 {
    let style = dice.pick(&[Style::Simple, Style::Structured, Style::Extended]);
    let choices = dice.bytes(CHOICES_BYTES);
    let Ok(talk) = Talk::plan(&mut Unstructured::new(&choices), style == Style::Extended) else { return 1 };
    let reads = dice.percent(70);
    let mut stream = connect(socket, PATIENCE).expect("somebody listens");
    choose(&mut stream, style).expect("the export can be chosen");
    if reads {
        let heard = std::thread::scope(|scope| {
            scope.spawn(|| {
                let _ = (&stream).write_all(&talk.bytes);
                let _ = stream.shutdown(Shutdown::Write);
            });
            hear(&stream)
        });
        if talk.is_right {
            let told = replies(&heard, style, &talk.asked);
            let is_answered = |request: &Request| told.get(&request.cookie).is_some_and(|told| told.is_done);
            assert!(talk.asked.iter().all(is_answered), "a request has no reply");
        }
    } else {
        // Nobody reads the replies, and the server keeps them or waits.
        stream.set_write_timeout(Some(IMPATIENCE)).unwrap();
        for _ in 0..1 + dice.below(20) {
            if stream.write_all(&talk.bytes).is_err() {
                break;
            }
        }
    }
    talk.asked.len() as u64
}

/// A client that keeps the rules is served.
pub(crate) fn assert_served(socket: &Path) {
    let mut stream = connect(socket, PATIENCE).unwrap();
    choose(&mut stream, Style::Structured).unwrap();
    let read = Request { flags: 0, command: command::READ, cookie: 7, offset: 0, length_bytes: 4096 };
    let goodbye = Request { flags: 0, command: command::DISC, cookie: 8, offset: 0, length_bytes: 0 };
    let mut said = Vec::new();
    [read, goodbye].iter().for_each(|request| request.put(&mut said, false));
    stream.write_all(&said).unwrap();
    let told = replies(&hear(&stream), Style::Structured, &[read]);
    assert_eq!(told[&7].data.len(), 4096, "{told:?}");
}
