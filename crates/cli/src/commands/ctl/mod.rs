//! `ringdisk ctl`: manage the disks of a running daemon.

mod cells;
mod duration;
mod export;
mod jobs;
mod latency;
mod points;
mod tables;
mod top;

use crate::output::{self, usage};
use clap::Subcommand;
use control::api::{
    AddDisk, ChangeDisk, Disk, Disks, ErrorBody, Event, Exports, Jobs, Overlay, Reloaded, Reopen, Resize, Snapshot,
    Stats,
};
use control::{CallError, Client, Options, path_segment};
use image::FileName;
use serde::Serialize;
use std::io::Write as _;
use std::path::{Path, PathBuf};

/// Manage the disks of a running daemon (serve --control SOCKET).
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The daemon's control socket.
    #[arg(long, value_name = "SOCKET", env = "RINGDISK_CONTROL")]
    control: PathBuf,
    /// How to print: for people, or as JSON for scripts.
    #[arg(long, global = true, value_enum, value_name = "FORM", default_value_t = Output::Human)]
    output: Output,
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Output {
    Human,
    Json,
}

#[derive(Subcommand)]
enum Verb {
    /// List the disks.
    List,
    /// Show one disk, with its layers and exports.
    Show {
        /// The disk.
        name: String,
    },
    /// Add a disk and serve it.
    Add {
        /// Options of a drive, as in serve --drive: file=PATH,cache=none,...
        options: String,
        /// Open the disk only; serve it with "ctl export".
        #[arg(long)]
        no_export: bool,
    },
    /// Remove a disk and its exports: flush and close it. A disk in use is refused.
    Remove {
        /// The disk.
        name: String,
        /// Also if guests or clients are connected, or it has jobs: disconnect them and cancel the jobs first.
        #[arg(long)]
        force: bool,
    },
    /// Make a disk larger while it runs.
    Resize {
        /// The disk.
        name: String,
        /// The new size: 20G, or +5G to add to the current size.
        #[arg(allow_hyphen_values = true)]
        size: String,
    },
    /// Reopen the files of a disk while it runs: one was replaced, or changed behind the disk.
    Reopen {
        /// The disk.
        name: String,
        /// Give up what cannot be written to the old files.
        #[arg(long)]
        force: bool,
    },
    /// Change options of a disk while it runs.
    Set {
        /// The disk.
        name: String,
        /// Options and their new values.
        #[arg(required = true, value_name = "KEY=VALUE")]
        options: Vec<String>,
    },
    /// Put a new, empty qcow2 layer on top of a running disk; the layers below no longer change.
    Snapshot {
        /// The disk, and the file to create: a path, rbd:POOL/IMAGE, or an empty disk at nbd://HOST/EXPORT. More pairs are
        /// snapshots of more disks at the same moment.
        #[arg(required = true, num_args = 2.., value_names = ["NAME", "OVERLAY-FILE"])]
        pairs: Vec<String>,
    },
    /// Commit a layer of a running disk into the layer below it: the top, or with --top another one.
    Commit(jobs::Commit),
    /// Copy a running disk to another image, which then takes its place.
    Mirror(jobs::Mirror),
    /// Copy the data of lower layers into the top layer of a running disk, which then needs none of them.
    Stream {
        /// The disk.
        name: String,
        /// The layer that stays below the top [default: none].
        #[arg(long, value_name = "FILE")]
        base: Option<PathBuf>,
        #[command(flatten)]
        how: jobs::How,
    },
    /// Give the top layer of a running disk another backing file; the guest sees the same contents.
    Rebase {
        /// The disk.
        name: String,
        /// The new backing file.
        base: PathBuf,
        /// Its format [default: guessed].
        #[arg(long)]
        format: Option<String>,
        #[command(flatten)]
        how: jobs::How,
    },
    /// Make the file of a running disk shorter: data at its end move into the holes that discards have left.
    Compact {
        /// The disk.
        name: String,
        #[command(flatten)]
        how: jobs::How,
    },
    /// Copy a running disk, as it is at one moment, to another image.
    Backup(points::BackupArgs),
    /// Add, change and list dirty bitmaps of a running disk: persistent in a qcow2 image, in memory for a raw one.
    #[command(subcommand)]
    Bitmap(points::BitmapVerb),
    /// List the internal snapshots of a running disk.
    SnapshotList {
        /// The disk.
        name: String,
    },
    /// Take an internal snapshot of a running disk.
    SnapshotCreate(points::SnapshotArgs),
    /// Delete an internal snapshot of a running disk.
    SnapshotDelete(points::SnapshotArgs),
    /// Return a disk that no guest uses to its contents when an internal snapshot was taken.
    SnapshotApply(points::SnapshotArgs),
    /// List the exports.
    Exports,
    /// Add an export of a disk, for a guest's monitor or for NBD clients.
    Export(export::ExportArgs),
    /// Remove an export.
    Unexport {
        /// The export's number, as "ctl exports" lists it.
        #[arg(value_parser = export_number)]
        id: u64,
    },
    /// List the jobs.
    Jobs,
    /// Pause a job.
    Pause {
        /// The job's number, as "ctl jobs" lists it.
        #[arg(value_parser = job_number)]
        job: u64,
    },
    /// Continue a paused job, or retry a disk's requests that wait because the storage failed them (on-error=hold).
    Resume {
        /// The job's number, as "ctl jobs" lists it, or the disk's name. A number always means a job.
        #[arg(value_name = "JOB|NAME")]
        target: String,
    },
    /// Limit how fast a job works while guests go on.
    Limit {
        /// The job's number, as "ctl jobs" lists it.
        #[arg(value_parser = job_number)]
        job: u64,
        /// Bytes a second, such as 50M; 0 lifts the limit.
        rate: String,
    },
    /// Ask a job to stop.
    Cancel {
        /// The job's number, as "ctl jobs" lists it.
        #[arg(value_parser = job_number)]
        job: u64,
    },
    /// Show figures of disks and reactors, and how long requests take.
    Stats,
    /// Show the disks' rates and how long requests take, refreshed regularly.
    Top {
        /// Seconds between two updates.
        #[arg(long, value_name = "SECONDS", default_value_t = 1.0)]
        interval: f64,
        /// End after this many updates.
        #[arg(long, value_name = "N")]
        count: Option<u64>,
    },
    /// Print events, one a line.
    Watch {
        /// End after this many events.
        #[arg(long, value_name = "N")]
        count: Option<u64>,
    },
    /// Print figures for Prometheus.
    Metrics,
    /// Read the configuration file again (serve --config) and apply the differences.
    Reload,
    /// End the daemon cleanly.
    Shutdown,
}

