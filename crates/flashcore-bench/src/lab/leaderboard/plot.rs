//! Plot of the leaders' times over time.

use super::{Leaderboard, Place};
use crate::lab::svg::{Anchor, Axis, Svg, series, short};

const WIDTH: f64 = 760.0;
/// The least height, and what each place adds so that its label has a line of its own.
const HEIGHT: f64 = 360.0;
const LABEL: f64 = 15.0;
/// The width of a commit of ten characters.
const COMMIT: f64 = 78.0;

/// Times of some places, from promotion to promotion, with the floor of the first as a dashed line.
pub fn plot(board: &Leaderboard, places: &[&Place]) -> Svg {
    let height = HEIGHT.max(130.0 + LABEL * places.len() as f64);
    let mut svg = Svg::new("Leaders by commit", WIDTH, height);
    let (left, right, bottom, top) = (70.0, WIDTH - 220.0, height - 74.0, 52.0);
    // Commits in the order in which they were promoted: the axis of all places.
    let mut commits: Vec<(String, String)> = Vec::new();
    let shown = board.promotions.iter().filter(|promotion| places.contains(&&promotion.place));
    for promotion in shown.clone() {
        let commit = (promotion.build.short(), promotion.measured.clone());
        if !commits.contains(&commit) {
            commits.push(commit);
        }
    }
    let times: Vec<f64> = shown.clone().map(|promotion| promotion.median_seconds * 1e6).collect();
    let low = times.iter().copied().fold(f64::INFINITY, f64::min);
    let high = times.iter().copied().fold(0.0, f64::max);
    let y = Axis::logarithmic(low / 1.5, high * 1.5, bottom, top);
    let x = Axis::linear(-0.5, commits.len() as f64 - 0.5, left, right);
    svg.vertical_axis(&y, left, right, "median, us");
    // Names of commits take turns in two lines, and where that is not enough, some are left out.
    let columns_of_a_name = (COMMIT * commits.len() as f64 / (right - left)).ceil().max(1.0) as usize;
    for (index, (commit, _)) in commits.iter().enumerate().step_by(columns_of_a_name.div_ceil(2)) {
        let is_second = columns_of_a_name > 1 && index / columns_of_a_name.div_ceil(2) % 2 == 1;
        let y = bottom + if is_second { 34.0 } else { 18.0 };
        svg.text("faint", Anchor::Middle, x.place(index as f64), y, commit);
    }
    svg.text("faint", Anchor::Middle, f64::midpoint(left, right), bottom + 54.0, "commit");
    let last = |place: &&Place| board.leader(place).map_or(bottom, |leader| y.place(leader.median_seconds * 1e6));
    let labels = apart(&places.iter().map(last).collect::<Vec<f64>>(), LABEL, (top, bottom));
    for (index, place) in places.iter().enumerate() {
        let mut points = Vec::new();
        for promotion in board.history(place) {
            let commit = (promotion.build.short(), promotion.measured.clone());
            let column = commits.iter().position(|known| *known == commit).unwrap_or(0);
            let us = promotion.median_seconds * 1e6;
            let point = (x.place(column as f64), y.place(us));
            let tip =
                format!("{}: {} at {}, {} us", place.problem, promotion.kernel, promotion.build.short(), short(us));
            svg.dot(&series(index), point.0, point.1, 4.0, &tip);
            points.push(point);
        }
        // A leader stays until it is replaced.
        if let Some(&(_, last)) = points.last() {
            points.push((right, last));
            svg.path(&series(index), &points, false);
            // A label that was moved aside for others gets a line to its point.
            svg.line("rule", (right, last), (right + 18.0, labels[index]));
            svg.text("faint", Anchor::Start, right + 22.0, labels[index] + 4.0, &place.problem.to_string());
        }
    }
    svg
}

/// Heights near those that are wanted, at least `distance` from each other, within a range if they all fit there.
fn apart(wanted: &[f64], distance: f64, (top, bottom): (f64, f64)) -> Vec<f64> {
    let mut order: Vec<usize> = (0..wanted.len()).collect();
    order.sort_by(|one, other| wanted[*one].total_cmp(&wanted[*other]));
    let mut heights = wanted.to_vec();
    let mut least = top;
    for &index in &order {
        heights[index] = heights[index].max(least);
        least = heights[index] + distance;
    }
    // What was pushed out below moves up, and pushes others before it.
    let mut most = bottom;
    for &index in order.iter().rev() {
        heights[index] = heights[index].min(most);
        most = heights[index] - distance;
    }
    heights
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_have_room() {
        assert_eq!(apart(&[50.0, 10.0, 12.0], 15.0, (0.0, 100.0)), [50.0, 10.0, 25.0]);
        // At the bottom they move up, in the order of their places.
        assert_eq!(apart(&[99.0, 98.0, 97.0], 15.0, (0.0, 100.0)), [100.0, 85.0, 70.0]);
        let crowded = apart(&[40.0; 5], 20.0, (0.0, 100.0));
        assert_eq!(crowded, [20.0, 40.0, 60.0, 80.0, 100.0]);
    }
    use crate::lab::leaderboard::{Candidate, promote};
    use crate::lab::record::{Measurement, Measurements, Origin, Record};

    #[test]
    fn every_promotion_is_a_dot() {
        let record = |seconds: f64, commit: &str| {
            let mut origin = Origin::for_tests();
            origin.build.commit = Some(commit.to_owned());
            let rows = vec![Measurement::for_tests("1x8x512x64", seconds)];
            Candidate::Measurements(Record::new(origin, Measurements { rows }))
        };
        let mut board = Leaderboard::default();
        for (seconds, commit) in [(2e-3, "aaaaaaaaaaaa"), (1e-3, "bbbbbbbbbbbb")] {
            board.promotions.extend(promote(&Leaderboard::default(), &record(seconds, commit), 0.1).expect("good"));
        }
        let picture = plot(&board, &board.places()).inline();
        assert_eq!(picture.matches("<circle").count(), 2);
        assert_eq!(picture.matches(">aaaaaaaaaa<").count(), 1);
    }
}
