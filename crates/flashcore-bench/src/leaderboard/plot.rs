//! The history of places as a picture.

use super::{Leaderboard, Place};
use crate::svg::{Anchor, Axis, Svg, series, short};

const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 360.0;

/// Times of some places, from promotion to promotion, with the floor of the first as a dashed line.
pub fn plot(board: &Leaderboard, places: &[&Place]) -> Svg {
    let mut svg = Svg::new("Leaders by commit", WIDTH, HEIGHT);
    let (left, right, bottom, top) = (70.0, WIDTH - 190.0, HEIGHT - 60.0, 52.0);
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
    for (index, (commit, _)) in commits.iter().enumerate() {
        svg.text("faint", Anchor::Middle, x.place(index as f64), bottom + 18.0, commit);
    }
    svg.text("faint", Anchor::Middle, f64::midpoint(left, right), bottom + 38.0, "commit");
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
            svg.text("faint", Anchor::Start, right + 6.0, last + 4.0, &place.problem.to_string());
        }
    }
    svg
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::leaderboard::{Candidate, promote};
    use crate::record::{Measurement, Measurements, Origin, Record};

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
