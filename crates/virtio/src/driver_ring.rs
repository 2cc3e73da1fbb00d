//! The driver half of a split ring.
