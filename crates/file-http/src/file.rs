//! A file on a web server, as a [`File`].

use crate::blocks::Blocks;
use crate::cache::{Cache, check_version};
use crate::client::Client;
use crate::remote::Remote;
use crate::runtime;
use crate::secrets::Secrets;
use crate::url::{HttpOptions, HttpUrl};
use block::{
    Error, ErrorKind, File, FileInfo, FileIo, FileOp, FileQueue, IoError, IoErrorKind, IoResult, Locks, PastEnd,
    ReactorCtx, Result, Work, block_on, run_aside_or_here, spawn_or_block_on,
};
use memory::{BufferAccount, Window, to_usize};
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::timeout;

/// The time limit for all of an opening: redirects, tries and slow answers.
const OPEN_TIMEOUT: Duration = Duration::from_secs(60);
/// Longer reads are split.
const PIECE_BYTES_MAX: u64 = 4 << 20;

/// Opens the file at `url`, read-only. Requests of a disk in it take room for their buffers from `buffers`.
pub fn open(url: &HttpUrl, read_only: bool, buffers: &BufferAccount) -> Result<Arc<dyn File>> {
    open_as(url, read_only, buffers, false)
}

/// As [`open`], but always asks the server which version it has, whatever this process or the cache knows.
pub fn open_anew(url: &HttpUrl, read_only: bool, buffers: &BufferAccount) -> Result<Arc<dyn File>> {
    open_as(url, read_only, buffers, true)
}

fn open_as(url: &HttpUrl, read_only: bool, buffers: &BufferAccount, anew: bool) -> Result<Arc<dyn File>> {
    if !read_only {
        let message = format!("'{url}' is a file on a web server, which can only be read: put an overlay over it");
        return Err(Error::new(ErrorKind::BadOption, message).only_for_writing());
    }
    let blocks = shared(url, anew || url.options.revalidate)?;
    let info = FileInfo {
        name: url.to_string(),
        length_bytes: blocks.pin.length_bytes,
        read_only: true,
        offset_alignment_bytes: 1,
        memory_alignment_bytes: 1,
        can_discard: false,
        discard_zeroes: false,
        fast_zeroes: false,
        block_device: false,
        can_grow: false,
        locks: Locks::NotWanted,
        in_memory: false,
        engine: match &url.options.cache {
            Some(directory) => format!("HTTP client, cache in '{}'", directory.display()),
            None => "HTTP client".to_owned(),
        },
    };
    Ok(Arc::new(HttpFile { info, blocks, given_up: Arc::new(watch::Sender::new(false)), buffers: buffers.clone() }))
}

type Open = HashMap<(String, String), Weak<Blocks>>;

/// Open files. Disks on the same file share its blocks.
static OPEN: Mutex<Option<Open>> = Mutex::new(None);

/// Opens the file, or shares the blocks of one that is open. With `anew` the server is asked, and blocks are shared
/// only if it has the same version.
fn shared(url: &HttpUrl, anew: bool) -> Result<Arc<Blocks>> {
    let key = (url.key(), format!("{:?}", url.options));
    let known_now = known(&mut OPEN.lock().unwrap_or_else(PoisonError::into_inner), &key);
    if let Some(blocks) = known_now.filter(|_| !anew) {
        return Ok(blocks);
    }
    // The lock is not held here: a server that does not answer must not delay the opening of other files.
    let blocks = Arc::new(find(url, anew)?);
    let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(theirs) = known(&mut open, &key) {
        // Another thread has opened it. Its blocks are shared if the server says that the file is the same.
        let is_said = !anew || check_version(&blocks.pin).is_ok();
        if theirs.pin == blocks.pin && is_said {
            return Ok(theirs);
        }
    }
    open.get_or_insert_default().insert(key, Arc::downgrade(&blocks));
    Ok(blocks)
}

/// Returns the blocks of an open file, unless it has changed at its server.
fn known(open: &mut Option<Open>, key: &(String, String)) -> Option<Arc<Blocks>> {
    let open = open.get_or_insert_default();
    open.retain(|_, blocks| blocks.strong_count() > 0);
    open.get(key).and_then(Weak::upgrade).filter(|blocks| !blocks.remote.has_changed())
}

