//! NBD servers at addresses, each with exports of one or more disks.
//!
//! A server begins with its first export and ends with its last. Exports at one address differ by their names.

use super::addresses::Addresses;
use crate::state::nbd_options::{NbdAddress, NbdOptions, NbdTls, SocketAccess};
use crate::state::status::NbdStatus;
use block::{Error, ErrorKind, ReactorHandle, Result};
use export_nbd::{Credentials, NbdExport, NbdServer, PayloadMemory, ServerOptions, Tls};
use export_vhost_user::ListenSocket;
use std::sync::Arc;

/// The servers of a daemon. Two exports at one address find each other.
pub(crate) struct Servers {
    at: Addresses<Serving>,
    /// For the payload of all their clients.
    payload: PayloadMemory,
}

struct Serving {
    server: NbdServer,
    connections: usize,
    tls: Option<NbdTls>,
    access: SocketAccess,
    /// Removes its file when the server has ended.
    _socket: Option<ListenSocket>,
}

impl Serving {
    fn begin(
        options: &NbdOptions,
        export: NbdExport,
        reactors: Vec<Arc<dyn ReactorHandle>>,
        payload: PayloadMemory,
    ) -> Result<Self> {
        let tls = options
            .tls
            .as_ref()
            .map(|tls| Tls::new(&Credentials::in_directory(&tls.credentials), tls.is_required, tls.verifies_peers));
        let tls = tls.transpose()?;
        let (listener, socket) = options.address.listen(options.access)?;
        let server = NbdServer::start(
            listener,
            vec![export],
            reactors,
            ServerOptions::default().with(|server| {
                server.limits.connections = options.connections();
                server.tls = tls;
                server.payload = Some(payload);
            }),
        )?;
        let (connections, access) = (options.connections(), options.access);
        Ok(Self { server, connections, tls: options.tls.clone(), access, _socket: socket })
    }

    fn join(&self, options: &NbdOptions, export: NbdExport) -> Result<()> {
        let is_same = self.tls == options.tls && self.access == options.access;
        if !is_same || self.connections != options.connections() {
            let what = format!(
                "an NBD server is at '{}' already, with other connections, permissions or TLS: name the same, or another \
                 address",
                options.address
            );
            return Err(Error::new(ErrorKind::Locked, what));
        }
        self.server.add(export)
    }
}

impl Servers {
    pub(crate) fn new(payload_bytes: usize) -> Self {
        Self { at: Addresses::default(), payload: PayloadMemory::new(payload_bytes) }
    }

    pub(crate) fn add(
        &self,
        options: &NbdOptions,
        export: &NbdExport,
        reactors: Vec<Arc<dyn ReactorHandle>>,
    ) -> Result<()> {
        let join = |serving: &Serving| serving.join(options, export.clone());
        let begin = || Serving::begin(options, export.clone(), reactors, self.payload.clone());
        self.at.join_or_begin(&options.address, join, begin)
    }

    /// Ends an export, and its server if it was the last there.
    fn remove(&self, address: &NbdAddress, name: &str) {
        // Dropping the last handle ends the server.
        let Some(serving) = self.at.find(address) else { return };
        serving.server.remove(name);
        self.at.remove_if(address, &serving, |serving| !serving.server.is_serving());
    }
}

/// One disk at a server.
pub(crate) struct NbdFront {
    pub(crate) servers: Arc<Servers>,
    pub(crate) address: NbdAddress,
    pub(crate) has_tls: bool,
    pub(crate) export: NbdExport,
}

impl NbdFront {
    pub(crate) fn stop(self) {
        self.servers.remove(&self.address, &self.export.name);
    }

    pub(crate) fn status(&self) -> NbdStatus {
        NbdStatus {
            address: self.address.clone(),
            uri: self.address.uri(&self.export.name, self.has_tls),
            name: self.export.name.clone(),
            description: self.export.description.clone(),
            bitmaps: self.export.bitmaps.iter().map(|bitmap| bitmap.name.clone()).collect(),
            has_tls: self.has_tls,
            connections: self.export.connections(),
        }
    }
}
