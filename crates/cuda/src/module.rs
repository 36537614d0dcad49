//! Finds the PTX of a kernel source: part of this binary, cached, or compiled by NVRTC.

use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use xxhash_rust::xxh3::Xxh3;

use crate::archive::Archive;
use crate::constants::Constants;
use crate::nvrtc::Nvrtc;
use crate::{CudaError, CudaVersion, GpuProperties};

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

/// Architectures that kernels are compiled for, oldest first: compute capability times ten.
///
/// A driver compiles PTX for any later card; no source has code for one beyond the last.
pub(crate) const TARGETS: [u32; 2] = [80, 90];

/// Finds the PTX of sources for one device: in this binary, else in a cache folder, else by NVRTC.
#[derive(Debug, Clone)]
pub(crate) struct Compiler {
    /// One of [`TARGETS`].
    target: u32,
    /// The newest CUDA version whose PTX the driver loads.
    driver: CudaVersion,
    folder: Option<PathBuf>,
}

impl Compiler {
    /// Creates a compiler for `device`, which caches in the user's cache folder, where there is
    /// one.
    pub fn new(device: &GpuProperties) -> Self {
        Self::with_cache(device, kvant_files::cache_folder().map(|folder| folder.join("cuda")))
    }

    /// Creates a compiler for `device`, which caches in `folder`, or not at all.
    pub fn with_cache(device: &GpuProperties, folder: Option<PathBuf>) -> Self {
        let target = TARGETS.into_iter().rfind(|&target| target <= device.arch).unwrap_or(TARGETS[0]);
        Self { target, driver: device.driver, folder }
    }

    /// Returns the PTX of `source` for the newest target that is not beyond the device.
    ///
    /// # Errors
    /// [`CudaError::Compile`]; for a kernel that is neither part of this binary nor cached,
    /// [`CudaError::NoNvrtc`], or [`CudaError::OldDriver`] when NVRTC is newer than the driver.
    pub fn ptx(&self, source: &Source, defines: &[Define]) -> Result<String, CudaError> {
        let unit = Unit::new(source, defines, self.target);
        match Archive::shipped().ptx(&unit.key, self.driver) {
            Some(ptx) => Ok(ptx),
            None => self.compiled(&unit),
        }
    }

    /// Compiles `source` into the cache, unless this binary or the cache has it.
    ///
    /// # Errors
    /// As [`Compiler::ptx`].
    pub fn prepare(&self, source: &Source, defines: &[Define]) -> Result<(), CudaError> {
        let unit = Unit::new(source, defines, self.target);
        if Archive::shipped().has(&unit.key, self.driver) { Ok(()) } else { self.compiled(&unit).map(drop) }
    }

    /// Returns the PTX from the cache, or compiles it. An unreadable or unwritable cache is not an
    /// error: the source is compiled then.
    fn compiled(&self, unit: &Unit<'_>) -> Result<String, CudaError> {
        if let Some(ptx) = self.folder.as_deref().and_then(|folder| unit.cached(folder, self.driver)) {
            return Ok(ptx);
        }
        let nvrtc = Nvrtc::find().ok_or_else(|| CudaError::NoNvrtc { kernel: unit.to_string() })?;
        let (found, needed) = (self.driver, nvrtc.version()?);
        if found < needed {
            let why = "the version of NVRTC here (update the driver, or install an older nvidia-cuda-nvrtc)";
            return Err(CudaError::OldDriver { found, needed, why });
        }
        let ptx = unit.compile(nvrtc)?;
        if let Some(folder) = &self.folder {
            // Without the file, the next start merely compiles again.
            let _ = unit.write(folder, needed, &ptx);
        }
        Ok(ptx)
    }
}

/// A compilation: everything that the PTX depends on, except the compiler.
pub(crate) struct Unit<'a> {
    source: &'a Source,
    defines: &'a [Define],
    options: Vec<String>,
    constants: Constants,
    /// The hash of it all.
    pub key: String,
}

/// The source and its macros: `decode.cu K_TYPE=3 V_TYPE=3`.
impl fmt::Display for Unit<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.source.name)?;
        self.defines.iter().try_for_each(|(name, value)| write!(f, " {name}={value}"))
    }
}

impl<'a> Unit<'a> {
    /// Describes the compilation of `source` for `target`, one of [`TARGETS`].
    pub fn new(source: &'a Source, defines: &'a [Define], target: u32) -> Self {
        let (options, constants) = (options(source, defines, target), (source.constants)());
        let mut hash = Xxh3::new();
        let mut part = |text: &str| {
            hash.update(&(text.len() as u64).to_le_bytes());
            hash.update(text.as_bytes());
        };
        part(source.text);
        part(constants.text());
        source.headers.iter().flat_map(|header| [header.name, header.text]).for_each(&mut part);
        options.iter().for_each(|option| part(option));
        let key = format!("{:032x}", hash.digest128());
        Self { source, defines, options, constants, key }
    }

    fn compile(&self, nvrtc: Nvrtc) -> Result<String, CudaError> {
        let headers = self.source.headers.iter().map(|header| (header.name, header.text));
        let headers: Vec<_> = headers.chain([(Constants::HEADER, self.constants.text())]).collect();
        nvrtc.compile(&self.to_string(), self.source.name, self.source.text, &headers, &self.options)
    }

    /// Returns the name of its cached files, before the compiler's version.
    fn stem(&self) -> String {
        format!("{}-{}-", self.source.name.trim_end_matches(".cu").replace('/', "-"), self.key)
    }

    /// Returns its PTX from `folder`: of the newest compiler that wrote some for `driver`.
    fn cached(&self, folder: &Path, driver: CudaVersion) -> Option<String> {
        let stem = self.stem();
        let of = |file: fs::DirEntry| {
            let version =
                file.file_name().to_str()?.strip_prefix(&stem)?.strip_suffix(".ptx")?.parse().ok()?;
            Some((version, file.path()))
        };
        let files = fs::read_dir(folder).ok()?.flatten().filter_map(of);
        let (_, newest) = files.filter(|(version, _): &(CudaVersion, _)| *version <= driver).max()?;
        let ptx = String::from_utf8(kvant_files::read(&newest).ok()?).ok()?;
        // A complete file has the compiler's heading and ends with a closing brace.
        (ptx.contains(".version") && ptx.trim_end().ends_with('}')).then_some(ptx)
    }

    /// Writes its PTX, and beside it its options, constants and source, for debugging.
    fn write(&self, folder: &Path, compiler: CudaVersion, ptx: &str) -> io::Result<()> {
        let Self { source, options, constants, .. } = self;
        fs::create_dir_all(folder)?;
        let name = |extension| folder.join(format!("{}{compiler}.{extension}", self.stem()));
        let text = format!("// {} {}\n{}\n{}", source.name, options.join(" "), constants.text(), source.text);
        kvant_files::write(name("cu"), text.as_bytes())?;
        kvant_files::write(name("ptx"), ptx.as_bytes())
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

#[cfg(test)]
mod tests;
