//! Random operations on a file, checked against a vector of bytes.
//!
//! Each round cuts a range at random places and gives the pieces, in flight together, to the queues of two reactors in
//! turn: neighbours share blocks of direct I/O, so a read-modify-write that loses its neighbour's bytes shows.

use super::{run_task, scattered};
use block::{File, FileOp, FileQueue, IoResult, PastEnd};
use memory::AlignedBuf;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use ringdisk_engine::ReactorThread;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::{Arc, mpsc};

#[derive(Debug, Clone)]
enum Piece {
    Write { offset: u64, bytes: Vec<u8>, fua: bool },
    Zero { offset: u64, length: u64, may_unmap: bool },
}

/// Carries out one piece with memory that is scattered, and not aligned to anything.
async fn carry_out(queue: Rc<dyn FileQueue>, piece: Piece, seed: u64) -> IoResult {
    match piece {
        Piece::Write { offset, bytes, fua } => {
            let data = scattered(AlignedBuf::copy_of(&bytes), seed);
            queue.start(FileOp::Write { offset, data, fua }).await
        }
        Piece::Zero { offset, length, may_unmap } => {
            queue.start(FileOp::WriteZeroes { offset, length, may_unmap }).await
        }
    }
}

pub(crate) struct Model {
    rng: SmallRng,
    bytes: Vec<u8>,
    /// Ranges end here at most.
    limit: u64,
    fixed_length: bool,
    /// The ranges' unit: 1, or a block that a test keeps to.
    unit: u64,
    /// What is discarded are whole blocks of this size only.
    pub(crate) discard_unit: u64,
}

impl Model {
    pub(crate) fn new(seed: u64, length: usize, limit: u64, fixed_length: bool, unit: u64) -> Self {
        Self { rng: SmallRng::seed_from_u64(seed), bytes: vec![0; length], limit, fixed_length, unit, discard_unit: 1 }
    }

    fn range(&mut self, longest: u64) -> (u64, u64) {
        let unit = self.unit;
        let end = if self.fixed_length { self.bytes.len() as u64 } else { self.limit };
        let length = self.rng.random_range(1..=longest.min(end) / unit) * unit;
        (self.rng.random_range(0..=(end - length) / unit) * unit, length)
    }

    fn pieces(&mut self) -> Vec<Piece> {
        let longest = if self.rng.random_bool(0.1) { 300_000 } else { 9_000 };
        let (mut offset, length) = self.range(longest);
        let end = offset + length;
        let mut pieces = Vec::new();
        while offset < end {
            let length = self.rng.random_range(1..=(end - offset) / self.unit) * self.unit;
            pieces.push(if self.rng.random_bool(0.8) {
                let byte = self.rng.random_range(1..=255_u8);
                let bytes = (0..length).map(|index| byte.wrapping_add((index / 7) as u8)).collect();
                Piece::Write { offset, bytes, fua: self.rng.random_bool(0.1) }
            } else {
                Piece::Zero { offset, length, may_unmap: self.rng.random_bool(0.5) }
            });
            offset += length;
            if pieces.len() > 12 {
                break;
            }
        }
        pieces
    }

    fn apply(&mut self, piece: &Piece) {
        let (offset, length) = match piece {
            Piece::Write { offset, bytes, .. } => (*offset as usize, bytes.len()),
            Piece::Zero { offset, length, .. } => (*offset as usize, *length as usize),
        };
        if self.bytes.len() < offset + length {
            self.bytes.resize(offset + length, 0);
        }
        match piece {
            Piece::Write { bytes, .. } => self.bytes[offset..offset + length].copy_from_slice(bytes),
            Piece::Zero { .. } => self.bytes[offset..offset + length].fill(0),
        }
    }

    fn expected(&self, offset: u64, length: usize) -> Vec<u8> {
        (0..length).map(|index| self.bytes.get(offset as usize + index).copied().unwrap_or(0)).collect()
    }

