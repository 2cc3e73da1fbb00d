//! Open images through the policy gate, walk chains, split requests into extents: gives a Disk.
