//! A model and its conversations, advanced in small steps.

use std::borrow::Cow;

use kvant::gguf::TensorInfo;
use kvant::{
    CancelFlag, DeviceChoice, Error, FinishReason, GenerateOptions, GenerationState, Gguf, KvOptions, Model,
    OpenOptions, RenderOptions, Requirements, Session, SessionOptions,
};
use serde::Serialize;
use serde_json::json;

use crate::error::WebError;
use crate::generation_request::{GenerationRequest, defaults};

/// Prompt tokens per call, which bounds the time until the page can respond.
const PREFILL_CHUNK: usize = 32;
/// Maximum of conversations with a cache, so that they continue without another prefill.
const MAX_CONVERSATIONS: usize = 4;
/// Tensors that stay in host memory where the others go to a GPU: single rows are looked up.
const LOOKUP_TENSORS: [&str; 2] = ["token_embd.weight", "per_layer_token_embd.weight"];
/// Bytes reserved for activations and allocator overhead.
const SPARE: usize = 192 << 20;
const MIB: usize = 1 << 20;

/// A model, its conversations, and at most one running answer.
pub struct Engine {
    model: Model,
    /// Byte budget of all KV caches together.
    budget: usize,
    /// The conversations, the most recently used last; an answer runs in that one.
    conversations: Vec<Conversation>,
    answer: Option<Answer>,
}

struct Conversation {
    kv: KvOptions,
    session: Session,
}

/// A running answer.
struct Answer {
    prompt: Vec<u32>,
    /// Prompt tokens found in the cache.
    cached: usize,
    options: GenerateOptions,
    /// `None` during prefill.
    generation: Option<GenerationState>,
}

/// Description of a model for the page.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct About {
    /// Name in the file, if any.
    pub name: Option<String>,
    /// Context length in tokens.
    pub n_ctx: usize,
    /// Name of the device.
    pub device: String,
    /// Name of its kernels.
    pub kernels: String,
    /// Default types of keys and values.
    pub types: [&'static str; 2],
    /// Default temperature.
    pub temperature: f32,
    /// Default `top_p`.
    pub top_p: f32,
}

/// Result of one step.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Event {
    /// Prefill progress.
    Read {
        /// Tokens of the prompt.
        total: usize,
        /// Prompt tokens found in the cache.
        cached: usize,
        /// Prompt tokens in the cache now.
        done: usize,
    },
    /// A generated token: the text completed by it.
    #[serde(rename = "said")]
    Text(String),
    /// The answer has ended.
    Finished(Finished),
}

/// Results of an answer.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Finished {
    /// Text withheld because its last character is incomplete.
    pub text: String,
    /// `stop`, or `length` at a limit.
    pub reason: &'static str,
    /// Tokens of the prompt.
    pub prompt: usize,
    /// Prompt tokens found in the cache.
    pub cached: usize,
    /// Generated tokens.
    #[serde(rename = "said")]
    pub n_generated: usize,
    /// Bytes of the conversation's cache.
    pub bytes: usize,
    /// Bytes of an f16 cache of the same tokens.
    pub bytes_f16: usize,
}

/// Sizes of the KV caches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Kv {
    /// Bytes allocated; shared blocks count once.
    pub bytes: usize,
    /// Bytes of the conversation with the running answer.
    pub running_bytes: usize,
    /// Bytes of an f16 cache of the same tokens.
    pub running_bytes_f16: usize,
    /// Bytes of the other conversations, each counted in full.
    pub idle_bytes: usize,
    /// Bytes of f16 caches of the same tokens.
    pub idle_bytes_f16: usize,
    /// Idle conversations.
    pub idle: usize,
    /// Byte budget.
    pub budget: usize,
}

