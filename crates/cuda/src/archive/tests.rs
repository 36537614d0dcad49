//! That the archive is whole and that of the present sources.

use std::collections::HashSet;

use super::*;
use crate::builds::builds_for_targets;
use crate::driver;
use crate::module::Unit;

/// The command that writes the archive.
const COMMAND: &str = "python3 tools/ptx_archive.py";

#[test]
fn the_archive_is_that_of_the_sources() {
    let listed: HashSet<&str> = Archive::shipped().texts.keys().copied().collect();
    let (mut found, mut missing) = (HashSet::new(), Vec::new());
    for (build, target) in builds_for_targets() {
        let unit = Unit::new(build.source, &build.defines, target);
        match listed.get(&*unit.key) {
            Some(key) => _ = found.insert(*key),
            None => missing.push(format!("{unit} for sm_{target}")),
        }
    }
    let unused = listed.difference(&found).count();
    let first = missing.first().map_or("", String::as_str);
    assert!(
        missing.is_empty() && unused == 0,
        "crates/cuda/assets lacks {} kernels ({first}) and has {unused} unused: run {COMMAND}",
        missing.len(),
    );
}

#[test]
fn every_text_is_whole_and_loads_on_the_oldest_driver() {
    let archive = Archive::shipped();
    assert!(archive.nvrtc <= driver::OLDEST, "{}", archive.nvrtc);
    for key in archive.texts.keys() {
        let ptx = archive.ptx(key, driver::OLDEST).expect("a text of the index");
        assert!(ptx.starts_with("//") && ptx.trim_end().ends_with('}'), "{key}");
        assert!(!ptx.contains(".extern .func"), "{key} calls what no driver has");
    }
}

#[test]
fn numbers_of_registers_and_labels_are_restored() {
    let stored = "\tadd.s32 %r7, %r-2, -4;\n@%p1 bra $L__BB0_3;\nmov.u32 %rd7, %tid.x;\n$L__BB0_-1: [%rd0+8], %r1, %f%\n";
    let text = "\tadd.s32 %r7, %r5, -4;\n@%p1 bra $L__BB0_3;\nmov.u32 %rd7, %tid.x;\n$L__BB0_2: [%rd7+8], %r6, %f%\n";
    assert_eq!(renumber(stored).as_deref(), Some(text));
    assert_eq!(renumber("%r99999999999999999999"), None);
}
