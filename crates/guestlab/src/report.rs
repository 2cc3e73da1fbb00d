//! A guest's report: the marked lines of its console.

use crate::script::MARK;
use anyhow::{Context, Result, bail};
use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

/// The report of a guest.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct GuestReport {
    /// The guest kernel's release.
    pub kernel: String,
    /// The number of the guest's CPUs.
    pub cpus: u32,
    /// The guest's disks, in order.
    pub disks: Vec<DiskReport>,
    /// The time from the start to the power-off, on the host's clock.
    pub time: Duration,
    /// Whether the host's KVM failed under the guest, which then ran without KVM.
    pub kvm_failed: bool,
}

/// A disk as the guest saw it.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct DiskReport {
    /// `vda` and so on.
    pub name: String,
    /// The disk's size in bytes.
    pub size_bytes: u64,
    /// The number of hardware queues that the guest uses.
    pub queues: u32,
    /// The size of the disk's logical block.
    pub block_bytes: u32,
    /// The largest discard; zero for none.
    pub discard_max_bytes: u64,
    /// The largest write-zeroes; zero for none.
    pub write_zeroes_max_bytes: u64,
    /// Whether the guest believes that the disk has a volatile cache.
    pub volatile_cache: bool,
    /// Whether its rings are packed.
    pub packed: bool,
    /// The result of `GET_ID`.
    pub serial: String,
    /// The number of times that all files were read back and found whole.
    pub checks: u32,
    /// The number of those files.
    pub files: u64,
    /// The size of those files, in bytes.
    pub files_bytes: u64,
    /// The run of fio that wrote and verified.
    pub fio: Option<FioReport>,
    /// The bytes that the file system discarded.
    pub trimmed_bytes: u64,
    /// The measurements.
    pub measured: Vec<FioReport>,
    /// The kernel's view of the disk, by name ([`crate::GuestWork::Inspect`]).
    pub facts: BTreeMap<String, String>,
}

/// A run of fio.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct FioReport {
    /// The job's name; for a measurement `randread`, `randwrite`, `read` or `write`.
    pub name: String,
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes written.
    pub written_bytes: u64,
    /// Requests a second, reads and writes together.
    pub iops: f64,
    /// Bytes a second, reads and writes together.
    pub bytes_per_second: f64,
    /// Mean time to submit a request, if all were reads or all were writes.
    pub submission_us: f64,
    /// Mean time from there to its end.
    pub completion_us: f64,
    /// Interrupts of the disk during the run, counted by the guest's kernel (`/proc/interrupts`). Only for
    /// measurements.
    pub interrupts: u64,
}

/// Parses a guest's console line by line.
#[derive(Debug, Default)]
pub(crate) struct Reader {
    report: GuestReport,
    failed: Option<String>,
    ended: bool,
}

impl Reader {
    /// Parses a line. Returns progress to show.
    pub(crate) fn line(&mut self, line: &str) -> Result<Option<String>> {
        // Kernel messages may come first on the line.
        let Some((_, marked)) = line.trim_end().split_once(MARK) else { return Ok(None) };
        let (kind, rest) = marked.split_once(' ').unwrap_or((marked, ""));
        match kind {
            "step" => return Ok(Some(rest.to_owned())),
            "failed" => self.failed = Some(rest.to_owned()),
            "end" => self.ended = true,
            _ => self.fact(kind, rest).with_context(|| format!("the guest's line \"{marked}\" makes no sense"))?,
        }
        Ok(None)
    }

    /// Whether the guest has reported its end or a failure.
    pub(crate) fn is_complete(&self) -> bool {
        self.ended || self.failed.is_some()
    }

    /// Returns the report, if the guest did not fail.
    pub(crate) fn finish(self, time: Duration) -> Result<GuestReport> {
        match self {
            Self { failed: Some(reason), .. } => bail!("the guest failed: {reason}"),
            Self { ended: false, .. } => bail!("the guest stopped before its work was done"),
            Self { report, .. } => Ok(GuestReport { time, ..report }),
        }
    }

    fn fact(&mut self, kind: &str, rest: &str) -> Result<()> {
        let values: HashMap<&str, &str> = rest.split(' ').filter_map(|word| word.split_once('=')).collect();
        let text = |key: &str| values.get(key).copied().unwrap_or_default();
        if kind == "kernel" {
            self.report.kernel = text("release").to_owned();
            self.report.cpus = number(text("cpus"))?;
            return Ok(());
        }
        if kind == "disk" {
            let disk = DiskReport {
                name: text("name").to_owned(),
                size_bytes: number::<u64>(text("sectors"))? * 512,
                queues: number(text("queues"))?,
                block_bytes: number(text("block"))?,
                discard_max_bytes: number(text("discard"))?,
                write_zeroes_max_bytes: number(text("zeroes"))?,
                volatile_cache: text("cache") == "write-back",
                packed: text("packed") == "1",
                serial: text("serial").to_owned(),
                ..DiskReport::default()
            };
            // Every boot reports the disks again.
            match self.report.disks.iter_mut().find(|known| known.name == disk.name) {
                Some(known) => {
                    let facts = std::mem::take(&mut known.facts);
                    *known = DiskReport { facts, ..disk };
                }
                None => self.report.disks.push(disk),
            }
            return Ok(());
        }
        let disk = self.report.disks.iter_mut().find(|disk| disk.name == text("name")).context("an unknown disk")?;
        match kind {
            "checked" => {
                disk.checks += 1;
                disk.files = number(text("files"))?;
                disk.files_bytes = number::<u64>(text("kib"))? * 1024;
            }
            "fio" => disk.fio = Some(FioReport::parse(text("terse"))?),
            "measured" => {
                let interrupts = number(text("interrupts"))?;
                disk.measured.push(FioReport { interrupts, ..FioReport::parse(text("terse"))? });
            }
            "fact" => {
                let facts = values.iter().filter(|(key, _)| **key != "name");
                disk.facts.extend(facts.map(|(key, value)| ((*key).to_owned(), (*value).to_owned())));
            }
            "trimmed" => disk.trimmed_bytes = number(text("bytes"))?,
            _ => bail!("an unknown kind of line"),
        }
        Ok(())
    }
}