/// Finds which file it is: from the cache, unless `anew`, or else from the server.
fn find(url: &HttpUrl, anew: bool) -> Result<Blocks> {
    let in_context = |error: Error| error.in_context(format!("'{url}'"));
    let HttpOptions { cache, cache_bytes, ca_file, .. } = &url.options;
    let secrets = Secrets::read(&url.uri, &url.options).map_err(in_context)?;
    let remote = Remote::new(url.clone(), Client::new(ca_file.as_deref()).map_err(in_context)?, secrets);
    let runtime = runtime::handle()?;
    let kept = match cache {
        Some(directory) if !anew => Cache::find(directory, *cache_bytes, &url.key()).map_err(in_context)?,
        _ => None,
    };
    if let Some((cache, pin)) = kept {
        return Ok(Blocks::new(remote, pin, Some(cache), runtime));
    }
    let (sender, receiver) = tokio::sync::oneshot::channel();
    runtime.spawn(async move {
        let pin = timeout(OPEN_TIMEOUT, remote.pin()).await;
        let pin = pin.unwrap_or_else(|_| Err("the server takes too long to say which file it has".to_owned()));
        // The opening thread waits for it below.
        let _ = sender.send((remote, pin));
    });
    let gone = || Error::new(ErrorKind::Io, format!("'{url}': the thread of web servers has ended"));
    let (remote, pin) = block_on(receiver).map_err(|_| gone())?;
    let pin = pin.map_err(|why| Error::new(ErrorKind::Io, format!("'{url}': {why}")))?;
    let cache = match cache {
        Some(directory) => {
            check_version(&pin).map_err(in_context)?;
            std::fs::create_dir_all(directory)
                .map_err(|error| in_context(Error::io(format!("cache '{}'", directory.display()), error)))?;
            Some(Cache::create(directory, *cache_bytes, &url.key(), &pin).map_err(in_context)?)
        }
        None => {
            if check_version(&pin).is_err() {
                tracing::warn!(
                    "'{url}': the server names no entity tag and no date: a file that changes is not noticed"
                );
            }
            None
        }
    };
    Ok(Blocks::new(remote, pin, cache, runtime))
}

#[derive(Debug)]
struct HttpFile {
    info: FileInfo,
    blocks: Arc<Blocks>,
    /// Set when this file is cancelled. Other files go on with the same blocks.
    given_up: Arc<watch::Sender<bool>>,
    buffers: BufferAccount,
}

impl HttpFile {
    fn queue(&self, ctx: Option<Rc<dyn ReactorCtx>>) -> HttpQueue {
        HttpQueue { blocks: Arc::clone(&self.blocks), given_up: Arc::clone(&self.given_up), ctx }
    }
}

impl File for HttpFile {
    fn info(&self) -> &FileInfo {
        &self.info
    }

    fn length_bytes(&self) -> Result<u64> {
        Ok(self.blocks.pin.length_bytes)
    }

    fn open_queue(&self, ctx: &Rc<dyn ReactorCtx>) -> Result<Rc<dyn FileQueue>> {
        Ok(Rc::new(self.queue(Some(Rc::clone(ctx)))))
    }

    fn open_blocking(&self) -> Result<Rc<dyn FileQueue>> {
        Ok(Rc::new(self.queue(None)))
    }

    fn buffers(&self) -> &BufferAccount {
        &self.buffers
    }

    fn cancel(&self) -> bool {
        self.given_up.send_replace(true);
        true
    }
}

/// A thread's access to the blocks.
struct HttpQueue {
    blocks: Arc<Blocks>,
    given_up: Arc<watch::Sender<bool>>,
    /// `None` for a blocking queue.
    ctx: Option<Rc<dyn ReactorCtx>>,
}

impl FileQueue for HttpQueue {
    fn push(&self, FileIo { op, done, .. }: FileIo) {
        let (offset, data, past_end) = match op {
            FileOp::Read { offset, data, past_end } => (offset, data, past_end),
            FileOp::Flush => return done.complete(Ok(())),
            _ => return done.complete(Err(IoError::new(IoErrorKind::ReadOnly))),
        };
        let blocks = Arc::clone(&self.blocks);
        let mut given_up = self.given_up.subscribe();
        let work = async move {
            let result = tokio::select! {
                biased;
                _ = given_up.wait_for(|given_up| *given_up) => Err(IoError::EIO),
                result = read(&blocks, offset, &data, past_end) => result,
            };
            done.complete(result);
        };
        spawn_or_block_on(self.ctx.as_ref(), work);
    }

    fn run_aside(&self, work: Work) {
        run_aside_or_here(self.ctx.as_ref(), &self.given_up, work);
    }
}

async fn read(blocks: &Arc<Blocks>, offset: u64, data: &Window, past_end: PastEnd) -> IoResult {
    let there = past_end.settle(offset, data, blocks.pin.length_bytes)?;
    let mut done = 0;
    while done < there {
        let start = offset.saturating_add(done);
        let end = start.saturating_add(there.saturating_sub(done).min(PIECE_BYTES_MAX));
        let (pieces, _share) = blocks.read(start..end).await.map_err(|()| IoError::EIO)?;
        for bytes in pieces {
            data.copy_from_slice(to_usize(done), &bytes);
            done = done.saturating_add(bytes.len() as u64);
        }
        if done < end.saturating_sub(offset) {
            return Err(IoError::EIO);
        }
    }
    Ok(())
}