impl Engine {
    /// Opens the model of a file, on the CPU or on the first adapter. `available` is the
    /// memory in bytes that it may take.
    ///
    /// # Errors
    /// A file without a tokenizer or a chat template, of an unsupported family or type, or too
    /// large; a missing adapter, or one that fails to generate a token.
    pub fn open(gguf: Gguf, available: usize, on_gpu: bool) -> Result<Self, WebError> {
        let needed = needed(&gguf, on_gpu);
        if needed > available {
            return Err(WebError::Memory { needed: needed / MIB, room: available / MIB });
        }
        let device = if on_gpu { DeviceChoice::Wgpu(0) } else { DeviceChoice::Cpu }.into();
        let needs = Requirements::ChatTemplate;
        let options = OpenOptions { device, n_threads: Some(1), needs, ..OpenOptions::default() };
        let model = Model::from_gguf(gguf, options)?;
        let budget = if on_gpu { gpu_budget()? } else { available - needed };
        model.set_kv_budget(budget);
        let mut engine = Self { model, budget, conversations: Vec::new(), answer: None };
        if on_gpu {
            engine.warm_up()?;
        }
        Ok(engine)
    }

    /// Generates a token, to detect kernels that a GPU rejects before the first request, and to
    /// compile the others.
    fn warm_up(&mut self) -> Result<(), WebError> {
        let messages = vec![json!({ "role": "user", "content": "Hello" })];
        self.begin(&GenerationRequest { messages, max_tokens: Some(1), ..GenerationRequest::default() })?;
        while !matches!(self.step()?, Event::Finished(_)) {}
        self.conversations.clear();
        Ok(())
    }

    /// Describes the model.
    ///
    /// # Errors
    /// A file with invalid sampling defaults.
    pub fn about(&self) -> Result<About, WebError> {
        let name = self.model.gguf().meta().text_lossy("general.name");
        let (device, sampler) = (self.model.device(), defaults(&self.model)?);
        let kv = GenerationRequest::default().kv()?;
        Ok(About {
            name: name.map(Cow::into_owned),
            n_ctx: self.model.config().n_ctx_train,
            device: device.name,
            kernels: device.kernels,
            types: [kv.k.name(), kv.v.name()],
            temperature: sampler.temperature,
            top_p: sampler.top_p,
        })
    }

    /// Begins an answer; a running one ends. A continued conversation needs no prefill of its
    /// cached prefix.
    ///
    /// # Errors
    /// An invalid request, or a conversation that does not fit.
    pub fn begin(&mut self, request: &GenerationRequest) -> Result<(), WebError> {
        self.answer = None;
        let options = request.options(&self.model)?;
        let render =
            RenderOptions { add_generation_prompt: true, now: Some(request.now), ..RenderOptions::default() };
        let text = self.model.chat_template()?.render(&request.messages, &render).map_err(Error::from)?;
        let prompt = self.model.rendered_prompt(&text)?;
        let mut conversation = self.take_conversation(request, &prompt)?;
        let n_ctx = conversation.session.n_ctx();
        let cached = if prompt.len() <= n_ctx { conversation.session.reuse_prefix(&prompt) } else { 0 };
        self.conversations.push(conversation);
        if prompt.len() > n_ctx {
            return Err(Error::PromptTooLong { tokens: prompt.len(), n_ctx }.into());
        }
        self.answer = Some(Answer { prompt, cached, options, generation: None });
        Ok(())
    }

    /// Takes the conversation that `prompt` continues from the list: one with the same KV types of
    /// which at least half is reused, or a new one.
    fn take_conversation(
        &mut self,
        request: &GenerationRequest,
        prompt: &[u32],
    ) -> Result<Conversation, WebError> {
        let same =
            |session: &Session| session.tokens().iter().zip(prompt).take_while(|(a, b)| a == b).count();
        let kv = request.kv()?;
        let continues = |conversation: &Conversation| {
            conversation.kv == kv && 2 * same(&conversation.session) >= conversation.session.tokens().len()
        };
        let best = (0..self.conversations.len()).filter(|&i| continues(&self.conversations[i]));
        if let Some(index) = best.max_by_key(|&i| same(&self.conversations[i].session)) {
            return Ok(self.conversations.remove(index));
        }
        if self.conversations.len() == MAX_CONVERSATIONS {
            self.conversations.remove(0);
        }
        let options = SessionOptions { kv: kv.clone(), ..SessionOptions::default() };
        Ok(Conversation { kv, session: self.model.session(options)? })
    }

