//! Assignment targets of templates: variables, and attributes of namespaces.

use super::ast::{Args, Expr, Op, Post, Target};
use super::eval::{CallArgs, Interpreter};
use super::value::{Items, Value};
use super::{Fault, ops};

type Result<T> = std::result::Result<T, Fault>;

/// The methods that mutate a list.
pub(super) const MUTATORS: [&str; 3] = ["append", "extend", "pop"];

impl Target {
    /// Whether `expr` reads this target.
    pub(super) fn is(&self, expr: &Expr) -> bool {
        match (self, expr) {
            (Target::Name(name), Expr::Name(other)) => name == other,
            (Target::Attr(name, attr), Expr::Postfix(base, posts, _)) => {
                matches!(&**base, Expr::Name(other) if name == other)
                    && matches!(&posts[..], [Post::Attr(other)] if attr == other)
            }
            _ => false,
        }
    }
}

impl Interpreter {
    /// Assigns `value` to `target`.
    pub(super) fn assign(&mut self, target: &Target, value: Value) -> Result<()> {
        match target {
            Target::Name(name) => self.set(name, value),
            Target::Tuple(names) => {
                let list = ops::list(&value, &self.meter)?;
                if list.items().len() != names.len() {
                    let (expected, got) = (names.len(), list.items().len());
                    return Err(Fault::failed(format!("expected {expected} values to unpack, got {got}")));
                }
                for (name, item) in names.iter().zip(list.items()) {
                    self.set(name, item.clone());
                }
            }
            Target::Attr(name, attr) => {
                let key = Value::own(&self.meter, attr)?;
                let Value::Namespace(id) = self.lookup(name) else {
                    return Err(Fault::failed(format!(
                        "'{name}' is not a namespace, so '{attr}' cannot be set"
                    )));
                };
                if let Some(namespace) = self.namespaces.get_mut(id) {
                    namespace.set(key, value)?;
                }
            }
        }
        Ok(())
    }

    /// Evaluates `target = first op ...`, where `first` is the target itself. The target releases a
    /// text that is about to be replaced, so that it grows in place. Otherwise templates that build
    /// a conversation message by message would copy it each time.
    pub(super) fn eval_append(
        &mut self,
        target: &Target,
        first: &Expr,
        rest: &[(Op, Expr)],
    ) -> Result<Value> {
        let mut value = self.eval(first)?;
        let rest: Vec<_> =
            rest.iter().map(|(op, right)| Ok((*op, self.eval(right)?))).collect::<Result<_>>()?;
        if let Some(place) = self.place(target)
            && matches!((&*place, &value), (Value::Text(a), Value::Text(b)) if a.is(b))
        {
            *place = Value::Undefined;
        }
        for (op, right) in rest {
            value = ops::binary(op, value, &right, &self.meter)?;
        }
        Ok(value)
    }

    /// Evaluates `base.path.name(args)`, which mutates the list of a variable or of a namespace
    /// attribute. Other holders of that list keep the old one: values are immutable, so they cannot
    /// form cycles.
    pub(super) fn change(&mut self, base: &Expr, path: &[Post], name: &str, args: &Args) -> Result<Value> {
        let args = self.args(args)?;
        let target = match (base, path) {
            (Expr::Name(name), []) => Target::Name(name.clone()),
            (Expr::Name(name), [Post::Attr(attr)]) => Target::Attr(name.clone(), attr.clone()),
            _ => return Err(Fault::failed(format!("'{name}' can change only lists of variables"))),
        };
        let place = self.storage(&target);
        let Some(Value::List(list)) = place.map(|place| std::mem::replace(place, Value::Undefined)) else {
            return Err(Fault::failed(format!("'{name}' can change only lists of variables")));
        };
        let mut items = Items::of(list)?;
        let result = self.mutate_items(&mut items, name, args)?;
        let changed = items.finish()?;
        if let Some(place) = self.storage(&target) {
            *place = changed;
        }
        Ok(result)
    }

    /// Mutates `items` and returns the result of the method.
    fn mutate_items(&self, items: &mut Items, name: &str, mut args: CallArgs) -> Result<Value> {
        let result = match name {
            "append" => {
                items.push(args.need(0, "object")?)?;
                Value::None
            }
            "extend" => {
                for item in ops::list(&args.need(0, "iterable")?, &self.meter)?.items() {
                    items.push(item.clone())?;
                }
                Value::None
            }
            _ => {
                let at = args.take(0, "index").map_or(Some(-1), |at| at.as_int());
                let at = at.and_then(|at| ops::place(at, items.len()));
                items.remove(at.ok_or_else(|| Fault::failed("'pop' of an index out of range"))?)?
            }
        };
        args.finish(1)?;
        Ok(result)
    }

    /// Returns the storage of `target` in any scope.
    fn storage(&mut self, target: &Target) -> Option<&mut Value> {
        match target {
            Target::Name(name) => self.variable(name),
            target => self.place(target),
        }
    }

    /// Returns the storage of `target` that an assignment would replace.
    fn place(&mut self, target: &Target) -> Option<&mut Value> {
        match target {
            Target::Name(name) => self.scope().get_mut(name),
            Target::Attr(name, attr) => match self.lookup(name) {
                Value::Namespace(id) => self.namespaces.get_mut(id)?.get_mut(attr),
                _ => None,
            },
            Target::Tuple(_) => None,
        }
    }
}
