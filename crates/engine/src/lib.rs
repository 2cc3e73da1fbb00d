//! Engines that move bytes (io_uring, Linux AIO, threads) and the reactor that drives them.