impl FioReport {
    /// Parses fio's terse output, version 3: its fields 3, 6 to 8, 12, 16, 47 to 49, 53 and 57, counted from one.
    fn parse(terse: &str) -> Result<Self> {
        let fields: Vec<&str> = terse.split(';').collect();
        let field = |index: usize| number::<u64>(fields.get(index).copied().unwrap_or_default());
        let mean = |index: usize| number::<f64>(fields.get(index).copied().unwrap_or_default());
        anyhow::ensure!(fields.first() == Some(&"3"), "not version 3 of fio's terse output");
        Ok(Self {
            name: fields.get(2).copied().unwrap_or_default().to_owned(),
            read_bytes: field(5)? * 1024,
            written_bytes: field(46)? * 1024,
            iops: (field(7)? + field(48)?) as f64,
            bytes_per_second: (field(6)? + field(47)?) as f64 * 1024.0,
            submission_us: mean(11)? + mean(52)?,
            completion_us: mean(15)? + mean(56)?,
            interrupts: 0,
        })
    }
}

fn number<T: std::str::FromStr>(text: &str) -> Result<T>
where
    T::Err: std::error::Error + Send + Sync + 'static,
{
    text.parse().with_context(|| format!("\"{text}\" is no number"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guests_console_becomes_a_report() {
        let mut terse = vec!["0"; 130];
        for (index, value) in [
            (0, "3"),
            (2, "direct"),
            (5, "64"),
            (6, "10"),
            (7, "2"),
            (46, "128"),
            (47, "20"),
            (48, "4"),
            (52, "1.5"),
            (56, "70.25"),
        ] {
            terse[index] = value;
        }
        let fio = format!("@ringdisk fio name=vda terse={}\r", terse.join(";"));
        let measured = fio.replace(" fio name=vda", " measured name=vda interrupts=7");
        let lines = [
            "Linux version 6.1\r",
            "@ringdisk kernel release=6.1.0 cpus=4\r",
            "@ringdisk disk name=vda sectors=2048 queues=4 block=512 discard=1024 zeroes=0 cache=write-back serial=me\r",
            "[ 1.0] something @ringdisk checked name=vda files=200 kib=3\r",
            &fio,
            &measured,
            "@ringdisk trimmed name=vda bytes=4096\r",
            "@ringdisk fact name=vda sg_io=errno-25\r",
            "@ringdisk end\r",
        ];
        let mut reader = Reader::default();
        for line in lines {
            assert_eq!(reader.line(line).unwrap(), None);
        }
        assert_eq!(reader.line("@ringdisk step one two").unwrap(), Some("one two".to_owned()));
        let report = reader.finish(Duration::from_secs(1)).unwrap();
        let disk = &report.disks[0];
        assert_eq!((report.kernel.as_str(), report.cpus), ("6.1.0", 4));
        assert_eq!((disk.size_bytes, disk.queues, disk.serial.as_str(), disk.volatile_cache), (1 << 20, 4, "me", true));
        assert_eq!((disk.checks, disk.files, disk.files_bytes, disk.trimmed_bytes), (1, 200, 3072, 4096));
        assert_eq!(disk.facts.get("sg_io").map(String::as_str), Some("errno-25"));
        assert_eq!((disk.measured.len(), disk.measured[0].interrupts), (1, 7));
        let fio = disk.fio.as_ref().unwrap();
        assert_eq!((fio.read_bytes, fio.written_bytes, fio.iops), (65536, 131_072, 6.0));
        assert!((fio.submission_us - 1.5).abs() < 1e-9 && (fio.completion_us - 70.25).abs() < 1e-9);
    }

    #[test]
    fn a_guest_that_failed_or_fell_silent_gives_no_report() {
        let mut reader = Reader::default();
        reader.line("@ringdisk failed vda: wrong data").unwrap();
        assert!(reader.finish(Duration::ZERO).unwrap_err().to_string().contains("vda: wrong data"));
        assert!(Reader::default().finish(Duration::ZERO).is_err());
        assert!(Reader::default().line("@ringdisk disk name=vda sectors=x").is_err());
    }
}
