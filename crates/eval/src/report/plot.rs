//! Axes and marks, as SVG text. Colours and fonts come from the page's style sheet: a mark of
//! series n has the class `s{n}`.

use std::fmt::Write;

/// Mapping of values to positions on an axis.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Scale {
    /// Equal steps for equal differences.
    Linear {
        /// Value at the start.
        min: f64,
        /// Value at the end.
        max: f64,
    },
    /// Equal steps for equal ratios.
    Log {
        /// Value at the start, positive.
        min: f64,
        /// Value at the end.
        max: f64,
    },
}

impl Scale {
    /// Returns a logarithmic scale of whole decades around `values`, at least one; ignores values
    /// that are not positive.
    pub fn decades(values: impl Iterator<Item = f64>) -> Self {
        let (mut min, mut max) = (f64::INFINITY, f64::NEG_INFINITY);
        for value in values.filter(|&v| v > 0.0 && v.is_finite()) {
            (min, max) = (min.min(value.log10().floor()), max.max(value.log10().ceil()));
        }
        if min > max {
            (min, max) = (-3.0, 0.0);
        }
        Self::Log { min: 10f64.powf(min), max: 10f64.powf(max.max(min + 1.0)) }
    }

    /// Returns a linear scale from 0 to a round number at or above `max`.
    pub fn up_to(max: f64) -> Self {
        let step = round_step(max);
        Self::Linear { min: 0.0, max: (max / step).ceil().max(1.0) * step }
    }

    /// Returns the position of a value: 0 at the start, 1 at the end. Clamps values beyond the
    /// ends.
    fn place(self, value: f64) -> f64 {
        let place = match self {
            Self::Linear { min, max } => (value - min) / (max - min),
            Self::Log { min, max } => (value.max(min) / min).ln() / (max / min).ln(),
        };
        place.clamp(0.0, 1.0)
    }

    /// Returns the tick values with their labels.
    fn ticks(self) -> Vec<(f64, String)> {
        match self {
            Self::Linear { min, max } => {
                let step = round_step(max - min);
                let first = (min / step).ceil() as i64;
                let last = (max / step + 1e-9).floor() as i64;
                (first..=last).map(|i| i as f64 * step).map(|v| (v, plain(v))).collect()
            }
            Self::Log { min, max } => {
                let (first, last) = (min.log10().ceil() as i32, (max.log10() + 1e-9).floor() as i32);
                (first..=last).map(|e| (10f64.powi(e), power_of_ten(e))).collect()
            }
        }
    }
}

/// Returns 1, 2 or 5 times a power of ten, such that `span` has four to ten steps.
fn round_step(span: f64) -> f64 {
    let span = if span > 0.0 && span.is_finite() { span } else { 1.0 };
    let power = 10f64.powf((span / 5.0).log10().floor());
    let factor = [1.0, 2.0, 5.0].into_iter().find(|f| span / (f * power) <= 8.0).unwrap_or(10.0);
    factor * power
}

