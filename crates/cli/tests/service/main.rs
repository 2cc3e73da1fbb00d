//! The daemon under the restrictions of its systemd unit, as far as they can be applied without systemd: each line of the
//! unit is applied by bubblewrap and a seccomp filter, or is named with the reason why not.

#[path = "../common/mod.rs"]
mod common;
mod filter;
#[path = "../common/guest.rs"]
mod guest;
mod unit;

use common::{PATIENCE, assert_valid, at, directory, has_tool, path_str, ringdisk, run_ok, text, tool};
use guest::Guest;
use rustix::process::{Pid, Signal, kill_process};
use std::fmt::Write as _;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use tempfile::TempDir;
use unit::Unit;

/// Where the program is inside.
const PROGRAM: &str = "/run/program";
/// The machine whose disks are served.
const INSTANCE: &str = "vm1";

/// What stands for the directories of the unit, and what confines a program to them.
struct Confinement {
    dir: TempDir,
    unit: Unit,
}

impl Confinement {
    /// Nothing where a tool is missing.
    fn of_the_unit() -> Option<Self> {
        if !["bwrap", "prlimit", "systemd-analyze", "qemu-img"].into_iter().all(has_tool) {
            return None;
        }
        let (dir, unit) = (directory(), Unit::read());
        for name in ["state", "run", "filters"] {
            std::fs::create_dir(at(&dir, name)).unwrap();
        }
        for (number, filter) in filter::of_unit(&unit).into_iter().enumerate() {
            std::fs::write(at(&dir, "filters").join(number.to_string()), filter).unwrap();
        }
        Some(Self { dir, unit })
    }

    /// A file of the state directory.
    fn state(&self, name: &str) -> PathBuf {
        at(&self.dir, "state").join(name)
    }

    /// A file of the runtime directory.
    fn runtime(&self, name: &str) -> PathBuf {
        at(&self.dir, "run").join(name)
    }

    /// `program` under the unit's restrictions. Its number is written to the file `child` when it has begun.
    fn command(&self, program: &[&str]) -> Command {
        let mut shell = format!("umask {}\n", self.unit.value("UMask"));
        shell += "exec \"$@\" 3>\"$DIR/child\"";
        let filters = at(&self.dir, "filters").read_dir().unwrap().count();
        for number in 0..filters {
            write!(shell, " {}<\"$DIR/filters/{number}\"", number + 4).unwrap();
        }
        let mut command = Command::new("sh");
        command.args(["-c", &shell, "sh"]).env("DIR", self.dir.path()).stdin(Stdio::null());
        // They can be raised with a capability only. Who lacks it takes what there is.
        let limits = [("LimitMEMLOCK", "--memlock"), ("LimitNOFILE", "--nofile")].map(|(key, option)| {
            let value = self.unit.value(key).replace("infinity", "unlimited");
            format!("{option}={value}:{value}")
        });
        let may_set = |limit: &&String| tool("prlimit", &[limit.as_str(), "true"]).status.success();
        command.arg("prlimit").args(limits.iter().filter(may_set)).arg("--");
        command.args(["bwrap", "--die-with-parent", "--info-fd", "3"]).args(self.unit.confinement());
        let own = ringdisk().get_program().to_owned();
        command.args(["--tmpfs", "/run", "--ro-bind"]).arg(own).arg(PROGRAM);
        let places = [("state", "/var/lib/ringdisk".to_owned()), ("run", format!("/run/ringdisk/{INSTANCE}"))];
        for (name, place) in places {
            command.arg("--bind").arg(at(&self.dir, name)).arg(place);
        }
        for number in 0..filters {
            command.args(["--add-seccomp-fd", &(number + 4).to_string()]);
        }
        command.args(["--setenv", "NOTIFY_SOCKET", &format!("/run/ringdisk/{INSTANCE}/notify")]);
        command.arg("--").args(program);
        command
    }

    fn output(&self, program: &[&str]) -> String {
        let output = self.command(program).output().unwrap();
        assert!(output.status.success(), "{program:?}: {}", text(&output.stderr));
        text(&output.stdout)
    }

    /// The daemon of the unit, with these disks, when it has said that it is ready.
    fn serve(&self, drives: &[String]) -> Daemon<'_> {
        let words = unit::words_of(&self.unit.value("ExecStart"), INSTANCE, drives);
        let words: Vec<&str> = std::iter::once(PROGRAM).chain(words.iter().skip(1).map(String::as_str)).collect();
        let notices = UnixDatagram::bind(self.runtime("notify")).unwrap();
        notices.set_read_timeout(Some(PATIENCE)).unwrap();
        let log = std::fs::File::create(at(&self.dir, "log")).unwrap();
        let child = self.command(&words).stdout(log.try_clone().unwrap()).stderr(log).spawn().unwrap();
        let mut daemon = Daemon { child, confinement: self, pid: None };
        let mut said = [0; 256];
        let ready = notices.recv(&mut said).map(|length| text(&said[..length]));
        assert!(ready.as_ref().is_ok_and(|said| said.contains("READY=1")), "{ready:?}: {}", daemon.fail());
        let info: serde_json::Value = serde_json::from_slice(&std::fs::read(at(&self.dir, "child")).unwrap()).unwrap();
        daemon.pid = info["child-pid"].as_i64().and_then(|pid| Pid::from_raw(pid as i32));
        daemon
    }
}

struct Daemon<'a> {
    child: Child,
    confinement: &'a Confinement,
    /// Its number outside.
    pid: Option<Pid>,
}

