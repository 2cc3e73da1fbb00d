//! `snapshot=on,keep=DIRECTORY`: the overlay outlives `kill -9` of its daemon, and is an image for every command. qemu-img
//! judges what comes out.

mod common;

use common::{Server, at, directory, has_tool, numbered, path_str, run, run_fails, run_ok, text, tool_ok};
use serde_json::Value;
use std::path::Path;

const SIZE: usize = 6 << 20;

/// Writes a file to the start of the disk.
fn write(socket: &Path, source: &Path) {
    let target = format!("of=vhost-user:{}", socket.display());
    run_ok(&["dd", "-f", "raw", "-O", "raw", "bs=64K", &format!("if={}", source.display()), &target]);
}

#[test]
fn a_kept_overlay_outlives_its_daemon_and_goes_wherever_its_user_wants() {
    if !has_tool("qemu-img") {
        return;
    }
    for format in ["raw", "qcow2"] {
        let dir = directory();
        let path = |name: &str| at(&dir, name);
        let (base, keep, socket, pieces) = (path("base"), path("keep"), path("s"), path("pieces"));
        let (index, out, model) = (keep.join("base.scratch"), path("out"), path("model.raw"));
        std::fs::create_dir(&keep).unwrap();
        let mut contents = numbered(SIZE);
        std::fs::write(&model, &contents).unwrap();
        tool_ok("qemu-img", &["convert", "-f", "raw", "-O", format, path_str(&model), path_str(&base)]);
        let before = std::fs::read(&base).unwrap();
        let modified = std::fs::metadata(&base).unwrap().modified().unwrap();

        let drive = format!(
            "file={},format={format},snapshot=on,keep={},queues=1,socket={}",
            base.display(),
            keep.display(),
            socket.display()
        );
        // The second daemon goes on with what the first has left.
        for (round, length) in [(1u8, 5 << 20), (2, 3 << 16)] {
            // It comes back from the record, which has a name for it by then.
            let (state, control) = (path("state"), path("control"));
            let arguments = ["--control", path_str(&control), "--state-dir", path_str(&state), "--drive", &drive];
            let server = Server::start(&arguments);
            std::fs::write(&pieces, vec![round; length]).unwrap();
            write(&socket, &pieces);
            contents[..length].fill(round);
            let said = run_fails(1, &["commit", path_str(&index), "--allow-backing", "any"]);
            assert!(said.contains("lock") || said.contains("use"), "{said}");
            server.kill();
        }
        std::fs::write(&model, &contents).unwrap();
        assert!(std::fs::read(&base).unwrap() == before, "the image was changed");
        assert_eq!(std::fs::metadata(&base).unwrap().modified().unwrap(), modified);

        let info = run_ok(&["info", path_str(&index)]);
        assert!(info.contains("file format: scratch") && info.contains(path_str(&base)), "{info}");
        assert!(info.contains("data file: ") && info.contains(".scratch.data\n"), "{info}");
        let info = serde_json::from_str::<Value>(&run_ok(&["info", "--output=json", path_str(&index)])).unwrap();
        assert!(info["actual-size"].as_u64().unwrap() >= 5 << 20, "the data count, too: {info}");
        // The overlay lies elsewhere than its image: the gate asks for the user's word.
        assert!(run_fails(1, &["convert", "-O", "raw", path_str(&index), path_str(&out)]).contains("--allow-backing"));
        let is_same = |image: &Path, format: &str| {
            let arguments = ["compare", "-f", format, "-F", "raw", path_str(image), path_str(&model)];
            tool_ok("qemu-img", &arguments);
        };
        for target in ["raw", "qcow2"] {
            run_ok(&["convert", "--allow-backing", "any", "-O", target, path_str(&index), path_str(&out)]);
            is_same(&out, target);
        }
        let compare = |image: &Path| {
            let arguments = ["compare", "--allow-backing", "any", "-F", "raw", path_str(image), path_str(&model)];
            let output = run(&arguments);
            assert!(output.status.success(), "{}", text(&output.stderr));
        };
        compare(&index);
        run_ok(&["commit", "--allow-backing", "any", path_str(&index)]);
        is_same(&base, format);
        assert_eq!(std::fs::metadata(keep.join("base.scratch.data")).unwrap().len(), 0, "it gives its space back");
        // Emptied, it shows what its image holds by now.
        compare(&index);
        let map = run_ok(&["map", "--allow-backing", "any", path_str(&index)]);
        assert!(!map.contains("scratch.data"), "{map}");
    }
}

