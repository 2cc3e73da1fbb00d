//! What lies where, for a client that asks: on a thread of the connection's own, because a disk may have to read tables, and
//! a reactor never waits.

use crate::context::Context;
use crate::export::NbdExport;
use crate::link::Link;
use crate::mailbox::{Answer, Mailbox};
use block::{DirtyMap, Error, ErrorKind, LogLimit, ReactorHandle, Run, StatusQuery};
use nbd_wire::numbers::{DIRTY, allocation};
use nbd_wire::reply::Extent;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

/// Extents that an answer tells at most, for each context.
pub(crate) const EXTENTS_MAX: usize = 2048;
/// What an answer takes of each context, in bytes.
pub(crate) const ANSWER_BYTES: usize = EXTENTS_MAX * 16;
/// An answer that takes longer ends there, and the client asks on from its end. A question may be about all of a disk, and
/// some storage is asked for each object.
const ANSWER_TIME: Duration = Duration::from_secs(1);
/// Questions of one connection at once.
pub(crate) const QUESTIONS_MAX: usize = 16;

/// A question.
#[derive(Debug)]
pub(crate) struct Question {
    pub(crate) tag: u64,
    pub(crate) offset: u64,
    pub(crate) length_bytes: u64,
    /// One extent is enough.
    pub(crate) one: bool,
}

/// The thread, from its connection. It ends when this is dropped.
pub(crate) struct StatusThread {
    questions: Sender<Question>,
}

impl StatusThread {
    /// Starts it. The thread keeps `guard` until its end.
    pub(crate) fn start(
        export: NbdExport,
        contexts: Vec<Context>,
        link: &Arc<Link>,
        guard: impl Send + 'static,
    ) -> std::io::Result<Self> {
        let (questions, asked) = channel();
        let (mailbox, reactor) = (Arc::clone(&link.mailbox), Arc::clone(&link.reactor));
        let link = Arc::downgrade(link);
        // Nobody waits for the answer: the connection has gone, or is to end.
        let is_over = move || link.upgrade().is_none_or(|link| link.closing.load(Ordering::Acquire));
        std::thread::Builder::new().name("nbd-status".into()).spawn(move || {
            answer_all(&asked, Teller::new(&export, contexts, &is_over), &mailbox, reactor.as_ref());
            drop(export);
            drop(guard);
        })?;
        Ok(Self { questions })
    }

    /// Asks; false if nobody will answer.
    pub(crate) fn ask(&self, question: Question) -> bool {
        self.questions.send(question).is_ok()
    }
}

fn answer_all(asked: &Receiver<Question>, mut teller: Teller<'_>, mailbox: &Mailbox, reactor: &dyn ReactorHandle) {
    while let Ok(question) = asked.recv() {
        let answer = teller.answer(&question);
        let answer = answer.inspect_err(|error| {
            static TIMES: LogLimit = LogLimit::new();
            if let Some(times) = TIMES.admit() {
                tracing::warn!(times, "cannot tell what lies where: {error}");
            }
        });
        let answer = answer.ok();
        mailbox.put(question.tag, answer);
        // An empty job wakes the reactor.
        if reactor.run(Box::new(|_| {})).is_err() {
            return;
        }
    }
}

/// Who knows the answers.
struct Teller<'a> {
    export: &'a NbdExport,
    contexts: Vec<Context>,
    is_over: &'a dyn Fn() -> bool,
    /// Bitmaps that do not record: a client that asks for one part after the other gets those of one moment. It ends with a
    /// question that does not go on behind the last one.
    maps: BTreeMap<usize, DirtyMap>,
    /// Where the last question began.
    last: Option<u64>,
}

impl<'a> Teller<'a> {
    fn new(export: &'a NbdExport, contexts: Vec<Context>, is_over: &'a dyn Fn() -> bool) -> Self {
        Self { export, contexts, is_over, maps: BTreeMap::new(), last: None }
    }
}

impl Teller<'_> {
    fn answer(&mut self, question: &Question) -> block::Result<Answer> {
        let most = if question.one { 1 } else { EXTENTS_MAX };
        if self.last.replace(question.offset).is_some_and(|last| question.offset <= last) {
            // Whoever begins anew is to see what was enabled, cleared or merged since.
            self.maps.clear();
        }
        let mut lists = self.by_layers(question, most)?;
        for context in self.contexts.clone() {
            if let Context::Bitmap(index) = context {
                lists.push((context, self.written(index, question, most)?));
            }
        }
        Ok(lists)
    }

    /// What the disk's layers say, for the contexts that want to know it.
    fn by_layers(&self, question: &Question, most: usize) -> block::Result<Answer> {
        let of_layers = |context: &&Context| !matches!(context, Context::Bitmap(_));
        let contexts = self.contexts.iter().filter(of_layers);
        let mut lists: Answer = contexts.map(|context| (*context, Vec::new())).collect();
        if lists.is_empty() {
            return Ok(lists);
        }
        let begun = Instant::now();
        for run in self.export.disk.block_status(&StatusQuery::of(question.offset, question.length_bytes))? {
            let run = run?;
            let mut takes_more = false;
            for (context, list) in &mut lists {
                takes_more |= add(list, most, run.length_bytes, flags(*context, &run));
            }
            if !takes_more || (self.is_over)() || begun.elapsed() >= ANSWER_TIME {
                break;
            }
        }
        Ok(lists)
    }

    /// What a bitmap says.
    fn written(&mut self, index: usize, question: &Question, most: usize) -> block::Result<Vec<Extent>> {
        let map = match self.maps.remove(&index) {
            Some(map) => map,
            None => {
                let none = || Error::new(ErrorKind::BadOption, "there is no such bitmap");
                let bitmap = self.export.bitmaps.get(index).ok_or_else(none)?;
                bitmap.source.dirty_bitmap(&bitmap.name)?
            }
        };
        let runs = map.runs(question.offset..question.offset.saturating_add(question.length_bytes), most);
        if !map.is_recording {
            self.maps.insert(index, map);
        }
        let extent = |(length_bytes, dirty)| Extent { length_bytes, flags: if dirty { DIRTY } else { 0 } };
        Ok(runs.into_iter().map(extent).collect())
    }
}

