//! Recursive-descent parser with Jinja's precedences: `or`, `and`, `not`, comparisons, `+ -`, `~`,
//! `* / // %`, `**`, sign, then attributes and calls, then filters and tests.

use std::sync::Arc;

use super::Fault;
use super::ast::{Args, Body, Cmp, Expr, Filter, For, MacroDef, Op, Post, Stmt, StmtKind, Target};
use super::lex::{Token, lex};

/// Maximum nesting of brackets, blocks and `else` of conditional expressions. Real templates have a
/// dozen levels.
const MAX_NESTING: usize = 100;

type Result<T> = std::result::Result<T, Fault>;

/// Parses `source` into statements. Returns the fault and its line on failure.
pub(super) fn parse(source: &str) -> std::result::Result<Body, (Fault, u32)> {
    let mut parser = Parser { tokens: lex(source)?, at: 0, nesting: 0, loops: 0 };
    match parser.body(&[]) {
        Ok((body, _)) => Ok(body),
        Err(fault) => Err((fault, parser.line())),
    }
}

struct Parser {
    tokens: Vec<(Token, u32)>,
    at: usize,
    nesting: usize,
    /// Enclosing loops, within the innermost macro.
    loops: usize,
}

impl Parser {
    fn peek(&self) -> &Token {
        self.tokens.get(self.at).map_or(&Token::End, |(token, _)| token)
    }

    fn line(&self) -> u32 {
        self.tokens.get(self.at).or(self.tokens.last()).map_or(1, |(_, line)| *line)
    }

    fn next(&mut self) -> Token {
        let token =
            self.tokens.get_mut(self.at).map_or(Token::End, |(t, _)| std::mem::replace(t, Token::End));
        self.at += 1;
        token
    }

    fn is_op(&self, op: &str) -> bool {
        matches!(self.peek(), Token::Op(other) if *other == op)
    }

    fn is_name(&self, name: &str) -> bool {
        matches!(self.peek(), Token::Name(other) if other == name)
    }

    /// Consumes the next token if it is `op`. Returns whether it was.
    fn skip_op(&mut self, op: &str) -> bool {
        let is = self.is_op(op);
        self.at += usize::from(is);
        is
    }

    fn skip_name(&mut self, name: &str) -> bool {
        let is = self.is_name(name);
        self.at += usize::from(is);
        is
    }

    fn unexpected<T>(&self, expected: &str) -> Result<T> {
        let got = match self.peek() {
            Token::Data(_) => "text".to_owned(),
            Token::VarBegin => "'{{'".to_owned(),
            Token::VarEnd => "'}}'".to_owned(),
            Token::BlockBegin => "'{%'".to_owned(),
            Token::BlockEnd => "'%}'".to_owned(),
            Token::Name(name) => format!("'{name}'"),
            Token::Text(_) => "a string".to_owned(),
            Token::Int(_) | Token::Float(_) => "a number".to_owned(),
            Token::Op(op) => format!("'{op}'"),
            Token::End => "the end".to_owned(),
        };
        Err(Fault::failed(format!("expected {expected}, got {got}")))
    }

    fn expect_op(&mut self, op: &str) -> Result<()> {
        if self.skip_op(op) { Ok(()) } else { self.unexpected(&format!("'{op}'")) }
    }

    fn name(&mut self) -> Result<String> {
        match self.peek() {
            Token::Name(_) => match self.next() {
                Token::Name(name) => Ok(name),
                _ => Ok(String::new()),
            },
            _ => self.unexpected("a name"),
        }
    }

    fn block_end(&mut self) -> Result<()> {
        if *self.peek() != Token::BlockEnd {
            return self.unexpected("'%}'");
        }
        self.at += 1;
        Ok(())
    }

    /// Runs `parse` one level deeper.
    fn nested<T>(&mut self, parse: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        self.nesting += 1;
        if self.nesting > MAX_NESTING {
            return Err(Fault::failed(format!("nested deeper than {MAX_NESTING} levels")));
        }
        let parsed = parse(self);
        self.nesting -= 1;
        parsed
    }

