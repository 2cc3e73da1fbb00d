//! Options of the handshake, and their answers.

use crate::numbers::{INIT_MAGIC, OPTION_MAGIC, OPTION_REPLY_MAGIC, answer, info};
use crate::{Reader, WireError};

/// Bytes of a server's greeting.
pub const GREETING_BYTES: usize = 18;
/// Bytes before an option's data.
pub const OPTION_HEADER_BYTES: usize = 16;
/// Bytes before an answer's data.
pub const ANSWER_HEADER_BYTES: usize = 20;
/// Zeros behind the answer to `EXPORT_NAME`, where they were not refused.
pub const EXPORT_NAME_ZEROES: usize = 124;

/// The header before an option's data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OptionHeader {
    /// The number of the option.
    pub option: u32,
    /// The length of the data, in bytes.
    pub length_bytes: u32,
}

impl OptionHeader {
    /// Reads one; `Ok(None)` while it has not arrived.
    pub fn read(reader: &mut Reader<'_>) -> Result<Option<Self>, WireError> {
        let mut ahead = *reader;
        match ahead.u64() {
            None => return Ok(None),
            Some(OPTION_MAGIC) => {}
            Some(_) => return Err(WireError("an option does not begin with IHAVEOPT")),
        }
        let (Some(option), Some(length_bytes)) = (ahead.u32(), ahead.u32()) else { return Ok(None) };
        *reader = ahead;
        Ok(Some(Self { option, length_bytes }))
    }
}

/// Appends a server's greeting.
pub fn put_greeting(out: &mut Vec<u8>, flags: u16) {
    out.extend_from_slice(&INIT_MAGIC.to_be_bytes());
    out.extend_from_slice(&OPTION_MAGIC.to_be_bytes());
    out.extend_from_slice(&flags.to_be_bytes());
}

/// Reads a server's greeting: its handshake flags.
pub fn read_greeting(reader: &mut Reader<'_>) -> Result<u16, WireError> {
    let magics = (reader.u64(), reader.u64());
    match (magics, reader.u16()) {
        ((Some(INIT_MAGIC), Some(OPTION_MAGIC)), Some(flags)) => Ok(flags),
        ((Some(INIT_MAGIC), _), _) => Err(WireError("the server speaks the old NBD handshake, which is not supported")),
        _ => Err(WireError("the peer is no NBD server")),
    }
}

/// Appends an option.
pub fn put_option(out: &mut Vec<u8>, option: u32, data: &[u8]) {
    out.extend_from_slice(&OPTION_MAGIC.to_be_bytes());
    out.extend_from_slice(&option.to_be_bytes());
    put_string(out, data);
}

/// Appends a string behind its length of 32 bits.
pub fn put_string(out: &mut Vec<u8>, text: &[u8]) {
    // A longer text is cut off; none that long is ever sent.
    let length = u32::try_from(text.len()).unwrap_or(u32::MAX);
    out.extend_from_slice(&length.to_be_bytes());
    out.extend_from_slice(text.get(..usize::try_from(length).unwrap_or(0)).unwrap_or_default());
}

/// Appends an answer to an option.
pub fn put_answer(out: &mut Vec<u8>, option: u32, kind: u32, data: &[u8]) {
    out.extend_from_slice(&OPTION_REPLY_MAGIC.to_be_bytes());
    out.extend_from_slice(&option.to_be_bytes());
    out.extend_from_slice(&kind.to_be_bytes());
    put_string(out, data);
}

/// The header before an answer's data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AnswerHeader {
    /// The option that is answered.
    pub option: u32,
    /// The kind of the answer.
    pub kind: u32,
    /// The length of the data, in bytes.
    pub length_bytes: u32,
}

impl AnswerHeader {
    /// Reads one of [`ANSWER_HEADER_BYTES`].
    pub fn read(reader: &mut Reader<'_>) -> Result<Self, WireError> {
        let broken = WireError("an answer to an option is cut off");
        if reader.u64().ok_or(broken)? != OPTION_REPLY_MAGIC {
            return Err(WireError("an answer to an option begins with a wrong number"));
        }
        let (option, kind) = (reader.u32().ok_or(broken)?, reader.u32().ok_or(broken)?);
        Ok(Self { option, kind, length_bytes: reader.u32().ok_or(broken)? })
    }

    /// Whether the answer is an error.
    #[must_use]
    pub fn is_error(&self) -> bool {
        self.kind & answer::ERROR != 0
    }
}

/// The data of `INFO` and `GO`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InfoRequest<'a> {
    /// The export's name; empty for the default one.
    pub name: &'a [u8],
    /// The kinds of further information that the client wants.
    pub wanted: Vec<u16>,
}

impl<'a> InfoRequest<'a> {
    /// Reads one; `None` if it is not well formed.
    #[must_use]
    pub fn read(data: &'a [u8]) -> Option<Self> {
        let mut reader = Reader::new(data);
        let name = reader.string()?;
        let count = reader.u16()?;
        let wanted = (0..count).map(|_| reader.u16()).collect::<Option<Vec<u16>>>()?;
        reader.is_empty().then_some(Self { name, wanted })
    }

