//! What the program prints, and with which code it ends.

use super::program;
use block::{Error, ErrorKind};
use std::io::{self, Write};
use std::process::ExitCode;

const FAILURE: u8 = 1;
const USAGE: u8 = 2;

/// Prints to standard output. A reader that went away (`ringdisk info | head -1`) is not an error.
pub(crate) fn print(text: &str) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(()),
    }
}

/// Tells a person what went wrong.
pub(crate) fn error(error: &anyhow::Error) {
    let program = program::name();
    let message = format!("{error:#}").split('\n').map(printable).collect::<Vec<_>>().join("\n");
    // Nobody can be told that standard error is gone.
    let _ = writeln!(io::stderr(), "{program}: {message}");
}

/// Names come out of images: nothing in them may steer a terminal.
pub(crate) fn printable(text: &str) -> String {
    text.chars().flat_map(|char| if char.is_control() { char.escape_default().collect() } else { vec![char] }).collect()
}

/// Tells a person what is strange.
pub(crate) fn warn(message: &str) {
    error(&anyhow::anyhow!("{message}"));
}

/// An error in how the program was called.
pub(crate) fn usage(message: impl Into<String>) -> anyhow::Error {
    Error::new(ErrorKind::BadOption, message).into()
}

/// 2 for wrong usage, 1 for everything else; qemu-img knows only 1.
pub(crate) fn exit_code(error: &anyhow::Error) -> ExitCode {
    let is_usage = !program::is_qemu_img()
        && error.downcast_ref::<Error>().is_some_and(|error| error.kind() == ErrorKind::BadOption);
    ExitCode::from(if is_usage { USAGE } else { FAILURE })
}

/// Ends the program with a code of its own. Call it when everything is closed.
pub(crate) fn exit(code: i32) -> ! {
    std::process::exit(code)
}
