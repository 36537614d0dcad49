//! Files of this crate, with errors that name them.

use std::fs::File;
use std::io::{self, BufWriter};
use std::path::Path;

use crate::EvalError;

/// [`kvant::durable::write_whole`] for writers that fail with an [`EvalError`].
pub(crate) fn write_whole<T>(
    path: &Path,
    write: impl FnOnce(&mut BufWriter<File>) -> Result<T, EvalError>,
) -> Result<T, EvalError> {
    kvant::durable::write_whole(path, |file| Ok(write(file)?)).map_err(|error| match error {
        Failed::File(source) => EvalError::io(path)(source),
        Failed::Writer(error) => error,
    })
}

enum Failed {
    File(io::Error),
    Writer(EvalError),
}

impl From<io::Error> for Failed {
    fn from(error: io::Error) -> Self {
        Self::File(error)
    }
}

impl From<EvalError> for Failed {
    fn from(error: EvalError) -> Self {
        Self::Writer(error)
    }
}
