//! What a word costs: by calls and through a window, one access at a time and as a string; and what windows cost a plain
//! access.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use ringdisk_pio::{Bus, Device, Direction, Link, Region, Width, Window};
use std::hint::black_box;

const PORT: u16 = 0x1f0;
const STATUS: u16 = 0x1f7;
const SECTOR_BYTES: usize = 512;
const WORDS: usize = SECTOR_BYTES / 2;

/// Gives sectors without end, and a byte of status.
struct Sectors {
    own: Option<Window>,
    status: u32,
}

impl Sectors {
    fn open(&mut self, data: Vec<u8>, link: &mut Link) {
        let window = Window::new(0, Direction::In, Width::Word, data, 0..SECTOR_BYTES).unwrap();
        self.own = link.open_window(window).err();
    }

    #[cold]
    fn ended(&mut self, link: &mut Link) {
        let window = self.own.take().unwrap();
        self.window_ended(window, link);
    }
}

impl Device for Sectors {
    fn read(&mut self, offset: u16, _: Width, link: &mut Link) -> u32 {
        match (offset, &mut self.own) {
            (0, Some(window)) => {
                let word = window.take_unit();
                if window.is_done() {
                    self.ended(link);
                }
                word
            }
            _ => self.status,
        }
    }

    fn write(&mut self, offset: u16, _: Width, value: u32, link: &mut Link) {
        self.status = value;
        if offset == 7 {
            self.open(vec![7; SECTOR_BYTES], link);
        }
    }

    fn window_ended(&mut self, window: Window, link: &mut Link) {
        self.open(window.into_data(), link);
    }

    fn reset(&mut self, _: Option<Window>, _: &mut Link) {}
}

fn bus(windows: bool) -> Bus {
    let mut bus = Bus::new();
    bus.set_windows(windows);
    let region = Region { base: PORT, ports: 8, wide: Some(0) };
    bus.attach(Box::new(Sectors { own: None, status: 0x50 }), &[region]).unwrap();
    bus.write(STATUS, Width::Byte, 0x50);
    bus
}

/// A sector a time; the figures are a word's.
fn words(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("word");
    group.throughput(Throughput::Elements(WORDS as u64));
    for (name, windows) in [("calls", false), ("window", true)] {
        let mut bus = bus(windows);
        let mut sector = [0_u8; SECTOR_BYTES];
        group.bench_function(format!("{name}, word by word"), |bencher| {
            bencher.iter(|| {
                for word in sector.chunks_exact_mut(2) {
                    let value = black_box(&mut bus).read(black_box(PORT), Width::Word) as u16;
                    word.copy_from_slice(&value.to_le_bytes());
                }
            });
        });
        group.bench_function(format!("{name}, string"), |bencher| {
            bencher.iter(|| black_box(&mut bus).read_string(black_box(PORT), Width::Word, black_box(&mut sector)));
        });
    }
    group.finish();
}

/// The bus as it would be without windows: the same table, the same call, and the same device.
struct PlainBus {
    entries: Vec<(u16, u16, bool)>,
    devices: Vec<Box<dyn PlainDevice>>,
}

trait PlainDevice {
    fn read(&mut self, offset: u16, width: Width) -> u32;
}

impl PlainDevice for Sectors {
    fn read(&mut self, offset: u16, _: Width) -> u32 {
        match (offset, &mut self.own) {
            (0, Some(window)) => window.take_unit(),
            _ => self.status,
        }
    }
}

impl PlainBus {
    #[inline]
    fn read(&mut self, port: u16, width: Width) -> u32 {
        let Some((slot, offset, wide)) = self.entries.get(usize::from(port)).copied() else { return 0 };
        if !wide && width != Width::Byte {
            return 0;
        }
        match self.devices.get_mut(usize::from(slot)) {
            Some(device) => device.read(offset, width) & width.mask(),
            None => width.mask(),
        }
    }
}

fn plain(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("plain");
    let device = Sectors { own: None, status: 0x50 };
    let mut without = PlainBus { entries: vec![(0, 7, false); 1 << 16], devices: vec![Box::new(device)] };
    group.bench_function("a bus without windows", |bencher| {
        bencher.iter(|| black_box(&mut without).read(black_box(STATUS), Width::Byte));
    });
    let mut with = bus(true);
    group.bench_function("a bus with windows", |bencher| {
        bencher.iter(|| black_box(&mut with).read(black_box(STATUS), Width::Byte));
    });
    group.finish();
}

criterion_group!(benches, words, plain);
criterion_main!(benches);
