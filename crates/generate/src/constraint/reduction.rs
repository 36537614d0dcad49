//! Reduction of a schema to the part that can be enforced.

use serde_json::{Value, json};

use super::schema::SupportedSchema;
use super::{ConstraintError, LITTLE_SPACE, OPTIONS, OutputFormat};

/// Maximum parts of a schema that are dropped one by one.
const MAX_FAULTS: usize = 8;

/// Drops the unsupported parts of an object schema one by one, as `compile` reports them: an
/// unsupported part accepts any value.
pub struct SchemaReduction {
    schema: Value,
    n_left: usize,
}

impl SchemaReduction {
    /// Begins with the supported keywords of a schema.
    pub fn of(schema: &Value) -> Self {
        Self { schema: with_lenient_one_of(SupportedSchema::of(schema).schema), n_left: MAX_FAULTS }
    }

    /// Returns the format to compile next.
    pub fn format(&self) -> OutputFormat {
        OutputFormat::schema(self.schema.clone())
    }

    /// Accepts the result of compiling [`SchemaReduction::format`]. Returns the schema once it
    /// compiles; that of any object where that is out of reach.
    pub fn next(&mut self, result: Result<(), ConstraintError>) -> Option<Value> {
        let place = match result {
            Ok(()) => return Some(std::mem::take(&mut self.schema)),
            Err(ConstraintError::InvalidAt { place, .. }) if !place.is_empty() && self.n_left > 1 => place,
            Err(_) => return Some(json!({ "type": "object" })),
        };
        self.n_left -= 1;
        match self.schema.pointer_mut(&place) {
            Some(part) => *part = json!({}),
            None => return Some(json!({ "type": "object" })),
        }
        None
    }
}

/// Returns a schema whose `oneOf` accepts one or more matching alternatives.
fn with_lenient_one_of(mut schema: Value) -> Value {
    if let Some(fields) = schema.as_object_mut() {
        fields.insert(OPTIONS.to_owned(), json!({ "whitespace_pattern": LITTLE_SPACE, "lenient": true }));
    }
    schema
}
