//! What a client negotiates: bytes in, bytes out, no socket.

use crate::context::Context;
use crate::export::NbdExport;
use crate::limits::OPTION_BYTES_MAX;
use nbd_wire::numbers::{
    ALLOCATION_DEPTH, BASE_ALLOCATION, DIRTY_BITMAP, STRING_BYTES_MAX, answer, handshake, info, option,
};
use nbd_wire::option::{
    EXPORT_NAME_ZEROES, Info, InfoRequest, MetaRequest, OptionHeader, put_answer, put_greeting, put_string,
};
use nbd_wire::reply::Style;
use nbd_wire::{Reader, WireError};
use std::sync::Arc;

/// What is longer than this is no option, but an attack.
const OPTION_BYTES_SKIPPED_MAX: u32 = 1 << 20;

impl Context {
    /// Those of an export, with their names.
    fn of(export: &NbdExport) -> Vec<(Self, String)> {
        let mut all = vec![(Self::Allocation, BASE_ALLOCATION.to_owned()), (Self::Depth, ALLOCATION_DEPTH.to_owned())];
        let bitmaps = export.bitmaps.iter().enumerate();
        all.extend(bitmaps.map(|(index, bitmap)| (Self::Bitmap(index), format!("{DIRTY_BITMAP}{}", bitmap.name))));
        all
    }
}

/// Whether a query that is no whole name lists a context: by its namespace, or as one of all bitmaps.
fn lists(query: &[u8], name: &str) -> bool {
    let family = name.split_inclusive(':').next().unwrap_or(name);
    query == family.as_bytes() || query == DIRTY_BITMAP.as_bytes() && name.starts_with(DIRTY_BITMAP)
}

/// What was agreed on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Negotiated {
    /// Which export.
    pub export: usize,
    /// The headers of replies.
    pub style: Style,
    /// What the status of bytes tells.
    pub contexts: Vec<Context>,
}

/// What comes next.
#[derive(Debug, PartialEq, Eq)]
pub enum Step {
    /// More has to arrive first.
    Waits,
    /// A message was dealt with.
    Goes,
    /// Requests follow.
    Ready(Negotiated),
    /// The client is to be disconnected, when its answers are sent.
    Ends,
}

/// One client's handshake.
#[derive(Debug)]
pub struct Handshake {
    exports: Arc<[NbdExport]>,
    payload_bytes_max: u32,
    style: Style,
    /// The contexts that were chosen, and for which export.
    contexts: Option<(usize, Vec<Context>)>,
    has_flags: bool,
    no_zeroes: bool,
    is_under_tls: bool,
    /// An option that is too long: which one, and what is left of it.
    skipping: Option<(u32, u32)>,
}

impl Handshake {
    /// Begins: `out` gets the greeting.
    #[must_use]
    pub fn begin(exports: Arc<[NbdExport]>, payload_bytes_max: u32, out: &mut Vec<u8>) -> Self {
        put_greeting(out, handshake::FIXED_NEWSTYLE | handshake::NO_ZEROES);
        let (style, contexts, skipping) = (Style::Simple, None, None);
        let (has_flags, no_zeroes, is_under_tls) = (false, false, false);
        Self { exports, payload_bytes_max, style, contexts, has_flags, no_zeroes, is_under_tls, skipping }
    }

    /// The same of a client that has TLS already.
    #[must_use]
    pub fn under_tls(self) -> Self {
        Self { is_under_tls: true, ..self }
    }

