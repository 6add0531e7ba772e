//! Output of commands: text with colours for people, JSON for programs.

use std::fmt::Display;
use std::io::{self, IsTerminal, Write};

use serde::Serialize;

use super::trouble::Trouble;
use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

/// The size that is assumed without a terminal.
const WIDTH: usize = 100;
const HEIGHT: usize = 40;
const NARROWEST: usize = 40;

/// Such as "1 task" and "2 tasks".
pub fn counted(count: u64, what: &str) -> String {
    let plural = if count == 1 { "" } else { "s" };
    format!("{count} {what}{plural}")
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum Color {
    #[default]
    Auto,
    Always,
    Never,
}

/// The meaning of a text, which determines its colour.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ink {
    Plain,
    Strong,
    Faint,
    Good,
    Bad,
    Busy,
    Note,
}

impl Ink {
    fn code(self) -> Option<&'static str> {
        match self {
            Ink::Plain => None,
            Ink::Strong => Some("1"),
            Ink::Faint => Some("2"),
            Ink::Good => Some("32"),
            Ink::Bad => Some("31"),
            Ink::Busy => Some("36"),
            Ink::Note => Some("33"),
        }
    }

    /// The ink for the status of a run, step or worker.
    pub fn of_status(status: &str) -> Ink {
        match status {
            "completed" | "online" => Ink::Good,
            "failed" | "offline" => Ink::Bad,
            "running" => Ink::Busy,
            "waiting" | "paused" | "draining" => Ink::Note,
            "skipped" | "cancelled" | "pending" => Ink::Faint,
            _ => Ink::Plain,
        }
    }
}

/// A line of text in pieces, each with its ink.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Line(Vec<(Ink, String)>);

impl Line {
    pub fn plain(text: impl Into<String>) -> Line {
        Line::default().with(Ink::Plain, text)
    }

    /// Replaces control and bidirectional override characters, which names and messages may contain and which must not
    /// reach a terminal.
    pub fn with(mut self, ink: Ink, text: impl Into<String>) -> Line {
        let text: String = text.into();
        let acts = |c: char| c.is_control() || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
        let text = if text.contains(acts) { text.replace(acts, " ") } else { text };
        self.0.push((ink, text));
        self
    }

    pub fn width(&self) -> usize {
        self.0.iter().map(|(_, text)| text.width()).sum()
    }

    pub fn padded(self, width: usize) -> Line {
        let missing = width.saturating_sub(self.width());
        self.with(Ink::Plain, " ".repeat(missing))
    }

    pub fn followed_by(mut self, other: Line) -> Line {
        self.0.extend(other.0);
        self
    }

    /// Truncates to `width` columns, with `…` at the end if something was cut.
    pub fn cut(self, width: usize) -> Line {
        if self.width() <= width {
            return self;
        }
        let mut left = width.saturating_sub(1);
        let mut cut = Line::default();
        for (ink, text) in self.0 {
            let mut piece = String::new();
            for letter in text.chars() {
                match left.checked_sub(letter.width().unwrap_or(0)) {
                    Some(rest) => left = rest,
                    // Drop everything after it too, even narrower letters.
                    None => {
                        left = 0;
                        break;
                    }
                }
                piece.push(letter);
            }
            cut.0.push((ink, piece));
        }
        cut.with(Ink::Faint, "…")
    }

    pub fn paint(&self, color: bool) -> String {
        let mut out = String::new();
        for (ink, text) in &self.0 {
            match ink.code() {
                Some(code) if color && !text.is_empty() => out.push_str(&format!("\x1b[{code}m{text}\x1b[0m")),
                _ => out.push_str(text),
            }
        }
        out.truncate(out.trim_end().len());
        out
    }
}

#[derive(Debug, Clone)]
pub struct Screen {
    pub json: bool,
    pub color: bool,
    /// Whether logs, which go to standard error, are coloured.
    pub log_colors: bool,
    /// Standard output is a terminal on which lines can be redrawn.
    pub live: bool,
}

impl Screen {
    pub fn new(json: bool, color: Color) -> Screen {
        let terminal = io::stdout().is_terminal();
        let dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
        let wanted = std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
        let colors = |terminal: bool| match color {
            Color::Always => true,
            Color::Never => false,
            Color::Auto => terminal && wanted && !dumb,
        };
        Screen {
            json,
            color: colors(terminal),
            log_colors: colors(io::stderr().is_terminal()),
            live: terminal && !dumb,
        }
    }

