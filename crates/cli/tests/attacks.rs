//! Published attacks by images, built from bytes: no verb opens a file that its user did not allow.
//!
//! CVE-2015-5163 (a backing file outside), CVE-2024-32498 and CVE-2024-4467 (an external data file, by path or as `json:`).
//! CVE-2008-2004 is in the tests of `image`.

mod common;

use common::{at, directory, path_str, ringdisk, text};
use std::path::Path;
use std::process::{Command, Output, Stdio};

const SECRET: &str = "the host's secret: 4a1f";
const BACKING_FORMAT: u32 = 0xe279_2aca;
const DATA_FILE: u32 = 0x4441_5441;
const DATA_FILE_BIT: u64 = 1 << 2;

/// The bytes of an image of 1 MiB with nothing in it, with these extensions and this backing file.
fn image(incompatible: u64, autoclear: u64, extensions: &[(u32, &[u8])], backing: &str) -> Vec<u8> {
    let mut tail = Vec::new();
    for (kind, data) in extensions.iter().chain(&[(0, &[][..])]) {
        tail.extend(kind.to_be_bytes());
        tail.extend((data.len() as u32).to_be_bytes());
        tail.extend(*data);
        tail.resize(tail.len().next_multiple_of(8), 0);
    }
    let mut bytes = Vec::new();
    bytes.extend(b"QFI\xfb");
    bytes.extend(3u32.to_be_bytes());
    bytes.extend(if backing.is_empty() { 0 } else { 112 + tail.len() as u64 }.to_be_bytes());
    bytes.extend((backing.len() as u32).to_be_bytes());
    bytes.extend(16u32.to_be_bytes());
    bytes.extend((1u64 << 20).to_be_bytes());
    bytes.extend(0u32.to_be_bytes());
    bytes.extend(1u32.to_be_bytes());
    bytes.extend(0x30000u64.to_be_bytes());
    bytes.extend(0x10000u64.to_be_bytes());
    bytes.extend(1u32.to_be_bytes());
    bytes.extend([0; 12]);
    bytes.extend(incompatible.to_be_bytes());
    bytes.extend(0u64.to_be_bytes());
    bytes.extend(autoclear.to_be_bytes());
    bytes.extend(4u32.to_be_bytes());
    bytes.extend(112u32.to_be_bytes());
    bytes.extend([0; 8]);
    bytes.extend(tail);
    bytes.extend(backing.as_bytes());
    bytes.resize(4 << 16, 0);
    bytes[0x10000..0x10008].copy_from_slice(&0x20000u64.to_be_bytes());
    (0..4).for_each(|cluster| bytes[0x20001 + 2 * cluster] = 1);
    bytes
}

fn backed_by(name: &str) -> Vec<u8> {
    image(0, 0, &[(BACKING_FORMAT, b"raw")], name)
}

/// Runs the program. A program that opens a named pipe hangs, and is killed.
fn run(arguments: &[&str]) -> Output {
    let mut command = Command::new("timeout");
    command.args(["-s", "KILL", "60"]).arg(ringdisk().get_program()).args(arguments);
    let output = command.stdin(Stdio::null()).output().unwrap();
    assert!(output.status.code().is_some_and(|code| code < 100), "{arguments:?} hung or died: {output:?}");
    assert!(!text(&output.stdout).contains(SECRET) && !text(&output.stderr).contains(SECRET), "{output:?}");
    output
}

/// Every verb that reads what the guest sees refuses, and leaves no trace of the secret.
fn assert_refused(image: &Path, policy: &str, what: &str) {
    let (name, copy) = (path_str(image), image.with_extension("copy"));
    let other = image.with_extension("other");
    std::fs::write(&other, vec![0; 1 << 20]).unwrap();
    let verbs: [&[&str]; 5] = [
        &["convert", "-f", "qcow2", "-O", "raw", name, path_str(&copy)],
        &["compare", "-f", "qcow2", "-F", "raw", name, path_str(&other)],
        &["map", "-f", "qcow2", name],
        &["measure", "-f", "qcow2", "-O", "raw", name],
        &["serve", "--drive", &format!("file={name},format=qcow2,readonly=on")],
    ];
    for verb in verbs {
        let policy = format!("--allow-backing={policy}");
        let output = run(&[&verb[..1], &[policy.as_str()], &verb[1..]].concat());
        assert!(!output.status.success(), "{what}: {} went on: {output:?}", verb[0]);
        assert!(!copy.exists(), "{what}: a copy was made");
    }
}

