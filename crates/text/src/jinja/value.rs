//! Values of templates: JSON values, and those that a template creates.

use std::cmp::Ordering;
use std::rc::Rc;
use std::sync::Arc;

use super::Fault;
use super::ast::{For, MacroDef};
use super::limits::{Budget, ByteReservation};
use super::text::Text;

/// Maximum nesting of values; a conversation's tools have a dozen levels. Functions over values may
/// recurse.
pub(crate) const MAX_NESTING: usize = 128;

/// Well-known roles. They count as template text, since formats turn them into tokens (`<|user|>`).
const ROLES: [&str; 8] = ["system", "user", "assistant", "tool", "developer", "function", "ipython", "model"];

/// A value. Only namespaces are mutable, and they are stored by index, so values cannot form
/// cycles. (A method that mutates a list assigns a new one to its variable.)
#[derive(Debug, Clone)]
pub(super) enum Value {
    Undefined,
    None,
    Bool(bool),
    Int(i128),
    Float(f64),
    Text(Text),
    List(List),
    Map(Map),
    /// The index of a `namespace(...)` in the interpreter.
    Namespace(usize),
    Macro(Rc<Closure>),
    /// A function of the environment.
    Function(Function),
    /// A bound method of a mapping.
    Method(Map, &'static str),
    Loop(Rc<Loop>),
}

/// `loop`: the list and the current position.
#[derive(Debug)]
pub(super) struct Loop {
    pub(super) list: List,
    pub(super) at: usize,
    /// Nesting depth of recursive calls of the loop.
    pub(super) depth: usize,
    /// For a `recursive` loop, its definition and the number of scopes around it.
    pub(super) again: Option<(Arc<For>, usize)>,
    _held: ByteReservation,
}

impl Loop {
    /// Creates a loop as a value.
    pub(super) fn value(
        list: &List,
        at: usize,
        depth: usize,
        again: Option<(Arc<For>, usize)>,
    ) -> Result<Value, Fault> {
        let mut held = ByteReservation::none(list.0.held.meter());
        held.grow(size_of::<Self>())?;
        Ok(Value::Loop(Rc::new(Loop { list: list.clone(), at, depth, again, _held: held })))
    }
}

/// The functions that a template can call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Function {
    Range,
    Dict,
    Namespace,
    RaiseException,
    StrftimeNow,
}

/// A macro, and the variables around its definition.
#[derive(Debug)]
pub(super) struct Closure {
    pub(super) def: Arc<MacroDef>,
    pub(super) around: Vec<(String, Value)>,
    nesting: usize,
    _held: ByteReservation,
}

impl Closure {
    /// Creates a macro as a value.
    pub(super) fn value(
        meter: &Rc<Budget>,
        def: &Arc<MacroDef>,
        around: Vec<(String, Value)>,
    ) -> Result<Value, Fault> {
        let mut held = ByteReservation::none(meter);
        held.grow(size_of::<Self>() + around.iter().map(|(name, _)| ENTRY + name.len()).sum::<usize>())?;
        let nesting = nested(around.iter().map(|(_, value)| value))?;
        Ok(Value::Macro(Rc::new(Closure { def: Arc::clone(def), around, nesting, _held: held })))
    }
}

/// Bytes of an item of a list, and of an entry of a map.
const ITEM: usize = size_of::<Value>();
const ENTRY: usize = 2 * ITEM + 16;
/// Bytes of a list or map besides those.
const OVERHEAD: usize = 96;

/// A list or tuple.
#[derive(Debug, Clone)]
pub(super) struct List(Rc<Items>);

/// The Python type of a list. It matters for printing and formatting; results derived from tuples
/// are lists.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Shape {
    List,
    Tuple,
    /// A pair of `groupby`, whose items are named `grouper` and `list`.
    Group,
}

/// A list under construction, and the content of a finished one.
#[derive(Debug)]
pub(super) struct Items {
    items: Vec<Value>,
    shape: Shape,
    nesting: usize,
    held: ByteReservation,
}

