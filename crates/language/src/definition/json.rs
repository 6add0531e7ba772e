//! JSON with positions.

use serde_json::Number;

use super::problem::{Place, Problem};
use super::source::{Key, Node, NodeValue, number, shorten};
use super::{MAX_DEPTH, MAX_NODES};

/// The tree of a text in JSON.
pub(super) fn read(text: &str) -> Result<Node, Problem> {
    let mut json = Json { text, next: 0, mark: 0, place: Place::START, depth: 0, nodes: 0 };
    let root = json.value()?;
    json.space();
    if json.peek().is_some() { Err(json.wrong("expected the end of the text")) } else { Ok(root) }
}

struct Json<'t> {
    text: &'t str,
    /// The byte to be read next.
    next: usize,
    /// The last byte whose place was asked for, and its place. Places are asked for in the order of the text, so that
    /// counting goes over each byte once.
    mark: usize,
    place: Place,
    depth: usize,
    nodes: usize,
}

impl Json<'_> {
    fn value(&mut self) -> Result<Node, Problem> {
        self.space();
        let at = self.here();
        self.nodes += 1;
        if self.nodes > MAX_NODES {
            return Err(self.told(format!("more than {MAX_NODES} values")));
        }
        let value = match self.peek() {
            Some(b'{') => self.nested(Json::map)?,
            Some(b'[') => self.nested(Json::list)?,
            Some(b'"') => NodeValue::String(self.string()?),
            Some(b'-' | b'0'..=b'9') => NodeValue::Number(self.number()?),
            Some(b'a'..=b'z') => self.word()?,
            _ => return Err(self.wrong("expected a value")),
        };
        Ok(Node { value, at })
    }

    fn nested(&mut self, read: fn(&mut Self) -> Result<NodeValue, Problem>) -> Result<NodeValue, Problem> {
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            return Err(self.told(format!("more than {MAX_DEPTH} lists and maps inside each other")));
        }
        self.next += 1;
        let value = read(self)?;
        self.depth -= 1;
        Ok(value)
    }

    fn list(&mut self) -> Result<NodeValue, Problem> {
        let mut items = Vec::new();
        if self.skip(b']') {
            return Ok(NodeValue::List(items));
        }
        loop {
            items.push(self.value()?);
            if self.skip(b']') {
                return Ok(NodeValue::List(items));
            }
            if !self.skip(b',') {
                return Err(self.wrong("expected `,` or `]`"));
            }
        }
    }

    fn map(&mut self) -> Result<NodeValue, Problem> {
        let mut entries = Vec::new();
        if self.skip(b'}') {
            return Ok(NodeValue::Map(entries));
        }
        loop {
            self.space();
            if self.peek() != Some(b'"') {
                return Err(self.wrong("expected a key in double quotes"));
            }
            let at = self.here();
            let key = Key { text: self.string()?, at };
            if !self.skip(b':') {
                return Err(self.wrong("expected `:` after the key"));
            }
            entries.push((key, self.value()?));
            if self.skip(b'}') {
                return Ok(NodeValue::Map(entries));
            }
            if !self.skip(b',') {
                return Err(self.wrong("expected `,` or `}`"));
            }
        }
    }

    fn string(&mut self) -> Result<String, Problem> {
        let bytes = self.text.as_bytes();
        let mut end = self.next + 1;
        loop {
            match bytes.get(end) {
                None => return Err(self.told("this text has no closing quote")),
                Some(b'"') => break,
                Some(b'\\') => end += 2,
                Some(_) => end += 1,
            }
        }
        let raw = &self.text[self.next..=end];
        let text = serde_json::from_str(raw).map_err(|error| {
            let message = error.to_string();
            let cause = message.split(" at line ").next().unwrap_or_default().to_owned();
            self.next = self.text.floor_char_boundary(self.next + error.column().saturating_sub(1));
            self.told(cause)
        })?;
        self.next = end + 1;
        Ok(text)
    }

    fn number(&mut self) -> Result<Number, Problem> {
        let rest = &self.text[self.next..];
        let part = |byte: u8| matches!(byte, b'0'..=b'9' | b'-' | b'+' | b'.' | b'e' | b'E');
        let raw = &rest[..rest.bytes().position(|byte| !part(byte)).unwrap_or(rest.len())];
        if serde_json::from_str::<Number>(raw).is_err() {
            return Err(self.told(format!("`{}` is not a number", shorten(raw))));
        }
        let value = number(raw).map_err(|message| self.told(message))?;
        self.next += raw.len();
        Ok(value)
    }

    fn word(&mut self) -> Result<NodeValue, Problem> {
        let rest = &self.text[self.next..];
        let word = &rest[..rest.bytes().position(|byte| !byte.is_ascii_alphanumeric()).unwrap_or(rest.len())];
        let value = match word {
            "null" => NodeValue::Null,
            "true" => NodeValue::Bool(true),
            "false" => NodeValue::Bool(false),
            _ => return Err(self.told(format!("`{}` is not a value; text goes in double quotes", shorten(word)))),
        };
        self.next += word.len();
        Ok(value)
    }

    fn peek(&self) -> Option<u8> {
        self.text.as_bytes().get(self.next).copied()
    }

    fn space(&mut self) {
        while matches!(self.peek(), Some(b' ' | b'\t' | b'\n' | b'\r')) {
            self.next += 1;
        }
    }

    fn skip(&mut self, byte: u8) -> bool {
        self.space();
        let there = self.peek() == Some(byte);
        self.next += usize::from(there);
        there
    }

    fn here(&mut self) -> Place {
        for c in self.text[self.mark..self.next].chars() {
            if c == '\n' {
                self.place = Place { line: self.place.line + 1, column: 1 };
            } else {
                self.place.column += 1;
            }
        }
        self.mark = self.next;
        self.place
    }

    fn told(&mut self, message: impl Into<String>) -> Problem {
        Problem::new("", self.here(), message)
    }

    fn wrong(&mut self, expected: &str) -> Problem {
        let found = match self.text[self.next..].chars().next() {
            Some(c) => format!("found `{c}`"),
            None => "the text ends here".into(),
        };
        self.told(format!("{expected}, {found}"))
    }
}
