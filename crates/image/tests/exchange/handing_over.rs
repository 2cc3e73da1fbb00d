//! Disks whose former top could not be made durable when a new layer was put on it, and whose files are opened anew.

use super::common::{Chain, Layer, SimOpener, name};
use super::{SIZE, add_overlays, call, image_of, open_overlay, overlay_name, while_served};
use block::{Disk, Error, ErrorKind, IoError, IoErrorKind, OpFlags, Result};
use format_qcow2::CreateOptions as Qcow2Options;
use ringdisk_image::{CreateOptions, Format, Image, ImageOptions};
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use testkit::{
    Fault, FaultAction, Harness, OpKind, Request, SimFileOptions, SimHarness, SimStorage, qcow2_check, stamped,
};

const NO_SPACE: Fault = Fault {
    kind: Some(OpKind::Write),
    after: 0,
    count: u64::MAX,
    action: FaultAction::Fail(IoError::new(IoErrorKind::NoSpace)),
};
const NO_SYNC: Fault =
    Fault { kind: Some(OpKind::Flush), after: 0, count: u64::MAX, action: FaultAction::Fail(IoError::EIO) };

/// A disk in use. Its guest has written [`data`] at the beginning, and has flushed nothing.
struct Used {
    storage: SimStorage,
    image: Arc<Image>,
    harness: SimHarness,
    queue: u64,
}

fn data() -> Vec<u8> {
    stamped(7, 0, 64 << 10)
}

impl Used {
    fn on(storage: SimStorage, format: Format) -> Self {
        let image = image_of(&storage, &name(0), format);
        let mut harness = SimHarness::new(1, 2);
        let queue = harness.open(&(Arc::clone(&image) as Arc<dyn Disk>), 0).unwrap();
        call(&mut harness, queue, Request::write(0, data())).unwrap();
        Self { storage, image, harness, queue }
    }

    fn new() -> Self {
        let storage = Chain::of(vec![Layer::qcow2(SIZE, 4096)]).storage();
        add_overlays(&storage, 1, SIZE, 4096);
        Self::on(storage, Format::Qcow2)
    }

    /// With a layer put on it, while `fault` keeps the former top from being made durable.
    fn handing_over(fault: Fault) -> Self {
        let mut used = Self::new();
        used.storage.inject(&name(0), fault);
        let overlay = open_overlay(&used.storage, &overlay_name(0), &name(0), Format::Qcow2);
        let its = Arc::clone(&used.image);
        while_served(&mut used.harness, async move {
            let results = ringdisk_image::put_overlay_async(vec![(its, overlay)], || Ok(())).await.unwrap();
            assert!(results.into_iter().all(|result| result.is_err()));
        });
        used.flush().unwrap_err();
        used
    }

    fn top(&self) -> String {
        self.image.file_names().next().unwrap().to_string()
    }

    fn flush(&mut self) -> std::result::Result<Vec<u8>, IoError> {
        call(&mut self.harness, self.queue, Request::Flush)
    }

    fn read(&mut self) -> Vec<u8> {
        call(&mut self.harness, self.queue, Request::read(0, data().len())).unwrap()
    }

    /// Opens the files anew. `works` says whether the new ones can be used.
    fn reopen(&mut self, force: bool, works: bool) -> Result<()> {
        let (image, storage, top) = (Arc::clone(&self.image), self.storage.clone(), self.top());
        let (format, former_tops) = (image.format(), image.former_tops());
        let open = move || {
            let options = ImageOptions::new(&top).with(|options| {
                options.format = format;
                options.former_tops = former_tops;
            });
            let opened = ringdisk_image::open(&options, &SimOpener(storage));
            if works { opened } else { Err(Error::new(ErrorKind::Locked, "somebody else has it")) }
        };
        let result = Rc::new(RefCell::new(None));
        let its = Rc::clone(&result);
        while_served(&mut self.harness, async move {
            its.replace(Some(image.reopen_async(force, open).await));
        });
        result.take().unwrap()
    }

    /// Whatever the power cut takes away, what was written is there.
    fn is_durable(&self) {
        let top = self.top();
        for seed in 0..8 {
            let cut = self.storage.power_cut(seed);
            qcow2_check(&cut.bytes(&name(0))).unwrap().sound().unwrap();
            let image = image_of(&cut, &top, Format::Qcow2);
            let mut harness = SimHarness::new(1, 1);
            let queue = harness.open(&(image as Arc<dyn Disk>), 0).unwrap();
            assert!(call(&mut harness, queue, Request::read(0, data().len())).unwrap() == data(), "cut {seed}");
        }
    }

    fn close(mut self) -> (SimStorage, String) {
        let top = self.top();
        self.harness.close(self.queue);
        self.harness.settle();
        self.image.close().unwrap();
        (self.storage, top)
    }
}

#[test]
fn a_former_top_is_made_durable_when_its_disk_is_opened_anew_whether_the_new_files_can_be_used_or_not() {
    let cases = [(true, false), (true, true), (false, false), (false, true)];
    let faults = [NO_SPACE, NO_SYNC].into_iter();
    for (fault, (force, works)) in faults.flat_map(|fault| cases.map(|case| (fault, case))) {
        let mut used = Used::handing_over(fault);
        used.storage.clear_faults();
        assert_eq!(used.reopen(force, works).is_ok(), works);
        assert!(used.read() == data(), "{fault:?}, force {force}, works {works}");
        used.flush().unwrap();
        used.is_durable();
        // It is only read from now on.
        let written = used.storage.pushed(&name(0), OpKind::Write);
        call(&mut used.harness, used.queue, Request::write(0, data())).unwrap();
        used.flush().unwrap();
        assert_eq!(used.storage.pushed(&name(0), OpKind::Write), written);
    }
}

