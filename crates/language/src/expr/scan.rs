//! Scans a text before it is parsed: counts its tokens and their nesting. The parser is recursive, so whatever would
//! exhaust its stack is rejected here.

use super::ExprError;

const MAX_BYTES: usize = 16 * 1024;
const MAX_TOKENS: usize = 1_000;
/// Nesting of brackets and conditionals together.
const MAX_NESTING: usize = 32;
/// Consecutive operators, fields and indexes, counting those around an open bracket: `a.b.c + d + e`. Each is a level
/// of the tree too.
const MAX_CHAIN: usize = 128;
/// Consecutive `!` and `-`.
const MAX_PREFIXES: usize = 8;

/// Rejects what the parser cannot handle safely.
pub(super) fn check(text: &str) -> Result<(), ExprError> {
    if text.len() > MAX_BYTES {
        return Err(error(0, format!("the expression is longer than {MAX_BYTES} bytes")));
    }
    let mut nesting = Nesting::default();
    let (mut count, mut prefixes) = (0, 0);
    for token in Tokens::new(text, 0) {
        let (at, token) = token?;
        count += 1;
        prefixes = if matches!(token, Token::Sign('!' | '-')) { prefixes + 1 } else { 0 };
        if count > MAX_TOKENS {
            return Err(error(at, format!("the expression has more than {MAX_TOKENS} tokens")));
        }
        if prefixes > MAX_PREFIXES {
            return Err(error(at, format!("more than {MAX_PREFIXES} `!` or `-` in a row")));
        }
        nesting.step(at, token)?;
    }
    if count == 0 {
        return Err(error(0, "the expression is empty".to_string()));
    }
    nesting.end()
}

/// The position of the `}` that closes an expression starting at `from`; none if it is not closed.
pub(super) fn closing_brace(text: &str, from: usize) -> Result<Option<usize>, ExprError> {
    let mut open = 0;
    for token in Tokens::new(text, from) {
        match token? {
            (_, Token::Open('{')) => open += 1,
            (at, Token::Close('}')) if open == 0 => return Ok(Some(at)),
            (_, Token::Close('}')) => open -= 1,
            _ => {}
        }
    }
    Ok(None)
}

/// The source of the token at `from`.
pub(super) fn token_at(text: &str, from: usize) -> Option<&str> {
    let mut tokens = Tokens::new(text, from);
    let (at, _) = tokens.next()?.ok()?;
    text.get(at..tokens.at)
}

#[derive(Default)]
struct Nesting {
    /// Open brackets: character, position, and the level around them.
    open: Vec<(char, usize, Level)>,
    /// Inside the innermost bracket.
    here: Level,
    depth: usize,
    chain: usize,
}

/// The conditionals and chain links that enclose the next token, within one pair of brackets.
#[derive(Default, Clone, Copy)]
struct Level {
    conditionals: usize,
    links: usize,
}

impl Nesting {
    fn step(&mut self, at: usize, token: Token) -> Result<(), ExprError> {
        match token {
            Token::Open(bracket) => {
                self.link();
                self.open.push((bracket, at, std::mem::take(&mut self.here)));
                self.depth += 1;
            }
            Token::Close(bracket) => self.close(at, bracket)?,
            Token::Sign('?') => {
                self.unlink();
                self.here.conditionals += 1;
                self.depth += 1;
            }
            Token::Sign(',') => {
                self.unlink();
                self.depth -= std::mem::take(&mut self.here.conditionals);
            }
            Token::Sign(':') | Token::Logic => self.unlink(),
            Token::Sign(_) => self.link(),
            Token::Word => {}
        }
        if self.depth > MAX_NESTING {
            return Err(error(at, format!("the expression is nested more than {MAX_NESTING} deep")));
        }
        if self.chain > MAX_CHAIN {
            return Err(error(at, format!("more than {MAX_CHAIN} operators and fields in a row")));
        }
        Ok(())
    }

    fn link(&mut self) {
        self.here.links += 1;
        self.chain += 1;
    }

    fn unlink(&mut self) {
        self.chain -= std::mem::take(&mut self.here.links);
    }

    fn close(&mut self, at: usize, bracket: char) -> Result<(), ExprError> {
        match self.open.pop() {
            Some((open, _, outer)) if matches!((open, bracket), ('(', ')') | ('[', ']') | ('{', '}')) => {
                self.unlink();
                self.depth -= 1 + self.here.conditionals;
                self.here = outer;
                Ok(())
            }
            Some((open, from, _)) => {
                Err(error(at, format!("found `{bracket}`, but `{open}` at column {} is still open", from + 1)))
            }
            None => Err(error(at, format!("unmatched `{bracket}`"))),
        }
    }

    fn end(self) -> Result<(), ExprError> {
        match self.open.last() {
            Some((open, at, _)) => Err(error(*at, format!("`{open}` is never closed"))),
            None => Ok(()),
        }
    }
}

/// As coarse as the checks allow: a number may be split, a string or a bracket never.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Token {
    Open(char),
    Close(char),
    /// An operator, by its first character.
    Sign(char),
    /// `&&` or `||`: they do not make the tree deeper, however many there are.
    Logic,
    Word,
}

struct Tokens<'t> {
    text: &'t str,
    at: usize,
}

