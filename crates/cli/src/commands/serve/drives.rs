//! The disks that the command line and the service manager name, each with its socket and queues.

use super::Args;
use crate::nbd_options::{passed_word, place};
use crate::output::usage;
use control::Configured;
use control::api::{AddExport, AddNbd, AddTls};
use drive::{DriveOptions, ParsedDrive, PassedDescriptors};
use image::{FileName, options_without_secrets};
use std::os::fd::RawFd;
use std::path::{Path, PathBuf};

pub(super) enum Asked {
    Drives(Vec<Configured>),
    Help(String),
}

/// Returns the disks in the order of the command line. Without disks it fails, unless `is_served_without`.
/// Passed sockets that `others` name belong to no disk alone.
pub(super) fn drives(args: &Args, is_served_without: bool, others: &[Configured]) -> anyhow::Result<Asked> {
    let named = args.images.iter().map(|image| Ok(DriveOptions::of_file(FileName::parse(image)?)));
    let mut drives = named.collect::<block::Result<Vec<DriveOptions>>>()?;
    let passed = PassedDescriptors::of_this_process()?;
    for text in &args.drive {
        let parsed = DriveOptions::parse_with(text, &passed);
        match parsed.map_err(|error| error.in_context(format!("--drive {}", options_without_secrets(text))))? {
            ParsedDrive::Drive(drive) => drives.push(*drive),
            ParsedDrive::Help(help) => return Ok(Asked::Help(help)),
        }
    }
    if drives.is_empty() && !is_served_without {
        return Err(usage("nothing to serve: name an IMAGE or give --drive file=PATH,..."));
    }
    drives.iter_mut().for_each(|drive| drive.export.queues = drive.export.queues.or(args.queues));
    let exports: Vec<AddExport> = args.nbd.iter().map(|word| nbd_export(args, word)).collect::<block::Result<_>>()?;
    let sockets = others.iter().flat_map(|other| &other.exports).chain(&exports).filter_map(|export| {
        let word = passed_word(export.socket.as_deref()?)?;
        Some(passed.number_of(word))
    });
    let of_others = others.iter().filter_map(|other| other.drive.export.socket_descriptor).map(Ok);
    let taken: Vec<RawFd> = sockets.chain(of_others).collect::<block::Result<_>>()?;
    give_passed_sockets(&mut drives, &passed, &taken)?;
    give_named_sockets(&mut drives, &args.socket, &passed)?;
    let texts = texts(args);
    let configured = |(drive, text)| Configured { drive, text, serve: true, exports: exports.clone() };
    Ok(Asked::Drives(drives.into_iter().zip(texts).map(configured).collect()))
}

/// Returns an NBD export for any disk.
fn nbd_export(args: &Args, word: &str) -> block::Result<AddExport> {
    let (socket, listen) = place(word)?;
    let tls = args.nbd_tls_creds.as_deref().map(|credentials| AddTls {
        credentials: drive::absolute(credentials),
        required: true,
        verify_peer: true,
    });
    let is_made_here = socket.as_deref().is_some_and(|socket| passed_word(socket).is_none());
    let of_socket = |setting: &Option<String>| setting.clone().filter(|_| is_made_here);
    Ok(AddExport {
        socket_mode: of_socket(&args.nbd_socket_mode),
        socket_group: of_socket(&args.nbd_socket_group),
        socket,
        nbd: Some(AddNbd { listen, tls, ..AddNbd::default() }),
        ..AddExport::default()
    })
}

/// Returns the words of the command line for each disk, by which the record of a state directory identifies it.
fn texts(args: &Args) -> Vec<String> {
    // A name that is not UTF-8 has no text: the disk is served, but not recorded.
    let image = |path: &PathBuf| path.to_str().map_or_else(String::new, |path| format!("file={}", drive::escape(path)));
    let mut texts: Vec<String> = Vec::new();
    for text in args.images.iter().map(image).chain(args.drive.iter().cloned()) {
        let before = texts.iter().filter(|other| other.split('#').next() == Some(&text)).count();
        // Null disks may have the same words. Only the first is recorded.
        texts.push(if before == 0 { text } else { format!("{text}#{before}") });
    }
    texts
}

/// Gives the sockets that a manager passed to the disks that they are named after. A guest that got another guest's
/// disk would destroy it, so no socket is assigned by its place in a list.
fn give_passed_sockets(drives: &mut [DriveOptions], passed: &PassedDescriptors, taken: &[RawFd]) -> anyhow::Result<()> {
    let own: Vec<_> = drives.iter().filter_map(|drive| drive.export.socket_descriptor).collect();
    let is_free = |(number, _): &(RawFd, &str)| !own.contains(number) && !taken.contains(number);
    let sockets: Vec<_> = passed.sockets().filter(is_free).collect();
    let is_only_one = drives.len() == 1 && sockets.len() == 1;
    for (number, name) in sockets {
        let said = drives.iter().position(|drive| drive.disk.name.as_deref() == Some(name));
        let by_default = || drives.iter().enumerate().position(|(index, drive)| disk_name(index, drive) == name);
        let index = said.or_else(by_default).or(is_only_one.then_some(0));
        let Some(drive) = index.and_then(|index| drives.get_mut(index)) else {
            let names: Vec<String> = drives.iter().enumerate().map(|(index, drive)| disk_name(index, drive)).collect();
            return Err(usage(format!(
                "a socket was passed under the name '{name}', which no disk has (there are {}): set FileDescriptorName= of \
                 its socket unit, or name= of the drive",
                names.join(", ")
            )));
        };
        if drive.export.socket.is_some() || drive.export.socket_descriptor.is_some() {
            let message =
                format!("a socket was passed for the disk '{name}', which has another one: take one of them away");
            return Err(usage(message));
        }
        drive.export.socket_descriptor = Some(number);
    }
    Ok(())
}

/// Returns the name that the daemon gives a disk.
fn disk_name(index: usize, drive: &DriveOptions) -> String {
    drive.disk.name.clone().unwrap_or_else(|| format!("disk{index}"))
}

/// Gives the sockets of the command line to the disks without one, in order. The sockets of other disks lie beside
/// their images.
fn give_named_sockets(
    drives: &mut [DriveOptions],
    sockets: &[PathBuf],
    passed: &PassedDescriptors,
) -> anyhow::Result<()> {
    let mut sockets = sockets.iter();
    for drive in drives {
        if drive.export.socket.is_some() || drive.export.socket_descriptor.is_some() {
            continue;
        }
        let socket = sockets.next();
        match socket.and_then(|socket| passed_word(socket)) {
            Some(word) => drive.export.socket_descriptor = Some(passed.number_of(word)?),
            None => drive.export.socket = socket.cloned().or_else(|| drive.disk.default_socket()),
        }
    }
    match sockets.next() {
        Some(left_over) => Err(belongs_to_none(left_over)),
        None => Ok(()),
    }
}

fn belongs_to_none(socket: &Path) -> anyhow::Error {
    usage(format!("--socket {} belongs to no disk: there are more sockets than disks", socket.display()))
}
