//! QEMU's own words for errors: scripts look for them. Our own message says more, and follows.

use crate::compat::FLAGS;
use drive::parse_size;

/// QEMU's description of valid sizes.
const SIZE_RANGE: &str = "Must be between 0 and 9223372036854775807.";
const SIZE_UNITS: &str = "Optional suffix k, M, G, T, P or E means kilo-, mega-, giga-, tera-, peta-\n\
                          and exabytes, respectively.";

/// Short flags of `map`: the table has only their long forms.
const SHORT_OF_MAP: [&str; 2] = ["-s", "-l"];

/// Returns an error message with qemu-img's words for the same error, if they differ. `arguments` are the words of the
/// command line from the verb on.
pub(crate) fn with_words(message: &str, arguments: &[String]) -> Option<String> {
    let line = Line::of(arguments)?;
    let said = message;
    let message = &*line.opening(said).unwrap_or_else(|| said.to_owned());
    let Told { stage, words, after } = line.told(message);
    let place = line.place(stage, message);
    let words = words.filter(|words| !message.contains(words.as_str())).or_else(|| line.by_description(message));
    let first = match (place, words) {
        (Some(place), Some(words)) => format!("{place}: {words}\n{message}"),
        (Some(place), None) if message.starts_with(&format!("{place}: ")) => message.to_owned(),
        (Some(place), None) => format!("{place}: {message}"),
        (None, Some(words)) => format!("{words}\n{message}"),
        (None, None) => message.to_owned(),
    };
    Some(after.map_or(first.clone(), |after| format!("{first}\n{after}"))).filter(|text| text != said)
}

/// When qemu-img notices an error, which decides the beginning of its message.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    Line,
    Options,
    Making,
}

struct Told {
    stage: Stage,
    words: Option<String>,
    after: Option<&'static str>,
}

impl Told {
    fn words(stage: Stage, words: impl Into<String>) -> Self {
        Self { stage, words: Some(words.into()), after: None }
    }

    fn ours(stage: Stage, after: Option<&'static str>) -> Self {
        Self { stage, words: None, after }
    }
}

/// A command line, taken apart by the table of flags.
struct Line<'a> {
    verb: &'a str,
    options: Vec<(&'a str, &'a str)>,
    operands: Vec<&'a str>,
}

impl<'a> Line<'a> {
    fn of(arguments: &'a [String]) -> Option<Self> {
        let (verb, rest) = arguments.split_first()?;
        let flags = FLAGS.iter().find(|known| known.name == verb.as_str())?.flags;
        let known = |name: &str| flags.iter().find(|flag| flag.name == name);
        let takes_value = |name: &str| known(name).map_or(SHORT_OF_MAP.contains(&name), |flag| flag.value.is_some());
        let mut line = Self { verb, options: Vec::new(), operands: Vec::new() };
        let mut words = rest.iter().map(String::as_str);
        while let Some(word) = words.next() {
            match (word.split_once('='), word.split_at_checked(2)) {
                _ if word == "--" => line.operands.extend(words.by_ref()),
                _ if !word.starts_with('-') || word == "-" => line.operands.push(word),
                (Some((name, value)), _) if word.starts_with("--") => line.options.push((name, value)),
                _ if takes_value(word) => line.options.push((word, words.next().unwrap_or_default())),
                (_, Some((name, value))) if takes_value(name) => line.options.push((name, value)),
                _ => line.options.push((word, "")),
            }
        }
        Some(line)
    }

