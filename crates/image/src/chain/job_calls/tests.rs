use super::*;
use block::{FileInfo, PastEnd, block_on};
use memory::IoBuf;
use testkit::{SimFileOptions, SimStorage};

/// A file whose calls wait until so many have come, or until they may go.
#[derive(Debug)]
struct Slow {
    file: Arc<dyn File>,
    gate: Arc<Gate>,
}

#[derive(Debug, Default)]
struct Gate {
    /// How many calls wait, and how many have to.
    waiting: Mutex<(usize, usize)>,
    changed: Condvar,
}

impl Gate {
    fn pass(&self) {
        let mut waiting = self.waiting.lock().unwrap();
        waiting.0 += 1;
        self.changed.notify_all();
        drop(self.changed.wait_while(waiting, |(come, needed)| come < needed).unwrap());
    }

    fn open(&self) {
        self.waiting.lock().unwrap().1 = 0;
        self.changed.notify_all();
    }

    fn wait_for(&self, count: usize) {
        let waiting = self.waiting.lock().unwrap();
        drop(self.changed.wait_while(waiting, |(come, _)| *come < count).unwrap());
    }
}

struct SlowQueue(Rc<dyn FileQueue>, Arc<Gate>);

impl FileQueue for SlowQueue {
    fn push(&self, io: FileIo) {
        self.1.pass();
        self.0.push(io);
    }
}

impl File for Slow {
    fn info(&self) -> &FileInfo {
        self.file.info()
    }

    fn length_bytes(&self) -> Result<u64> {
        self.file.length_bytes()
    }

    fn open_queue(&self, ctx: &Rc<dyn block::ReactorCtx>) -> Result<Rc<dyn FileQueue>> {
        self.file.open_queue(ctx)
    }

    fn open_blocking(&self) -> Result<Rc<dyn FileQueue>> {
        Ok(Rc::new(SlowQueue(self.file.open_blocking()?, Arc::clone(&self.gate))))
    }
}

struct Bench {
    give_up: Arc<GiveUp>,
    gate: Arc<Gate>,
    job: Rc<JobCalls>,
    queue: Rc<dyn FileQueue>,
}

/// Calls pass when `needed` have come.
fn bench(needed: usize, may_end: Ends) -> Bench {
    let storage = SimStorage::new(1);
    let file = storage.create("file", 1 << 20, SimFileOptions::default());
    let gate = Arc::new(Gate { waiting: Mutex::new((0, needed)), changed: Condvar::new() });
    let file: Arc<dyn File> = Arc::new(Slow { file, gate: Arc::clone(&gate) });
    let give_up = Arc::new(GiveUp::default());
    let job = JobCalls::new(Some(&give_up));
    let queue = Calls::begin(&job, &file, may_end).unwrap();
    Bench { give_up, gate, job, queue }
}

fn read(data: &Window, offset: u64) -> FileOp {
    FileOp::Read { offset, data: data.clone(), past_end: PastEnd::Zeros }
}

fn write(byte: u8, offset: u64) -> FileOp {
    let data = IoBuf::zeroed(512).whole();
    data.fill(byte);
    FileOp::Write { offset, data, fua: false }
}

#[test]
fn calls_that_are_awaited_are_made_at_once_and_each_gets_its_own_end() {
    let Bench { job, queue, .. } = bench(THREADS_MAX, Ends::Reads);
    let at = |index: usize| index as u64 * 512;
    let writes: Vec<_> = (0..THREADS_MAX).map(|index| (index as u8 + 1, at(index))).collect();
    // None ends before all have begun.
    block_on(job.awaiting(async {
        let begun: Vec<_> = writes.iter().map(|(byte, offset)| queue.start(write(*byte, *offset))).collect();
        for end in begun {
            assert_eq!(end.await, Ok(()));
        }
    }));
    for (byte, offset) in writes {
        let data = IoBuf::zeroed(512).whole();
        assert_eq!(block_on(queue.start(read(&data, offset))), Ok(()));
        assert_eq!(data.to_vec(), [byte; 512]);
    }
}

#[test]
fn a_call_that_is_given_up_ends_and_no_later_one_follows_it() {
    for is_awaited in [false, true] {
        let Bench { give_up, gate, job, queue } = bench(usize::MAX, Ends::Reads);
        let other = (Arc::clone(&give_up), Arc::clone(&gate));
        let later = std::thread::spawn(move || {
            other.1.wait_for(1);
            other.0.give_up();
        });
        let data = IoBuf::zeroed(512).whole();
        data.fill(7);
        let end = match is_awaited {
            // A push makes the call itself there.
            false => block_on(async { queue.start(read(&data, 0)).await }),
            true => block_on(job.awaiting(async { queue.start(read(&data, 0)).await })),
        };
        assert_eq!(end, Err(given_up()));
        later.join().unwrap();
        gate.open();
        // The late end of the read changes nothing.
        let reports = job.ended.lock();
        drop(job.ended.came.wait_while(reports, |reports| reports.list.is_empty()).unwrap());
        job.deliver();
        assert_eq!(data.to_vec(), [7; 512]);
        assert_eq!(block_on(job.awaiting(queue.start(FileOp::Flush))), Err(given_up()));
    }
}

#[test]
fn what_may_not_end_is_waited_for_though_others_are_given_up() {
    let Bench { give_up, gate, job, queue } = bench(usize::MAX, Ends::Reads);
    give_up.give_up();
    let other = Arc::clone(&gate);
    let storage = std::thread::spawn(move || {
        other.wait_for(2);
        other.open();
    });
    block_on(job.awaiting(async {
        let (first, second) = (queue.start(write(1, 0)), queue.start(FileOp::Flush));
        let data = IoBuf::zeroed(512).whole();
        assert_eq!(queue.start(read(&data, 0)).await, Err(given_up()));
        assert_eq!((first.await, second.await), (Ok(()), Ok(())));
    }));
    storage.join().unwrap();
}
