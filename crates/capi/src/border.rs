//! The border to C: pointers are checked on the way in, errors and panics become a status on the way out.

use std::any::Any;
use std::ffi::{CStr, CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::slice;

/// How a call went.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvantStatus {
    /// Done.
    Ok = 0,
    /// It cannot be done.
    Refused = 1,
    /// An argument is NULL that must not be, or a text is not UTF-8.
    Argument = 2,
    /// A fault of Kvant. The objects that were handed in are to be freed, and are good for nothing else.
    Fault = 3,
}

/// Why a call did not do what it was to do.
pub(crate) enum Failure {
    /// The engine said so.
    Refused(kvant::Error),
    /// What is wrong with an argument.
    Argument(String),
}

impl<E: Into<kvant::Error>> From<E> for Failure {
    fn from(error: E) -> Self {
        Self::Refused(error.into())
    }
}

/// Runs `work`; what goes wrong in it becomes a status and, where `error` is not NULL, a text.
///
/// # Safety
/// `error` is NULL or can be written to.
pub(crate) unsafe fn call(
    error: *mut *mut c_char,
    work: impl FnOnce() -> Result<(), Failure>,
) -> KvantStatus {
    // A panic may leave what `work` was handed half changed, and the header says what that means.
    let (status, said) = match catch_unwind(AssertUnwindSafe(work)) {
        Ok(Ok(())) => (KvantStatus::Ok, None),
        Ok(Err(Failure::Refused(why))) => (KvantStatus::Refused, Some(why.to_string())),
        Ok(Err(Failure::Argument(why))) => (KvantStatus::Argument, Some(why)),
        Err(panic) => (KvantStatus::Fault, Some(format!("a fault of Kvant: {}", panic_text(&*panic)))),
    };
    if !error.is_null() {
        // SAFETY: it is not NULL, so the caller promises that it can be written to.
        unsafe { error.write(said.map_or(std::ptr::null_mut(), owned_text)) };
    }
    status
}

fn panic_text(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or(panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("a panic without words")
}

/// A text for C to keep, which [`kvant_string_free`] takes back. A zero within it would end it, and shows as U+FFFD.
pub(crate) fn owned_text(text: String) -> *mut c_char {
    CString::new(text.replace('\0', "\u{FFFD}")).unwrap_or_default().into_raw()
}

/// Frees a text that was handed out. NULL is gone over.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvant_string_free(text: *mut c_char) {
    if !text.is_null() {
        // SAFETY: it came from `owned_text`, as only such texts are for the caller to free.
        drop(unsafe { CString::from_raw(text) });
    }
}

fn missing(name: &str) -> Failure {
    Failure::Argument(format!("{name}: expected a pointer, got NULL"))
}

/// What a pointer points to.
///
/// # Safety
/// `pointer` is NULL or valid for as long as the call lasts.
pub(crate) unsafe fn borrowed<'a, T>(pointer: *const T, name: &str) -> Result<&'a T, Failure> {
    // SAFETY: as the caller promises.
    unsafe { pointer.as_ref() }.ok_or_else(|| missing(name))
}

/// What a pointer points to, to be changed.
///
/// # Safety
/// `pointer` is NULL, or valid and nobody else's for as long as the call lasts.
pub(crate) unsafe fn changed<'a, T>(pointer: *mut T, name: &str) -> Result<&'a mut T, Failure> {
    // SAFETY: as the caller promises.
    unsafe { pointer.as_mut() }.ok_or_else(|| missing(name))
}

/// A place for a result is checked before the work, and written without reading what is there.
///
/// # Safety
/// `place` is NULL or can be written to for as long as the call lasts.
pub(crate) unsafe fn place<'a, T>(place: *mut T, name: &str) -> Result<Place<'a, T>, Failure> {
    if place.is_null() { Err(missing(name)) } else { Ok(Place(place, std::marker::PhantomData)) }
}

/// Where a result is written.
pub(crate) struct Place<'a, T>(*mut T, std::marker::PhantomData<&'a mut T>);

impl<T> Place<'_, T> {
    pub(crate) fn put(self, value: T) {
        // SAFETY: `place` made it of a pointer that is not NULL and that its caller promised to be writable.
        unsafe { self.0.write(value) };
    }
}