/// No policy makes a verb open the named pipe behind the image: a program that did would hang.
fn assert_never_opened(image: &Path, name: &str) {
    assert!(run(&["info", path_str(image)]).status.success());
    assert!(run(&["check", path_str(image)]).status.success());
    for (policy, reason) in [("any", "regular file"), ("listed", "policy"), ("deny", "policy")] {
        let allow = format!("--allow-backing={policy}");
        let chain = run(&["info", "--backing-chain", &allow, path_str(image)]);
        assert!(!chain.status.success() && text(&chain.stderr).contains(reason), "{name}: {chain:?}");
        assert_refused(image, policy, name);
    }
}

#[test]
fn backing_files_are_opened_only_where_the_policy_allows_it() {
    let (dir, outside) = (directory(), directory());
    let secret = at(&outside, "secret");
    let mut bytes = SECRET.as_bytes().to_vec();
    bytes.resize(1 << 20, 0);
    std::fs::write(&secret, &bytes).unwrap();
    std::fs::write(at(&dir, "near"), &bytes).unwrap();
    std::os::unix::fs::symlink(&secret, at(&dir, "link")).unwrap();
    let image = at(&dir, "image.qcow2");
    let convert = |policy: &str| {
        let copy = at(&dir, "copy.raw");
        let policy = format!("--allow-backing={policy}");
        let output = run(&["convert", &policy, "-f", "qcow2", "-O", "raw", path_str(&image), path_str(&copy)]);
        let copied = std::fs::read(&copy).is_ok_and(|copy| copy.starts_with(SECRET.as_bytes()));
        drop(std::fs::remove_file(copy));
        assert_eq!(output.status.success(), copied, "{output:?}");
        copied
    };
    let with_protocol = [format!("file:{}", secret.display()), format!("host_device:{}", secret.display())];
    let near_with_protocol = format!("file:{}", at(&dir, "near").display());
    let up = format!("../{}/secret", outside.path().file_name().unwrap().to_str().unwrap());
    let [plain, device] = &with_protocol;
    let names = [
        (path_str(&secret), false),
        (&up, false),
        ("link", false),
        (plain, false),
        (device, false),
        ("near", true),
        ("./near", true),
        (&near_with_protocol, true),
    ];
    for (name, near) in names {
        std::fs::write(&image, backed_by(name)).unwrap();
        let said = run(&["info", path_str(&image)]);
        assert!(said.status.success() && text(&said.stdout).contains(name), "info tells the name and opens nothing");
        let chain = |policy: &str| run(&["info", "--backing-chain", "--allow-backing", policy, path_str(&image)]);
        assert_eq!(chain("same-dir").status.success(), near, "{name}");
        assert!(chain("any").status.success() && !chain("deny").status.success(), "{name}");
        assert!(convert("any"), "{name}: what is refused below could be read");
        for policy in ["deny", "listed"] {
            assert_refused(&image, policy, name);
        }
        if near {
            assert!(convert("same-dir"), "{name}");
        } else {
            assert_refused(&image, "same-dir", name);
        }
    }
}

