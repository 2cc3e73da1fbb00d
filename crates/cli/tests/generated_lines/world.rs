//! Two directories with equal files, and the two programs in them.

use super::fixtures::Fixtures;
use crate::common::text;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// Both programs, each with a directory of its own.
pub(crate) struct World {
    pub(super) ours: Side,
    pub(super) theirs: Side,
}

/// A program and where its commands work.
pub(super) struct Side {
    program: PathBuf,
    pub(super) directory: PathBuf,
}

/// How a command ended.
pub(super) struct Done {
    pub(super) code: Option<i32>,
    pub(super) stdout: String,
    pub(super) stderr: String,
}

/// How both ended.
pub(super) struct Both {
    pub(super) ours: Done,
    pub(super) theirs: Done,
}

impl World {
    /// `parent` is an empty directory.
    pub(crate) fn new(parent: &Path) -> Self {
        let bin = parent.join("bin");
        std::fs::create_dir(&bin).expect("an empty directory");
        let link = bin.join("qemu-img");
        std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_ringdisk"), &link).expect("a link");
        let side = |name: &str, program: PathBuf| Side { program, directory: parent.join(name) };
        Self { ours: side("ours", link), theirs: side("them", PathBuf::from("qemu-img")) }
    }

    /// Both directories as they are at the start of each script.
    pub(super) fn fill(&self, fixtures: &Fixtures) {
        for side in [&self.ours, &self.theirs] {
            match std::fs::remove_dir_all(&side.directory) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => panic!("{error}"),
                _ => {}
            }
            fixtures.copy_to(&side.directory);
        }
    }

    /// Leaves nothing of a file to the page cache. Which parts of preallocated space hold data, a file system tells by the
    /// pages that happen to be in memory: by those that are not written yet, and by those that somebody has read.
    pub(super) fn settle(&self, name: &str) {
        for side in [&self.ours, &self.theirs] {
            let file = File::open(side.directory.join(name)).expect("a file");
            file.sync_all().expect("the file can be written back");
            rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).expect("a hint");
        }
    }

    /// Runs a line in both, side by side.
    pub(super) fn run(&self, line: &[String]) -> Both {
        let [ours, theirs] = [&self.ours, &self.theirs].map(|side| side.start(line));
        Both { ours: Done::of(ours), theirs: Done::of(theirs) }
    }
}

impl Side {
    fn start(&self, line: &[String]) -> Child {
        let mut command = match line.split_first() {
            // The same program in both worlds.
            Some((io, rest)) if io == "io" => {
                let mut command = Command::new("qemu-io");
                command.args(["-f", &rest[0], "-c", &rest[2], &rest[1]]);
                command
            }
            _ => {
                let mut command = Command::new(&self.program);
                command.args(line);
                command
            }
        };
        command.current_dir(&self.directory).env_remove("RUST_LOG").stdin(Stdio::null());
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the program can be started")
    }
}

impl Done {
    fn of(child: Child) -> Self {
        let output = child.wait_with_output().expect("a child");
        Self { code: output.status.code(), stdout: text(&output.stdout), stderr: text(&output.stderr) }
    }
}
