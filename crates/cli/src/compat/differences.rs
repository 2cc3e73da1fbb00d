//! What differs from qemu-img, flag by flag: the list that `ringdisk img-compat` prints.

/// A flag that is not as in qemu-img.
pub(crate) struct Difference {
    /// The verb, `*` for all.
    pub(crate) verb: &'static str,
    /// The flag, `*` for all.
    pub(crate) flag: &'static str,
    pub(crate) why: &'static str,
}

const fn refused(verb: &'static str, flag: &'static str, why: &'static str) -> Difference {
    Difference { verb, flag, why }
}

impl Difference {
    pub(crate) fn is_about(&self, verb: &str, flag: &str) -> bool {
        let fits = |own: &str, other: &str| own == "*" || own == other;
        fits(self.verb, verb) && fits(self.flag, flag)
    }
}

/// All of them.
pub(crate) const OTHERS: &[Difference] =
    &[refused("*", "--object", "refused: nothing here uses secrets or other objects")];

/// What is different about a flag of a verb; `None` where nothing is.
pub(crate) fn difference(verb: &str, flag: &str) -> Option<&'static Difference> {
    OTHERS.iter().find(|other| other.is_about(verb, flag))
}
