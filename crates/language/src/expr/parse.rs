//! Turns text into the tree that is evaluated. The `cel` crate parses the text; names and functions are resolved here,
//! so that errors are found when a flow is registered.

use cel::Env;
use cel::common::ast::{CallExpr, EntryExpr, Expr, IdedEntryExpr, IdedExpr, LiteralValue, SourceInfo, operators};
use cel::parser::ParseErrors;

use super::ast::{Each, Macro, Node, NodeKind, Op};
use super::functions::{self, Func};
use super::pattern;
use super::scan::{self, error};
use super::value::Table;
use super::{ExprError, Read};
use crate::nearest::nearest;

pub(super) fn parse(text: &str) -> Result<(Node, Vec<Read>), ExprError> {
    scan::check(text)?;
    // Without macros in the environment, they stay plain calls. No error recovery: an incomplete tree is useless.
    let parser = Env::default().with_optional_support(false).parser();
    let parser = parser.enable_ident_escape_syntax(true).error_recovery_limit(0);
    let (tree, places) = parser.parse_with_source_info(text).map_err(|errors| syntax_error(text, &errors))?;
    let mut resolve = Resolve { text, places, bound: Vec::new(), reads: Vec::new() };
    let ast = resolve.node(tree, [None, None])?;
    Ok((ast, resolve.reads))
}

/// The first two constant names selected from a value: `load` and `output` of `steps.load.output.total`.
type Trail = [Option<String>; 2];

struct Resolve<'t> {
    text: &'t str,
    places: SourceInfo,
    /// Variables of the enclosing macros, outermost first.
    bound: Vec<String>,
    reads: Vec<Read>,
}

