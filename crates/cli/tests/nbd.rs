//! `ringdisk nbd`: disks for other people's NBD clients, from the command line.

mod common;

use common::{Server, directory, has_tool, path_str, ringdisk, run, run_fails, run_ok, text, tool_ok};
use std::os::unix::fs::PermissionsExt;

#[test]
fn disks_are_served_under_their_names_until_a_signal() {
    if !has_tool("nbdinfo") || !has_tool("qemu-io") {
        return;
    }
    let directory = directory();
    let path = |name: &str| path_str(&directory.path().join(name)).to_owned();
    let (image, other, socket) = (path("disk.qcow2"), path("other.raw"), path("nbd"));
    let data = path("data.qcow2");
    for qcow2 in [&image, &data] {
        run_ok(&["create", "-q", "-f", "qcow2", qcow2, "16M"]);
    }
    run_ok(&["bitmap", "--add", &data, "daily"]);
    run_ok(&["create", "-q", "-f", "raw", &other, "1M"]);
    let mut command = ringdisk();
    let drive = format!("file={other},format=raw,name=other,readonly=on");
    command.args(["nbd", &image, "--socket", &socket, "--export-name", "root", "--description", "a system"]);
    command.args(["--drive", &drive, "--drive", &format!("file={data},format=qcow2,name=data")]);
    command.args([
        "--export",
        "disk=data,description=all of it,bitmap=daily",
        "--export",
        "disk=data,name=look,readonly=on",
    ]);
    let server = Server::start_command(command);
    assert!(server.announced.contains(&format!("at nbd+unix:///root?socket={socket}")), "{}", server.announced);
    let uri = |name: &str| format!("nbd+unix:///{name}?socket={socket}");
    let list = tool_ok("nbdinfo", &["--list", &uri("")]);
    assert!(
        list.contains("export=\"root\"") && list.contains("a system") && list.contains("export=\"other\""),
        "{list}"
    );
    let has_bitmap = |name: &str| tool_ok("nbdinfo", &[&uri(name)]).contains("qemu:dirty-bitmap:daily");
    assert!(list.contains("all of it") && has_bitmap("data") && !has_bitmap("look") && !has_bitmap("root"), "{list}");
    let is_read_only = |name: &str| tool_ok("nbdinfo", &["--json", &uri(name)]).contains("\"is_read_only\": true");
    assert!(is_read_only("look") && !is_read_only("data"));
    tool_ok("qemu-io", &["-f", "raw", "-c", "write -P 7 1M 64k", &uri("root")]);
    assert!(is_read_only("other"));
    server.stop();
    assert!(!std::path::Path::new(&socket).exists());
    tool_ok("qemu-io", &["-r", "-f", "qcow2", "-c", "read -P 7 1M 64k", &image]);
}

#[test]
fn a_server_without_a_place_or_without_a_disk_says_so() {
    assert!(run_fails(2, &["nbd", "disk.raw"]).contains("--socket"));
    assert!(run_fails(2, &["nbd", "--socket", "x"]).contains("IMAGE"));
    // What is said of IMAGE does nothing to another disk.
    for (option, instead) in [
        (&["--export-name", "x"][..], "name="),
        (&["--read-only"], "readonly=on"),
        (&["--description", "x"], "description="),
        (&["--bitmap", "x"], "bitmap="),
    ] {
        let drive = ["nbd", "--socket", "x", "--drive", "format=null,size=1M"];
        let said = run_fails(2, &[&drive[..], option].concat());
        assert!(said.contains(option[0]) && said.contains(instead), "{said}");
    }
    let said = run_fails(2, &["nbd", "--listen", "127.0.0.1", "--drive", "format=null,size=1M"]);
    assert!(said.contains("'127.0.0.1': the port is missing: write ADDRESS:PORT"), "{said}");
}