    /// Columns and rows.
    pub fn size(&self) -> (usize, usize) {
        match rustix::termios::tcgetwinsize(io::stdout()) {
            Ok(size) if self.live && size.ws_col > 0 => {
                (usize::from(size.ws_col).max(NARROWEST), usize::from(size.ws_row).max(4))
            }
            _ => (WIDTH, HEIGHT),
        }
    }

    pub fn width(&self) -> usize {
        self.size().0
    }

    /// Where lines are cut: at the edge of a terminal, or not at all, since piped output may be searched.
    pub fn edge(&self) -> usize {
        if self.live { self.width() } else { usize::MAX }
    }

    pub fn say(&self, text: impl Display) -> Result<(), Trouble> {
        let mut out = io::stdout().lock();
        writeln!(out, "{text}")?;
        Ok(out.flush()?)
    }

    pub fn line(&self, line: &Line) -> Result<(), Trouble> {
        self.say(line.paint(self.color))
    }

    pub fn lines(&self, lines: &[Line]) -> Result<(), Trouble> {
        lines.iter().try_for_each(|line| self.line(line))
    }

    /// Prints each line as one row of the screen, cut at its edge.
    pub fn rows(&self, lines: Vec<Line>) -> Result<(), Trouble> {
        lines.into_iter().try_for_each(|line| self.line(&line.cut(self.edge())))
    }

    /// One JSON document, indented.
    pub fn document(&self, value: &impl Serialize) -> Result<(), Trouble> {
        self.say(serde_json::to_string_pretty(value).map_err(io::Error::from)?)
    }

    /// The result of a command: as JSON, or as text.
    pub fn answer(&self, json: &impl Serialize, text: impl Display) -> Result<(), Trouble> {
        if self.json { self.document(json) } else { self.say(text) }
    }

    /// One JSON document per line.
    pub fn ndjson(&self, value: &impl Serialize) -> Result<(), Trouble> {
        self.say(serde_json::to_string(value).map_err(io::Error::from)?)
    }

    /// Prints to standard error, for text that is not part of the output.
    pub fn aside(&self, text: impl Display) {
        let _ = writeln!(io::stderr().lock(), "{text}");
    }
}

/// Pads each column to its widest cell, except the last one.
pub fn table(heads: &[&str], rows: &[Vec<Line>]) -> Vec<Line> {
    let mut widths: Vec<usize> = heads.iter().map(|head| head.width()).collect();
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.width());
        }
    }
    let line = |cells: Vec<Line>| {
        let mut cells = cells.into_iter().zip(&widths).peekable();
        let mut line = Line::default();
        while let Some((cell, width)) = cells.next() {
            let cell = if cells.peek().is_some() { cell.padded(width + 2) } else { cell };
            line = line.followed_by(cell);
        }
        line
    };
    let head = heads.iter().map(|head| Line::default().with(Ink::Faint, *head)).collect();
    std::iter::once(head).chain(rows.iter().cloned()).map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn letters_are_as_wide_as_a_terminal_draws_them() {
        let line = Line::plain("日本語").with(Ink::Bad, "ab");
        assert_eq!(line.width(), 8);
        for (width, cut) in [(8, "日本語ab"), (7, "日本語…"), (6, "日本…"), (5, "日本…"), (4, "日…"), (1, "…")]
        {
            let line = line.clone().cut(width);
            assert_eq!(line.paint(false), cut);
            assert!(line.width() <= width);
        }
        assert_eq!(Line::plain("a\u{202e}b\u{1b}c").paint(false), "a b c");
    }

    #[test]
    fn what_others_wrote_cannot_steer_the_terminal() {
        let line = Line::default().with(Ink::Bad, "a\x1b[2Jb\rc");
        assert_eq!(line.paint(false), "a [2Jb c");
    }

    #[test]
    fn a_line_is_cut_where_the_screen_ends() {
        let line = Line::plain("abc").with(Ink::Good, "defg");
        assert_eq!(line.clone().cut(7).paint(false), "abcdefg");
        assert_eq!(line.cut(5).paint(false), "abcd…");
    }

    #[test]
    fn columns_are_as_wide_as_what_is_in_them() {
        let rows = [vec![Line::plain("a"), Line::plain("b")], vec![Line::plain("long"), Line::plain("c")]];
        let lines: Vec<String> = table(&["x", "y"], &rows).iter().map(|line| line.paint(false)).collect();
        assert_eq!(lines, ["x     y", "a     b", "long  c"]);
    }
}
