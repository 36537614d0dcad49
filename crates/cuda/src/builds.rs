//! Every source in every variant, for the doctor and the tests: an op that adds a kernel adds it here.

use crate::module::Build;
use crate::norm;

/// What there is to compile.
pub(crate) fn builds() -> Vec<Build> {
    vec![Build { source: &norm::SOURCE, defines: Vec::new() }]
}
