//! A stand-in for librbd, with faults.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Images without a cluster: files of a directory, behind a library with librbd's functions.
#[derive(Debug)]
pub struct RbdStandIn {
    directory: tempfile::TempDir,
}

impl RbdStandIn {
    /// Builds the library with the C compiler, and makes a pool named `pool`.
    ///
    /// # Panics
    /// If there is no C compiler.
    #[must_use]
    pub fn new() -> Self {
        let directory = tempfile::Builder::new().prefix("rd-rbd-").tempdir().unwrap();
        std::fs::create_dir(directory.path().join("pool")).unwrap();
        let source = directory.path().join("librbd.c");
        std::fs::write(&source, include_str!("librbd.c")).unwrap();
        let stand_in = Self { directory };
        let mut compiler = Command::new("cc");
        compiler.args(["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread", "-o"]);
        let built = compiler.arg(stand_in.library()).arg(&source).status().unwrap();
        assert!(built.success(), "cc failed: {built}");
        stand_in
    }

    /// Returns the library, for `RINGDISK_LIBRBD`.
    #[must_use]
    pub fn library(&self) -> PathBuf {
        self.directory.path().join("librbd.so")
    }

    /// Returns the name of an image.
    #[must_use]
    pub fn name(&self, image: &str) -> String {
        format!("rbd:pool/{image}:stand_in={}", self.directory.path().display())
    }

    /// Returns the file with the image's bytes. The suffixes `.lock` and `.watchers` name the files with the owner of
    /// its lock and with its users.
    #[must_use]
    pub fn file(&self, image: &str) -> PathBuf {
        self.directory.path().join("pool").join(image)
    }

    /// Sets the faults from now on: a call, an action and a number in each line, as described in the library's source.
    ///
    /// # Panics
    /// If the file cannot be written.
    pub fn set_faults(&self, faults: &str) {
        let (new, faults_file) = (self.path().join("faults.new"), self.path().join("faults"));
        std::fs::write(&new, faults).unwrap();
        std::fs::rename(new, faults_file).unwrap();
    }

    fn path(&self) -> &Path {
        self.directory.path()
    }
}

impl Default for RbdStandIn {
    fn default() -> Self {
        Self::new()
    }
}
