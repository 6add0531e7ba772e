//! A payload on the command line: JSON, `@FILE`, or `-` for standard input.

use std::io::Read;

use serde_json::Value;

use super::trouble::Trouble;

pub fn read(given: &str) -> Result<Value, Trouble> {
    let (text, from) = match given.strip_prefix('@') {
        Some(path) => (std::fs::read_to_string(path).map_err(|error| unreadable(path, &error))?, path),
        None if given == "-" => {
            let mut text = String::new();
            std::io::stdin().read_to_string(&mut text).map_err(|error| unreadable("standard input", &error))?;
            (text, "standard input")
        }
        None => (given.to_owned(), "the payload"),
    };
    serde_json::from_str(&text).map_err(|error| {
        Trouble::usage(format!("{from} is not JSON: {error}"))
            .help("quote a string: '\"text\"'; @FILE reads a file, - reads standard input")
    })
}

/// A number on the command line, with an error in plain words.
pub fn whole<T: TryFrom<i64>>(given: &str) -> Result<T, String> {
    let number: i64 = given.parse().map_err(|_| "expected a whole number".to_owned())?;
    T::try_from(number).map_err(|_| "the number is out of range".to_owned())
}

/// The number of items to list.
pub fn at_least_one(given: &str) -> Result<usize, String> {
    match whole(given)? {
        0 => Err("expected 1 or more".to_owned()),
        count => Ok(count),
    }
}

fn unreadable(what: &str, error: &std::io::Error) -> Trouble {
    Trouble::usage(format!("cannot read {what}: {error}"))
}