impl Resolve<'_> {
    fn plain(&mut self, tree: IdedExpr) -> Result<Node, ExprError> {
        self.node(tree, [None, None])
    }

    fn node(&mut self, tree: IdedExpr, trail: Trail) -> Result<Node, ExprError> {
        let at = self.place(tree.id);
        let unsupported = |what: &str| Err(error(at, what.to_string()));
        let kind = match tree.expr {
            Expr::Literal(literal) => constant(literal, at)?,
            Expr::Ident(name) => self.name(name, at, trail)?,
            Expr::Select(select) => {
                let [first, _] = trail;
                let operand = self.node(*select.operand, [Some(select.field.clone()), first])?;
                NodeKind::Select(Box::new(operand), select.field.into())
            }
            Expr::Call(call) => return self.call(call, at, trail),
            Expr::List(list) => {
                NodeKind::List(list.elements.into_iter().map(|item| self.plain(item)).collect::<Result<_, _>>()?)
            }
            Expr::Map(map) => {
                NodeKind::Map(map.entries.into_iter().map(|entry| self.entry(entry)).collect::<Result<_, _>>()?)
            }
            Expr::Struct(_) => return unsupported("typed objects are not supported; write a map: {\"key\": value}"),
            Expr::Comprehension(_) | Expr::Unspecified => return unsupported("this syntax is not supported"),
        };
        Ok(Node { at: at as u32, kind })
    }

    fn place(&self, id: u64) -> usize {
        let start = self.places.offset_for(id).map_or(0, |(start, _)| start as usize);
        start.min(self.text.len())
    }

    fn name(&mut self, name: String, at: usize, trail: Trail) -> Result<NodeKind, ExprError> {
        if name.starts_with('.') {
            return Err(error(at, "a name cannot start with a dot".to_string()));
        }
        if let Some(slot) = self.bound.iter().rposition(|bound| *bound == name) {
            return Ok(NodeKind::Local(slot));
        }
        let kind = match Table::named(&name) {
            // As a whole, `run` is an ordinary value: all of it is known at all times.
            Some(Table::Run) if trail[0].is_none() => NodeKind::Root(name.as_str().into()),
            Some(table) => NodeKind::Table(table),
            None => NodeKind::Root(name.as_str().into()),
        };
        let [key, field] = trail;
        self.reads.push(Read { root: name, key, field, offset: at });
        Ok(kind)
    }

    fn entry(&mut self, entry: IdedEntryExpr) -> Result<(Node, Node), ExprError> {
        match entry.expr {
            EntryExpr::MapEntry(entry) => Ok((self.plain(entry.key)?, self.plain(entry.value)?)),
            EntryExpr::StructField(_) => Err(error(self.place(entry.id), "this syntax is not supported".to_string())),
        }
    }

    fn call(&mut self, call: CallExpr, at: usize, trail: Trail) -> Result<Node, ExprError> {
        let CallExpr { func_name, target, args } = call;
        let name = func_name.as_str();
        if let Some(op) = binary(name) {
            let pair = self.exactly(args, at)?;
            return Ok(Node { at: at as u32, kind: NodeKind::Binary(op, pair) });
        }
        let kind = match name {
            operators::INDEX => self.index(args, at, trail)?,
            operators::LOGICAL_AND => NodeKind::And(self.exactly(args, at)?),
            operators::LOGICAL_OR => NodeKind::Or(self.exactly(args, at)?),
            operators::CONDITIONAL => NodeKind::If(self.exactly(args, at)?),
            operators::LOGICAL_NOT => NodeKind::Not(self.one(args, at)?),
            operators::NEGATE => NodeKind::Negate(self.one(args, at)?),
            _ => {
                // The tree has the position of the bracket; report that of the name.
                let before = self.text.get(..at).unwrap_or_default().trim_end();
                let at = if before.ends_with(name) { before.len() - name.len() } else { at };
                let kind = self.function(name, target.map(|target| *target), args, at)?;
                return Ok(Node { at: at as u32, kind });
            }
        };
        Ok(Node { at: at as u32, kind })
    }

    fn index(&mut self, args: Vec<IdedExpr>, at: usize, trail: Trail) -> Result<NodeKind, ExprError> {
        let [operand, index] = take(args, at)?;
        let [first, _] = trail;
        let trail = match &index.expr {
            Expr::Literal(LiteralValue::String(key)) => [Some(key.inner().to_string()), first],
            _ => [None, None],
        };
        let operand = self.node(operand, trail)?;
        Ok(NodeKind::Index(Box::new([operand, self.plain(index)?])))
    }

    fn function(
        &mut self,
        name: &str,
        target: Option<IdedExpr>,
        args: Vec<IdedExpr>,
        at: usize,
    ) -> Result<NodeKind, ExprError> {
        if let Some(what) = Macro::named(name) {
            return self.each(what, target, args, at);
        }
        let args: Vec<_> = target.into_iter().chain(args).collect();
        match name {
            "has" => return self.has(args, at),
            "default" if args.len() == 2 => return Ok(NodeKind::Default(self.exactly(args, at)?)),
            "default" => return Err(error(at, "`default` is written default(value, fallback)".to_string())),
            _ => {}
        }
        let func = Func::named(name).ok_or_else(|| unknown(name, at))?;
        let (arity, usage) = func.signature();
        if !arity.contains(&args.len()) {
            return Err(error(at, format!("`{name}` got {} arguments; write {usage}", args.len())));
        }
        let args = args.into_iter().map(|arg| self.plain(arg)).collect::<Result<Vec<_>, _>>()?;
        if let (Func::Matches, [_, Node { at, kind: NodeKind::Str(text) }]) = (func, &args[..]) {
            pattern::check(text).map_err(|message| error(*at as usize, message))?;
        }
        Ok(NodeKind::Call(func, args))
    }

    fn has(&mut self, args: Vec<IdedExpr>, at: usize) -> Result<NodeKind, ExprError> {
        let node = self.one(args, at)?;
        match node.kind {
            NodeKind::Select(..) | NodeKind::Index(..) => Ok(NodeKind::Has(node)),
            _ => Err(error(at, "`has` takes a field: has(input.x)".to_string())),
        }
    }

    fn each(
        &mut self,
        what: Macro,
        target: Option<IdedExpr>,
        mut args: Vec<IdedExpr>,
        at: usize,
    ) -> Result<NodeKind, ExprError> {
        let name = what.name();
        let usage = || error(at, format!("`{name}` is written list.{name}(x, …), with x standing for each element"));
        let filter = if what == Macro::Map && args.len() == 3 { Some(args.remove(1)) } else { None };
        let (Some(over), Ok([variable, body])) = (target, <[IdedExpr; 2]>::try_from(args)) else {
            return Err(usage());
        };
        let variable = match variable.expr {
            Expr::Ident(variable) if !variable.starts_with('.') => variable,
            _ => return Err(usage()),
        };
        let over = self.plain(over)?;
        self.bound.push(variable);
        let filter = filter.map(|filter| self.plain(filter)).transpose();
        let body = self.plain(body);
        self.bound.pop();
        Ok(NodeKind::Each(Box::new(Each { what, over, filter: filter?, body: body? })))
    }

    fn exactly<const N: usize>(&mut self, args: Vec<IdedExpr>, at: usize) -> Result<Box<[Node; N]>, ExprError> {
        let nodes = args.into_iter().map(|arg| self.plain(arg)).collect::<Result<Vec<_>, _>>()?;
        take(nodes, at).map(Box::new)
    }

    fn one(&mut self, args: Vec<IdedExpr>, at: usize) -> Result<Box<Node>, ExprError> {
        let [operand] = take(args, at)?;
        self.plain(operand).map(Box::new)
    }
}

