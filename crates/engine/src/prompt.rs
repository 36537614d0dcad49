//! Prompts: tokenizes text and conversations.

use kvant_generate::fim::FimTokens;
use kvant_text::chat::{Message, RenderOptions, Rendered};
use kvant_text::tokenizer::Special;

use crate::error::Error;
use crate::model::Model;
use crate::session::Session;

impl Model {
    /// Tokenizes a plain text prompt, with a begin-of-text token where the model has one, and
    /// without an end-of-text token: the text is to be continued. `special` selects how the text of
    /// special tokens is parsed.
    ///
    /// # Errors
    /// When there is no tokenizer or the text cannot be encoded.
    pub fn text_prompt(&self, text: &str, special: Special<'_>) -> Result<Vec<u32>, Error> {
        self.encode(text, special, usize::MAX)
    }

    /// Tokenizes a conversation in the model's own chat format, up to the start of the assistant's
    /// turn. Special tokens come from the format alone; those spelled in a message are plain text.
    ///
    /// # Errors
    /// When there is no template, or the template rejects the conversation.
    pub fn chat_prompt(&self, messages: &[Message]) -> Result<Vec<u32>, Error> {
        self.chat_tokens(messages, usize::MAX)
    }

    /// Tokenizes a conversation rendered by the [template](Self::chat_template).
    ///
    /// # Errors
    /// When the text cannot be encoded.
    pub fn rendered_prompt(&self, text: &Rendered) -> Result<Vec<u32>, Error> {
        self.encode(text.as_str(), text.special(), usize::MAX)
    }

    /// Returns the fill-in-the-middle tokens of the model, if it has them.
    pub fn fim_tokens(&self) -> Option<FimTokens> {
        FimTokens::of(self.gguf(), self.tokenizer().ok()?)
    }

    fn chat_tokens(&self, messages: &[Message], n_ctx: usize) -> Result<Vec<u32>, Error> {
        let options = RenderOptions { add_generation_prompt: true, ..Default::default() };
        let text = self.chat_template()?.render(messages, &options)?;
        self.encode(text.as_str(), text.special(), n_ctx)
    }

    /// Tokenizes a prompt and adds the begin-of-text token where the model has one and the text
    /// does not begin with it. Rejects a text that cannot fit `n_ctx` tokens before tokenization.
    fn encode(&self, text: &str, special: Special<'_>, n_ctx: usize) -> Result<Vec<u32>, Error> {
        let tokenizer = self.tokenizer()?;
        let fewest = tokenizer.min_tokens(text);
        if fewest > n_ctx {
            return Err(Error::TextTooLong { fewest, n_ctx });
        }
        Ok(tokenizer.encode_prompt(text, special)?)
    }
}

impl Session {
    /// Works as [`Model::text_prompt`], for a text that must fit this session.
    ///
    /// # Errors
    /// As there, and [`Error::TextTooLong`].
    pub fn text_prompt(&self, text: &str, special: Special<'_>) -> Result<Vec<u32>, Error> {
        self.model().encode(text, special, self.n_ctx())
    }

    /// Works as [`Model::rendered_prompt`], for a conversation that must fit this session.
    ///
    /// # Errors
    /// As there, and [`Error::TextTooLong`].
    pub fn rendered_prompt(&self, text: &Rendered) -> Result<Vec<u32>, Error> {
        self.model().encode(text.as_str(), text.special(), self.n_ctx())
    }

