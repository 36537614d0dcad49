//! A Jinja of our own, for chat templates: of the language, what they use, with Python's semantics.
//!
//! Two things are asked of it that no crate has (minijinja was measured: it bounds steps, not bytes, and its parser and
//! values overflow the stack):
//!
//! - A template is a program of a stranger. Steps, bytes held at a time, nesting of source and values, and depth of
//!   calls are bounded ([`meter`], [`parse`], [`value`], [`eval`]); each bound is an error, and the process lives.
//! - Every byte knows whether the template wrote it or a message said it ([`text`]), through every filter and method. So
//!   a message can never write a special token, however a template cuts, joins or changes it.
//!
//! Where Python gives up and nothing is gained by it, this does not: none is an empty list in a loop, and what a
//! template marks as safe is plain text. Generators are lists, and what is
//! made of a tuple is one.

mod ast;
mod eval;
mod filters;
mod groups;
mod layout;
mod lex;
mod meter;
mod methods;
mod ops;
mod parse;
mod place;
mod printf;
mod show;
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
pub(crate) use meter::{MAX_BYTES, MAX_STEPS};
pub(crate) use value::MAX_NESTING;

use ast::Body;
use eval::Interpreter;
use meter::Meter;
use value::Value;

/// The longest template that is read, in bytes; the longest known has 40 thousand.
const MAX_SOURCE: usize = 256 << 10;

/// Why a template stops.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Fault {
    /// It does something that cannot be done.
    Failed(String),
    /// It refuses, in its own words (`raise_exception`).
    Raised(String),
    /// It works for too long.
    Steps,
    /// It holds too much.
    Bytes,
    /// Its values nest too deep.
    Nesting,
    /// Its macros or expressions stand too deep in each other.
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

/// What a template is given: names with values.
#[derive(Debug, Default)]
pub(crate) struct Given<'a> {
    /// The application's words, which count as the template's own.
    pub(crate) own: Vec<(&'a str, &'a str)>,
    /// What was said: messages, tools, whatever else. Earlier ones hide later ones of the same name.
    pub(crate) said: Vec<(&'a str, Json)>,
}

impl Template {
    /// Parses `source`.
    ///
    /// # Errors
    /// [`Fault::Failed`] where it is not a template.
    pub(crate) fn parse(source: &str) -> Result<Self, Located> {
        if source.len() > MAX_SOURCE {
            let fault = format!("{} bytes of template ({MAX_SOURCE} at most)", source.len());
            return Err((Fault::failed(fault), 1));
        }
        Ok(Template(Arc::new(parse::parse(source)?)))
    }

    /// The text that the template makes of `given` at the time `now`, and the ranges of it that are the template's own
    /// words, in ascending order.
    ///
    /// # Errors
    /// Any [`Fault`].
    pub(crate) fn render(
        &self,
        given: &Given<'_>,
        now: DateTime,
    ) -> Result<(String, Vec<Range<usize>>), Located> {
        let meter = Meter::new();
        let globals = globals(&meter, given).map_err(|fault| (fault, 1))?;
        meter.begin();
        Interpreter::new(Rc::clone(&meter), globals, now).run(&self.0)
    }
}

fn globals(meter: &Rc<Meter>, given: &Given<'_>) -> Result<eval::Scope, Fault> {
    let mut globals =
        eval::Scope::from(eval::FUNCTIONS.map(|(name, f)| (name.to_owned(), Value::Function(f))));
    for (name, text) in &given.own {
        globals.insert((*name).to_owned(), Value::own(meter, text)?);
    }
    for (name, json) in given.said.iter().rev() {
        globals.insert((*name).to_owned(), Value::said(meter, json)?);
    }
    Ok(globals)
}
