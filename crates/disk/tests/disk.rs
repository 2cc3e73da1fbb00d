//! The facade: what programs that embed disks rely on.

use ringdisk_disk::{Access, BackingPolicy, Buffer, Disk, ErrorKind, Options, Result};
use std::future::Future;
use std::path::Path;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake};
use std::thread::Thread;

const SIZE_BYTES: u64 = 1 << 20;

fn make_qcow2(path: &Path, backing: Option<&str>) {
    let mut options = format_qcow2::CreateOptions::default();
    options.size_bytes = SIZE_BYTES;
    options.backing_file = backing.map(str::to_owned);
    options.backing_format = backing.map(|_| "raw".to_owned());
    engine::create(path, 0).unwrap();
    let file = image::Opener::open(&drive::EngineOpener::default(), &path.into(), image::Role::Writable).unwrap();
    image::create(&file, &image::CreateOptions::Qcow2(options)).unwrap();
}

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// An executor of ten lines.
fn block_on<T>(future: impl Future<Output = T>) -> T {
    let waker = Arc::new(Unpark(std::thread::current())).into();
    let mut future = pin!(future);
    loop {
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(value) => return value,
            Poll::Pending => std::thread::park(),
        }
    }
}

#[test]
fn what_is_written_is_read_back_whichever_way_one_waits() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk.qcow2");
    make_qcow2(&path, None);
    let disk = Options::path(&path).open().unwrap();
    assert_eq!((disk.size_bytes(), disk.is_read_only()), (SIZE_BYTES, false));
    disk.write(512, &[1; 1024][..]).wait().unwrap();
    block_on(async {
        disk.write(4096, Buffer::from(&[2; 512][..])).await.unwrap();
        disk.write_zeroes(1024, 512).await.unwrap();
        disk.flush().await.unwrap();
        let read = disk.read(0, 8192).await.unwrap();
        assert_eq!((read[511], read[512], read[1023], read[1024], read[4096]), (0, 1, 1, 0, 2));
    });
    disk.discard(0, 65536).wait().unwrap();
    disk.close().unwrap();
    assert_eq!(Options::path(&path).open().unwrap().read(SIZE_BYTES - 512, 512).wait().unwrap().len(), 512);
}

#[test]
fn operations_whose_futures_are_dropped_are_carried_out() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk.qcow2");
    make_qcow2(&path, None);
    let disk = Options::path(&path).format("qcow2").unwrap().open().unwrap();
    for index in 0..128u64 {
        drop(disk.write(index * 8192, &[index as u8 + 1; 4096][..]));
        drop(disk.read(index * 8192, 4096));
    }
    disk.close().unwrap();
    let disk = Options::path(&path).read_only(true).open().unwrap();
    for index in 0..128u64 {
        let read = disk.read(index * 8192, 4096).wait().unwrap();
        assert!(read.iter().all(|byte| *byte == index as u8 + 1), "{index}");
    }
}

#[test]
fn threads_share_a_disk_and_many_operations_run_at_once() {
    let disk = Options::drive("format=null,size=1M").unwrap().open().unwrap();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let running: Vec<_> = (0..64).map(|index| disk.read(index * 4096, 4096)).collect();
                assert!(running.into_iter().all(|read| read.wait().is_ok()));
            });
        }
    });
    disk.close().unwrap();
}

#[test]
fn wrong_ranges_and_writes_to_a_read_only_disk_are_told_and_harm_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk.raw");
    std::fs::write(&path, [5; 4096]).unwrap();
    let disk = Options::path(&path).format("raw").unwrap().read_only(true).open().unwrap();
    for (offset, length) in [(4096, 512), (0, 100), (1, 512), (u64::MAX - 511, 512), (0, usize::MAX - 511)] {
        let error = disk.read(offset, length).wait().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::BadOption, "{error}");
    }
    let message = disk.write(0, &[0; 512][..]).wait().unwrap_err().to_string();
    assert!(message.contains("read-only") && message.contains("disk.raw"), "{message}");
    assert_eq!(disk.read(0, 512).wait().unwrap()[..], [5; 512]);
    assert!(Options::drive("file=x,socket=y").is_err());
    assert!(Options::path(dir.path().join("missing")).open().is_err());
}

