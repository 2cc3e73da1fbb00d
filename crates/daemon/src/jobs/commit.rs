//! Commits of layers of disks in use: which layers, how, and the record of them.

use super::layers::TakenOff;
use block::{Error, ErrorKind, Result};
use drive::EngineOpener;
use image::{
    Aim, CopyWatch, FileName, Image, LayerGoes, LayerOpeners, commit_layer, open_below_for_writing, take_back_then,
};
use std::path::{Path, PathBuf};

/// Which layers of a disk are committed, and how fast.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct CommitOptions {
    /// The uppermost layer that goes; the disk's top by default.
    pub top: Option<PathBuf>,
    /// How many layers go.
    pub layers: usize,
    /// The layer that takes their data, instead of their number.
    pub base: Option<PathBuf>,
    /// The most bytes that are moved in a second while guests go on.
    pub bytes_per_second: Option<u64>,
    /// The limits that a commit of the disk's top keeps to. The guest writes to no other layer.
    pub aim: Aim,
}

impl Default for CommitOptions {
    fn default() -> Self {
        Self { top: None, layers: 1, base: None, bytes_per_second: None, aim: Aim::default() }
    }
}

impl CommitOptions {
    /// Changes some of them: `CommitOptions::default().with(|options| options.layers = 2)`.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }
}

/// Keeps a record of a disk's layers while they go. Each change is durable when its call returns.
pub trait CommitRecord: Send {
    /// Notes that the top goes, and that the layer below is the top from here on. On an error the disk keeps its layers, but
    /// after one of the kind [`ErrorKind::Unsure`] this is called again.
    fn takes_off(&mut self, layers: &TakenOff) -> Result<()>;
    /// Notes that a layer below the top will go. Until one of the others is called, the image may rest on it or not. On an
    /// error the disk keeps its layers.
    fn goes(&mut self, layer: &FileName) -> Result<()>;
    /// Notes that the image does not rest on that layer any more.
    fn is_gone(&mut self, layer: &FileName);
    /// Notes that the image still rests on that layer.
    fn stays(&mut self);
}

/// Keeps no record.
impl CommitRecord for () {
    fn takes_off(&mut self, _layers: &TakenOff) -> Result<()> {
        Ok(())
    }

    fn goes(&mut self, _layer: &FileName) -> Result<()> {
        Ok(())
    }

    fn is_gone(&mut self, _layer: &FileName) {}

    fn stays(&mut self) {}
}

/// A record, told of one layer.
struct OfLayer<'a> {
    record: &'a mut dyn CommitRecord,
    layer: &'a FileName,
}

impl LayerGoes for OfLayer<'_> {
    fn goes(&mut self) -> Result<()> {
        self.record.goes(self.layer)
    }

    fn is_gone(&mut self) {
        self.record.is_gone(self.layer);
    }

    fn stays(&mut self) {
        self.record.stays();
    }
}

/// The layers that a job commits.
pub(crate) struct Commit {
    /// The layers that go, the uppermost first.
    pub(crate) gone: Vec<FileName>,
    /// Whether the first of them is the disk's top.
    pub(crate) is_from_top: bool,
    /// Opens the layers' files.
    pub(crate) opener: EngineOpener,
}

impl Commit {
    /// Commits them, one after the other.
    pub(crate) fn run(
        &self,
        image: &Image,
        watch: &CopyWatch,
        has_new_top: &dyn Fn(),
        record: &mut dyn CommitRecord,
    ) -> Result<()> {
        if self.is_from_top {
            return take_off(image, &self.gone, &self.opener, watch, has_new_top, record);
        }
        let writer = self.opener.clone().without_locks();
        let openers = LayerOpeners { for_writing: &writer, for_reading: &self.opener };
        // From the lowest up: each is copied once, into the base.
        for layer in self.gone.iter().rev() {
            commit_layer(image, layer, openers, watch, &mut OfLayer { record, layer })?;
        }
        Ok(())
    }
}

/// Takes the top off, and what becomes the top then.
fn take_off(
    image: &Image,
    gone: &[FileName],
    opener: &EngineOpener,
    watch: &CopyWatch,
    has_new_top: &dyn Fn(),
    record: &mut dyn CommitRecord,
) -> Result<()> {
    let writer = opener.clone().without_locks();
    for top in gone {
        let layers = TakenOff::of(image).filter(|layers| layers.top == *top);
        let layers = layers.ok_or_else(|| {
            Error::new(ErrorKind::Locked, format!("'{top}' is not the top of the disk any more: try again"))
        })?;
        open_below_for_writing(image, &writer, watch)?;
        take_back_then(image, watch, || record.takes_off(&layers), has_new_top)?;
    }
    Ok(())
}

/// Returns the places of the uppermost layer that goes and of the layer that takes its data. The disk's top is 0.
pub(crate) fn places(disk: &str, layers: &[FileName], options: &CommitOptions) -> Result<(usize, usize)> {
    let bad = |what: String| Err(Error::new(ErrorKind::BadOption, what));
    let place = |path: &Path| {
        let canonical = std::fs::canonicalize(path).map(FileName::from).or_else(|_| FileName::parse(path))?;
        let found = layers.iter().position(|layer| layer.is_same_file(&canonical));
        found.ok_or_else(|| {
            Error::new(ErrorKind::BadOption, format!("'{}' is no layer of the disk '{disk}'", path.display()))
        })
    };
    let top = options.top.as_deref().map(place).transpose()?.unwrap_or(0);
    if options.base.is_some() && options.layers != 1 {
        return bad("name the base, or say how many layers go, but not both".to_owned());
    }
    let base = options.base.as_deref().map(place).transpose()?;
    match (layers.get(top), base) {
        (Some(layer), Some(base)) if base <= top => bad(format!("the base has to lie below '{layer}'")),
        (_, Some(base)) => Ok((top, base)),
        (Some(layer), None) => {
            let below = layers.len().saturating_sub(top).saturating_sub(1);
            match (1..=below).contains(&options.layers) {
                true => Ok((top, top.saturating_add(options.layers))),
                false if below == 0 => bad(format!("'{layer}' cannot be committed: there is no layer below")),
                false => bad(format!("the disk has {} layers: between 1 and {below} can go", layers.len())),
            }
        }
        (None, None) => bad(format!("the disk '{disk}' has no layers")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_base_lies_below_the_layers_that_go() {
        let layers = ["/c", "/b", "/a"].map(FileName::from);
        let of = |top: Option<&str>, base: Option<&str>| {
            let [top, base] = [top, base].map(|name| name.map(PathBuf::from));
            places("data", &layers, &CommitOptions { top, base, ..CommitOptions::default() })
        };
        assert_eq!(of(None, None).unwrap(), (0, 1));
        assert_eq!(of(Some("/b"), None).unwrap(), (1, 2));
        assert_eq!(of(None, Some("/a")).unwrap(), (0, 2));
        for (top, base, why) in [
            (Some("/a"), None, "no layer below"),
            (Some("/b"), Some("/c"), "below '/b'"),
            (None, Some("/x"), "no layer of the disk 'data'"),
        ] {
            let error = of(top, base).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
    }
}
