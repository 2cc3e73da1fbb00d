//! Names of backing files that are no text: written as they are, and followed, as with qemu-img.

mod common;

use common::{at, directory, has_tool, ringdisk, run_ok, text};
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::{Command, Output};

const NAME: &[u8] = b"b\xff\xc3se.raw";
const BASE_BYTES: usize = 1 << 20;

fn base() -> &'static OsStr {
    OsStr::from_bytes(NAME)
}

fn succeed(command: &mut Command, arguments: &[&OsStr]) -> Output {
    let output = command.args(arguments).output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", text(&output.stderr));
    output
}

/// The words, in which `BASE` is the name.
fn words(line: &str) -> Vec<OsString> {
    let word = |word: &str| match word.strip_suffix("BASE") {
        None => OsString::from(word),
        Some(before) => {
            let mut word = OsString::from(before);
            word.push(base());
            word
        }
    };
    line.split(' ').map(word).collect()
}

/// Where the header says that the name is, and what lies there.
fn recorded(image: &Path) -> Vec<u8> {
    let bytes = std::fs::read(image).unwrap();
    let offset = u64::from_be_bytes(bytes[8..16].try_into().unwrap()) as usize;
    let length = u32::from_be_bytes(bytes[16..20].try_into().unwrap()) as usize;
    bytes[offset..offset + length].to_vec()
}

#[test]
fn a_backing_name_that_is_no_text_is_written_as_it_is_and_followed() {
    let dir = directory();
    std::fs::write(dir.path().join(base()), vec![7; BASE_BYTES]).unwrap();
    std::fs::write(at(&dir, "other.raw"), vec![7; BASE_BYTES]).unwrap();
    let lines = [
        "create -q -f qcow2 -F raw -b BASE new.qcow2",
        "create -q -f qcow2 -o backing_fmt=raw,backing_file=BASE new.qcow2",
        "create -q -f qcow2 -u -F raw -b BASE new.qcow2 1M",
        "convert -O qcow2 -F raw -B BASE other.raw new.qcow2",
        "rebase -f qcow2 -F raw -b BASE rebased.qcow2",
        "rebase -f qcow2 -u -F raw -b BASE rebased.qcow2",
    ];
    let programs: &[&str] = if has_tool("qemu-img") { &["ringdisk", "qemu-img"] } else { &["ringdisk"] };
    for line in lines {
        for program in programs {
            let (new, rebased) = (at(&dir, "new.qcow2"), at(&dir, "rebased.qcow2"));
            let _ = std::fs::remove_file(&new);
            let overlay = ["create", "-q", "-f", "qcow2", "-F", "raw", "-b", "other.raw", rebased.to_str().unwrap()];
            run_ok(&overlay);
            let mut command = if *program == "ringdisk" { ringdisk() } else { Command::new(program) };
            let words = words(line);
            let words: Vec<&OsStr> = words.iter().map(OsString::as_os_str).collect();
            succeed(command.current_dir(&dir), &words);
            let image = if line.starts_with("rebase") { rebased } else { new };
            assert_eq!(recorded(&image), NAME, "{program} {line}");
            let same = run_ok(&["compare", at(&dir, "other.raw").to_str().unwrap(), image.to_str().unwrap()]);
            assert_eq!(same, "Images are identical.\n", "{program} {line}");
        }
    }
}

#[test]
fn a_name_that_is_no_text_is_shown_with_its_bytes_and_refused_where_only_text_can_be() {
    let dir = directory();
    std::fs::write(dir.path().join(base()), vec![7; BASE_BYTES]).unwrap();
    let mut file = OsString::from("file:");
    file.push(base());
    let mut create = ringdisk();
    let arguments = ["create", "-f", "qcow2", "-F", "raw", "-b"].map(OsStr::new);
    let said = succeed(create.current_dir(&dir), &[&arguments[..], &[&file, OsStr::new("new.qcow2")]].concat());
    assert!(text(&said.stdout).contains("backing_file=file:b\\xff\\xc3se.raw"), "{}", text(&said.stdout));
    assert_eq!(recorded(&at(&dir, "new.qcow2")), file.as_bytes());
    let mut option = OsString::from("backing_fmt=");
    option.push(base());
    let arguments = ["create", "-f", "qcow2", "-o"].map(OsStr::new).to_vec();
    let arguments = [arguments, vec![&option, OsStr::new("d.qcow2"), OsStr::new("1M")]].concat();
    let output = ringdisk().current_dir(&dir).args(arguments).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    let said = text(&output.stderr);
    assert!(said.contains("backing_fmt=b\\xff\\xc3se.raw: takes text"), "{said}");
}

/// The data file's name as the image at `path` has it: the extension's bytes.
fn recorded_data_file(path: &Path) -> Vec<u8> {
    let bytes = std::fs::read(path).unwrap();
    let number = |at: usize| u32::from_be_bytes(bytes[at..at + 4].try_into().unwrap());
    let mut at = number(100) as usize;
    while number(at) != 0 {
        let length = number(at + 4) as usize;
        if number(at) == 0x4441_5441 {
            return bytes[at + 8..at + 8 + length].to_vec();
        }
        at += 8 + length.next_multiple_of(8);
    }
    panic!("no data file is named");
}

#[test]
fn a_data_file_whose_name_is_no_text_is_opened_shown_and_kept_by_edits() {
    let programs: &[&str] = if has_tool("qemu-img") { &["ringdisk", "qemu-img"] } else { &["ringdisk"] };
    for program in programs {
        let dir = directory();
        let image = at(&dir, "new.qcow2");
        let mut command = if *program == "ringdisk" { ringdisk() } else { Command::new(program) };
        let line = words("create -q -f qcow2 -o data_file=BASE new.qcow2 1M");
        let line: Vec<&OsStr> = line.iter().map(OsString::as_os_str).collect();
        succeed(command.current_dir(&dir), &line);
        assert_eq!(recorded_data_file(&image), NAME, "{program}");
        std::fs::write(at(&dir, "other.raw"), vec![7; BASE_BYTES]).unwrap();
        let image = image.to_str().unwrap();
        let fill = ["convert", "-n", "-O", "qcow2", at(&dir, "other.raw").to_str().unwrap(), image].map(str::to_owned);
        run_ok(&fill.each_ref().map(String::as_str));
        assert!(dir.path().join(base()).exists());
        for edit in [
            &["info"][..],
            &["bitmap", "--add"],
            &["amend", "-f", "qcow2", "-o", "lazy_refcounts=on"],
            &["rebase", "-u", "-f", "qcow2", "-b", ""],
            &["resize", "-f", "qcow2"],
            &["check"],
        ] {
            let more = match edit[0] {
                "bitmap" => vec![image, "b"],
                "resize" => vec![image, "2M"],
                _ => vec![image],
            };
            run_ok(&[edit, &more].concat());
            assert_eq!(recorded_data_file(Path::new(image)), NAME, "{program} {edit:?}");
        }
        let shown = run_ok(&["info", image]);
        assert!(shown.contains("data file: b\\xff\\xc3se.raw\n"), "{shown}");
        let shown = run_ok(&["info", "--output", "json", image]);
        assert!(shown.contains("\"data-file\": \"b\\\\xff\\\\xc3se.raw\""), "{shown}");
        run_ok(&["resize", "-f", "qcow2", "--shrink", image, "1M"]);
        let same = run_ok(&["compare", at(&dir, "other.raw").to_str().unwrap(), image]);
        assert_eq!(same, "Images are identical.\n", "{program}");
    }
}
