//! What command lines are made of. Most parts are what people write, some are what they should not.

use testkit::Dice;

/// What the lines of a script are about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Family {
    /// info, check, map, measure, compare.
    Look,
    /// create, and looks at what was made.
    Make,
    /// convert, dd, and looks at what was made.
    Copy,
    /// resize, rebase, commit, snapshot, amend, bitmap, check -r.
    Change,
}

const IMAGES: &[&str] = &[
    "plain.qcow2",
    "small.qcow2",
    "old.qcow2",
    "ext.qcow2",
    "packed.qcow2",
    "zstd.qcow2",
    "over.qcow2",
    "top.qcow2",
    "snap.qcow2",
    "bits.qcow2",
    "pre.qcow2",
    "base.raw",
    "odd.raw",
    "empty.raw",
];
const ODD_IMAGES: &[&str] = &[
    "missing",
    "orphan.qcow2",
    "foreign.qcow2",
    "unknown.qcow2",
    "named.qcow2",
    "marked.qcow2",
    "dirty.qcow2",
    "cut.qcow2",
    "version.qcow2",
    "huge.qcow2",
    "leaking.qcow2",
    "uncounted.qcow2",
    "luks.qcow2",
    "aes.qcow2",
    "ext-data.qcow2",
    "x.vmdk",
    "x.vdi",
    "x.vpc",
    "x.qed",
    "x.qcow",
    "x.parallels",
    ".",
    "/nonexistent/x",
    "nbd:unix:/x/y",
    "x:y",
];
const NEW_QCOW2: &[&str] = &["n.qcow2", "m.qcow2"];
const NEW_RAW: &[&str] = &["n.raw", "m.raw"];
const SIZES: &[&str] = &["1M", "64k", "1000", "512", "1.5M", "0x10000", "3M", "1000001", "2097152", "+5k", "0", "300k"];
const BAD_SIZES: &[&str] = &["1GB", "1Q", "-5", "foo", "9E", "1.5", "0x", "1e3", "99999999999999999999", "8E"];
const BAD_FORMATS: &[&str] = &["nope", "vmdk", "qcow", "Raw"];
const BACKINGS: &[(&str, &str)] = &[
    ("base.raw", "raw"),
    ("plain.qcow2", "qcow2"),
    ("over.qcow2", "qcow2"),
    ("small.qcow2", "qcow2"),
    ("odd.raw", "raw"),
];
const CLUSTERS: &[&str] = &["512", "4k", "64k", "2M", "16k", "1024"];
const BAD_CLUSTERS: &[&str] = &["3k", "4M", "0", "foo", "256", "-1"];

/// The lines of a seed.
pub(super) fn script(family: Family, seed: u64) -> Vec<Vec<String>> {
    let mut dice = Dice::new(testkit::mix(seed, family as u64));
    let count = 2 + dice.index(5);
    let mut words = Words { dice: &mut dice, made: Vec::new() };
    (0..count).map(|index| words.line(family, index)).collect()
}

struct Words<'a> {
    dice: &'a mut Dice,
    /// The new images that earlier lines of the script should have made.
    made: Vec<String>,
}