    /// Parses statements up to a block that starts with one of `ends`, whose name is consumed; to
    /// the end of the template if `ends` is empty.
    fn body(&mut self, ends: &[&str]) -> Result<(Body, String)> {
        let mut body = Vec::new();
        loop {
            let line = self.line();
            let kind = match self.peek() {
                Token::End if ends.is_empty() => return Ok((body, String::new())),
                Token::Data(_) => match self.next() {
                    Token::Data(text) => StmtKind::Data(text),
                    _ => continue,
                },
                Token::VarBegin => {
                    self.at += 1;
                    let expr = self.tuple()?;
                    if self.next() != Token::VarEnd {
                        self.at -= 1;
                        return self.unexpected("'}}'");
                    }
                    StmtKind::Print(expr)
                }
                Token::BlockBegin => {
                    self.at += 1;
                    let name = self.name()?;
                    if ends.contains(&name.as_str()) {
                        return Ok((body, name));
                    }
                    self.nested(|parser| parser.statement(&name))?
                }
                _ => return self.unexpected(&format!("'{{% {} %}}'", ends.first().unwrap_or(&"..."))),
            };
            body.push(Stmt { line, kind });
        }
    }

    /// Parses the end of a tag that starts a body. Jinja allows a colon before it.
    fn body_begin(&mut self) -> Result<()> {
        self.skip_op(":");
        self.block_end()
    }

    /// Parses the body of a block through its `end` tag.
    fn block(&mut self, end: &str) -> Result<Body> {
        self.body_begin()?;
        let (body, _) = self.body(&[end])?;
        self.block_end()?;
        Ok(body)
    }

    /// Parses a statement after its name.
    fn statement(&mut self, name: &str) -> Result<StmtKind> {
        match name {
            "if" => self.if_statement(),
            "for" => self.for_statement(),
            "set" => self.set_statement(),
            "macro" => {
                let name = self.name()?;
                Ok(StmtKind::Macro(Arc::new(self.macro_def(name, "endmacro")?)))
            }
            "call" => {
                let parameters = if self.is_op("(") { self.parameters()? } else { Vec::new() };
                let call = self.expr()?;
                let loops = std::mem::take(&mut self.loops);
                let body = self.block("endcall")?;
                self.loops = loops;
                let name = "caller".to_owned();
                Ok(StmtKind::Call(call, Arc::new(MacroDef { name, parameters, body })))
            }
            "filter" => {
                let mut filters = vec![self.filter()?];
                while self.skip_op("|") {
                    filters.push(self.filter()?);
                }
                Ok(StmtKind::Filter(filters, self.block("endfilter")?))
            }
            "with" => {
                let mut variables = Vec::new();
                while *self.peek() != Token::BlockEnd {
                    let target = self.target()?;
                    self.expect_op("=")?;
                    variables.push((target, self.expr()?));
                    if !self.skip_op(",") {
                        break;
                    }
                }
                Ok(StmtKind::With(variables, self.block("endwith")?))
            }
            // Marks the text to train on. Here it only opens a scope, outside of loops.
            "generation" => {
                let loops = std::mem::take(&mut self.loops);
                let body = self.block("endgeneration")?;
                self.loops = loops;
                Ok(StmtKind::With(Vec::new(), body))
            }
            "break" | "continue" if self.loops > 0 => {
                self.block_end()?;
                Ok(if name == "break" { StmtKind::Break } else { StmtKind::Continue })
            }
            _ => Err(Fault::failed(format!("unknown or misplaced tag '{name}'"))),
        }
    }

    fn if_statement(&mut self) -> Result<StmtKind> {
        let mut branches = Vec::new();
        let mut end = "elif".to_owned();
        while end == "elif" {
            let test = self.tuple()?;
            self.body_begin()?;
            let (body, tag) = self.body(&["elif", "else", "endif"])?;
            branches.push((test, body));
            end = tag;
        }
        let otherwise = if end == "else" { self.block("endif")? } else { Vec::new() };
        if end == "endif" {
            self.block_end()?;
        }
        Ok(StmtKind::If(branches, otherwise))
    }

