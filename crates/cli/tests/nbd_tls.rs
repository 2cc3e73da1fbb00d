//! NBD with TLS, both ways, against other people's programs.

mod common;

use common::{Server, directory, has_tool, path_str, ringdisk, run, run_fails, run_ok, text, tool, tool_ok};
use rcgen::{BasicConstraints, CertificateParams, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose};
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

/// An authority, a server called localhost, and a client, as QEMU lays them out.
fn certificates(directory: &Path) {
    let write = |name: &str, text: String| std::fs::write(directory.join(name), text).unwrap();
    let key = KeyPair::generate().unwrap();
    let mut authority = CertificateParams::new(Vec::new()).unwrap();
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    authority.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    write("ca-cert.pem", authority.self_signed(&key).unwrap().pem());
    let issuer = Issuer::new(authority, key);
    for (role, usage) in
        [("server", ExtendedKeyUsagePurpose::ServerAuth), ("client", ExtendedKeyUsagePurpose::ClientAuth)]
    {
        let own = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature, KeyUsagePurpose::KeyEncipherment];
        params.extended_key_usages = vec![usage];
        write(&format!("{role}-cert.pem"), params.signed_by(&own, &issuer).unwrap().pem());
        write(&format!("{role}-key.pem"), own.serialize_pem());
    }
}

fn serve(raw: &str, socket: &str, more: &[&str]) -> Server {
    let mut command = ringdisk();
    let drive = format!("file={raw},format=raw,name=d");
    command.args(["nbd", "--socket", socket, "--drive", &drive]).args(more);
    Server::start_command(command)
}

#[test]
fn other_programs_and_our_own_use_a_disk_under_tls() {
    if !["nbdinfo", "nbdcopy", "qemu-img"].into_iter().all(has_tool) {
        return;
    }
    let directory = directory();
    let path = |name: &str| path_str(&directory.path().join(name)).to_owned();
    let (raw, socket, creds) = (path("disk.raw"), path("nbd"), path("pki"));
    std::fs::create_dir(&creds).unwrap();
    certificates(Path::new(&creds));
    let bytes = common::numbered(9 << 20);
    std::fs::write(&raw, &bytes).unwrap();
    let server = serve(&raw, &socket, &["--tls-creds", &creds]);
    assert!(server.announced.contains("nbds+unix:///d"), "{}", server.announced);
    let plain = format!("nbd+unix:///d?socket={socket}");
    let secret = format!("nbds+unix:///d?socket={socket}&tls-certificates={creds}");
    // Libnbd takes the name of a Unix socket's server from here.
    let theirs = format!("{secret}&tls-hostname=localhost");
    assert!(text(&run(&["info", "-f", "raw", &plain]).stderr).contains("with TLS only"));
    assert!(!tool("nbdinfo", &[&plain]).status.success());
    assert!(tool_ok("nbdinfo", &[&theirs]).contains("with TLS"));
    let copy = path("copy.raw");
    tool_ok("nbdcopy", &[&theirs, &copy]);
    assert!(std::fs::read(&copy).unwrap() == bytes);
    let same = path("same.raw");
    std::fs::write(&same, &bytes).unwrap();
    run_ok(&["compare", "-f", "raw", "-F", "raw", &secret, &same]);
    let object = format!("tls-creds-x509,id=tls,endpoint=client,dir={creds}");
    let options = format!(
        "driver=raw,file.driver=nbd,file.server.type=unix,file.server.path={socket},file.export=d,\
         file.tls-creds=tls,file.tls-hostname=localhost"
    );
    let back = path("back.raw");
    tool_ok("qemu-img", &["convert", "--object", &object, "--image-opts", &options, "-O", "raw", &back]);
    assert!(std::fs::read(&back).unwrap() == bytes);
    // Written under TLS, too.
    let other = path("other.raw");
    std::fs::write(&other, [&bytes[4096..], &bytes[..4096]].concat()).unwrap();
    run_ok(&["convert", "-n", "-f", "raw", "-O", "raw", &other, &secret]);
    server.stop();
    run_ok(&["compare", "-f", "raw", "-F", "raw", &other, &raw]);
}