#[test]
fn a_password_in_a_name_is_refused_and_shown_nowhere() {
    let directory = directory();
    let path = |name: &str| path_str(&directory.path().join(name)).to_owned();
    let (raw, socket, name) = (path("disk.raw"), path("nbd"), "nbd://me:secret@localhost:1/x");
    run_ok(&["create", "-q", "-f", "raw", &raw, "1M"]);
    let drive = format!("file={name},format=raw");
    for arguments in [
        &["info", name][..],
        &["convert", "-n", "-f", "raw", "-O", "raw", &raw, name],
        &["compare", "-f", "raw", "-F", "raw", &raw, name],
        &["serve", "--drive", &format!("{drive},socket={socket}")],
        &["nbd", "--socket", &socket, "--drive", &drive],
    ] {
        let output = run(arguments);
        let said = text(&output.stdout) + &text(&output.stderr);
        assert!(!output.status.success() && said.contains("tls-psk-file"), "{arguments:?}: {said}");
        assert!(!said.contains("secret"), "{arguments:?}: {said}");
    }
}

#[test]
fn keys_that_are_for_guests_are_refused_with_the_reason() {
    let directory = directory();
    let socket = directory.path().join("nbd");
    for (options, said) in [
        ("socket=/s", "--socket or --listen"),
        ("socket-mode=0660", "give --socket-mode"),
        ("queues=2", "queues="),
        ("queue-size=128", "queue-size="),
        ("guest-memory=any", "guest-memory="),
        ("logical_block_size=4096", "logical_block_size="),
    ] {
        let drive = format!("format=null,size=1M,{options}");
        let refused = run_fails(2, &["nbd", "--socket", path_str(&socket), "--drive", &drive]);
        assert!(refused.contains(said), "{options}: {refused}");
    }
    assert!(!socket.exists());
}

#[test]
fn a_socket_has_the_mode_that_was_asked_for() {
    let directory = directory();
    let socket = directory.path().join("nbd");
    let mut command = ringdisk();
    command.args(["nbd", "--drive", "format=null,size=1M,poll-max-us=5", "--socket", path_str(&socket)]);
    command.args(["--socket-mode", "0640", "--buffer-memory", "1M"]);
    let server = Server::start_command(command);
    assert_eq!(std::fs::metadata(&socket).unwrap().permissions().mode() & 0o777, 0o640);
    server.stop();
    let tcp = ["nbd", "--drive", "format=null,size=1M", "--listen", "127.0.0.1:1", "--socket-mode", "0640"];
    assert!(run_fails(2, &tcp).contains("Unix socket"));
}

