//! Bytes of a peer, read with a check of each length.

/// The rest of a message. Each call takes bytes from the front, or returns `None` and takes nothing.
#[derive(Debug, Clone, Copy)]
pub struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    /// Makes a reader of `bytes`.
    #[must_use]
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    /// Takes a number of bytes.
    pub fn bytes(&mut self, length_bytes: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(length_bytes)?;
        self.0 = rest;
        Some(taken)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (taken, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*taken)
    }

    /// Takes an integer of 16 bits.
    pub fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_be_bytes)
    }

    /// Takes an integer of 32 bits.
    pub fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_be_bytes)
    }

    /// Takes an integer of 64 bits.
    pub fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_be_bytes)
    }

    /// Takes a string that follows its length of 32 bits.
    pub fn string(&mut self) -> Option<&'a [u8]> {
        let mut ahead = *self;
        let length = usize::try_from(ahead.u32()?).ok()?;
        let text = ahead.bytes(length)?;
        *self = ahead;
        Some(text)
    }

    /// Returns the rest.
    #[must_use]
    pub fn rest(&self) -> &'a [u8] {
        self.0
    }

    /// Whether nothing is left.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}
