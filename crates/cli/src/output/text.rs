//! The program's output, and its exit code.

use super::program;
use crate::signals;
use block::{Error, ErrorKind, without_numbers};
use std::io::{self, Write};
use std::process::ExitCode;

const FAILURE: u8 = 1;
const USAGE: u8 = 2;

/// Prints to standard output. A reader that has gone (`ringdisk info | head -1`) is not an error.
pub(crate) fn print(text: &str) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(()),
    }
}

/// Prints an error for a person.
pub(crate) fn error(error: &anyhow::Error) {
    let message = match () {
        () if signals::has_interrupted() => interrupted(error),
        () if program::is_qemu_img() && is_locked(error) => with_lock_words(&format!("{error:#}")),
        () => format!("{error:#}"),
    };
    tell(&message);
}

/// Prints a message for a person, after the program's name.
fn tell(message: &str) {
    let message = without_numbers(message).split('\n').map(printable).collect::<Vec<_>>().join("\n");
    // If standard error is gone, the message is lost.
    let _ = writeln!(io::stderr(), "{}: {message}", program::name());
}

/// Returns the message of an interrupted command: the interruption comes first, and only once.
fn interrupted(error: &anyhow::Error) -> String {
    let parts = error.chain().map(ToString::to_string).filter(|part| part != INTERRUPTED);
    let parts = parts.map(|part| part.trim_end_matches(": interrupted").to_owned());
    std::iter::once(INTERRUPTED.to_owned()).chain(parts).collect::<Vec<_>>().join(": ")
}

/// Whether the error says that the image is in use.
pub(crate) fn is_locked(error: &anyhow::Error) -> bool {
    error.chain().filter_map(|cause| cause.downcast_ref::<Error>()).any(|cause| cause.kind() == ErrorKind::Locked)
}

/// Puts qemu-img's words for an image in use before the message: scripts look for them.
fn with_lock_words(message: &str) -> String {
    let Some((before, after)) = message.split_once(" is in use") else {
        return message.to_owned();
    };
    let name = before.rsplit('\'').nth(1).unwrap_or_default();
    let kind = if after.contains("open for writing there") { "shared \"write\"" } else { "\"write\"" };
    let words = format!("Failed to get {kind} lock\nIs another process using the image [{name}]?");
    format!("Could not open '{name}': {words}\n{message}")
}

/// The message of interrupted jobs and commands.
const INTERRUPTED: &str = "interrupted";

/// Returns a name from an image with its non-text bytes written as `\xff`.
pub(crate) fn with_bytes_shown(name: &str) -> String {
    let show = |char: char| image::escaped_byte(char).map_or(char.to_string(), |byte| format!("\\x{byte:02x}"));
    name.chars().map(show).collect()
}

/// Escapes control characters: names from images must not control a terminal.
pub(crate) fn printable(text: &str) -> String {
    with_bytes_shown(text)
        .chars()
        .flat_map(|char| if char.is_control() { char.escape_default().collect() } else { vec![char] })
        .collect()
}

/// Prints a warning for a person. The error at the end says that the program was interrupted.
pub(crate) fn warn(message: &str) {
    tell(message);
}

/// Makes an error for wrong usage.
pub(crate) fn usage(message: impl Into<String>) -> anyhow::Error {
    Error::new(ErrorKind::BadOption, message).into()
}

/// As [`usage`]; under qemu-img's name it points to the verb's help, as there.
pub(crate) fn usage_of(verb: &str, message: &str) -> anyhow::Error {
    match program::is_qemu_img() {
        true => usage(format!("{message}\nTry '{} {verb} --help' for more info", program::name())),
        false => usage(message),
    }
}

/// Returns 2 for wrong usage and 1 for every other error; as qemu-img always 1.
pub(crate) fn exit_code(error: &anyhow::Error) -> ExitCode {
    let is_usage = !program::is_qemu_img()
        && error.downcast_ref::<Error>().is_some_and(|error| error.kind() == ErrorKind::BadOption);
    ExitCode::from(if is_usage { USAGE } else { FAILURE })
}

/// Ends the program with a code of its own, or by the signal that interrupted it. Call it when everything is closed.
pub(crate) fn exit(code: i32) -> ! {
    signals::end_if_interrupted();
    std::process::exit(code)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interruption_is_told_first_and_once() {
        let cancelled = || anyhow::Error::from(Error::new(ErrorKind::Cancelled, "interrupted"));
        assert_eq!(interrupted(&cancelled()), "interrupted");
        let removed = cancelled().context("interrupted").context("'x' was removed again");
        assert_eq!(interrupted(&removed), "interrupted: 'x' was removed again");
        let nested = Error::new(ErrorKind::Cancelled, "interrupted").in_context("disk.qcow2");
        assert_eq!(interrupted(&nested.into()), "interrupted: disk.qcow2");
        let other = anyhow::anyhow!("no space").context("'x' is incomplete");
        assert_eq!(interrupted(&other), "interrupted: 'x' is incomplete: no space");
    }

    #[test]
    fn an_image_in_use_is_told_in_the_words_that_scripts_look_for_with_its_name() {
        for (said, kind) in [
            ("Could not open 'a b': it is in use by pid 7 (vm): it is open for writing there", "shared \"write\""),
            ("'a b' is in use by pid 7 (vm): an image that is written belongs to one alone", "\"write\""),
        ] {
            let expected = format!(
                "Could not open 'a b': Failed to get {kind} lock\nIs another process using the image [a b]?\n{said}"
            );
            assert_eq!(with_lock_words(said), expected);
        }
    }
}
