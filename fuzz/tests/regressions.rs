//! Inputs that once broke something.

use ringdisk_fuzz::Target;
use std::path::Path;

#[test]
fn what_once_broke_something_does_so_no_more() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("regressions");
    let mut inputs = 0;
    for entry in std::fs::read_dir(directory).expect("the inputs are here") {
        let path = entry.expect("an input").path();
        let name = path.file_name().and_then(|name| name.to_str()).expect("a name");
        let target = name.split('-').next().and_then(Target::of_name).expect("a name that begins with its target");
        target.run(&std::fs::read(&path).expect("an input"));
        inputs += 1;
    }
    assert!(inputs > 0);
}