impl Items {
    pub(super) fn new(meter: &Rc<Budget>) -> Self {
        Items { items: Vec::new(), shape: Shape::List, nesting: 0, held: ByteReservation::none(meter) }
    }

    pub(super) fn push(&mut self, value: Value) -> Result<(), Fault> {
        self.held.grow(ITEM)?;
        self.nesting = self.nesting.max(nested([&value])?);
        self.items.push(value);
        Ok(())
    }

    /// Continues a list: `list` itself if not shared, else a copy.
    pub(super) fn of(list: List) -> Result<Self, Fault> {
        match Rc::try_unwrap(list.0) {
            Ok(mut items) => {
                // `finish` reserves it again.
                items.held.shrink(OVERHEAD);
                Ok(items)
            }
            Err(shared) => {
                let mut held = ByteReservation::none(shared.held.meter());
                held.grow(shared.items.len() * ITEM)?;
                Ok(Items { items: shared.items.clone(), shape: shared.shape, nesting: shared.nesting, held })
            }
        }
    }

    pub(super) fn len(&self) -> usize {
        self.items.len()
    }

    /// Removes and returns the item at position `at`.
    pub(super) fn remove(&mut self, at: usize) -> Result<Value, Fault> {
        self.held.meter().read((self.items.len() - at) * ITEM)?;
        self.held.shrink(ITEM);
        Ok(self.items.remove(at))
    }

    pub(super) fn finish(mut self) -> Result<Value, Fault> {
        self.held.grow(OVERHEAD)?;
        Ok(Value::List(List(Rc::new(self))))
    }
}

impl List {
    /// Creates a list of `values`.
    pub(super) fn collect(
        meter: &Rc<Budget>,
        values: impl IntoIterator<Item = Result<Value, Fault>>,
    ) -> Result<Value, Fault> {
        let mut items = Items::new(meter);
        for value in values {
            items.push(value?)?;
        }
        items.finish()
    }

    /// Creates a tuple of `values`.
    pub(super) fn tuple(
        meter: &Rc<Budget>,
        values: impl IntoIterator<Item = Result<Value, Fault>>,
    ) -> Result<Value, Fault> {
        let mut items = Items { shape: Shape::Tuple, ..Items::new(meter) };
        for value in values {
            items.push(value?)?;
        }
        items.finish()
    }

    /// Creates a group of `groupby`.
    pub(super) fn group(meter: &Rc<Budget>, grouper: Value, list: Value) -> Result<Value, Fault> {
        let mut items = Items { shape: Shape::Group, ..Items::new(meter) };
        items.push(grouper)?;
        items.push(list)?;
        items.finish()
    }

    pub(super) fn shape(&self) -> Shape {
        self.0.shape
    }

    /// Returns an item of a group by its name.
    pub(super) fn part(&self, name: &str) -> Option<Value> {
        let at = ["grouper", "list"].iter().position(|part| *part == name)?;
        self.items().get(at).filter(|_| self.shape() == Shape::Group).cloned()
    }

    pub(super) fn items(&self) -> &[Value] {
        &self.0.items
    }
}

/// A mapping, in insertion order.
#[derive(Debug, Clone)]
pub(super) struct Map(Rc<Entries>);

/// A mapping under construction, and the content of a finished one. Mappings in conversations are
/// small: a lookup scans the entries and counts it as steps.
#[derive(Debug)]
pub(super) struct Entries {
    entries: Vec<(Value, Value)>,
    nesting: usize,
    held: ByteReservation,
}

impl Entries {
    pub(super) fn new(meter: &Rc<Budget>) -> Self {
        Entries { entries: Vec::new(), nesting: 0, held: ByteReservation::none(meter) }
    }

    /// Sets `key`, at its old position if present.
    pub(super) fn set(&mut self, key: Value, value: Value) -> Result<(), Fault> {
        let meter = Rc::clone(self.held.meter());
        self.nesting = self.nesting.max(nested([&key, &value])?);
        for (other, old) in &mut self.entries {
            if other.equals(&key, &meter)? {
                *old = value;
                return Ok(());
            }
        }
        self.held.grow(ENTRY)?;
        self.entries.push((key, value));
        Ok(())
    }

