use super::*;
use std::os::fd::AsRawFd;

fn drive(text: &str) -> DriveOptions {
    match DriveOptions::parse(text).unwrap() {
        ParsedDrive::Drive(drive) => *drive,
        ParsedDrive::Help(help) => panic!("{text} gave help: {help}"),
    }
}

fn refusal(text: &str) -> String {
    DriveOptions::parse(text).unwrap_err().to_string()
}

#[test]
fn every_key_is_read() {
    let read = drive(
        "name=root.0,file=a,,b.img,format=qcow2,engine=io_uring,cache=none,serial=disk 1,readonly=on,snapshot=off,\
         sync=on,fixed-buffers=on,guest-memory=locked,guest-memory-max=4G,secure-erase=on,\
         queues=4,queue-size=256,packed=on,poll-max-us=0,write-cache=off,media=disk,cyls=1,heads=2,secs=3,\
         logical-block-size=4k,physical-block-size=8k,alignment-offset=4k,min-io-size=16k,opt-io-size=1M,\
         discard-granularity=64k,size-max=128k,seg-max=64,delay-ms=3,on-error=hold,on-no-space=hold,\
         filter=error:every=9,filter=delay:ms=1,\
         l2-cache-size=1.5M,lock-timeout-s=90,socket=/run/a.sock,socket-mode=0660,socket-group=0",
    );
    let expected = DriveOptions {
        disk: DiskOptions {
            name: Some("root.0".to_owned()),
            file: Some("a,b.img".into()),
            format: Some(DriveFormat::Qcow2),
            engine: EngineKind::IoUring,
            cache: CacheMode::None,
            sync: true,
            read_only: true,
            snapshot: false,
            keep: None,
            keep_as: None,
            serial: "disk 1".to_owned(),
            size_bytes: None,
            delay_ms: Some(3),
            filters: ["error:every=9", "delay:ms=1"].map(|text| FilterOptions::parse(text).unwrap()).to_vec(),
            on_error: ErrorPolicy::Hold,
            on_no_space: ErrorPolicy::Hold,
            former_tops: 0,
            bases: Vec::new(),
            l2_cache_bytes: Some(1536 << 10),
            lock_timeout_s: Some(90),
            shown: ShownOptions {
                cylinders: Some(1),
                heads: Some(2),
                sectors: Some(3),
                logical_block_bytes: Some(4096),
                physical_block_bytes: Some(8192),
                secure_erase: Some(true),
                alignment_offset_bytes: Some(4096),
                minimum_io_bytes: Some(16384),
                optimal_io_bytes: Some(1 << 20),
                discard_granularity_bytes: Some(65536),
                size_max_bytes: Some(131_072),
                seg_max: Some(64),
                write_cache: Some(false),
                packed: Some(true),
            },
        },
        export: ExportOptions {
            read_only: false,
            socket: Some(PathBuf::from("/run/a.sock")),
            socket_descriptor: None,
            socket_mode: Some(0o660),
            socket_group: Some(0),
            queues: Some(4),
            queue_size: Some(256),
            shown: ShownOptions::default(),
            fixed_buffers: true,
            guest_memory: Placement::Locked,
            guest_memory_max_bytes: Some(4 << 30),
            poll_max_us: Some(0),
        },
    };
    assert_eq!(read, expected);
}

#[test]
fn keys_are_read_in_each_of_their_spellings() {
    assert!(drive("file=x,snapshot=on").disk.snapshot);
    assert_eq!(drive("file=x,num-queues=3").export.queues, Some(3));
    assert_eq!(drive("format=null,size=4G"), DriveOptions::null(4 << 30));
    let passed = drive("file=fd:3,socket=fd:4");
    assert_eq!((passed.disk.file, passed.export.socket_descriptor), (Some(FileName::Descriptor(3)), Some(4)));
    assert_eq!(drive("file=x,socket=./fd:4").socket(), Some(PathBuf::from("./fd:4")));
    assert_eq!(drive("file=x,socket-group=root,socket-mode=600").export.socket_group, Some(0));
    assert_eq!(drive("file=x").socket(), Some(PathBuf::from("x.sock")));
}

