//! What Ctrl-C leaves of a save, a restore and an extracted state, and what a restore by hand does to what was saved.

use super::bench::{Bench, end_machines, signal_at};
use super::common::{self, at, directory, path_str, ringdisk, run, run_ok, text};
use super::{Ending, has_tools, is_running};
use serde_json::{Value, json};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// As its user does: pastes what is printed into a shell.
#[test]
fn what_a_restore_prints_resumes_the_machine_and_leaves_what_was_saved_as_it_is() {
    if !has_tools() {
        return;
    }
    let mut bench = Bench::new("qcow2");
    bench.start_machine();
    for number in 1..=2 {
        bench.write(number as usize);
        bench.save(number == 1, number);
    }
    let then = bench.contents.clone();
    bench.write(8);
    for round in 1..=2 {
        bench.lose_machine();
        let printed = run_ok(&["restore", path_str(&bench.path("vm.toml"))]);
        let lines = printed.split_once("# Resume it").map(|(_, lines)| format!("#{lines}")).unwrap();
        bench.machine = Some(Command::new("sh").args(["-c", &lines]).stdin(Stdio::null()).spawn().unwrap());
        let mut qmp = bench.qmp();
        let begun = Instant::now();
        while qmp.status().unwrap() == "inmigrate" {
            assert!(begun.elapsed() < common::PATIENCE, "it does not take its state");
            std::thread::sleep(Duration::from_millis(20));
        }
        qmp.run("cont", json!({})).unwrap();
        assert!(qmp.is_running().unwrap());
        drop(qmp);
        bench.export();
        bench.contents.clone_from(&then);
        bench.write(9 + round);
        assert_eq!(bench.check_pair(), Some(2), "what was saved was written to");
    }
    // What the first of the two wrote is of no use any more, and lies there until somebody removes it.
    bench.lose_machine();
    let output = run(&["restore", "--serve", path_str(&bench.path("vm.toml"))]);
    let said = text(&output.stderr);
    assert!(output.status.success() && said.contains("/disk.restored-2' has what the machine wrote"), "{said}");
    assert!(text(&output.stdout).contains("-incoming"), "{}", text(&output.stdout));
    assert_eq!(bench.check_pair(), Some(2));
}

#[test]
fn a_save_that_is_interrupted_lets_the_machine_go_on_and_the_next_one_finishes() {
    if !has_tools() {
        return;
    }
    let mut bench = Bench::new("qcow2");
    bench.start_machine();
    bench.write(1);
    bench.save(false, 1);
    for (index, step) in ["stop", "state", "freeze", "publish", "commit", "resume"].into_iter().enumerate() {
        bench.write(3 + index);
        let before = bench.check_pair().unwrap();
        bench.saved.insert(before + 1, bench.contents.clone());
        let (status, said) = signal_at(bench.save_command(false), step, "INT");
        assert!(bench.qmp().is_running().unwrap(), "{step}: {status} {said}");
        let after = bench.check_pair().unwrap();
        assert!(after == before || after == before + 1, "{step}: {before}, then {after}");
        assert!(!status.success() || after == before + 1, "{step}");
        assert!(!bench.path("saved/saving.json").exists(), "{step}: the save came to its end");
        bench.save(false, after + 1);
    }
    let states = std::fs::read_dir(bench.path("saved")).unwrap().map(|entry| entry.unwrap().file_name());
    assert_eq!(states.filter(|name| name.to_string_lossy().starts_with("state-")).count(), 1);
}

#[test]
fn a_restore_that_is_interrupted_leaves_the_pair_and_the_same_command_resumes_it() {
    if !has_tools() {
        return;
    }
    let mut bench = Bench::new("qcow2");
    bench.start_machine();
    bench.write(1);
    bench.save(false, 1);
    let then = bench.contents.clone();
    bench.write(2);
    bench.lose_machine();
    for step in ["look", "serve", "start", "state", "resume"] {
        let (_, said) = signal_at(bench.restore_command(&[]), step, "INT");
        // It has ended what it has started.
        assert!(!is_running(&bench.path("qmp")), "{step}: {said}");
        let _ = std::fs::remove_file(bench.path("qmp"));
        assert_eq!(bench.check_pair(), Some(1), "{step}");
    }
    bench.restore(&[]);
    bench.contents = then;
    assert_eq!(bench.check_pair(), Some(1));
    // Who interrupts it later ends the machine.
    let restore = bench.machine.as_mut().unwrap();
    common::tool_ok("kill", &["-INT", &restore.id().to_string()]);
    restore.wait().unwrap();
    assert!(!is_running(&bench.path("qmp")));
    end_machines(&bench.path("qmp"));
}

