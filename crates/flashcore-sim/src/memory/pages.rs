//! Per-page data of a buffer, created when a page is first touched.

use std::collections::BTreeMap;

/// The most pages that are kept in a dense vector: of 256 MiB. Longer buffers are touched in few pages.
const MOST_DENSE: usize = 1 << 16;

/// Per-page data of a buffer.
#[derive(Debug)]
pub(crate) enum Pages<T> {
    /// By number.
    Dense(Vec<Option<T>>),
    /// Those that have been touched.
    Sparse(BTreeMap<usize, T>),
}

impl<T> Pages<T> {
    /// Empty, for `count` pages.
    pub(crate) fn new(count: usize) -> Self {
        if count > MOST_DENSE {
            return Self::Sparse(BTreeMap::new());
        }
        let mut pages = Vec::new();
        pages.resize_with(count, || None);
        Self::Dense(pages)
    }

    /// The data of a page, created if there is none.
    pub(crate) fn get_or_insert_with(&mut self, page: usize, make: impl FnOnce() -> T) -> &mut T {
        match self {
            Self::Dense(pages) => pages[page].get_or_insert_with(make),
            Self::Sparse(pages) => pages.entry(page).or_insert_with(make),
        }
    }

    /// The data of a page that has been touched.
    pub(crate) fn get(&self, page: usize) -> Option<&T> {
        match self {
            Self::Dense(pages) => pages[page].as_ref(),
            Self::Sparse(pages) => pages.get(&page),
        }
    }

    /// The data of all touched pages, with their numbers, in order.
    pub(crate) fn iter(&self) -> Box<dyn Iterator<Item = (usize, &T)> + '_> {
        match self {
            Self::Dense(pages) => {
                Box::new(pages.iter().enumerate().filter_map(|(page, touched)| Some((page, touched.as_ref()?))))
            }
            Self::Sparse(pages) => Box::new(pages.iter().map(|(page, touched)| (*page, touched))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_and_many_pages_are_kept_in_the_same_way() {
        for count in [10, MOST_DENSE + 1] {
            let mut pages = Pages::new(count);
            for page in [7, 3, count - 1, 3] {
                *pages.get_or_insert_with(page, || 0) += page;
            }
            let touched: Vec<_> = pages.iter().map(|(page, sum)| (page, *sum)).collect();
            assert_eq!(touched, [(3, 6), (7, 7), (count - 1, count - 1)]);
        }
    }
}
