//! Compiling and caching, and the writer of the archive.

use std::collections::BTreeMap;

use super::*;
use crate::Gpu;
use crate::builds::builds_for_targets;
use crate::context::on_all_cores;
use crate::emulator::{Emulator, or_skip};

const HEADER: Header = Header { name: "two.cuh", text: "#define TWO 2\n" };
const SOURCE: Source = Source {
    name: "test.cu",
    text: "#include \"constants.cuh\"\n#include \"two.cuh\"\n\
           extern \"C\" __global__ void f(int* p) { *p = TWO * N + THREE; }\n",
    headers: &[HEADER],
    constants: || Constants::default().whole("THREE", 3),
    options: &[],
};

/// Returns a compiler for compute capability `arch / 10` that caches in `folder`, or [`or_skip`].
fn compiler(arch: u32, folder: &Path) -> Option<Compiler> {
    or_skip(Nvrtc::find().ok_or_else(|| CudaError::NoNvrtc { kernel: "test.cu".to_owned() }))?;
    Some(Compiler::with_cache(Emulator::new(arch).properties(), Some(folder.to_owned())))
}

/// Returns a folder of this test process.
fn folder(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("kvant-cuda-{name}-{}", std::process::id()))
}

fn files(folder: &Path) -> Vec<PathBuf> {
    fs::read_dir(folder)
        .map_or_else(|_| Vec::new(), |entries| entries.map(|entry| entry.unwrap().path()).collect())
}

#[test]
fn sources_compile_once_per_macro_set_and_target() {
    let folder = folder("once");
    let Some(compiler) = compiler(80, &folder) else { return };
    let first = compiler.ptx(&SOURCE, &[("N", 3)]).unwrap();
    assert!(first.contains(".target sm_80") && first.contains(".entry f("), "{first}");
    assert_eq!(files(&folder).len(), 2, "the PTX and its source");
    let cached = files(&folder).into_iter().find(|path| path.extension().unwrap() == "ptx").unwrap();
    fs::write(&cached, format!("// kept\n{first}")).unwrap();
    assert!(compiler.ptx(&SOURCE, &[("N", 3)]).unwrap().starts_with("// kept"));
    fs::write(&cached, &first[..first.len() / 2]).unwrap();
    assert_eq!(compiler.ptx(&SOURCE, &[("N", 3)]).unwrap(), first, "half a file does not count");
    assert_ne!(compiler.ptx(&SOURCE, &[("N", 5)]).unwrap(), first);
    let newer = Compiler { target: 90, ..compiler.clone() };
    assert_ne!(newer.ptx(&SOURCE, &[("N", 3)]).unwrap(), first);
    let other = Source { constants: || Constants::default().whole("THREE", 4), ..SOURCE };
    assert_ne!(compiler.ptx(&other, &[("N", 3)]).unwrap(), first, "its constants belong to a source");
    assert_eq!(files(&folder).len(), 8);
    fs::remove_dir_all(folder).unwrap();
}

#[test]
fn a_cached_kernel_needs_no_compiler_but_a_driver() {
    let folder = folder("cached");
    let compiler = Compiler::with_cache(Emulator::new(80).properties(), Some(folder.clone()));
    let unit = Unit::new(&SOURCE, &[("N", 3)], 80);
    for version in ["12.4", "13.0"] {
        let ptx = format!("// {version}\n.version 8.0\n}}\n");
        unit.write(&folder, version.parse().unwrap(), &ptx).unwrap();
    }
    assert!(compiler.ptx(&SOURCE, &[("N", 3)]).unwrap().starts_with("// 13.0"));
    let older = Compiler { driver: "12.8".parse().unwrap(), ..compiler };
    assert!(older.ptx(&SOURCE, &[("N", 3)]).unwrap().starts_with("// 12.4"));
    fs::remove_dir_all(folder).unwrap();
}

#[test]
fn a_driver_older_than_nvrtc_is_named() {
    let folder = folder("older");
    let Some(compiler) = compiler(80, &folder) else { return };
    let older = Compiler { driver: "11.8".parse().unwrap(), ..compiler };
    let error = older.ptx(&SOURCE, &[("N", 3)]).unwrap_err();
    assert!(matches!(error, CudaError::OldDriver { .. }), "{error}");
}

#[test]
fn later_cards_take_the_newest_target() {
    let target = |arch| {
        let properties = GpuProperties { arch, ..Emulator::new(80).properties().clone() };
        Compiler::with_cache(&properties, None).target
    };
    assert_eq!([80, 86, 89, 90, 100, 120].map(target), [80, 80, 80, 90, 90, 90]);
}

#[test]
fn compile_errors_contain_the_compiler_log() {
    let folder = folder("errors");
    let Some(compiler) = compiler(90, &folder) else { return };
    let error = compiler.ptx(&SOURCE, &[("M", 1)]).unwrap_err();
    let CudaError::Compile { kernel, log } = &error else { panic!("{error}") };
    assert!(kernel == "test.cu M=1" && log.contains("\"N\" is undefined"), "{error}");
    assert!(files(&folder).is_empty());
}

/// Compiles every listed kernel that is not cached, on all cores.
fn compile_all(compiler: &Compiler) {
    let jobs: Vec<_> = builds_for_targets().collect();
    let compile = |(build, target): &(Build, u32)| {
        compiler.compiled(&Unit::new(build.source, &build.defines, *target)).map(drop)
    };
    on_all_cores(&jobs, compile).unwrap();
}

#[test]
fn every_kernel_compiles_and_waits_for_those_before_it() {
    let folder = std::env::temp_dir().join("kvant-cuda-tests");
    let Some(compiler) = compiler(80, &folder) else { return };
    compile_all(&compiler);
    for (build, target) in builds_for_targets().filter(|(_, target)| *target >= 90) {
        let unit = Unit::new(build.source, &build.defines, target);
        for entry in compiler.compiled(&unit).unwrap().split(".entry ").skip(1) {
            // Without the instruction a kernel begins only after the end of the others.
            assert!(entry.contains("griddepcontrol.wait"), "{unit} for sm_{target}: {entry}");
        }
    }
}

/// Environment variable with the folder that [`the_archive_is_written`] writes to.
const ARCHIVE: &str = "KVANT_PTX_ARCHIVE";

/// Writes, for each source, the PTX of its variants (`SOURCE.ptx`) and their lines of the index
/// (`SOURCE.index`). `tools/ptx_archive.py` runs this and compresses the result.
#[test]
#[ignore = "it writes files for tools/ptx_archive.py"]
fn the_archive_is_written() {
    let folder = PathBuf::from(std::env::var_os(ARCHIVE).expect(ARCHIVE));
    let compiler = compiler(80, &folder.join("cache")).expect("NVRTC");
    compile_all(&compiler);
    let mut of_source = BTreeMap::<_, [String; 2]>::new();
    let mut builds: Vec<_> = builds_for_targets().collect();
    // The texts of one variant for both targets are almost the same, and smallest side by side.
    builds.sort_by(|(a, _), (b, _)| a.defines.cmp(&b.defines));
    for (build, target) in &builds {
        let unit = Unit::new(build.source, &build.defines, *target);
        let text = compiler.compiled(&unit).expect("a cached kernel");
        let [ptx, index] = of_source.entry(build.source.name).or_default();
        index.push_str(&format!("{} {} sm_{target} {unit}\n", unit.key, text.len()));
        ptx.push_str(&text);
    }
    for (source, [ptx, index]) in of_source {
        fs::write(folder.join(format!("{source}.ptx")), ptx).unwrap();
        fs::write(folder.join(format!("{source}.index")), index).unwrap();
    }
}