    pub(super) fn get(&self, key: &Value, meter: &Budget) -> Result<Option<&Value>, Fault> {
        for (other, value) in &self.entries {
            if other.equals(key, meter)? {
                return Ok(Some(value));
            }
        }
        Ok(None)
    }

    /// Returns the value of a text key.
    pub(super) fn get_str(&self, key: &str, meter: &Budget) -> Result<Option<&Value>, Fault> {
        meter.work(1 + self.entries.len() / 4)?;
        let is_it = |other: &Value| matches!(other, Value::Text(text) if text.as_str() == key);
        Ok(self.entries.iter().find(|(other, _)| is_it(other)).map(|(_, value)| value))
    }

    /// Returns the mutable value of a text key.
    pub(super) fn get_mut(&mut self, key: &str) -> Option<&mut Value> {
        let is_it = |other: &Value| matches!(other, Value::Text(text) if text.as_str() == key);
        self.entries.iter_mut().find(|(other, _)| is_it(other)).map(|(_, value)| value)
    }

    pub(super) fn finish(mut self) -> Result<Value, Fault> {
        self.held.grow(OVERHEAD)?;
        Ok(Value::Map(Map(Rc::new(self))))
    }
}

impl Map {
    pub(super) fn entries(&self) -> &[(Value, Value)] {
        &self.0.entries
    }

    pub(super) fn get(&self, key: &Value, meter: &Budget) -> Result<Option<Value>, Fault> {
        match key {
            Value::Text(text) => self.get_str(text.as_str(), meter),
            _ => Ok(self.0.get(key, meter)?.cloned()),
        }
    }

    pub(super) fn get_str(&self, key: &str, meter: &Budget) -> Result<Option<Value>, Fault> {
        Ok(self.0.get_str(key, meter)?.cloned())
    }
}

/// Returns the nesting of a container of `values`.
fn nested<'a>(values: impl IntoIterator<Item = &'a Value>) -> Result<usize, Fault> {
    let nesting = |value: &Value| match value {
        Value::List(list) => list.0.nesting,
        Value::Loop(round) => round.list.0.nesting,
        Value::Map(map) | Value::Method(map, _) => map.0.nesting,
        Value::Macro(closure) => closure.nesting,
        _ => 0,
    };
    let nesting = 1 + values.into_iter().map(nesting).max().unwrap_or(0);
    if nesting <= MAX_NESTING { Ok(nesting) } else { Err(Fault::Nesting) }
}

impl Value {
    /// Converts a JSON value; every text counts as input, except [`ROLES`].
    pub(super) fn from_input(meter: &Rc<Budget>, json: &serde_json::Value) -> Result<Value, Fault> {
        use serde_json::Value as Json;
        Ok(match json {
            Json::Null => Value::None,
            Json::Bool(b) => Value::Bool(*b),
            Json::Number(n) => match n.as_i128() {
                Some(n) => Value::Int(n),
                None => Value::Float(n.as_f64().unwrap_or(f64::NAN)),
            },
            Json::String(text) => Value::Text(Text::new(meter, text, true)?),
            Json::Array(items) => {
                List::collect(meter, items.iter().map(|item| Value::from_input(meter, item)))?
            }
            Json::Object(object) => {
                let mut entries = Entries::new(meter);
                for (key, value) in object {
                    let is_role = key == "role" && value.as_str().is_some_and(|role| ROLES.contains(&role));
                    let value = match value {
                        Json::String(role) if is_role => Value::own(meter, role)?,
                        value => Value::from_input(meter, value)?,
                    };
                    entries.set(Value::Text(Text::new(meter, key, true)?), value)?;
                }
                entries.finish()?
            }
        })
    }

    /// Creates template text.
    pub(super) fn own(meter: &Rc<Budget>, text: &str) -> Result<Value, Fault> {
        Ok(Value::Text(Text::new(meter, text, false)?))
    }