    /// Advances the answer by a step: prefills a piece of the prompt, or generates a token.
    ///
    /// # Errors
    /// No running answer, or an error of the engine, which ends the answer.
    pub fn step(&mut self) -> Result<Event, WebError> {
        let event = self.advance();
        if !matches!(event, Ok(Event::Read { .. } | Event::Text(_))) {
            self.answer = None;
        }
        event
    }

    fn advance(&mut self) -> Result<Event, WebError> {
        let answer = self.answer.as_mut().ok_or(WebError::NoAnswer)?;
        let session = &mut self.conversations.last_mut().ok_or(WebError::NoAnswer)?.session;
        let Answer { prompt, cached, options, generation } = answer;
        let generation = match generation {
            Some(generation) => generation,
            None => {
                let (total, cached, n_cached) = (prompt.len(), *cached, session.tokens().len());
                // The last token is left to the generation.
                let n = (total - 1).saturating_sub(n_cached).min(PREFILL_CHUNK);
                if n > 0 {
                    session.feed(&prompt[n_cached..n_cached + n], &mut |_| true)?;
                    return Ok(Event::Read { total, cached, done: n_cached + n });
                }
                let state = session.begin(prompt, options.clone(), &CancelFlag::default(), &mut |_| ())?;
                generation.insert(state)
            }
        };
        if let Some(token) = generation.next(session) {
            return Ok(Event::Text(token?.text));
        }
        let (stats, kv, text) = (generation.stats(), session.kv(), generation.finish_text());
        let reason = if stats.finish == Some(FinishReason::Stop) { "stop" } else { "length" };
        let (prompt, cached, n_generated) = (prompt.len(), *cached, stats.n_gen);
        let (bytes, bytes_f16) = (kv.bytes, kv.bytes_f16);
        Ok(Event::Finished(Finished { text, reason, prompt, cached, n_generated, bytes, bytes_f16 }))
    }

    /// Stops the answer.
    pub fn stop(&mut self) {
        self.answer = None;
    }

    /// Returns the sizes of the KV caches.
    pub fn kv(&self) -> Kv {
        let running = self.answer.iter().count();
        let (idle, busy) = self.conversations.split_at(self.conversations.len() - running);
        let sum = |conversations: &[Conversation]| {
            let kv = conversations.iter().map(|conversation| conversation.session.kv());
            kv.fold((0, 0), |(bytes, f16), kv| (bytes + kv.bytes, f16 + kv.bytes_f16))
        };
        let ((running_bytes, running_bytes_f16), (idle_bytes, idle_bytes_f16)) = (sum(busy), sum(idle));
        Kv {
            bytes: self.model.kv_bytes(),
            running_bytes,
            running_bytes_f16,
            idle_bytes,
            idle_bytes_f16,
            idle: idle.len(),
            budget: self.budget,
        }
    }
}

/// Returns the bytes of memory that the model of a file takes, on the CPU or beside a GPU, at most.
fn needed(gguf: &Gguf, on_gpu: bool) -> usize {
    let stays_in_memory = |info: &&TensorInfo| !on_gpu || LOOKUP_TENSORS.contains(&info.name.as_str());
    let sum =
        gguf.tensors().iter().filter(stays_in_memory).map(|info| info.n_bytes).fold(0, usize::saturating_add);
    // A tensor exists twice during loading; on the CPU the embedding stays, and may also be an
    // output matrix.
    let largest = gguf.tensors().iter().map(|info| info.n_bytes).max().unwrap_or(0);
    sum.saturating_add(largest.saturating_mul(2)).saturating_add(SPARE)
}