#[test]
fn a_daemons_export_is_for_clients_with_tls_and_a_certificate_also_after_a_kill() {
    if !["nbdinfo", "nbdcopy", "qemu-img"].into_iter().all(has_tool) {
        return;
    }
    let directory = directory();
    let path = |name: &str| path_str(&directory.path().join(name)).to_owned();
    let (raw, copy, other, back) = (path("disk.raw"), path("copy.raw"), path("other.raw"), path("back.raw"));
    let (control, state, creds, mine) = (path("control"), path("state"), path("pki"), path("mine"));
    for directory in [&creds, &mine] {
        std::fs::create_dir(directory).unwrap();
    }
    certificates(Path::new(&creds));
    std::fs::copy(format!("{creds}/ca-cert.pem"), format!("{mine}/ca-cert.pem")).unwrap();
    let mut bytes = common::numbered(5 << 20);
    std::fs::write(&raw, &bytes).unwrap();
    let port = {
        let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        free.local_addr().unwrap().port()
    };
    let drive = format!("file={raw},format=raw,name=d");
    let start = || Server::start(&["--control", &control, "--state-dir", &state, "--drive", &drive]);
    let mut server = start();
    let address = format!("127.0.0.1:{port}");
    run_ok(&["ctl", "--control", &control, "export", "d", "--nbd", &address, "--tls-creds", &creds]);
    let (plain, secret) = (format!("nbd://localhost:{port}/d"), format!("nbds://localhost:{port}/d"));
    let (ours, nobody) = (format!("{secret}?tls-certificates={creds}"), format!("{secret}?tls-certificates={mine}"));
    let object = format!("tls-creds-x509,id=tls,endpoint=client,dir={creds}");
    let options = format!(
        "driver=raw,file.driver=nbd,file.server.type=inet,file.server.host=localhost,file.server.port={port},\
         file.export=d,file.tls-creds=tls"
    );
    for round in 0..2_u8 {
        for uri in [&plain, &nobody] {
            assert!(!tool("nbdinfo", &[uri]).status.success(), "{uri}");
            assert!(!tool("nbdcopy", &[uri, &copy]).status.success(), "{uri}");
        }
        assert!(!tool("qemu-img", &["info", &plain]).status.success());
        assert!(tool_ok("nbdinfo", &[&ours]).contains("with TLS"));
        tool_ok("nbdcopy", &[&ours, &copy]);
        assert!(std::fs::read(&copy).unwrap() == bytes);
        tool_ok("qemu-img", &["convert", "--object", &object, "--image-opts", &options, "-O", "raw", &back]);
        assert!(std::fs::read(&back).unwrap() == bytes);
        bytes.rotate_left(4096 + usize::from(round));
        std::fs::write(&other, &bytes).unwrap();
        let put = ["convert", "-n", "--object", &object, "-f", "raw", "--target-image-opts", &other, &options];
        tool_ok("qemu-img", &put);
        run_ok(&["compare", "-f", "raw", "-F", "raw", &ours, &other]);
        // What it was asked for while it ran is in the state directory.
        server.kill();
        server = start();
    }
    server.stop();
}

#[test]
fn who_has_no_certificate_is_refused_unless_the_server_does_not_ask_for_one() {
    let directory = directory();
    let path = |name: &str| path_str(&directory.path().join(name)).to_owned();
    let (raw, socket, creds, mine) = (path("disk.raw"), path("nbd"), path("pki"), path("mine"));
    let other = path("other");
    for directory in [&creds, &mine, &other] {
        std::fs::create_dir(directory).unwrap();
    }
    certificates(Path::new(&creds));
    std::fs::copy(format!("{creds}/ca-cert.pem"), format!("{mine}/ca-cert.pem")).unwrap();
    run_ok(&["create", "-q", "-f", "raw", &raw, "1M"]);
    let nobody = format!("nbds+unix:///d?socket={socket}&tls-certificates={mine}");
    let stranger = format!("{nobody}&tls-hostname=example.org");
    let server = serve(&raw, &socket, &["--tls-creds", &creds]);
    // Once, in words, and with what to do.
    let said = run_fails(1, &["info", "-f", "raw", &nobody]);
    assert!(said.contains("wants a certificate: put client-cert.pem") && said.lines().count() == 1, "{said}");
    let said = run_fails(1, &["info", "-f", "raw", &format!("nbd+unix:///d?socket={socket}")]);
    assert!(said.contains("with TLS only: name it as nbds://") && said.matches("TLS only").count() == 1, "{said}");
    server.stop();
    let server = serve(&raw, &socket, &["--tls-creds", &creds, "--tls-verify-peer", "off", "--tls", "allow"]);
    run_ok(&["info", "-f", "raw", &nobody]);
    let said = run_fails(1, &["info", "-f", "raw", &stranger]);
    assert!(said.contains("certificate"), "{said}");
    certificates(Path::new(&other));
    let said = run_fails(1, &["info", "-f", "raw", &nobody.replace(&mine, &other)]);
    assert!(said.contains("not of the authority in ca-cert.pem"), "{said}");
    run_ok(&["info", "-f", "raw", &format!("nbd+unix:///d?socket={socket}")]);
    let said = run_fails(1, &["info", "-f", "raw", &format!("nbd+unix:///other?socket={socket}")]);
    assert!(said.trim_end().ends_with("no such export (nbdinfo --list shows what it has)"), "{said}");
    server.stop();
    assert!(run_fails(2, &["nbd", &raw, "--socket", &socket, "--tls-creds", &mine]).contains("server-key.pem"));
}

