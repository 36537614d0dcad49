//! Answers to conversations, with tools and reasoning: JSON in, JSON out.

use std::ffi::{c_char, c_void};

use kvant::{
    CancelFlag, Conversation, GenerateOptions, GenerationStats, ParsedAnswer, Part, ToolChoice, ToolSet,
    Turn, TurnOptions,
};

use crate::ffi::{CallError, KvantStatus, borrowed, call, changed, out_ptr, owned_text, text, text_or_null};
use crate::generate::{KvantGenerateOptions, KvantGenerated, KvantOnText, call_on_text, to_c};
use crate::session::KvantSession;

/// A conversation, and what the model may do in its next turn. A member that is NULL or 0 has its
/// default.
#[repr(C)]
pub struct KvantChat {
    /// JSON list of messages, as in OpenAI's API: `role` and `content`, and `tool_calls` and
    /// `tool_call_id` of calls and their results.
    pub messages: *const c_char,
    /// JSON list of tools, as in OpenAI's API.
    pub tools: *const c_char,
    /// `none`, `auto` (default), `required`, or `{"name": ...}` with the name of a tool.
    pub tool_choice: *const c_char,
    /// Effort of the reasoning, for templates that read it; `none` disables reasoning.
    pub reasoning_effort: *const c_char,
    /// Maximum reasoning tokens; 0 is unlimited.
    pub reasoning_budget: usize,
}

impl KvantChat {
    /// Renders the turn.
    ///
    /// # Safety
    /// The pointers satisfy the contract of this library.
    unsafe fn turn(&self, model: &kvant::Model) -> Result<Turn, CallError> {
        // SAFETY: guaranteed by the caller.
        let (messages, tools, choice, effort) = unsafe {
            (
                text(self.messages, "messages")?,
                text_or_null(self.tools, "tools")?,
                text_or_null(self.tool_choice, "tool_choice")?,
                text_or_null(self.reasoning_effort, "reasoning_effort")?,
            )
        };
        let choice = choice.map_or(Ok(ToolChoice::Auto), str::parse)?;
        let options = TurnOptions {
            tools: ToolSet::from_json(tools.unwrap_or("[]"), &choice)?,
            reasoning_effort: effort.map(str::to_owned),
            reasoning_budget: Some(self.reasoning_budget).filter(|&n| n > 0),
            ..TurnOptions::default()
        };
        let conversation = Conversation::from_json(messages, options, model.chat_template()?)?;
        Ok(model.turn(&conversation, Vec::new())?)
    }
}

/// Feeds a conversation and generates its next message. `on_text` receives its content, without
/// reasoning and calls. `*message` becomes the JSON text of the message, to be appended to
/// `messages`: `content`, `reasoning_content` and `tool_calls`; free it with kvant_string_free.
/// `options`, `on_text`, `message` and `generated` may be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvant_session_chat(
    session: *mut KvantSession,
    chat: *const KvantChat,
    options: *const KvantGenerateOptions,
    on_text: KvantOnText,
    user: *mut c_void,
    message: *mut *mut c_char,
    generated: *mut KvantGenerated,
    error: *mut *mut c_char,
) -> KvantStatus {
    // SAFETY: the pointers satisfy the contract of this library.
    unsafe {
        call(error, || {
            let session = changed(session, "session")?;
            let turn = borrowed(chat, "chat")?.turn(session.0.model())?;
            let options = options.as_ref().map(|options| options.read()).transpose()?.unwrap_or_default();
            let send_text = |text: String| on_text.is_none_or(|on_text| call_on_text(text, on_text, user));
            let (answer, stats) = chat_with(session, &turn, options, send_text)?;
            if let Ok(out_ptr) = out_ptr(message, "message") {
                out_ptr.write(owned_text(answer.message().to_string()));
            }
            if let Ok(out_ptr) = out_ptr(generated, "generated") {
                out_ptr.write(to_c(stats));
            }
            Ok(())
        })
    }
}

fn chat_with(
    session: &mut KvantSession,
    turn: &Turn,
    options: GenerateOptions,
    send_text: impl Fn(String) -> bool,
) -> Result<(ParsedAnswer, GenerationStats), CallError> {
    let cancel = CancelFlag::default();
    let mut state = session.0.begin_answer(turn, options, &cancel, &mut |_| ())?;
    let mut answer = ParsedAnswer::default();
    while let Some(part) = state.next(&mut session.0).transpose()? {
        if let Part::Text(text) = &part
            && !cancel.is_cancelled()
            && !send_text(text.clone())
        {
            cancel.cancel();
        }
        answer.extend([part]);
    }
    Ok((answer, state.stats()))
}
