//! Compiles CUDA C++ to PTX, once per source, options, architecture and compiler version.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use xxhash_rust::xxh3::Xxh3;

use crate::constants::Constants;
use crate::nvrtc::Nvrtc;
use crate::{CudaError, CudaVersion};

/// A file that sources can include, as `#include "name"`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Header {
    /// The name in the `#include`.
    pub name: &'static str,
    /// Its text.
    pub text: &'static str,
}

/// A source file with kernels.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Source {
    /// Unique name, such as `norm.cu`.
    pub name: &'static str,
    /// Its text.
    pub text: &'static str,
    /// Headers that it may include.
    pub headers: &'static [Header],
    /// The constants that it includes as [`Constants::HEADER`].
    pub constants: fn() -> Constants,
    /// Compiler options. The compiler adds the architecture, unless they name one, the language
    /// version and the macros.
    pub options: &'static [&'static str],
}

impl Source {
    /// Returns whether it has kernels for compute capability `arch / 10`: its options may name a
    /// single one.
    pub fn is_for(&self, arch: u32) -> bool {
        let mut named = self.options.iter().filter_map(|option| option.strip_prefix(ARCHITECTURE));
        named.all(|name| name.trim_start_matches("=compute_").trim_end_matches('a') == arch.to_string())
    }
}