fn export_number(text: &str) -> Result<u64, String> {
    text.parse().map_err(|_| "takes the number of an export, as 'ringdisk ctl exports' lists it".to_owned())
}

fn job_number(text: &str) -> Result<u64, String> {
    text.parse().map_err(|_| "takes the number of a job, as 'ringdisk ctl jobs' lists it".to_owned())
}

/// Carries the command out. With `--output=json`, a refusal is printed as the daemon gave it, for scripts.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let done = call(args);
    let refusal = done.as_ref().err().and_then(|error| error.downcast_ref::<CallError>());
    if let (Output::Json, Some(CallError::Refused(detail))) = (args.output, refusal) {
        let body = serde_json::to_string(&ErrorBody { error: detail.clone() })?;
        // If standard error is gone, the message is lost.
        let _ = writeln!(std::io::stderr(), "{body}");
        output::exit(1);
    }
    done
}

fn call(args: &Args) -> anyhow::Result<()> {
    let ctl = Ctl { client: Client::new(&args.control)?, output: args.output };
    match &args.verb {
        Verb::List => ctl.show(&ctl.client.get::<Disks>("/v1/disks")?, tables::disks),
        Verb::Show { name } => ctl.show(&ctl.disk(name)?, tables::disk),
        Verb::Add { options, no_export } => ctl.add(options, !no_export),
        Verb::Remove { name, force } => ctl.delete(&format!("/v1/disks/{}?force={force}", path_segment(name))),
        Verb::Resize { name, size } => ctl.resize(name, size),
        Verb::Reopen { name, force } => {
            let path = format!("/v1/disks/{}/reopen", path_segment(name));
            let disk: Disk = ctl.client.post(&path, &Reopen { force: *force })?;
            ctl.show(&disk, tables::disk)
        }
        Verb::Set { name, options } => ctl.set(name, options),
        Verb::Snapshot { pairs } => ctl.snapshot(pairs),
        Verb::Commit(commit) => ctl.commit(commit),
        Verb::Mirror(mirror) => ctl.mirror(mirror),
        Verb::Stream { name, base, how } => ctl.stream(name, base.as_deref(), how),
        Verb::Rebase { name, base, format, how } => ctl.rebase(name, base, format.clone(), how),
        Verb::Compact { name, how } => ctl.compact(name, how),
        Verb::Backup(args) => ctl.backup(args),
        Verb::Bitmap(verb) => ctl.bitmap(verb),
        Verb::SnapshotList { name } => ctl.list_snapshots(name),
        Verb::SnapshotCreate(args) => ctl.create_snapshot(args),
        Verb::SnapshotDelete(args) => ctl.delete_snapshot(args),
        Verb::SnapshotApply(args) => ctl.apply_snapshot(args),
        Verb::Exports => ctl.show(&ctl.client.get::<Exports>("/v1/exports")?, tables::all_exports),
        Verb::Export(export) => ctl.export(export),
        Verb::Unexport { id } => ctl.delete(&format!("/v1/exports/{id}")),
        Verb::Jobs => ctl.show(&ctl.client.get::<Jobs>("/v1/jobs")?, |jobs| tables::jobs(&jobs.jobs)),
        Verb::Pause { job } => ctl.steer(*job, "pause"),
        Verb::Resume { target } => match target.parse() {
            Ok(job) => ctl.steer(job, "resume"),
            Err(_) => ctl.resume_disk(target),
        },
        Verb::Limit { job, rate } => ctl.limit(*job, rate),
        Verb::Cancel { job } => ctl.steer(*job, "cancel"),
        Verb::Stats => ctl.show(&ctl.client.get::<Stats>("/v1/stats")?, tables::stats),
        Verb::Top { interval, count } => top::run(&ctl.client, args.output, *interval, *count),
        Verb::Watch { count } => ctl.watch(*count),
        Verb::Metrics => output::print(&ctl.client.get_text("/metrics")?),
        Verb::Reload => ctl.reload(),
        Verb::Shutdown => {
            ctl.client.post_nothing::<()>("/v1/shutdown")?;
            ctl.is_done()
        }
    }
}