#[test]
fn one_signal_ends_it_while_requests_are_held_that_the_storage_fails() {
    if !has_tool("qemu-io") {
        return;
    }
    let directory = directory();
    let path = |name: &str| path_str(&directory.path().join(name)).to_owned();
    let (image, socket) = (path("disk.raw"), path("nbd"));
    run_ok(&["create", "-q", "-f", "raw", &image, "1M"]);
    let (guest, control) = (path("guest"), path("control"));
    for key in ["on-error", "on-no-space"] {
        let drive = format!("format=null,size=1M,{key}=hold");
        let said = run_fails(2, &["nbd", "--drive", &drive, "--socket", &socket]);
        assert!(said.contains(&format!("{key}=hold")) && said.contains("resume"), "{said}");
    }
    let drive = format!("file={image},format=raw,name=disk,on-error=hold,filter=error:kinds=write,socket={guest}");
    let arguments = ["--drive", &drive, "--nbd", &socket, "--control", &control, "--give-up-after", "1"];
    let server = Server::start(&arguments);
    let uri = format!("nbd+unix:///disk?socket={socket}");
    let mut client = std::process::Command::new("qemu-io");
    client.args(["-t", "writeback", "-f", "raw", "-c", "write 0 4k", &uri]).stdout(std::process::Stdio::null());
    let mut client = client.stderr(std::process::Stdio::null()).spawn().unwrap();
    // Its write is held for as long as anybody waits.
    let deadline = std::time::Instant::now() + common::PATIENCE;
    while !run_ok(&["ctl", "--control", &control, "show", "disk", "--output=json"]).contains("\"held\"") {
        assert!(client.try_wait().unwrap().is_none(), "the write ended");
        assert!(std::time::Instant::now() < deadline, "the write is not held");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    let (status, said) = server.terminate();
    client.wait().unwrap();
    assert!(matches!(status.code(), Some(0 | 1)), "{status}: {said}");
    assert!(!std::path::Path::new(&socket).exists(), "the end was in order");
}

#[test]
fn a_disk_of_a_server_is_read_written_mapped_and_served_as_a_file_is() {
    if !has_tool("qemu-img") || !has_tool("qemu-io") || !has_tool("nbdcopy") {
        return;
    }
    let directory = directory();
    let path = |name: &str| path_str(&directory.path().join(name)).to_owned();
    let (source, raw, inner, copy) = (path("source.raw"), path("raw.raw"), path("inner.raw"), path("copy.qcow2"));
    let mut bytes = common::numbered(3 << 20);
    bytes.resize(8 << 20, 0);
    std::fs::write(&source, &bytes).unwrap();
    run_ok(&["create", "-q", "-f", "raw", &raw, "8M"]);
    run_ok(&["create", "-q", "-f", "raw", &inner, "16M"]);
    let socket = path("nbd");
    let mut command = ringdisk();
    let drive = format!("file={inner},format=raw,name=inner");
    command.args(["nbd", &raw, "--socket", &socket, "--export-name", "raw", "--drive", &drive]);
    let server = Server::start_command(command);
    let uri = |name: &str| format!("nbd+unix:///{name}?socket={socket}");
    // As a raw target and source.
    run_ok(&["convert", "-n", "-f", "raw", "-O", "raw", &source, &uri("raw")]);
    run_ok(&["convert", "-f", "raw", "-O", "qcow2", &uri("raw"), &copy]);
    tool_ok("qemu-img", &["compare", "-q", "-f", "raw", "-F", "qcow2", &source, &copy]);
    run_ok(&["compare", "-f", "raw", "-F", "raw", &source, &uri("raw")]);
    let info = run_ok(&["info", "-f", "raw", &uri("raw")]);
    assert!(info.contains("8 MiB") && info.contains("protocol type: nbd\n"), "{info}");
    let map = run_ok(&["map", "-f", "raw", "--output=json", &uri("raw")]);
    assert!(map.contains("\"zero\": true") || map.contains("\"data\": false"), "{map}");
    // With an image in it, made by somebody else: read, written and served again.
    tool_ok("qemu-img", &["create", "-q", "-f", "qcow2", &uri("inner"), "8M"]);
    run_ok(&["convert", "-n", "-f", "raw", "-O", "qcow2", &source, &uri("inner")]);
    run_ok(&["check", "-f", "qcow2", &uri("inner")]);
    tool_ok("qemu-img", &["compare", "-q", "-f", "raw", "-F", "qcow2", &source, &uri("inner")]);
    let outer = path("outer");
    let mut command = ringdisk();
    command.args(["nbd", "--socket", &outer, "--drive", &format!("file={},format=qcow2,name=again", uri("inner"))]);
    let again = Server::start_command(command);
    let outer_uri = format!("nbd+unix:///again?socket={outer}");
    tool_ok("qemu-io", &["-f", "raw", "-c", "write -P 9 4M 1M", "-c", "flush", &outer_uri]);
    let back = path("back");
    tool_ok("nbdcopy", &[&outer_uri, &back]);
    again.stop();
    bytes[4 << 20..5 << 20].fill(9);
    assert!(std::fs::read(&back).unwrap() == bytes);
    run_ok(&["check", "-f", "qcow2", &uri("inner")]);
    server.stop();
}

#[test]
fn what_fio_writes_over_nbd_it_finds_again() {
    if !has_tool("fio") || !tool_ok("fio", &["--enghelp"]).contains("nbd") {
        return;
    }
    let directory = directory();
    let path = |name: &str| path_str(&directory.path().join(name)).to_owned();
    let (image, socket) = (path("disk.qcow2"), path("nbd"));
    run_ok(&["create", "-q", "-f", "qcow2", &image, "64M"]);
    let mut command = ringdisk();
    command.args(["nbd", &image, "--socket", &socket]);
    let server = Server::start_command(command);
    let uri = format!("--uri=nbd+unix:///?socket={socket}");
    let words = ["--name=verified", "--ioengine=nbd", "--thread", "--rw=randwrite", "--bsrange=4k-64k", "--iodepth=16"];
    let more = [
        "--size=16M",
        "--verify=crc32c",
        "--verify_fatal=1",
        "--fsync=32",
        "--randrepeat=1",
        "--verify_state_save=0",
        &uri,
    ];
    tool_ok("fio", &[&words[..], &more].concat());
    server.stop();
    run_ok(&["check", &image]);
}

#[test]
fn a_servers_disk_is_never_copied_onto_itself_however_it_is_named() {
    let directory = directory();
    let path = |name: &str| path_str(&directory.path().join(name)).to_owned();
    let (raw, qcow2, socket, link) = (path("disk.raw"), path("disk.qcow2"), path("nbd"), path("link"));
    let bytes = common::numbered(4 << 20);
    std::fs::write(&raw, &bytes).unwrap();
    run_ok(&["convert", "-f", "raw", "-O", "qcow2", &raw, &qcow2]);
    let before = std::fs::read(&qcow2).unwrap();
    let mut command = ringdisk();
    let drive = format!("file={qcow2},format=raw,name=inner");
    command.args([
        "nbd",
        "--socket",
        &socket,
        "--drive",
        &format!("file={raw},format=raw,name=disk"),
        "--drive",
        &drive,
    ]);
    let server = Server::start_command(command);
    std::os::unix::fs::symlink(&socket, &link).unwrap();
    let uri = |name: &str, rest: &str| format!("nbd+unix:///{name}?{rest}socket={socket}");
    let disk = uri("disk", "");
    for other in [disk.clone(), uri("%64isk", "connections=1&"), format!("nbd+unix:///disk?socket={link}")] {
        for words in [
            &["dd", "-f", "raw", "-O", "raw", "bs=1M", "skip=1", &format!("if={disk}"), &format!("of={other}")][..],
            &["convert", "-n", "-f", "raw", "-O", "raw", &disk, &other],
            &["convert", "-f", "raw", "-O", "raw", &disk, &other],
        ] {
            let said = run_fails(1, words);
            assert!(said.contains("the source") && said.contains("nothing was written"), "{words:?}: {said}");
        }
    }
    // A raw target over the image that is read.
    let words = [
        "dd",
        "-f",
        "qcow2",
        "-O",
        "raw",
        &format!("if={}", uri("inner", "")),
        &format!("of={}", uri("inner", "reconnect-s=1&")),
    ];
    assert!(run_fails(1, &words).contains("nothing was written"));
    server.stop();
    assert!(std::fs::read(&raw).unwrap() == bytes && std::fs::read(&qcow2).unwrap() == before);
}

#[test]
fn an_overlay_rests_on_a_servers_disk_as_its_user_names_it() {
    if !has_tool("qemu-img") || !has_tool("qemu-io") || !has_tool("nbdcopy") {
        return;
    }
    let directory = directory();
    let path = |name: &str| path_str(&directory.path().join(name)).to_owned();
    let (raw, overlay, socket, outer, copy) =
        (path("base.raw"), path("vm.qcow2"), path("nbd"), path("outer"), path("copy"));
    let mut bytes = common::numbered(4 << 20);
    std::fs::write(&raw, &bytes).unwrap();
    let serve = || {
        let mut command = ringdisk();
        command.args(["nbd", "--socket", &socket, "--drive", &format!("file={raw},format=raw,name=base,readonly=on")]);
        Server::start_command(command)
    };
    let server = serve();
    let place = format!("nbd+unix:///base?socket={socket}");
    let mine = format!("nbd+unix:///base?connections=1&reconnect-s=60&socket={socket}");
    run_ok(&["create", "-q", "-f", "qcow2", "-b", &mine, "-F", "raw", &overlay]);
    // Options are its user's affair.
    let recorded = run_ok(&["info", &overlay]);
    assert!(recorded.contains(&place) && !recorded.contains("reconnect-s"), "{recorded}");
    assert!(tool_ok("qemu-img", &["info", "-f", "qcow2", &overlay]).contains(&place));
    let said = run_fails(1, &["map", &overlay]);
    assert!(said.contains("names of servers are not followed"), "{said}");
    run_ok(&["compare", "-f", "raw", "-F", "qcow2", "--allow-backing", "anywhere", &raw, &overlay]);
    let mut command = ringdisk();
    command.args(["nbd", &overlay, "--socket", &outer, "--export-name", "vm", "--backing", &mine]);
    let guest = Server::start_command(command);
    let vm = format!("nbd+unix:///vm?socket={outer}");
    tool_ok("qemu-io", &["-f", "raw", "-c", "write -P 9 1M 64k", "-c", "flush", &vm]);
    // The base's server goes, and comes back.
    server.stop();
    let server = serve();
    tool_ok("nbdcopy", &[&vm, &copy]);
    guest.stop();
    server.stop();
    bytes[1 << 20..(1 << 20) + (64 << 10)].fill(9);
    assert!(std::fs::read(&copy).unwrap() == bytes);
}

#[test]
fn a_qcow2_image_is_made_at_a_server_if_there_is_room() {
    if !has_tool("qemu-img") || !has_tool("qemu-nbd") {
        return;
    }
    let directory = directory();
    let path = |name: &str| path_str(&directory.path().join(name)).to_owned();
    let (source, disk, small, socket) = (path("source.raw"), path("disk.raw"), path("small.raw"), path("nbd"));
    let mut bytes = common::numbered(3 << 20);
    bytes.resize(8 << 20, 0);
    std::fs::write(&source, &bytes).unwrap();
    // What lies there is old.
    std::fs::write(&disk, vec![0xa5; 16 << 20]).unwrap();
    std::fs::write(&small, vec![0xa5; 128 << 10]).unwrap();
    let mut command = ringdisk();
    command.args(["nbd", "--socket", &socket]);
    command.args(["--drive", &format!("file={disk},format=raw,name=disk")]);
    command.args(["--drive", &format!("file={small},format=raw,name=small")]);
    let server = Server::start_command(command);
    let uri = |name: &str| format!("nbd+unix:///{name}?socket={socket}");
    run_ok(&["create", "-q", "-f", "qcow2", &uri("disk"), "1G"]);
    tool_ok("qemu-img", &["check", "-f", "qcow2", &uri("disk")]);
    assert!(tool_ok("qemu-img", &["info", "-f", "qcow2", &uri("disk")]).contains("1 GiB"));
    for words in [
        &["convert", "-f", "raw", "-O", "qcow2", &source, &uri("disk")][..],
        &["dd", "-f", "raw", "-O", "qcow2", "bs=1M", &format!("if={source}"), &format!("of={}", uri("disk"))],
    ] {
        run_ok(words);
        tool_ok("qemu-img", &["check", "-f", "qcow2", &uri("disk")]);
        tool_ok("qemu-img", &["compare", "-q", "-f", "raw", "-F", "qcow2", &source, &uri("disk")]);
    }
    // An overlay there rests on a file, which it names by a whole path.
    run_ok(&["create", "-q", "-f", "qcow2", "-b", &source, "-F", "raw", &uri("disk")]);
    run_ok(&["compare", "-f", "raw", "-F", "qcow2", "--allow-backing", "any", &source, &uri("disk")]);
    let said = run_fails(1, &["create", "-f", "qcow2", "-b", "source.raw", "-F", "raw", &uri("disk")]);
    assert!(said.contains("whole path"), "{said}");
    // It never rests on itself.
    let said = run_fails(
        2,
        &["create", "-f", "qcow2", "-b", &uri("disk"), "-F", "raw", &format!("{}&connections=1", uri("disk"))],
    );
    assert!(said.contains("same filename"), "{said}");
    for words in [
        &["create", "-f", "qcow2", &uri("small"), "8M"][..],
        &["convert", "-f", "raw", "-O", "qcow2", &source, &uri("small")],
    ] {
        let said = run_fails(1, words);
        assert!(said.contains("131072 bytes, and the image needs"), "{said}");
    }
    assert!(run_fails(1, &["create", "-f", "qcow2", "-o", "data_file=x", &uri("disk"), "1M"]).contains("data file"));
    server.stop();
    assert!(std::fs::read(&small).unwrap().iter().all(|byte| *byte == 0xa5), "what has no room changes nothing");
}