impl<'t> Tokens<'t> {
    fn new(text: &'t str, at: usize) -> Tokens<'t> {
        Tokens { text, at }
    }

    fn rest(&self) -> &'t str {
        self.text.get(self.at..).unwrap_or_default()
    }

    fn skip_blank(&mut self) {
        loop {
            let rest = self.rest();
            let mut blank = rest.len() - rest.trim_start_matches([' ', '\t', '\r', '\n', '\u{c}']).len();
            if rest.starts_with("//") {
                blank = rest.find('\n').unwrap_or(rest.len());
            }
            if blank == 0 {
                return;
            }
            self.at += blank;
        }
    }

    fn token(&mut self, first: char) -> Result<Token, ExprError> {
        let rest = self.rest();
        if let Some((prefix, raw)) = string_prefix(rest) {
            self.at += string(self.text, self.at, prefix, raw)?;
            return Ok(Token::Word);
        }
        let second = rest.chars().nth(1);
        let (token, len) = match first {
            'a'..='z' | 'A'..='Z' | '0'..='9' | '_' => {
                let end = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_');
                let end = end.unwrap_or(rest.len());
                (if rest.get(..end) == Some("in") { Token::Sign('i') } else { Token::Word }, end)
            }
            '`' => (
                Token::Word,
                quoted_name(rest).ok_or_else(|| error(self.at, "a name in ` quotes is never closed".to_string()))?,
            ),
            '(' | '[' | '{' => (Token::Open(first), 1),
            ')' | ']' | '}' => (Token::Close(first), 1),
            '=' | '!' | '<' | '>' if second == Some('=') => (Token::Sign('='), 2),
            '&' | '|' if second == Some(first) => (Token::Logic, 2),
            '+' | '-' | '*' | '/' | '%' | '<' | '>' | '!' | '?' | ':' | '.' | ',' => (Token::Sign(first), 1),
            '=' if matches!(second, Some('<' | '>')) => {
                let meant = second.unwrap_or_default();
                return Err(error(self.at, format!("found `={meant}`; did you mean `{meant}=`?")));
            }
            '=' | '&' | '|' => return Err(error(self.at, format!("found `{first}`; did you mean `{first}{first}`?"))),
            _ => return Err(error(self.at, format!("unexpected character `{first}`"))),
        };
        self.at += len;
        Ok(token)
    }
}

impl Iterator for Tokens<'_> {
    type Item = Result<(usize, Token), ExprError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.skip_blank();
        let first = self.rest().chars().next()?;
        let at = self.at;
        Some(self.token(first).map(|token| (at, token)))
    }
}

/// The length of the letters before the opening quote, and whether they make the string raw.
fn string_prefix(rest: &str) -> Option<(usize, bool)> {
    let prefixes = [("", false), ("r", true), ("b", false), ("br", true)];
    let quote = rest.bytes().take(3).position(|byte| matches!(byte, b'"' | b'\''))?;
    let letters = rest.get(..quote)?;
    let (_, raw) = prefixes.into_iter().find(|(prefix, _)| letters.eq_ignore_ascii_case(prefix))?;
    Some((quote, raw))
}

/// The length of the string at `at`. Escapes are checked here, because the parser would split the text differently at a
/// bad one.
fn string(text: &str, at: usize, prefix: usize, raw: bool) -> Result<usize, ExprError> {
    let whole = text.get(at..).unwrap_or_default();
    let body = whole.get(prefix..).unwrap_or_default();
    let triple = ["\"\"\"", "'''"].into_iter().find(|quotes| body.starts_with(quotes));
    let quotes = triple.or(body.get(..1)).unwrap_or_default();
    let mut here = quotes.len();
    while let Some(rest) = body.get(here..).filter(|rest| !rest.is_empty()) {
        if rest.starts_with(quotes) {
            return Ok(prefix + here + quotes.len());
        }
        here += match rest.chars().next() {
            Some('\\') if !raw => {
                escape(rest).ok_or_else(|| error(at + prefix + here, "unknown escape in the string".to_string()))?
            }
            Some('\n' | '\r') if triple.is_none() => break,
            Some(other) => other.len_utf8(),
            None => break,
        };
    }
    Err(error(at, "the string is never closed".to_string()))
}

fn escape(rest: &str) -> Option<usize> {
    let digits = |count: usize, radix: u32| {
        let digits = rest.get(2..2 + count)?;
        digits.chars().all(|c| c.is_digit(radix)).then_some(2 + count)
    };
    match rest.chars().nth(1)? {
        'a' | 'b' | 'f' | 'n' | 'r' | 't' | 'v' | '"' | '\'' | '\\' | '?' | '`' => Some(2),
        'x' | 'X' => digits(2, 16),
        'u' => digits(4, 16),
        'U' => digits(8, 16),
        '0'..='3' => digits(2, 8),
        _ => None,
    }
}

fn quoted_name(rest: &str) -> Option<usize> {
    let name = rest.get(1..)?;
    let end = name.find(|c: char| !c.is_ascii_alphanumeric() && !"_.-/ ".contains(c))?;
    (end > 0 && name.get(end..)?.starts_with('`')).then_some(end + 2)
}

pub(super) fn error(offset: usize, message: String) -> ExprError {
    ExprError { message, offset }
}