struct Ctl {
    client: Client,
    output: Output,
}

impl Ctl {
    fn show<T: Serialize>(&self, answer: &T, table: impl FnOnce(&T) -> String) -> anyhow::Result<()> {
        match self.output {
            Output::Human => output::print(&table(answer)),
            Output::Json => output::print(&format!("{}\n", serde_json::to_string_pretty(answer)?)),
        }
    }

    fn delete(&self, path: &str) -> anyhow::Result<()> {
        self.client.delete(path)?;
        self.is_done()
    }

    /// Answers a call that has nothing to say: a script can still read JSON.
    fn is_done(&self) -> anyhow::Result<()> {
        match self.output {
            Output::Human => Ok(()),
            Output::Json => output::print("{}\n"),
        }
    }

    fn disk(&self, name: &str) -> anyhow::Result<Disk> {
        Ok(self.client.get(&format!("/v1/disks/{}", path_segment(name)))?)
    }

    fn add(&self, options: &str, export: bool) -> anyhow::Result<()> {
        let mut options = Options::parse(options)?;
        // The daemon has another working directory.
        options.make_paths_whole(drive::absolute)?;
        let disk: Disk = self.client.post(
            "/v1/disks",
            &AddDisk { options, export, overlay: None, former_tops: Vec::new(), bases: Vec::new() },
        )?;
        self.show(&disk, tables::disk)
    }

