//! Guest memory, I/O buffers and the SIGBUS guard: the bottom of the path.