impl Words<'_> {
    fn pick<'b>(&mut self, of: &[&'b str]) -> &'b str {
        of[self.dice.index(of.len())]
    }

    /// One of `good`, or rarely of `bad`.
    fn mostly<'b>(&mut self, good: &[&'b str], bad: &[&'b str]) -> &'b str {
        if self.dice.chance(88) { self.pick(good) } else { self.pick(bad) }
    }

    fn line(&mut self, family: Family, index: usize) -> Vec<String> {
        let look = index % 2 == 1 && !self.made.is_empty();
        match family {
            _ if look && self.dice.chance(70) => self.look(),
            Family::Look => self.look(),
            Family::Make => self.create(),
            Family::Copy => self.copy(),
            Family::Change => self.change(),
        }
    }

    fn image(&mut self) -> String {
        if !self.made.is_empty() && self.dice.chance(50) {
            return self.made[self.dice.index(self.made.len())].clone();
        }
        self.mostly(IMAGES, ODD_IMAGES).to_owned()
    }

    /// A name, perhaps in one of its longer forms, behind what goes with it.
    fn named(&mut self, line: &mut Vec<String>) -> String {
        let image = self.image();
        let format = if image.ends_with(".raw") { "raw" } else { "qcow2" };
        match self.dice.below(20) {
            0 => format!("file:{image}"),
            1 => format!("./{image}"),
            2 => {
                line.push("--image-opts".to_owned());
                format!("driver={format},file.driver=file,file.filename={image}")
            }
            3 => format!("json:{{\"driver\":\"{format}\",\"file\":{{\"driver\":\"file\",\"filename\":\"{image}\"}}}}"),
            4 => format!("json:{{'driver': '{format}', 'file': {{'filename': '{image}'}}}}"),
            5 => {
                let bad =
                    ["json:{", "json:{'driver':'nope','file.filename':'base.raw'}", "json:{'driver':'raw'}", "json:[]"];
                self.pick(&bad).to_owned()
            }
            6 => {
                let bad = [
                    "driver=nope,file.filename=base.raw",
                    "driver=raw",
                    "foo",
                    "driver=raw,file.filename=base.raw,foo=1",
                ];
                line.push("--image-opts".to_owned());
                self.pick(&bad).to_owned()
            }
            7..11 => {
                let bad = self.mostly(&[format], BAD_FORMATS).to_owned();
                line.extend(["-f".to_owned(), bad]);
                image
            }
            _ => image,
        }
    }

    fn flag(&mut self, line: &mut Vec<String>, percent: u64, flag: &str) {
        if self.dice.chance(percent) {
            line.push(flag.to_owned());
        }
    }

    fn output(&mut self, line: &mut Vec<String>) {
        if self.dice.chance(50) {
            let form = self.mostly(&["json", "human"], &["xml"]);
            line.push(format!("--output={form}"));
        }
    }

    fn size(&mut self) -> String {
        self.mostly(SIZES, BAD_SIZES).to_owned()
    }

    fn look(&mut self) -> Vec<String> {
        match self.dice.below(9) {
            0..3 => self.info(),
            3..5 => self.check(),
            5 => self.map(),
            6 => self.measure(),
            7 => self.compare(),
            _ => self.list_snapshots(),
        }
    }

    fn info(&mut self) -> Vec<String> {
        let mut line = vec!["info".to_owned()];
        self.output(&mut line);
        self.flag(&mut line, 30, "--backing-chain");
        self.flag(&mut line, 10, "-U");
        self.flag(&mut line, 2, "--foo");
        let name = self.named(&mut line);
        line.push(name);
        line
    }

    fn check(&mut self) -> Vec<String> {
        let mut line = vec!["check".to_owned()];
        self.output(&mut line);
        self.flag(&mut line, 20, "-q");
        self.flag(&mut line, 10, "-U");
        let name = self.named(&mut line);
        line.push(name);
        line
    }

    fn map(&mut self) -> Vec<String> {
        let mut line = vec!["map".to_owned()];
        self.output(&mut line);
        for (percent, option) in [(25, "-s"), (25, "-l")] {
            if self.dice.chance(percent) {
                let size = self.size();
                line.push(format!("{option}{size}"));
            }
        }
        let name = self.named(&mut line);
        line.push(name);
        line
    }

    fn measure(&mut self) -> Vec<String> {
        let mut line = vec!["measure".to_owned()];
        self.output(&mut line);
        let format = self.mostly(&["raw", "qcow2", "qcow2", "qcow2"], BAD_FORMATS);
        line.extend(["-O".to_owned(), format.to_owned()]);
        self.options(&mut line, format, 40);
        if self.dice.chance(40) {
            let size = self.size();
            line.push(format!("--size={size}"));
        } else {
            let name = self.named(&mut line);
            line.push(name);
        }
        line
    }

    fn compare(&mut self) -> Vec<String> {
        let mut line = vec!["compare".to_owned()];
        self.flag(&mut line, 30, "-s");
        self.flag(&mut line, 10, "-q");
        let (first, second) = (self.image(), self.image());
        line.extend([first, second]);
        line
    }

    fn list_snapshots(&mut self) -> Vec<String> {
        let image = if self.dice.chance(50) { "snap.qcow2".to_owned() } else { self.image() };
        vec!["snapshot".to_owned(), "-l".to_owned(), image]
    }

    /// `-o` for a new image.
    fn options(&mut self, line: &mut Vec<String>, format: &str, percent: u64) {
        if !self.dice.chance(percent) {
            return;
        }
        let count = 1 + self.dice.index(3);
        let options: Vec<String> = (0..count).map(|_| self.option(format == "raw")).collect();
        line.extend(["-o".to_owned(), options.join(",")]);
    }

    fn option(&mut self, raw: bool) -> String {
        let switch = |words: &mut Self| words.mostly(&["on", "off"], &["bla", "1"]);
        let choice = if raw { 7 + self.dice.below(5) } else { self.dice.below(14) };
        match choice {
            0..2 => format!("cluster_size={}", self.mostly(CLUSTERS, BAD_CLUSTERS)),
            2 => format!("compat={}", self.mostly(&["0.10", "1.1", "v2", "v3"], &["0.9", "foo"])),
            3 => format!("refcount_bits={}", self.mostly(&["1", "8", "16", "64"], &["3", "128", "foo", "0"])),
            4 => format!("lazy_refcounts={}", switch(self)),
            5 => format!("extended_l2={}", switch(self)),
            6 => format!("compression_type={}", self.mostly(&["zlib", "zstd"], &["lz4"])),
            7 => format!("preallocation={}", self.mostly(&["off", "falloc", "full", "metadata"], &["some"])),
            8 => format!("size={}", self.size()),
            9 => format!("nocow={}", switch(self)),
            10 => "foo=bar".to_owned(),
            11 => format!("extent_size_hint={}", self.mostly(&["0", "1M"], &["foo"])),
            12 => "data_file_raw=on".to_owned(),
            _ => "encryption=off".to_owned(),
        }
    }

    fn new_name(&mut self, format: &str) -> String {
        let name = self.pick(if format == "raw" { NEW_RAW } else { NEW_QCOW2 }).to_owned();
        self.made.push(name.clone());
        match self.dice.below(30) {
            0 => format!("file:{name}"),
            1 => "/nonexistent/n.qcow2".to_owned(),
            2 => ".".to_owned(),
            _ => name,
        }
    }

    fn create(&mut self) -> Vec<String> {
        let mut line = vec!["create".to_owned()];
        self.flag(&mut line, 10, "-q");
        let format = self.mostly(&["qcow2", "qcow2", "qcow2", "raw"], BAD_FORMATS);
        line.extend(["-f".to_owned(), format.to_owned()]);
        self.options(&mut line, format, 60);
        let backed = self.dice.chance(25);
        if backed {
            self.backing(&mut line, "-b", true);
        }
        let name = self.new_name(format);
        line.push(name);
        if !backed || self.dice.chance(40) {
            let size = self.size();
            // Behind two dashes a number may be less than zero.
            line.extend(size.starts_with('-').then(|| "--".to_owned()));
            line.push(size);
        }
        line
    }

    /// A backing file and `-F`, perhaps one of them.
    fn backing(&mut self, line: &mut Vec<String>, option: &str, may_be_unsafe: bool) {
        let (name, format) = BACKINGS[self.dice.index(BACKINGS.len())];
        let name = self.mostly(&[name], &["missing", "unknown.qcow2", "x:y", "file:base.raw"]).to_owned();
        line.extend([option.to_owned(), name]);
        if self.dice.chance(90) {
            let format = self.mostly(&[format], &["nope", "vmdk", "qcow2"]).to_owned();
            line.extend(["-F".to_owned(), format]);
        }
        if may_be_unsafe {
            self.flag(line, 15, "-u");
        }
    }

    fn copy(&mut self) -> Vec<String> {
        if self.dice.chance(20) {
            return self.dd();
        }
        let mut line = vec!["convert".to_owned()];
        let format = self.mostly(&["raw", "qcow2", "qcow2"], BAD_FORMATS);
        line.extend(["-O".to_owned(), format.to_owned()]);
        self.options(&mut line, format, 40);
        self.flag(&mut line, 15, "-c");
        self.flag(&mut line, 5, "-n");
        self.flag(&mut line, 5, "--target-is-zero");
        self.flag(&mut line, 5, "--bitmaps");
        self.flag(&mut line, 5, "--salvage");
        for (option, good, bad) in [
            ("-S", &["0", "4k", "64k"][..], &["100", "foo", "32M"][..]),
            ("-m", &["1", "4"], &["0", "17", "foo"]),
            ("-t", &["writeback", "none"], &["foo"]),
            ("-T", &["writeback", "none"], &["foo"]),
            ("-r", &["1G"], &["foo", "-1"]),
            ("-l", &["one"], &["nope", "snapshot.id=1", "snapshot.foo=1"]),
        ] {
            if self.dice.chance(7) {
                let value = self.mostly(good, bad).to_owned();
                line.push(format!("{option}{value}"));
            }
        }
        if self.dice.chance(8) {
            self.backing(&mut line, "-B", false);
        }
        let source = self.named(&mut line);
        line.push(source);
        if self.dice.chance(8) {
            let image = self.image();
            line.push(image);
        }
        let target = self.new_name(format);
        line.push(target);
        line
    }

    fn dd(&mut self) -> Vec<String> {
        let mut line = vec!["dd".to_owned()];
        let format = self.mostly(&["raw", "qcow2"], BAD_FORMATS);
        line.extend(["-O".to_owned(), format.to_owned()]);
        let image = self.image();
        line.push(format!("if={image}"));
        let target = self.new_name(format);
        line.push(format!("of={target}"));
        for (key, good, bad) in [
            ("bs", &["512", "64k", "1000", "1M"][..], &["0", "foo", "3G"][..]),
            ("count", &["0", "1", "100", "1000000"], &["foo", "-1"]),
            ("skip", &["0", "1", "7", "100000"], &["foo"]),
        ] {
            if self.dice.chance(40) {
                let value = self.mostly(good, bad).to_owned();
                line.push(format!("{key}={value}"));
            }
        }
        line
    }

    fn change(&mut self) -> Vec<String> {
        match self.dice.below(10) {
            0..2 => self.resize(),
            2 => self.rebase(),
            3 => self.commit(),
            4 => self.snapshot(),
            5..7 => self.amend(),
            7 => self.bitmap(),
            8 => self.repair(),
            _ => self.write(),
        }
    }

    /// An image that is to be changed, and that is looked at afterwards.
    fn changed(&mut self) -> String {
        let image = self.image();
        self.made.push(image.clone());
        image
    }

    fn write(&mut self) -> Vec<String> {
        let image = self
            .pick(&["plain.qcow2", "small.qcow2", "ext.qcow2", "over.qcow2", "bits.qcow2", "snap.qcow2"])
            .to_owned();
        self.made.push(image.clone());
        let (at, length) = (self.dice.below(200) * 1024, (1 + self.dice.below(60)) * 1024);
        let command = self.pick(&["write -P 11", "write -z", "discard"]);
        vec!["io".to_owned(), "qcow2".to_owned(), image, format!("{command} {at} {length}")]
    }

    fn resize(&mut self) -> Vec<String> {
        let mut line = vec!["resize".to_owned()];
        self.flag(&mut line, 30, "--shrink");
        self.flag(&mut line, 10, "-q");
        if self.dice.chance(25) {
            let mode = self.mostly(&["off", "metadata", "falloc", "full"], &["some"]);
            line.push(format!("--preallocation={mode}"));
        }
        let image = self.changed();
        if image.ends_with(".raw") && self.dice.chance(80) {
            line.extend(["-f".to_owned(), "raw".to_owned()]);
        }
        line.push(image);
        let (sign, size) = (self.pick(&["", "+", "-"]), self.size());
        line.push(format!("{sign}{}", size.trim_start_matches(['+', '-'])));
        line
    }

    fn rebase(&mut self) -> Vec<String> {
        let mut line = vec!["rebase".to_owned()];
        self.flag(&mut line, 40, "-u");
        if self.dice.chance(20) {
            line.extend(["-b".to_owned(), String::new()]);
        } else if self.dice.chance(95) {
            self.backing(&mut line, "-b", false);
        }
        let image = if self.dice.chance(60) { "over.qcow2".to_owned() } else { self.changed() };
        self.made.push(image.clone());
        line.push(image);
        line
    }

    fn commit(&mut self) -> Vec<String> {
        let mut line = vec!["commit".to_owned()];
        self.flag(&mut line, 20, "-d");
        self.flag(&mut line, 10, "-q");
        if self.dice.chance(20) {
            let base = self.pick(&["base.raw", "over.qcow2", "nope"]).to_owned();
            line.extend(["-b".to_owned(), base]);
        }
        let image =
            if self.dice.chance(70) { self.pick(&["over.qcow2", "top.qcow2"]).to_owned() } else { self.changed() };
        self.made.push(image.clone());
        line.push(image);
        line
    }

    fn snapshot(&mut self) -> Vec<String> {
        let action = self.pick(&["-c", "-a", "-d", "-l"]);
        let mut line = vec!["snapshot".to_owned(), action.to_owned()];
        if action != "-l" {
            let name = self.pick(&["one", "two", "three", "1", "nope"]).to_owned();
            line.push(name);
        }
        self.flag(&mut line, 3, "-l");
        let image = if self.dice.chance(60) { "snap.qcow2".to_owned() } else { self.changed() };
        self.made.push(image.clone());
        line.push(image);
        line
    }

    fn amend(&mut self) -> Vec<String> {
        let option = match self.dice.below(8) {
            0..2 => format!("compat={}", self.mostly(&["0.10", "1.1", "v3"], &["0.9"])),
            2 => format!("lazy_refcounts={}", self.mostly(&["on", "off"], &["bla"])),
            3 => format!("refcount_bits={}", self.mostly(&["1", "8", "32", "64"], &["3", "foo"])),
            4..6 => format!("size={}", self.size()),
            6 => {
                self.pick(&["cluster_size=4k", "backing_file=x", "foo=bar", "encryption=on", "data_file=x"]).to_owned()
            }
            _ => self.option(false),
        };
        let image = self.changed();
        vec!["amend".to_owned(), "-o".to_owned(), option, image]
    }

    fn bitmap(&mut self) -> Vec<String> {
        let mut line = vec!["bitmap".to_owned()];
        let action = self
            .mostly(&["--add", "--remove", "--clear", "--enable", "--disable", "--merge=fine"], &["", "--merge=nope"]);
        line.extend((!action.is_empty()).then(|| action.to_owned()));
        if self.dice.chance(15) {
            let granularity = self.mostly(&["4k", "64k", "512"], &["3", "foo", "1"]);
            line.extend(["-g".to_owned(), granularity.to_owned()]);
        }
        let image = if self.dice.chance(60) { "bits.qcow2".to_owned() } else { self.changed() };
        self.made.push(image.clone());
        line.push(image);
        let bitmap = self.pick(&["fine", "coarse", "new", "nope"]).to_owned();
        line.push(bitmap);
        line
    }

    fn repair(&mut self) -> Vec<String> {
        let what = self.mostly(&["leaks", "all"], &["foo"]).to_owned();
        let mut line = vec!["check".to_owned(), "-r".to_owned(), what];
        self.output(&mut line);
        let image = if self.dice.chance(50) {
            self.pick(&["leaking.qcow2", "uncounted.qcow2", "dirty.qcow2", "marked.qcow2"]).to_owned()
        } else {
            self.changed()
        };
        self.made.push(image.clone());
        line.push(image);
        line
    }
}
