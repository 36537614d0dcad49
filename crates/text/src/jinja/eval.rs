//! Evaluates the syntax tree of a template.

use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

use hashbrown::HashMap;
use jiff::civil::DateTime;

use super::ast::{Args, Cmp, Expr, Filter, For, MacroDef, Post, Stmt, StmtKind};
use super::limits::Budget;
use super::text::{Text, TextBuilder};
use super::value::{Closure, Entries, Function, Items, List, Loop, Value};
use super::{Fault, Located, assign, methods, ops, repr, time};

/// Maximum nesting depth of statements, expressions and macros. A level takes about a kilobyte of
/// stack.
pub(crate) const MAX_DEPTH: usize = 300;

/// The functions of the environment.
pub(super) const FUNCTIONS: [(&str, Function); 5] = [
    ("range", Function::Range),
    ("dict", Function::Dict),
    ("namespace", Function::Namespace),
    ("raise_exception", Function::RaiseException),
    ("strftime_now", Function::StrftimeNow),
];

type Result<T> = std::result::Result<T, Fault>;

/// Variables by name.
pub(super) type Scope = HashMap<String, Value>;

/// Effect of a statement on the enclosing loop.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Flow {
    Next,
    Break,
    Continue,
}

/// The arguments of a call. The callee takes those that it supports.
#[derive(Debug, Default)]
pub(super) struct CallArgs {
    pub(super) positional: Vec<Value>,
    pub(super) named: Vec<(String, Value)>,
}

impl CallArgs {
    /// Takes the argument `name`, which may also be at position `at`.
    pub(super) fn take(&mut self, at: usize, name: &str) -> Option<Value> {
        match self.named.iter().position(|(other, _)| other == name) {
            Some(i) => Some(self.named.swap_remove(i).1),
            None => self.positional.get(at).cloned(),
        }
    }

    /// Works as [`take`](Self::take), for a required argument.
    pub(super) fn need(&mut self, at: usize, name: &str) -> Result<Value> {
        self.take(at, name).ok_or_else(|| Fault::failed(format!("the argument '{name}' is missing")))
    }

    /// Checks that no argument is left beyond `n` positions.
    pub(super) fn finish(self, n: usize) -> Result<()> {
        if self.positional.len() > n {
            return Err(Fault::failed(format!("expected {n} arguments, got {}", self.positional.len())));
        }
        self.named
            .first()
            .map_or(Ok(()), |(name, _)| Err(Fault::failed(format!("unknown argument '{name}'"))))
    }
}

/// The state of a render.
pub(super) struct Interpreter {
    pub(super) meter: Rc<Budget>,
    globals: Scope,
    /// Variables of the template itself.
    root: Scope,
    /// Variables of loops and macros, the innermost last.
    scopes: Vec<Scope>,
    pub(super) namespaces: Vec<Entries>,
    now: DateTime,
    depth: usize,
    /// The current line.
    line: u32,
}

impl Interpreter {
    pub(super) fn new(meter: Rc<Budget>, globals: Scope, now: DateTime) -> Self {
        let (root, scopes, namespaces) = (Scope::new(), Vec::new(), Vec::new());
        Interpreter { meter, globals, root, scopes, namespaces, now, depth: 0, line: 1 }
    }

    /// Renders `body`.
    pub(super) fn run(mut self, body: &[Stmt]) -> std::result::Result<(String, Vec<Range<usize>>), Located> {
        match self.capture(|me, out| me.body(body, out)) {
            Ok((text, _)) => Ok(text.into_trusted()),
            Err(fault) => Err((fault, self.line)),
        }
    }

    /// Returns the text that `write` emits, and its effect on the enclosing loop.
    fn capture(
        &mut self,
        write: impl FnOnce(&mut Self, &mut TextBuilder) -> Result<Flow>,
    ) -> Result<(Text, Flow)> {
        let mut out = TextBuilder::new(&self.meter);
        let flow = write(self, &mut out)?;
        Ok((out.finish()?, flow))
    }

