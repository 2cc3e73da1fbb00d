//! The priority of a request goes with its data to the file, whatever way the request takes.

mod common;

use block::{Disk, File, FileIo, FileOp, FileQueue, Op, OpFlags, Priority, ReactorCtx, Result};
use common::{Chain, Layer, SimOpener, name};
use memory::{BufferAccount, IoBuf};
use ringdisk_image::{FileName, Format, ImageOptions, Opener, Role};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use testkit::SimReactor;

const CLUSTER: u64 = 64 << 10;

/// Bytes that went to and from files, each transfer with its priority.
type Transfers = Arc<Mutex<Vec<(Priority, u64)>>>;

/// A file that notes the transfers of its queues.
#[derive(Debug)]
struct Noting {
    inner: Arc<dyn File>,
    transfers: Transfers,
}

impl File for Noting {
    fn info(&self) -> &block::FileInfo {
        self.inner.info()
    }

    fn length_bytes(&self) -> Result<u64> {
        self.inner.length_bytes()
    }

    fn buffers(&self) -> &BufferAccount {
        self.inner.buffers()
    }

    fn open_queue(&self, ctx: &Rc<dyn ReactorCtx>) -> Result<Rc<dyn FileQueue>> {
        Ok(Rc::new(NotingQueue { inner: self.inner.open_queue(ctx)?, transfers: Arc::clone(&self.transfers) }))
    }

    fn open_blocking(&self) -> Result<Rc<dyn FileQueue>> {
        self.inner.open_blocking()
    }
}

struct NotingQueue {
    inner: Rc<dyn FileQueue>,
    transfers: Transfers,
}

impl FileQueue for NotingQueue {
    fn push(&self, io: FileIo) {
        if let FileOp::Read { data, .. } | FileOp::Write { data, .. } = &io.op {
            self.transfers.lock().unwrap().push((io.priority, data.length_bytes() as u64));
        }
        self.inner.push(io);
    }
}

struct NotingOpener(SimOpener, Transfers);

impl Opener for NotingOpener {
    fn open(&self, name: &FileName, role: Role) -> Result<Arc<dyn File>> {
        Ok(Arc::new(Noting { inner: self.0.open(name, role)?, transfers: Arc::clone(&self.1) }))
    }

    fn canonical(&self, path: &Path) -> Result<PathBuf> {
        self.0.canonical(path)
    }
}

#[test]
fn whatever_way_a_request_takes_its_data_have_its_priority() {
    let overlay = vec![Layer::qcow2(16 * CLUSTER, CLUSTER), Layer::Raw(16 * CLUSTER)];
    for (layers, format) in [(vec![Layer::Raw(16 * CLUSTER)], Format::Raw), (overlay, Format::Qcow2)] {
        let storage = Chain::of(layers).storage();
        let transfers = Transfers::default();
        let options = ImageOptions::new(&name(0)).with(|options| options.format = Some(format));
        let image = ringdisk_image::open(&options, &NotingOpener(SimOpener(storage), Arc::clone(&transfers))).unwrap();
        let reactor = SimReactor::new(1);
        let mut queue = image.open_queue(&reactor.ctx()).unwrap();
        // From the layer below, a copied cluster, a whole one, what is there already: in part, over clusters, at two places.
        let ways = [(true, 512, 4096), (false, 512, 4096), (false, CLUSTER, CLUSTER), (false, 1024, 4096)];
        let more =
            [(true, 512, 4096), (true, CLUSTER / 2, CLUSTER), (false, CLUSTER / 2, CLUSTER), (true, 0, 3 * CLUSTER)];
        for (number, (is_read, offset, length)) in ways.into_iter().chain(more).enumerate() {
            let priority = Priority::best_effort(number as u16 % 8);
            transfers.lock().unwrap().clear();
            let data = IoBuf::zeroed(length as usize).whole();
            let op = match is_read {
                true => Op::Read { offset, data, priority },
                false => Op::Write { offset, data, flags: OpFlags::NONE, priority },
            };
            queue.submit(number as u64, op);
            let mut done = Vec::new();
            while queue.harvest(&mut done) == 0 {
                reactor.step();
            }
            assert_eq!(done[0].result, Ok(()));
            let transfers = transfers.lock().unwrap();
            let own: u64 = transfers.iter().filter(|(found, _)| *found == priority).map(|(_, length)| length).sum();
            // Tables, and what is copied around the data, have none.
            let others = transfers.iter().filter(|(found, _)| *found != priority);
            assert!(own >= length, "{format}, request {number}: {transfers:?}");
            assert!(
                others.clone().all(|(found, _)| *found == Priority::NONE),
                "{format}, request {number}: {transfers:?}"
            );
        }
        drop(queue);
        image.close().unwrap();
    }
}
