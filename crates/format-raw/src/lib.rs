//! Raw images: where a guest range lies is where it is.
