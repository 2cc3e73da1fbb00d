//! The differences from qemu-img, flag by flag: the list that `ringdisk img-compat` prints.

/// A flag that differs from qemu-img.
pub(crate) struct Difference {
    /// The verb, `*` for all.
    pub(crate) verb: &'static str,
    /// The flag, `*` for all.
    pub(crate) flag: &'static str,
    pub(crate) why: &'static str,
}

const fn refused(verb: &'static str, flag: &'static str, why: &'static str) -> Difference {
    Difference { verb, flag, why }
}

impl Difference {
    pub(crate) fn is_about(&self, verb: &str, flag: &str) -> bool {
        let fits = |own: &str, other: &str| own == "*" || own == other;
        fits(self.verb, verb) && fits(self.flag, flag)
    }
}

/// All flags that differ.
pub(crate) const OTHERS: &[Difference] =
    &[refused("*", "--object", "refused: nothing here uses secrets or other objects")];

/// An intended difference beside the flags.
pub(crate) struct Purpose {
    /// Its topic: a stable name.
    pub(crate) topic: &'static str,
    pub(crate) why: &'static str,
}

const fn purpose(topic: &'static str, why: &'static str) -> Purpose {
    Purpose { topic, why }
}

/// All intended differences. The tests that compare the two programs over generated command lines allow no others.
pub(crate) const ON_PURPOSE: &[Purpose] = &[
    purpose(
        "backing-policy",
        "a backing file outside of its image's directory is opened only with --allow-backing any, or RINGDISK_ALLOW_BACKING=any in the environment",
    ),
    purpose(
        "image-opts",
        "--image-opts and json: know driver, file.driver, file.filename, offset and size of raw, and backing=null; the last three only where nothing is written",
    ),
    purpose(
        "formats",
        "raw and qcow2 only: bochs, cloop, dmg, luks, parallels, qcow, qed, vdi, vhdx, vmdk and vpc images are recognised, named and refused",
    ),
    purpose(
        "protocols",
        "files, block devices, passed descriptors, nbd://, http:// and rbd: only: blkdebug, ftp, ftps, gluster, iscsi, nfs, null-co, ssh and vvfat are refused by name",
    ),
    purpose("encryption", "encrypted images are shown by info and refused by everything else"),
    purpose(
        "file-lengths",
        "a qcow2 file that was changed or compressed may be longer or shorter: where clusters are put, and when space at the end is given back, is each program's own affair",
    ),
    purpose("dd-zeros", "dd leaves zeros out of a qcow2 target, where qemu-img writes them"),
    purpose("half-targets", "a new image that could not be finished is removed, where qemu-img leaves it"),
    purpose(
        "feature-names",
        "where a changed header does not fit its first sector with them, the names of features are left out: one sector is all that changes",
    ),
    purpose("node-names", "errors do not name QEMU's nodes (#block123)"),
    purpose(
        "backing-not-opened",
        "check, snapshot and bitmap look at the image only: a backing file that is missing does not keep them from it",
    ),
    purpose("compat-names", "measure takes compat=v2 and compat=v3, as create does"),
    purpose("measured-options", "measure refuses values of -o that create refuses, where qemu-img overlooks some"),
    purpose(
        "far-refcount-blocks",
        "check -r all drops a refcount block that lies far behind the end of the file, and counts anew; qemu-img makes the file that long",
    ),
    purpose("first-block", "a new raw file is a hole, where qemu-img writes its first block: map and measure show it"),
    purpose("directories", "what is no file is refused before it is opened, and in other words than the system's"),
    purpose("same-file", "dd refuses to write into the disk that it reads"),
    purpose("bitmaps-after-snapshot", "snapshot -a marks enabled bitmaps wholly, where qemu-img refuses"),
    purpose(
        "bitmaps-after-growth",
        "a disk that grows calls added space dirty in its enabled bitmaps, where qemu-img calls it clean",
    ),
    purpose(
        "larger-snapshots",
        "convert -l copies a snapshot whole that is larger than the disk is now, where qemu-img cuts it off",
    ),
    purpose(
        "denied-data",
        "commit, rebase and convert -n refuse to write into an image whose refcounts deny data that are there, where qemu-img overwrites them",
    ),
    purpose(
        "changed-snapshots",
        "commit and rebase refuse an overlay whose internal snapshots would show something else afterwards, unless --change-snapshots is given",
    ),
];

/// Returns the difference of a flag of a verb; `None` if there is none.
pub(crate) fn difference(verb: &str, flag: &str) -> Option<&'static Difference> {
    OTHERS.iter().find(|other| other.is_about(verb, flag))
}