impl Daemon<'_> {
    fn log(&self) -> String {
        std::fs::read_to_string(at(&self.confinement.dir, "log")).unwrap_or_default()
    }

    fn fail(&mut self) -> String {
        let _ = self.child.kill();
        self.log()
    }

    fn ctl(&self, call: &[&str]) -> String {
        let control = self.confinement.runtime("control");
        run_ok(&[&["ctl", "--control", path_str(&control)], call].concat())
    }

    /// Ends it as systemd does.
    fn stop(mut self) {
        kill_process(self.pid.unwrap(), Signal::TERM).unwrap();
        let deadline = std::time::Instant::now() + PATIENCE;
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            assert!(std::time::Instant::now() < deadline, "it does not end: {}", self.fail());
            std::thread::sleep(std::time::Duration::from_millis(10));
        };
        assert!(status.success(), "{status}: {}", self.log());
    }
}

impl Drop for Daemon<'_> {
    fn drop(&mut self) {
        // This does nothing if it has ended. What it started ends with it.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn the_restrictions_of_the_unit_are_in_force() {
    let Some(confinement) = Confinement::of_the_unit() else { return };
    let status = confinement.output(&["/bin/grep", "-E", "^(NoNewPrivs|CapBnd|CapEff|Seccomp):", "/proc/self/status"]);
    let words: Vec<&str> = status.split_whitespace().collect();
    let none = "0000000000000000";
    assert_eq!(words, ["CapEff:", none, "CapBnd:", none, "NoNewPrivs:", "1", "Seccomp:", "2"]);
    let refused = "for place in /etc /usr /var /dev/shm/../../boot; do touch $place/x 2>/dev/null && echo $place; done; \
         ls -A /home /root /tmp | grep -v :; ls /dev | grep -E '^(sd|vd|nvme|kvm)'; \
         unshare --user true 2>/dev/null && echo namespaces; \
         grep -v -E 'lo:|Inter|face' /proc/net/dev; exit 0";
    assert_eq!(confinement.output(&["/bin/sh", "-c", refused]).trim(), "", "all of this is to be refused");
    confinement.output(&["/bin/sh", "-c", "touch /var/lib/ringdisk/x && touch /tmp/x"]);
}

#[test]
fn the_daemon_serves_verified_load_under_the_restrictions_of_its_unit() {
    let Some(confinement) = Confinement::of_the_unit() else { return };
    let image = |name: &str| {
        let path = confinement.state(name);
        let format = name.rsplit('.').next().unwrap();
        run_ok(&["create", "-q", "-f", format, path_str(&path), "64M"]);
        path
    };
    let images = ["vm1.qcow2", "ring.qcow2", "aio.raw", "threads.raw"].map(image);
    // The first is the example's.
    let inside = |name: &str, more: &str| {
        let stem = name.split('.').next().unwrap();
        let socket = format!("/run/ringdisk/{INSTANCE}/{stem}.sock");
        format!("name={stem},file=/var/lib/ringdisk/{name},socket={socket},{more}")
    };
    let mut drives = unit::example_drives();
    for (name, more) in [
        ("ring.qcow2", "format=qcow2,engine=io_uring,cache=none,fixed-buffers=on"),
        ("aio.raw", "format=raw,engine=linux-aio,cache=none"),
        ("threads.raw", "format=raw,engine=threads,packed=on,filter=throttle:iops-total=50000"),
    ] {
        drives.extend(["--drive".to_owned(), inside(name, more)]);
    }
    std::fs::write(confinement.state("vm1.toml"), "").unwrap();
    drives.extend(["--config", "/var/lib/ringdisk/vm1.toml"].map(str::to_owned));
    let daemon = confinement.serve(&drives);
    let guests =
        ["root", "ring", "aio", "threads"].map(|name| Guest::begin(&confinement.runtime(&format!("{name}.sock"))));
    daemon.ctl(&["snapshot", "ring", "/var/lib/ringdisk/overlay.qcow2"]);
    daemon.ctl(&["resize", "aio", "+1M"]);
    daemon.ctl(&["commit", "ring"]);
    daemon.ctl(&["backup", "root", "/var/lib/ringdisk/backup.qcow2"]);
    daemon.ctl(&["add", "format=null,size=1G,name=more,socket=/run/ringdisk/vm1/more.sock"]);
    daemon.ctl(&["remove", "more", "--force"]);
    let metrics = daemon.ctl(&["metrics"]);
    assert!(metrics.contains("ringdisk_disk_latency_seconds"), "{metrics}");
    assert!(metrics.contains("libvirt_domain_block_stats_capacity_bytes{domain=\"vm1\","), "{metrics}");
    // As systemctl reload does it.
    let more = "[[drive]]\nname = 'more'\nformat = 'null'\nsize = '1G'\nexport = false\n";
    std::fs::write(confinement.state("vm1.toml"), more).unwrap();
    let reload = unit::words_of(&confinement.unit.value("ExecReload"), INSTANCE, &[]);
    let reload: Vec<&str> = std::iter::once(PROGRAM).chain(reload.iter().skip(1).map(String::as_str)).collect();
    assert!(confinement.output(&reload).contains("more"));
    assert!(daemon.ctl(&["list"]).contains("more"));
    guests.into_iter().for_each(Guest::end);
    let log = daemon.log();
    daemon.stop();
    // The limit of the unit cannot be had everywhere.
    let is_bad = |line: &&str| (line.contains("WARN") || line.contains("ERROR")) && !line.contains("locked memory");
    assert_eq!(log.lines().find(is_bad), None, "{log}");
    for image in images.iter().filter(|image| is_qcow2(image)) {
        assert_valid(image, false);
    }
    assert!(!confinement.runtime("root.sock").exists());
}

fn is_qcow2(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "qcow2")
}
