//! A Jinja interpreter for chat templates: the subset of the language that they use, with Python's
//! semantics.
//!
//! Two requirements that no crate meets (minijinja was measured: it bounds steps, not bytes, and
//! its parser and values overflow the stack):
//!
//! - Templates are untrusted programs. Steps, bytes held at a time, nesting of source and values,
//!   and depth of calls are bounded ([`meter`], [`parse`], [`value`], [`eval`]). Exceeding a bound
//!   is an error, and the process continues.
//! - Every byte of text is tracked as template or input text ([`text`]) through every filter and
//!   method. A message can never produce a special token, however a template slices, joins or
//!   changes it.
//!
//! Deliberately more lenient than Python: `none` is an empty list in a loop, and text that a
//! template marks as safe is plain text. Generators are lists, and results derived from tuples are
//! lists.

mod assign;
mod ast;
mod eval;
mod filters;
mod groups;
mod layout;
mod lex;
mod limits;
mod methods;
mod ops;
mod parse;
mod printf;
mod repr;
mod text;
mod time;
mod value;

#[cfg(test)]
mod builtins;
#[cfg(test)]
mod tests;

use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

use jiff::civil::DateTime;
use serde_json::Value as Json;

pub(crate) use eval::MAX_DEPTH;
pub(crate) use limits::{MAX_BYTES, MAX_STEPS};
pub(crate) use value::MAX_NESTING;

use ast::Body;
use eval::Interpreter;
use limits::Budget;
use value::Value;

/// Maximum size of a template in bytes; the longest known has 40 thousand.
const MAX_SOURCE: usize = 256 << 10;

/// Why rendering stops.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Fault {
    /// The template is invalid or an operation failed.
    Failed(String),
    /// The template rejects its input with a message (`raise_exception`).
    Raised(String),
    /// The step limit is exceeded.
    Steps,
    /// The memory limit is exceeded.
    Bytes,
    /// Values are nested too deeply.
    Nesting,
    /// Macros or expressions are nested too deeply.
    Depth,
}

impl Fault {
    fn failed(message: impl Into<String>) -> Self {
        Fault::Failed(message.into())
    }
}

/// A fault and the line of the template, counted from 1.
pub(crate) type Located = (Fault, u32);

/// A parsed template.
#[derive(Debug, Clone)]
pub(crate) struct Template(Arc<Body>);

/// Inputs of a template: named values.
#[derive(Debug, Default)]
pub(crate) struct Inputs<'a> {
    /// Text of the application, tracked as template text.
    pub(crate) own: Vec<(&'a str, &'a str)>,
    /// Untrusted input: messages, tools and others. Earlier entries hide later ones of the same
    /// name.
    pub(crate) untrusted: Vec<(&'a str, Json)>,
}

impl Template {
    /// Parses `source`.
    ///
    /// # Errors
    /// [`Fault::Failed`] if it is not a valid template.
    pub(crate) fn parse(source: &str) -> Result<Self, Located> {
        if source.len() > MAX_SOURCE {
            let fault = format!("{} bytes of template ({MAX_SOURCE} at most)", source.len());
            return Err((Fault::failed(fault), 1));
        }
        Ok(Template(Arc::new(parse::parse(source)?)))
    }

    /// Renders the template with `given` at the time `now`. Also returns the ranges of the output
    /// that are template text, in ascending order.
    ///
    /// # Errors
    /// Any [`Fault`].
    pub(crate) fn render(
        &self,
        given: &Inputs<'_>,
        now: DateTime,
    ) -> Result<(String, Vec<Range<usize>>), Located> {
        let meter = Budget::new();
        let globals = globals(&meter, given).map_err(|fault| (fault, 1))?;
        meter.begin();
        Interpreter::new(Rc::clone(&meter), globals, now).run(&self.0)
    }
}

fn globals(meter: &Rc<Budget>, given: &Inputs<'_>) -> Result<eval::Scope, Fault> {
    let mut globals =
        eval::Scope::from(eval::FUNCTIONS.map(|(name, f)| (name.to_owned(), Value::Function(f))));
    for (name, text) in &given.own {
        globals.insert((*name).to_owned(), Value::own(meter, text)?);
    }
    for (name, json) in given.untrusted.iter().rev() {
        globals.insert((*name).to_owned(), Value::from_input(meter, json)?);
    }
    Ok(globals)
}
