//! Models: loading, tokenization, embeddings.

use std::ffi::c_char;
use std::sync::Arc;

use kvant::{
    DeviceList, EmbedOptions, Gguf, LoraFile, Message, Model, OpenOptions, Special, open_file, open_lora,
};

use crate::ffi::{
    CallError, KvantStatus, borrowed, call, copy, copy_counted, out_ptr, owned_text, text, text_or_null,
    values,
};

/// A loaded model.
pub struct KvantModel(pub(crate) Model);

/// A LoRA adapter of a model.
#[repr(C)]
pub struct KvantLora {
    /// Path of a GGUF file, or of a PEFT folder.
    pub path: *const c_char,
    /// LoRA scale; 1 is the scale of training.
    pub strength: f32,
}

/// Options of loading a model. Zeroes are the defaults.
#[repr(C)]
pub struct KvantModelOptions {
    /// `auto`, `cpu`, `cuda:N` or `wgpu:N`, or a list that the layers are split over, such as
    /// `cuda:0,cuda:1`; NULL is `auto`, the first NVIDIA GPU where one is usable, else the CPU.
    pub device: *const c_char,
    /// Worker threads; 0 is all cores.
    pub n_threads: usize,
    /// LoRA adapters of the model, `n_loras` of them; NULL is none.
    pub loras: *const KvantLora,
    /// Number of adapters.
    pub n_loras: usize,
    /// File of the vision encoder, llama.cpp's `mmproj-*.gguf`; NULL is none.
    pub mmproj: *const c_char,
}

/// A message of a conversation.
#[repr(C)]
pub struct KvantMessage {
    /// Role: `system`, `user`, `assistant`, or another role of the model's template.
    pub role: *const c_char,
    /// Text of the message.
    pub content: *const c_char,
    /// Images before the text, `n_images` of them, for a model with a vision encoder; NULL is
    /// none.
    pub images: *const KvantImage,
    /// Number of images.
    pub n_images: usize,
}

/// An image as a PNG, JPEG, WebP, GIF or BMP file.
#[repr(C)]
pub struct KvantImage {
    /// The bytes of the file.
    pub bytes: *const u8,
    /// Number of bytes.
    pub n_bytes: usize,
}

/// Converts the options of the model in `base`.
///
/// # Safety
/// `options` is NULL or valid.
unsafe fn open_options(
    options: *const KvantModelOptions,
    base: &Gguf,
) -> Result<OpenOptions<'static>, CallError> {
    // SAFETY: guaranteed by the caller.
    let Some(options) = (unsafe { options.as_ref() }) else { return Ok(OpenOptions::default()) };
    // SAFETY: a text or NULL, by the contract of this library.
    let device = unsafe { text_or_null(options.device, "device") }?;
    // SAFETY: as many values as declared, by the contract of this library.
    let loras = unsafe { values(options.loras, options.n_loras, "loras") }?;
    let open = |lora: &KvantLora| {
        // SAFETY: a text or NULL, by the contract of this library.
        let path = unsafe { text(lora.path, "path of an adapter") }?;
        Ok(LoraFile::new(open_lora(path, base)?, lora.strength))
    };
    // SAFETY: a text or NULL, by the contract of this library.
    let mmproj = unsafe { text_or_null(options.mmproj, "mmproj") }?;
    Ok(OpenOptions {
        mmproj: mmproj.map(|path| open_file(path).map(Arc::new)).transpose()?,
        device: device.map_or_else(|| Ok(DeviceList::default()), str::parse)?,
        n_threads: Some(options.n_threads).filter(|&n| n > 0),
        loras: loras.iter().map(open).collect::<Result<_, CallError>>()?,
        ..Default::default()
    })
}

/// Loads a GGUF file (any shard of a split one). `options` may be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvant_model_open(
    path: *const c_char,
    options: *const KvantModelOptions,
    model: *mut *mut KvantModel,
    error: *mut *mut c_char,
) -> KvantStatus {
    // SAFETY: the pointers satisfy the contract of this library.
    unsafe {
        call(error, || {
            let (path, out_ptr) = (text(path, "path")?, out_ptr(model, "model")?);
            let gguf = open_file(path)?;
            let options = open_options(options, &gguf)?;
            let model = Model::from_gguf(gguf, options)?;
            out_ptr.write(Box::into_raw(Box::new(KvantModel(model))));
            Ok(())
        })
    }
}

/// Loads the small model that is built into this library. `options` may be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvant_model_bundled(
    options: *const KvantModelOptions,
    model: *mut *mut KvantModel,
    error: *mut *mut c_char,
) -> KvantStatus {
    // SAFETY: the pointers satisfy the contract of this library.
    unsafe {
        call(error, || {
            let out_ptr = out_ptr(model, "model")?;
            let gguf = Model::bundled_file()?;
            let options = open_options(options, &gguf)?;
            let model = Model::from_gguf(gguf, options)?;
            out_ptr.write(Box::into_raw(Box::new(KvantModel(model))));
            Ok(())
        })
    }
}