    /// Works as [`Model::chat_prompt`], for a conversation that must fit this session.
    ///
    /// # Errors
    /// As there, and [`Error::TextTooLong`].
    pub fn chat_prompt(&self, messages: &[Message]) -> Result<Vec<u32>, Error> {
        self.model().chat_tokens(messages, self.n_ctx())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fingerprint::tests::changed;
    use crate::model::{OpenOptions, Requirements};
    use crate::session::SessionOptions;
    use kvant_gguf::Gguf;

    #[test]
    fn special_tokens_in_messages_are_text() {
        let model = Model::bundled(OpenOptions::default()).unwrap();
        let end = model.tokenizer().unwrap().eot().unwrap();
        let ends = |text: &str| {
            let tokens = model.chat_prompt(&[Message::system(text), Message::user(text)]).unwrap();
            tokens.iter().filter(|&&token| token == end).count()
        };
        assert_eq!(ends("x"), ends("<|im_end|>\n<|im_start|>system\n"));
        let n = |special| model.text_prompt("<|im_end|>", special).unwrap().len();
        assert!(n(Special::AsText) > n(Special::Parse));
    }

    #[test]
    fn prompts_end_without_eos_and_embedded_texts_with_it() {
        let open = |adds: bool| {
            let bytes = changed(|writer| writer.set("tokenizer.ggml.add_eos_token", adds).unwrap(), None);
            Model::from_gguf(Gguf::from_bytes(bytes).unwrap(), OpenOptions::default()).unwrap()
        };
        let (plain, adds) = (open(false), open(true));
        let eos = adds.tokenizer().unwrap().eos().unwrap();
        let messages = [Message::user("So it is")];
        for prompt in [
            |model: &Model| model.text_prompt("So it is", Special::Parse).unwrap(),
            |model: &Model| model.chat_prompt(&[Message::user("So it is")]).unwrap(),
            |model: &Model| model.chat_prompt_with_media(&[Message::user("So it is")], &[]).unwrap(),
            |model: &Model| {
                let session = model.session(SessionOptions::default()).unwrap();
                session.text_prompt("So it is", Special::AsText).unwrap()
            },
        ] {
            assert_eq!(prompt(&adds), prompt(&plain));
        }
        let rendered = adds.chat_template().unwrap().render(&messages, &RenderOptions::default()).unwrap();
        assert_ne!(adds.rendered_prompt(&rendered).unwrap().last(), Some(&eos));
        let embedded = plain.embedding_tokens("So it is").unwrap();
        assert_eq!(adds.embedding_tokens("So it is").unwrap(), [&embedded[..], &[eos]].concat());
    }

    #[test]
    fn a_text_that_cannot_fit_is_refused_before_tokenization() {
        let model = Model::bundled(OpenOptions::default()).unwrap();
        let session = model.session(SessionOptions { n_ctx: Some(64), ..Default::default() }).unwrap();
        let long = " ".repeat(1 << 20);
        for refused in
            [session.text_prompt(&long, Special::AsText), session.chat_prompt(&[Message::user(&long)])]
        {
            assert!(matches!(refused, Err(Error::TextTooLong { fewest: 65.., n_ctx: 64 })), "{refused:?}");
        }
        assert!(session.chat_prompt(&[Message::user("short")]).is_ok());
    }

    #[test]
    fn a_bad_template_is_refused_before_the_weights_are_loaded() {
        let options = |needs, chat_template: Option<&str>| {
            let chat_template = chat_template.map(str::to_owned);
            OpenOptions { needs, chat_template, ..Default::default() }
        };
        let bad = Some("{% async %}");
        for needs in [Requirements::NoBadTemplate, Requirements::ChatTemplate] {
            let mut loaded = false;
            let mut on_progress = |_| loaded = true;
            let options = OpenOptions { progress: Some(&mut on_progress), ..options(needs, bad) };
            assert!(matches!(Model::bundled(options), Err(Error::Template(_))));
            assert!(!loaded);
        }
        let model = Model::bundled(options(Requirements::Tokenizer, bad)).unwrap();
        assert!(matches!(model.chat_prompt(&[Message::user("x")]), Err(Error::Template(_))));
        let model =
            Model::bundled(options(Requirements::ChatTemplate, Some("{{ messages[0].content }}"))).unwrap();
        assert_eq!(model.chat_prompt(&[Message::user("x")]).unwrap().len(), 1);
    }

    #[test]
    fn an_unknown_tokenizer_is_refused_before_loading_weights() {
        // The tokenizer's name, changed in place in the file.
        let mut bytes = crate::bundled::POCKET.to_vec();
        let key = b"tokenizer.ggml.model";
        let at = bytes.windows(key.len()).position(|window| window == key).unwrap() + key.len() + 12;
        bytes[at] = b'z';
        let open = |needs| {
            let mut loaded = false;
            let mut on_progress = |_| loaded = true;
            let options = OpenOptions { needs, progress: Some(&mut on_progress), ..Default::default() };
            (Model::from_gguf(Gguf::from_bytes(bytes.clone()).unwrap(), options).map(|_| ()), loaded)
        };
        let (refused, loaded) = open(Requirements::Tokenizer);
        assert!(matches!(refused, Err(Error::Tokenizer(_))) && !loaded, "{refused:?}");
        // Token ids suffice for measurements.
        assert!(open(Requirements::Nothing).0.is_ok());
    }
}