fn plain(value: f64) -> String {
    let text = format!("{value:.4}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

fn power_of_ten(exponent: i32) -> String {
    match exponent {
        -2..=3 => plain(10f64.powi(exponent)),
        _ => format!("1e{exponent}"),
    }
}

/// Escapes text for HTML content and attributes.
pub(super) fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// An axis of a plot.
pub(super) struct Axis<'a> {
    pub scale: Scale,
    pub label: &'a str,
}

/// A plot under construction: a frame with axes, then marks, oldest at the back.
pub(super) struct Plot {
    svg: String,
    x: Scale,
    y: Scale,
    size: (f64, f64),
    right: f64,
}

const LEFT: f64 = 64.0;
const TOP: f64 = 14.0;
const BOTTOM: f64 = 46.0;

impl Plot {
    /// Creates a frame of `size` pixels with gridlines and labelled axes, `right` of them reserved
    /// for labels.
    pub fn new(size: (f64, f64), right: f64, x: Axis<'_>, y: Axis<'_>) -> Self {
        let mut plot = Self { svg: String::new(), x: x.scale, y: y.scale, size, right };
        let (width, height) = size;
        plot.push(&format!("<svg viewBox=\"0 0 {width} {height}\" role=\"img\">"));
        let (left, base) = (LEFT, height - BOTTOM);
        for (value, label) in plot.y.ticks() {
            let at = plot.y_at(value);
            plot.line("grid", (left, at), (width - right, at));
            plot.text("tick", (left - 8.0, at + 4.0), "end", &label);
        }
        for (value, label) in plot.x.ticks() {
            let at = plot.x_at(value);
            plot.line("grid", (at, TOP), (at, base));
            plot.text("tick", (at, base + 18.0), "middle", &label);
        }
        plot.text("axis", ((left + width - right) / 2.0, height - 6.0), "middle", x.label);
        let middle = (TOP + base) / 2.0;
        plot.push(&format!(
            "<text class=\"axis\" text-anchor=\"middle\" transform=\"translate(14 {middle:.1}) rotate(-90)\">{}</text>",
            escape(y.label)
        ));
        plot
    }

    fn push(&mut self, text: &str) {
        self.svg.push_str(text);
        self.svg.push('\n');
    }

    pub fn x_at(&self, value: f64) -> f64 {
        LEFT + self.x.place(value) * (self.size.0 - LEFT - self.right)
    }

    pub fn y_at(&self, value: f64) -> f64 {
        let base = self.size.1 - BOTTOM;
        base - self.y.place(value) * (base - TOP)
    }

    fn line(&mut self, class: &str, from: (f64, f64), to: (f64, f64)) {
        let ((x1, y1), (x2, y2)) = (from, to);
        self.push(&format!(
            "<line class=\"{class}\" x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\"/>"
        ));
    }

    /// Adds text at pixels.
    pub fn text(&mut self, class: &str, at: (f64, f64), anchor: &str, text: &str) {
        let text = escape(text);
        self.push(&format!(
            "<text class=\"{class}\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"{anchor}\">{text}</text>",
            at.0, at.1
        ));
    }

    /// Adds a line through values.
    pub fn curve(&mut self, class: &str, points: &[(f64, f64)]) {
        let path = self.path(points);
        self.push(&format!("<polyline class=\"line {class}\" points=\"{path}\"/>"));
    }

    /// Adds the area between two curves of values.
    pub fn band(&mut self, class: &str, lower: &[(f64, f64)], upper: &[(f64, f64)]) {
        let mut around = lower.to_vec();
        around.extend(upper.iter().rev());
        let path = self.path(&around);
        self.push(&format!("<polygon class=\"{class}\" points=\"{path}\"/>"));
    }

    fn path(&self, points: &[(f64, f64)]) -> String {
        points.iter().fold(String::new(), |mut path, &(x, y)| {
            let _ = write!(path, "{:.1},{:.1} ", self.x_at(x), self.y_at(y));
            path
        })
    }

    /// Adds a dot at values, with a tooltip.
    pub fn dot(&mut self, class: &str, (x, y): (f64, f64), radius: f64, note: &str) {
        let (x, y) = (self.x_at(x), self.y_at(y));
        let note = escape(note);
        self.push(&format!(
            "<circle class=\"dot {class}\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"{radius}\"><title>{note}</title></circle>"
        ));
    }

    /// Adds a bar from the bottom to value `y`, at pixels `x .. x + width`.
    pub fn bar(&mut self, class: &str, (x, width): (f64, f64), y: f64, note: &str) {
        let (top, base) = (self.y_at(y), self.size.1 - BOTTOM);
        let note = escape(note);
        self.push(&format!(
            "<rect class=\"bar {class}\" x=\"{x:.1}\" y=\"{top:.1}\" width=\"{width:.1}\" height=\"{:.1}\" \
             rx=\"2\"><title>{note}</title></rect>",
            (base - top).max(1.0)
        ));
    }

    /// Adds labels beside dots, `(text, class, values)`: at the first of four corners where they
    /// cover neither the frame, nor a dot, nor another label.
    pub fn dot_labels(&mut self, labels: &[(String, String, (f64, f64))]) {
        const HEIGHT: f64 = 14.0;
        const CHAR: f64 = 7.6;
        const NEAR: f64 = 9.0;
        let dots: Vec<(f64, f64)> =
            labels.iter().map(|(_, _, (x, y))| (self.x_at(*x), self.y_at(*y))).collect();
        // Boxes as (left, top, right, bottom).
        let mut taken: Vec<[f64; 4]> =
            dots.iter().map(|(x, y)| [x - 6.0, y - 6.0, x + 6.0, y + 6.0]).collect();
        let apart = |a: &[f64; 4], b: &[f64; 4]| a[2] <= b[0] || b[2] <= a[0] || a[3] <= b[1] || b[3] <= a[1];
        for ((text, class, _), &(x, y)) in labels.iter().zip(&dots) {
            let width = CHAR * text.chars().count() as f64;
            let corner = |right: bool, above: bool| {
                let left = if right { x + NEAR } else { x - NEAR - width };
                let top = if above { y - 4.0 - HEIGHT } else { y + 3.0 };
                [left, top, left + width, top + HEIGHT]
            };
            let corners = [(true, true), (true, false), (false, false), (false, true)];
            let inside = |b: &[f64; 4]| b[0] >= LEFT && b[2] <= self.size.0 && b[1] >= 0.0;
            let free = corners
                .map(|(right, above)| corner(right, above))
                .into_iter()
                .find(|b| inside(b) && taken.iter().all(|other| apart(b, other)))
                .unwrap_or(corner(true, true));
            taken.push(free);
            self.text(&format!("label {class}"), (free[0], free[3] - 3.0), "start", text);
        }
    }

    /// Adds labels at the right end of curves, `(text, class, y value)`, moved apart where they
    /// would overlap.
    pub fn end_labels(&mut self, labels: &[(String, String, f64)]) {
        const GAP: f64 = 15.0;
        let mut placed: Vec<(f64, &(String, String, f64))> =
            labels.iter().map(|label| (self.y_at(label.2), label)).collect();
        placed.sort_by(|a, b| a.0.total_cmp(&b.0));
        let base = self.size.1 - BOTTOM;
        for i in 1..placed.len() {
            placed[i].0 = placed[i].0.max(placed[i - 1].0 + GAP);
        }
        let mut limit = base;
        for (at, _) in placed.iter_mut().rev() {
            *at = at.min(limit);
            limit = *at - GAP;
        }
        let x = self.size.0 - self.right + 8.0;
        for (at, (text, class, _)) in placed {
            self.text(&format!("label {class}"), (x, at + 4.0), "start", text);
        }
    }

    pub fn finish(mut self) -> String {
        self.push("</svg>");
        self.svg
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_numbers_within_the_scale() {
        let labels = |scale: Scale| scale.ticks().into_iter().map(|(_, label)| label).collect::<Vec<_>>();
        assert_eq!(labels(Scale::Linear { min: 0.0, max: 5.0 }), ["0", "1", "2", "3", "4", "5"]);
        assert_eq!(labels(Scale::Linear { min: 256.0, max: 512.0 }), ["300", "350", "400", "450", "500"]);
        assert_eq!(labels(Scale::Log { min: 1e-5, max: 0.1 }), ["1e-5", "1e-4", "1e-3", "0.01", "0.1"]);
        assert_eq!(Scale::decades([0.002, 0.0, 0.3].into_iter()), Scale::Log { min: 1e-3, max: 1.0 });
        assert_eq!(Scale::decades(std::iter::empty()), Scale::Log { min: 1e-3, max: 1.0 });
        assert_eq!(Scale::up_to(0.0), Scale::Linear { min: 0.0, max: 0.2 });
    }

    #[test]
    fn positions_are_clamped_to_the_scale() {
        let log = Scale::Log { min: 0.01, max: 100.0 };
        assert_eq!(log.place(0.0), 0.0);
        assert!((log.place(1.0) - 0.5).abs() < 1e-12);
        assert_eq!(log.place(1e9), 1.0);
    }

    #[test]
    fn text_cannot_break_out_of_the_page() {
        assert_eq!(escape("<b a=\"1\">&"), "&lt;b a=&quot;1&quot;&gt;&amp;");
    }
}