    /// Deals with one message, if it is there, and appends what is to be answered. An error disconnects the client.
    pub fn take(&mut self, input: &mut Reader<'_>, out: &mut Vec<u8>) -> Result<Step, WireError> {
        if !self.has_flags {
            return self.take_flags(input);
        }
        if let Some((option, left)) = self.skipping.take() {
            let here = u32::try_from(input.rest().len()).unwrap_or(u32::MAX).min(left);
            input.bytes(usize::try_from(here).unwrap_or(0));
            let left = left.saturating_sub(here);
            if left > 0 {
                self.skipping = Some((option, left));
                return Ok(Step::Waits);
            }
            put_answer(out, option, answer::ERR_TOO_BIG, b"the option is too long");
            return Ok(Step::Goes);
        }
        let mut ahead = *input;
        let Some(OptionHeader { option, length_bytes }) = OptionHeader::read(&mut ahead)? else {
            return Ok(Step::Waits);
        };
        if length_bytes > OPTION_BYTES_SKIPPED_MAX {
            return Err(WireError("an option says that it is longer than a mebibyte"));
        }
        if length_bytes > OPTION_BYTES_MAX {
            self.skipping = Some((option, length_bytes));
            *input = ahead;
            return Ok(Step::Goes);
        }
        let Some(data) = ahead.bytes(usize::try_from(length_bytes).unwrap_or(usize::MAX)) else {
            return Ok(Step::Waits);
        };
        *input = ahead;
        self.answer(option, data, out)
    }

    fn take_flags(&mut self, input: &mut Reader<'_>) -> Result<Step, WireError> {
        let Some(flags) = input.u32() else { return Ok(Step::Waits) };
        let known = u32::from(handshake::FIXED_NEWSTYLE | handshake::NO_ZEROES);
        if flags & !known != 0 {
            return Err(WireError("the client wants handshake flags that were not offered"));
        }
        self.has_flags = true;
        self.no_zeroes = flags & u32::from(handshake::NO_ZEROES) != 0;
        Ok(Step::Goes)
    }

    fn answer(&mut self, option: u32, data: &[u8], out: &mut Vec<u8>) -> Result<Step, WireError> {
        let mut say = |kind: u32, text: &str| put_answer(out, option, kind, text.as_bytes());
        match option {
            option::EXPORT_NAME => return self.export_name(data, out),
            option::ABORT => {
                say(answer::ACK, "");
                return Ok(Step::Ends);
            }
            option::GO | option::INFO => {
                if let (Some(export), true) = (self.info(option, data, out), option == option::GO) {
                    return Ok(Step::Ready(self.negotiated(export)));
                }
            }
            option::LIST_META_CONTEXT | option::SET_META_CONTEXT => self.meta_context(option, data, out),
            option::LIST | option::STRUCTURED_REPLY | option::EXTENDED_HEADERS if !data.is_empty() => {
                say(answer::ERR_INVALID, "this option takes no data");
            }
            option::LIST => self.list(out),
            option::STRUCTURED_REPLY => match self.style {
                Style::Simple => {
                    self.style = Style::Structured;
                    say(answer::ACK, "");
                }
                Style::Structured => say(answer::ERR_INVALID, "structured replies were chosen before"),
                Style::Extended => say(answer::ERR_EXT_HEADER_REQD, "extended headers were chosen before"),
            },
            option::EXTENDED_HEADERS => match self.style {
                Style::Extended => say(answer::ERR_INVALID, "extended headers were chosen before"),
                Style::Simple | Style::Structured => {
                    self.style = Style::Extended;
                    say(answer::ACK, "");
                }
            },
            option::STARTTLS if self.is_under_tls => say(answer::ERR_INVALID, "this is under TLS already"),
            option::STARTTLS => say(answer::ERR_POLICY, "this server has no TLS"),
            _ => say(answer::ERR_UNSUP, "this option is not known here"),
        }
        Ok(Step::Goes)
    }

    fn negotiated(&self, export: usize) -> Negotiated {
        let chosen = self.contexts.as_ref().filter(|(of, _)| *of == export);
        let contexts = chosen.map(|(_, contexts)| contexts.clone()).unwrap_or_default();
        Negotiated { export, style: self.style, contexts }
    }

    /// A name of nothing means the first export, if no export is called so.
    fn find(&self, name: &[u8]) -> Option<(usize, &NbdExport)> {
        let named = self.exports.iter().enumerate().find(|(_, export)| export.name.as_bytes() == name);
        named.or_else(|| self.exports.iter().enumerate().next().filter(|_| name.is_empty()))
    }

