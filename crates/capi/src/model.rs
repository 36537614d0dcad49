//! Models: opened, asked for tokens of texts, freed.

use std::ffi::c_char;
use std::sync::Arc;

use kvant::{
    DeviceChoice, EmbedOptions, Gguf, LoraFile, Message, Model, OpenOptions, Special, open_file, open_lora,
};

use crate::KvantStatus;
use crate::border::{
    Failure, borrowed, call, copy, copy_counted, owned_text, place, text, text_or_null, values,
};

/// A loaded model.
pub struct KvantModel(pub(crate) Model);

/// An adapter (LoRA), which changes a model.
#[repr(C)]
pub struct KvantLora {
    /// A GGUF file, or a folder as PEFT saves it.
    pub path: *const c_char,
    /// How much of it is added; 1 is what it was trained to.
    pub strength: f32,
}

/// How to load a model. Zeroes mean the defaults.
#[repr(C)]
pub struct KvantModelOptions {
    /// `auto`, `cpu`, `cuda:N` or `wgpu:N`; NULL is `auto`, the first NVIDIA GPU where one can be used, else the CPU.
    pub device: *const c_char,
    /// Threads to work with; 0 is all cores.
    pub n_threads: usize,
    /// Adapters of the model, `n_loras` of them; NULL is none.
    pub loras: *const KvantLora,
    /// How many there are.
    pub n_loras: usize,
    /// The file of the tower that makes tokens of pictures, `mmproj-*.gguf` of llama.cpp; NULL is none.
    pub mmproj: *const c_char,
}

/// What someone says in a conversation.
#[repr(C)]
pub struct KvantMessage {
    /// Who speaks: `system`, `user`, `assistant`, or what else the model's template knows.
    pub role: *const c_char,
    /// What is said.
    pub content: *const c_char,
    /// Pictures that are shown before that, `n_pictures` of them, for a model with a tower; NULL is none.
    pub pictures: *const KvantPicture,
    /// How many there are.
    pub n_pictures: usize,
}

/// A picture, as a PNG, JPEG, WebP, GIF or BMP file has it.
#[repr(C)]
pub struct KvantPicture {
    /// The bytes of the file.
    pub bytes: *const u8,
    /// How many there are.
    pub n_bytes: usize,
}

/// How to load the model in `base`.
///
/// # Safety
/// `options` is NULL or valid.
unsafe fn open_options(
    options: *const KvantModelOptions,
    base: &Gguf,
) -> Result<OpenOptions<'static>, Failure> {
    // SAFETY: as the caller promises.
    let Some(options) = (unsafe { options.as_ref() }) else { return Ok(OpenOptions::default()) };
    // SAFETY: a text or NULL, by the contract of this library.
    let device = unsafe { text_or_null(options.device, "device") }?;
    // SAFETY: as many as they say, by the contract of this library.
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
        device: device.map_or(Ok(DeviceChoice::Auto), str::parse)?,
        n_threads: Some(options.n_threads).filter(|&n| n > 0),
        loras: loras.iter().map(open).collect::<Result<_, Failure>>()?,
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
    // SAFETY: the pointers are as the contract of this library says.
    unsafe {
        call(error, || {
            let (path, place) = (text(path, "path")?, place(model, "model")?);
            let gguf = open_file(path)?;
            let options = open_options(options, &gguf)?;
            let model = Model::from_gguf(gguf, options)?;
            place.put(Box::into_raw(Box::new(KvantModel(model))));
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
    // SAFETY: the pointers are as the contract of this library says.
    unsafe {
        call(error, || {
            let place = place(model, "model")?;
            let gguf = Model::bundled_file()?;
            let options = open_options(options, &gguf)?;
            let model = Model::from_gguf(gguf, options)?;
            place.put(Box::into_raw(Box::new(KvantModel(model))));
            Ok(())
        })
    }
}

/// Frees a model; its sessions go on. NULL is gone over.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvant_model_free(model: *mut KvantModel) {
    if !model.is_null() {
        // SAFETY: it was made by `Box::into_raw` above and has not been freed.
        drop(unsafe { Box::from_raw(model) });
    }
}

/// Size of the vocabulary; 0 for NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvant_model_n_vocab(model: *const KvantModel) -> usize {
    // SAFETY: NULL or a model of ours.
    unsafe { model.as_ref() }.map_or(0, |model| model.0.n_vocab())
}

