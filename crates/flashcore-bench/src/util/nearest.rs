//! "Did you mean": the nearest known name.

use crate::util::printable::printable;

/// Edits (an insertion, a deletion, a change of one character) from one word to the other.
fn distance(one: &str, other: &str) -> usize {
    let other: Vec<char> = other.chars().collect();
    let mut row: Vec<usize> = (0..=other.len()).collect();
    for (above, letter) in one.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = above + 1;
        for (column, candidate) in other.iter().enumerate() {
            let changed = diagonal + usize::from(letter != *candidate);
            diagonal = row[column + 1];
            row[column + 1] = changed.min(row[column] + 1).min(diagonal + 1);
        }
    }
    row[other.len()]
}

/// Of the names that there are, the nearest to one that there is not; nothing when all are far.
pub fn nearest<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let lower = name.to_lowercase();
    known
        .into_iter()
        .map(|candidate| (distance(&lower, &candidate.to_lowercase()), candidate))
        .filter(|(edits, candidate)| *edits * 2 <= lower.chars().count().max(candidate.chars().count()))
        .min_by_key(|(edits, _)| *edits)
        .map(|(_, candidate)| candidate)
}

/// A complaint about an unknown name: what kind of thing it is, what was probably meant, what there is.
pub fn unknown(kind: &str, name: &str, known: &[&str]) -> String {
    if known.is_empty() {
        return format!("there is no {kind} `{name}`; there are none at all");
    }
    let there_are = known.join(", ");
    let meant = nearest(name, known.iter().copied());
    let name = printable(name);
    match meant {
        Some(meant) => format!("there is no {kind} `{name}`; did you mean `{meant}`? There are {there_are}"),
        None => format!("there is no {kind} `{name}`; there are {there_are}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn near_names_are_found_and_far_ones_are_not() {
        let known = ["l4", "l40s", "a100", "h100", "h200", "rtx-4090"];
        let check = |name: &str, expected: Option<&str>| assert_eq!(nearest(name, known), expected, "{name}");
        check("H201", Some("h200"));
        check("rtx4090", Some("rtx-4090"));
        check("l40", Some("l4"));
        check("graphics card", None);
    }

    #[test]
    fn an_unknown_name_is_told_with_the_nearest() {
        assert_eq!(
            unknown("device", "h201", &["h100", "h200"]),
            "there is no device `h201`; did you mean `h200`? There are h100, h200"
        );
        assert_eq!(unknown("device", "toaster", &["h100"]), "there is no device `toaster`; there are h100");
    }
}