/// A text of the caller's.
///
/// # Safety
/// `text` is NULL or ends with a zero, and stays for as long as the call lasts.
pub(crate) unsafe fn text<'a>(text: *const c_char, name: &str) -> Result<&'a str, Failure> {
    if text.is_null() {
        return Err(missing(name));
    }
    // SAFETY: not NULL, and ends with a zero, as the caller promises.
    let bytes = unsafe { CStr::from_ptr(text) };
    bytes.to_str().map_err(|error| Failure::Argument(format!("{name}: expected UTF-8: {error}")))
}

/// A text of the caller's, or NULL.
///
/// # Safety
/// As [`text()`].
pub(crate) unsafe fn text_or_null<'a>(
    pointer: *const c_char,
    name: &str,
) -> Result<Option<&'a str>, Failure> {
    // SAFETY: as the caller promises.
    if pointer.is_null() { Ok(None) } else { unsafe { text(pointer, name) }.map(Some) }
}

/// `n` values of the caller's; where there are none, the pointer may be anything.
///
/// # Safety
/// `values` is NULL or holds `n` values for as long as the call lasts.
pub(crate) unsafe fn values<'a, T>(values: *const T, n: usize, name: &str) -> Result<&'a [T], Failure> {
    match n {
        0 => Ok(&[]),
        _ if values.is_null() => Err(missing(name)),
        // SAFETY: not NULL, and holds `n` values, as the caller promises.
        _ => Ok(unsafe { slice::from_raw_parts(values, n) }),
    }
}

/// Writes as many of `values` as there is room for.
///
/// # Safety
/// `out` is NULL or has room for `capacity` values.
pub(crate) unsafe fn copy<T: Copy>(
    values: &[T],
    out: *mut T,
    capacity: usize,
    name: &str,
) -> Result<(), Failure> {
    let n = values.len().min(capacity);
    if n > 0 && out.is_null() {
        return Err(missing(name));
    }
    // SAFETY: there is room for `capacity` of them, as the caller promises, and nothing of ours lies there.
    unsafe { std::ptr::copy(values.as_ptr(), out, n) };
    Ok(())
}

/// As [`copy`], and writes to `n` how many `values` there are.
///
/// # Safety
/// As [`copy`].
pub(crate) unsafe fn copy_counted<T: Copy>(
    values: &[T],
    out: *mut T,
    capacity: usize,
    name: &str,
    n: Place<'_, usize>,
) -> Result<(), Failure> {
    // SAFETY: as the caller promises.
    unsafe { copy(values, out, capacity, name) }?;
    n.put(values.len());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(work: impl FnOnce() -> Result<(), Failure>) -> (KvantStatus, String) {
        let mut error = std::ptr::null_mut();
        // SAFETY: `error` is ours; the text is read before it is freed.
        unsafe {
            let status = call(&mut error, work);
            let said = text(error, "error").map(str::to_owned).unwrap_or_default();
            kvant_string_free(error);
            (status, said)
        }
    }

    #[test]
    fn a_panic_does_not_cross_the_border() {
        std::panic::set_hook(Box::new(|_| ()));
        assert_eq!(said(|| panic!("one")), (KvantStatus::Fault, "a fault of Kvant: one".to_owned()));
        assert_eq!(said(|| panic!("{}", 2)), (KvantStatus::Fault, "a fault of Kvant: 2".to_owned()));
        // SAFETY: NULL asks for no text.
        assert_eq!(unsafe { call(std::ptr::null_mut(), || panic!("three")) }, KvantStatus::Fault);
    }

    #[test]
    fn a_text_with_a_zero_within_arrives_whole() {
        let refused = said(|| Err(Failure::Argument("a\0b".to_owned())));
        assert_eq!(refused, (KvantStatus::Argument, "a\u{FFFD}b".to_owned()));
    }

    #[test]
    fn what_is_null_or_no_text_is_refused_by_name() {
        // SAFETY: all are NULL or literals.
        let null = said(|| unsafe { borrowed::<u8>(std::ptr::null(), "model") }.map(|_| ()));
        assert_eq!(null, (KvantStatus::Argument, "model: expected a pointer, got NULL".to_owned()));
        // SAFETY: as above.
        let bytes = said(|| unsafe { text(c"\xff".as_ptr(), "path") }.map(|_| ()));
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
