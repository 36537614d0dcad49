//! The page's ABI. No pointer is dereferenced here: input bytes arrive at the address of
//! [`kvant_input`]; output is JSON or a one-line error message at the address of [`kvant_output`].
//! Imports are the page's GPU (`kvant-webgpu`) and a dropped file. With a GPU, [`kvant_open`],
//! [`kvant_begin`] and [`kvant_go_on`] suspend for it, and no other function may be called
//! meanwhile.

use std::cell::{Cell, RefCell};
use std::panic;

use serde::Serialize;

use kvant::gguf::RangeReader;
use kvant::{Error, Gguf, Model};

use crate::engine::Engine;
use crate::error::WebError;

/// State of an instance of the module.
#[derive(Default)]
struct Instance {
    engine: Option<Engine>,
    /// Input of the next call.
    input: Vec<u8>,
}

thread_local! {
    static INSTANCE: RefCell<Instance> = RefCell::default();
    /// Output of the last call. Separate from the rest, so that the panic hook can write it while
    /// the rest is borrowed.
    static OUTPUT: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
}

fn set_output(text: impl Into<Vec<u8>>) {
    OUTPUT.set(text.into());
}

/// Runs `work` with the input; its result or error becomes the output. Returns whether it
/// succeeded.
fn call<T: Serialize>(work: impl FnOnce(&mut Instance, Vec<u8>) -> Result<T, WebError>) -> bool {
    let result = INSTANCE.with_borrow_mut(|instance| {
        let input = std::mem::take(&mut instance.input);
        Ok(serde_json::to_vec(&work(instance, input)?)?)
    });
    let is_ok = result.is_ok();
    set_output(result.unwrap_or_else(|error: WebError| error.to_string().into_bytes()));
    is_ok
}

impl Instance {
    fn engine(&mut self) -> Result<&mut Engine, WebError> {
        self.engine.as_mut().ok_or(WebError::NoModel)
    }
}

/// Returns the bytes of memory still available: 32-bit WebAssembly ends at 4 GiB.
#[cfg(target_arch = "wasm32")]
fn available_memory() -> usize {
    const PAGE: usize = 1 << 16;
    (usize::MAX / PAGE).saturating_sub(core::arch::wasm32::memory_size::<0>()) * PAGE
}

/// Returns the memory of 32-bit WebAssembly on other targets.
#[cfg(not(target_arch = "wasm32"))]
fn available_memory() -> usize {
    u32::MAX as usize
}

/// Returns the file dropped on the page; `None` without one.
#[cfg(target_arch = "wasm32")]
fn dropped_file() -> Option<Box<dyn RangeReader>> {
    crate::file::dropped()
}

/// Returns `None`: other targets have no page.
#[cfg(not(target_arch = "wasm32"))]
fn dropped_file() -> Option<Box<dyn RangeReader>> {
    None
}

/// Installs a panic hook that writes the output; must be called once, before all else.
#[unsafe(no_mangle)]
pub extern "C" fn kvant_start() {
    panic::set_hook(Box::new(|panic| set_output(format!("a fault of Kvant: {panic}"))));
}

/// Returns the address for the `n` bytes of input of the next call, which consumes them; null
/// without memory.
#[unsafe(no_mangle)]
pub extern "C" fn kvant_input(n: usize) -> *mut u8 {
    INSTANCE.with_borrow_mut(|instance| {
        instance.input = Vec::new();
        if instance.input.try_reserve_exact(n).is_err() {
            return std::ptr::null_mut();
        }
        instance.input.resize(n, 0);
        instance.input.as_mut_ptr()
    })
}

/// Returns the address of the last call's output.
#[unsafe(no_mangle)]
pub extern "C" fn kvant_output() -> *const u8 {
    let text = OUTPUT.take();
    let address = text.as_ptr();
    OUTPUT.set(text);
    address
}

/// Returns the bytes of the last call's output.
#[unsafe(no_mangle)]
pub extern "C" fn kvant_output_len() -> usize {
    let text = OUTPUT.take();
    let n = text.len();
    OUTPUT.set(text);
    n
}

/// Opens the GGUF file dropped on the page, or the built-in model without one, on the CPU or on the
/// page's GPU. Outputs an [`About`](crate::About). WebAssembly memory never shrinks: use a new
/// instance for another model.
#[unsafe(no_mangle)]
pub extern "C" fn kvant_open(on_gpu: bool) -> bool {
    call(|instance, _| {
        let gguf = match dropped_file() {
            Some(file) => Gguf::from_reader(file).map_err(Error::from)?,
            None => Model::bundled_file()?,
        };
        let engine = instance.engine.insert(Engine::open(gguf, available_memory(), on_gpu)?);
        engine.about()
    })
}

/// Begins an answer to the [`GenerationRequest`](crate::GenerationRequest) of the input; outputs
/// null.
#[unsafe(no_mangle)]
pub extern "C" fn kvant_begin() -> bool {
    call(|instance, json| instance.engine()?.begin(&serde_json::from_slice(&json)?))
}

/// Advances the answer by a step; outputs an [`Event`](crate::Event).
#[unsafe(no_mangle)]
pub extern "C" fn kvant_go_on() -> bool {
    call(|instance, _| instance.engine()?.step())
}

/// Stops the answer; outputs null.
#[unsafe(no_mangle)]
pub extern "C" fn kvant_stop() -> bool {
    call(|instance, _| {
        instance.engine()?.stop();
        Ok(())
    })
}

/// Outputs a [`Kv`](crate::Kv).
#[unsafe(no_mangle)]
pub extern "C" fn kvant_kv() -> bool {
    call(|instance, _| Ok(instance.engine()?.kv()))
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    fn output() -> String {
        let text = OUTPUT.take();
        String::from_utf8(text).unwrap()
    }

    fn set_input(text: &str) {
        assert!(!kvant_input(text.len()).is_null());
        INSTANCE.with_borrow_mut(|instance| instance.input.copy_from_slice(text.as_bytes()));
    }

    #[test]
    fn a_page_opens_a_model_and_receives_an_answer() {
        assert!(!kvant_go_on());
        assert_eq!(output(), "no model is open");
        assert!(kvant_open(false));
        assert!(output().starts_with("{\"name\":\"kvant-pocket\""));
        set_input("{\"messages\": 1}");
        assert!(!kvant_begin());
        assert!(output().starts_with("the request: "));
        set_input(
            r#"{"messages":[{"role":"user","content":"What is the capital of France?"}],"temperature":0,"seed":1}"#,
        );
        assert!(kvant_begin() && output() == "null");
        let mut text = String::new();
        loop {
            assert!(kvant_go_on());
            let event: Value = serde_json::from_str(&output()).unwrap();
            text += event["said"].as_str().unwrap_or_default();
            if event["finished"].is_object() {
                break;
            }
        }
        assert!(text.contains("Paris"), "{text}");
        assert!(kvant_kv());
        let kv: Value = serde_json::from_str(&output()).unwrap();
        assert!(kv["idle_bytes"].as_u64() > Some(0) && kv["running_bytes"] == 0, "{kv}");
        assert!(kvant_stop());
    }

    #[test]
    fn input_belongs_to_one_call_and_has_to_fit() {
        assert!(kvant_input(usize::MAX).is_null());
        assert!(kvant_open(false), "{}", output());
        set_input("no request");
        assert!(kvant_stop(), "it takes no input");
        assert!(!kvant_begin());
        assert_eq!(output(), "the request: EOF while parsing a value at line 1 column 0");
    }
}
