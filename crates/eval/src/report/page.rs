//! The page around the plots: headline figures, tables, heat maps.

use std::fmt::Write;

use super::plot::escape;
use super::{About, DistortionReport, KldReport, KldRow, NiahReport, Parts, PlanReport, charts, plan};
use crate::config::KvConfig;
use crate::niah::NiahCell;

const STYLE: &str = include_str!("style.css");

/// The headline names the smallest cache whose mean divergence is at most this, in nats: an
/// arbitrary threshold, stated on the page.
const CLOSE: f64 = 0.01;

pub(super) fn render(parts: &Parts) -> String {
    let mut body = String::new();
    let abouts = [
        parts.kld.as_ref().map(|part| &part.about),
        parts.niah.as_ref().map(|part| &part.about),
        parts.distortion.as_ref().map(|part| &part.about),
        parts.plan.as_ref().map(|part| &part.about),
    ];
    let model = abouts.iter().flatten().next().map_or("", |about| &about.model);
    let _ = write!(body, "<h1>KV cache quality</h1><p class=\"sub\">{}</p>", escape(model));
    tiles(&mut body, parts);
    body.push_str("<div class=\"grid\">");
    if let Some(kld) = &parts.kld {
        kld_cards(&mut body, kld);
    }
    if let Some(plan) = &parts.plan {
        plan_cards(&mut body, plan);
    }
    if let Some(distortion) = &parts.distortion {
        distortion_card(&mut body, distortion);
    }
    if let Some(niah) = &parts.niah {
        niah_card(&mut body, niah);
    }
    about_card(&mut body, &abouts.into_iter().flatten().collect::<Vec<_>>());
    body.push_str(
        "</div><footer>Made by kvant. Every number here is in the JSON files beside this page.</footer>",
    );
    format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\
         <title>KV cache quality: {}</title>\n<style>\n{STYLE}</style></head>\n<body><main>{body}</main></body></html>\n",
        escape(model)
    )
}

fn card(out: &mut String, wide: bool, title: &str, caption: &str, content: &str) {
    let class = if wide { "card wide" } else { "card" };
    let _ = writeln!(
        out,
        "<section class=\"{class}\"><h2>{}</h2><p class=\"sub\">{}</p>{content}</section>",
        escape(title),
        escape(caption)
    );
}

fn tile(out: &mut String, figure: &str, words: &str) {
    let _ =
        write!(out, "<div class=\"card tile\"><b>{}</b><span>{}</span></div>", escape(figure), escape(words));
}

/// Writes the headline figures.
fn tiles(out: &mut String, parts: &Parts) {
    out.push_str("<div class=\"tiles\">");
    if let Some(kld) = &parts.kld {
        let share = |row: &KldRow| 100.0 * row.kv.bytes as f64 / row.kv.bytes_f16 as f64;
        let close = kld.rows.iter().filter(|row| row.stats.mean_kld.value <= CLOSE);
        if let Some(row) = close.min_by_key(|row| row.kv.bytes) {
            let words = format!("of f16's memory with {}: smallest cache within {CLOSE} nats", row.kv.name());
            tile(out, &format!("{:.0} %", share(row)), &words);
            let words = format!("of tokens have the same most probable token with {}", row.kv.name());
            tile(out, &format!("{:.1} %", 100.0 * row.stats.same_top.value), &words);
        }
        if let Some(row) = kld.rows.first() {
            let words = format!("perplexity with f16, {} chunks of {} tokens", kld.chunks, kld.n_ctx);
            tile(out, &format!("{:.2}", row.stats.ppl_base.value), &words);
        }
    }
    if let Some(niah) = &parts.niah {
        let found = niah.cells.iter().filter(|cell| cell.exact >= 1.0).count();
        let words = format!("of {} needle cells answered in full", niah.cells.len());
        tile(out, &format!("{found}"), &words);
    }
    out.push_str("</div>");
}

fn kld_cards(out: &mut String, report: &KldReport) {
    let caption = format!(
        "KL divergence from the f16 cache over {} chunks of {} tokens, second half scored. Lower is closer; perplexity alone can mislead.",
        report.chunks, report.n_ctx
    );
    card(
        out,
        true,
        "Configurations",
        &caption,
        &format!("<div class=\"scroll\">{}</div>", kld_table(report)),
    );
    let caption = "Bytes are those allocated for one chunk, f16 parts and padding included. The dotted line joins configurations that no other beats in both.";
    card(out, false, "Memory against quality", caption, &charts::memory_and_quality(report));
    let caption = match report.rows.iter().any(|row| row.kv.tail) {
        true => {
            "Whether errors add up as the context grows. The last positions read their neighbours from the f16 tail."
        }
        false => "Whether errors add up as the context grows.",
    };
    card(out, false, "Divergence by position", caption, &charts::by_position(report));
    if !report.layers.is_empty() {
        let caption = format!(
            "One layer's keys (left bar) or values (right bar) in {}, everything else in f16: where more bits help most.",
            report.layers_of
        );
        card(out, false, "Divergence by layer", &caption, &charts::by_layer(report));
    }
}

