//! The tree that is evaluated: operators, functions and bound variables are resolved, and every node has its position.

use super::functions::Func;
use super::value::Table;

#[derive(Debug)]
pub(super) struct Node {
    /// Byte offset into the source.
    pub at: u32,
    pub kind: NodeKind,
}

#[derive(Debug)]
pub(super) enum NodeKind {
    Null,
    Bool(bool),
    Int(i64),
    Double(f64),
    Str(Box<str>),
    /// A variable of an enclosing macro: its index among the bound variables.
    Local(usize),
    Root(Box<str>),
    Table(Table),
    Select(Box<Node>, Box<str>),
    Index(Box<[Node; 2]>),
    /// Whether a `Select` or an `Index` exists.
    Has(Box<Node>),
    Not(Box<Node>),
    Negate(Box<Node>),
    And(Box<[Node; 2]>),
    Or(Box<[Node; 2]>),
    If(Box<[Node; 3]>),
    Binary(Op, Box<[Node; 2]>),
    List(Vec<Node>),
    Map(Vec<(Node, Node)>),
    Call(Func, Vec<Node>),
    /// The first, or the second if the first is absent or null.
    Default(Box<[Node; 2]>),
    Each(Box<Each>),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Op {
    Add,
    Subtract,
    Multiply,
    Divide,
    Modulo,
    Equal,
    NotEqual,
    Less,
    LessOrEqual,
    Greater,
    GreaterOrEqual,
    In,
}

/// A macro over the elements of a list or the keys of a map.
#[derive(Debug)]
pub(super) struct Each {
    pub what: Macro,
    pub over: Node,
    /// Only for `map` with three arguments.
    pub filter: Option<Node>,
    pub body: Node,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Macro {
    All,
    Exists,
    ExistsOne,
    Map,
    Filter,
}

impl Macro {
    pub fn named(name: &str) -> Option<Macro> {
        Some(match name {
            "all" => Macro::All,
            "exists" => Macro::Exists,
            "exists_one" | "existsOne" => Macro::ExistsOne,
            "map" => Macro::Map,
            "filter" => Macro::Filter,
            _ => return None,
        })
    }

    pub fn name(self) -> &'static str {
        match self {
            Macro::All => "all",
            Macro::Exists => "exists",
            Macro::ExistsOne => "exists_one",
            Macro::Map => "map",
            Macro::Filter => "filter",
        }
    }
}

impl Op {
    pub fn sign(self) -> &'static str {
        match self {
            Op::Add => "+",
            Op::Subtract => "-",
            Op::Multiply => "*",
            Op::Divide => "/",
            Op::Modulo => "%",
            Op::Equal => "==",
            Op::NotEqual => "!=",
            Op::Less => "<",
            Op::LessOrEqual => "<=",
            Op::Greater => ">",
            Op::GreaterOrEqual => ">=",
            Op::In => "in",
        }
    }
}

impl Node {
    /// The value's source path, if it is a simple one: `steps.load.output`.
    pub fn path(&self) -> Option<String> {
        match &self.kind {
            NodeKind::Root(name) => Some(name.to_string()),
            NodeKind::Table(table) => Some(table.name().to_string()),
            NodeKind::Select(operand, field) => Some(format!("{}.{field}", operand.path()?)),
            NodeKind::Index(pair) => {
                let [operand, index] = pair.as_ref();
                match &index.kind {
                    NodeKind::Str(key) => Some(format!("{}[\"{key}\"]", operand.path()?)),
                    NodeKind::Int(at) => Some(format!("{}[{at}]", operand.path()?)),
                    _ => None,
                }
            }
            _ => None,
        }
    }
}
