//! The answer of IDENTIFY DEVICE (ATA/ATAPI-6, 8.15).

/// Length of the answer in bytes.
pub(crate) const IDENTIFY_BYTES: usize = 512;
/// The most sectors in a block of READ and WRITE MULTIPLE.
pub(crate) const MOST_MULTIPLE: u8 = 16;
/// The most sectors that words 60 and 61 report, for 28-bit commands.
pub(crate) const LBA28_SECTORS: u64 = 0x0fff_ffff;

/// The parts of the answer that differ between drives.
pub(crate) struct Identity<'a> {
    pub(crate) serial: &'a str,
    pub(crate) sectors: u64,
    pub(crate) multiple: u8,
    pub(crate) can_cache: bool,
    pub(crate) caches: bool,
}

/// Word 0: a fixed ATA drive.
const FIXED_DRIVE: u16 = 0x0040;
/// Word 49: LBA is supported; IORDY is supported and can be disabled.
const CAPABILITIES: u16 = 1 << 9 | 1 << 11 | 1 << 10;
/// Words 50, 83, 84 and 87: the word is valid.
const VALID: u16 = 1 << 14;
/// Word 53: words 64 to 70 are valid.
const TIMES_VALID: u16 = 1 << 1;
/// Word 64: PIO modes 3 and 4.
const PIO_MODES: u16 = 0b11;
/// Words 67 and 68: the cycle time of mode 4, in nanoseconds.
const CYCLE_NS: u16 = 120;
/// Word 80: ATA/ATAPI-4 to 6.
const VERSIONS: u16 = 1 << 4 | 1 << 5 | 1 << 6;
/// Words 82 and 85.
const POWER_MANAGEMENT: u16 = 1 << 3;
const WRITE_CACHE: u16 = 1 << 5;
/// Words 83 and 86: 48-bit addresses, FLUSH CACHE and FLUSH CACHE EXT.
const EXTENDED: u16 = 1 << 10 | 1 << 12 | 1 << 13;

/// Fills the first `IDENTIFY_BYTES` of `into`.
pub(crate) fn fill(identity: &Identity<'_>, into: &mut [u8]) {
    let Some(into) = into.get_mut(..IDENTIFY_BYTES) else { return };
    into.fill(0);
    let mut set = |word: usize, value: u16| {
        if let Some(bytes) = into.chunks_exact_mut(2).nth(word) {
            bytes.copy_from_slice(&value.to_le_bytes());
        }
    };
    set(0, FIXED_DRIVE);
    text(10, 20, identity.serial, &mut set);
    text(23, 8, env!("CARGO_PKG_VERSION"), &mut set);
    text(27, 40, "Ringdisk", &mut set);
    set(47, 0x8000 | u16::from(MOST_MULTIPLE));
    set(49, CAPABILITIES);
    set(50, VALID);
    set(53, TIMES_VALID);
    set(59, if identity.multiple == 0 { 0 } else { 0x100 | u16::from(identity.multiple) });
    number(60, 2, identity.sectors.min(LBA28_SECTORS), &mut set);
    set(64, PIO_MODES);
    set(67, CYCLE_NS);
    set(68, CYCLE_NS);
    set(80, VERSIONS);
    set(82, POWER_MANAGEMENT | if identity.can_cache { WRITE_CACHE } else { 0 });
    set(83, VALID | EXTENDED);
    set(84, VALID);
    set(85, POWER_MANAGEMENT | if identity.caches { WRITE_CACHE } else { 0 });
    set(86, EXTENDED);
    set(87, VALID);
    number(100, 4, identity.sectors, &mut set);
    seal(into);
}

/// Writes characters, two a word, the first in the upper byte, padded with spaces.
fn text(first: usize, length: usize, text: &str, set: &mut impl FnMut(usize, u16)) {
    let printable = text.bytes().map(|byte| if (0x20..0x7f).contains(&byte) { byte } else { b'?' });
    let mut bytes = printable.chain(std::iter::repeat(b' ')).take(length);
    let mut word = first;
    while let (Some(upper), Some(lower)) = (bytes.next(), bytes.next()) {
        set(word, u16::from_be_bytes([upper, lower]));
        word = word.saturating_add(1);
    }
}

/// Writes a number over several words, the lowest first.
fn number(first: usize, words: usize, value: u64, set: &mut impl FnMut(usize, u16)) {
    let bytes = value.to_le_bytes();
    for (word, pair) in (first..).zip(bytes.chunks_exact(2)).take(words) {
        let &[lower, upper] = pair else { return };
        set(word, u16::from_le_bytes([lower, upper]));
    }
}

/// Writes word 255: a mark, and the byte that makes the sum of all bytes zero.
fn seal(into: &mut [u8]) {
    let Some((last, rest)) = into.split_last_mut() else { return };
    if let Some(mark) = rest.last_mut() {
        *mark = 0xa5;
    }
    *last = rest.iter().fold(0_u8, |sum, byte| sum.wrapping_add(*byte)).wrapping_neg();
}
