//! qcow2: where a guest range lies, and how new space is prepared and committed.
