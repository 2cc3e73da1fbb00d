//! Real Linux guests on our disks: boots them, gives them work, watches their console, and reads their report.
//!
//! This room is at the upper end of a request's path, where the guest is. It uses vhost-user sockets of a running
//! server. `ringdisk try --guest` and the tests use it.
//!
//! There are two kinds of guest, and neither needs KVM. User Mode Linux ([`GuestKind::Uml`]) is a Linux kernel that
//! runs as a process and boots in a second. It has one CPU and uses one queue. QEMU ([`GuestKind::Qemu`]) boots a
//! Debian kernel with an initramfs that is built here, with any number of CPUs and queues.
//!
//! User Mode Linux can also have a disk of an NBD server, by its kernel's own client over a network in user space.
//!
//! Both run the same script (`script`). It makes ext4 on each disk, writes files, reads them back with checksums, lets
//! `fio` write and verify in parallel, trims, mounts again, and powers off. The console is read line by line. A guest
//! that exceeds its time is killed. [`verify_image`] checks the resulting image with other projects' tools.
//!
//! ```no_run
//! use ringdisk_guestlab::{GuestKind, GuestOptions};
//!
//! let options = GuestOptions::new(GuestKind::Uml, vec!["/run/disk.sock".into()]);
//! let report = ringdisk_guestlab::run(&options, &mut |step| println!("{step}"))?;
//! println!("Linux {} is done after {:?}", report.kernel, report.time);
//! # Ok::<(), anyhow::Error>(())
//! ```

#![forbid(unsafe_code)]

mod console;
mod grow;
mod image_check;
mod initramfs;
mod inspect;
mod monitor;
mod options;
mod qemu;
mod report;
mod run;
mod script;
mod tools;
mod uml;

pub use image_check::{ImageFormat, verify_image};
pub use monitor::Monitor;
pub use options::{GuestKind, GuestOptions, GuestWork, MeasureJob, NbdDisk};
pub use report::{DiskReport, FioReport, GuestReport};
pub use run::{check_tools, run};
