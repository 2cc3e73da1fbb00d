//! Disks, exports and the reactors' threads: what ringdisk serves.
