//! Filters that group items: `batch`, `slice`, `groupby`.

use super::Fault;
use super::eval::{CallArgs, Interpreter};
use super::ops;
use super::value::{Items, List, Value};

type Result<T> = std::result::Result<T, Fault>;

impl Interpreter {
    /// `batch(n, fill)`: lists of `n` items.
    pub(super) fn batch(&self, value: &Value, mut args: CallArgs) -> Result<Value> {
        let n = self.count(&args.need(0, "linecount")?, "batch")?;
        let fill = args.take(1, "fill_with").filter(|fill| !matches!(fill, Value::None));
        args.finish(2)?;
        let list = ops::list(value, &self.meter)?;
        let mut batches = Items::new(&self.meter);
        for batch in list.items().chunks(n) {
            let missing = fill.iter().flat_map(|fill| std::iter::repeat_n(fill, n - batch.len()));
            let items = batch.iter().chain(missing).map(|item| Ok(item.clone()));
            batches.push(List::collect(&self.meter, items)?)?;
        }
        batches.finish()
    }

    /// `slice(n, fill)`: `n` lists, of which the first may have one item more.
    pub(super) fn slices(&self, value: &Value, mut args: CallArgs) -> Result<Value> {
        let n = self.count(&args.need(0, "slices")?, "slice")?;
        let fill = args.take(1, "fill_with").filter(|fill| !matches!(fill, Value::None));
        args.finish(2)?;
        let list = ops::list(value, &self.meter)?;
        let items = list.items();
        let (each, n_longer) = (items.len() / n, items.len() % n);
        let mut slices = Items::new(&self.meter);
        let mut at = 0;
        for index in 0..n {
            let end = at + each + usize::from(index < n_longer);
            // As in Jinja, even if all lists have the same length.
            let filled = fill.iter().filter(|_| index >= n_longer);
            let slice = items[at..end].iter().chain(filled).map(|item| Ok(item.clone()));
            slices.push(List::collect(&self.meter, slice)?)?;
            at = end;
        }
        slices.finish()
    }

    /// `groupby(attribute, default, case_sensitive)`: sorted pairs of a common value and its items.
    pub(super) fn group_by(&mut self, value: &Value, mut args: CallArgs) -> Result<Value> {
        let attribute = args.need(0, "attribute")?;
        let default = args.take(1, "default");
        let cased = args.take(2, "case_sensitive").is_some_and(|cased| cased.is_true());
        args.finish(3)?;
        let mut keyed = Vec::new();
        for item in ops::list(value, &self.meter)?.items() {
            let shared = self.shared(item, &attribute, default.as_ref())?;
            keyed.push((self.sort_key(shared, cased)?, item.clone()));
        }
        let mut open: Vec<(Value, Items)> = Vec::new();
        for (key, item) in self.in_order(keyed, false)? {
            let fits = match open.last() {
                Some((of, _)) => of.equals(&key, &self.meter)?,
                None => false,
            };
            if !fits {
                open.push((key, Items::new(&self.meter)));
            }
            if let Some((_, items)) = open.last_mut() {
                items.push(item)?;
            }
        }
        let mut groups = Items::new(&self.meter);
        for (_, items) in open {
            let items = ops::list(&items.finish()?, &self.meter)?;
            // The value of the first item, whose case may differ from the sort key.
            let shared = self.shared(&items.items()[0], &attribute, default.as_ref())?;
            groups.push(List::group(&self.meter, shared, Value::List(items))?)?;
        }
        groups.finish()
    }

    /// Returns the grouping value of an item.
    fn shared(&mut self, item: &Value, attribute: &Value, default: Option<&Value>) -> Result<Value> {
        let found = self.pick(item, Some(attribute))?;
        Ok(match (&found, default) {
            (Value::Undefined, Some(default)) => default.clone(),
            _ => found,
        })
    }

    fn count(&self, value: &Value, who: &str) -> Result<usize> {
        let n = value.as_int().and_then(|n| usize::try_from(n).ok()).filter(|&n| n > 0);
        n.ok_or_else(|| Fault::failed(format!("'{who}' expects a whole number above 0")))
    }
}
