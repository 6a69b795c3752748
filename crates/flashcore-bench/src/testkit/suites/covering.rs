//! Pairwise covering designs: few rows in which every two values of every two features meet.
//!
//! Bugs live where two features meet, rarely where three do. All combinations of 16 features are billions; all pairs of
//! them fit in some hundred rows.

use flashcore_problem::SplitMix64;

/// A feature and one of its values, both by number.
pub(super) type Setting = (usize, usize);

/// Rows of one value per feature, at least `at_least` of them, in which every two settings meet that `excludes` does not
/// keep apart. `sizes` is how many values each feature has. The same arguments give the same rows.
///
/// # Panics
///
/// If two settings that `excludes` allows meet in no row, because others keep them apart: it has to say so itself.
pub(super) fn covering_rows(
    sizes: &[usize],
    excludes: impl Fn(Setting, Setting) -> bool,
    at_least: usize,
    seed: u64,
) -> Vec<Vec<usize>> {
    let mut random = SplitMix64::new(seed);
    let mut pairs = Pairs::new(sizes, &excludes);
    let mut rows = Vec::new();
    let mut fruitless = 0;
    while pairs.left > 0 || rows.len() < at_least {
        let mut row: Vec<Option<usize>> = vec![None; sizes.len()];
        if let Some((first, second)) = pairs.any_left(&mut random) {
            (row[first.0], row[second.0]) = (Some(first.1), Some(second.1));
        }
        let mut order: Vec<usize> = (0..sizes.len()).filter(|&feature| row[feature].is_none()).collect();
        shuffle(&mut order, &mut random);
        for feature in order {
            row[feature] = pairs.best_value(&row, feature, &excludes, &mut random);
        }
        // A feature without a value is one that the others left none for; another order will.
        if let Some(row) = row.into_iter().collect::<Option<Vec<usize>>>() {
            pairs.cover(&row);
            rows.push(row);
            fruitless = 0;
        } else {
            fruitless += 1;
            assert!(fruitless < MOST_FRUITLESS, "{:?} never meet", pairs.any_left(&mut random));
        }
    }
    rows
}

/// Rows in a row that come to nothing before it is given up.
const MOST_FRUITLESS: usize = 10_000;

/// The pairs of settings that have not met.
struct Pairs {
    /// Index of the first setting of each feature among all settings.
    first_setting: Vec<usize>,
    settings: Vec<Setting>,
    /// Of the first setting times all settings plus the second, the lesser feature first.
    is_open: Vec<bool>,
    left: usize,
}

impl Pairs {
    fn new(sizes: &[usize], excludes: &impl Fn(Setting, Setting) -> bool) -> Self {
        let settings: Vec<Setting> = sizes
            .iter()
            .enumerate()
            .flat_map(|(feature, &size)| (0..size).map(move |value| (feature, value)))
            .collect();
        let first_setting = sizes
            .iter()
            .scan(0, |next, size| {
                *next += size;
                Some(*next - size)
            })
            .collect();
        let mut is_open = vec![false; settings.len() * settings.len()];
        for (i, &first) in settings.iter().enumerate() {
            for (j, &second) in settings.iter().enumerate() {
                is_open[i * settings.len() + j] = first.0 < second.0 && !excludes(first, second);
            }
        }
        let left = is_open.iter().filter(|&&is_open| is_open).count();
        Self { first_setting, settings, is_open, left }
    }

    fn index(&self, first: Setting, second: Setting) -> usize {
        let (first, second) = if first.0 < second.0 { (first, second) } else { (second, first) };
        (self.first_setting[first.0] + first.1) * self.settings.len() + self.first_setting[second.0] + second.1
    }

    fn any_left(&self, random: &mut SplitMix64) -> Option<(Setting, Setting)> {
        if self.left == 0 {
            return None;
        }
        let start = random.below(self.is_open.len());
        let index = (start..self.is_open.len()).chain(0..start).find(|&index| self.is_open[index])?;
        Some((self.settings[index / self.settings.len()], self.settings[index % self.settings.len()]))
    }

    /// The value of a feature that opens pairs meet most in, given what the row holds already; `None` if all are
    /// excluded.
    fn best_value(
        &self,
        row: &[Option<usize>],
        feature: usize,
        excludes: &impl Fn(Setting, Setting) -> bool,
        random: &mut SplitMix64,
    ) -> Option<usize> {
        let size = self.settings.iter().filter(|setting| setting.0 == feature).count();
        let others: Vec<Setting> =
            row.iter().enumerate().filter_map(|(other, value)| value.map(|value| (other, value))).collect();
        let start = random.below(size);
        let values = (start..size).chain(0..start);
        let allowed = values.filter(|&value| {
            others.iter().all(|&other| !excludes((feature, value), other) && !excludes(other, (feature, value)))
        });
        let gain =
            |value: usize| others.iter().filter(|&&other| self.is_open[self.index((feature, value), other)]).count();
        // The last of the best, and the start is random: no value is favoured.
        allowed.max_by_key(|&value| gain(value))
    }

    fn cover(&mut self, row: &[usize]) {
        for second in 0..row.len() {
            for first in 0..second {
                let index = self.index((first, row[first]), (second, row[second]));
                self.left -= usize::from(self.is_open[index]);
                self.is_open[index] = false;
            }
        }
    }
}

fn shuffle(order: &mut [usize], random: &mut SplitMix64) {
    for last in (1..order.len()).rev() {
        order.swap(last, random.below(last + 1));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 0 and 3 of the first two features never meet.
    fn excludes(first: Setting, second: Setting) -> bool {
        (first, second) == ((0, 0), (1, 3))
    }

    #[test]
    fn every_two_values_meet_unless_excluded() {
        let sizes = [5, 4, 3, 2, 2, 7];
        let rows = covering_rows(&sizes, excludes, 0, 1);
        for (first, second) in (0..sizes.len()).flat_map(|second| (0..second).map(move |first| (first, second))) {
            for (x, y) in (0..sizes[first]).flat_map(|x| (0..sizes[second]).map(move |y| (x, y))) {
                let meet = rows.iter().any(|row| row[first] == x && row[second] == y);
                assert_eq!(meet, !excludes((first, x), (second, y)), "{first}: {x}, {second}: {y}");
            }
        }
        // The two largest features alone have 35 pairs.
        assert!((35..60).contains(&rows.len()), "{}", rows.len());
    }

    #[test]
    fn rows_are_as_many_as_asked_for_and_the_same_each_time() {
        let rows = covering_rows(&[2, 4], excludes, 200, 9);
        assert_eq!(rows.len(), 200);
        assert!(!rows.contains(&vec![0, 3]), "what is excluded stays so when all other pairs have met");
        assert_eq!(rows, covering_rows(&[2, 4], excludes, 200, 9));
        assert_ne!(rows, covering_rows(&[2, 4], excludes, 200, 10));
    }
}