    fn value(&self, name: &str) -> Option<&'a str> {
        self.options.iter().rev().find(|(option, _)| *option == name).map(|(_, value)| *value)
    }

    fn is(&self, name: &str, value: &str) -> bool {
        self.value(name) == Some(value)
    }

    /// Returns the key of `-o` that has this value.
    fn key_of(&self, value: &str) -> &'a str {
        let lists = self.options.iter().filter(|(option, _)| *option == "-o").map(|(_, list)| *list);
        let mut pairs = lists.flat_map(|list| list.split(',')).filter_map(|pair| pair.split_once('='));
        pairs.find(|(_, own)| *own == value).map_or("size", |(key, _)| key)
    }

    /// Puts the description of an image first, if the user named it by one.
    fn by_description(&self, message: &str) -> Option<String> {
        let is_described = |operand: &&str| operand.starts_with("json:") || self.value("--image-opts").is_some();
        let operand = self.operands.iter().copied().find(is_described)?;
        let is_told = !message.starts_with("Could not open '") || message.contains(operand);
        (!is_told).then(|| format!("Could not open '{operand}': {}", message.lines().next().unwrap_or_default()))
    }

    /// Returns the message for an image that could not be opened, with the name that the user gave.
    fn opening(&self, message: &str) -> Option<String> {
        const WHY: [&str; 4] =
            ["Unsupported qcow2", "not a valid qcow2 image", "Image is not in qcow2 format", "Parameter 'encrypt."];
        if self.verb == "create" {
            return None;
        }
        let message = without_snapshot(message);
        let (could_not, rest) = match message.strip_prefix("Could not open '") {
            Some(rest) => (true, rest),
            None => (false, message.strip_prefix('\'')?),
        };
        let (name, why) = rest.split_once('\'')?;
        let why = why.strip_prefix(": ").unwrap_or(why);
        let is_opening = WHY.iter().any(|words| why.starts_with(words));
        if could_not && self.value("-B") == Some(name) {
            return Some(format!("Could not open '{}': Could not open backing file: {why}", self.new_file()));
        }
        let named = |operand: &&str| operand.strip_prefix("if=").unwrap_or(operand).strip_prefix("file:") == Some(name);
        match self.operands.iter().copied().find(named) {
            Some(operand) if could_not => Some(format!("Could not open '{operand}': {message}")),
            Some(operand) if is_opening => Some(format!("Could not open '{operand}': {why}")),
            _ if is_opening && !could_not => Some(format!("Could not open '{name}': {why}")),
            _ => {
                let is_no_file = name == "file" && why.trim_start().starts_with("driver requires '");
                let operand = self.operands.iter().find(|operand| why.contains(&format!("'{operand}'")));
                operand.filter(|_| is_no_file).map(|operand| format!("Could not open '{operand}': {message}"))
            }
        }
    }

    fn new_file(&self) -> &'a str {
        let file = if self.verb == "create" { self.operands.first() } else { self.operands.last() };
        let file = file.copied().unwrap_or_default();
        file.strip_prefix("of=").unwrap_or(file)
    }

    fn new_format(&self) -> &'a str {
        self.value(if self.verb == "create" { "-f" } else { "-O" }).unwrap_or("raw")
    }

    /// Returns the beginning of the message: the new file.
    fn place(&self, stage: Stage, message: &str) -> Option<String> {
        const OF_MAKING: [&str; 12] = [
            "Could not create ",
            "Failed to get \"write\" lock",
            "Extended L2 entries are only supported with cluster sizes",
            " only supported with compatibility level",
            " require compatibility level",
            "Cluster size must be",
            "Refcount width must be",
            "cannot be used at the same time",
            "can only be used at the same time",
            "The image size is too large for file format",
            "data-file-raw requires",
            "requires refcount",
        ];
        let is_making = stage == Stage::Making || OF_MAKING.iter().any(|words| message.contains(words));
        let (file, format) = (self.new_file(), self.new_format());
        match self.verb {
            "create" if stage != Stage::Line && !file.is_empty() => Some(file.to_owned()),
            "convert" if is_making => Some(format!("{file}: error while converting {format}")),
            "dd" if is_making => Some(format!("{file}: error while creating output image")),
            _ => None,
        }
    }

    fn told(&self, message: &str) -> Told {
        let quoted = message.split('\'').nth(1).unwrap_or_default();
        let said = |part: &str| message.contains(part);
        let by_option = self.about_options(message);
        match self.verb {
            _ if said("' is not a size: ") => self.about_size(before(message, "' is not a size: "), message),
            _ if by_option.is_some() => by_option.unwrap_or_else(|| Told::ours(Stage::Options, None)),
            _ if said("unknown image format '") => self.about_format(behind(message, "unknown image format '")),
            "create" if said("a raw image cannot have a backing file") => {
                Told::words(Stage::Options, "Backing file not supported for file format 'raw'")
            }
            "create" if said("is given without its format: add -F ") => {
                let format =
                    message.rsplit("add -F ").next().and_then(|rest| rest.split(' ').next()).unwrap_or_default();
                let words = format!("Backing file specified without backing format\nDetected format of {format}.");
                Told::words(Stage::Options, words)
            }
            "create" if self.value("-b").is_some_and(|backing| names(message, backing)) => {
                Told::ours(Stage::Options, Some("Could not open backing image."))
            }
            "amend" if said("compat=0.10 requires refcount_bits=16") => Told::words(
                Stage::Line,
                "Refcount widths other than 16 bits require compatibility level 1.1 or above (use compat=1.1 or greater)",
            ),
            "rebase" if said("a raw image cannot have a backing file") => {
                let backing = self.value("-b").unwrap_or_default();
                Told::words(
                    Stage::Line,
                    format!("Could not change the backing file to '{backing}': Operation not supported"),
                )
            }
            "convert" | "measure" if said("it has no snapshot") => {
                Told::words(Stage::Line, "Failed to load snapshot: Can't find snapshot")
            }
            "convert" | "measure" if said("a raw image has no snapshots") => Told::words(
                Stage::Line,
                "Failed to load snapshot: Block format 'raw' used by device '' does not support temporarily loading \
                 internal snapshots",
            ),
            "convert" if said("-S takes a multiple of ") => Told::words(
                Stage::Line,
                "Invalid buffer size for sparse output specified. Valid sizes are multiples of 512 up to 16777216. Select \
                 0 to disable sparse detection (fully allocates output).",
            ),
            "convert" if said("for '--parallel") => {
                Told::words(Stage::Line, "Invalid number of coroutines specified. Must be between 1 and 16.")
            }
            "convert" if self.value("--target-is-zero").is_some() && self.value("-n").is_none() => {
                Told::words(Stage::Line, "--target-is-zero requires use of -n flag")
            }
            "create" if said("the size of the image is missing") => {
                Told::words(Stage::Options, "Image creation needs a size parameter")
            }
            "dd" if said("invalid number: '") => about_number(quoted),
            "check" if said("its refcounts must be rebuilt") => {
                Told::words(Stage::Line, "Check failed: Input/output error")
            }
            "snapshot" => self.about_snapshot(message),
            "resize" if said("Use the --shrink option") => Told::ours(
                Stage::Line,
                Some(
                    "qemu-img: warning: Shrinking an image will delete all data beyond the shrunken image's end. Before \
                     performing such an operation, make sure there is no important data there.",
                ),
            ),
            _ => Told::ours(Stage::Options, None),
        }
    }

    fn about_size(&self, value: &str, message: &str) -> Told {
        let is_out_of_range = message.contains("larger than any") || value.starts_with('-');
        let what = match self.verb {
            "create" if self.operands.get(1) == Some(&value) => "image size",
            "measure" if self.is("--size", value) => "image size",
            "map" if self.is("-s", value) => "start offset",
            "map" if self.is("-l", value) => "max length",
            "convert" if self.is("-S", value) => "buffer size for sparse output",
            "convert" | "commit" if self.is("-r", value) => "rate limit",
            _ => {
                let key = self.key_of(value);
                let words = format!("Parameter '{key}' expects a non-negative number below 2^64\n{SIZE_UNITS}");
                return Told::words(Stage::Options, words);
            }
        };
        Told::words(
            Stage::Line,
            match is_out_of_range {
                true => format!("Invalid {what} specified. {SIZE_RANGE}"),
                false => format!("Invalid {what} specified: '{value}'."),
            },
        )
    }

    /// Returns the message for a wrong value of -o, -t or -T.
    fn about_options(&self, message: &str) -> Option<Told> {
        let is_raw = self.new_format() == "raw";
        let value =
            |start: &str| message.split_once(start).map(|(_, rest)| rest.split([':', ' ']).next().unwrap_or(""));
        if message.contains("unknown option of ") {
            let words = format!("Invalid parameter '{}'", message.split('\'').nth(1).unwrap_or_default());
            return Some(Told::words(Stage::Options, words));
        }
        if let Some(cache) = value("cache=").filter(|_| message.contains(" is not known")) {
            let which = if self.is("-T", cache) { "source cache" } else { "cache" };
            return Some(Told::words(Stage::Line, format!("Invalid {which} option: {cache}")));
        }
        if message.contains("is not a whole number") {
            return Some(Told::words(Stage::Options, "Parameter 'refcount_bits' expects a number"));
        }
        let chosen = |key: &str| {
            let rest = message.split_once(&format!("unknown value of '{key}': '"))?.1;
            rest.split('\'').next()
        };
        let words = if let Some(mode) = value("preallocation=").filter(|_| message.contains("valid are")) {
            match is_raw {
                true => format!("invalid parameter value: {mode}"),
                false => format!("Parameter 'preallocation' does not accept value '{mode}'"),
            }
        } else if message.contains("a raw image has no metadata to preallocate") {
            "Unsupported preallocation mode: metadata".to_owned()
        } else if let Some(compat) = chosen("compat") {
            format!("Parameter 'version' does not accept value '{compat}'")
        } else if let Some(kind) = chosen("compression_type") {
            format!("Parameter 'compression-type' does not accept value '{kind}'")
        } else {
            return None;
        };
        let stage = if self.verb == "measure" { Stage::Line } else { Stage::Making };
        Some(Told::words(stage, words))
    }

    fn about_format(&self, format: &str) -> Told {
        let makes = ["convert", "dd", "measure"].contains(&self.verb) && self.is("-O", format);
        match self.verb {
            "create" if self.is("-F", format) => {
                Told::words(Stage::Options, format!("Unknown driver '{format}'\nCould not open backing image."))
            }
            "create" => Told::words(Stage::Options, format!("Unknown file format '{format}'")),
            "rebase" if self.is("-F", format) => Told::words(Stage::Line, format!("Invalid format name: '{format}'")),
            _ if makes => Told::words(Stage::Line, format!("Unknown file format '{format}'")),
            _ => {
                let image = self.operands.first().copied().unwrap_or_default();
                let image = image.strip_prefix("if=").unwrap_or(image);
                Told::words(Stage::Line, format!("Could not open '{image}': Unknown driver '{format}'"))
            }
        }
    }

    fn about_snapshot(&self, message: &str) -> Told {
        let is_missing = message.contains("it has no snapshot");
        let is_raw = message.contains("a raw image has no snapshots");
        let of = |flag: &str| self.value(flag);
        let words = match (of("-c"), of("-d"), of("-a")) {
            (Some(name), ..) if is_raw => format!("Could not create snapshot '{name}': Operation not supported"),
            (_, Some(name), _) if is_raw || is_missing => {
                format!("Could not delete snapshot '{name}': snapshot not found")
            }
            (.., Some(name)) if is_raw => {
                format!("Could not apply snapshot '{name}': Block driver does not support snapshots")
            }
            (.., Some(name)) if is_missing => {
                format!("Could not apply snapshot '{name}': Failed to load snapshot: No such file or directory")
            }
            _ => return Told::ours(Stage::Line, None),
        };
        Told::words(Stage::Line, words)
    }
}

