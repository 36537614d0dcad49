//! Turns of a conversation: the prompt, and how its answer is decoded, constrained and parsed.

use kvant_generate::conversation::{AnswerFormat, Conversation, ConversationError};

use crate::{EncodedImage, Error, Model};

/// The next turn of a [`Conversation`].
#[derive(Debug, Clone)]
pub struct Turn {
    /// Tokens of the prompt.
    pub tokens: Vec<u32>,
    /// Images of the prompt, which hold its rows until a session has been fed them.
    pub images: Vec<EncodedImage>,
    /// Format of the answer.
    pub answer: AnswerFormat,
}

impl From<ConversationError> for Error {
    fn from(error: ConversationError) -> Self {
        match error {
            ConversationError::Invalid(invalid) => {
                Self::Setting { name: invalid.name, expected: invalid.expected.to_owned(), got: invalid.got }
            }
            ConversationError::Template(error) => error.into(),
        }
    }
}

impl Model {
    /// Renders the prompt of the next turn of a conversation with these images, in order.
    ///
    /// # Errors
    /// As [`Model::image_prompt`].
    pub fn turn(&self, conversation: &Conversation, images: Vec<EncodedImage>) -> Result<Turn, Error> {
        let (rendered, tokens) =
            conversation.render(|messages, options| self.image_prompt(messages, options, &images))?;
        let (template, tokenizer) = (self.chat_template()?, self.tokenizer()?);
        let answer = conversation.answer_format::<Error>(rendered.as_str(), template, tokenizer)?;
        Ok(Turn { tokens, images, answer })
    }
}
