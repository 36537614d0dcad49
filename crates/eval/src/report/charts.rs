//! The plots of a report.

use super::plot::{Axis, Plot, Scale};
use super::{KldReport, KldRow};
use crate::distortion::{Distortion, SCALE_BITS, lower_bound, upper_bound};

/// Configurations with a fixed colour in every plot; others share the remaining colours.
const OWN_COLOUR: [&str; 6] = ["q8_0", "q4_0", "turbo4", "turbo3", "turbo2", "f16"];
/// Number of series colours in the style sheet.
const N_COLOURS: usize = 9;

/// Returns the colour class of a configuration or format, the `series`-th of its plot.
pub(super) fn class(name: &str, series: usize) -> String {
    let shared = || OWN_COLOUR.len() + series % (N_COLOURS - OWN_COLOUR.len());
    let colour = OWN_COLOUR.iter().position(|own| *own == name).unwrap_or_else(shared);
    format!("s{colour}")
}

/// Plots the mean KLD against the bytes of the cache, as a share of f16's. Joins the Pareto-optimal
/// configurations.
pub(super) fn memory_and_quality(report: &KldReport) -> String {
    let point =
        |row: &KldRow| (100.0 * row.kv.bytes as f64 / row.kv.bytes_f16 as f64, row.stats.mean_kld.value);
    let rows: Vec<_> =
        report.rows.iter().enumerate().filter(|(_, row)| row.stats.mean_kld.value > 0.0).collect();
    let x = Scale::up_to(rows.iter().map(|(_, row)| point(row).0).fold(50.0, f64::max));
    let y = Scale::decades(rows.iter().map(|(_, row)| point(row).1));
    let mut plot = Plot::new(
        (560.0, 360.0),
        24.0,
        Axis { scale: x, label: "cache memory, % of f16" },
        Axis { scale: y, label: "mean KL divergence, nats" },
    );
    let mut front: Vec<(f64, f64)> = rows.iter().map(|(_, row)| point(row)).collect();
    front.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.total_cmp(&b.1)));
    let mut best = f64::INFINITY;
    front.retain(|&(_, kld)| {
        let better = kld < best;
        best = best.min(kld);
        better
    });
    plot.curve("front", &front);
    let mut labels = Vec::new();
    for (series, row) in rows {
        let ((x, y), name) = (point(row), row.kv.name());
        let class = class(&name, series);
        plot.dot(&class, (x, y), 6.0, &format!("{name}: {x:.1} % of f16, {y:.6} nats"));
        labels.push((name, class, (x, y)));
    }
    plot.dot_labels(&labels);
    plot.finish()
}

/// Plots the mean KLD by position in the chunk.
pub(super) fn by_position(report: &KldReport) -> String {
    let all = || report.rows.iter().flat_map(|row| &row.by_position);
    let x = Scale::Linear { min: (report.n_ctx / 2) as f64, max: report.n_ctx as f64 };
    let y = Scale::decades(all().map(|&(_, kld)| kld));
    let mut plot = Plot::new(
        (560.0, 360.0),
        110.0,
        Axis { scale: x, label: "position in the chunk" },
        Axis { scale: y, label: "mean KL divergence, nats" },
    );
    let mut labels = Vec::new();
    for (series, row) in report.rows.iter().enumerate() {
        if !row.by_position.iter().any(|&(_, kld)| kld > 0.0) {
            continue;
        }
        let width = row.by_position.get(1).map_or(0, |next| next.0 - row.by_position[0].0) as f64;
        let points: Vec<_> =
            row.by_position.iter().map(|&(at, kld)| (at as f64 + width / 2.0, kld)).collect();
        let (name, class) = (row.kv.name(), class(&row.kv.name(), series));
        plot.curve(&class, &points);
        labels.extend(points.last().map(|last| (name, class, last.1)));
    }
    plot.end_labels(&labels);
    plot.finish()
}

/// Plots the mean KLD with one layer's keys or values quantized, everything else in f16.
pub(super) fn by_layer(report: &KldReport) -> String {
    let layers = &report.layers;
    let y = Scale::up_to(layers.iter().map(|l| l.k.max(l.v)).fold(0.0, f64::max));
    let n = layers.len();
    let x = Scale::Linear { min: -0.5, max: n as f64 - 0.5 };
    let mut plot = Plot::new(
        (560.0, 320.0),
        24.0,
        Axis { scale: x, label: "KV layer" },
        Axis { scale: y, label: "mean KL divergence, nats" },
    );
    plot.text("label s0", (plot.x_at(-0.5) + 14.0, 30.0), "start", "K");
    plot.text("label s1", (plot.x_at(-0.5) + 32.0, 30.0), "start", "V");
    let slot = plot.x_at(1.0) - plot.x_at(0.0);
    let width = (slot * 0.36).min(40.0);
    for layer in layers {
        let middle = plot.x_at(layer.layer as f64);
        let note = |side: &str, kld: f64| format!("{side} of layer {}: {kld:.6} nats", layer.layer);
        plot.bar("s0", (middle - width - 1.0, width), layer.k, &note("K", layer.k));
        plot.bar("s1", (middle + 1.0, width), layer.v, &note("V", layer.v));
    }
    plot.finish()
}

/// Plots the relative squared error against bits, between the theoretical bounds: synthetic vectors
/// as dots, each layer of a model as faint ones.
pub(super) fn distortion(rows: &[Distortion]) -> String {
    let rows: Vec<&Distortion> = rows.iter().filter(|row| row.bpv < 12.0 && row.mse > 0.0).collect();
    let max_bits = rows.iter().map(|row| row.bpv).fold(5.0, f64::max);
    let x = Scale::Linear { min: 1.0, max: max_bits.ceil() };
    let y = Scale::decades(rows.iter().map(|row| row.mse));
    let mut plot = Plot::new(
        (560.0, 360.0),
        24.0,
        Axis { scale: x, label: "bits per value, scales included" },
        Axis { scale: y, label: "relative squared error" },
    );
    // A curve leaves the frame where its error is below the range: clamping would bend it.
    let floor = rows.iter().map(|row| row.mse).fold(f64::INFINITY, f64::min).log10().floor();
    let curve = |bound: fn(f64) -> f64| -> Vec<(f64, f64)> {
        let bits = (0..=200).map(|i| 1.0 + (max_bits.ceil() - 1.0) * f64::from(i) / 200.0);
        bits.map(|bits| (bits, bound(bits))).filter(|&(_, mse)| mse >= 10f64.powf(floor)).collect()
    };
    let (lower, upper) = (curve(lower_bound), curve(|bits| upper_bound(bits - SCALE_BITS)));
    plot.band("band", &lower, &upper);
    plot.curve("bound", &lower);
    plot.curve("bound", &upper);
    let mut codecs: Vec<&str> = Vec::new();
    for row in &rows {
        if !codecs.contains(&row.codec.as_str()) {
            codecs.push(&row.codec);
        }
    }
    let mut labels = Vec::new();
    for row in &rows {
        let series = codecs.iter().position(|codec| *codec == row.codec).unwrap_or(0);
        let class = class(&row.codec, series);
        let note = format!("{}, {}: {:.3} bits, {:.3e}", row.codec, row.law, row.bpv, row.mse);
        if row.law == "sphere" {
            labels.push((row.codec.clone(), class.clone(), (row.bpv, row.mse)));
            plot.dot(&class, (row.bpv, row.mse), 6.0, &note);
        } else {
            plot.dot(&format!("{class} faint"), (row.bpv, row.mse), 4.0, &note);
        }
    }
    plot.dot_labels(&labels);
    plot.finish()
}
