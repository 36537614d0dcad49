//! Calls into NVRTC, NVIDIA's compiler as a library (<https://docs.nvidia.com/cuda/nvrtc/>).

use std::ffi::{CStr, CString, c_char, c_int};
use std::ptr;

use cudarc::nvrtc::result::{self, NvrtcError};
use cudarc::nvrtc::sys;

use crate::{CudaError, CudaVersion};

/// Proof that NVRTC is loaded.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Nvrtc(());

impl Nvrtc {
    /// Loads the library; `None` where there is none.
    pub fn find() -> Option<Self> {
        // SAFETY: opening a library runs its initializers; NVRTC's have no precondition.
        unsafe { sys::is_culib_present() }.then_some(Self(()))
    }

    /// Returns the library's version.
    pub fn version(self) -> Result<CudaVersion, CudaError> {
        let (mut major, mut minor) = (0, 0);
        // SAFETY: `self` proves that the library is loaded; both pointers are to live integers.
        unsafe { sys::nvrtcVersion(&mut major, &mut minor) }
            .result()
            .map_err(|e| failed("nvrtcVersion", e))?;
        Ok(CudaVersion { major: major.unsigned_abs(), minor: minor.unsigned_abs() })
    }

    /// Compiles CUDA C++ to PTX; headers are name and text. Errors name `kernel`.
    ///
    /// # Errors
    /// [`CudaError::Compile`] with the compiler's log.
    pub fn compile(
        self,
        kernel: &str,
        name: &str,
        text: &str,
        headers: &[(&str, &str)],
        options: &[String],
    ) -> Result<String, CudaError> {
        let program = Program::new(name, text, headers)?;
        // SAFETY: `program` is live until the end of this function.
        if let Err(error) = unsafe { result::compile_program(program.handle, options) } {
            let log = program.log().unwrap_or_else(|_| error.to_string());
            return Err(CudaError::Compile { kernel: kernel.to_owned(), log });
        }
        program.ptx()
    }
}

/// A program of NVRTC, destroyed when dropped.
struct Program {
    handle: sys::nvrtcProgram,
    /// The name, the source and the headers: NVRTC stores pointers to them, not copies.
    _texts: Vec<CString>,
}

impl Program {
    fn new(name: &str, text: &str, headers: &[(&str, &str)]) -> Result<Self, CudaError> {
        let own = [name, text].into_iter();
        let header_texts = headers.iter().map(|&(_, text)| text);
        let header_names = headers.iter().map(|&(name, _)| name);
        let texts: Vec<CString> = own.chain(header_texts).chain(header_names).map(c_string).collect();
        let pointers: Vec<*const c_char> = texts.iter().map(|text| text.as_ptr()).collect();
        let (own, of_headers) = pointers.split_at(2);
        let (header_texts, header_names) = of_headers.split_at(headers.len());
        let count = c_int::try_from(headers.len()).expect("a handful of headers");
        let mut handle = ptr::null_mut();
        // SAFETY: the library is loaded (every caller holds `Nvrtc`); the strings end in NUL and
        // live in `texts`, which the program holds until it is destroyed; both arrays have `count`
        // entries.
        let status = unsafe {
            sys::nvrtcCreateProgram(
                &mut handle,
                own[1],
                own[0],
                count,
                header_texts.as_ptr(),
                header_names.as_ptr(),
            )
        };
        status.result().map_err(|e| failed("nvrtcCreateProgram", e))?;
        Ok(Self { handle, _texts: texts })
    }

    fn ptx(&self) -> Result<String, CudaError> {
        // SAFETY: the program is live until `self` is dropped.
        unsafe { result::get_ptx(self.handle) }.map(text_of).map_err(|e| failed("nvrtcGetPTX", e))
    }

    fn log(&self) -> Result<String, CudaError> {
        // SAFETY: the program is live until `self` is dropped.
        unsafe { result::get_program_log(self.handle) }
            .map(text_of)
            .map_err(|e| failed("nvrtcGetProgramLog", e))
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: made by `nvrtcCreateProgram`, destroyed once. A failure leaks a program, which is
        // harmless.
        let _ = unsafe { result::destroy_program(self.handle) };
    }
}

/// Returns the text before the first NUL.
fn text_of(bytes: Vec<c_char>) -> String {
    // A C `char` is signed on some systems only.
    let bytes: Vec<u8> = bytes.into_iter().flat_map(c_char::to_ne_bytes).collect();
    CStr::from_bytes_until_nul(&bytes).map(|text| text.to_string_lossy().into_owned()).unwrap_or_default()
}

fn c_string(text: &str) -> CString {
    CString::new(text).expect("our sources have no NUL")
}

fn failed(call: &str, error: NvrtcError) -> CudaError {
    CudaError::call(call, error.to_string())
}
