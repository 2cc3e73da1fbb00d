//! What later saves and restores make of a pair whose layers were not all taken back.

use crate::machine::Machine;
use crate::power_cut::{MadeUp, answer};
use crate::record::{Record, UnderWay};
use crate::restore::{Restore, find};
use crate::save::{SaveOptions, Saved, save_with};
use block::Result;
use std::os::unix::net::UnixListener;
use std::sync::atomic::AtomicBool;
use tempfile::TempDir;

/// A machine with its monitor, and one disk.
struct Bench {
    machine: Machine,
    disks: MadeUp,
    status: &'static str,
    _dir: TempDir,
}

impl Bench {
    /// A machine whose second save took the layers back, and could not freeze the disk again.
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let machine = Machine { state: dir.path().join("saved"), qmp: dir.path().join("qmp"), ..Machine::nothing() };
        let disks = MadeUp::new(dir.path(), &machine.state);
        let mut bench = Self { machine, disks, status: "running", _dir: dir };
        bench.disks.guest_writes(1);
        bench.save(&SaveOptions::new(false), false).unwrap();
        bench.disks.guest_writes(2);
        bench.disks.freezes.set(1);
        let failed = bench.save(&SaveOptions::new(false), false).unwrap_err().to_string();
        bench.disks.freezes.set(u32::MAX);
        assert!(failed.contains("no space for a layer") && failed.contains("may not be whole"), "{failed}");
        assert_eq!((bench.record().number, bench.record().is_finished(), bench.status), (2, false, "running"));
        bench
    }

    fn record(&self) -> Record {
        Record::read(&self.machine.state).unwrap().unwrap()
    }

    /// Calls `call` while the monitor answers one client.
    fn with_monitor<T>(&mut self, call: impl FnOnce(&Machine, &MadeUp) -> T) -> T {
        let _ = std::fs::remove_file(&self.machine.qmp);
        let monitor = UnixListener::bind(&self.machine.qmp).unwrap();
        let (machine, disks, status) = (&self.machine, &self.disks, &mut self.status);
        std::thread::scope(|scope| {
            scope.spawn(move || answer(monitor.accept().unwrap().0, status, b"a state"));
            call(machine, disks)
        })
    }

    fn save(&mut self, options: &SaveOptions, is_cancelled: bool) -> Result<Saved> {
        let cancel = AtomicBool::new(is_cancelled);
        self.with_monitor(|machine, disks| save_with(machine, disks, options, &cancel, &mut |_| {}))
    }

    fn find(&mut self) -> Result<Restore> {
        self.with_monitor(|machine, _| find(machine, false, &AtomicBool::new(false), &mut |_| {}))
    }

    /// Leaves the machine as the save of this number does if it is killed after the state was written.
    fn is_killed_in(&mut self, number: u64) {
        UnderWay { was_running: true, number }.write(&self.machine.state).unwrap();
        self.status = "postmigrate";
    }
}

#[test]
fn a_pair_whose_machine_has_run_since_does_not_become_whole_by_the_state_of_a_later_save() {
    let mut bench = Bench::new();
    bench.disks.guest_writes(3);
    bench.is_killed_in(3);
    assert!(bench.find().unwrap_err().to_string().contains("nothing shows that the machine has not run"));
    bench.save(&SaveOptions::new(false), true).unwrap_err();
    assert!(!bench.record().is_finished(), "{:?}", bench.record());
    bench.status = "postmigrate";
    assert!(bench.find().unwrap_err().to_string().contains("nothing shows that the machine has not run"));

    // A save that comes to its end replaces it.
    assert_eq!(bench.save(&SaveOptions::new(false), false).unwrap().record.number, 3);
    assert!(bench.record().is_finished());
}

#[test]
fn a_pair_whose_machine_stands_since_is_whole_and_the_next_save_finishes_it() {
    let mut bench = Bench::new();
    bench.is_killed_in(2);
    assert_eq!(bench.find().unwrap().record.number, 2);
    bench.save(&SaveOptions::new(false), true).unwrap_err();
    assert_eq!((bench.record().number, bench.record().is_finished()), (2, true));
}

#[test]
fn a_save_into_the_image_is_refused_when_the_pair_before_it_gets_a_layer_on_the_image() {
    let mut bench = Bench::new();
    bench.is_killed_in(2);
    let mut options = SaveOptions::new(false);
    options.into_image = Some("x".to_owned());
    let refused = bench.save(&options, false).unwrap_err().to_string();
    assert!(refused.contains("a snapshot belongs into") && refused.contains("broken off"), "{refused}");
    assert_eq!((bench.record().number, bench.record().is_finished()), (2, true));
}
