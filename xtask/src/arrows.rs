//! The rooms and their arrows: which crate may depend on which, read from `cargo metadata`.

use anyhow::{Context, Result};
use cargo_metadata::{DependencyKind, MetadataCommand};
use std::collections::BTreeSet;

/// One room: its package, and the rooms below that it may name. `memory` is below all rooms and open to all.
struct Room {
    name: &'static str,
    below: &'static [&'static str],
}

/// The rooms from top to bottom, as a request travels. The program, which is not listed, may name them all.
const ROOMS: &[Room] = &[
    Room { name: "save", below: &["control", "image", "block"] },
    Room { name: "control", below: &["daemon", "drive", "export-vhost-user", "image", "block"] },
    Room { name: "daemon", below: &["drive", "export-vhost-user", "export-nbd", "image", "engine", "block"] },
    Room { name: "guestlab", below: &[] },
    Room { name: "disk", below: &["drive", "image", "engine", "block"] },
    Room { name: "drive", below: &["driver", "image", "engine", "file-nbd", "file-http", "file-rbd", "block"] },
    Room { name: "load", below: &["driver", "block"] },
    Room { name: "jobs", below: &["image", "block"] },
    Room { name: "export-vhost-user", below: &["virtio-blk", "virtio", "block"] },
    Room { name: "export-nbd", below: &["nbd-tls", "nbd-wire", "block"] },
    Room { name: "virtio-blk", below: &["virtio", "block"] },
    Room { name: "driver", below: &["virtio", "block"] },
    Room { name: "virtio", below: &[] },
    Room { name: "ata", below: &["pio", "block"] },
    Room { name: "pio", below: &[] },
    Room { name: "image", below: &["format-raw", "format-qcow2", "format-scratch", "nbd-wire", "block"] },
    Room { name: "format-raw", below: &["block"] },
    Room { name: "format-qcow2", below: &["block"] },
    Room { name: "format-scratch", below: &["block"] },
    Room { name: "engine", below: &["block"] },
    Room { name: "file-nbd", below: &["nbd-tls", "nbd-wire", "block"] },
    Room { name: "file-http", below: &["block"] },
    Room { name: "file-rbd", below: &["block"] },
    Room { name: "nbd-tls", below: &["block"] },
    Room { name: "testkit", below: &["block"] },
    Room { name: "block", below: &[] },
    Room { name: "nbd-wire", below: &[] },
    Room { name: "memory", below: &[] },
];

/// A dependency between two members of the workspace.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Arrow {
    from: String,
    to: String,
    /// Whether it is for tests only.
    dev: bool,
}

/// Complains about every arrow of the workspace that the table does not have, and of the table that no room uses.
pub(crate) fn check() -> Result<Vec<String>> {
    let metadata = MetadataCommand::new()
        .manifest_path(crate::workspace::root().join("Cargo.toml"))
        .no_deps()
        .exec()
        .context("cargo metadata failed")?;
    let members: Vec<_> = metadata.workspace_packages();
    let names: Vec<String> = members.iter().map(|package| package.name.to_string()).collect();
    let mut complaints: Vec<String> = names
        .iter()
        .filter(|name| !["xtask", "cli", "fuzz"].contains(&room_name(name)) && room(room_name(name)).is_none())
        .map(|name| format!("{name} is in no row of the table of rooms"))
        .collect();
    let arrows: Vec<Arrow> = members
        .iter()
        .flat_map(|package| {
            package.dependencies.iter().filter(|dependency| names.contains(&dependency.name)).map(|dependency| Arrow {
                from: room_name(&package.name).to_owned(),
                to: room_name(&dependency.name).to_owned(),
                dev: dependency.kind == DependencyKind::Development,
            })
        })
        .collect();
    complaints.extend(arrows.iter().filter_map(complaint));
    complaints.extend(unused(&arrows));
    let page = crate::workspace::root().join(PAGE);
    complaints.extend(unlike_the_page(&std::fs::read_to_string(page).with_context(|| format!("cannot read {PAGE}"))?));
    Ok(complaints)
}

/// The page that shows the same table to people: the rooms, what they hold, and what they may depend on.
const PAGE: &str = "ARCHITECTURE.md";

/// Complains about rows of the page that let rooms depend on others than they may here. A row can have several rooms if
/// none of them depends on another.
fn unlike_the_page(page: &str) -> Vec<String> {
    let rows = page.lines().filter(|line| line.starts_with("| `"));
    rows.filter_map(|row| {
        let mut cells = row.split('|').skip(1).map(names);
        let (rooms, shown) = (cells.next()?, cells.nth(1)?);
        let of_row: Vec<&Room> = rooms.iter().filter_map(|name| room(name)).collect();
        let expected: BTreeSet<&str> = of_row.iter().flat_map(|room| room.below).copied().collect();
        let is_like = of_row.is_empty() || shown == expected;
        (!is_like).then(|| format!("{PAGE}: {rooms:?} depend on {expected:?}, and the page says {shown:?}"))
    })
    .collect()
}

/// Returns the names in backticks, and all rooms that begin with a name that ends with a star.
fn names(cell: &str) -> BTreeSet<&str> {
    let names = cell.split('`').skip(1).step_by(2);
    names
        .flat_map(|name| match name.strip_suffix('*') {
            Some(start) => ROOMS.iter().map(|room| room.name).filter(|room| room.starts_with(start)).collect(),
            None => vec![name],
        })
        .collect()
}