#[test]
fn a_save_says_how_long_it_took_and_its_progress_rises_to_its_total() {
    if !has_tools() {
        return;
    }
    let mut bench = Bench::new("raw");
    bench.start_machine();
    for keep in [true, false] {
        bench.write(4);
        let output = bench.save_command(keep).args(["--output=json", "--progress=json"]).output().unwrap();
        let (answer, said) = (text(&output.stdout), text(&output.stderr));
        assert!(output.status.success(), "{said}");
        let answer: Value = serde_json::from_str(&answer).unwrap();
        let seconds = |name: &str| answer[name].as_f64().unwrap();
        assert!(seconds("paused-seconds") > 0.0 && seconds("paused-seconds") <= seconds("total-seconds"), "{answer}");
        assert!(answer["state-bytes"].as_u64().unwrap() > 0 && answer["number"].is_u64(), "{answer}");
        let lines: Vec<Value> = said.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let figure = |line: &Value, name: &str| line[name].as_u64().unwrap();
        let done: Vec<u64> = lines.iter().map(|line| figure(line, "done-bytes")).collect();
        let total: Vec<u64> = lines.iter().map(|line| figure(line, "total-bytes")).collect();
        assert!(done.is_sorted() && total.is_sorted(), "{said}");
        assert!(done.last() == total.last() && done.last().is_some_and(|bytes| *bytes > 0), "{said}");
    }
    let output = bench.save_command(true).output().unwrap();
    assert!(text(&output.stdout).contains(" s of "), "{}", text(&output.stdout));
}

#[test]
fn an_extracted_state_has_its_name_when_it_is_whole_and_goes_nowhere_if_it_is_damaged() {
    let dir = directory();
    let [state, out] = ["state", "out"].map(|name| at(&dir, name));
    let stream: Vec<u8> = (0..48_000_000u32).map(|index| (index / 5) as u8).collect();
    save::StateFile::write(&state, &mut stream.as_slice(), &mut |_| Ok(())).unwrap();
    let names = || {
        let mut names: Vec<_> =
            std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        names
    };
    for moment in 0..8 {
        let mut command = ringdisk();
        command.args(["state", "extract", path_str(&state), path_str(&out)]).stderr(Stdio::null());
        let mut child = Ending(command.spawn().unwrap());
        std::thread::sleep(Duration::from_millis(4 * moment));
        let _ = Command::new("kill").args(["-INT", &child.0.id().to_string()]).output();
        let status = child.0.wait().unwrap();
        if status.success() {
            assert!(std::fs::read(&out).unwrap() == stream);
            std::fs::remove_file(&out).unwrap();
        }
        assert_eq!(names(), ["state"], "{status}");
    }
    run_ok(&["state", "extract", path_str(&state), path_str(&out)]);
    assert!(std::fs::read(&out).unwrap() == stream);
    std::fs::remove_file(&out).unwrap();

    let mut damaged = std::fs::read(&state).unwrap();
    damaged[47_000_000] ^= 1;
    std::fs::write(&state, damaged).unwrap();
    for target in [path_str(&out), "-"] {
        let output = run(&["state", "extract", path_str(&state), target]);
        assert!(!output.status.success() && text(&output.stderr).contains("checksum"), "{}", text(&output.stderr));
        assert!(output.stdout.is_empty(), "{} bytes of a damaged state went out", output.stdout.len());
        assert_eq!(names(), ["state"]);
    }
}

/// Saves into a directory that has less and less room: what was saved last stays whole, and the machine goes on.
#[test]
fn a_full_directory_leaves_what_was_saved_before_and_the_machine_goes_on() {
    if !has_tools() {
        return;
    }
    let mut bench = Bench::new("qcow2");
    bench.start_machine();
    std::fs::create_dir(bench.path("saved")).unwrap();
    let script = r#"
        set -e
        mount -t tmpfs -o size=64m none "$2"
        "$0" save "$1"
        for free in 0 4 8 40 400 2000 4000 6000 8000 20000; do
            rm -f "$2/fill" "$2/spare"
            truncate -s 0 "$2/spare"
            [ $free = 0 ] || fallocate -l ${free}K "$2/spare"
            { cat /dev/zero > "$2/fill"; } 2> /dev/null || true
            rm "$2/spare"
            if "$0" save "$1"; then echo "ended well"; else echo "ended badly"; fi
            "$0" restore "$1"
        done
    "#;
    let (program, vm, saved) = (ringdisk(), bench.path("vm.toml"), bench.path("saved"));
    let run_in = |how: &str, script: &str| {
        let mut command = Command::new("unshare");
        command.args([how, "sh", "-c", script]).arg(program.get_program()).arg(&vm).arg(&saved);
        command.output().unwrap()
    };
    let may = |how: &&str| run_in(how, "mount -t tmpfs none \"$2\"").status.success();
    let Some(how) = ["-m", "-rm"].into_iter().find(may) else {
        assert!(std::env::var_os("RINGDISK_REQUIRE_ALL").is_none(), "nothing can be mounted here, and this is CI");
        testkit::skipped("nothing can be mounted here");
        return;
    };
    let output = run_in(how, script);
    let (printed, said) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{printed}{said}");
    assert_eq!(printed.matches(" is whole.").count(), 10, "{printed}{said}");
    for ended in ["ended well", "ended badly"] {
        assert!(printed.contains(ended), "{printed}{said}");
    }
    assert!(said.contains("No space left"), "{said}");
    assert!(bench.qmp().is_running().unwrap());
}
