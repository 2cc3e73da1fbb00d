//! A real Ceph cluster on one machine: a monitor, a manager, and an OSD whose disk is a file.

use std::fmt::Write as _;
use std::fs::File;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// The programs, from Debian's packages ceph-mon, ceph-mgr, ceph-osd and ceph-common.
const PROGRAMS: [&str; 7] = ["ceph-mon", "ceph-mgr", "ceph-osd", "ceph-authtool", "monmaptool", "ceph", "rbd"];
const PATIENCE: Duration = Duration::from_secs(120);
/// Size of the OSD's file, which is sparse.
const DISK_BYTES: u64 = 4 << 30;
const POOL: &str = "disks";

/// A cluster with the pool `disks`, of one copy. Dropping this ends it.
#[derive(Debug)]
pub struct CephNode {
    directory: tempfile::TempDir,
    daemons: Vec<Child>,
    osd: Option<Child>,
}

impl CephNode {
    /// Starts a cluster. `None` if a program is missing, which is an error in continuous integration.
    ///
    /// # Panics
    /// If it does not start.
    #[must_use]
    pub fn start() -> Option<Self> {
        if let Some(missing) = PROGRAMS.into_iter().find(|program| !is_there(program)) {
            assert!(std::env::var_os("CI").is_none(), "{missing} is missing, and this is CI");
            eprintln!("SKIPPED: {missing} is not installed");
            return None;
        }
        let directory = tempfile::Builder::new().prefix("rd-ceph-").tempdir().unwrap();
        let mut node = Self { directory, daemons: Vec::new(), osd: None };
        node.configure();
        node.start_monitor();
        node.make_key("mgr.x", &["mon", "allow profile mgr", "osd", "allow *", "mds", "allow *"]);
        let manager = node.spawn("ceph-mgr", &["-i", "x", "-f"]);
        node.daemons.push(manager);
        let id = uuid();
        assert_eq!(node.run("ceph", &["osd", "new", &id]).trim(), "0");
        node.make_key("osd.0", &["mon", "allow profile osd", "mgr", "allow profile osd", "osd", "allow *"]);
        node.run("ceph-osd", &["-i", "0", "--mkfs", "--osd-uuid", &id]);
        node.start_osd();
        node.run("ceph", &["osd", "pool", "create", POOL, "8", "8"]);
        node.run("ceph", &["osd", "pool", "application", "enable", POOL, "rbd"]);
        Some(node)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Returns the configuration file for its clients.
    #[must_use]
    pub fn conf(&self) -> PathBuf {
        self.path("ceph.conf")
    }

    /// Makes a user that may do this with images (`profile rbd pool=disks`), and returns the file that has its key.
    ///
    /// # Panics
    /// If it cannot be made.
    #[must_use]
    pub fn add_user(&self, name: &str, may: &str) -> PathBuf {
        self.make_key(&format!("client.{name}"), &["mon", "profile rbd", "osd", may])
    }

    fn make_key(&self, who: &str, may: &[&str]) -> PathBuf {
        let keyring = self.path(&format!("{who}.keyring"));
        self.run("ceph", &[&["auth", "get-or-create", who], may, &["-o", keyring.to_str().unwrap()]].concat());
        keyring
    }

    /// Returns the name of an image of the cluster, for its administrator.
    #[must_use]
    pub fn name(&self, image: &str) -> String {
        format!("rbd:{POOL}/{image}:conf={}", self.conf().display())
    }

    /// Writes the configuration. Every user needs a key, as in most clusters.
    fn configure(&self) {
        let mut text = format!("[global]\nfsid = {}\nmon_initial_members = a\n", uuid());
        let _ = writeln!(text, "mon_host = {}", monitor_address());
        for key in ["public_addr", "cluster_addr"] {
            let _ = writeln!(text, "{key} = 127.0.0.1");
        }
        for who in ["cluster", "service", "client"] {
            let _ = writeln!(text, "auth_{who}_required = cephx");
        }
        let _ = writeln!(text, "keyring = {}/$name.keyring", self.directory.path().display());
        for (key, directory) in [("mon_data", "mon"), ("mgr_data", "mgr"), ("osd_data", "osd"), ("run_dir", "run")] {
            std::fs::create_dir(self.path(directory)).unwrap();
            let _ = writeln!(text, "{key} = {}", self.path(directory).display());
        }
        let _ = writeln!(text, "admin_socket = {}/$name.asok", self.path("run").display());
        let _ = writeln!(text, "log_file = {}/$name.log", self.directory.path().display());
        for (key, value) in [
            ("osd_pool_default_size", "1"),
            ("osd_pool_default_min_size", "1"),
            ("mon_allow_pool_size_one", "true"),
            ("osd_crush_chooseleaf_type", "0"),
            // A nearly full disk must not stop the tests.
            ("mon_data_avail_crit", "1"),
            ("osd_objectstore", "bluestore"),
            ("osd_memory_target", "939524096"),
            ("bluestore_block_size", &DISK_BYTES.to_string()),
            ("bluestore_block_create", "true"),
            ("bluestore_cache_size", "67108864"),
            // Watchers that are gone are dropped soon.
            ("osd_client_watch_timeout", "10"),
        ] {
            let _ = writeln!(text, "{key} = {value}");
        }
        let _ = writeln!(text, "[mon]\nkeyring = {}/keyring", self.path("mon").display());
        std::fs::write(self.conf(), text).unwrap();
    }

    fn start_monitor(&mut self) {
        let map = self.path("monmap");
        let conf = std::fs::read_to_string(self.conf()).unwrap();
        let value = |key: &str| conf.lines().find_map(|line| line.strip_prefix(&format!("{key} = "))).unwrap();
        let map = map.to_str().unwrap();
        self.run("monmaptool", &["--create", "--fsid", value("fsid"), "--addv", "a", value("mon_host"), map]);
        let (own, admin) = (self.path("mon.keyring"), self.path("client.admin.keyring"));
        let (own, admin) = (own.to_str().unwrap(), admin.to_str().unwrap());
        let all = |what| ["--cap", what, "allow *"];
        let new = |file, who| ["--create-keyring", file, "--gen-key", "-n", who];
        self.run("ceph-authtool", &[&new(own, "mon.")[..], &all("mon")].concat());
        self.run("ceph-authtool", &[&new(admin, "client.admin")[..], &all("mon"), &all("mgr"), &all("osd")].concat());
        self.run("ceph-authtool", &[own, "--import-keyring", admin]);
        self.run("ceph-mon", &["--mkfs", "-i", "a", "--monmap", map, "--keyring", own]);
        let monitor = self.spawn("ceph-mon", &["-i", "a", "-f"]);
        self.daemons.push(monitor);
    }

    /// Starts the OSD, also again after [`Self::kill_osd`].
    ///
    /// # Panics
    /// If it cannot be started.
    pub fn start_osd(&mut self) {
        self.osd = Some(self.spawn("ceph-osd", &["-i", "0", "-f"]));
    }

    /// Ends the OSD as a power cut would. Requests of clients then wait.
    ///
    /// # Panics
    /// If it has ended by itself.
    pub fn kill_osd(&mut self) {
        let mut osd = self.osd.take().unwrap();
        assert!(osd.try_wait().unwrap().is_none(), "the OSD has ended by itself");
        osd.kill().unwrap();
        osd.wait().unwrap();
    }

    /// Runs `ceph` or `rbd` until it succeeds, and returns its output.
    ///
    /// # Panics
    /// If it fails.
    pub fn run(&self, program: &str, arguments: &[&str]) -> String {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let Output { status, stdout, stderr } = self.command(program, arguments).output().unwrap();
            if status.success() {
                return String::from_utf8_lossy(&stdout).into_owned();
            }
            // The monitor may have only just been started.
            let is_early = program == "ceph" && Instant::now() < deadline;
            assert!(is_early, "{program} {arguments:?}: {status}\n{}", String::from_utf8_lossy(&stderr));
            std::thread::sleep(Duration::from_millis(200));
        }
    }

    fn command(&self, program: &str, arguments: &[&str]) -> Command {
        let mut command = Command::new(program);
        command.arg("-c").arg(self.conf()).args(arguments).stdin(Stdio::null());
        command
    }

    /// Starts a daemon in the foreground, so that its process is ours.
    fn spawn(&self, program: &str, arguments: &[&str]) -> Child {
        let said = File::options().create(true).append(true).open(self.path("said")).unwrap();
        let mut command = self.command(program, arguments);
        command.stdout(said.try_clone().unwrap()).stderr(said);
        command.spawn().unwrap_or_else(|error| panic!("{program}: {error}"))
    }
}

impl Drop for CephNode {
    fn drop(&mut self) {
        for mut daemon in self.osd.take().into_iter().chain(self.daemons.drain(..).rev()) {
            let _ = daemon.kill();
            let _ = daemon.wait();
        }
    }
}

fn is_there(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|directory: PathBuf| Path::new(&directory).join(program).is_file())
}

/// Returns an address with a port that was free a moment ago.
fn monitor_address() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    format!("[v2:{}]", listener.local_addr().unwrap())
}

fn uuid() -> String {
    std::fs::read_to_string("/proc/sys/kernel/random/uuid").unwrap().trim().to_owned()
}