#[test]
fn an_overlay_of_another_image_is_refused_and_stays() {
    let dir = directory();
    let path = |name: &str| at(&dir, name);
    for name in ["a.raw", "b.raw"] {
        std::fs::write(path(name), numbered(1 << 20)).unwrap();
    }
    let drive = |name: &str| {
        let (file, keep, socket) = (path(name), dir.path().display(), path("s"));
        format!("file={},format=raw,name=one,snapshot=on,keep={keep},socket={}", file.display(), socket.display())
    };
    Server::start(&["--drive", &drive("a.raw")]).stop();
    let index = std::fs::read(path("one.scratch")).unwrap();
    let said = run_fails(2, &["serve", "--drive", &drive("b.raw")]);
    assert!(said.contains("rests on another image"), "{said}");
    assert!(std::fs::read(path("one.scratch")).unwrap() == index);
    let said = run_fails(2, &["serve", "--drive", "file=x,keep=y"]);
    assert!(said.contains("snapshot=on"), "{said}");
}

#[test]
fn a_layer_on_a_kept_overlay_is_there_when_the_daemon_is_started_again() {
    let dir = directory();
    let path = |name: &str| at(&dir, name);
    let (base, keep, socket, pieces, out) = (path("base"), path("keep"), path("s"), path("pieces"), path("out"));
    let (control, state, overlay) = (path("control"), path("state"), path("overlay.qcow2"));
    std::fs::create_dir(&keep).unwrap();
    let mut contents = numbered(SIZE);
    std::fs::write(&base, &contents).unwrap();
    let drive = format!(
        "file={},format=raw,name=root,snapshot=on,keep={},queues=1,socket={}",
        base.display(),
        keep.display(),
        socket.display()
    );
    let arguments = ["--control", path_str(&control), "--state-dir", path_str(&state), "--drive", &drive];
    let ctl = |arguments: &[&str]| run(&[&["ctl", "--control", path_str(&control)], arguments].concat());
    let ctl_ok = |arguments: &[&str]| {
        let output = ctl(arguments);
        assert!(output.status.success(), "{}", text(&output.stderr));
    };
    let mut put = |length: usize, value: u8| {
        std::fs::write(&pieces, vec![value; length]).unwrap();
        write(&socket, &pieces);
        contents[..length].fill(value);
    };
    let server = Server::start(&arguments);
    put(3 << 20, 1);
    ctl_ok(&["reopen", "root"]);
    for command in [&["backup", "root", path_str(&out)][..], &["mirror", "root", path_str(&out)]] {
        let said = ctl(command);
        assert!(!said.status.success() && text(&said.stderr).contains("scratch overlay"), "{}", text(&said.stderr));
    }
    ctl_ok(&["snapshot", "root", path_str(&overlay)]);
    put(2 << 20, 2);
    ctl_ok(&["reopen", "root"]);
    put(1 << 20, 3);
    server.kill();

    // The daemon's arguments still say snapshot=on,keep=.
    let is_there = || {
        let source = format!("if=vhost-user:{}", socket.display());
        run_ok(&["dd", "-f", "raw", "-O", "raw", "bs=64K", &source, &format!("of={}", out.display())]);
        assert!(std::fs::read(&out).unwrap() == contents);
        std::fs::remove_file(&out).unwrap();
    };
    let server = Server::start(&arguments);
    is_there();
    ctl_ok(&["commit", "root"]);
    server.kill();
    let server = Server::start(&arguments);
    is_there();
    server.stop();
}

