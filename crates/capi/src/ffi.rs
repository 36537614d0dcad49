//! FFI boundary: checks pointers on the way in, and converts errors and panics to a status on the
//! way out.

use std::any::Any;
use std::ffi::{CStr, CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::slice;

/// Status of a call.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvantStatus {
    /// Success.
    Ok = 0,
    /// The engine rejected the call.
    Refused = 1,
    /// A required argument is NULL, or a text is not UTF-8.
    Argument = 2,
    /// An internal error of Kvant. The objects of the call can only be freed.
    Fault = 3,
}

/// Why a call failed.
pub(crate) enum CallError {
    /// An error of the engine.
    Refused(String),
    /// The faulty argument.
    Argument(String),
}

impl<E: std::error::Error> From<E> for CallError {
    fn from(error: E) -> Self {
        Self::Refused(error.to_string())
    }
}

/// Runs `work`; converts an error or a panic to a status and, where `error` is not NULL, a text.
///
/// # Safety
/// `error` is NULL or can be written to.
pub(crate) unsafe fn call(
    error: *mut *mut c_char,
    work: impl FnOnce() -> Result<(), CallError>,
) -> KvantStatus {
    // A panic may leave the objects of `work` half changed; the header documents the consequence.
    let (status, message) = match catch_unwind(AssertUnwindSafe(work)) {
        Ok(Ok(())) => (KvantStatus::Ok, None),
        Ok(Err(CallError::Refused(reason))) => (KvantStatus::Refused, Some(reason)),
        Ok(Err(CallError::Argument(reason))) => (KvantStatus::Argument, Some(reason)),
        Err(panic) => (KvantStatus::Fault, Some(format!("a fault of Kvant: {}", panic_text(&*panic)))),
    };
    if !error.is_null() {
        // SAFETY: it is not NULL, so the caller guarantees that it can be written to.
        unsafe { error.write(message.map_or(std::ptr::null_mut(), owned_text)) };
    }
    status
}

fn panic_text(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or(panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("a panic without a message")
}

/// Returns a text owned by C, which [`kvant_string_free`] frees. A zero within it would end it, and
/// becomes U+FFFD.
pub(crate) fn owned_text(text: String) -> *mut c_char {
    CString::new(text.replace('\0', "\u{FFFD}")).unwrap_or_default().into_raw()
}

/// Frees a text returned by this library. NULL is ignored.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvant_string_free(text: *mut c_char) {
    if !text.is_null() {
        // SAFETY: it came from `owned_text`, as only such texts are for the caller to free.
        drop(unsafe { CString::from_raw(text) });
    }
}

fn missing(name: &str) -> CallError {
    CallError::Argument(format!("{name}: expected a pointer, got NULL"))
}

/// Dereferences a pointer.
///
/// # Safety
/// `pointer` is NULL or valid for as long as the call lasts.
pub(crate) unsafe fn borrowed<'a, T>(pointer: *const T, name: &str) -> Result<&'a T, CallError> {
    // SAFETY: guaranteed by the caller.
    unsafe { pointer.as_ref() }.ok_or_else(|| missing(name))
}

/// Dereferences a mutable pointer.
///
/// # Safety
/// `pointer` is NULL, or valid and exclusive for as long as the call lasts.
pub(crate) unsafe fn changed<'a, T>(pointer: *mut T, name: &str) -> Result<&'a mut T, CallError> {
    // SAFETY: guaranteed by the caller.
    unsafe { pointer.as_mut() }.ok_or_else(|| missing(name))
}

/// Checks an output pointer before the work; it is later written without reading its old value.
///
/// # Safety
/// `out_ptr` is NULL or can be written to for as long as the call lasts.
pub(crate) unsafe fn out_ptr<'a, T>(out_ptr: *mut T, name: &str) -> Result<OutPtr<'a, T>, CallError> {
    if out_ptr.is_null() { Err(missing(name)) } else { Ok(OutPtr(out_ptr, std::marker::PhantomData)) }
}

/// A checked output pointer.
pub(crate) struct OutPtr<'a, T>(*mut T, std::marker::PhantomData<&'a mut T>);

impl<T> OutPtr<'_, T> {
    pub(crate) fn write(self, value: T) {
        // SAFETY: `out_ptr` made it of a pointer that is not NULL and that its caller guaranteed to
        // be writable.
        unsafe { self.0.write(value) };
    }
}

/// Borrows a text of the caller.
///
/// # Safety
/// `text` is NULL or ends with a zero, and stays for as long as the call lasts.
pub(crate) unsafe fn text<'a>(text: *const c_char, name: &str) -> Result<&'a str, CallError> {
    if text.is_null() {
        return Err(missing(name));
    }
    // SAFETY: not NULL, and ends with a zero, as the caller guarantees.
    let bytes = unsafe { CStr::from_ptr(text) };
    bytes.to_str().map_err(|error| CallError::Argument(format!("{name}: expected UTF-8: {error}")))
}

