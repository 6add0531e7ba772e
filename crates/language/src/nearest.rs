//! "Did you mean …?" suggestions.

/// The name in `known` that `found` was probably meant to be.
pub fn nearest<'a>(found: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    // Longer names get no suggestion: the comparison takes quadratic time.
    const LONGEST: usize = 64;
    if found.len() > LONGEST {
        return None;
    }
    let close = |name: &&str| name.len() <= LONGEST && !name.is_empty();
    let (distance, name) = known
        .into_iter()
        .filter(close)
        .map(|name| (distance(found, name), name))
        .min_by_key(|(distance, _)| *distance)?;
    (distance <= found.chars().count().max(name.chars().count()) / 2).then_some(name)
}

pub(crate) fn did_you_mean<'a>(found: &str, known: impl IntoIterator<Item = &'a str>) -> Option<String> {
    nearest(found, known).map(|name| format!("did you mean `{name}`?"))
}

/// Edit distance: letters to insert, drop, replace or swap with their neighbour.
fn distance(a: &str, b: &str) -> usize {
    let fold = |text: &str| text.chars().map(|c| c.to_ascii_lowercase()).collect::<Vec<_>>();
    let (a, b) = (fold(a), fold(b));
    let mut before = vec![0; b.len() + 1];
    let mut last: Vec<usize> = (0..=b.len()).collect();
    for i in 1..=a.len() {
        let mut row = vec![i; b.len() + 1];
        for j in 1..=b.len() {
            let same = usize::from(a[i - 1] != b[j - 1]);
            row[j] = (last[j] + 1).min(row[j - 1] + 1).min(last[j - 1] + same);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                row[j] = row[j].min(before[j - 2] + 1);
            }
        }
        before = std::mem::replace(&mut last, row);
    }
    last[b.len()]
}
