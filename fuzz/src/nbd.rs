//! Both sides of NBD's protocol, without sockets: a client's messages before it has a disk, and a server's replies.
//! `requests` and `answers` test a whole server and a whole client, over a socket.

pub(crate) mod answers;
mod peer;
pub(crate) mod requests;
mod talk;

use arbitrary::{Result, Unstructured};
use block::Disk;
use export_nbd::{Handshake, NbdExport, Step};
use image::NullDisk;
use nbd_wire::Reader;
use nbd_wire::option::{AnswerHeader, Info, read_greeting};
use nbd_wire::reply::{ReplyHead, Style, read_status};
use nbd_wire::request::Request;
use std::sync::Arc;
use talk::put_any_option;

const OPTIONS_MAX: usize = 24;
/// The most bytes of a server's answer to one message. (Two exports with short names.)
const ANSWER_BYTES_MAX: usize = 4096;

/// Tests a server's handshake with a client that sends anything, in pieces of any size.
pub(crate) fn server(u: &mut Unstructured<'_>) -> Result<()> {
    let disk: Arc<dyn Disk> = Arc::new(NullDisk::new(u.int_in_range(0..=1 << 40)?, String::new()));
    let exports = vec![NbdExport::new("one", Arc::clone(&disk)), NbdExport::new("two", disk)];
    let mut out = Vec::new();
    let mut handshake = Handshake::begin(exports.into(), 32 << 20, &mut out);
    let mut said = u.int_in_range(0..=4u32)?.to_be_bytes().to_vec();
    for _ in 0..u.int_in_range(0..=OPTIONS_MAX)? {
        put_any_option(u, &mut said)?;
    }
    let (mut start, mut end) = (0, 0);
    while end < said.len() {
        end = (end + u.int_in_range(1..=200usize)?).min(said.len());
        loop {
            let mut reader = Reader::new(&said[start..end]);
            let before = reader.rest().len();
            out.clear();
            let step = handshake.take(&mut reader, &mut out);
            assert!(out.len() <= ANSWER_BYTES_MAX, "{} bytes are said to one message", out.len());
            let taken = before - reader.rest().len();
            start += taken;
            match step {
                Ok(Step::Goes) => assert!(taken > 0 || !out.is_empty(), "it goes on without having done anything"),
                Ok(Step::Waits) => break,
                Ok(Step::Ready(chosen)) => {
                    assert!(chosen.export < 2);
                    return requests(u, &said[start..], chosen.style);
                }
                Ok(Step::Ends) | Err(_) => return Ok(()),
            }
        }
    }
    Ok(())
}

fn requests(u: &mut Unstructured<'_>, rest: &[u8], style: Style) -> Result<()> {
    let bytes = [rest, u.arbitrary()?].concat();
    let mut reader = Reader::new(&bytes);
    while let Ok(Some(_)) = Request::read(&mut reader, style == Style::Extended) {}
    Ok(())
}

/// Tests how a client reads a server that sends anything.
pub(crate) fn client(u: &mut Unstructured<'_>) -> Result<()> {
    let style = *u.choose(&[Style::Simple, Style::Structured, Style::Extended])?;
    let bytes: &[u8] = u.arbitrary()?;
    let _ = read_greeting(&mut Reader::new(bytes));
    let _ = AnswerHeader::read(&mut Reader::new(bytes));
    let _ = Info::read(bytes);
    for extended in [false, true] {
        if let Some((_, extents)) = read_status(bytes, extended) {
            assert!(extents.len() * 8 <= bytes.len(), "more extents than bytes");
        }
    }
    let mut reader = Reader::new(bytes);
    loop {
        let before = reader.rest().len();
        match ReplyHead::read(&mut reader, style) {
            Ok(Some(_)) => assert!(reader.rest().len() < before, "a header of no bytes"),
            Ok(None) => {
                assert_eq!(reader.rest().len(), before, "what has not arrived is kept");
                return Ok(());
            }
            Err(_) => return Ok(()),
        }
    }
}
