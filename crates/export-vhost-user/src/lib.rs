//! The vhost-user front end: wire session and queue loop over a Disk.
