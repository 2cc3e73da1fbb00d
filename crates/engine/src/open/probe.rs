//! Chooses the engine of a file, and gives the reason.

use crate::base::options::{CacheMode, EngineKind, OpenOptions};
use crate::uring::setup::{self, Setup};
use block::{Error, ErrorKind, Result};
use std::sync::OnceLock;

/// The engines that this process may use here, or the reason why not. Each is looked up once in a process, and only if
/// it matters: destroying a Linux AIO context makes the kernel wait for tens of milliseconds.
#[derive(Debug, Default)]
pub(crate) struct Host {
    io_uring: OnceLock<Result<Setup, String>>,
    linux_aio: OnceLock<Result<(), String>>,
}

impl Host {
    pub(crate) fn get() -> &'static Self {
        static HOST: OnceLock<Host> = OnceLock::new();
        HOST.get_or_init(Self::default)
    }

    fn io_uring(&self) -> &Result<Setup, String> {
        self.io_uring.get_or_init(|| setup::probe().map_err(|error| why_no_uring(&error)))
    }

    fn linux_aio(&self) -> &Result<(), String> {
        self.linux_aio.get_or_init(|| {
            crate::aio::context::probe().map_err(|error| match error.raw_os_error() {
                Some(libc::EAGAIN) => "the sysctl fs.aio-max-nr is used up".into(),
                Some(libc::ENOSYS) => "this kernel has no Linux AIO".into(),
                _ => error.to_string(),
            })
        })
    }
}

fn why_no_uring(error: &std::io::Error) -> String {
    let disabled = std::fs::read_to_string("/proc/sys/kernel/io_uring_disabled").unwrap_or_default();
    match (error.raw_os_error(), disabled.trim()) {
        (Some(libc::ENOSYS), _) => "this kernel has no io_uring".into(),
        (Some(libc::EPERM), "2") => "the sysctl kernel.io_uring_disabled switches it off".into(),
        (Some(libc::EPERM), "1") => {
            "the sysctl kernel.io_uring_disabled allows it to kernel.io_uring_group only".into()
        }
        (Some(libc::EPERM), _) => "it is forbidden here, probably by a container's seccomp filter".into(),
        (Some(libc::ENOMEM), _) => "the limit of locked memory (ulimit -l) is too low".into(),
        _ => error.to_string(),
    }
}

/// Chooses the engine for a file. Also returns the end of the sentence "chosen because ...".
pub(crate) fn choose(
    options: &OpenOptions,
    name: &str,
    host: &Host,
    in_memory: bool,
    suits_ring: bool,
) -> Result<(EngineKind, String)> {
    let direct = options.cache.is_direct();
    let refuse = |message: String| Err(Error::new(ErrorKind::Unsupported, message));
    let asked = || "the options ask for it".to_owned();
    match options.engine {
        EngineKind::Threads => Ok((EngineKind::Threads, asked())),
        EngineKind::IoUring => match host.io_uring() {
            Ok(_) => Ok((EngineKind::IoUring, asked())),
            Err(reason) => refuse(format!("'{name}': engine=io_uring cannot be used: {reason}. Try engine=auto")),
        },
        EngineKind::LinuxAio if !direct => Err(Error::new(ErrorKind::BadOption, aio_needs_direct(name, options.cache))),
        EngineKind::LinuxAio => match host.linux_aio() {
            Ok(()) => Ok((EngineKind::LinuxAio, asked())),
            Err(reason) => refuse(format!("'{name}': engine=linux-aio cannot be used: {reason}. Try engine=auto")),
        },
        EngineKind::Auto if in_memory => {
            let reason = "the file lies in memory: reactors copy what is there themselves, and leave to threads what \
                          takes longer";
            Ok((EngineKind::Threads, reason.to_owned()))
        }
        EngineKind::Auto if !suits_ring => {
            let reason = "its file system takes nothing that must not wait, so an asynchronous engine would wait, or \
                          leave all to threads";
            Ok((EngineKind::Threads, reason.to_owned()))
        }
        EngineKind::Auto => Ok(match host.io_uring() {
            Ok(_) if direct => (EngineKind::IoUring, "the kernel permits io_uring".into()),
            Ok(_) => {
                let reason =
                    "the kernel permits io_uring, which copies what the page cache holds while it is submitted";
                (EngineKind::IoUring, reason.into())
            }
            Err(uring) if direct => match host.linux_aio() {
                Ok(()) => (
                    EngineKind::LinuxAio,
                    format!("io_uring is not to be had ({uring}) and the file is opened for direct I/O"),
                ),
                Err(aio) => {
                    (EngineKind::Threads, format!("neither io_uring ({uring}) nor Linux AIO ({aio}) is to be had"))
                }
            },
            Err(uring) => (
                EngineKind::Threads,
                format!("io_uring is not to be had ({uring}) and Linux AIO works with direct I/O only"),
            ),
        }),
    }
}