    fn for_statement(&mut self) -> Result<StmtKind> {
        let target = self.target()?;
        if !self.skip_name("in") {
            return self.unexpected("'in'");
        }
        let over = self.tuple_of(Self::or)?;
        let only_if = if self.skip_name("if") { Some(self.expr()?) } else { None };
        let is_recursive = self.skip_name("recursive");
        self.body_begin()?;
        self.loops += 1;
        let (body, end) = self.body(&["else", "endfor"])?;
        self.loops -= 1;
        let otherwise = if end == "else" { self.block("endfor")? } else { Vec::new() };
        if end == "endfor" {
            self.block_end()?;
        }
        Ok(StmtKind::For(Arc::new(For { target, over, only_if, body, otherwise, is_recursive })))
    }

    fn set_statement(&mut self) -> Result<StmtKind> {
        let target = self.target()?;
        if self.skip_op("=") {
            let value = self.tuple()?;
            self.block_end()?;
            return Ok(StmtKind::Set(target, value));
        }
        let mut filters = Vec::new();
        while self.skip_op("|") {
            filters.push(self.filter()?);
        }
        Ok(StmtKind::SetBlock(target, filters, self.block("endset")?))
    }

    fn macro_def(&mut self, name: String, end: &str) -> Result<MacroDef> {
        let parameters = self.parameters()?;
        let loops = std::mem::take(&mut self.loops);
        let body = self.block(end)?;
        self.loops = loops;
        Ok(MacroDef { name, parameters, body })
    }

    fn parameters(&mut self) -> Result<Vec<(String, Option<Expr>)>> {
        self.expect_op("(")?;
        let mut parameters = Vec::new();
        while !self.is_op(")") {
            let name = self.name()?;
            let default = if self.skip_op("=") { Some(self.expr()?) } else { None };
            parameters.push((name, default));
            if !self.skip_op(",") {
                break;
            }
        }
        self.expect_op(")")?;
        Ok(parameters)
    }

    fn target(&mut self) -> Result<Target> {
        let bracket = self.skip_op("(");
        let first = self.name()?;
        if !bracket && self.skip_op(".") {
            return Ok(Target::Attr(first, self.name()?));
        }
        let mut names = vec![first];
        let mut tuple = false;
        while self.skip_op(",") {
            tuple = true;
            match self.peek() {
                Token::Name(name) if name != "in" => names.push(self.name()?),
                _ => break,
            }
        }
        if bracket {
            self.expect_op(")")?;
        }
        let first = if tuple { None } else { names.pop() };
        Ok(first.map_or_else(|| Target::Tuple(names), Target::Name))
    }

    /// Parses an expression, or several separated by commas as a tuple.
    fn tuple(&mut self) -> Result<Expr> {
        self.tuple_of(Self::expr)
    }

    fn tuple_of(&mut self, item: fn(&mut Self) -> Result<Expr>) -> Result<Expr> {
        let first = item(self)?;
        if !self.is_op(",") {
            return Ok(first);
        }
        let mut items = vec![first];
        while self.skip_op(",") {
            match self.peek() {
                Token::BlockEnd | Token::VarEnd | Token::Op(")") => break,
                _ => items.push(item(self)?),
            }
        }
        Ok(Expr::Tuple(items))
    }

    /// Parses any expression, one level deeper.
    fn expr(&mut self) -> Result<Expr> {
        self.nested(|parser| {
            let yes = parser.or()?;
            if !parser.skip_name("if") {
                return Ok(yes);
            }
            let test = parser.or()?;
            let no = if parser.skip_name("else") { Some(parser.expr()?) } else { None };
            Ok(Expr::If(Box::new((test, yes, no))))
        })
    }

    fn or(&mut self) -> Result<Expr> {
        let mut terms = vec![self.and()?];
        while self.skip_name("or") {
            terms.push(self.and()?);
        }
        Ok(single_or(terms, Expr::Or))
    }

    fn and(&mut self) -> Result<Expr> {
        let mut terms = vec![self.not()?];
        while self.skip_name("and") {
            terms.push(self.not()?);
        }
        Ok(single_or(terms, Expr::And))
    }

    fn not(&mut self) -> Result<Expr> {
        let mut n = 0;
        while self.skip_name("not") {
            n += 1;
        }
        let expr = self.compare()?;
        // Two negations suffice for any even number: `not not x` is a truth value.
        Ok(match n {
            0 => expr,
            n if n % 2 == 1 => Expr::Not(Box::new(expr)),
            _ => Expr::Not(Box::new(Expr::Not(Box::new(expr)))),
        })
    }

