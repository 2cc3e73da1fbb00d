//! Under which names clients see the disks, and what else they can ask for (`--export`).

use super::Asked;
use crate::output::usage;
use anyhow::{Context, bail};
use drive::{parse_key_values_with, parse_switch, unknown};

/// How clients see a disk.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Export {
    pub(super) name: String,
    pub(super) description: String,
    pub(super) bitmaps: Vec<String>,
    pub(super) read_only: bool,
}

/// As an `[[export]]` of a configuration file has them, with `bitmap` for each bitmap.
const KEYS: [&str; 5] = ["disk", "name", "description", "bitmap", "readonly"];

/// The exports of each disk: those that `--export` gives it, or else one under its name.
pub(super) fn of(texts: &[String], disks: &[Asked]) -> anyhow::Result<Vec<Vec<Export>>> {
    let mut exports: Vec<Vec<Export>> = disks.iter().map(|_| Vec::new()).collect();
    for text in texts {
        let context = || format!("--export {}", image::shown(text));
        let (disk, export) = parsed(text, disks).with_context(context)?;
        if let Some(of_disk) = exports.get_mut(disk) {
            of_disk.push(export);
        }
    }
    for (of_disk, asked) in exports.iter_mut().zip(disks) {
        if of_disk.is_empty() {
            of_disk.push(usual(asked));
        } else if !asked.description.is_empty() || !asked.bitmaps.is_empty() {
            return Err(usage(
                "--description and --bitmap are for the export that IMAGE has without --export: write description= and \
                 bitmap= there",
            ));
        }
    }
    let mut names: Vec<&str> = exports.iter().flatten().map(|export| export.name.as_str()).collect();
    names.sort_unstable();
    let twice = names.windows(2).find(|pair| pair.first() == pair.last());
    if let Some(twice) = twice.and_then(|pair| pair.first()) {
        return Err(usage(match *twice {
            "" => "several disks have no name for clients: give them name=".to_owned(),
            twice => format!("two exports are called '{twice}': give one of them another name="),
        }));
    }
    Ok(exports)
}

/// The export of a disk that no `--export` names.
fn usual(asked: &Asked) -> Export {
    Export {
        name: asked.export_name.clone(),
        description: asked.description.clone(),
        bitmaps: asked.bitmaps.clone(),
        read_only: asked.drive.export.read_only,
    }
}

/// One `--export`, and the index of its disk.
fn parsed(text: &str, disks: &[Asked]) -> anyhow::Result<(usize, Export)> {
    let (mut disk, mut name, mut export) = (None, None, Export::default());
    for pair in parse_key_values_with(text, &["bitmap"])? {
        let value = pair.value;
        match pair.key.as_str() {
            "disk" => disk = Some(value),
            "name" => name = Some(value),
            "description" => export.description = value,
            "bitmap" => export.bitmaps.push(value),
            "readonly" => export.read_only = parse_switch("readonly", &value)?,
            key => return Err(unknown("key of an export", key, &KEYS).into()),
        }
    }
    let names: Vec<String> = disks.iter().enumerate().map(|(index, asked)| disk_name(index, asked)).collect();
    let index = match disk {
        Some(disk) => names.iter().position(|name| *name == disk),
        None if disks.len() == 1 => Some(0),
        None => bail!("say which disk it is of: disk=NAME ({})", names.join(", ")),
    };
    let Some((index, asked)) = index.and_then(|index| Some((index, disks.get(index)?))) else {
        bail!("there is no disk of that name (there are {})", names.join(", "))
    };
    export.name = name.unwrap_or_else(|| asked.export_name.clone());
    export.read_only |= asked.drive.export.read_only;
    Ok((index, export))
}

/// The name that the daemon gives a disk.
fn disk_name(index: usize, asked: &Asked) -> String {
    asked.drive.disk.name.clone().unwrap_or_else(|| format!("disk{index}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use drive::DriveOptions;

    fn disk(name: &str, description: &str) -> Asked {
        let mut drive = DriveOptions::null(1 << 20);
        drive.disk.name = Some(name.to_owned()).filter(|name| !name.is_empty());
        Asked { drive, export_name: name.to_owned(), description: description.to_owned(), bitmaps: Vec::new() }
    }

    fn exports(texts: &[&str], disks: &[Asked]) -> Result<Vec<Vec<Export>>, String> {
        let texts: Vec<String> = texts.iter().map(|text| (*text).to_owned()).collect();
        of(&texts, disks).map_err(|error| format!("{error:#}"))
    }

    #[test]
    fn disks_have_the_exports_that_are_said_or_one_under_their_name() {
        let disks = [disk("root", ""), disk("data", "of IMAGE"), disk("", "")];
        let said = [
            "disk=root,description=a system,, old,bitmap=daily,bitmap=weekly",
            "disk=disk2,name=spare",
            "disk=root,name=look,readonly=on",
        ];
        let [root, data, spare] = exports(&said, &disks).unwrap().try_into().unwrap();
        let export = |name: &str| Export { name: name.to_owned(), ..Export::default() };
        let bitmaps = vec!["daily".to_owned(), "weekly".to_owned()];
        let first = Export { description: "a system, old".to_owned(), bitmaps, ..export("root") };
        assert_eq!(root, [first, Export { read_only: true, ..export("look") }]);
        assert_eq!(data, [Export { description: "of IMAGE".to_owned(), ..export("data") }]);
        assert_eq!(spare, [export("spare")]);
        // One disk needs no name.
        let alone = exports(&["name=x"], &[disk("", "")]).unwrap();
        assert_eq!(alone, [vec![export("x")]]);
    }

    #[test]
    fn what_makes_no_sense_is_refused_with_what_to_do() {
        let disks = [disk("root", ""), disk("data", "of IMAGE")];
        for (said, why) in [
            ("name=x", "disk=NAME (root, data)"),
            ("disk=rot", "there are root, data"),
            ("disk=root,titel=x", "unknown key of an export 'titel'"),
            ("disk=root,read-only=on", "did you mean 'readonly'?"),
            ("disk=root,readonly=maybe", "readonly"),
            ("disk=root,name=x,name=y", "given twice"),
            ("disk=root,name=data", "two exports are called 'data'"),
            ("disk=data", "--description and --bitmap"),
        ] {
            let refused = exports(&[said], &disks).unwrap_err();
            assert!(refused.contains(why), "{said}: {refused}");
        }
        assert!(exports(&[], &[disk("", ""), disk("", "")]).unwrap_err().contains("give them name="));
    }
}