/// Describes an engine, with its setup on this host, for the user.
pub(crate) fn words(engine: EngineKind, host: &Host) -> String {
    match engine {
        EngineKind::IoUring => match host.io_uring() {
            Ok(setup) => format!("io_uring ({})", setup.words()),
            Err(_) => engine.to_string(),
        },
        _ => engine.to_string(),
    }
}

fn aio_needs_direct(name: &str, cache: CacheMode) -> String {
    format!(
        "'{name}': engine=linux-aio does not go with cache={cache}: Linux AIO is asynchronous only on files opened for \
         direct I/O, and would block on this one. Use cache=none or cache=directsync with it, or another engine \
         (engine=auto chooses)"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(io_uring: bool, linux_aio: bool) -> Host {
        let fact = |is: bool| if is { Ok(()) } else { Err("of a reason".to_owned()) };
        let setup = fact(io_uring).map(|()| Setup::Deferred);
        Host { io_uring: OnceLock::from(setup), linux_aio: OnceLock::from(fact(linux_aio)) }
    }

    fn auto(cache: CacheMode, host: &Host) -> (EngineKind, String) {
        choose(&OpenOptions { cache, ..OpenOptions::default() }, "x", host, false, true).unwrap()
    }

    #[test]
    fn auto_takes_the_best_that_works_and_says_why_not_a_better_one() {
        assert_eq!(auto(CacheMode::None, &host(true, true)).0, EngineKind::IoUring);
        let (kind, why) = auto(CacheMode::None, &host(false, true));
        assert_eq!(kind, EngineKind::LinuxAio);
        assert!(why.contains("of a reason"), "{why}");
        assert_eq!(auto(CacheMode::None, &host(false, false)).0, EngineKind::Threads);
        for cache in [CacheMode::Writeback, CacheMode::Writethrough, CacheMode::Unsafe] {
            assert_eq!(auto(cache, &host(false, true)).0, EngineKind::Threads, "AIO blocks on cached files");
        }
    }

    #[test]
    fn auto_takes_threads_where_a_ring_could_do_nothing_without_waiting() {
        for cache in [CacheMode::None, CacheMode::Writeback] {
            let options = OpenOptions { cache, ..OpenOptions::default() };
            let (kind, why) = choose(&options, "x", &host(true, true), false, false).unwrap();
            assert_eq!(kind, EngineKind::Threads);
            assert!(why.contains("must not wait"), "{why}");
        }
    }

    #[test]
    fn linux_aio_on_a_cached_file_is_refused_with_the_cache_modes_that_work() {
        let options = OpenOptions { engine: EngineKind::LinuxAio, ..OpenOptions::default() };
        let error = choose(&options, "disk.raw", &host(true, true), false, true).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::BadOption);
        let message = error.to_string();
        for part in ["disk.raw", "cache=writeback", "cache=none", "cache=directsync"] {
            assert!(message.contains(part), "{message}");
        }
    }

    #[test]
    fn an_engine_that_was_asked_for_and_cannot_be_had_is_an_error_not_another_engine() {
        for engine in [EngineKind::IoUring, EngineKind::LinuxAio] {
            let options = OpenOptions { engine, cache: CacheMode::None, ..OpenOptions::default() };
            let error = choose(&options, "x", &host(false, false), false, true).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unsupported);
            assert!(error.to_string().contains("of a reason"), "{error}");
        }
    }
}