    fn compare(&mut self) -> Result<Expr> {
        let first = self.chain(0)?;
        let mut rest = Vec::new();
        loop {
            let cmp = match self.peek() {
                Token::Op("==") => Cmp::Eq,
                Token::Op("!=") => Cmp::Ne,
                Token::Op("<") => Cmp::Lt,
                Token::Op("<=") => Cmp::Le,
                Token::Op(">") => Cmp::Gt,
                Token::Op(">=") => Cmp::Ge,
                Token::Name(name) if name == "in" => Cmp::In,
                Token::Name(name) if name == "not" => {
                    self.at += 1;
                    if !self.is_name("in") {
                        return self.unexpected("'in'");
                    }
                    Cmp::NotIn
                }
                _ => break,
            };
            self.at += 1;
            rest.push((cmp, self.chain(0)?));
        }
        Ok(if rest.is_empty() { first } else { Expr::Compare(Box::new(first), rest) })
    }

    /// Parses operators from precedence `level` up.
    fn chain(&mut self, level: usize) -> Result<Expr> {
        const LEVELS: [&[(&str, Op)]; 4] = [
            &[("+", Op::Add), ("-", Op::Sub)],
            &[("~", Op::Concat)],
            &[("*", Op::Mul), ("/", Op::Div), ("//", Op::FloorDiv), ("%", Op::Rem)],
            &[("**", Op::Pow)],
        ];
        let Some(ops) = LEVELS.get(level) else { return self.unary() };
        let first = self.chain(level + 1)?;
        let mut rest = Vec::new();
        while let Some(&(_, op)) = ops.iter().find(|(op, _)| self.is_op(op)) {
            self.at += 1;
            rest.push((op, self.chain(level + 1)?));
        }
        Ok(if rest.is_empty() { first } else { Expr::Chain(Box::new(first), rest) })
    }

    fn unary(&mut self) -> Result<Expr> {
        let mut minus = 0;
        loop {
            if self.skip_op("-") {
                minus += 1;
            } else if !self.skip_op("+") {
                break;
            }
        }
        let line = self.line();
        let mut expr = self.primary()?;
        let mut posts = Vec::new();
        self.attributes(&mut posts)?;
        if minus % 2 == 1 {
            // The sign binds after calls and before filters: `-x|abs` is the filter of -x.
            expr = Expr::Minus(Box::new(postfix(expr, std::mem::take(&mut posts), line)));
        }
        self.filters(&mut posts)?;
        Ok(postfix(expr, posts, line))
    }

    fn primary(&mut self) -> Result<Expr> {
        match self.peek() {
            Token::Name(_) => Ok(match self.name()?.as_str() {
                "true" | "True" => Expr::Bool(true),
                "false" | "False" => Expr::Bool(false),
                "none" | "None" => Expr::None,
                name => Expr::Name(name.to_owned()),
            }),
            Token::Text(_) => {
                let mut text = String::new();
                // Adjacent literals are concatenated.
                while let Token::Text(part) = self.peek() {
                    text.push_str(part);
                    self.at += 1;
                }
                Ok(Expr::Text(text))
            }
            &Token::Int(n) => {
                self.at += 1;
                Ok(Expr::Int(n))
            }
            &Token::Float(x) => {
                self.at += 1;
                Ok(Expr::Float(x))
            }
            Token::Op("(") => {
                self.at += 1;
                if self.skip_op(")") {
                    return Ok(Expr::Tuple(Vec::new()));
                }
                let inside = self.tuple()?;
                self.expect_op(")")?;
                Ok(inside)
            }
            Token::Op("[") => {
                self.at += 1;
                let mut items = Vec::new();
                while !self.is_op("]") {
                    items.push(self.expr()?);
                    if !self.skip_op(",") {
                        break;
                    }
                }
                self.expect_op("]")?;
                Ok(Expr::List(items))
            }
            Token::Op("{") => {
                self.at += 1;
                let mut entries = Vec::new();
                while !self.is_op("}") {
                    let key = self.expr()?;
                    self.expect_op(":")?;
                    entries.push((key, self.expr()?));
                    if !self.skip_op(",") {
                        break;
                    }
                }
                self.expect_op("}")?;
                Ok(Expr::Map(entries))
            }
            _ => self.unexpected("an expression"),
        }
    }