/// A macro and its value: how one source is compiled for several types.
pub(crate) type Define = (&'static str, u32);

/// A source with the macros of one variant: the unit of compilation.
#[derive(Debug, Clone)]
pub(crate) struct Build {
    pub source: &'static Source,
    pub defines: Vec<Define>,
}

/// Compiles sources, and caches the PTX in a folder.
#[derive(Debug, Clone)]
pub(crate) struct Compiler {
    nvrtc: Nvrtc,
    version: CudaVersion,
    /// Compute capabilities that it compiles for, times ten.
    architectures: Vec<u32>,
    folder: Option<PathBuf>,
}

impl Compiler {
    /// Finds the compiler; its cache is in the user's cache folder, where there is one.
    ///
    /// # Errors
    /// [`CudaError::NoNvrtc`].
    pub fn find() -> Result<Self, CudaError> {
        Self::with_cache(kvant_files::cache_folder().map(|folder| folder.join("cuda")))
    }

    /// Finds the compiler; its cache is `folder`, or off.
    pub fn with_cache(folder: Option<PathBuf>) -> Result<Self, CudaError> {
        let nvrtc = Nvrtc::find()?;
        Ok(Self { nvrtc, version: nvrtc.version()?, architectures: nvrtc.architectures()?, folder })
    }

    /// Returns the version of NVRTC.
    pub fn version(&self) -> CudaVersion {
        self.version
    }

    /// Returns the PTX of `source` for compute capability `arch / 10`, or for the newest before it
    /// that the compiler supports: the driver accepts PTX for older ones too.
    ///
    /// # Errors
    /// [`CudaError::Compile`]. An unreadable or unwritable cache is not an error: the source is
    /// compiled then.
    pub fn ptx(&self, source: &Source, defines: &[Define], arch: u32) -> Result<String, CudaError> {
        let known = self.architectures.iter().copied().filter(|&known| known <= arch).max();
        let options = options(source, defines, known.unwrap_or(arch));
        let constants = (source.constants)();
        let key = self.key(source, constants.text(), &options);
        let cached = self.folder.as_deref().map(|folder| CachedPtx::new(folder, source, &key));
        if let Some(ptx) = cached.as_ref().and_then(CachedPtx::read) {
            return Ok(ptx);
        }
        let headers = source.headers.iter().map(|header| (header.name, header.text));
        let headers: Vec<_> = headers.chain([(Constants::HEADER, constants.text())]).collect();
        let ptx = self.nvrtc.compile(source.name, source.text, &headers, &options)?;
        if let Some(cached) = cached {
            // Without the file, the next start merely compiles again.
            let _ = cached.write(source, &options, constants.text(), &ptx);
        }
        Ok(ptx)
    }

    /// Hashes everything the PTX depends on.
    fn key(&self, source: &Source, constants: &str, options: &[String]) -> String {
        let mut hash = Xxh3::new();
        let mut part = |text: &str| {
            hash.update(&(text.len() as u64).to_le_bytes());
            hash.update(text.as_bytes());
        };
        part(&self.version.to_string());
        part(source.text);
        part(constants);
        source.headers.iter().flat_map(|header| [header.name, header.text]).for_each(&mut part);
        options.iter().for_each(|option| part(option));
        format!("{:032x}", hash.digest128())
    }
}

/// The option that names the architecture.
const ARCHITECTURE: &str = "--gpu-architecture";

fn options(source: &Source, defines: &[Define], arch: u32) -> Vec<String> {
    let is_named = source.options.iter().any(|option| option.starts_with(ARCHITECTURE));
    let architecture = (!is_named).then(|| format!("{ARCHITECTURE}=compute_{arch}"));
    let fixed = architecture.into_iter().chain(["--std=c++17".to_owned()]);
    let defines = defines.iter().map(|(name, value)| format!("--define-macro={name}={value}"));
    fixed.chain(source.options.iter().map(|&option| option.to_owned())).chain(defines).collect()
}

/// The files of one compilation: the PTX, and beside it its options, constants and source, for
/// debugging.
struct CachedPtx {
    ptx: PathBuf,
    source: PathBuf,
}

impl CachedPtx {
    fn new(folder: &Path, source: &Source, key: &str) -> Self {
        let stem = format!("{}-{key}", source.name.trim_end_matches(".cu").replace('/', "-"));
        Self { ptx: folder.join(format!("{stem}.ptx")), source: folder.join(format!("{stem}.cu")) }
    }

    /// Returns the PTX if the file exists and is complete: it starts with the compiler's comment
    /// and ends with a closing brace.
    fn read(&self) -> Option<String> {
        let ptx = String::from_utf8(kvant_files::read(&self.ptx).ok()?).ok()?;
        (ptx.contains(".version") && ptx.trim_end().ends_with('}')).then_some(ptx)
    }

    fn write(&self, source: &Source, options: &[String], constants: &str, ptx: &str) -> io::Result<()> {
        self.ptx.parent().map_or(Ok(()), fs::create_dir_all)?;
        let text = format!("// {} {}\n{constants}\n{}", source.name, options.join(" "), source.text);
        kvant_files::write(&self.source, text.as_bytes())?;
        kvant_files::write(&self.ptx, ptx.as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::thread;

    use super::*;
    use crate::emulator::or_skip;

    const HEADER: Header = Header { name: "two.cuh", text: "#define TWO 2\n" };
    const SOURCE: Source = Source {
        name: "test.cu",
        text: "#include \"constants.cuh\"\n#include \"two.cuh\"\n\
               extern \"C\" __global__ void f(int* p) { *p = TWO * N + THREE; }\n",
        headers: &[HEADER],
        constants: || Constants::default().whole("THREE", 3),
        options: &[],
    };

    /// Returns a compiler with an empty cache folder of its own, or [`or_skip`].
    fn compiler(name: &str) -> Option<Compiler> {
        let folder = std::env::temp_dir().join(format!("kvant-cuda-{name}-{}", std::process::id()));
        or_skip(Compiler::with_cache(Some(folder)))
    }

    fn files(compiler: &Compiler) -> usize {
        fs::read_dir(compiler.folder.as_ref().unwrap()).map_or(0, Iterator::count)
    }

    #[test]
    fn sources_compile_once_per_macro_set_and_architecture() {
        let Some(compiler) = compiler("once") else { return };
        let first = compiler.ptx(&SOURCE, &[("N", 3)], 80).unwrap();
        assert!(first.contains(".target sm_80") && first.contains(".entry f("), "{first}");
        assert_eq!(files(&compiler), 2, "the PTX and its source");
        let cached =
            fs::read_dir(compiler.folder.as_ref().unwrap()).unwrap().map(|entry| entry.unwrap().path());
        let cached = cached.into_iter().find(|path| path.extension().unwrap() == "ptx").unwrap();
        fs::write(&cached, format!("// kept\n{first}")).unwrap();
        assert!(compiler.ptx(&SOURCE, &[("N", 3)], 80).unwrap().starts_with("// kept"));
        fs::write(&cached, &first[..first.len() / 2]).unwrap();
        assert_eq!(compiler.ptx(&SOURCE, &[("N", 3)], 80).unwrap(), first, "half a file does not count");
        assert_ne!(compiler.ptx(&SOURCE, &[("N", 5)], 80).unwrap(), first);
        assert_ne!(compiler.ptx(&SOURCE, &[("N", 3)], 90).unwrap(), first);
        let other = Source { constants: || Constants::default().whole("THREE", 4), ..SOURCE };
        assert_ne!(compiler.ptx(&other, &[("N", 3)], 80).unwrap(), first, "its constants belong to a source");
        assert_eq!(files(&compiler), 8);
        assert!(compiler.ptx(&SOURCE, &[], 9999).is_err(), "N is missing, the architecture is not");
        assert!(compiler.ptx(&SOURCE, &[("N", 3)], 9999).is_ok());
        fs::remove_dir_all(compiler.folder.unwrap()).unwrap();
    }

    #[test]
    fn compile_errors_contain_the_compiler_log() {
        let Some(compiler) = compiler("errors") else { return };
        let error = compiler.ptx(&SOURCE, &[], 90).unwrap_err();
        let CudaError::Compile { kernel, log } = &error else { panic!("{error}") };
        assert!(kernel == "test.cu" && log.contains("\"N\" is undefined"), "{error}");
        assert_eq!(files(&compiler), 0);
    }

    #[test]
    fn every_kernel_compiles_and_waits_for_the_kernels_before_it() {
        // The same compiler reuses what it has compiled before.
        let Some(mut compiler) = compiler("every") else { return };
        compiler.folder = Some(std::env::temp_dir().join("kvant-cuda-tests"));
        let of = |arch| crate::builds::builds(arch).into_iter().map(move |build| (build, arch));
        let jobs: Vec<_> = [80, 90].into_iter().flat_map(of).collect();
        let next = AtomicUsize::new(0);
        let work = || {
            while let Some((build, arch)) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
                let of = format!("{} {:?} for sm_{arch}", build.source.name, build.defines);
                let ptx = compiler.ptx(build.source, &build.defines, *arch);
                let ptx = ptx.unwrap_or_else(|error| panic!("{of}: {error}"));
                for entry in ptx.split(".entry ").skip(1) {
                    // Without the instruction a kernel begins only after the end of the others.
                    assert!(*arch < 90 || entry.contains("griddepcontrol.wait"), "{of}: {entry}");
                }
            }
        };
        thread::scope(|scope| {
            for _ in 0..thread::available_parallelism().map_or(1, usize::from) {
                scope.spawn(work);
            }
        });
    }
}
