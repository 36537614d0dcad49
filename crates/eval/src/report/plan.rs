//! A KV cache plan on the page: bits of every head, and its position among the efficient plans.

use std::fmt::Write;

use kvant::{HeadTypes, KvLayerShape, KvShape, Plan, Policies};
use serde::{Deserialize, Serialize};

use super::About;
use super::plot::{Axis, Plot, Scale, escape};
use crate::error::EvalError;
use crate::plan::Planned;

/// Part of `kvant plan` in a report.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PlanReport {
    /// Its provenance.
    pub about: About,
    /// The types of K and V, `[KV layers][n_kv_heads]`.
    pub types: Vec<Vec<[PlanCell; 2]>>,
    /// Bits per value of the plan, and its measured added divergence, in nats.
    pub found: (f64, f64),
    /// Bits per value and predicted divergence of the efficient plans, fewest bits first.
    pub frontier: Vec<(f64, f64)>,
}

/// The type of one head's K or V.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PlanCell {
    /// Its name.
    pub dtype: String,
    /// Bits per value, scales and centres included.
    pub bits: f64,
}

impl PlanReport {
    /// Creates the part of a plan for a model of that shape.
    ///
    /// # Errors
    ///
    /// A type that is not a KV cache type.
    pub fn new(about: About, planned: &Planned, shape: &KvShape) -> Result<Self, EvalError> {
        let certificate = &planned.plan.certificate;
        let of_layer = |(heads, layer): (&Vec<HeadTypes>, &KvLayerShape)| {
            heads.iter().map(|types| cells(*types, *layer)).collect::<Result<_, _>>()
        };
        let types = planned.plan.types.iter().zip(&shape.layers).map(of_layer).collect::<Result<_, _>>()?;
        let found = (certificate.bits, certificate.added_kld());
        Ok(Self { about, types, found, frontier: planned.frontier.clone() })
    }
}

/// Returns the cells of one head of a layer.
fn cells(types: HeadTypes, layer: KvLayerShape) -> Result<[PlanCell; 2], EvalError> {
    let one = KvShape::uniform(1, layer);
    let stored = Plan::new(&one, types.k, types.v, &Policies::none()).map_err(kvant::Error::from)?;
    let (k, v) = stored.bits_per_value(&one);
    Ok([(types.k, k), (types.v, v)].map(|(dtype, bits)| PlanCell { dtype: dtype.name().to_owned(), bits }))
}

/// Bits per value of the strongest colour.
const MAX_BITS: f64 = 8.5;

/// Plots the bits of every head: K and V of each, down, in every layer, across.
pub(super) fn heat_map(report: &PlanReport) -> String {
    let n_heads = report.types.iter().map(Vec::len).max().unwrap_or(0);
    let mut table = "<table><tr><th></th>".to_owned();
    for layer in 0..report.types.len() {
        let _ = write!(table, "<th>{layer}</th>");
    }
    table.push_str("</tr>");
    for (side, name) in ["K", "V"].into_iter().enumerate() {
        for head in 0..n_heads {
            let _ = write!(table, "<tr><th>{name} {head}</th>");
            for (layer, heads) in report.types.iter().enumerate() {
                let _ = match heads.get(head) {
                    Some(sides) => cell(&mut table, layer, &sides[side]),
                    None => write!(table, "<td></td>"),
                };
            }
            table.push_str("</tr>");
        }
    }
    table.push_str("</table>");
    table
}

fn cell(table: &mut String, layer: usize, PlanCell { dtype, bits }: &PlanCell) -> std::fmt::Result {
    let heat = 0.05 + 0.75 * (bits / MAX_BITS).clamp(0.0, 1.0);
    write!(
        table,
        "<td class=\"cell bits\" style=\"background:rgb(var(--heat) / {heat:.2})\" \
         title=\"layer {layer}: {}, {bits:.3} bits\">{bits:.1}</td>",
        escape(dtype)
    )
}

/// Plots the predicted divergence by bits, from layers measured alone, and the measured plan.
pub(super) fn frontier(report: &PlanReport) -> String {
    let points = || report.frontier.iter().copied().filter(|(_, kld)| *kld > 0.0);
    let (bits, kld) = report.found;
    let max_bits = points().map(|(bits, _)| bits).fold(bits, f64::max);
    let min_bits = points().map(|(bits, _)| bits).fold(bits, f64::min);
    let x = Scale::Linear { min: min_bits.floor(), max: max_bits.ceil() };
    let y = Scale::decades(points().map(|(_, kld)| kld).chain([kld]));
    let mut plot = Plot::new(
        (560.0, 360.0),
        24.0,
        Axis { scale: x, label: "bits per value, scales and centres included" },
        Axis { scale: y, label: "mean KL divergence, nats" },
    );
    plot.curve("front", &points().collect::<Vec<_>>());
    plot.dot("s0", (bits, kld), 6.0, &format!("the plan: {bits:.3} bits, {kld:.6} nats"));
    plot.dot_labels(&[("the plan".to_owned(), "s0".to_owned(), (bits, kld))]);
    plot.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heat_maps_have_a_cell_per_head_and_gaps_for_fewer_heads() {
        let of = |dtype: &str, bits| PlanCell { dtype: dtype.to_owned(), bits };
        let head = || [of("turbo4", 4.375), of("turbo2t", 2.25)];
        let about = About::default();
        let types = vec![vec![head(), head()], vec![head()]];
        let frontier = vec![(2.3, 0.2), (4.4, 0.01), (8.6, 0.0)];
        let report = PlanReport { about, types, found: (3.3, 0.05), frontier };
        let map = heat_map(&report);
        assert_eq!(map.matches("class=\"cell bits\"").count(), 6);
        assert_eq!(map.matches("<td></td>").count(), 2);
        assert!(map.contains("<th>K 1</th>") && map.contains("layer 1: turbo4, 4.375 bits"), "{map}");
        let plot = super::frontier(&report);
        assert!(plot.contains("the plan: 3.300 bits, 0.050000 nats") && !plot.contains("NaN"), "{plot}");
    }
}
