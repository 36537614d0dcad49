//! Progress bars on stderr, shown only on a terminal.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::console;

/// Returns a bar of `len` steps; hidden when stderr is no terminal or `quiet` is set.
pub fn bar(label: &'static str, len: u64, quiet: bool) -> ProgressBar {
    let hidden = quiet || !console::stderr_is_terminal();
    let target = if hidden { ProgressDrawTarget::hidden() } else { ProgressDrawTarget::stderr() };
    let style =
        ProgressStyle::with_template("{prefix} {wide_bar} {percent}% {eta} {msg}").expect("a sound template");
    let bar = ProgressBar::with_draw_target(Some(len), target).with_style(style);
    bar.set_prefix(label);
    bar
}