#[test]
fn who_shares_a_key_uses_a_disk_of_either_server() {
    if !["nbdinfo", "nbdcopy"].into_iter().all(has_tool) {
        return;
    }
    let directory = directory();
    let path = |name: &str| path_str(&directory.path().join(name)).to_owned();
    let (raw, copy, control) = (path("disk.raw"), path("copy.raw"), path("control"));
    let (creds, other) = (path("keys"), path("other.psk"));
    std::fs::create_dir(&creds).unwrap();
    let keys = format!("{creds}/keys.psk");
    std::fs::write(&keys, "alice:00112233445566778899aabbccddeeff\n").unwrap();
    std::fs::write(&other, "alice:00112233445566778899aabbccddee00\n").unwrap();
    std::fs::write(&raw, common::numbered(5 << 20)).unwrap();
    let check = |socket: &str| {
        let uri = |keys: &str| format!("nbds+unix://alice@/d?socket={socket}&tls-psk-file={keys}");
        assert!(tool_ok("nbdinfo", &[&uri(&keys)]).contains("with TLS"));
        tool_ok("nbdcopy", &[&uri(&keys), &copy]);
        run_ok(&["compare", "-f", "raw", "-F", "raw", &uri(&keys), &copy]);
        assert!(std::fs::read(&copy).unwrap() == std::fs::read(&raw).unwrap());
        assert!(!tool("nbdinfo", &[&uri(&other)]).status.success());
        let said = run_fails(1, &["info", "-f", "raw", &uri(&other)]);
        assert!(said.contains("the shared keys do not match"), "{said}");
        run_fails(1, &["info", "-f", "raw", &format!("nbd+unix:///d?socket={socket}")]);
    };
    let (alone, serves, added) = (path("alone"), path("serves"), path("added"));
    let server = serve(&raw, &alone, &["--tls-creds", &creds]);
    check(&alone);
    server.stop();
    let drive = format!("file={raw},format=raw,name=d,socket={}", path("vm"));
    let all = ["--control", &control, "--drive", &drive, "--nbd", &serves, "--nbd-tls-creds", &creds];
    let daemon = Server::start(&all);
    run_ok(&["ctl", "--control", &control, "export", "d", "--nbd", &added, "--tls-creds", &creds]);
    [serves, added].iter().for_each(|socket| check(socket));
    daemon.stop();
}

#[test]
fn a_disk_of_qemus_server_is_read_under_tls() {
    if !has_tool("qemu-nbd") {
        return;
    }
    let directory = directory();
    let path = |name: &str| path_str(&directory.path().join(name)).to_owned();
    let (raw, socket, creds) = (path("disk.raw"), path("nbd"), path("pki"));
    std::fs::create_dir(&creds).unwrap();
    certificates(Path::new(&creds));
    std::fs::write(&raw, common::numbered(1 << 20)).unwrap();
    let object = format!("tls-creds-x509,id=tls,endpoint=server,dir={creds}");
    let place = ["-r", "-f", "raw", "-k", &socket, "--object", &object, "--tls-creds", "tls", "--fork", &raw];
    tool_ok("qemu-nbd", &place);
    run_ok(&[
        "compare",
        "-f",
        "raw",
        "-F",
        "raw",
        &format!("nbds+unix:///?socket={socket}&tls-certificates={creds}"),
        &raw,
    ]);
}

#[test]
fn a_guest_goes_on_when_the_server_of_its_disk_under_tls_is_killed_and_comes_back() {
    let directory = directory();
    let path = |name: &str| path_str(&directory.path().join(name)).to_owned();
    let (raw, socket, creds, guest) = (path("disk.raw"), path("nbd"), path("pki"), path("vm.sock"));
    std::fs::create_dir(&creds).unwrap();
    certificates(Path::new(&creds));
    std::fs::File::create(&raw).and_then(|file| file.set_len(16 << 20)).unwrap();
    let mut server = serve(&raw, &socket, &["--tls-creds", &creds]);
    let uri = format!("nbds+unix:///d?tls-certificates={creds}&reconnect-s=60&socket={socket}");
    let daemon = Server::start(&["--drive", &format!("file={uri},format=raw,name=root,socket={guest}")]);
    let mut load = ringdisk();
    load.args(["bench", "--destroy", "--verify", "--rw", "randrw", "--bs", "4k", "--depth", "8"]);
    // Longer than three restarts take on a busy machine.
    load.args(["--time", "30", "--socket", &guest]);
    let mut load = load.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    for _ in 0..3 {
        std::thread::sleep(Duration::from_secs(1));
        if load.try_wait().unwrap().is_some() {
            let output = load.wait_with_output().unwrap();
            panic!("the load has ended already: {}{}", text(&output.stdout), text(&output.stderr));
        }
        server.kill();
        std::fs::remove_file(&socket).unwrap();
        server = serve(&raw, &socket, &["--tls-creds", &creds]);
    }
    let output = load.wait_with_output().unwrap();
    assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
    daemon.stop();
    server.stop();
}
