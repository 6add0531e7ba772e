//! Names that an unknown one was probably meant to be.

/// How many are offered.
const MOST: usize = 3;
/// Nobody mistypes a longer name into another; and the comparison is quadratic.
const LONGEST: usize = 64;

/// Those of `known` that are near `found`, nearest first.
pub fn near(found: &str, known: &[&str]) -> Vec<String> {
    if found.len() > LONGEST {
        return Vec::new();
    }
    let bound = |name: &str| found.len().max(name.len()) / 3;
    let mut near: Vec<(usize, &str)> = known
        .iter()
        .filter(|name| name.len() <= LONGEST)
        .map(|name| (distance(found, name), *name))
        .filter(|(distance, name)| *distance <= bound(name) || name.contains(found))
        .collect();
    near.sort();
    near.into_iter().take(MOST).map(|(_, name)| name.to_owned()).collect()
}

/// How many letters to insert, drop or replace.
fn distance(a: &str, b: &str) -> usize {
    let (a, b) = (a.to_lowercase(), b.to_lowercase());
    let mut last: Vec<usize> = (0..=b.chars().count()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut row = vec![i + 1];
        for (j, y) in b.chars().enumerate() {
            let replaced = last[j] + usize::from(x != y);
            row.push(replaced.min(last[j + 1] + 1).min(row[j] + 1));
        }
        last = row;
    }
    last[last.len() - 1]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_near_is_offered_nearest_first() {
        let known = ["order", "reorder", "refund", "shipping"];
        assert_eq!(near("ordr", &known), ["order"]);
        assert_eq!(near("order", &known), ["order", "reorder"]);
        assert_eq!(near("xyz", &known), Vec::<String>::new());
    }
}