/// Complains about arrows of the table that no room uses: a new one there would go unseen.
fn unused(arrows: &[Arrow]) -> impl Iterator<Item = String> {
    let used = |from: &str, to: &str| arrows.iter().any(|arrow| arrow.from == from && arrow.to == to && !arrow.dev);
    let rows = ROOMS.iter().flat_map(|room| room.below.iter().map(|below| (room.name, *below)));
    rows.filter(move |(from, to)| !used(from, to))
        .map(|(from, to)| format!("{from} does not depend on {to}, as the table of rooms lets it: take it out"))
}

/// The fuzzers stand above the rooms, as tests do. No room names them.
const FUZZERS: &str = "fuzz";

/// The program's package has the program's name.
fn room_name(package: &str) -> &str {
    if package == "ringdisk" { "cli" } else { package.strip_prefix("ringdisk-").unwrap_or(package) }
}

fn room(name: &str) -> Option<&'static Room> {
    ROOMS.iter().find(|room| room.name == name)
}

fn complaint(arrow: &Arrow) -> Option<String> {
    let Arrow { from, to, dev } = arrow;
    if from == "xtask" {
        return Some(format!("xtask depends on {to}: the project's commands stand outside the rooms"));
    }
    if from == FUZZERS {
        return (to == "cli").then(|| format!("{from} depends on the program"));
    }
    if to == "testkit" {
        return (!dev).then(|| format!("{from} depends on testkit, which is for tests only"));
    }
    if to == FUZZERS {
        return Some(format!("{from} depends on the fuzzers"));
    }
    if *dev {
        // Tests may use any rooms together, except the program itself.
        return (to == "cli").then(|| format!("{from} depends on the program in its tests"));
    }
    let allowed = from == "cli"
        || room(from).is_some_and(|room| room.below.contains(&to.as_str()) || to == "memory" && from != to);
    (!allowed).then(|| format!("{from} depends on {to}: no such arrow in the table of rooms"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arrow(from: &str, to: &str, dev: bool) -> Option<String> {
        complaint(&Arrow { from: from.into(), to: to.into(), dev })
    }

    #[test]
    fn every_arrow_of_the_workspace_is_in_the_table() {
        assert_eq!(check().unwrap(), Vec::<String>::new());
    }

    #[test]
    fn an_arrow_that_points_up_or_past_the_interface_is_found() {
        assert!(arrow("block", "image", false).is_some());
        assert!(arrow("image", "engine", false).is_some());
        assert!(arrow("export-vhost-user", "image", false).is_some());
        assert!(arrow("daemon", "cli", false).is_some());
        assert!(arrow("image", "testkit", false).is_some());
        assert!(arrow("xtask", "engine", false).is_some());
        assert!(arrow("nowhere", "block", false).is_some());
        assert!(arrow("memory", "memory", false).is_some());
    }

    #[test]
    fn an_arrow_that_only_the_table_has_is_found() {
        let all = ROOMS.iter().flat_map(|room| {
            room.below.iter().map(|below| Arrow { from: room.name.into(), to: (*below).into(), dev: false })
        });
        let mut all: Vec<Arrow> = all.collect();
        assert_eq!(unused(&all).count(), 0);
        let first = all.remove(0);
        assert_eq!(unused(&all).count(), 1);
        all.push(Arrow { dev: true, ..first });
        assert_eq!(unused(&all).count(), 1, "tests do not count");
    }

    #[test]
    fn tests_may_bring_rooms_together() {
        assert!(arrow("image", "testkit", true).is_none());
        assert!(arrow("driver", "export-vhost-user", true).is_none());
        assert!(arrow("driver", "cli", true).is_some());
        assert!(arrow("fuzz", "testkit", false).is_none());
        assert!(arrow("image", "fuzz", true).is_some());
        assert!(arrow("virtio", "memory", false).is_none());
    }

    #[test]
    fn a_page_that_shows_other_arrows_is_found() {
        let wrong = |row: &str| unlike_the_page(row).len();
        assert_eq!(wrong("| `ata` | a disk at ports | `pio`, `block` |\n| `pio` | a bus | |"), 0);
        assert_eq!(wrong("| `pio`, `ata` | a bus, and a disk on it | `block` |"), 1, "who rests on whom is not said");
        assert_eq!(
            wrong("| `image` | chains | `format-*`, `nbd-wire`, `block` |\n| `cli` (the program) | commands | all |"),
            0
        );
        assert_eq!(wrong("| `load` | the load generator | `driver`, `image`, `block` |"), 1, "one too many");
        assert_eq!(
            wrong("| `daemon` | disks | the exports, `block` |\n| `virtio` | rings | |"),
            1,
            "not by their names"
        );
    }

    /// The table itself only points down, so that no two rooms can depend on each other.
    #[test]
    fn the_table_points_down() {
        for (place, room) in ROOMS.iter().enumerate() {
            for below in room.below {
                let target = ROOMS.iter().position(|other| other.name == *below).unwrap();
                assert!(target > place, "{} above {below}", room.name);
            }
        }
    }
}