#[test]
fn a_passed_descriptor_is_an_image_or_a_socket_by_what_it_is() {
    let image = tempfile::tempfile().unwrap();
    let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
    let (image, socket) = (image.as_raw_fd(), socket.as_raw_fd());
    let both = drive(&format!("fd={socket},fd={image}"));
    assert_eq!(both.disk.file, Some(FileName::Descriptor(image)));
    assert_eq!((both.export.socket_descriptor, both.socket()), (Some(socket), None));
    for (text, what) in [
        (format!("fd={image},fd={image}"), "an image"),
        (format!("file=x,fd={image}"), "an image"),
        (format!("fd={image},file=x"), "an image"),
        (format!("file=x,fd={socket},fd={socket}"), "a socket"),
        (format!("file=x,socket=/run/a.sock,fd={socket}"), "a socket"),
        (format!("file=x,fd={socket},socket=/run/a.sock"), "a socket"),
    ] {
        assert!(refusal(&text).contains(&format!("has {what} already")), "{text}: {}", refusal(&text));
    }
}

#[test]
fn unknown_keys_and_values_list_the_valid_ones() {
    let message = refusal("file=x,fromat=raw");
    assert!(message.contains("did you mean 'format'?"), "{message}");
    assert!(help::key_names().iter().all(|key| message.contains(key)), "{message}");
    for (text, key, listed) in [
        ("file=x,format=qcow", "format", "raw, qcow2, scratch, null"),
        ("file=x,engine=uring", "engine", "auto, io_uring, linux-aio, threads"),
        ("file=x,cache=write-back", "cache", "writeback, none, writethrough, directsync, unsafe"),
        ("file=x,readonly=yes", "readonly", "on, off"),
        ("file=x,sync=1", "sync", "on, off"),
    ] {
        let message = refusal(text);
        assert!(message.contains(key) && message.contains(listed), "{text}: {message}");
    }
}

#[test]
fn a_question_mark_lists_what_a_key_takes() {
    for (text, part) in [
        ("format=?", "raw, qcow2, scratch, null"),
        ("file=x,cache=help", "directsync"),
        ("filter=?", "bandwidth"),
        ("?", "queue-size"),
    ] {
        match DriveOptions::parse(text).unwrap() {
            ParsedDrive::Help(help) => assert!(help.contains(part), "{help}"),
            ParsedDrive::Drive(drive) => panic!("{drive:?}"),
        }
    }
}

#[test]
fn impossible_values_and_combinations_are_refused() {
    for text in [
        "format=raw",
        "format=null",
        "format=null,size=4G,file=x",
        "file=x,size=4G",
        "format=null,size=0",
        "format=null,size=4G,readonly=on",
        "format=null,size=4G,snapshot=on",
        "file=x,readonly=on,snapshot=on",
        "format=null,size=1000",
        "file=",
        "file=nbd:localhost",
        "file=vhost-user:/run/x.sock,socket=/run/y.sock",
        "file=x,name=",
        "file=x,name=a/b",
        "file=x,name=a,id=b",
        "file=fd:three",
        "file=x,serial=123456789012345678901",
        "file=x,queues=0",
        "file=x,queues=257",
        "file=x,queue-size=100",
        "file=x,queue-size=1",
        "file=x,queue-size=2048",
        "file=x,queues=2,num-queues=2",
        "file=x,media=cdrom",
        "file=x,cyls=0",
        "file=x,heads=256",
        "file=x,cyls=5,heads=4",
        "file=x,logical-block-size=8G",
        "file=x,seg-max=none",
        "file=x,write-cache=writeback",
        "file=x,poll-max-us=-1",
        "file=x,poll-max-us=2000000",
        "file=x,delay-ms=20000",
        "file=x,l2-cache-size=lots",
        "file=x,lock-timeout-s=3601",
        "file=x,lock-timeout-s=2m",
        "format=null,size=4G,l2-cache-size=1M",
        "file=x,sync=on,cache=unsafe",
        "file=x,fixed-buffers=on,engine=linux-aio",
        "format=null,size=4G,fixed-buffers=on",
        "file=x,file=y",
        "file=x,socket=fd:nothing-has-this-name",
        "file=x,socket=fd:4,socket-mode=0660",
        "file=x,socket-mode=rw",
        "file=x,socket-mode=1777",
        "file=x,socket-group=no-group-is-called-so",
        "file=x,fd=999999",
    ] {
        assert!(DriveOptions::parse(text).is_err(), "{text}");
    }
}

#[test]
fn every_property_that_a_guest_sees_is_a_key_for_guests() {
    let keys = |text: &str| DriveOptions::keys_for_guests(text, &PassedDescriptors::default()).unwrap();
    for key in crate::SHOWN_KEYS {
        let value = if ["packed", "secure-erase", "write-cache"].contains(&key) { "off" } else { "64" };
        assert_eq!(keys(&format!("file=a,{key}={value},poll-max-us=1")), [key]);
    }
    assert_eq!(keys("file=a,socket=s,cache=none"), ["socket"]);
}