    /// Python's `bool`.
    pub(super) fn is_true(&self) -> bool {
        match self {
            Value::Undefined | Value::None => false,
            Value::Bool(b) => *b,
            Value::Int(n) => *n != 0,
            Value::Float(x) => *x != 0.0,
            Value::Text(text) => text.len() > 0,
            Value::List(list) => !list.items().is_empty(),
            Value::Map(map) => !map.entries().is_empty(),
            Value::Namespace(_)
            | Value::Macro(_)
            | Value::Function(_)
            | Value::Method(..)
            | Value::Loop(..) => true,
        }
    }

    /// Returns a description of the kind of value, for messages.
    pub(super) fn kind(&self) -> &'static str {
        match self {
            Value::Undefined => "an undefined value",
            Value::None => "none",
            Value::Bool(_) => "a truth value",
            Value::Int(_) | Value::Float(_) => "a number",
            Value::Text(_) => "text",
            Value::List(_) => "a list",
            Value::Map(_) => "a mapping",
            Value::Namespace(_) => "a namespace",
            Value::Macro(_) | Value::Function(_) | Value::Method(..) => "a function",
            Value::Loop(..) => "a loop",
        }
    }

    /// Returns an integer; truth values count as 0 and 1.
    pub(super) fn as_int(&self) -> Option<i128> {
        match self {
            Value::Bool(b) => Some(i128::from(*b)),
            Value::Int(n) => Some(*n),
            _ => None,
        }
    }

    /// Returns any number as a float.
    pub(super) fn as_float(&self) -> Option<f64> {
        match self {
            Value::Float(x) => Some(*x),
            _ => self.as_int().map(|n| n as f64),
        }
    }

    /// Python's `==`.
    pub(super) fn equals(&self, other: &Value, meter: &Budget) -> Result<bool, Fault> {
        meter.work(1)?;
        Ok(match (self, other) {
            (Value::Undefined, Value::Undefined) | (Value::None, Value::None) => true,
            (Value::Text(a), Value::Text(b)) => {
                meter.read(a.len().min(b.len()))?;
                a.as_str() == b.as_str()
            }
            (Value::List(a), Value::List(b)) => {
                let (a, b) = (a.items(), b.items());
                if a.len() != b.len() {
                    return Ok(false);
                }
                for (a, b) in a.iter().zip(b) {
                    if !a.equals(b, meter)? {
                        return Ok(false);
                    }
                }
                true
            }
            (Value::Map(a), Value::Map(b)) => {
                if a.entries().len() != b.entries().len() {
                    return Ok(false);
                }
                for (key, value) in a.entries() {
                    let same = match b.get(key, meter)? {
                        Some(other) => value.equals(&other, meter)?,
                        None => false,
                    };
                    if !same {
                        return Ok(false);
                    }
                }
                true
            }
            (Value::Namespace(a), Value::Namespace(b)) => a == b,
            (Value::Macro(a), Value::Macro(b)) => Rc::ptr_eq(a, b),
            (Value::Function(a), Value::Function(b)) => a == b,
            _ => match (self.as_int(), other.as_int()) {
                (Some(a), Some(b)) => a == b,
                _ => matches!((self.as_float(), other.as_float()), (Some(a), Some(b)) if a == b),
            },
        })
    }

    /// Python's order: of numbers, of texts, of lists.
    pub(super) fn compare(&self, other: &Value, meter: &Budget) -> Result<Ordering, Fault> {
        meter.work(1)?;
        match (self, other) {
            (Value::Text(a), Value::Text(b)) => {
                meter.read(a.len().min(b.len()))?;
                return Ok(a.as_str().cmp(b.as_str()));
            }
            (Value::List(a), Value::List(b)) => {
                for (a, b) in a.items().iter().zip(b.items()) {
                    if !a.equals(b, meter)? {
                        return a.compare(b, meter);
                    }
                }
                return Ok(a.items().len().cmp(&b.items().len()));
            }
            _ => {}
        }
        let order = match (self.as_int(), other.as_int()) {
            (Some(a), Some(b)) => Some(a.cmp(&b)),
            _ => self.as_float().zip(other.as_float()).and_then(|(a, b)| a.partial_cmp(&b)),
        };
        order.ok_or_else(|| Fault::failed(format!("cannot order {} and {}", self.kind(), other.kind())))
    }
}
