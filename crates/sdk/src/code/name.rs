//! Names of entries: what a code flow is remembered by.

use std::fmt;

/// The longest name that a server accepts, in bytes.
pub(crate) const MAX_NAME_BYTES: usize = 512;
/// The prefix of the steps that undo others.
pub(crate) const UNDO: &str = "undo:";
/// The same while the run goes on, when the server does not accept steps with the prefix above.
pub(crate) const UNDONE: &str = "undone:";

/// The name of a step, call, sleep, wait or child: `"pay"`, or with a key, `("price", sku)`.
///
/// A name that is asked for again after it has ended gets a number: `pay#2`. Work that runs at the same time needs a key
/// to tell its parts apart: `("price", "a-1")` is `price[a-1]`. In keys, `]`, `/` and `\` are escaped.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Name(String);

impl Name {
    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }
}

impl From<&str> for Name {
    fn from(name: &str) -> Name {
        Name(name.to_owned())
    }
}

impl From<String> for Name {
    fn from(name: String) -> Name {
        Name(name)
    }
}

impl From<&String> for Name {
    fn from(name: &String) -> Name {
        Name(name.clone())
    }
}

impl<S: AsRef<str>, K: fmt::Display> From<(S, K)> for Name {
    fn from((name, key): (S, K)) -> Name {
        let mut text = String::from(name.as_ref());
        text.push('[');
        for c in key.to_string().chars() {
            if matches!(c, ']' | '/' | '\\') {
                text.push('\\');
            }
            text.push(c);
        }
        text.push(']');
        Name(text)
    }
}

/// The name of the n-th use of a name in an execution.
pub(crate) fn numbered(name: &str, n: u32) -> String {
    if n == 1 { name.to_owned() } else { format!("{name}#{n}") }
}

/// Why a name cannot be used. The server refuses the same names; here it costs no request.
pub(crate) fn problem(name: &str) -> Option<String> {
    let ends_in_number_after = |mark: char| {
        name.rsplit_once(mark).is_some_and(|(_, tail)| !tail.is_empty() && tail.chars().all(|c| c.is_ascii_digit()))
    };
    Some(match name {
        "" => "it is empty".to_owned(),
        _ if name.len() > MAX_NAME_BYTES => format!("it has more than {MAX_NAME_BYTES} bytes"),
        _ if name.starts_with('@') => "names that start with `@` are reserved".to_owned(),
        _ if name.starts_with(UNDO) || name.starts_with(UNDONE) => {
            format!("names that start with `{UNDO}` or `{UNDONE}` are reserved")
        }
        _ if name.chars().any(char::is_control) => "it contains control characters".to_owned(),
        _ if ends_in_number_after('~') => "names that end in `~` and a number are reserved".to_owned(),
        _ if ends_in_number_after('#') => {
            "names that end in `#` and a number are given to repeated names; use a key instead".to_owned()
        }
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_part_of_the_name_and_cannot_imitate_another() {
        for (name, written) in [
            (Name::from("pay"), "pay"),
            (Name::from(("price", 7)), "price[7]"),
            (Name::from(("price", "a/b]c\\d")), "price[a\\/b\\]c\\\\d]"),
            (Name::from((String::from("price"), "x")), "price[x]"),
        ] {
            assert_eq!(name.as_str(), written);
        }
        assert_eq!((numbered("pay", 1), numbered("pay", 2)), ("pay".to_owned(), "pay#2".to_owned()));
    }

    #[test]
    fn what_the_server_refuses_is_refused_here() {
        for bad in ["", "@x", "undo:pay", "undone:pay", "a\nb", "pay~2", "pay#2", &"x".repeat(513)] {
            assert!(problem(bad).is_some(), "{bad:?}");
        }
        for good in ["pay", "pay~", "pay~x", "pay#", "eu/pay", "price[7]", "größe", &"x".repeat(512)] {
            assert_eq!(problem(good), None, "{good:?}");
        }
    }
}
