//! Long work on images with progress and cancel, and the load generator.
