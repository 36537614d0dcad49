//! Runs large language models on a compressed KV cache.
//!
//! # Chat
//!
//! ```
//! use kvant::{GenerateOptions, KvOptions, Message, Model, SamplerParams, SessionOptions};
//!
//! # fn main() -> Result<(), kvant::Error> {
//! let model = Model::bundled(Default::default())?; // or Model::open("model.gguf")?
//! let kv = KvOptions::symmetric("turbo3".parse()?);
//! let mut session = model.session(SessionOptions { kv, ..Default::default() })?;
//! let prompt = model.chat_prompt(&[Message::user("What is the capital of France?")])?;
//! let options = GenerateOptions { sampler: SamplerParams::greedy(), ..Default::default() };
//! let mut answer = String::new();
//! for token in session.generate(&prompt, options)? {
//!     answer += &token?.text;
//! }
//! assert!(answer.contains("Paris"));
//! println!("{answer} ({} bytes of KV cache)", session.kv().bytes);
//! # Ok(())
//! # }
//! ```
//!
//! A [`Model`] is cheap to clone and serves any number of [`Session`]s; a session owns one KV
//! cache. Weights, cache types and the device are chosen once; [`Model::device`] reports the device
//! and kernels in use.
//!
//! | task | items |
//! |---|---|
//! | load | [`Model::open`], [`Model::bundled`], [`OpenOptions`], [`DeviceChoice`], [`LoraFile`] |
//! | KV cache | [`KvOptions`], [`DType`], [`Policy`], [`KvPlan`], [`KvBalance`], [`Session::kv`] |
//! | chat | [`Message`], [`Model::chat_prompt`], [`ChatTemplate`], [`RenderOptions`] |
//! | generate | [`Session::generate`], [`GenerateOptions`], [`SamplerParams`], [`CancelFlag`] |
//! | tools, reasoning | [`Session::answer`], [`TurnOptions`], [`ToolSet`], [`Conversation`] |
//! | several answers | [`Session::answers`], [`Answers`] |
//! | token by token | [`Session::feed`], [`Session::sample`], [`Session::logits`], [`Sampler`] |
//! | batch | [`Session::step_batch`], [`BatchItem`], [`Session::fork`], [`Session::rewind`] |
//! | speculative decoding | [`Drafter`], [`Session::draft`], [`Session::verify`] |
//! | files | [`Session::save`], [`Model::load_session`], [`SavedSession`] |
//! | embeddings, reranking | [`Model::embed`], [`EmbedOptions`], [`Reranker`] |
//! | vision, audio | [`Model::encode_image`], [`Model::encode_audio`], [`EncodedMedia`] |
//! | devices | [`devices`], [`DeviceChoice`], [`DeviceList`], [`tuning`] |
//! | measurements | [`Session::feed_scored`], [`Measure`] |
//!
//! # Stream
//!
//! [`Session::generate`] yields text as it is decoded; a [`CancelFlag`] ends it from another
//! thread.
//!
//! ```
//! # fn main() -> Result<(), kvant::Error> {
//! # let model = kvant::Model::bundled(Default::default())?;
//! let mut session = model.session(Default::default())?;
//! let prompt = model.tokenizer()?.encode_exact("Once upon a time")?;
//! let options = kvant::GenerateOptions { max_tokens: Some(8), ..Default::default() };
//! let mut generation = session.generate(&prompt, options)?;
//! for token in generation.by_ref() {
//!     print!("{}", token?.text);
//! }
//! println!(" ({:.0} tok/s)", generation.stats().decode_tps());
//! # Ok(())
//! # }
//! ```
//!
//! # Tools and reasoning
//!
//! [`Session::answer`] yields the answer to a turn in parts: text, reasoning and tool calls, whose
//! arguments match the schemas of their tools. [`TurnOptions`] has the tools, the tool choice and
//! the reasoning budget; a [`Conversation`] takes any fields that a template reads.
//!
//! ```
//! use kvant::{Conversation, GenerateOptions, Model, ToolChoice, ToolSet, TurnOptions};
//! use serde_json::json;
//! # fn main() -> Result<(), kvant::Error> {
//! # let model = Model::bundled(Default::default())?;
//! let city = json!({ "type": "object", "properties": { "city": { "enum": ["Oslo", "Rome"] } },
//!     "required": ["city"], "additionalProperties": false });
//! let tool = json!({ "type": "function", "function": { "name": "weather", "parameters": city } });
//! let mut messages = vec![json!({ "role": "user", "content": "How is the weather in Oslo?" })];
//! let mut session = model.session(Default::default())?;
//! for choice in [ToolChoice::Required, ToolChoice::None] {
//!     let tools = ToolSet::new(vec![tool.clone()], &choice)?;
//!     let options = TurnOptions { tools, ..Default::default() };
//!     let conversation = Conversation::new(messages.clone(), options, model.chat_template()?)?;
//!     let turn = model.turn(&conversation, Vec::new())?;
//!     let options = GenerateOptions { max_tokens: Some(100), ..Default::default() };
//!     let answer = session.answer(&turn, options)?.parsed()?;
//!     messages.push(answer.message());
//!     for (index, call) in answer.calls.iter().enumerate() {
//!         assert_eq!(call.name, "weather");
//!         println!("{} {}", call.name, call.arguments);
//!         let id = format!("call_{index}");
//!         messages.push(json!({ "role": "tool", "tool_call_id": id, "content": "Rain." }));
//!     }
//!     println!("{}", answer.text);
//! }
//! assert_eq!(messages.len(), 4); // question, call, result, answer
//! # Ok(())
//! # }
//! ```
//!
//! # Structured output
//!
//! An [`OutputFormat`] constrains a text to a JSON schema, a regular expression or a grammar.
//!
//! ```
//! use kvant::{GenerateOptions, Message, OutputFormat};
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let model = kvant::Model::bundled(Default::default())?;
//! let schema = r#"{ "type": "object", "properties": {
//!     "city": { "enum": ["Paris", "Rome"] }, "size": { "type": "integer", "maximum": 9 } },
//!     "required": ["city", "size"], "additionalProperties": false }"#;
//! let format = Some(OutputFormat::json_schema(schema)?);
//! let mut session = model.session(Default::default())?;
//! let prompt = model.chat_prompt(&[Message::user("What is the capital of France?")])?;
//! let mut answer = String::new();
//! for token in session.generate(&prompt, GenerateOptions { format, ..Default::default() })? {
//!     answer += &token?.text;
//! }
//! let answer: serde_json::Value = serde_json::from_str(&answer)?;
//! assert!(answer["city"] == "Paris" || answer["city"] == "Rome");
//! # Ok(())
//! # }
//! ```
//!
//! # Several answers
//!
//! [`Session::answers`] feeds the prompt once; each answer has a fork of the session, and one batch
//! serves all.
//!
//! ```
//! use kvant::{CancelFlag, GenerateOptions, Message, Part, TurnOptions};
//! # fn main() -> Result<(), kvant::Error> {
//! # let model = kvant::Model::bundled(Default::default())?;
//! let mut session = model.session(Default::default())?;
//! let turn = model.chat_turn(&[Message::user("Name a colour.")], TurnOptions::default())?;
//! let options = GenerateOptions { max_tokens: Some(16), ..Default::default() };
//! let mut texts = vec![String::new(); 3];
//! for part in session.answers(&turn, 3, options, &CancelFlag::default(), &mut |_| ())? {
//!     if let (index, Part::Text(text)) = part? {
//!         texts[index] += &text;
//!     }
//! }
//! assert!(texts.iter().all(|text| !text.is_empty()));
//! # Ok(())
//! # }
//! ```
//!
//! # Batch
//!
//! One pass over the weights serves many sessions, prefill beside decode; the bits of each do not
//! depend on the others.
//!
//! ```
//! use kvant::{BatchItem, Sampler, SamplerParams, Session};
//! # fn main() -> Result<(), kvant::Error> {
//! # let model = kvant::Model::bundled(Default::default())?;
//! let tokenizer = model.tokenizer()?;
//! let mut sessions = [model.session(Default::default())?, model.session(Default::default())?];
//! let prompts = [tokenizer.encode_exact("The sun is")?, tokenizer.encode_exact("One, two,")?];
//! let items = sessions.iter_mut().zip(&prompts);
//! let items = items.map(|(session, prompt)| BatchItem::new(session, prompt));
//! Session::step_batch(&mut items.collect::<Vec<_>>())?;
//! let mut sampler = Sampler::new(SamplerParams::greedy());
//! for session in &mut sessions {
//!     println!("{}", tokenizer.decode(&[session.sample(&mut sampler)?]));
//! }
//! # Ok(())
//! # }
//! ```
//!
//! # Save and restore
//!
//! A context file holds the tokens and the cache, bit for bit.
//!
//! ```
//! # fn main() -> Result<(), kvant::Error> {
//! # let model = kvant::Model::bundled(Default::default())?;
//! # let path = std::env::temp_dir().join(format!("kvant-guide-{}.kvctx", std::process::id()));
//! let mut session = model.session(Default::default())?;
//! session.feed(&model.tokenizer()?.encode_exact("A long text")?, &mut |_| true)?;
//! session.save(&path)?;
//! let restored = model.load_session(&path, None)?;
//! assert_eq!(restored.tokens(), session.tokens());
//! # std::fs::remove_file(path).unwrap();
//! # Ok(())
//! # }
//! ```
//!
//! # Embeddings
//!
//! ```
//! # fn main() -> Result<(), kvant::Error> {
//! # let model = kvant::Model::bundled(Default::default())?;
//! let vectors = model.embed(&["a cat", "a dog"], &Default::default())?;
//! let cosine: f32 = vectors[0].iter().zip(&vectors[1]).map(|(a, b)| a * b).sum();
//! println!("{cosine:.2}");
//! # Ok(())
//! # }
//! ```
//!
//! # Vision and audio
//!
//! ```no_run
//! use kvant::{Message, Model, OpenOptions};
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let mmproj = Some(kvant::open_file("mmproj.gguf")?.into());
//! let model = Model::open_with("model.gguf", OpenOptions { mmproj, ..Default::default() })?;
//! let image = model.encode_image(&std::fs::read("photo.jpg")?)?;
//! let message = Message::user("What is this?").with_media([image.kind()]);
//! let prompt = model.chat_prompt_with_media(&[message], &[image])?;
//! # Ok(())
//! # }
//! ```
#![forbid(unsafe_code)]