    /// Parses attributes, items and calls.
    fn attributes(&mut self, posts: &mut Vec<Post>) -> Result<()> {
        loop {
            if self.skip_op(".") {
                if let &Token::Int(n) = self.peek() {
                    self.at += 1;
                    posts.push(Post::Item(Expr::Int(n)));
                    continue;
                }
                let name = self.name()?;
                posts.push(match self.is_op("(") {
                    true => Post::Method(name, self.args()?),
                    false => Post::Attr(name),
                });
            } else if self.skip_op("[") {
                posts.push(self.subscript()?);
                self.expect_op("]")?;
            } else if self.is_op("(") {
                posts.push(Post::Call(self.args()?));
            } else {
                return Ok(());
            }
        }
    }

    fn subscript(&mut self) -> Result<Post> {
        let mut parts = [None, None, None];
        let mut n = 0;
        loop {
            if self.skip_op(":") {
                n += 1;
                if n > 2 {
                    return self.unexpected("']'");
                }
            } else if self.is_op("]") {
                break;
            } else {
                parts[n] = Some(self.tuple()?);
                if !self.is_op(":") {
                    break;
                }
            }
        }
        match (n, parts) {
            (0, [Some(item), ..]) => Ok(Post::Item(item)),
            (0, _) => self.unexpected("an index"),
            (_, parts) => Ok(Post::Slice(Box::new(parts))),
        }
    }

    /// Parses filters and tests, and calls of their results.
    fn filters(&mut self, posts: &mut Vec<Post>) -> Result<()> {
        loop {
            if self.skip_op("|") {
                posts.push(Post::Filter(self.filter()?));
            } else if self.skip_name("is") {
                posts.push(self.test()?);
            } else if !posts.is_empty() && self.is_op("(") {
                posts.push(Post::Call(self.args()?));
            } else {
                return Ok(());
            }
        }
    }

    fn filter(&mut self) -> Result<Filter> {
        let name = self.name()?;
        let args = if self.is_op("(") { self.args()? } else { Args::default() };
        Ok(Filter { name, args })
    }

    fn test(&mut self) -> Result<Post> {
        let negated = self.skip_name("not");
        let name = self.name()?;
        let is_argument = match self.peek() {
            Token::Name(name) => !["else", "or", "and", "if", "is", "in", "not"].contains(&name.as_str()),
            Token::Text(_) | Token::Int(_) | Token::Float(_) | Token::Op("[" | "{") => true,
            _ => false,
        };
        let args = if self.is_op("(") {
            self.args()?
        } else if is_argument {
            let line = self.line();
            let argument = self.nested(Self::primary)?;
            let mut posts = Vec::new();
            self.attributes(&mut posts)?;
            Args { positional: vec![postfix(argument, posts, line)], named: Vec::new() }
        } else {
            Args::default()
        };
        Ok(Post::Test { name, args, negated })
    }

    fn args(&mut self) -> Result<Args> {
        self.expect_op("(")?;
        let mut args = Args::default();
        while !self.is_op(")") {
            let next_is_equals = matches!(self.tokens.get(self.at + 1), Some((Token::Op("="), _)));
            if matches!(self.peek(), Token::Name(_)) && next_is_equals {
                let name = self.name()?;
                self.at += 1;
                args.named.push((name, self.expr()?));
            } else {
                args.positional.push(self.expr()?);
            }
            if !self.skip_op(",") {
                break;
            }
        }
        self.expect_op(")")?;
        Ok(args)
    }
}

/// Returns the only term, or applies `join` to several.
fn single_or(mut terms: Vec<Expr>, join: fn(Vec<Expr>) -> Expr) -> Expr {
    match (terms.len(), terms.pop()) {
        (1, Some(term)) => term,
        (_, last) => {
            terms.extend(last);
            join(terms)
        }
    }
}

fn postfix(expr: Expr, posts: Vec<Post>, line: u32) -> Expr {
    if posts.is_empty() { expr } else { Expr::Postfix(Box::new(expr), posts, line) }
}
