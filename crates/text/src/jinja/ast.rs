//! Syntax tree of a template. Chains of operators, filters and branches are lists, so that only
//! brackets and blocks, whose nesting the parser limits, deepen the tree.

use std::sync::Arc;

/// A statement and its first line.
#[derive(Debug)]
pub(super) struct Stmt {
    pub(super) line: u32,
    pub(super) kind: StmtKind,
}

/// The statements of a block.
pub(super) type Body = Vec<Stmt>;

#[derive(Debug)]
pub(super) enum StmtKind {
    /// Text outside of tags.
    Data(String),
    /// `{{ expression }}`
    Print(Expr),
    /// Conditions with their bodies, and the body of `else`.
    If(Vec<(Expr, Body)>, Body),
    For(Arc<For>),
    Set(Target, Expr),
    /// `{% set name %}...{% endset %}`, with filters.
    SetBlock(Target, Vec<Filter>, Body),
    Macro(Arc<MacroDef>),
    /// `{% call(parameters) function(...) %}...{% endcall %}`
    Call(Expr, Arc<MacroDef>),
    /// `{% filter name %}...{% endfilter %}`
    Filter(Vec<Filter>, Body),
    With(Vec<(Target, Expr)>, Body),
    Break,
    Continue,
}

#[derive(Debug)]
pub(super) struct For {
    pub(super) target: Target,
    pub(super) over: Expr,
    pub(super) only_if: Option<Expr>,
    pub(super) body: Body,
    pub(super) otherwise: Body,
    /// Whether its body may call the loop for other items.
    pub(super) is_recursive: bool,
}

#[derive(Debug)]
pub(super) struct MacroDef {
    pub(super) name: String,
    pub(super) parameters: Vec<(String, Option<Expr>)>,
    pub(super) body: Body,
}

/// Target of an assignment.
#[derive(Debug)]
pub(super) enum Target {
    Name(String),
    /// `namespace.name`
    Attr(String, String),
    /// Unpacking into this many names.
    Tuple(Vec<String>),
}

#[derive(Debug)]
pub(super) enum Expr {
    None,
    Bool(bool),
    Int(i128),
    Float(f64),
    Text(String),
    Name(String),
    List(Vec<Expr>),
    Tuple(Vec<Expr>),
    Map(Vec<(Expr, Expr)>),
    /// Operators of one precedence, from left to right.
    Chain(Box<Expr>, Vec<(Op, Expr)>),
    /// `a < b < c`
    Compare(Box<Expr>, Vec<(Cmp, Expr)>),
    And(Vec<Expr>),
    Or(Vec<Expr>),
    Not(Box<Expr>),
    Minus(Box<Expr>),
    /// `yes if test else no`
    If(Box<(Expr, Expr, Option<Expr>)>),
    /// A value with its postfix operations (attributes, calls, filters, tests) and its line.
    Postfix(Box<Expr>, Vec<Post>, u32),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Op {
    Add,
    Sub,
    Concat,
    Mul,
    Div,
    FloorDiv,
    Rem,
    Pow,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Cmp {
    Eq,
    Ne,
    Lt,
    Le,
    Gt,
    Ge,
    In,
    NotIn,
}

#[derive(Debug)]
pub(super) enum Post {
    Attr(String),
    Item(Expr),
    /// `[start:stop:step]`
    Slice(Box<[Option<Expr>; 3]>),
    Call(Args),
    /// `.name(...)`
    Method(String, Args),
    Filter(Filter),
    Test {
        name: String,
        args: Args,
        negated: bool,
    },
}

#[derive(Debug)]
pub(super) struct Filter {
    pub(super) name: String,
    pub(super) args: Args,
}

#[derive(Debug, Default)]
pub(super) struct Args {
    pub(super) positional: Vec<Expr>,
    pub(super) named: Vec<(String, Expr)>,
}
