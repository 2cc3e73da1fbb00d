//! Manual pages and completions, made from the command line's definition.

mod common;

use common::{at, directory, path_str, run_ok, tool};

#[test]
fn every_command_has_a_manual_page_and_is_completed() {
    let dir = directory();
    run_ok(&["generate", path_str(&at(&dir, "out"))]);
    let read = |name: &str| {
        std::fs::read_to_string(at(&dir, "out").join(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
    };
    let help = run_ok(&["--help"]);
    let commands = help.lines().skip_while(|line| *line != "Commands:").skip(1).take_while(|line| !line.is_empty());
    let names = commands.filter_map(|line| line.strip_prefix("  ")?.split(' ').next());
    let commands: Vec<&str> = names.filter(|name| !name.is_empty()).collect();
    assert!(commands.contains(&"serve") && commands.contains(&"img-compat"), "{help}");
    assert!(!commands.contains(&"generate"), "it is for packages: {help}");
    let completions = ["completions/ringdisk.bash", "completions/_ringdisk", "completions/ringdisk.fish"].map(read);
    for command in commands.iter().filter(|command| **command != "help") {
        let page = read(&format!("man/ringdisk-{command}.1"));
        assert!(page.contains(".TH ") && page.contains(".SH OPTIONS"), "{command}: {page}");
        assert!(completions.iter().all(|completion| completion.contains(command)), "{command}");
    }
    let serve = read("man/ringdisk-serve.1").replace('\\', "");
    for option in ["--drive", "--pidfile", "--allow-backing"] {
        assert!(serve.contains(option), "{option} is not in: {serve}");
    }
    assert!(!at(&dir, "out").join("man/ringdisk-generate.1").exists());
    let pages = std::fs::read_dir(at(&dir, "out").join("man")).unwrap();
    let names: Vec<String> = pages.map(|page| page.unwrap().file_name().into_string().unwrap()).collect();
    assert!(names.iter().all(|name| !name.contains("help")), "{names:?}");
    let script = at(&dir, "out").join("completions/ringdisk.bash");
    let checked = tool("bash", &["-n", path_str(&script)]);
    assert!(checked.status.success(), "{checked:?}");
}
