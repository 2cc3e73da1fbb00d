//! Who serves at which address, where beginning to serve may take long.

use crate::state::nbd_options::NbdAddress;
use block::Result;
use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// One server an address. The lock is never held while a server begins: a host's name is looked up, certificates are read.
pub(crate) struct Addresses<T> {
    all: Mutex<BTreeMap<NbdAddress, Phase<T>>>,
    /// One has begun, or could not.
    changed: Condvar,
}

enum Phase<T> {
    /// Somebody makes it. Others for this address wait.
    Coming,
    Here(Arc<T>),
}

impl<T> Default for Addresses<T> {
    fn default() -> Self {
        Self { all: Mutex::default(), changed: Condvar::new() }
    }
}

impl<T> Addresses<T> {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<NbdAddress, Phase<T>>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Joins the server at an address, or begins one. `join` is short: nobody else comes or goes meanwhile.
    pub(crate) fn join_or_begin(
        &self,
        address: &NbdAddress,
        join: impl FnOnce(&T) -> Result<()>,
        begin: impl FnOnce() -> Result<T>,
    ) -> Result<()> {
        let is_coming = |all: &mut BTreeMap<_, _>| matches!(all.get(address), Some(Phase::Coming));
        let mut all = self.changed.wait_while(self.lock(), is_coming).unwrap_or_else(PoisonError::into_inner);
        if let Some(Phase::Here(server)) = all.get(address) {
            return join(server);
        }
        all.insert(address.clone(), Phase::Coming);
        drop(all);
        let _coming = Coming { addresses: self, address };
        let server = begin()?;
        self.lock().insert(address.clone(), Phase::Here(Arc::new(server)));
        Ok(())
    }

    /// The server at an address, if one is there.
    pub(crate) fn find(&self, address: &NbdAddress) -> Option<Arc<T>> {
        match self.lock().get(address)? {
            Phase::Coming => None,
            Phase::Here(server) => Some(Arc::clone(server)),
        }
    }

    /// Takes a server away if it is still the one at this address, and `is_over`.
    pub(crate) fn remove_if(&self, address: &NbdAddress, server: &Arc<T>, is_over: impl FnOnce(&T) -> bool) {
        let mut all = self.lock();
        let is_it = matches!(all.get(address), Some(Phase::Here(other)) if Arc::ptr_eq(other, server));
        if is_it && is_over(server) {
            all.remove(address);
        }
    }
}

/// Lets those go on who wait for this address, whatever has become of it.
struct Coming<'a, T> {
    addresses: &'a Addresses<T>,
    address: &'a NbdAddress,
}

impl<T> Drop for Coming<'_, T> {
    fn drop(&mut self) {
        let mut all = self.addresses.lock();
        if matches!(all.get(self.address), Some(Phase::Coming)) {
            all.remove(self.address);
        }
        drop(all);
        self.addresses.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use block::{Error, ErrorKind};
    use std::sync::mpsc::channel;

    fn at(port: u16) -> NbdAddress {
        NbdAddress::Tcp(format!("127.0.0.1:{port}"))
    }

    #[test]
    fn a_server_that_begins_slowly_holds_up_nobody_at_other_addresses() {
        let servers = Addresses::default();
        let ((begun, has_begun), (release, released)) = (channel(), channel::<()>());
        std::thread::scope(|scope| {
            // If an assertion fails, the slow one ends all the same.
            let release = release;
            let slow = scope.spawn(|| {
                servers.join_or_begin(
                    &at(1),
                    |_| panic!("nobody is there"),
                    move || {
                        begun.send(()).unwrap();
                        released.recv().unwrap();
                        Ok(1)
                    },
                )
            });
            has_begun.recv().unwrap();
            servers.join_or_begin(&at(2), |_| panic!("nobody is there"), || Ok(2)).unwrap();
            assert_eq!(servers.find(&at(2)).as_deref(), Some(&2));
            assert!(servers.find(&at(1)).is_none());
            // Another one at the same address finds it.
            let other = scope.spawn(|| servers.join_or_begin(&at(1), |_| Ok(()), || panic!("it comes already")));
            release.send(()).unwrap();
            slow.join().unwrap().unwrap();
            other.join().unwrap().unwrap();
        });
        let server = servers.find(&at(1)).unwrap();
        servers.remove_if(&at(1), &server, |_| false);
        assert!(servers.find(&at(1)).is_some());
        servers.remove_if(&at(1), &server, |_| true);
        assert!(servers.find(&at(1)).is_none());
    }

    #[test]
    fn an_address_at_which_a_server_could_not_begin_is_free_again() {
        let servers = Addresses::default();
        let failing = || Err(Error::new(ErrorKind::Io, "taken"));
        servers.join_or_begin(&at(1), |_: &u8| Ok(()), failing).unwrap_err();
        let panics = std::panic::AssertUnwindSafe(|| servers.join_or_begin(&at(1), |_| Ok(()), || panic!("it dies")));
        std::panic::catch_unwind(panics).unwrap_err();
        servers.join_or_begin(&at(1), |_| panic!("nobody is there"), || Ok(3)).unwrap();
        assert_eq!(servers.find(&at(1)).as_deref(), Some(&3));
    }
}