    /// One round on both reactors; then some reads.
    pub(crate) fn round(&mut self, file: &Arc<dyn File>, reactors: [&ReactorThread; 2]) {
        let pieces = self.pieces();
        let seed = self.rng.random();
        let mut waits = Vec::new();
        for (turn, reactor) in reactors.into_iter().enumerate() {
            let mine: Vec<_> = pieces.iter().skip(turn).step_by(2).cloned().collect();
            let (sender, receiver) = mpsc::channel();
            let file = Arc::clone(file);
            let job = move |ctx: &Rc<dyn block::ReactorCtx>| {
                let queue = file.open_queue(ctx).unwrap();
                // All are pushed before one is awaited.
                let started: Vec<Pin<Box<dyn Future<Output = IoResult>>>> =
                    mine.into_iter().map(|piece| Box::pin(carry_out(Rc::clone(&queue), piece, seed)) as _).collect();
                for task in started {
                    let sender = sender.clone();
                    ctx.spawn(block::Task::new(async move { sender.send(task.await).unwrap() }));
                }
            };
            reactor.handle().run(Box::new(job)).unwrap();
            waits.push(receiver);
        }
        for receiver in waits {
            for result in receiver {
                result.unwrap();
            }
        }
        for piece in &pieces {
            self.apply(piece);
        }
        self.discard_or_resize(file, reactors[0]);
        for _ in 0..4 {
            self.check_read(file, reactors[1]);
        }
    }

    fn discard_or_resize(&mut self, file: &Arc<dyn File>, reactor: &ReactorThread) {
        let make: Box<dyn Fn() -> FileOp + Send> = match self.rng.random_range(0..10) {
            0 if file.info().can_discard && file.info().discard_zeroes => {
                let (offset, length) = self.range(20_000);
                for at in offset..offset + length {
                    let block = at / self.discard_unit * self.discard_unit;
                    let inside = block >= offset && block + self.discard_unit <= offset + length;
                    if let Some(byte) = self.bytes.get_mut(at as usize).filter(|_| inside) {
                        *byte = 0;
                    }
                }
                Box::new(move || FileOp::Discard { offset, length })
            }
            1 if !self.fixed_length => {
                let length = self.rng.random_range(0..=self.limit / self.unit) * self.unit;
                self.bytes.resize(length as usize, 0);
                Box::new(move || FileOp::SetLength { length })
            }
            2 => Box::new(|| FileOp::Flush),
            _ => return,
        };
        let shown = format!("{:?}", make());
        let file = Arc::clone(file);
        let result = run_task(reactor, move |ctx| async move {
            let queue = file.open_queue(&ctx).unwrap();
            queue.start(make()).await
        });
        assert_eq!(result, Ok(()), "{shown}");
    }

    fn check_read(&mut self, file: &Arc<dyn File>, reactor: &ReactorThread) {
        let (offset, length) = self.range(20_000);
        let past_end = if self.rng.random_bool(0.5) { PastEnd::Fails } else { PastEnd::Zeros };
        let seed = self.rng.random();
        let theirs = Arc::clone(file);
        let got = run_task(reactor, move |ctx| async move {
            let queue = theirs.open_queue(&ctx).unwrap();
            let data = scattered(AlignedBuf::copy_of(&vec![0xee; length as usize]), seed);
            queue.start(FileOp::Read { offset, data: data.clone(), past_end }).await.map(|()| data.to_vec())
        });
        let inside = offset + length <= self.bytes.len() as u64;
        if past_end == PastEnd::Fails && !inside {
            assert!(got.is_err(), "{offset}+{length} of {} bytes was read", self.bytes.len());
        } else {
            let got = got.unwrap_or_else(|error| panic!("{offset}+{length} of {}: {error}", self.bytes.len()));
            assert_same(offset, &got, &self.expected(offset, length as usize));
        }
    }

    /// Compares all of it with what the host sees.
    pub(crate) fn check_host(&self, path: &std::path::Path, file: &Arc<dyn File>) {
        assert_eq!(file.length_bytes().unwrap(), self.bytes.len() as u64);
        assert_same(0, &std::fs::read(path).unwrap(), &self.bytes);
    }
}

fn assert_same(offset: u64, got: &[u8], expected: &[u8]) {
    assert_eq!(got.len(), expected.len(), "length");
    if let Some(at) = (0..got.len()).find(|at| got[*at] != expected[*at]) {
        panic!("byte {} is {}, expected {}", offset + at as u64, got[at], expected[at]);
    }
}