mod answer;
mod answers;
mod bundled;
mod clock;
mod constraint;
mod context_file;
pub mod devices;
mod draft;
mod embed;
mod encoder;
mod error;
mod fingerprint;
mod generation;
mod kv_guard;
mod lora_file;
mod media;
mod model;
mod plan_file;
mod profile;
mod prompt;
mod rerank;
mod runtime;
mod session;
mod turn;

pub use answer::{Answer, AnswerState};
pub use answers::Answers;
pub use context_file::{ContextFileError, SavedSession};
pub use devices::{DeviceChoice, DeviceList, tuning};
pub use embed::{EmbedOptions, HiddenStatePool, Pooling};
pub use error::Error;
pub use generation::{
    CancelFlag, FinishReason, GenerateOptions, Generation, GenerationState, GenerationStats, Token,
};
pub use kvant_audio::AudioError;
pub use kvant_backend::{
    BackendError, DeviceInfo, KernelChoice, PREFIX_ALIGNMENT, Pairing, RopeParams, TOKENS_PER_BLOCK, limits,
};
pub use kvant_codec::DType;
pub use kvant_cpu::PrefillPrecision;
pub use kvant_files as files;
pub use kvant_generate as generate;
pub use kvant_generate::constraint::OutputFormat;
pub use kvant_generate::conversation::{Conversation, ToolChoice, ToolSet, TurnOptions};
pub use kvant_generate::output_parser::{Call, ParsedAnswer, Part};
pub use kvant_generate::sampler::{
    Dry, Dynatemp, Mirostat, MirostatVersion, SampleError, Sampler, SamplerParams, SequenceBreakers, Xtc,
};
pub use kvant_generate::sampling_defaults::SamplingDefaults;
pub use kvant_generate::speculative::{Drafter, MAX_DRAFT_TOKENS};
pub use kvant_gguf::{self as gguf, Gguf};
pub use kvant_hf::{self as hf, HfError};
pub use kvant_kv::{
    ChannelScales, GuardReport, GuardSample, HeadTypes, KeyPool, KvError, KvGuard, KvLayerShape, KvShape,
    LayerScales, Plan, Policies, Policy, TableRule, WeightStatistics, balance_factors, five_digits,
};
pub use kvant_model::{Config, ExpertSpec, InputStatistics, LayerRange, LayerSpec, LogitsFor, ModelError};
pub use kvant_text::chat::{self, ChatTemplate, MediaKind, Message, RenderOptions, Rendered, TemplateError};
pub use kvant_text::tokenizer::{self, DecodeStream, Special, Tokenizer};
pub use kvant_vision::VisionError;
pub use lora_file::{LoraFile, open_lora};
pub use media::{EncodeOptions, EncodedMedia, check_mmproj};
pub use model::{Model, OpenOptions, Requirements, open_file};
pub use plan_file::{Certificate, KvPlan, PlanFileError, added_kld};
pub use rerank::Reranker;
pub use runtime::StageTime;
pub use session::{BatchItem, KvBalance, KvOptions, KvUse, Measure, SequenceStep, Session, SessionOptions};
pub use turn::Turn;