/// Does what the message says.
#[test]
fn a_kept_overlay_is_read_while_it_is_served_and_goes_into_its_image_when_the_daemon_has_let_it_go() {
    let dir = directory();
    let path = |name: &str| at(&dir, name);
    let (base, keep, socket, pieces, out) = (path("base"), path("keep"), path("s"), path("pieces"), path("out"));
    let (control, index) = (path("control"), path("keep/root.scratch"));
    std::fs::create_dir(&keep).unwrap();
    let mut contents = numbered(SIZE);
    std::fs::write(&base, &contents).unwrap();
    let drive = format!(
        "file={},format=raw,name=root,snapshot=on,keep={},queues=1,socket={}",
        base.display(),
        keep.display(),
        socket.display()
    );
    let ctl = |arguments: &[&str]| run(&[&["ctl", "--control", path_str(&control)], arguments].concat());
    let ctl_ok = |arguments: &[&str]| {
        let output = ctl(arguments);
        assert!(output.status.success(), "{}", text(&output.stderr));
    };
    let server = Server::start(&["--control", path_str(&control), "--drive", &drive]);
    let bench = ["bench", "--socket", path_str(&socket), "--rw", "write", "--bs", "64k", "--count", "10", "--destroy"];
    run_ok(&bench);
    std::fs::write(&pieces, vec![7; 3 << 20]).unwrap();
    write(&socket, &pieces);
    contents[..3 << 20].fill(7);
    let refused = ctl(&["commit", "root"]);
    let said = text(&refused.stderr);
    assert!(!refused.status.success() && said.contains("ctl remove"), "{said}");
    let advice = said.split("'ringdisk ").nth(2).and_then(|rest| rest.split('\'').next()).unwrap().to_owned();
    assert!(advice.starts_with("commit ") && advice.ends_with("/keep/root.scratch"), "{advice}");
    // What was flushed is there for readers, too.
    run_ok(&["convert", "-U", "--allow-backing", "any", "-O", "raw", path_str(&index), path_str(&out)]);
    assert!(std::fs::read(&out).unwrap() == contents);

    ctl_ok(&["remove", "root", "--force"]);
    run_ok(&["convert", "--allow-backing", "any", "-O", "raw", path_str(&index), path_str(&out)]);
    assert!(std::fs::read(&out).unwrap() == contents);
    run_ok(&advice.split(' ').collect::<Vec<_>>());
    assert!(std::fs::read(&base).unwrap() == contents, "the image has it now");
    ctl_ok(&["add", &drive]);
    std::fs::write(&pieces, vec![8; 1 << 20]).unwrap();
    write(&socket, &pieces);
    contents[..1 << 20].fill(8);
    let source = format!("if=vhost-user:{}", socket.display());
    run_ok(&["dd", "-f", "raw", "-O", "raw", "bs=64K", &source, &format!("of={}", out.display())]);
    assert!(std::fs::read(&out).unwrap() == contents);
    server.stop();
}

/// What `kill -9` leaves of an overlay that was being made.
#[test]
fn a_daemon_that_was_killed_while_it_made_an_overlay_makes_it_the_next_time() {
    for names in [&["one.scratch"][..], &["one.scratch", "one.scratch.data"]] {
        let dir = directory();
        let path = |name: &str| at(&dir, name);
        std::fs::write(path("base"), numbered(1 << 20)).unwrap();
        names.iter().for_each(|name| std::fs::write(path(name), "").unwrap());
        let (file, keep, socket) = (path("base"), dir.path().display().to_string(), path("s"));
        let drive =
            format!("file={},format=raw,name=one,snapshot=on,keep={keep},socket={}", file.display(), socket.display());
        Server::start(&["--drive", &drive]).stop();
        assert!(run_ok(&["info", path_str(&path("one.scratch"))]).contains("file format: scratch"), "{names:?}");
    }
}

/// A kept overlay has its index in memory, and zeroes space where none can be reserved.
#[test]
fn an_overlay_is_kept_also_on_a_file_system_that_maps_no_files() {
    for reserves_space in [true, false] {
        let dir = directory();
        let path = |name: &str| at(&dir, name);
        let (base, keep, socket, pieces, out) = (path("base"), path("keep"), path("s"), path("pieces"), path("out"));
        std::fs::create_dir(&keep).unwrap();
        let Some(place) = testkit::UnmappableDirectory::mount(&keep, reserves_space) else {
            assert!(std::env::var_os("RINGDISK_REQUIRE_ALL").is_none(), "nothing can be mounted here, and this is CI");
            testkit::skipped("nothing can be mounted here");
            return;
        };
        let mut contents = numbered(SIZE);
        std::fs::write(&base, &contents).unwrap();
        let (file, kept, on) = (base.display(), keep.display(), socket.display());
        let drive = format!("name=one,file={file},format=raw,snapshot=on,keep={kept},queues=1,socket={on}");
        // The second daemon goes on with what the first has left, and writes over it.
        for (round, length) in [(1u8, 5 << 20), (2, 3 << 16)] {
            let server = Server::start(&["--drive", &drive]);
            std::fs::write(&pieces, vec![round; length]).unwrap();
            write(&socket, &pieces);
            contents[..length].fill(round);
            let source = format!("if=vhost-user:{}", socket.display());
            run_ok(&["dd", "-f", "raw", "-O", "raw", "bs=64K", &source, &format!("of={}", out.display())]);
            assert!(std::fs::read(&out).unwrap() == contents, "reserves {reserves_space}, round {round}");
            server.kill();
        }
        assert_eq!(place.names(), 2, "reserves {reserves_space}");
        let index = keep.join("one.scratch");
        run_ok(&["commit", "--allow-backing", "any", path_str(&index)]);
        assert!(std::fs::read(&base).unwrap() == contents, "reserves {reserves_space}");
    }
}
