//! "Did you mean": the known word closest to one that is not known.

/// Longer words are not compared: they are not typing mistakes.
const MAX_LETTERS: usize = 64;

/// The candidate that is fewest edits away, if that is few enough for a typing mistake.
pub(super) fn nearest<'c>(word: &str, candidates: impl IntoIterator<Item = &'c str>) -> Option<&'c str> {
    let most = (word.chars().count() / 3).clamp(1, 3);
    let distances = candidates.into_iter().filter_map(|candidate| Some((distance(word, candidate)?, candidate)));
    distances.filter(|(distance, _)| *distance <= most).min_by_key(|(distance, _)| *distance).map(|(_, found)| found)
}

/// "; did you mean `x`?" if there is such a word, else nothing.
pub(super) fn hint<'c>(word: &str, candidates: impl IntoIterator<Item = &'c str>) -> String {
    nearest(word, candidates).map(|found| format!("; did you mean `{found}`?")).unwrap_or_default()
}

fn distance(left: &str, right: &str) -> Option<usize> {
    if left.len() > MAX_LETTERS || right.len() > MAX_LETTERS {
        return None;
    }
    let right: Vec<char> = right.chars().flat_map(char::to_lowercase).collect();
    let mut row: Vec<usize> = (0..=right.len()).collect();
    for (i, l) in left.chars().flat_map(char::to_lowercase).enumerate() {
        let mut diagonal = i;
        let mut last = i + 1;
        for (cell, r) in row.iter_mut().skip(1).zip(&right) {
            let above = *cell;
            last = (diagonal + usize::from(l != *r)).min(above + 1).min(last + 1);
            diagonal = above;
            *cell = last;
        }
        if let Some(first) = row.first_mut() {
            *first = i + 1;
        }
    }
    row.last().copied()
}
