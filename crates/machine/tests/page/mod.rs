//! Parses a page of the documentation into its fenced blocks and tables.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

pub struct Page {
    pub name: &'static str,
    pub text: &'static str,
}

pub const README: Page = Page { name: "README.md", text: include_str!("../../../../README.md") };
pub const FLOWS: Page = Page { name: "docs/flows.md", text: include_str!("../../../../docs/flows.md") };
pub const EXPRESSIONS: Page =
    Page { name: "docs/expressions.md", text: include_str!("../../../../docs/expressions.md") };
pub const PERFORMANCE: Page =
    Page { name: "docs/performance.md", text: include_str!("../../../../docs/performance.md") };
pub const TIMELINE: Page = Page { name: "docs/timeline.md", text: include_str!("../../../../docs/timeline.md") };
pub const STORES: Page = Page { name: "docs/stores.md", text: include_str!("../../../../docs/stores.md") };
pub const PAGES: [Page; 12] = [
    README,
    FLOWS,
    EXPRESSIONS,
    TIMELINE,
    STORES,
    PERFORMANCE,
    Page { name: "docs/cli.md", text: include_str!("../../../../docs/cli.md") },
    Page { name: "docs/concepts.md", text: include_str!("../../../../docs/concepts.md") },
    Page { name: "docs/guarantees.md", text: include_str!("../../../../docs/guarantees.md") },
    Page { name: "docs/http.md", text: include_str!("../../../../docs/http.md") },
    Page { name: "docs/rust.md", text: include_str!("../../../../docs/rust.md") },
    Page { name: "docs/workers.md", text: include_str!("../../../../docs/workers.md") },
];

/// A fenced block.
#[derive(Debug, Clone)]
pub struct Block {
    /// What follows the fence: `yaml step`.
    pub info: &'static str,
    pub text: String,
    /// Its location, for messages: `docs/flows.md:12`.
    pub place: String,
}

pub struct Table {
    pub header: Vec<String>,
    /// The cells, without the quotes around code.
    pub rows: Vec<Vec<String>>,
    /// The heading above it.
    pub heading: &'static str,
}

impl Page {
    pub fn blocks(&self) -> Vec<Block> {
        let (mut blocks, mut open) = (Vec::new(), None::<Block>);
        for (at, line) in self.text.lines().enumerate() {
            match (&mut open, line.strip_prefix("```")) {
                (Some(_), Some(_)) => blocks.extend(open.take()),
                (Some(block), None) => block.text += &format!("{line}\n"),
                (None, Some(info)) => {
                    let place = format!("{}:{}", self.name, at + 1);
                    open = Some(Block { info, text: String::new(), place });
                }
                (None, None) => {}
            }
        }
        assert!(open.is_none(), "{}: a block is never closed", self.name);
        blocks
    }

    /// The blocks of one kind, each with the next block.
    pub fn followed(&self, info: &str) -> Vec<(Block, Block)> {
        let blocks = self.blocks();
        let pairs = blocks.iter().enumerate().filter(|(_, block)| block.info == info);
        pairs.map(|(at, block)| (block.clone(), blocks.get(at + 1).expect("a block after it").clone())).collect()
    }

    pub fn tables(&self) -> Vec<Table> {
        let (mut tables, mut open, mut heading, mut fenced) = (Vec::new(), None::<Table>, "", false);
        for line in self.text.lines() {
            fenced ^= line.starts_with("```");
            if fenced || !line.starts_with('|') {
                tables.extend(open.take());
                heading = title(line).filter(|_| !fenced).unwrap_or(heading);
                continue;
            }
            match &mut open {
                None => open = Some(Table { header: cells(line), rows: Vec::new(), heading }),
                Some(_) if line.starts_with("|---") => {}
                Some(table) => table.rows.push(cells(line)),
            }
        }
        tables.extend(open);
        tables
    }

    /// The tables whose last columns are these.
    pub fn tables_of(&self, columns: [&str; 2]) -> Vec<Table> {
        let all = self.tables().into_iter();
        all.filter(|table| table.header.iter().rev().take(2).rev().map(String::as_str).eq(columns)).collect()
    }
}

fn title(line: &'static str) -> Option<&'static str> {
    line.starts_with('#').then(|| line.trim_start_matches('#').trim().trim_matches('`'))
}

fn cells(line: &str) -> Vec<String> {
    // A bar inside a cell is written `\|`.
    let whole = line.trim().trim_matches('|').replace("\\|", "\u{1}");
    let cell = |cell: &str| {
        let cell = cell.trim();
        let code = cell.strip_prefix("``").and_then(|rest| rest.strip_suffix("``"));
        let code = code.or_else(|| cell.strip_prefix('`').and_then(|rest| rest.strip_suffix('`')));
        code.unwrap_or(cell).trim().replace('\u{1}', "|")
    };
    whole.split('|').map(cell).collect()
}
