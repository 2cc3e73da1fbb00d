//! `ctl export`: adds an export of a disk.

use super::{Ctl, tables};
use crate::nbd_options::{TlsArgs, absolute_or_passed, place, socket_mode};
use control::Options;
use control::api::{AddExport, AddNbd, Export};
use std::path::PathBuf;

#[derive(clap::Args)]
pub(super) struct ExportArgs {
    /// The disk.
    name: String,
    /// The vhost-user socket [default: beside the image]. fd:NAME is one that a service manager passed to the daemon.
    #[arg(long, value_name = "PATH", conflicts_with = "nbd")]
    socket: Option<PathBuf>,
    /// The socket's permissions, in octal [default: 0600, or 0660 with --socket-group].
    #[arg(long, value_name = "MODE", value_parser = socket_mode)]
    socket_mode: Option<String>,
    /// The socket's group: a name or a number.
    #[arg(long, value_name = "GROUP")]
    socket_group: Option<String>,
    /// Guests or clients at this socket cannot write.
    #[arg(long)]
    read_only: bool,
    /// Queues on offer [default: one for each CPU, at most 16].
    #[arg(long, value_name = "N", conflicts_with = "nbd")]
    queues: Option<u16>,
    /// What the guest at this socket sees, where it differs from what the disk's options say: write-cache=off,
    /// logical-block-size=4096 and the like (see docs/drive-options.md). May be repeated.
    #[arg(long = "shown", value_name = "KEY=VALUE", conflicts_with = "nbd")]
    shown: Vec<String>,
    /// Serve NBD clients at this Unix socket, TCP address, or passed socket (fd:NAME). Several disks can share one, under
    /// different names. Without TLS, everybody who can reach it can use the disk.
    #[arg(long, value_name = "SOCKET|ADDRESS:PORT")]
    nbd: Option<String>,
    /// The export name for NBD clients [default: the disk's name].
    #[arg(long, value_name = "NAME", requires = "nbd")]
    export_name: Option<String>,
    /// The description for NBD clients.
    #[arg(long, value_name = "TEXT", default_value = "", requires = "nbd")]
    description: String,
    /// A bitmap of the disk that NBD clients can ask for, as qemu:dirty-bitmap:NAME. May be repeated.
    #[arg(long, value_name = "NAME", requires = "nbd")]
    bitmap: Vec<String>,
    /// NBD connections at once at this address; others wait [default: 16].
    #[arg(long, value_name = "N", requires = "nbd", value_parser = clap::value_parser!(u16).range(1..))]
    shared: Option<u16>,
    #[command(flatten)]
    tls: TlsArgs,
}

impl ExportArgs {
    fn shown(&self) -> anyhow::Result<Options> {
        let mut shown = Options::default();
        for pair in self.shown.iter().flat_map(|text| text.split(',')) {
            let (key, value) = pair.split_once('=').ok_or_else(|| crate::output::usage("--shown takes KEY=VALUE"))?;
            shown.set(key, value);
        }
        Ok(shown)
    }

    fn request(&self) -> anyhow::Result<AddExport> {
        let mut request = AddExport {
            disk: self.name.clone(),
            // The daemon has another working directory.
            socket: self.socket.as_deref().map(absolute_or_passed),
            socket_mode: self.socket_mode.clone(),
            socket_group: self.socket_group.clone(),
            read_only: self.read_only,
            queues: self.queues,
            shown: self.shown()?,
            ..AddExport::default()
        };
        match &self.nbd {
            Some(address) => {
                let (socket, listen) = place(address)?;
                request.socket = socket;
                request.nbd = Some(AddNbd {
                    listen,
                    name: self.export_name.clone(),
                    description: self.description.clone(),
                    bitmaps: self.bitmap.clone(),
                    connections: self.shared,
                    tls: self.tls.asked(),
                });
            }
            None if self.tls.tls_creds.is_some() => return Err(crate::output::usage("--tls-creds needs --nbd")),
            None => {}
        }
        Ok(request)
    }
}

impl Ctl {
    pub(super) fn export(&self, args: &ExportArgs) -> anyhow::Result<()> {
        let export: Export = self.client.post("/v1/exports", &args.request()?)?;
        self.show(&export, |export| tables::exports(std::slice::from_ref(export)))
    }
}
