//! Lists every kernel source in every variant, for the doctor and the tests: an op that adds a
//! kernel adds it here.

use crate::module::Build;
use crate::{
    append, attend, bidirectional, columns, experts, gate, matmul, norm, pointwise, recurrent, rope,
    soft_cap, streams, top_k,
};

/// Returns the builds for compute capability `arch / 10`.
pub(crate) fn builds(arch: u32) -> Vec<Build> {
    let plain = |source| Build { source, defines: Vec::new() };
    let sources = [
        &append::SOURCE,
        &columns::SOURCE,
        &experts::SOURCE,
        &gate::SOURCE,
        &norm::SOURCE,
        &pointwise::SOURCE,
        &rope::SOURCE,
        &soft_cap::SOURCE,
        &streams::SOURCE,
        &top_k::SOURCE,
    ];
    sources
        .into_iter()
        .map(plain)
        .chain(attend::builds())
        .chain(bidirectional::builds())
        .chain(matmul::builds())
        .chain(recurrent::builds())
        .filter(|build| build.source.is_for(arch))
        .collect()
}