#[test]
fn a_former_top_that_cannot_be_made_durable_is_flushed_with_the_disk_as_before_where_the_new_files_cannot_be_used() {
    for (fault, force) in [(NO_SPACE, true), (NO_SPACE, false), (NO_SYNC, true), (NO_SYNC, false)] {
        for closes in [false, true] {
            let mut used = Used::handing_over(fault);
            used.reopen(force, false).unwrap_err();
            assert!(used.read() == data());
            used.flush().unwrap_err();
            used.storage.clear_faults();
            if closes {
                let (storage, top) = used.close();
                let image = image_of(&storage.process_killed(0), &top, Format::Qcow2);
                let mut harness = SimHarness::new(1, 1);
                let queue = harness.open(&(image as Arc<dyn Disk>), 0).unwrap();
                assert!(call(&mut harness, queue, Request::read(0, data().len())).unwrap() == data());
                continue;
            }
            used.flush().unwrap();
            used.is_durable();
        }
    }
}

#[test]
fn a_plain_reopening_whose_former_top_cannot_be_written_changes_nothing() {
    let mut used = Used::handing_over(NO_SPACE);
    let error = used.reopen(false, true).unwrap_err().to_string();
    assert!(error.contains(&name(0)), "{error}");
    assert!(used.read() == data());
    used.flush().unwrap_err();
    used.storage.clear_faults();
    used.flush().unwrap();
    used.is_durable();
}

#[test]
fn a_flush_fails_after_a_forced_reopening_that_gave_up_what_a_guest_had_written() {
    let write = |flags| Request::Write { offset: 0, data: data().into(), pieces: Vec::new(), flags };
    let flushes = [Request::Flush, write(OpFlags::PREFLUSH)];
    for (mut used, flush) in
        flushes.into_iter().flat_map(|flush| [(Used::handing_over(NO_SPACE), flush.clone()), (Used::new(), flush)])
    {
        used.storage.inject(&name(0), NO_SPACE);
        used.reopen(true, true).unwrap();
        assert!(used.read() != data(), "it is lost");
        used.storage.clear_faults();
        // This write promises nothing of earlier ones.
        call(&mut used.harness, used.queue, write(OpFlags::FUA)).unwrap();
        assert_eq!(call(&mut used.harness, used.queue, flush).unwrap_err(), IoError::EIO, "the guest learns of it");
        used.flush().unwrap();
        used.is_durable();
    }
}

#[test]
fn a_flush_of_a_raw_disk_fails_after_a_forced_reopening_that_could_not_sync_it() {
    let mut used = Used::on(Chain::of(vec![Layer::Raw(SIZE)]).storage(), Format::Raw);
    used.storage.inject(&name(0), Fault { action: FaultAction::Lose(IoError::EIO), ..NO_SYNC });
    used.reopen(false, true).unwrap_err();
    used.reopen(true, true).unwrap();
    used.storage.clear_faults();
    assert_eq!(used.flush().unwrap_err(), IoError::EIO, "the guest learns of it");
    used.flush().unwrap();
}

#[test]
fn what_could_not_be_written_is_still_there_where_a_forced_reopening_cannot_use_the_new_files() {
    for fault in [NO_SPACE, NO_SYNC] {
        let mut used = Used::new();
        used.storage.inject(&name(0), fault);
        used.reopen(true, false).unwrap_err();
        used.storage.clear_faults();
        assert!(used.read() == data());
        used.flush().unwrap();
        used.is_durable();
    }
}

/// Whoever opens a dirty image repairs it first. What is in memory then does not fit the file any more.
#[test]
fn an_image_that_a_failed_reopening_may_have_repaired_is_used_as_its_file_says_and_a_flush_fails() {
    let storage = SimStorage::new(1);
    let file = storage.create(&name(0), 0, SimFileOptions::default());
    let create = Qcow2Options::default().with(|options| {
        options.size_bytes = SIZE;
        options.cluster_size = 4096;
        options.lazy_refcounts = true;
    });
    ringdisk_image::create(&(file as _), &CreateOptions::Qcow2(create)).unwrap();
    add_overlays(&storage, 1, SIZE, 4096);
    let mut used = Used::on(storage, Format::Qcow2);
    used.flush().unwrap();
    call(&mut used.harness, used.queue, Request::write(SIZE / 2, data())).unwrap();
    // The bit that it is dirty stays, and so do refcounts that are too low.
    used.storage.inject(&name(0), NO_SYNC);
    used.flush().unwrap_err();
    let repaired = used.storage.clone();
    let (image, top) = (Arc::clone(&used.image), used.top());
    let result = Rc::new(RefCell::new(None));
    let its = Rc::clone(&result);
    while_served(&mut used.harness, async move {
        let open = move || {
            repaired.clear_faults();
            let options = ImageOptions::new(&top);
            ringdisk_image::open(&options, &SimOpener(repaired))?;
            Err(Error::new(ErrorKind::Locked, "somebody else has the layer below"))
        };
        its.replace(Some(image.reopen_async(true, open).await));
    });
    result.take().unwrap().unwrap_err();
    used.flush().unwrap_err();
    assert!(used.read() == data());
    for round in 0..4 {
        let at = SIZE / 2 + round * (64 << 10);
        call(&mut used.harness, used.queue, Request::write(at, stamped(9, at, 64 << 10))).unwrap();
    }
    used.flush().unwrap();
    used.is_durable();
    let (storage, _) = used.close();
    qcow2_check(&storage.bytes(&name(0))).unwrap().sound().unwrap();
}
