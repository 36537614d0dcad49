//! The command `kvant`: a wheel's script of that name calls `_command`.

use std::ffi::OsString;

use pyo3::prelude::*;

/// Runs the command of `sys.argv` in this process, as the binary does, and returns its exit code.
#[pyfunction(name = "_command")]
pub(crate) fn run(py: Python<'_>) -> PyResult<u8> {
    let argv: Vec<OsString> = py.import("sys")?.getattr("argv")?.extract()?;
    let args = std::iter::once("kvant".into()).chain(argv.into_iter().skip(1));
    reset_interrupt(py)?;
    open_standard_streams(py)?;
    Ok(py.detach(|| kvant_cli::execute(args)))
}

/// Lets Ctrl-C end the process. Python's handler would wait for Python code to run; a process that
/// ignores Ctrl-C still does.
fn reset_interrupt(py: Python<'_>) -> PyResult<()> {
    let signal = py.import("signal")?;
    let interrupt = signal.getattr("SIGINT")?;
    let handler = signal.call_method1("getsignal", (&interrupt,))?;
    if handler.is(&signal.getattr("default_int_handler")?) {
        signal.call_method1("signal", (interrupt, signal.getattr("SIG_DFL")?))?;
    }
    Ok(())
}

/// Opens the null device in place of closed standard streams, as Rust programs do: else the next
/// opened file would be one of them, and receive what is printed.
fn open_standard_streams(py: Python<'_>) -> PyResult<()> {
    let os = py.import("os")?;
    for descriptor in 0..3 {
        if os.call_method1("fstat", (descriptor,)).is_err() {
            os.call_method1("open", (os.getattr("devnull")?, os.getattr("O_RDWR")?))?;
        }
    }
    Ok(())
}