/// Adds bytes to a list that has not ended; returns whether it goes on. A list ends with the first bytes that it cannot take.
fn add(list: &mut Vec<Extent>, most: usize, length_bytes: u64, flags: u64) -> bool {
    let has_ended = list.len() > most;
    match list.last_mut() {
        _ if has_ended => false,
        Some(last) if last.flags == flags => {
            last.length_bytes = last.length_bytes.saturating_add(length_bytes);
            true
        }
        _ => {
            list.push(Extent { length_bytes, flags });
            list.len() <= most
        }
    }
}

fn flags(context: Context, run: &Run) -> u64 {
    match context {
        Context::Allocation => {
            let hole = if run.data { 0 } else { allocation::HOLE };
            hole | if run.zero { allocation::ZERO } else { 0 }
        }
        Context::Depth if run.present => u64::try_from(run.depth).unwrap_or(u64::MAX).saturating_add(1),
        Context::Depth | Context::Bitmap(_) => 0,
    }
}

/// Cuts a list to what an answer tells: at most so many extents, within the request.
pub(crate) fn cut(mut list: Vec<Extent>, one: bool, length_bytes: u64) -> Vec<Extent> {
    list.truncate(if one { 1 } else { EXTENTS_MAX });
    let mut left = length_bytes;
    for extent in &mut list {
        extent.length_bytes = extent.length_bytes.min(left);
        left = left.saturating_sub(extent.length_bytes);
    }
    list.retain(|extent| extent.length_bytes > 0);
    list
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::NbdBitmap;
    use block::{DirtyBitmaps, Disk, DiskInfo, DiskQueue, ReactorCtx, Runs};
    use image::NullDisk;
    use std::rc::Rc;
    use std::sync::atomic::{AtomicU8, AtomicU64};

    /// One bitmap, whose first bits are these.
    struct Bits(AtomicU8);

    impl DirtyBitmaps for Bits {
        fn dirty_bitmap(&self, _: &str) -> block::Result<DirtyMap> {
            Ok(DirtyMap::new(9, 1 << 20, vec![self.0.load(Ordering::Relaxed); 256], false))
        }
    }

    #[test]
    fn a_client_sees_one_moment_of_a_bitmap_until_it_begins_anew_wherever_that_is() {
        let bits = Arc::new(Bits(AtomicU8::new(0)));
        let export = NbdExport::new("disk", Arc::new(NullDisk::new(1 << 20, String::new()))).with(|export| {
            export.bitmaps = vec![NbdBitmap { name: "daily".into(), source: Arc::clone(&bits) as _ }];
        });
        let mut teller = Teller::new(&export, vec![Context::Bitmap(0)], &|| false);
        let mut is_dirty = |offset| {
            let question = Question { tag: 0, offset, length_bytes: 512, one: false };
            let answer = teller.answer(&question).unwrap();
            answer[0].1[0].flags == DIRTY
        };
        assert!(!is_dirty(4096));
        bits.0.store(0xff, Ordering::Relaxed);
        assert!(!is_dirty(8192), "it goes on");
        assert!(is_dirty(8192), "the same place again");
        bits.0.store(0, Ordering::Relaxed);
        assert!(is_dirty(65536));
        assert!(!is_dirty(4096), "it has gone back");
    }

    const PIECE_BYTES: u64 = 64 << 10;
    const PIECES_MAX: u64 = 5000;

    /// A disk full of data, which is told in many pieces, and slowly.
    struct Long {
        told: Arc<AtomicU64>,
        pause: Duration,
    }

    impl Disk for Long {
        fn info(&self) -> DiskInfo {
            NullDisk::new(1 << 50, String::new()).info()
        }

        fn open_queue(&self, ctx: &Rc<dyn ReactorCtx>) -> block::Result<Box<dyn DiskQueue>> {
            NullDisk::new(1 << 50, String::new()).open_queue(ctx)
        }

        fn block_status(&self, _: &StatusQuery) -> block::Result<Runs<'_>> {
            let piece = |number| {
                std::thread::sleep(self.pause);
                self.told.fetch_add(1, Ordering::Relaxed);
                Ok(Run::of_data(number * PIECE_BYTES, PIECE_BYTES))
            };
            Ok(Box::new((0..PIECES_MAX).map(piece)))
        }
    }

    #[test]
    fn an_answer_about_all_of_a_disk_ends_with_its_connection_and_after_some_time() {
        for (pause, goes_at) in [(Duration::ZERO, 10), (Duration::from_millis(10), u64::MAX)] {
            let told = Arc::new(AtomicU64::new(0));
            let export = NbdExport::new("disk", Arc::new(Long { told: Arc::clone(&told), pause }));
            let is_over = || told.load(Ordering::Relaxed) >= goes_at;
            let mut teller = Teller::new(&export, vec![Context::Allocation], &is_over);
            let question = Question { tag: 0, offset: 0, length_bytes: PIECES_MAX * PIECE_BYTES, one: false };
            let answer = teller.answer(&question).unwrap();
            let told = told.load(Ordering::Relaxed);
            assert!(told <= goes_at && told < PIECES_MAX, "{told} pieces");
            assert_eq!(answer[0].1, [Extent { length_bytes: told * PIECE_BYTES, flags: 0 }]);
        }
    }
}