/// Borrows a text of the caller, or NULL.
///
/// # Safety
/// As [`text()`].
pub(crate) unsafe fn text_or_null<'a>(
    pointer: *const c_char,
    name: &str,
) -> Result<Option<&'a str>, CallError> {
    // SAFETY: guaranteed by the caller.
    if pointer.is_null() { Ok(None) } else { unsafe { text(pointer, name) }.map(Some) }
}

/// Borrows `n` values of the caller; for `n` of 0 the pointer may be anything.
///
/// # Safety
/// `values` is NULL or holds `n` values for as long as the call lasts.
pub(crate) unsafe fn values<'a, T>(values: *const T, n: usize, name: &str) -> Result<&'a [T], CallError> {
    match n {
        0 => Ok(&[]),
        _ if values.is_null() => Err(missing(name)),
        // SAFETY: not NULL, and holds `n` values, as the caller guarantees.
        _ => Ok(unsafe { slice::from_raw_parts(values, n) }),
    }
}

/// Works as [`values`], for values that the call writes.
///
/// # Safety
/// As [`values`]; nothing else refers to them.
pub(crate) unsafe fn values_mut<'a, T>(
    values: *mut T,
    n: usize,
    name: &str,
) -> Result<&'a mut [T], CallError> {
    match n {
        0 => Ok(&mut []),
        _ if values.is_null() => Err(missing(name)),
        // SAFETY: not NULL, and holds `n` values, as the caller guarantees.
        _ => Ok(unsafe { slice::from_raw_parts_mut(values, n) }),
    }
}

/// Writes `values` to `out`, up to its capacity.
///
/// # Safety
/// `out` is NULL or has room for `capacity` values.
pub(crate) unsafe fn copy<T: Copy>(
    values: &[T],
    out: *mut T,
    capacity: usize,
    name: &str,
) -> Result<(), CallError> {
    let n = values.len().min(capacity);
    if n > 0 && out.is_null() {
        return Err(missing(name));
    }
    // SAFETY: there is room for `capacity` of them, as the caller guarantees, and no Rust reference
    // points there.
    unsafe { std::ptr::copy(values.as_ptr(), out, n) };
    Ok(())
}

/// Works as [`copy`], and writes the number of `values` to `n`.
///
/// # Safety
/// As [`copy`].
pub(crate) unsafe fn copy_counted<T: Copy>(
    values: &[T],
    out: *mut T,
    capacity: usize,
    name: &str,
    n: OutPtr<'_, usize>,
) -> Result<(), CallError> {
    // SAFETY: guaranteed by the caller.
    unsafe { copy(values, out, capacity, name) }?;
    n.write(values.len());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message_of(work: impl FnOnce() -> Result<(), CallError>) -> (KvantStatus, String) {
        let mut error = std::ptr::null_mut();
        // SAFETY: `error` is a local variable; the text is read before it is freed.
        unsafe {
            let status = call(&mut error, work);
            let message = text(error, "error").map(str::to_owned).unwrap_or_default();
            kvant_string_free(error);
            (status, message)
        }
    }

    #[test]
    fn a_panic_does_not_cross_the_ffi_boundary() {
        std::panic::set_hook(Box::new(|_| ()));
        assert_eq!(message_of(|| panic!("one")), (KvantStatus::Fault, "a fault of Kvant: one".to_owned()));
        assert_eq!(message_of(|| panic!("{}", 2)), (KvantStatus::Fault, "a fault of Kvant: 2".to_owned()));
        // SAFETY: NULL requests no text.
        assert_eq!(unsafe { call(std::ptr::null_mut(), || panic!("three")) }, KvantStatus::Fault);
    }

    #[test]
    fn a_text_with_a_zero_within_is_returned_whole() {
        let refused = message_of(|| Err(CallError::Argument("a\0b".to_owned())));
        assert_eq!(refused, (KvantStatus::Argument, "a\u{FFFD}b".to_owned()));
    }

    #[test]
    fn null_and_invalid_utf8_are_refused_by_name() {
        // SAFETY: all are NULL or literals.
        let null = message_of(|| unsafe { borrowed::<u8>(std::ptr::null(), "model") }.map(|_| ()));
        assert_eq!(null, (KvantStatus::Argument, "model: expected a pointer, got NULL".to_owned()));
        // SAFETY: as above.
        let bytes = message_of(|| unsafe { text(c"\xff".as_ptr(), "path") }.map(|_| ()));
        assert_eq!(bytes.0, KvantStatus::Argument);
        assert!(bytes.1.starts_with("path: expected UTF-8"), "{}", bytes.1);
        // SAFETY: as above.
        unsafe {
            assert!(values::<u32>(std::ptr::null(), 0, "tokens").is_ok_and(<[_]>::is_empty));
            assert!(values::<u32>(std::ptr::null(), 1, "tokens").is_err());
            assert!(copy(&[1, 2], std::ptr::null_mut(), 0, "tokens").is_ok());
            assert!(copy(&[1, 2], std::ptr::null_mut(), 1, "tokens").is_err());
        }
    }
}