    fn resize(&self, name: &str, size: &str) -> anyhow::Result<()> {
        if size.starts_with('-') {
            return Err(usage(format!(
                "{size}: a disk in use cannot be made smaller: remove it, then 'ringdisk resize --shrink'"
            )));
        }
        let given = drive::parse_size(size)?;
        let size_bytes = match size.starts_with('+') {
            true => {
                let sum = self.disk(name)?.size_bytes.checked_add(given);
                sum.ok_or_else(|| usage(format!("{size}: no disk is that large")))?
            }
            false => given,
        };
        let disk: Disk =
            self.client.post(&format!("/v1/disks/{}/resize", path_segment(name)), &Resize { size_bytes })?;
        self.show(&disk, tables::disk)
    }

    fn set(&self, name: &str, pairs: &[String]) -> anyhow::Result<()> {
        let mut options = Options::default();
        for pair in pairs {
            let Some((key, value)) = pair.split_once('=') else {
                return Err(usage(format!("'{pair}' is not of the form KEY=VALUE")));
            };
            options.set(key, value);
        }
        let disk: Disk = self.client.patch(&format!("/v1/disks/{}", path_segment(name)), &ChangeDisk { options })?;
        self.show(&disk, tables::disk)
    }

    fn snapshot(&self, pairs: &[String]) -> anyhow::Result<()> {
        let to_overlay = |pair: &[String]| match pair {
            [disk, overlay] => Ok(Overlay { disk: disk.clone(), overlay: whole_target(Path::new(overlay)) }),
            _ => Err(usage("each disk needs the file of its overlay: NAME OVERLAY-FILE")),
        };
        let overlays = pairs.chunks(2).map(to_overlay).collect::<anyhow::Result<_>>()?;
        let disks: Disks = self.client.post("/v1/snapshots", &Snapshot { overlays })?;
        self.show(&disks, tables::disks)
    }

    fn resume_disk(&self, name: &str) -> anyhow::Result<()> {
        let disk: Disk = self.client.post_nothing(&format!("/v1/disks/{}/resume", path_segment(name)))?;
        self.show(&disk, tables::disk)
    }

    fn reload(&self) -> anyhow::Result<()> {
        let reloaded: Reloaded = self.client.post_nothing("/v1/reload")?;
        self.show(&reloaded, tables::reloaded)?;
        match reloaded.failed.len() {
            0 => Ok(()),
            1 => Err(anyhow::anyhow!("one disk is not as the configuration says")),
            count => Err(anyhow::anyhow!("{count} disks are not as the configuration says")),
        }
    }

    fn watch(&self, count: Option<u64>) -> anyhow::Result<()> {
        let (mut seen, mut failed) = (0, None);
        self.client.watch(|event: Event| {
            let line = match self.output {
                Output::Human => tables::event(&event),
                Output::Json => serde_json::to_string(&event).unwrap_or_default(),
            };
            if let Err(error) = output::print(&format!("{line}\n")) {
                failed = Some(error);
                return false;
            }
            seen += 1;
            count.is_none_or(|count| seen < count)
        })?;
        failed.map_or(Ok(()), Err)
    }
}

/// Returns a target as the daemon, which has another working directory, finds it.
fn whole_target(target: &Path) -> PathBuf {
    match FileName::parse(target) {
        Ok(FileName::File(path)) => drive::absolute(&path),
        // The daemon says what is wrong with it.
        _ => target.to_owned(),
    }
}
