//! The border to the page. No pointer is followed here: bytes come in where [`kvant_input`] says, and go out as JSON, or as a line that
//! says what is wrong, where [`kvant_output`] says. What is imported is the page's GPU (`kvant-webgpu`) and a dropped file. On one, [`kvant_open`],
//! [`kvant_begin`] and [`kvant_go_on`] wait for it, and no other function may be called meanwhile.

use std::cell::{Cell, RefCell};
use std::panic;

use serde::Serialize;

use kvant::gguf::Store;
use kvant::{Error, Gguf, Model};

use crate::{Engine, WebError};

/// What an instance of the module is.
#[derive(Default)]
struct Instance {
    engine: Option<Engine>,
    /// What the page hands in with the next call.
    input: Vec<u8>,
}

thread_local! {
    static INSTANCE: RefCell<Instance> = RefCell::default();
    /// What the last call has to say. Apart from the rest, so that a panic in the middle of it can speak.
    static OUTPUT: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
}

fn say(text: impl Into<Vec<u8>>) {
    OUTPUT.set(text.into());
}

/// Runs `work` with what the page has handed in; what it gives or says becomes the output. Tells whether it went well.
fn call<T: Serialize>(work: impl FnOnce(&mut Instance, Vec<u8>) -> Result<T, WebError>) -> bool {
    let done = INSTANCE.with_borrow_mut(|instance| {
        let input = std::mem::take(&mut instance.input);
        Ok(serde_json::to_vec(&work(instance, input)?)?)
    });
    let went_well = done.is_ok();
    say(done.unwrap_or_else(|error: WebError| error.to_string().into_bytes()));
    went_well
}

impl Instance {
    fn engine(&mut self) -> Result<&mut Engine, WebError> {
        self.engine.as_mut().ok_or(WebError::NoModel)
    }
}

/// Bytes of memory that can still be had: WebAssembly of 32 bits ends at 4 GiB.
#[cfg(target_arch = "wasm32")]
fn room() -> usize {
    const PAGE: usize = 1 << 16;
    (usize::MAX / PAGE).saturating_sub(core::arch::wasm32::memory_size::<0>()) * PAGE
}

/// Bytes of memory that can still be had: as many as WebAssembly has, where this is not that.
#[cfg(not(target_arch = "wasm32"))]
fn room() -> usize {
    u32::MAX as usize
}

/// The file that was dropped on the page; `None` where none was.
#[cfg(target_arch = "wasm32")]
fn dropped() -> Option<Box<dyn Store>> {
    crate::file::dropped()
}

/// The file that was dropped on the page: none, where there is no page.
#[cfg(not(target_arch = "wasm32"))]
fn dropped() -> Option<Box<dyn Store>> {
    None
}

/// Has panics speak through the output; to be called once, before anything else.
#[unsafe(no_mangle)]
pub extern "C" fn kvant_start() {
    panic::set_hook(Box::new(|panic| say(format!("a fault of Kvant: {panic}"))));
}

/// Where the page is to write the `n` bytes that belong to the next call, which takes them; null where there is no room.
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

/// Where the output of the last call is.
#[unsafe(no_mangle)]
pub extern "C" fn kvant_output() -> *const u8 {
    let text = OUTPUT.take();
    let place = text.as_ptr();
    OUTPUT.set(text);
    place
}

/// How many bytes the output of the last call has.
#[unsafe(no_mangle)]
pub extern "C" fn kvant_output_len() -> usize {
    let text = OUTPUT.take();
    let n = text.len();
    OUTPUT.set(text);
    n
}

/// Opens the GGUF file that was dropped on the page, or the built-in model where none was, on the CPU or on the page's GPU; gives an
/// [`About`](crate::About). Memory of WebAssembly never shrinks: for another model, take another instance.
#[unsafe(no_mangle)]
pub extern "C" fn kvant_open(on_gpu: bool) -> bool {
    call(|instance, _| {
        let gguf = match dropped() {
            Some(file) => Gguf::from_store(file).map_err(Error::from)?,
            None => Model::bundled_file()?,
        };
        let engine = instance.engine.insert(Engine::open(gguf, room(), on_gpu)?);
        engine.about()
    })
}

/// Begins an answer to the [`Asked`](crate::Asked) of the input; gives nothing.
#[unsafe(no_mangle)]
pub extern "C" fn kvant_begin() -> bool {
    call(|instance, json| instance.engine()?.begin(&serde_json::from_slice(&json)?))
}

/// Goes a step on; gives an [`Event`](crate::Event).
#[unsafe(no_mangle)]
pub extern "C" fn kvant_go_on() -> bool {
    call(|instance, _| instance.engine()?.go_on())
}

/// Ends the answer where it is; gives nothing.
#[unsafe(no_mangle)]
pub extern "C" fn kvant_stop() -> bool {
    call(|instance, _| {
        instance.engine()?.stop();
        Ok(())
    })
}

/// Gives a [`Kv`](crate::Kv).
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

    fn hand_in(text: &str) {
        assert!(!kvant_input(text.len()).is_null());
        INSTANCE.with_borrow_mut(|instance| instance.input.copy_from_slice(text.as_bytes()));
    }

    #[test]
    fn a_page_opens_asks_and_hears_the_answer() {
        assert!(!kvant_go_on());
        assert_eq!(output(), "no model is open");
        assert!(kvant_open(false));
        assert!(output().starts_with("{\"name\":\"kvant-pocket\""));
        hand_in("{\"messages\": 1}");
        assert!(!kvant_begin());
        assert!(output().starts_with("the request: "));
        hand_in(
            r#"{"messages":[{"role":"user","content":"What is the capital of France?"}],"temperature":0,"seed":1}"#,
        );
        assert!(kvant_begin() && output() == "null");
        let mut said = String::new();
        loop {
            assert!(kvant_go_on());
            let event: Value = serde_json::from_str(&output()).unwrap();
            said += event["said"].as_str().unwrap_or_default();
            if event["finished"].is_object() {
                break;
            }
        }
        assert!(said.contains("Paris"), "{said}");
        assert!(kvant_kv());
        let kv: Value = serde_json::from_str(&output()).unwrap();
        assert!(kv["idle_bytes"].as_u64() > Some(0) && kv["running_bytes"] == 0, "{kv}");
        assert!(kvant_stop());
    }

    #[test]
    fn what_is_handed_in_belongs_to_one_call_and_has_to_fit() {
        assert!(kvant_input(usize::MAX).is_null());
        assert!(kvant_open(false), "{}", output());
        hand_in("no request");
        assert!(kvant_stop(), "it takes no input");
        assert!(!kvant_begin());
        assert_eq!(output(), "the request: EOF while parsing a value at line 1 column 0");
    }
}