    fn export_name(&self, name: &[u8], out: &mut Vec<u8>) -> Result<Step, WireError> {
        // This option has no answer that says no.
        let (index, export) = self.find(name).ok_or(WireError("the client wants an export that is not here"))?;
        let info = export.disk.info();
        out.extend_from_slice(&info.size_bytes.to_be_bytes());
        out.extend_from_slice(&export.flags(&info, self.style != Style::Simple).to_be_bytes());
        if !self.no_zeroes {
            out.extend_from_slice(&[0; EXPORT_NAME_ZEROES]);
        }
        Ok(Step::Ready(self.negotiated(index)))
    }

    /// Tells about an export; `None` if there is no such.
    fn info(&self, option: u32, data: &[u8], out: &mut Vec<u8>) -> Option<usize> {
        let Some(request) = InfoRequest::read(data).filter(|request| request.name.len() <= STRING_BYTES_MAX) else {
            put_answer(out, option, answer::ERR_INVALID, b"the option is not well formed");
            return None;
        };
        let Some((index, export)) = self.find(request.name) else {
            put_answer(out, option, answer::ERR_UNKNOWN, b"there is no export of this name");
            return None;
        };
        let disk = export.disk.info();
        let mut tell = |info: Info<'_>| put_answer(out, option, answer::INFO, &info.to_bytes());
        if request.wanted.contains(&info::NAME) {
            tell(Info::Name(export.name.as_bytes()));
        }
        if request.wanted.contains(&info::DESCRIPTION) && !export.description.is_empty() {
            tell(Info::Description(export.description.as_bytes()));
        }
        let minimum = disk.logical_block_bytes.max(1);
        let preferred = disk.topology.optimal_io_bytes.max(4096).max(minimum);
        let preferred = if preferred.is_power_of_two() { preferred } else { 4096.max(minimum) };
        tell(Info::BlockSize { minimum, preferred, maximum: self.payload_bytes_max });
        let flags = export.flags(&disk, self.style != Style::Simple);
        tell(Info::Export { size_bytes: disk.size_bytes, flags });
        put_answer(out, option, answer::ACK, &[]);
        Some(index)
    }

    fn list(&self, out: &mut Vec<u8>) {
        for export in self.exports.iter() {
            let mut data = Vec::new();
            put_string(&mut data, export.name.as_bytes());
            data.extend_from_slice(export.description.as_bytes());
            put_answer(out, option::LIST, answer::SERVER, &data);
        }
        put_answer(out, option::LIST, answer::ACK, &[]);
    }

    fn meta_context(&mut self, option: u32, data: &[u8], out: &mut Vec<u8>) {
        let sets = option == option::SET_META_CONTEXT;
        if sets {
            self.contexts = None;
        }
        let Some(request) = MetaRequest::read(data) else {
            return put_answer(out, option, answer::ERR_INVALID, b"the option is not well formed");
        };
        if sets && self.style == Style::Simple {
            return put_answer(out, option, answer::ERR_INVALID, b"metadata contexts need structured replies");
        }
        let Some((index, export)) = self.find(request.name) else {
            return put_answer(out, option, answer::ERR_UNKNOWN, b"there is no export of this name");
        };
        let is_asked = |(_, name): &(Context, String)| {
            let all = !sets && request.queries.is_empty();
            all || request.queries.iter().any(|query| *query == name.as_bytes() || !sets && lists(query, name))
        };
        let found: Vec<(Context, String)> = Context::of(export).into_iter().filter(is_asked).collect();
        for (context, name) in &found {
            let data = [&context.id().to_be_bytes(), name.as_bytes()].concat();
            put_answer(out, option, answer::META_CONTEXT, &data);
        }
        let found = found.into_iter().map(|(context, _)| context).collect();
        put_answer(out, option, answer::ACK, &[]);
        if sets {
            self.contexts = Some((index, found));
        }
    }
}