    /// Runs `work` one level deeper. A fault ends the render, so the level is not restored then.
    fn deeper<T>(&mut self, work: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        self.meter.work(1)?;
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            return Err(Fault::Depth);
        }
        let done = work(self)?;
        self.depth -= 1;
        Ok(done)
    }

    /// Runs `work` in a new scope.
    fn scoped<T>(&mut self, work: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        self.scopes.push(Scope::new());
        let done = work(self)?;
        self.scopes.pop();
        Ok(done)
    }

    pub(super) fn lookup(&self, name: &str) -> Value {
        let scopes = self.scopes.iter().rev().chain([&self.root, &self.globals]);
        scopes.into_iter().find_map(|scope| scope.get(name)).cloned().unwrap_or(Value::Undefined)
    }

    /// Returns the scope of the current assignments.
    pub(super) fn scope(&mut self) -> &mut Scope {
        self.scopes.last_mut().unwrap_or(&mut self.root)
    }

    /// Returns the variable `name`, searching from the innermost scope.
    pub(super) fn variable(&mut self, name: &str) -> Option<&mut Value> {
        let scopes = self.scopes.iter_mut().rev().chain([&mut self.root, &mut self.globals]);
        scopes.into_iter().find_map(|scope| scope.get_mut(name))
    }

    pub(super) fn set(&mut self, name: &str, value: Value) {
        self.scope().insert(name.to_owned(), value);
    }

    fn body(&mut self, body: &[Stmt], out: &mut TextBuilder) -> Result<Flow> {
        self.deeper(|me| {
            for stmt in body {
                me.line = stmt.line;
                let flow = me.statement(&stmt.kind, out)?;
                if flow != Flow::Next {
                    return Ok(flow);
                }
            }
            Ok(Flow::Next)
        })
    }

    fn statement(&mut self, stmt: &StmtKind, out: &mut TextBuilder) -> Result<Flow> {
        self.meter.work(1)?;
        match stmt {
            StmtKind::Data(text) => out.own(text)?,
            StmtKind::Print(expr) => {
                let value = self.eval(expr)?;
                repr::print(&value, out, &self.meter)?;
            }
            StmtKind::If(branches, otherwise) => {
                for (test, body) in branches {
                    if self.eval(test)?.is_true() {
                        return self.body(body, out);
                    }
                }
                return self.body(otherwise, out);
            }
            StmtKind::For(each) => {
                let over = self.eval(&each.over)?;
                return self.for_each(each, &over, 1, out);
            }
            StmtKind::Set(target, expr) => {
                let value = match expr {
                    Expr::Chain(first, rest) if target.is(first) => self.eval_append(target, first, rest)?,
                    _ => self.eval(expr)?,
                };
                self.assign(target, value)?;
            }
            StmtKind::SetBlock(target, filters, body) => {
                let (text, flow) = self.capture(|me, out| me.scoped(|me| me.body(body, out)))?;
                if flow != Flow::Next {
                    return Ok(flow);
                }
                let value = self.apply(filters, Value::Text(text))?;
                self.assign(target, value)?;
            }
            StmtKind::Macro(def) => {
                let closure = self.closure(def)?;
                self.set(&def.name, closure);
            }
            StmtKind::Call(call, def) => {
                let caller = self.closure(def)?;
                let value = self.call_block(call, caller)?;
                repr::print(&value, out, &self.meter)?;
            }
            StmtKind::Filter(filters, body) => {
                let (text, flow) = self.capture(|me, out| me.scoped(|me| me.body(body, out)))?;
                if flow != Flow::Next {
                    return Ok(flow);
                }
                let value = self.apply(filters, Value::Text(text))?;
                repr::print(&value, out, &self.meter)?;
            }
            StmtKind::With(variables, body) => {
                let mut values = Vec::new();
                for (target, expr) in variables {
                    values.push((target, self.eval(expr)?));
                }
                return self.scoped(|me| {
                    for (target, value) in values {
                        me.assign(target, value)?;
                    }
                    me.body(body, out)
                });
            }
            StmtKind::Break => return Ok(Flow::Break),
            StmtKind::Continue => return Ok(Flow::Continue),
        }
        Ok(Flow::Next)
    }

    fn for_each(
        &mut self,
        each: &Arc<For>,
        over: &Value,
        depth: usize,
        out: &mut TextBuilder,
    ) -> Result<Flow> {
        let mut list = ops::list(over, &self.meter)?;
        let again = each.is_recursive.then(|| (Arc::clone(each), self.scopes.len()));
        if let Some(only_if) = &each.only_if {
            let mut kept = Items::new(&self.meter);
            for item in list.items() {
                let keep = self.scoped(|me| {
                    me.assign(&each.target, item.clone())?;
                    Ok(me.eval(only_if)?.is_true())
                })?;
                if keep {
                    kept.push(item.clone())?;
                }
            }
            list = ops::list(&kept.finish()?, &self.meter)?;
        }
        let mut is_done = false;
        for (at, item) in list.items().iter().enumerate() {
            let flow = self.scoped(|me| {
                me.set("loop", Loop::value(&list, at, depth, again.clone())?);
                me.assign(&each.target, item.clone())?;
                me.body(&each.body, out)
            })?;
            is_done |= flow == Flow::Next;
            if flow == Flow::Break {
                break;
            }
        }
        // As in Jinja, where `else` also runs if no iteration completed.
        if is_done { Ok(Flow::Next) } else { self.scoped(|me| me.body(&each.otherwise, out)) }
    }

    fn apply(&mut self, filters: &[Filter], mut value: Value) -> Result<Value> {
        for filter in filters {
            let args = self.args(&filter.args)?;
            value = self.filter(&filter.name, value, args)?;
        }
        Ok(value)
    }

    /// Evaluates an expression.
    pub(super) fn eval(&mut self, expr: &Expr) -> Result<Value> {
        self.deeper(|me| match expr {
            Expr::None => Ok(Value::None),
            Expr::Bool(b) => Ok(Value::Bool(*b)),
            Expr::Int(n) => Ok(Value::Int(*n)),
            Expr::Float(x) => Ok(Value::Float(*x)),
            Expr::Text(text) => Value::own(&me.meter, text),
            Expr::Name(name) => Ok(me.lookup(name)),
            Expr::List(items) => {
                let meter = Rc::clone(&me.meter);
                List::collect(&meter, items.iter().map(|item| me.eval(item)))
            }
            Expr::Tuple(items) => {
                let meter = Rc::clone(&me.meter);
                List::tuple(&meter, items.iter().map(|item| me.eval(item)))
            }
            Expr::Map(pairs) => {
                let mut entries = Entries::new(&me.meter);
                for (key, value) in pairs {
                    entries.set(me.eval(key)?, me.eval(value)?)?;
                }
                entries.finish()
            }
            Expr::Chain(first, rest) => {
                let mut value = me.eval(first)?;
                for (op, right) in rest {
                    let right = me.eval(right)?;
                    value = ops::binary(*op, value, &right, &me.meter)?;
                }
                Ok(value)
            }
            Expr::Compare(first, rest) => me.compare(first, rest),
            Expr::And(terms) => me.until(terms, false),
            Expr::Or(terms) => me.until(terms, true),
            Expr::Not(inner) => Ok(Value::Bool(!me.eval(inner)?.is_true())),
            Expr::Minus(inner) => ops::minus(&me.eval(inner)?),
            Expr::If(parts) => {
                let (test, yes, no) = &**parts;
                match (me.eval(test)?.is_true(), no) {
                    (true, _) => me.eval(yes),
                    (false, Some(no)) => me.eval(no),
                    (false, None) => Ok(Value::Undefined),
                }
            }
            Expr::Postfix(base, posts, line) => {
                let mut value = me.eval(base)?;
                me.line = *line;
                for (i, post) in posts.iter().enumerate() {
                    value = match (post, &value) {
                        (Post::Method(name, args), Value::List(_)) if assign::MUTATORS.contains(&&**name) => {
                            drop(value);
                            me.change(base, &posts[..i], name, args)?
                        }
                        _ => me.post(base, value, post)?,
                    };
                }
                Ok(value)
            }
        })
    }

    /// Returns the first of `terms` whose truth value is `truth`, or else the last.
    fn until(&mut self, terms: &[Expr], truth: bool) -> Result<Value> {
        let mut value = Value::Undefined;
        for term in terms {
            value = self.eval(term)?;
            if value.is_true() == truth {
                break;
            }
        }
        Ok(value)
    }

    fn compare(&mut self, first: &Expr, rest: &[(Cmp, Expr)]) -> Result<Value> {
        let mut left = self.eval(first)?;
        for (cmp, right) in rest {
            let right = self.eval(right)?;
            if !ops::compare(*cmp, &left, &right, &self.meter)? {
                return Ok(Value::Bool(false));
            }
            left = right;
        }
        Ok(Value::Bool(true))
    }

    /// Applies `post` to `value`, which results from `base`.
    fn post(&mut self, base: &Expr, value: Value, post: &Post) -> Result<Value> {
        self.meter.work(1)?;
        match post {
            Post::Attr(name) => self.attr(&value, name),
            Post::Item(key) => {
                let key = self.eval(key)?;
                self.item(&value, &key)
            }
            Post::Slice(parts) => {
                let [start, stop, step] = &**parts;
                let mut part = |expr: &Option<Expr>| expr.as_ref().map(|expr| self.eval(expr)).transpose();
                let (start, stop, step) = (part(start)?, part(stop)?, part(step)?);
                ops::slice(&value, [start, stop, step], &self.meter)
            }
            Post::Call(args) => {
                if let (Value::Undefined, Expr::Name(name)) = (&value, base) {
                    return Err(Fault::failed(format!("'{name}' is not a function")));
                }
                let args = self.args(args)?;
                self.call(&value, args)
            }
            Post::Method(name, args) => {
                let args = self.args(args)?;
                self.method(&value, name, args)
            }
            Post::Filter(filter) => {
                let args = self.args(&filter.args)?;
                self.filter(&filter.name, value, args)
            }
            Post::Test { name, args, negated } => {
                let args = self.args(args)?;
                Ok(Value::Bool(self.test(name, &value, args)? != *negated))
            }
        }
    }

    pub(super) fn args(&mut self, args: &Args) -> Result<CallArgs> {
        let mut call = CallArgs::default();
        for expr in &args.positional {
            call.positional.push(self.eval(expr)?);
        }
        for (name, expr) in &args.named {
            call.named.push((name.clone(), self.eval(expr)?));
        }
        Ok(call)
    }

    /// `value.name`
    pub(super) fn attr(&mut self, value: &Value, name: &str) -> Result<Value> {
        let found = match value {
            Value::Map(map) => map.get_str(name, &self.meter)?.or_else(|| methods::of_map(map, name)),
            Value::Namespace(id) => match self.namespaces.get(*id) {
                Some(entries) => entries.get_str(name, &self.meter)?.cloned(),
                None => None,
            },
            Value::Loop(round) => ops::loop_attr(round, name),
            Value::List(list) => list.part(name),
            Value::Undefined => {
                return Err(Fault::failed(format!("cannot read '{name}' of an undefined value")));
            }
            _ => None,
        };
        Ok(found.unwrap_or(Value::Undefined))
    }

    /// `value[key]`
    pub(super) fn item(&mut self, value: &Value, key: &Value) -> Result<Value> {
        match (value, key) {
            (Value::Namespace(_) | Value::Loop(..) | Value::Undefined, Value::Text(name)) => {
                self.attr(value, name.as_str())
            }
            _ => ops::item(value, key, &self.meter),
        }
    }

    /// Calls a macro or a function.
    pub(super) fn call(&mut self, value: &Value, mut args: CallArgs) -> Result<Value> {
        let function = match value {
            Value::Macro(closure) => return self.call_macro(closure, args),
            Value::Loop(round) => return self.call_loop(round, args),
            Value::Function(function) => *function,
            Value::Method(map, name) => return self.method(&Value::Map(map.clone()), name, args),
            _ => return Err(Fault::failed(format!("{} cannot be called", value.kind()))),
        };
        match function {
            Function::Range => ops::range(args, &self.meter),
            Function::Dict | Function::Namespace => {
                let mut entries = Entries::new(&self.meter);
                if let Some(Value::Map(map)) = args.positional.first() {
                    for (key, value) in map.entries() {
                        entries.set(key.clone(), value.clone())?;
                    }
                }
                for (name, value) in args.named {
                    entries.set(Value::own(&self.meter, &name)?, value)?;
                }
                if function == Function::Dict {
                    return entries.finish();
                }
                self.namespaces.push(entries);
                Ok(Value::Namespace(self.namespaces.len() - 1))
            }
            Function::RaiseException => {
                let message = args.need(0, "message")?;
                Err(Fault::Raised(repr::str(&message, &self.meter)?.as_str().to_owned()))
            }
            Function::StrftimeNow => {
                let format = repr::str(&args.need(0, "format")?, &self.meter)?;
                let format = format.as_str();
                self.meter.read(format.len())?;
                let mut out = TextBuilder::new(&self.meter);
                time::strftime(format, self.now, &mut out)?;
                Ok(Value::Text(out.finish()?))
            }
        }
    }

    /// Renders a recursive loop for other items, with the variables around the loop.
    fn call_loop(&mut self, round: &Loop, mut args: CallArgs) -> Result<Value> {
        let Some((each, n_scopes)) = &round.again else {
            return Err(Fault::failed("'loop' can be called only if it is 'recursive'"));
        };
        let over = args.need(0, "iterable")?;
        args.finish(1)?;
        let inner = self.scopes.split_off((*n_scopes).min(self.scopes.len()));
        let (text, _) =
            self.deeper(|me| me.capture(|me, out| me.for_each(each, &over, round.depth + 1, out)))?;
        self.scopes.extend(inner);
        Ok(Value::Text(text))
    }

    /// Returns a macro as a value, with the variables around it.
    fn closure(&self, def: &Arc<MacroDef>) -> Result<Value> {
        let all = self.scopes.iter().flatten();
        let around = all.map(|(name, value)| (name.clone(), value.clone())).collect();
        Closure::value(&self.meter, def, around)
    }

    fn call_macro(&mut self, closure: &Rc<Closure>, mut args: CallArgs) -> Result<Value> {
        let def = &closure.def;
        let mut scope: Scope = closure.around.iter().cloned().collect();
        scope.insert(def.name.clone(), Value::Macro(Rc::clone(closure)));
        let outer = std::mem::replace(&mut self.scopes, vec![scope, Scope::new()]);
        if let Some(caller) = args.named.iter().position(|(name, _)| name == "caller") {
            let (name, caller) = args.named.swap_remove(caller);
            self.set(&name, caller);
        }
        for (at, (name, default)) in def.parameters.iter().enumerate() {
            let value = match (args.take(at, name), default) {
                (Some(value), _) => value,
                (None, Some(default)) => self.eval(default)?,
                (None, None) => Value::Undefined,
            };
            self.set(name, value);
        }
        args.finish(def.parameters.len())?;
        let (text, _) = self.capture(|me, out| me.body(&def.body, out))?;
        self.scopes = outer;
        Ok(Value::Text(text))
    }

    /// `{% call %}`: the call at the end of `call`, with `caller` as an additional argument.
    fn call_block(&mut self, call: &Expr, caller: Value) -> Result<Value> {
        let Expr::Postfix(base, posts, _) = call else {
            return Err(Fault::failed("'call' expects the call of a macro"));
        };
        let (Some(Post::Call(args)), [_]) = (posts.last(), posts.as_slice()) else {
            return Err(Fault::failed("'call' expects the call of a macro"));
        };
        let function = self.eval(base)?;
        let mut args = self.args(args)?;
        args.named.push(("caller".to_owned(), caller));
        self.call(&function, args)
    }
}
