//! Lists every kernel source in every variant, for the archive of the binary, the doctor and the
//! tests: an op that adds a kernel adds it here.

use crate::module::Build;
#[cfg(test)]
use crate::module::TARGETS;
use crate::{
    append, attend, bidirectional, columns, embed, experts, gate, matmul, norm, pointwise, recurrent, rope,
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
        .chain(embed::builds())
        .chain(matmul::builds())
        .chain(recurrent::builds())
        .filter(|build| build.source.is_for(arch))
        .collect()
}

/// Returns the builds with each target that they are compiled for.
#[cfg(test)]
pub(crate) fn builds_for_targets() -> impl Iterator<Item = (Build, u32)> {
    TARGETS.into_iter().flat_map(|target| builds(target).into_iter().map(move |build| (build, target)))
}
