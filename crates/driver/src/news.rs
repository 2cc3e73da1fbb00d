//! A thread that receives the device's own messages: that its configuration, and so its size, has changed.

use crate::transport::Link;
use block::{Error, Result};
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Weak;

const CONFIG_CHANGE: u32 = 2;
const VERSION: u32 = 1;
const IS_REPLY: u32 = 4;
const NEEDS_REPLY: u32 = 8;
/// The longest body that is accepted. No known message is longer.
const MAX_BODY_BYTES: u32 = 4096;

/// Our end of the device's channel. Dropping it ends the thread.
#[derive(Debug)]
pub(crate) struct News {
    channel: UnixStream,
}

impl News {
    /// Starts the thread, which reports to `link`.
    pub(crate) fn start(channel: UnixStream, link: Weak<Link>) -> Result<Self> {
        let read = channel.try_clone().map_err(|error| Error::io("cannot duplicate a socket", error))?;
        // Nobody joins the thread, because it may be the one that drops the driver's last handle.
        std::thread::Builder::new()
            .name("driver-news".into())
            .spawn(move || while let Ok(true) = hear(&read, &link) {})
            .map_err(|error| Error::io("cannot start the driver's news thread", error))?;
        Ok(Self { channel })
    }
}

impl Drop for News {
    fn drop(&mut self) {
        // Fails only if the device has closed already.
        let _ = self.channel.shutdown(Shutdown::Both);
    }
}

/// Receives a message. Returns whether more can come.
fn hear(mut channel: &UnixStream, link: &Weak<Link>) -> io::Result<bool> {
    let mut header = [[0; 4]; 3];
    channel.read_exact(header.as_flattened_mut())?;
    let [kind, flags, length_bytes] = header.map(u32::from_ne_bytes);
    if length_bytes > MAX_BODY_BYTES {
        return Ok(false);
    }
    channel.read_exact(&mut vec![0; length_bytes as usize])?;
    let Some(link) = link.upgrade() else { return Ok(false) };
    let known = kind == CONFIG_CHANGE;
    if known {
        link.config_changed();
    }
    if flags & NEEDS_REPLY != 0 {
        let words = [kind, VERSION | IS_REPLY, 8, u32::from(!known), 0];
        channel.write_all(words.map(u32::to_ne_bytes).as_flattened())?;
    }
    Ok(true)
}
