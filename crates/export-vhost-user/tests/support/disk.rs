//! A disk in memory that can hold its completions back and remembers what it was asked.

use block::{
    Completion, Disk, DiskInfo, DiskListener, DiskQueue, IoError, IoErrorKind, IoResult, Listeners, Op, Priority,
    ReactorCtx, Result, Tag, Topology,
};
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};

pub const DISK_BYTES: u64 = 1 << 20;

/// What a disk was asked, in the order in which it was done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Asked {
    Read(u64),
    Write { offset: u64, fua: bool },
    Flush,
    Discard(u64, u64),
    WriteZeroes { offset: u64, length: u64, may_unmap: bool, fua: bool },
    VolatileCache(bool),
}

#[derive(Debug)]
pub struct MemDisk {
    info: Mutex<DiskInfo>,
    listeners: Listeners,
    pub bytes: Mutex<Vec<u8>>,
    pub asked: Mutex<Vec<Asked>>,
    /// Those of reads and writes.
    pub priorities: Mutex<Vec<Priority>>,
    /// All that is carried out fails with it.
    pub fail: Mutex<Option<IoError>>,
    /// Nothing completes while set.
    pub hold: AtomicBool,
    /// Requests submitted, held ones included.
    pub submitted: AtomicUsize,
    /// Names of the threads that opened queues.
    pub threads: Mutex<Vec<String>>,
}

impl MemDisk {
    pub fn new() -> Arc<Self> {
        Self::with(|_| {})
    }

    pub fn with(change: impl FnOnce(&mut DiskInfo)) -> Arc<Self> {
        let mut info = DiskInfo {
            size_bytes: DISK_BYTES,
            logical_block_bytes: 512,
            topology: Topology::default(),
            read_only: false,
            volatile_cache: true,
            discard: true,
            discard_granularity_bytes: 4096,
            write_zeroes: true,
            serial: "serial-of-20-letters-and-more".into(),
        };
        change(&mut info);
        Arc::new(Self {
            info: Mutex::new(info),
            listeners: Listeners::default(),
            bytes: Mutex::new(vec![0; DISK_BYTES as usize]),
            asked: Mutex::default(),
            priorities: Mutex::default(),
            fail: Mutex::default(),
            hold: AtomicBool::new(false),
            submitted: AtomicUsize::new(0),
            threads: Mutex::default(),
        })
    }

    /// The disk becomes longer, with zeros.
    pub fn grow(&self, size_bytes: u64) {
        self.bytes.lock().unwrap().resize(size_bytes as usize, 0);
        self.info.lock().unwrap().size_bytes = size_bytes;
        self.listeners.notify(|| self.info.lock().unwrap().clone());
    }

    pub fn asked(&self) -> Vec<Asked> {
        std::mem::take(&mut *self.asked.lock().unwrap())
    }

    pub fn read(&self, offset: usize, length: usize) -> Vec<u8> {
        self.bytes.lock().unwrap()[offset..offset + length].to_vec()
    }
}

/// [`MemDisk`], shared with the queues it opens.
pub struct Shared(pub Arc<MemDisk>);

impl Disk for Shared {
    fn info(&self) -> DiskInfo {
        self.0.info.lock().unwrap().clone()
    }

    fn open_queue(&self, _ctx: &Rc<dyn ReactorCtx>) -> Result<Box<dyn DiskQueue>> {
        self.0.threads.lock().unwrap().push(std::thread::current().name().unwrap_or_default().into());
        Ok(Box::new(MemQueue { disk: Arc::clone(&self.0), waiting: Vec::new() }))
    }

    fn set_volatile_cache(&self, volatile: bool) {
        self.0.asked.lock().unwrap().push(Asked::VolatileCache(volatile));
    }

    fn subscribe(&self, listener: Weak<dyn DiskListener>) {
        self.0.listeners.subscribe(listener);
    }
}

struct MemQueue {
    disk: Arc<MemDisk>,
    waiting: Vec<(Tag, Op)>,
}

impl DiskQueue for MemQueue {
    fn submit(&mut self, tag: Tag, op: Op) {
        self.waiting.push((tag, op));
        self.disk.submitted.fetch_add(1, Ordering::SeqCst);
    }

    fn harvest(&mut self, done: &mut Vec<Completion>) -> usize {
        if self.disk.hold.load(Ordering::SeqCst) {
            return 0;
        }
        let count = self.waiting.len();
        done.extend(self.waiting.drain(..).map(|(tag, op)| Completion { tag, result: carry_out(&self.disk, op) }));
        count
    }

    fn in_flight(&self) -> usize {
        self.waiting.len()
    }
}

fn carry_out(disk: &MemDisk, op: Op) -> IoResult {
    let mut bytes = disk.bytes.lock().unwrap();
    if let Some((offset, length)) = op.range()
        && offset.checked_add(length).is_none_or(|end| end > bytes.len() as u64)
    {
        panic!("the front end let {offset}+{length} through");
    }
    if op.is_write() && disk.info.lock().unwrap().read_only {
        return Err(IoError::new(IoErrorKind::ReadOnly));
    }
    if let Some(error) = *disk.fail.lock().unwrap() {
        return Err(error);
    }
    let mut asked = disk.asked.lock().unwrap();
    if let Op::Read { priority, .. } | Op::Write { priority, .. } = op {
        disk.priorities.lock().unwrap().push(priority);
    }
    match op {
        Op::Read { offset, data, .. } => {
            asked.push(Asked::Read(offset));
            let from = offset as usize;
            data.copy_from_slice(0, &bytes[from..from + data.length_bytes()]);
        }
        Op::Write { offset, data, flags, .. } => {
            asked.push(Asked::Write { offset, fua: flags.is_fua() });
            let from = offset as usize;
            data.copy_to_slice(0, &mut bytes[from..from + data.length_bytes()]);
        }
        Op::Flush => asked.push(Asked::Flush),
        Op::Discard { offset, length } => {
            asked.push(Asked::Discard(offset, length));
            bytes[offset as usize..(offset + length) as usize].fill(0xdd);
        }
        Op::SecureErase { .. } => return Err(IoError::new(block::IoErrorKind::Unsupported)),
        Op::WriteZeroes { offset, length, may_unmap, flags } => {
            asked.push(Asked::WriteZeroes { offset, length, may_unmap, fua: flags.is_fua() });
            bytes[offset as usize..(offset + length) as usize].fill(0);
        }
    }
    Ok(())
}