    /// Returns the bytes of the message.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = Vec::new();
        put_string(&mut out, self.name);
        out.extend_from_slice(&u16::try_from(self.wanted.len()).unwrap_or(u16::MAX).to_be_bytes());
        self.wanted.iter().for_each(|wanted| out.extend_from_slice(&wanted.to_be_bytes()));
        out
    }
}

/// The data of `LIST_META_CONTEXT` and `SET_META_CONTEXT`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MetaRequest<'a> {
    /// The export's name.
    pub name: &'a [u8],
    /// The names of the contexts that it asks for.
    pub queries: Vec<&'a [u8]>,
}

impl<'a> MetaRequest<'a> {
    /// Reads one; `None` if it is not well formed.
    #[must_use]
    pub fn read(data: &'a [u8]) -> Option<Self> {
        let mut reader = Reader::new(data);
        let name = reader.string()?;
        let count = reader.u32()?;
        // Each query takes at least four bytes, so a false count fails here at once.
        let queries = (0..count).map(|_| reader.string()).collect::<Option<Vec<_>>>()?;
        reader.is_empty().then_some(Self { name, queries })
    }

    /// Returns the bytes of the message.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = Vec::new();
        put_string(&mut out, self.name);
        out.extend_from_slice(&u32::try_from(self.queries.len()).unwrap_or(u32::MAX).to_be_bytes());
        self.queries.iter().for_each(|query| put_string(&mut out, query));
        out
    }
}

/// The contents of the answer `INFO`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Info<'a> {
    /// Size in bytes, and transmission flags.
    Export {
        /// Bytes.
        size_bytes: u64,
        /// Transmission flags.
        flags: u16,
    },
    /// The export's name.
    Name(&'a [u8]),
    /// The export's description.
    Description(&'a [u8]),
    /// Sizes of requests, in bytes.
    BlockSize {
        /// Offsets and lengths are multiples of this.
        minimum: u32,
        /// The best size.
        preferred: u32,
        /// The longest payload.
        maximum: u32,
    },
    /// Information of an unknown kind.
    Other(u16),
}

impl<'a> Info<'a> {
    /// Reads one; `None` if it is not well formed.
    #[must_use]
    pub fn read(data: &'a [u8]) -> Option<Self> {
        let mut reader = Reader::new(data);
        Some(match reader.u16()? {
            info::EXPORT => Self::Export { size_bytes: reader.u64()?, flags: reader.u16()? },
            info::NAME => Self::Name(reader.rest()),
            info::DESCRIPTION => Self::Description(reader.rest()),
            info::BLOCK_SIZE => {
                Self::BlockSize { minimum: reader.u32()?, preferred: reader.u32()?, maximum: reader.u32()? }
            }
            other => Self::Other(other),
        })
    }

    /// Returns the bytes of the message.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = Vec::new();
        let mut put = |kind: u16, parts: &[&[u8]]| {
            out.extend_from_slice(&kind.to_be_bytes());
            parts.iter().for_each(|part| out.extend_from_slice(part));
        };
        match self {
            Self::Export { size_bytes, flags } => {
                put(info::EXPORT, &[&size_bytes.to_be_bytes(), &flags.to_be_bytes()]);
            }
            Self::Name(name) => put(info::NAME, &[name]),
            Self::Description(text) => put(info::DESCRIPTION, &[text]),
            Self::BlockSize { minimum, preferred, maximum } => {
                let parts = [minimum.to_be_bytes(), preferred.to_be_bytes(), maximum.to_be_bytes()];
                put(info::BLOCK_SIZE, &[&parts.concat()]);
            }
            Self::Other(kind) => put(*kind, &[]),
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_and_what_is_cut_off_is_not() {
        let info = InfoRequest { name: b"disk", wanted: vec![3, 1] };
        let meta = MetaRequest { name: b"", queries: vec![b"base:allocation", b"qemu:"] };
        assert_eq!(InfoRequest::read(&info.to_bytes()), Some(info.clone()));
        assert_eq!(MetaRequest::read(&meta.to_bytes()), Some(meta.clone()));
        for (bytes, is_info) in [(info.to_bytes(), true), (meta.to_bytes(), false)] {
            for cut in 0..bytes.len() {
                let part = &bytes[..cut];
                assert!(if is_info { InfoRequest::read(part).is_none() } else { MetaRequest::read(part).is_none() });
            }
        }
        let lies = [&0u32.to_be_bytes()[..], &u32::MAX.to_be_bytes()].concat();
        assert_eq!(MetaRequest::read(&lies), None);
    }

    #[test]
    fn an_option_is_read_when_its_header_is_whole() {
        let mut bytes = Vec::new();
        put_option(&mut bytes, 7, b"abc");
        for cut in 0..OPTION_HEADER_BYTES {
            assert_eq!(OptionHeader::read(&mut Reader::new(&bytes[..cut])), Ok(None));
        }
        let mut reader = Reader::new(&bytes);
        assert_eq!(OptionHeader::read(&mut reader), Ok(Some(OptionHeader { option: 7, length_bytes: 3 })));
        assert_eq!(reader.rest(), b"abc");
        assert!(OptionHeader::read(&mut Reader::new(&[0; 16])).is_err());
    }
}
