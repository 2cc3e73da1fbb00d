//! Hostile monitors, guests and NBD clients beside a good guest, on the same reactor. Whatever they do, the daemon lives, the good
//! guest's requests are all answered with the right data, nothing of the others is left, and the daemon ends in order.
//!
//! `RINGDISK_HOSTILE_SESSIONS=10000 RINGDISK_HOSTILE_REQUESTS=1000000 cargo test -p ringdisk-daemon --test hostile` plays
//! for long. `RINGDISK_HOSTILE_SEED` chooses what they do. A failure names the seed and the session;
//! `RINGDISK_HOSTILE_FIRST` begins with that session.

#[path = "../common/mod.rs"]
mod common;
mod dice;
mod ground;
mod nbd;
mod packed;
mod requests;
mod session;
mod wire;

use common::{Client, Guest, PATIENCE, assert_clean, assert_holds, at_socket, connect, create, start};
use dice::Dice;
use drive::DriveFormat;
use load::Initial;
use ringdisk_daemon::{Daemon, NbdAddress, NbdOptions};
use session::{Tally, play};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().map_or(default, |text| text.parse().unwrap_or_else(|_| panic!("{name}={text}: a number")))
}

/// What the descriptors of this process refer to, in order.
fn descriptors() -> Vec<String> {
    let entries = std::fs::read_dir("/proc/self/fd").unwrap();
    let names = entries.filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok());
    let mut names: Vec<String> = names.map(|name| name.to_string_lossy().into_owned()).collect();
    names.sort_unstable();
    names
}

/// What this process holds of hostile guests: descriptors and mappings of their memory.
fn held() -> (usize, usize) {
    let theirs = descriptors().iter().filter(|name| name.contains(ground::FILE_NAME)).count();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    (theirs, maps.matches(ground::FILE_NAME).count())
}

fn resident_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/statm").unwrap();
    status.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096
}

/// Waits until nothing of hostile guests is held and no more descriptors than before: sessions end a little after their
/// peers. The reactor makes its timer when it first needs one, and keeps it.
fn assert_let_go(before: &[String]) {
    let begun = Instant::now();
    let timers = |names: &[String]| names.iter().filter(|name| name.contains("timerfd")).count();
    let others = |names: &[String]| names.len() - timers(names);
    loop {
        let (held, open) = (held(), descriptors());
        if held == (0, 0) && others(&open) <= others(before) && timers(&open) <= timers(before).max(1) {
            break;
        }
        assert!(
            begun.elapsed() < PATIENCE,
            "left of hostile sessions: {held:?}\nopen before: {before:?}\nopen: {open:?}"
        );
        std::thread::sleep(Duration::from_millis(20));
    }
}

static PANICS: AtomicUsize = AtomicUsize::new(0);

/// Counts panics in all threads, of the daemon's too.
fn count_panics() {
    let shown = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        PANICS.fetch_add(1, Ordering::SeqCst);
        shown(info);
    }));
}

struct Target {
    socket: PathBuf,
    nbd: PathBuf,
    image: PathBuf,
    format: DriveFormat,
}

fn add(daemon: &Daemon, dir: &Path, name: &str, format: DriveFormat) -> Target {
    let image = dir.join(name);
    let [socket, nbd] = ["sock", "nbd"].map(|kind| dir.join(format!("{name}.{kind}")));
    let mut drive = at_socket(create(&image, format), &socket);
    drive.export.shown.packed = Some(true);
    let (node, _) = daemon.add(&drive).unwrap();
    daemon.add_nbd_export(node, &NbdOptions::at(NbdAddress::Unix(nbd.clone()))).unwrap();
    Target { socket, nbd, image, format }
}

/// Plays sessions of these numbers, with so many requests each in the mean.
fn haunt(target: &Target, seed: u64, numbers: impl Iterator<Item = u64>, requests: u64) -> Tally {
    let mut tally = Tally::default();
    for number in numbers {
        // Many end before they get so far: the next ones make up for it.
        let requests = (requests * (tally.sessions + 1)).saturating_sub(tally.requests);
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let mut dice = Dice::new(seed, number);
            match dice.percent(30) {
                true => nbd::play(&target.nbd, &mut dice, requests, &mut tally),
                false => play(&target.socket, common::SIZE_BYTES / 512, &mut dice, requests, &mut tally),
            }
        }));
        assert!(result.is_ok(), "RINGDISK_HOSTILE_SEED={seed} RINGDISK_HOSTILE_FIRST={number} plays it again");
    }
    tally
}

#[test]
fn whatever_hostile_peers_do_a_good_guest_is_served_and_nothing_is_left_of_them() {
    let sessions = setting("RINGDISK_HOSTILE_SESSIONS", 200);
    let requests = setting("RINGDISK_HOSTILE_REQUESTS", 20_000);
    let (seed, first) = (setting("RINGDISK_HOSTILE_SEED", 1), setting("RINGDISK_HOSTILE_FIRST", 0));
    count_panics();
    let dir = tempfile::tempdir().unwrap();
    let daemon = start(1);
    let good = add(&daemon, dir.path(), "good", DriveFormat::Qcow2);
    let targets = [DriveFormat::Qcow2, DriveFormat::Raw]
        .map(|format| add(&daemon, dir.path(), &format!("{format:?}").to_lowercase(), format));
    let guest = Guest::load(&good.socket, 0);
    // What is made at the first use is there from now on.
    for target in &targets {
        haunt(target, seed, 0..8, 10);
    }
    std::thread::sleep(Duration::from_millis(200));
    let (descriptors, memory) = (descriptors(), resident_bytes());

    let (count, each) = (targets.len() as u64, requests / sessions.max(1) + 1);
    let tallies: Vec<Tally> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..count)
            .zip(&targets)
            .map(|(index, target)| {
                let numbers = (first..first + sessions).filter(move |number| number % count == index);
                scope.spawn(move || haunt(target, seed, numbers, each))
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_let_go(&descriptors);
    let grown = resident_bytes().saturating_sub(memory);
    println!("{tallies:?}, {} KiB more in memory", grown >> 10);
    assert!(grown < 128 << 20, "{grown} bytes more are in memory");
    assert!(tallies.iter().all(|tally| tally.packed > 0 || sessions < 20), "no guest had packed rings");
    assert!(tallies.iter().all(|tally| tally.nbd > 0 || sessions < 20), "there was no NBD client");

    // All are served still, and in order.
    let (disk, state) = guest.stop();
    assert_holds(&disk, 0, state);
    drop(disk);
    for target in &targets {
        nbd::assert_served(&target.nbd);
        let (disk, client) = (connect(&target.socket, 1), Client::new(1));
        let (report, state) = client.pass(&disk, 0, Initial::Zeros);
        assert_clean(&report);
        assert_clean(&client.pass(&disk, 100, Initial::State(state)).0);
    }
    let ended = std::thread::spawn(move || daemon.shutdown());
    let begun = Instant::now();
    while !ended.is_finished() {
        assert!(begun.elapsed() < PATIENCE, "the daemon does not end");
        std::thread::sleep(Duration::from_millis(10));
    }
    ended.join().unwrap().unwrap();
    for target in targets.iter().filter(|target| target.format == DriveFormat::Qcow2) {
        assert_sound(&target.image);
    }
    assert_eq!(PANICS.load(Ordering::SeqCst), 0, "something panicked");
}

/// The image holds together, whatever its guest asked for.
fn assert_sound(path: &Path) {
    let report = testkit::qcow2_check(&std::fs::read(path).unwrap()).unwrap();
    assert_eq!((report.leaked_clusters, report.sound().is_ok()), (0, true));
}
