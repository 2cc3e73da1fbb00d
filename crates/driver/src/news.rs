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
    // First: to follow the news, the device is asked, and it may answer nothing before it has this reply.
    if flags & NEEDS_REPLY != 0 {
        let words = [kind, VERSION | IS_REPLY, 8, u32::from(!known), 0];
        channel.write_all(words.map(u32::to_ne_bytes).as_flattened())?;
    }
    if known {
        link.config_changed();
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;
    use std::sync::{Arc, Mutex};
    use std::time::Duration;

    #[test]
    fn a_device_has_its_reply_before_it_is_asked_what_has_changed() {
        const PATIENCE: Duration = Duration::from_secs(20);
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let link = Arc::new(Link::default());
        let ((replied, reply), (heard, hearing)) = (channel(), channel());
        let (reply, heard) = (Mutex::new(reply), Mutex::new(heard));
        link.on_config_change(Box::new(move || {
            let came = reply.lock().unwrap().recv_timeout(PATIENCE);
            heard.lock().unwrap().send(came).unwrap();
        }));
        let _news = News::start(ours, Arc::downgrade(&link)).unwrap();
        theirs.write_all([CONFIG_CHANGE, VERSION | NEEDS_REPLY, 0].map(u32::to_ne_bytes).as_flattened()).unwrap();
        theirs.set_read_timeout(Some(PATIENCE * 2)).unwrap();
        let mut words = [[0; 4]; 5];
        theirs.read_exact(words.as_flattened_mut()).unwrap();
        assert_eq!(words.map(u32::from_ne_bytes), [CONFIG_CHANGE, VERSION | IS_REPLY, 8, 0, 0]);
        // The test has the reply already if the listener waited in vain.
        let _ = replied.send(());
        assert_eq!(hearing.recv().unwrap(), Ok(()));
    }
}