/// Returns the byte budget of all caches on the first adapter: its largest binding.
fn gpu_budget() -> Result<usize, WebError> {
    let max_binding = kvant::devices::adapters()?.first().map_or(0, |adapter| adapter.details.max_binding);
    Ok(usize::try_from(max_binding).unwrap_or(usize::MAX))
}

#[cfg(test)]
mod tests {
    use kvant::{Message, SamplerParams};
    use serde_json::Value;

    use super::*;

    const ROOM: usize = 3 << 30;

    fn engine() -> Engine {
        Engine::open(Model::bundled_file().unwrap(), ROOM, false).unwrap()
    }

    fn request(messages: Value, kv_type: &str) -> GenerationRequest {
        let request = json!({ "messages": messages, "kv_type": kv_type, "temperature": 0, "max_tokens": 60 });
        serde_json::from_value(request).unwrap()
    }

    fn user(text: &str) -> Value {
        json!([{ "role": "user", "content": text }])
    }

    /// Returns the whole answer, and its results.
    fn answer(engine: &mut Engine, request: &GenerationRequest) -> (String, Finished) {
        engine.begin(request).unwrap();
        let mut text = String::new();
        loop {
            match engine.step().unwrap() {
                Event::Read { total, cached, done } => assert!(cached <= done && done < total),
                Event::Text(piece) => text += &piece,
                Event::Finished(finished) => return (text + &finished.text, finished),
            }
        }
    }

    #[test]
    fn stepwise_answers_equal_those_of_the_engine() {
        let (model, mut engine) = (Model::bundled(OpenOptions::default()).unwrap(), engine());
        // The second question is prefilled in several pieces.
        let long = format!("Remember: {}What is the capital of Peru?", "the sky is blue. ".repeat(20));
        for question in ["What is the capital of France?", &long] {
            for kv_type in ["turbo3", "q8_0/turbo4"] {
                let request = request(user(question), kv_type);
                let options = SessionOptions { kv: request.kv().unwrap(), ..SessionOptions::default() };
                let mut session = model.session(options).unwrap();
                let prompt = session.chat_prompt(&[Message::user(question)]).unwrap();
                let greedy = GenerateOptions {
                    max_tokens: Some(60),
                    sampler: SamplerParams::greedy(),
                    ..GenerateOptions::default()
                };
                let expected: String =
                    session.generate(&prompt, greedy).unwrap().map(|token| token.unwrap().text).collect();
                let (text, finished) = answer(&mut engine, &request);
                assert_eq!(text, expected, "{kv_type}");
                assert!(!text.is_empty() && finished.reason == "stop");
                assert_eq!((finished.prompt, finished.bytes), (prompt.len(), session.kv().bytes));
            }
        }
    }

    #[test]
    fn conversations_continue_from_their_own_caches() {
        let mut engine = engine();
        let (france, first) = answer(&mut engine, &request(user("What is the capital of France?"), "turbo3"));
        assert_eq!(first.cached, 0);
        answer(&mut engine, &request(user("Count to five."), "turbo3"));
        let mut messages = user("What is the capital of France?");
        let more = json!([{ "role": "assistant", "content": france }, { "role": "user", "content": "And of Peru?" }]);
        messages.as_array_mut().unwrap().extend(more.as_array().unwrap().clone());
        let (_, second) = answer(&mut engine, &request(messages.clone(), "turbo3"));
        assert!(second.cached > first.prompt && second.cached < second.prompt, "{second:?}");
        let (_, other) = answer(&mut engine, &request(messages, "f16"));
        assert_eq!(other.cached, 0, "another kind of cache has not read it");
        assert!(other.bytes > second.bytes && other.bytes == other.bytes_f16);
        let kv = engine.kv();
        assert_eq!((kv.idle, kv.running_bytes), (3, 0));
        assert!(kv.bytes > 0 && kv.bytes <= kv.idle_bytes && kv.idle_bytes < kv.idle_bytes_f16);
        for word in ["one", "two", "three", "four", "five"] {
            answer(&mut engine, &request(user(word), "turbo2"));
        }
        assert_eq!(engine.kv().idle, MAX_CONVERSATIONS);
    }

