//! The interface between the rooms: disks, queues, operations, files, errors.