/// Returns the message without what was to be done with a snapshot: qemu-img opens the image first.
fn without_snapshot(message: &str) -> &str {
    let done = ["create", "apply", "delete"].iter().find_map(|what| {
        let named = message.strip_prefix("Could not ")?.strip_prefix(what)?.strip_prefix(" snapshot '")?;
        named.split_once("': ")
    });
    done.map_or(message, |(_, rest)| rest)
}

/// Whether a message quotes a file by this name, or by its path.
fn names(message: &str, file: &str) -> bool {
    let file = file.strip_prefix("file:").unwrap_or(file);
    message.contains(&format!("'{file}'")) || message.contains(&format!("/{file}'"))
}

/// Returns the quoted text before `end`.
fn before<'a>(message: &'a str, end: &str) -> &'a str {
    let head = message.split_once(end).map_or("", |(head, _)| head);
    head.rsplit('\'').next().unwrap_or_default()
}

/// Returns the quoted text behind `start`.
fn behind<'a>(message: &'a str, start: &str) -> &'a str {
    let rest = message.split_once(start).map_or("", |(_, rest)| rest);
    rest.split('\'').next().unwrap_or_default()
}

/// Returns the message for an operand of dd that is no valid number.
fn about_number(operand: &str) -> Told {
    let Some((key, value)) = operand.split_once('=') else { return Told::ours(Stage::Line, None) };
    let end = if key == "bs" { i64::from(i32::MAX) } else { i64::MAX };
    let is_number = match parse_size(value) {
        Ok(_) => true,
        Err(error) => value.starts_with('-') || error.to_string().contains("larger than any"),
    };
    Told::words(
        Stage::Line,
        match is_number {
            true => format!("Invalid {key} specified. Must be between 1 and {end}."),
            false => format!("Invalid {key} specified: '{value}'."),
        },
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(message: &str, line: &[&str]) -> String {
        let arguments: Vec<String> = line.iter().map(|word| (*word).to_owned()).collect();
        with_words(message, &arguments).unwrap_or_else(|| message.to_owned())
    }

    #[test]
    fn the_words_that_scripts_look_for_come_first_and_what_we_know_besides_follows() {
        let size = "'1GB' is not a size: write 1G";
        for (message, line, first) in [
            (size, &["create", "-f", "qcow2", "n", "1GB"][..], "Invalid image size specified: '1GB'."),
            (size, &["map", "-s1GB", "n"], "Invalid start offset specified: '1GB'."),
            (
                size,
                &["create", "-o", "a=b,size=1GB", "n"],
                "n: Parameter 'size' expects a non-negative number below 2^64",
            ),
            ("unknown option of raw: 'x' (valid: size)", &["create", "-ox=y", "n", "1M"], "n: Invalid parameter 'x'"),
            (
                "unknown image format 'x': valid are",
                &["info", "-f", "x", "n"],
                "Could not open 'n': Unknown driver 'x'",
            ),
            ("unknown image format 'x': valid are", &["convert", "-O", "x", "a", "n"], "Unknown file format 'x'"),
            ("invalid number: 'bs=0'", &["dd", "bs=0"], "Invalid bs specified. Must be between 1 and 2147483647."),
            (
                "Could not create 'n': no",
                &["convert", "-O", "qcow2", "a", "n"],
                "n: error while converting qcow2: Could not create 'n': no",
            ),
        ] {
            let said = told(message, line);
            assert_eq!(said.lines().next(), Some(first), "{line:?}");
            assert!(said.contains(message), "{said}");
        }
        let said = told("Could not open 'b': no", &["create", "-b", "b", "-F", "raw", "n"]);
        assert_eq!(said, "n: Could not open 'b': no\nCould not open backing image.");
        let said = told("Could not open 'a': no", &["info", "json:{'file.filename': 'a'}"]);
        assert!(said.starts_with("Could not open 'json:{'file.filename': 'a'}': Could not open 'a': no\n"), "{said}");
        let line = &["info", "file:a"][..];
        assert_eq!(
            told("'a': Unsupported qcow2 version 9", line),
            "Could not open 'file:a': Unsupported qcow2 version 9"
        );
        assert_eq!(told("Could not open 'a': no", line), "Could not open 'file:a': Could not open 'a': no");
        let locked = "Parameter 'encrypt.key-secret' is required for cipher: it is encrypted";
        for line in [&["check", "n"][..], &["bitmap", "--add", "n", "b"], &["rebase", "-b", "", "n"]] {
            assert_eq!(told(&format!("'n': {locked}"), line), format!("Could not open 'n': {locked}"));
        }
        for verb in ["create", "apply", "delete"] {
            let said = told(&format!("Could not {verb} snapshot 's': 'n': {locked}"), &["snapshot", "-c", "s", "n"]);
            assert_eq!(said, format!("Could not open 'n': {locked}"));
        }
        let said = told("Could not open 'n': it has no snapshot 's'", &["measure", "-l", "s", "n"]);
        assert_eq!(said.lines().next(), Some("Failed to load snapshot: Can't find snapshot"));
        let said = told("Could not open 'b': no", &["convert", "-B", "b", "-F", "raw", "a", "n"]);
        assert_eq!(said, "Could not open 'n': Could not open backing file: no");
        for line in [&["info", "n"][..], &["resize", "n", "1M"], &["check", "n"], &["no-verb"], &[]] {
            assert_eq!(told("Could not open 'n': no", line), "Could not open 'n': no");
        }
    }
}
