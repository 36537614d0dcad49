//! Turns of a conversation: the prompt, and how its answer is decoded, constrained and parsed.

use kvant_generate::conversation::{
    AnswerFormat, Conversation, ConversationError, InvalidConversation, TurnOptions,
};
use kvant_text::chat::Message;
use serde_json::json;

use crate::error::Error;
use crate::media::EncodedMedia;
use crate::model::Model;

/// The next turn of a [`Conversation`].
#[derive(Debug, Clone, Default)]
pub struct Turn {
    /// Tokens of the prompt.
    pub tokens: Vec<u32>,
    /// Images and audio of the prompt, which hold its rows until a session has been fed them.
    pub media: Vec<EncodedMedia>,
    /// Format of the answer.
    pub answer: AnswerFormat,
}

impl From<Vec<u32>> for Turn {
    /// Returns the turn of a prompt whose answer is text.
    fn from(tokens: Vec<u32>) -> Self {
        Self { tokens, ..Self::default() }
    }
}

impl From<InvalidConversation> for Error {
    fn from(InvalidConversation { name, expected, got }: InvalidConversation) -> Self {
        Self::Setting { name, expected: expected.to_owned(), got }
    }
}

impl From<ConversationError> for Error {
    fn from(error: ConversationError) -> Self {
        match error {
            ConversationError::Invalid(error) => error.into(),
            ConversationError::Template(error) => error.into(),
        }
    }
}

impl Model {
    /// Renders the prompt of the next turn after these messages.
    ///
    /// # Errors
    /// As [`Conversation::new`] and [`Model::turn`].
    pub fn chat_turn(&self, messages: &[Message], options: TurnOptions) -> Result<Turn, Error> {
        let messages = messages.iter().map(|message| json!(message)).collect();
        self.turn(&Conversation::new(messages, options, self.chat_template()?)?, Vec::new())
    }

    /// Renders the prompt of the next turn of a conversation with these images and audio clips, in
    /// order.
    ///
    /// # Errors
    /// As [`Model::media_prompt`].
    pub fn turn(&self, conversation: &Conversation, media: Vec<EncodedMedia>) -> Result<Turn, Error> {
        let (rendered, tokens) =
            conversation.render(|messages, options| self.media_prompt(messages, options, &media))?;
        let (template, tokenizer) = (self.chat_template()?, self.tokenizer()?);
        let answer = conversation.answer_format::<Error>(rendered.as_str(), template, tokenizer)?;
        Ok(Turn { tokens, media, answer })
    }
}
