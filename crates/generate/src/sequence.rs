//! A sequence: the tokens of a prompt and of its answer, and what turns logits into more of them.

use kvant_text::tokenizer::Tokenizer;

use crate::decoding::{SampleResult, SamplingError, SequenceDecoder};
use crate::source::LogitSource;
use crate::speculative::Drafter;

/// Prompt, answer so far, decoder and drafter of one sequence. The model is elsewhere.
pub struct Sequence {
    /// Prompt and generated tokens.
    tokens: Vec<u32>,
    n_prompt: usize,
    decoder: SequenceDecoder,
    drafter: Drafter,
    drafts: DraftCounts,
}

/// Draft tokens of a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DraftCounts {
    /// Those that were verified.
    pub n_verified: usize,
    /// Those that were accepted.
    pub n_accepted: usize,
}

impl Sequence {
    /// Creates the sequence of a prompt.
    pub fn new(prompt: Vec<u32>, decoder: SequenceDecoder) -> Self {
        let (n_prompt, drafter, drafts) = (prompt.len(), Drafter::default(), DraftCounts::default());
        Self { tokens: prompt, n_prompt, decoder, drafter, drafts }
    }

    /// Returns the tokens of the prompt and of the answer so far, the last of which may not have
    /// been fed yet.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Returns the decoder.
    pub fn decoder(&self) -> &SequenceDecoder {
        &self.decoder
    }

    /// Returns the decoder to advance it.
    pub fn decoder_mut(&mut self) -> &mut SequenceDecoder {
        &mut self.decoder
    }

    /// Returns the counts of draft tokens.
    pub fn drafts(&self) -> DraftCounts {
        self.drafts
    }

    /// Returns the tokens and the drafter, which proposes what may follow them.
    pub fn drafting(&mut self) -> (&[u32], &mut Drafter) {
        (&self.tokens, &mut self.drafter)
    }

    /// Returns how many of the most probable tokens the next [`Sequence::sample`] needs behind all
    /// of the tokens; `None` if it needs all logits, to change them first.
    pub fn n_candidates(&mut self) -> Option<usize> {
        self.decoder.n_candidates(self.tokens.len())
    }

    /// Returns how many of `most` draft tokens are of use behind the last token: none behind the
    /// prompt, and none that the answer has no room for.
    pub fn max_draft_tokens(&self, most: usize) -> usize {
        match self.tokens.len() == self.n_prompt {
            true => 0,
            false => most.min(self.decoder.n_left().saturating_sub(1)),
        }
    }

    /// Records a fed token: whether it was an accepted draft token, and how many draft tokens were
    /// verified behind it.
    pub fn record_step(&mut self, is_accepted: bool, n_verified: usize) {
        self.drafts.n_accepted += usize::from(is_accepted);
        self.drafts.n_verified += n_verified;
    }

    /// Samples the token that follows the context of `source`, which holds all tokens of the
    /// sequence, and appends it.
    ///
    /// # Errors
    /// As [`SequenceDecoder::sample`].
    pub fn sample<S: LogitSource>(
        &mut self,
        source: &mut S,
        tokenizer: &Tokenizer,
    ) -> Result<SampleResult, SamplingError<S::Error>> {
        let sampled = self.decoder.sample(source, tokenizer)?;
        if let SampleResult::Token(output, _) = &sampled {
            self.tokens.push(output.token);
            self.drafter.observe(output.token);
        }
        Ok(sampled)
    }
}