/// Values of a text's vector; 0 for NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvant_model_n_embd(model: *const KvantModel) -> usize {
    // SAFETY: NULL or a model of ours.
    unsafe { model.as_ref() }.map_or(0, |model| model.0.config().n_embd)
}

/// The vector of a text, in which special tokens mean what they are called, of length 1, for search and comparison: the first `capacity` of `kvant_model_n_embd` values are written.
/// `pooling` says what of the states of its tokens it is made of, `mean` or `last`; NULL is what the model's file says, or else `last`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvant_model_embed(
    model: *const KvantModel,
    prompt: *const c_char,
    pooling: *const c_char,
    values: *mut f32,
    capacity: usize,
    error: *mut *mut c_char,
) -> KvantStatus {
    // SAFETY: the pointers are as the contract of this library says.
    unsafe {
        call(error, || {
            let pooling = text_or_null(pooling, "pooling")?.map(str::parse).transpose()?;
            let options = EmbedOptions { pooling, ..Default::default() };
            let vectors = borrowed(model, "model")?.0.embed(&[text(prompt, "prompt")?], &options)?;
            copy(&vectors[0], values, capacity, "values")
        })
    }
}

/// Tokens of a plain text, with the model's begin-of-text token where it wants one. What looks like a special token in the text
/// is just text. The first `capacity` tokens are written to `tokens` and the number of all to `n_tokens`: a capacity of 0 asks
/// for the number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvant_model_text_prompt(
    model: *const KvantModel,
    prompt: *const c_char,
    tokens: *mut u32,
    capacity: usize,
    n_tokens: *mut usize,
    error: *mut *mut c_char,
) -> KvantStatus {
    // SAFETY: the pointers are as the contract of this library says.
    unsafe {
        call(error, || {
            let place = place(n_tokens, "n_tokens")?;
            let all = borrowed(model, "model")?.0.text_prompt(text(prompt, "prompt")?, Special::AsText)?;
            copy_counted(&all, tokens, capacity, "tokens", place)
        })
    }
}

/// Tokens of a conversation in the model's own chat format, ending where the assistant is to answer, written as by
/// `kvant_model_text_prompt`.
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
    // SAFETY: the pointers are as the contract of this library says.
    unsafe {
        call(error, || {
            let place = place(n_tokens, "n_tokens")?;
            let model = &borrowed(model, "model")?.0;
            let said = values(messages, n_messages, "messages")?.iter();
            let mut pictures = Vec::new();
            let said = said.map(|message| {
                let shown = values(message.pictures, message.n_pictures, "pictures")?;
                for picture in shown {
                    pictures.push(model.look(values(
                        picture.bytes,
                        picture.n_bytes,
                        "bytes of a picture",
                    )?)?);
                }
                let said = Message::new(text(message.role, "role")?, text(message.content, "content")?);
                Ok(said.with_pictures(shown.len()))
            });
            let said = said.collect::<Result<Vec<_>, Failure>>()?;
            let all = model.chat_prompt_with(&said, &pictures)?;
            copy_counted(&all, tokens, capacity, "tokens", place)
        })
    }
}

/// The text of tokens, to be freed with `kvant_string_free`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvant_model_decode(
    model: *const KvantModel,
    tokens: *const u32,
    n_tokens: usize,
    text: *mut *mut c_char,
    error: *mut *mut c_char,
) -> KvantStatus {
    // SAFETY: the pointers are as the contract of this library says.
    unsafe {
        call(error, || {
            let place = place(text, "text")?;
            let tokens = values(tokens, n_tokens, "tokens")?;
            place.put(owned_text(borrowed(model, "model")?.0.tokenizer()?.decode(tokens)));
            Ok(())
        })
    }
}