fn take<T, const N: usize>(args: Vec<T>, at: usize) -> Result<[T; N], ExprError> {
    let found = args.len();
    <[T; N]>::try_from(args).map_err(|_| error(at, format!("takes {N} arguments, found {found}")))
}

fn constant(literal: LiteralValue, at: usize) -> Result<NodeKind, ExprError> {
    Ok(match literal {
        LiteralValue::Null => NodeKind::Null,
        LiteralValue::Boolean(truth) => NodeKind::Bool(truth.into_inner()),
        LiteralValue::Int(int) => NodeKind::Int(int.into_inner()),
        LiteralValue::UInt(uint) => {
            let int = i64::try_from(uint.into_inner());
            NodeKind::Int(int.map_err(|_| error(at, "the number does not fit in 64 bits".to_string()))?)
        }
        LiteralValue::Double(double) => NodeKind::Double(double.into_inner()),
        LiteralValue::String(text) => NodeKind::Str(text.inner().into()),
        LiteralValue::Bytes(_) => {
            return Err(error(at, "bytes are not supported; remove the `b` prefix".to_string()));
        }
    })
}

fn binary(name: &str) -> Option<Op> {
    Some(match name {
        operators::ADD => Op::Add,
        operators::SUBSTRACT => Op::Subtract,
        operators::MULTIPLY => Op::Multiply,
        operators::DIVIDE => Op::Divide,
        operators::MODULO => Op::Modulo,
        operators::EQUALS => Op::Equal,
        operators::NOT_EQUALS => Op::NotEqual,
        operators::LESS => Op::Less,
        operators::LESS_EQUALS => Op::LessOrEqual,
        operators::GREATER => Op::Greater,
        operators::GREATER_EQUALS => Op::GreaterOrEqual,
        operators::IN => Op::In,
        _ => return None,
    })
}

fn unknown(name: &str, at: usize) -> ExprError {
    match nearest(name, functions::names()) {
        Some(near) => error(at, format!("there is no function `{name}`; did you mean `{near}`?")),
        None => {
            let mut known: Vec<_> = functions::names().collect();
            known.sort_unstable();
            error(at, format!("there is no function `{name}`; known functions: {}", known.join(", ")))
        }
    }
}

/// The first error, reworded where the parser's message is about its grammar.
fn syntax_error(text: &str, errors: &ParseErrors) -> ExprError {
    let Some(first) = errors.errors.first() else {
        return error(0, "this is not an expression".to_string());
    };
    let (line, column) = first.pos;
    let at = offset(text, line, column);
    let message = match first.msg.as_str() {
        msg if msg.starts_with("Syntax error") || msg.starts_with("error recovery") || msg == "UNKNOWN" => {
            match scan::token_at(text, at) {
                Some(token) => format!("unexpected `{token}`"),
                None => "the expression ends too early".to_string(),
            }
        }
        msg if msg.starts_with("unsupported syntax") => {
            "optional values (`?`) are not supported; use default(x, fallback) or has(x.y)".to_string()
        }
        msg if msg.starts_with("invalid int") || msg.starts_with("invalid uint") => {
            "the number does not fit in 64 bits".to_string()
        }
        msg => match msg.strip_prefix("reserved identifier: ") {
            Some(word) => format!("`{word}` is a reserved word"),
            None => msg.to_string(),
        },
    };
    error(at, message)
}

fn offset(text: &str, line: isize, column: isize) -> usize {
    let before = usize::try_from(line - 1).unwrap_or(0);
    let start: usize = text.split_inclusive('\n').take(before).map(str::len).sum();
    let rest = text.get(start..).unwrap_or_default();
    let characters = usize::try_from(column - 1).unwrap_or(0);
    start + rest.char_indices().nth(characters).map_or(rest.len(), |(byte, _)| byte)
}