/// Frees a model; its sessions stay usable. NULL is ignored.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvant_model_free(model: *mut KvantModel) {
    if !model.is_null() {
        // SAFETY: it was made by `Box::into_raw` above and has not been freed.
        drop(unsafe { Box::from_raw(model) });
    }
}

/// Returns the vocabulary size; 0 for NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvant_model_n_vocab(model: *const KvantModel) -> usize {
    // SAFETY: NULL or a model of this library.
    unsafe { model.as_ref() }.map_or(0, |model| model.0.n_vocab())
}

/// Returns the dimensions of an embedding; 0 for NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvant_model_n_embd(model: *const KvantModel) -> usize {
    // SAFETY: NULL or a model of this library.
    unsafe { model.as_ref() }.map_or(0, |model| model.0.config().n_embd)
}

/// Computes the embedding of a text, with L2 norm 1, for search and comparison. Names of special
/// tokens in the text are parsed as those tokens. Writes the first `capacity` of
/// `kvant_model_n_embd` values. `pooling` is `mean`, `last` or, in a text encoder, `cls`; NULL is
/// the pooling of the model's file, or else `last`, in a text encoder `mean`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvant_model_embed(
    model: *const KvantModel,
    prompt: *const c_char,
    pooling: *const c_char,
    values: *mut f32,
    capacity: usize,
    error: *mut *mut c_char,
) -> KvantStatus {
    // SAFETY: the pointers satisfy the contract of this library.
    unsafe {
        call(error, || {
            let pooling = text_or_null(pooling, "pooling")?.map(str::parse).transpose()?;
            let options = EmbedOptions { pooling, ..Default::default() };
            let vectors = borrowed(model, "model")?.0.embed(&[text(prompt, "prompt")?], &options)?;
            copy(&vectors[0], values, capacity, "values")
        })
    }
}

/// Tokenizes a plain text, with a begin-of-text token where the model has one. Names of special
/// tokens are plain text. Writes the first `capacity` tokens to `tokens` and the number of all
/// tokens to `n_tokens`: a capacity of 0 returns the number alone.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvant_model_text_prompt(
    model: *const KvantModel,
    prompt: *const c_char,
    tokens: *mut u32,
    capacity: usize,
    n_tokens: *mut usize,
    error: *mut *mut c_char,
) -> KvantStatus {
    // SAFETY: the pointers satisfy the contract of this library.
    unsafe {
        call(error, || {
            let out_ptr = out_ptr(n_tokens, "n_tokens")?;
            let all = borrowed(model, "model")?.0.text_prompt(text(prompt, "prompt")?, Special::AsText)?;
            copy_counted(&all, tokens, capacity, "tokens", out_ptr)
        })
    }
}

/// Tokenizes a conversation in the model's own chat format, up to the start of the assistant's
/// turn. Writes tokens as `kvant_model_text_prompt` does.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvant_model_chat_prompt(
    model: *const KvantModel,
    messages: *const KvantMessage,
    n_messages: usize,
    tokens: *mut u32,
    capacity: usize,
    n_tokens: *mut usize,
    error: *mut *mut c_char,
) -> KvantStatus {
    // SAFETY: the pointers satisfy the contract of this library.
    unsafe {
        call(error, || {
            let out_ptr = out_ptr(n_tokens, "n_tokens")?;
            let model = &borrowed(model, "model")?.0;
            let c_messages = values(messages, n_messages, "messages")?.iter();
            let mut images = Vec::new();
            let messages = c_messages.map(|message| {
                let c_images = values(message.images, message.n_images, "images")?;
                for image in c_images {
                    images.push(model.encode_image(values(
                        image.bytes,
                        image.n_bytes,
                        "bytes of an image",
                    )?)?);
                }
                let converted = Message::new(text(message.role, "role")?, text(message.content, "content")?);
                Ok(converted.with_images(c_images.len()))
            });
            let messages = messages.collect::<Result<Vec<_>, CallError>>()?;
            let prompt = model.chat_prompt_with_media(&messages, &images)?;
            copy_counted(&prompt, tokens, capacity, "tokens", out_ptr)
        })
    }
}

/// Decodes tokens to a text, which `kvant_string_free` frees.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvant_model_decode(
    model: *const KvantModel,
    tokens: *const u32,
    n_tokens: usize,
    text: *mut *mut c_char,
    error: *mut *mut c_char,
) -> KvantStatus {
    // SAFETY: the pointers satisfy the contract of this library.
    unsafe {
        call(error, || {
            let out_ptr = out_ptr(text, "text")?;
            let tokens = values(tokens, n_tokens, "tokens")?;
            out_ptr.write(owned_text(borrowed(model, "model")?.0.tokenizer()?.decode(tokens)));
            Ok(())
        })
    }
}