    #[test]
    fn an_answer_is_stopped_and_the_next_one_begins() {
        let mut engine = engine();
        engine.begin(&request(user("Count to five."), "turbo3")).unwrap();
        while !matches!(engine.step().unwrap(), Event::Text(_)) {}
        assert!(engine.kv().running_bytes > 0);
        engine.stop();
        assert!(matches!(engine.step(), Err(WebError::NoAnswer)));
        let (text, _) = answer(&mut engine, &request(user("Count to five."), "turbo3"));
        assert!(text.contains("four"), "{text}");
        let (text, finished) = answer(
            &mut engine,
            &GenerationRequest { max_tokens: Some(2), ..request(user("Count to five."), "turbo3") },
        );
        assert_eq!((finished.reason, finished.n_generated), ("length", 2), "{text}");
    }

    #[test]
    fn invalid_or_oversized_requests_are_refused_with_one_line() {
        let small = Engine::open(Model::bundled_file().unwrap(), SPARE, false).map(|_| ()).unwrap_err();
        let small = small.to_string();
        assert_eq!(small, "the model needs 198 MiB of memory, 192 MiB are available");
        // Beside a GPU the embedding stays, and exists twice more during loading.
        let [here, beside] = [false, true].map(|on_gpu| needed(&Model::bundled_file().unwrap(), on_gpu));
        assert!(here > beside);
        assert_eq!(beside, SPARE + 3 * 1_114_112);
        let mut engine = engine();
        let refused =
            |engine: &mut Engine, request: &GenerationRequest| engine.begin(request).unwrap_err().to_string();
        let error = refused(&mut engine, &request(user("x"), "turbo9"));
        assert!(
            error.starts_with("kv_type: expected a KV type (f32 ") && error.ends_with("got turbo9"),
            "{error}"
        );
        let error = refused(&mut engine, &request(user(&"word ".repeat(5000)), "turbo3"));
        assert!(error.contains("the context holds 2048"), "{error}");
        let hot = GenerationRequest { temperature: Some(-1.0), ..request(user("x"), "turbo3") };
        assert!(refused(&mut engine, &hot).contains("temperature"));
        assert!(
            answer(&mut engine, &request(user("What is the capital of Peru?"), "turbo3")).0.contains("Lima")
        );
    }

    #[test]
    fn an_adapter_gives_the_answer_of_the_cpu() {
        if kvant::devices::adapters().unwrap().is_empty() {
            assert!(std::env::var_os("KVANT_REQUIRE_WGPU").is_none(), "there is no adapter");
            return eprintln!("skipped: an_adapter_gives_the_answer_of_the_cpu: there is no adapter");
        }
        let mut on_gpu = Engine::open(Model::bundled_file().unwrap(), ROOM, true).unwrap();
        assert_eq!(on_gpu.about().unwrap().device, "wgpu:0");
        assert_eq!((on_gpu.kv().bytes, on_gpu.kv().idle), (0, 0), "nothing is left of the first token");
        let request = request(user("What is the capital of France?"), "turbo3");
        assert_eq!(answer(&mut on_gpu, &request), answer(&mut engine(), &request));
    }

    #[test]
    fn about_describes_the_model() {
        let about = engine().about().unwrap();
        assert_eq!((about.name.as_deref(), about.n_ctx), (Some("kvant-pocket"), 2048));
        assert_eq!((about.device.as_str(), about.types), ("cpu", ["turbo3"; 2]));
    }
}
