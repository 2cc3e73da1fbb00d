//! Magazines: idle contexts, chained through themselves. A magazine needs no memory of its own, so trading allocates
//! nothing.

/// A context, and the next one in its magazine. The context comes first, so that its address is the node's.
#[derive(Debug, PartialEq, Eq)]
#[repr(C)]
pub(super) struct Node<T> {
    pub(super) context: T,
    next: Option<Box<Self>>,
}

impl<T> Node<T> {
    pub(super) fn boxed(context: T) -> Box<Self> {
        Box::new(Self { context, next: None })
    }
}

/// Some idle contexts, of a thread or of the stack. The one put in last comes out first, because it is warm in the
/// cache.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Magazine<T> {
    first: Option<Box<Node<T>>>,
    length: usize,
}

impl<T> Magazine<T> {
    pub(super) const fn new() -> Self {
        Self { first: None, length: 0 }
    }

    #[inline]
    pub(super) fn len(&self) -> usize {
        self.length
    }

    pub(super) fn is_empty(&self) -> bool {
        self.first.is_none()
    }

    #[inline]
    pub(super) fn push(&mut self, mut node: Box<Node<T>>) {
        node.next = self.first.take();
        self.first = Some(node);
        self.length += 1;
    }

    #[inline]
    pub(super) fn pop(&mut self) -> Option<Box<Node<T>>> {
        let mut node = self.first.take()?;
        self.first = node.next.take();
        self.length -= 1;
        Some(node)
    }

    /// Cuts off the first `length` contexts, or as many as there are.
    pub(super) fn split(&mut self, length: usize) -> Self {
        if length >= self.length {
            return std::mem::take(self);
        }
        (0..length).map_while(|_| self.pop()).collect()
    }

    /// Takes all that `other` holds.
    pub(super) fn append(&mut self, other: &mut Self) {
        while let Some(node) = other.pop() {
            self.push(node);
        }
    }
}

impl<T> Default for Magazine<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T> Drop for Magazine<T> {
    fn drop(&mut self) {
        // Dropped one by one: dropping the whole chain would recurse.
        while let Some(node) = self.pop() {
            drop(node);
        }
    }
}

impl<T> FromIterator<Box<Node<T>>> for Magazine<T> {
    fn from_iter<I: IntoIterator<Item = Box<Node<T>>>>(nodes: I) -> Self {
        let mut magazine = Self::new();
        nodes.into_iter().for_each(|node| magazine.push(node));
        magazine
    }
}