#[test]
fn an_image_comes_as_a_descriptor_and_names_only_what_is_allowed() {
    let dir = tempfile::tempdir().unwrap();
    let (base, overlay) = (dir.path().join("base.raw"), dir.path().join("overlay.qcow2"));
    std::fs::write(&base, vec![9; SIZE_BYTES as usize]).unwrap();
    make_qcow2(&overlay, Some(base.to_str().unwrap()));
    let options = || {
        let file = std::fs::File::options().read(true).write(true).open(&overlay).unwrap();
        Options::descriptor(file.into()).format("qcow2").unwrap()
    };
    let first_byte = |disk: Result<Disk>| disk.and_then(|disk| Ok(disk.read(0, 512).wait()?[0]));
    assert_eq!(first_byte(options().open()).unwrap_err().kind(), ErrorKind::Denied);
    assert_eq!(first_byte(options().also_allow(&base).open()).unwrap(), 9);
    assert_eq!(first_byte(options().allow_backing(BackingPolicy::Any).open()).unwrap(), 9);
    let disk = options().also_allow(&base).open().unwrap();
    disk.write(0, &[1; 512][..]).wait().unwrap();
    disk.close().unwrap();
    assert_eq!(first_byte(Options::path(&overlay).open()).unwrap(), 1);
}

#[test]
fn a_map_shows_what_is_there_and_new_bytes_are_seen_only_when_they_are_committed() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk.raw");
    std::fs::write(&path, vec![3; SIZE_BYTES as usize]).unwrap();
    make_qcow2(&dir.path().join("disk.qcow2"), Some("disk.raw"));
    let drive =
        |options: &str| Options::drive(&format!("file={}/{options}", dir.path().display())).unwrap().open().unwrap();
    for options in ["disk.raw,format=raw,snapshot=on", "disk.qcow2,format=qcow2", "disk.raw,format=raw,cache=none"] {
        let disk = drive(options);
        let byte = |at: u64| {
            let mut byte = [0];
            disk.map(at / 512 * 512..at / 512 * 512 + 512, Access::Read)
                .unwrap()
                .read_at((at % 512) as usize, &mut byte)
                .unwrap();
            byte[0]
        };
        // Its space is at hand from then on.
        disk.write(65536, &[1; 4096][..]).wait().unwrap();
        assert_eq!((byte(4095), byte(65536), byte(69631), byte(69632)), (3, 1, 1, 3));
        for range in [8192..16384, 512..1024, 20480..24064] {
            let length = (range.end - range.start) as usize;
            let mut map = disk.map(range.clone(), Access::Write).unwrap();
            map.fill(0, length, 9).unwrap();
            drop(map);
            assert_eq!((byte(range.start), byte(range.end - 1)), (3, 3), "cancelled");
            let mut map = disk.map(range.clone(), Access::Write).unwrap();
            map.fill(0, length, 7).unwrap();
            map.write_at(length - 1, &[8]).unwrap();
            assert!(map.write_at(length, &[8]).is_err());
            block_on(map.commit()).unwrap();
            assert_eq!((byte(range.start), byte(range.end - 1), byte(range.end)), (7, 8, 3));
            assert_eq!(disk.read(range.start, 512).wait().unwrap()[0], 7);
        }
        let mut map = disk.map(8192..16384, Access::Write).unwrap();
        map.put_words(8, 1000, |number| number as u64 + 1).unwrap();
        assert!(map.put_words(8192 - 8, 2, |_| 0).unwrap_err().to_string().contains("the map has 8192 bytes"));
        map.commit().wait().unwrap();
        let map = disk.map(8192..16384, Access::Read).unwrap();
        let mut words = Vec::new();
        map.for_each_word(0, 1003, |word| words.push(word)).unwrap();
        assert!(words.iter().copied().eq((0..=1000).chain([0, 0])), "{words:?}");
        assert!(map.for_each_word(8192, 1, |_| ()).is_err());
        drop(map);
        disk.map(0..SIZE_BYTES, Access::Read).unwrap().commit().wait().unwrap();
        for range in [0..100, SIZE_BYTES..SIZE_BYTES + 512] {
            assert!(disk.map(range, Access::Read).is_err());
        }
        disk.close().unwrap();
    }
    let disk = Options::path(&path).format("raw").unwrap().read_only(true).open().unwrap();
    assert!(disk.map(0..512, Access::Write).unwrap_err().to_string().contains("read-only"));
    let map = disk.try_map(0..512, Access::Read).unwrap().expect("a file of the page cache is shown");
    assert!(map.is_in_place());
    std::fs::File::options().write(true).open(&path).unwrap().set_len(0).unwrap();
    let message = map.read_at(0, &mut [0; 512]).unwrap_err().to_string();
    assert!(message.contains("shorter"), "{message}");
    assert!(map.commit().wait().is_err());
}
