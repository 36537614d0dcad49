//! What a model needs on this machine: for each KV type the bytes of a full context, the longest
//! context, and the number of conversations that fit beside the weights.

use std::sync::Arc;

use kvant::{Config, DType, Gguf, KvOptions, KvShape, Plan, limits};
use serde_json::{Value, json};

use crate::failure::Failure;
use crate::hints;
use crate::output::{self, Row};

/// Tokens of a conversation when several are counted, if the model was trained for as many.
const CONVERSATION: usize = 8192;

/// Memory that holds a model's weights and caches.
pub struct Memory {
    pub device: String,
    /// Bytes that are free now.
    pub free: usize,
}

/// What one device holds of a model, per KV type.
pub struct Fit {
    /// Bytes of the weights.
    weights: usize,
    /// Tokens of the model's training context.
    n_ctx: usize,
    devices: Vec<Memory>,
    rows: Vec<Row>,
}

impl Fit {
    /// Computes the table for a model that is not loaded, on `devices`.
    ///
    /// # Errors
    /// A model that Kvant does not run.
    pub fn of(gguf: &Gguf, devices: Vec<Memory>) -> Result<Self, Failure> {
        let mut config = Config::from_gguf(gguf).map_err(kvant::Error::from)?;
        // The default KV type depends on them.
        config.statistics = Some(Arc::new(config.weight_statistics(gguf).map_err(kvant::Error::from)?));
        let (shape, n_ctx) = (config.kv_shape(), config.n_ctx_train);
        let weights = gguf.tensors().iter().map(|info| info.n_bytes).sum();
        let plans = &plans(&shape)?;
        let shape = &shape;
        let rows = devices.iter().flat_map(|memory| {
            let free = memory.free.saturating_sub(weights);
            plans.iter().map(move |(name, plan)| row(&memory.device, name, plan, shape, n_ctx, free))
        });
        let rows = rows.collect();
        Ok(Self { weights, n_ctx, devices, rows })
    }

    /// Returns the lines above the table.
    pub fn lines(&self) -> Vec<String> {
        let weights = output::bytes(self.weights);
        let mut lines = vec![format!("weights  {weights}, trained for {} tokens", self.n_ctx)];
        for Memory { device, free } in &self.devices {
            let left = match free.checked_sub(self.weights) {
                Some(left) => format!("{} beside the weights", output::bytes(left)),
                None => format!("{} too few for the weights", output::bytes(self.weights - free)),
            };
            lines.push(format!("memory   {device}: {} free, {left}", output::bytes(*free)));
        }
        if self.devices.is_empty() {
            lines.push("memory   unknown: this system reports no free memory".to_owned());
        }
        lines
    }

    /// Returns a row per device and KV type.
    pub fn rows(&self) -> &[Row] {
        &self.rows
    }

    /// Returns the table as JSON.
    pub fn json(&self) -> Value {
        let memories = self.devices.iter().map(|memory| (memory.device.clone(), memory.free.into()));
        json!({
            "weight_bytes": self.weights,
            "n_ctx_train": self.n_ctx,
            "free_bytes": Value::Object(memories.collect()),
            "rows": self.rows,
        })
    }
}

/// Returns the memory of the CPU, where the system reports it.
pub fn cpu_memory() -> Option<Memory> {
    limits::available_bytes().map(|free| Memory { device: "cpu".to_owned(), free })
}

/// Returns the plans of the table with their names, the default first.
fn plans(shape: &KvShape) -> Result<Vec<(String, Plan)>, Failure> {
    let plan = |options: &KvOptions| {
        options.plan(shape).map_err(|error| Failure::Usage(hints::of_engine(&error.into())))
    };
    let default = plan(&KvOptions::default_for(shape))?;
    let (k, v) = default.type_names();
    let mut plans = vec![(format!("{k}/{v} (default)"), default)];
    for dtype in [DType::F16, DType::Q8_0, DType::Turbo4, DType::Turbo3, DType::Turbo2] {
        plans.push((format!("{0}/{0}", dtype.name()), plan(&KvOptions::symmetric(dtype))?));
    }
    Ok(plans)
}

fn row(device: &str, name: &str, plan: &Plan, shape: &KvShape, n_ctx: usize, free: usize) -> Row {
    let conversation = CONVERSATION.min(n_ctx);
    let n_bytes = |tokens| plan.n_bytes(shape, tokens);
    let longest = limits::largest(n_ctx, |tokens| n_bytes(tokens) <= free);
    let (bits_k, bits_v) = plan.bits_per_value(shape);
    let cells = [
        ("device", device.into()),
        ("type K/V", name.into()),
        ("bits per value", format!("{:.2}", (bits_k + bits_v) / 2.0).into()),
        ("full context", output::bytes(n_bytes(n_ctx)).into()),
        (
            "longest context",
            if longest == n_ctx { format!("{longest} (all)") } else { longest.to_string() }.into(),
        ),
        (&conversations(n_ctx), (free / n_bytes(conversation).max(1)).into()),
    ];
    cells.into_iter().map(|(name, cell): (&str, Value)| (name.to_owned(), cell)).collect()
}

/// Returns the head of the column that counts conversations, for a training context of `n_ctx`.
fn conversations(n_ctx: usize) -> String {
    format!("conversations of {}", CONVERSATION.min(n_ctx))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn smaller_types_hold_longer_contexts_and_more_conversations() {
        let gguf = kvant::Model::bundled_file().unwrap();
        let memory = |device: &str| Memory { device: device.to_owned(), free: 1 << 30 };
        let fit = Fit::of(&gguf, vec![memory("cpu"), memory("cuda:0")]).unwrap();
        assert_eq!(fit.rows.len(), 2 * 6);
        let config = Config::from_gguf(&gguf).unwrap();
        let (shape, plans) = (config.kv_shape(), plans(&config.kv_shape()).unwrap());
        let free = plans[1].1.n_bytes(&shape, config.n_ctx_train) / 2;
        let count = |at: usize, column: &str| {
            let row = row("cpu", &plans[at].0, &plans[at].1, &shape, config.n_ctx_train, free);
            row[column].to_string().trim_matches('"').split(' ').next().unwrap().parse::<usize>().unwrap()
        };
        let (f16, turbo3, many) = (1, 4, conversations(config.n_ctx_train));
        assert!(count(f16, "longest context") < config.n_ctx_train);
        assert_eq!(count(turbo3, "longest context"), config.n_ctx_train);
        assert!(count(turbo3, &many) > count(f16, &many));
    }
}