fn kld_table(report: &KldReport) -> String {
    let mut table = "<table><thead><tr>".to_owned();
    for head in [
        "K / V",
        "bits",
        "memory",
        "mean KLD",
        "median",
        "99 %",
        "99.9 %",
        "max",
        "same top",
        "Δp RMS",
        "PPL",
        "PPL ratio",
    ] {
        let _ = write!(table, "<th>{}</th>", escape(head));
    }
    table.push_str("</tr></thead><tbody>");
    for (series, row) in report.rows.iter().enumerate() {
        let s = &row.stats;
        let share = 100.0 * row.kv.bytes as f64 / row.kv.bytes_f16 as f64;
        let name = row.kv.name();
        let _ = write!(
            table,
            "<tr title=\"{}\"><td><i class=\"key {}\"></i>{}</td><td>{}</td><td>{share:.1} %</td>\
             <td title=\"± {:.6}\"><b>{:.6}</b></td><td>{:.6}</td><td>{:.4}</td><td>{:.4}</td><td>{:.4}</td>\
             <td>{:.2} %</td><td>{:.2} %</td><td>{:.3}</td><td>{:.4}</td></tr>",
            escape(&row.kv.notes.join("; ")),
            charts::class(&name, series),
            escape(&name),
            bits(&row.kv),
            s.mean_kld.stderr,
            s.mean_kld.value,
            s.kld.median,
            s.kld.p99,
            s.kld.p99_9,
            s.kld.max,
            100.0 * s.same_top.value,
            100.0 * s.delta_p_rms.value,
            s.ppl.value,
            s.ppl_ratio.value,
        );
    }
    table.push_str("</tbody></table>");
    table
}

/// Formats the bits per value of K and V, one figure when they are equal.
fn bits(kv: &KvConfig) -> String {
    if kv.bpv_k == kv.bpv_v {
        format!("{:.3}", kv.bpv_k)
    } else {
        format!("{:.3} / {:.3}", kv.bpv_k, kv.bpv_v)
    }
}

fn plan_cards(out: &mut String, report: &PlanReport) {
    let caption = "Bits per value of each head's keys and values (down) in each layer (across), scales and centres included.";
    let map = format!("<div class=\"heats scroll\">{}</div>", plan::heat_map(report));
    card(out, true, "Where the plan spends bits", caption, &map);
    let caption = "Dotted: what bits would cost if the costs of layers, each measured alone, added up. The dot is the plan, measured whole.";
    card(out, false, "Plans to choose from", caption, &plan::frontier(report));
}

fn distortion_card(out: &mut String, report: &DistortionReport) {
    let caption = "Error of unit vectors, with each layer's keys and values and other distributions as faint dots. Dashed: no code can lie below; a rotated Lloyd-Max code with a 16-bit norm for 128 values not above.";
    card(out, false, "Distortion against bits", caption, &charts::distortion(&report.rows));
}

fn niah_card(out: &mut String, report: &NiahReport) {
    let mut maps = "<div class=\"heats\">".to_owned();
    let mut types: Vec<(&str, &str)> = Vec::new();
    for cell in &report.cells {
        if !types.contains(&(&cell.type_k, &cell.type_v)) {
            types.push((&cell.type_k, &cell.type_v));
        }
    }
    for (k, v) in types {
        let cells: Vec<&NiahCell> =
            report.cells.iter().filter(|cell| cell.type_k == k && cell.type_v == v).collect();
        let name = if k == v { k.to_owned() } else { format!("{k}/{v}") };
        let _ = write!(maps, "<div><h3>{}</h3>{}</div>", escape(&name), heat_map(&cells));
    }
    maps.push_str("</div>");
    let caption = format!(
        "Answers right to the last token, by prompt length (across) and depth of the needle (down); form {}, {} per haystack.",
        report.form,
        if report.needles == 1 { "one needle".to_owned() } else { format!("{} needles", report.needles) }
    );
    card(out, true, "Needle in a haystack", &caption, &maps);
}

fn heat_map(cells: &[&NiahCell]) -> String {
    let mut lengths: Vec<usize> = cells.iter().map(|cell| cell.n_ctx).collect();
    lengths.sort_unstable();
    lengths.dedup();
    let mut depths: Vec<f64> = cells.iter().map(|cell| cell.depth).collect();
    depths.sort_by(f64::total_cmp);
    depths.dedup();
    let mut table = "<table><tr><th></th>".to_owned();
    for n in &lengths {
        let _ = write!(table, "<th>{n}</th>");
    }
    table.push_str("</tr>");
    for depth in depths {
        let _ = write!(table, "<tr><th>{:.0} %</th>", 100.0 * depth);
        for &n_ctx in &lengths {
            let found = cells.iter().find(|cell| cell.n_ctx == n_ctx && cell.depth == depth);
            let _ = match found {
                Some(cell) => write!(
                    table,
                    "<td class=\"cell\" style=\"background:rgb(var(--heat) / {:.2})\" title=\"tokens right: {:.0} %\">{:.0} %</td>",
                    0.08 + 0.62 * cell.exact,
                    100.0 * cell.token_accuracy,
                    100.0 * cell.exact
                ),
                None => write!(table, "<td class=\"cell\"></td>"),
            };
        }
        table.push_str("</tr>");
    }
    table.push_str("</table>");
    table
}

fn about_card(out: &mut String, abouts: &[&About]) {
    let mut list = "<dl class=\"about\">".to_owned();
    for name in ["command", "text", "model", "device"] {
        let field = |about: &&About| match name {
            "command" => about.command.clone(),
            "text" => about.text.clone(),
            "model" => about.model.clone(),
            _ => about.device.clone(),
        };
        let mut values: Vec<String> = abouts.iter().map(field).filter(|value| !value.is_empty()).collect();
        values.dedup();
        for value in values {
            let _ = write!(list, "<dt>{name}</dt><dd>{}</dd>", escape(&value));
        }
    }
    list.push_str("</dl>");
    card(out, true, "How it was measured", "", &list);
}
