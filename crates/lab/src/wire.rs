//! What judge and worker send each other: frames of a tag, a length and bytes, in little endian.
//!
//! ```text
//! judge                     worker
//! case, state           ->
//!                       <-  nothing (ready), or an error
//! inputs                ->
//!                       <-  digest of the answers, or an error: the judge stops its clock
//!                       <-  answers
//! inputs                -> ..
//! ```
//!
//! The digest reads every byte of the answers, so that work that is put off until its result is
//! read is timed too; sending answers, which are megabytes in prefill, is not.

use std::io::{self, Read, Write};

use xxhash_rust::xxh3::xxh3_128;

/// Longest frame: more than any case needs.
const MAX_BYTES: u64 = 1 << 33;
/// Tags of a result and of an error.
const RESULT: u8 = 0;
const ERROR: u8 = 1;

/// A digest of answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Digest([u8; 16]);

impl Digest {
    /// Returns the digest of `answers`.
    pub fn of(answers: &[u8]) -> Self {
        Self(xxh3_128(answers).to_le_bytes())
    }

    /// Returns its bytes.
    pub fn bytes(&self) -> &[u8; 16] {
        &self.0
    }

    /// Returns the digest of these bytes; `None` for another length.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        bytes.try_into().ok().map(Self)
    }
}

/// Sends a result.
///
/// # Errors
///
/// Those of the writer.
pub fn send(to: &mut dyn Write, bytes: &[u8]) -> io::Result<()> {
    send_frame(to, RESULT, bytes)
}

/// Sends an error.
///
/// # Errors
///
/// Those of the writer.
pub fn send_error(to: &mut dyn Write, line: &str) -> io::Result<()> {
    send_frame(to, ERROR, line.as_bytes())
}

fn send_frame(to: &mut dyn Write, tag: u8, bytes: &[u8]) -> io::Result<()> {
    to.write_all(&[tag])?;
    to.write_all(&(bytes.len() as u64).to_le_bytes())?;
    to.write_all(bytes)?;
    to.flush()
}

/// Receives a frame: its bytes, or the error that it carries. `None` at the end.
///
/// # Errors
///
/// Those of the reader, and [`io::ErrorKind::InvalidData`] for what is no frame.
pub fn receive(from: &mut dyn Read) -> io::Result<Option<Result<Vec<u8>, String>>> {
    let mut tag = [0];
    if from.read(&mut tag)? == 0 {
        return Ok(None);
    }
    let mut len = [0; 8];
    from.read_exact(&mut len)?;
    let len = u64::from_le_bytes(len);
    let invalid = |what: String| io::Error::new(io::ErrorKind::InvalidData, what);
    if len > MAX_BYTES {
        return Err(invalid(format!("a frame of {len} bytes, expected at most {MAX_BYTES}")));
    }
    let mut bytes = Vec::new();
    from.take(len).read_to_end(&mut bytes)?;
    match (tag, bytes.len() as u64 == len) {
        ([RESULT], true) => Ok(Some(Ok(bytes))),
        ([ERROR], true) => Ok(Some(Err(String::from_utf8_lossy(&bytes).into_owned()))),
        ([_], false) => Err(io::ErrorKind::UnexpectedEof.into()),
        ([tag], true) => Err(invalid(format!("a frame with the tag {tag}, expected 0 or 1"))),
    }
}

/// Returns numbers as bytes.
pub fn to_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// Returns bytes as numbers; `None` for a length that is no multiple of four.
pub fn to_values(bytes: &[u8]) -> Option<Vec<f32>> {
    let (values, rest) = bytes.as_chunks::<4>();
    rest.is_empty().then(|| values.iter().map(|value| f32::from_le_bytes(*value)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_arrive_as_they_were_sent() {
        let mut sent = Vec::new();
        send(&mut sent, &to_bytes(&[1.5, f32::NAN])).unwrap();
        send_error(&mut sent, "no such op").unwrap();
        let mut from = sent.as_slice();
        let values = to_values(&receive(&mut from).unwrap().unwrap().unwrap()).unwrap();
        assert!(values[0] == 1.5 && values[1].is_nan());
        assert_eq!(receive(&mut from).unwrap(), Some(Err("no such op".to_owned())));
        assert_eq!(receive(&mut from).unwrap(), None);
    }

    #[test]
    fn invalid_frames_are_rejected() {
        let frame = |tag: u8, len: u64| [&[tag][..], &len.to_le_bytes(), b"abc"].concat();
        for bytes in [frame(7, 3), frame(0, 4), frame(0, u64::MAX), vec![0, 1]] {
            assert!(receive(&mut bytes.as_slice()).is_err(), "{bytes:?}");
        }
        assert_eq!(to_values(&[0; 5]), None);
        assert_eq!(Digest::from_bytes(&[0; 15]), None);
    }
}