#[test]
fn names_of_servers_and_json_names_are_not_followed_where_any_file_is_and_info_opens_no_file_but_the_named_one() {
    let dir = directory();
    let (image, pipe) = (at(&dir, "image.qcow2"), at(&dir, "pipe"));
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let pipe = path_str(&pipe);
    let json = format!("json:{{\"driver\":\"raw\",\"file\":{{\"driver\":\"file\",\"filename\":\"{pipe}\"}}}}");
    let at_server = |description: &str| format!("json:{{\"driver\":\"raw\",\"file\":{{{description}}}}}");
    let [nbd, web, cluster] = [
        r#""driver":"nbd","server":{"type":"inet","host":"localhost","port":"1"}"#,
        r#""driver":"https","url":"https://localhost/x""#,
        r#""driver":"rbd","pool":"pool","image":"x""#,
    ]
    .map(at_server);
    let protocols = [
        &json,
        &nbd,
        &web,
        &cluster,
        r#"json:{"file.driver":"nbd","file.path":"/run/nbd"}"#,
        "nbd+unix:///x?socket=/run/nbd",
        "nbds://localhost/x?tls-certificates=/x",
        "http://localhost/x",
        "https://localhost/x?y#cache=/x",
        r#"rbd:{"pool":"pool"}"#,
        "nbd://localhost/x",
        "rbd:pool/x:conf=/x",
        "ssh://h/x",
        "fat:rw:/",
        "fd:0",
    ];
    for name in protocols {
        std::fs::write(&image, backed_by(name)).unwrap();
        assert!(run(&["info", path_str(&image)]).status.success(), "{name}");
        let chain = run(&["info", "--backing-chain", "--allow-backing=any", path_str(&image)]);
        assert!(text(&chain.stderr).contains("not followed"), "{name}: {chain:?}");
        assert_refused(&image, "any", name);
    }
    let files = [format!("file:{pipe}"), format!("file://{pipe}")];
    let [file, file_uri] = &files;
    // With and without its protocol it is the same file.
    for name in [pipe, file, file_uri] {
        std::fs::write(&image, backed_by(name)).unwrap();
        assert_never_opened(&image, name);
    }
    for name in protocols.into_iter().chain([pipe, file, file_uri]) {
        for autoclear in [0, 2] {
            let extension = [(DATA_FILE, name.as_bytes())];
            std::fs::write(&image, self::image(DATA_FILE_BIT, autoclear, &extension, "")).unwrap();
            run(&["info", path_str(&image)]);
            run(&["info", "--output=json", path_str(&image)]);
            if name != pipe {
                assert_refused(&image, "any", name);
            }
            assert_refused(&image, "deny", name);
        }
    }
}

/// A guest wrote a target that exists, and also the files that a new target will rest on.
#[test]
fn a_target_and_its_backing_file_are_opened_under_the_policy_too() {
    let (dir, outside) = (directory(), directory());
    let [source, target, new] = ["source.raw", "target.qcow2", "new.qcow2"].map(|name| at(&dir, name));
    let [victim, base] = ["victim", "base.raw"].map(|name| at(&outside, name));
    let mut secret = SECRET.as_bytes().to_vec();
    secret.resize(1 << 20, 0);
    std::fs::write(&source, vec![1; 1 << 20]).unwrap();
    std::fs::write(&base, vec![2; 1 << 20]).unwrap();
    let convert = |policy: &str, into: &[&str]| {
        let head = ["convert", "--allow-backing", policy, "-f", "raw", "-O", "qcow2"];
        run(&[&head[..], into].concat())
    };
    let data_file = [(DATA_FILE, path_str(&victim).as_bytes()), (BACKING_FORMAT, &b"raw"[..])];
    let existing = ["-n", "-B", path_str(&base), "-F", "raw", path_str(&source), path_str(&target)];
    for policy in ["deny", "listed", "same-dir"] {
        std::fs::write(&victim, &secret).unwrap();
        let bytes = image(DATA_FILE_BIT, 0, &data_file, path_str(&base));
        std::fs::write(&target, &bytes).unwrap();
        let output = convert(policy, &existing);
        assert!(!output.status.success(), "{policy}: {output:?}");
        assert!(std::fs::read(&victim).unwrap() == secret && std::fs::read(&target).unwrap() == bytes, "{policy}");
    }
    assert!(convert("any", &existing).status.success() && std::fs::read(&victim).unwrap() != secret);
    // The user named this one.
    std::fs::write(&target, backed_by(path_str(&base))).unwrap();
    let output = convert("same-dir", &existing);
    assert!(output.status.success(), "{output:?}");

    let untrusted = at(&dir, "untrusted.qcow2");
    std::fs::write(&untrusted, backed_by(path_str(&base))).unwrap();
    let over = ["-B", "untrusted.qcow2", "-F", "qcow2", path_str(&source), path_str(&new)];
    for policy in ["deny", "listed", "same-dir"] {
        let output = convert(policy, &over);
        assert!(text(&output.stderr).contains("policy") && !new.exists(), "{policy}: {output:?}");
    }
    assert!(convert("any", &over).status.success() && new.exists());
}
