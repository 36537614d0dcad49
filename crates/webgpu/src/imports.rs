//! The functions that the worker provides.
//!
//! Its objects have numbers, 0 for none; a text result is returned as its length, and fetched by a
//! second call. Sizes and offsets in buffers are `f64`, which represents each of them exactly.

mod page {
    #[link(wasm_import_module = "gpu")]
    unsafe extern "C" {
        pub safe fn describe() -> usize;
        pub safe fn limit(which: u32) -> f64;
        pub safe fn failure() -> usize;
        pub safe fn release(object: u32);
        pub safe fn buffer(size: f64, usage: u32) -> u32;
        pub safe fn buffer_tried(size: f64, usage: u32) -> u32;
        pub safe fn refusal(module: u32) -> usize;
        pub safe fn layout(pipeline: u32) -> u32;
        pub safe fn encoder() -> u32;
        pub safe fn pass(encoder: u32) -> u32;
        pub safe fn set_pipeline(pass: u32, pipeline: u32);
        pub safe fn dispatch(pass: u32, x: u32, y: u32, z: u32);
        pub safe fn end(pass: u32);
        pub safe fn copy(encoder: u32, from: u32, at: f64, to: u32, to_at: f64, len: f64);
        pub safe fn clear(encoder: u32, buffer: u32, at: f64, len: f64);
        pub safe fn submit(encoder: u32);
        pub safe fn map(buffer: u32, at: f64, len: f64);
        pub safe fn unmap(buffer: u32);
        pub safe fn wait();

        pub fn text(to: *mut u8);
        pub fn module(text: *const u8, len: usize) -> u32;
        pub fn pipeline(module: u32, entry: *const u8, len: usize) -> u32;
        pub fn group(layout: u32, entries: *const [f64; 4], n: usize) -> u32;
        pub fn set_group(pass: u32, index: u32, group: u32, offsets: *const u32, n: usize);
        pub fn write(buffer: u32, at: f64, bytes: *const u8, len: usize);
        pub fn mapped(buffer: u32, at: f64, to: *mut u8, len: usize) -> bool;
    }
}

pub(crate) use page::{
    buffer, buffer_tried, clear, copy, dispatch, encoder, end, layout, limit, map, pass, set_pipeline,
    submit, unmap, wait,
};

/// An object of the worker, released when this is dropped.
#[derive(Debug, PartialEq, Eq, Hash)]
pub(crate) struct Object(pub u32);

impl Drop for Object {
    fn drop(&mut self) {
        page::release(self.0);
    }
}

/// Fetches the worker's text result of `len` bytes.
fn text(len: usize) -> String {
    let mut bytes = vec![0; len];
    // SAFETY: the worker writes the text whose length it has just returned, which is that of
    // `bytes`.
    unsafe { page::text(bytes.as_mut_ptr()) };
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Returns the description of the opened device, one property per line; `None` without a device.
pub(crate) fn describe() -> Option<String> {
    Some(page::describe()).filter(|len| *len > 0).map(text)
}

/// Returns the next error, in the order of occurrence.
pub(crate) fn failure() -> Option<String> {
    Some(page::failure()).filter(|len| *len > 0).map(text)
}

/// Returns the first error of a module, as its line number, a space and the message; waits until
/// the module is parsed.
pub(crate) fn refusal(module: &Object) -> Option<String> {
    Some(page::refusal(module.0)).filter(|len| *len > 0).map(text)
}

pub(crate) fn module(source: &str) -> Object {
    // SAFETY: the worker reads as many bytes as `source` has.
    Object(unsafe { page::module(source.as_ptr(), source.len()) })
}

/// Compiles an entry point and waits; `None` on failure, which [`failure`] reports.
pub(crate) fn pipeline(module: &Object, entry: &str) -> Option<Object> {
    // SAFETY: the worker reads as many bytes as `entry` has, before it waits.
    let object = unsafe { page::pipeline(module.0, entry.as_ptr(), entry.len()) };
    (object != 0).then_some(Object(object))
}

/// Creates a bind group of buffers, each with its binding, its number, and the offset and length of
/// the bound range.
pub(crate) fn group(layout: &Object, entries: &[[f64; 4]]) -> Object {
    // SAFETY: the worker reads as many entries as there are.
    Object(unsafe { page::group(layout.0, entries.as_ptr(), entries.len()) })
}

pub(crate) fn set_group(pass: &Object, index: u32, group: &Object, offsets: &[u32]) {
    // SAFETY: the worker reads as many offsets as there are.
    unsafe { page::set_group(pass.0, index, group.0, offsets.as_ptr(), offsets.len()) };
}

pub(crate) fn write(buffer: &Object, at: f64, bytes: &[u8]) {
    // SAFETY: the worker reads as many bytes as there are.
    unsafe { page::write(buffer.0, at, bytes.as_ptr(), bytes.len()) };
}

/// Fetches mapped bytes; returns whether they were mapped.
pub(crate) fn mapped(buffer: &Object, at: f64, to: &mut [u8]) -> bool {
    // SAFETY: the worker writes as many bytes as `to` has.
    unsafe { page::mapped(buffer.0, at, to.as_mut_ptr(), to.len()) }
}
