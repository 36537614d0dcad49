//! Responses: from the events of a request to `vllm.GenerateResponse`s.

use kvant::generate::decoding::{FinalOutput, Finish, TokenLogprobs, TokenOutput};

use super::messages::{
    CandidateTokenInfo, FinishInfo, FinishReason, GenerateResponse, PromptInfo, ResponseOptions,
    SequenceOutput, StopReason, TokenInfo,
};
use crate::http::ApiError;
use crate::worker::Event;

/// What a response holds.
pub(super) struct ReplyOptions {
    prompt_token_ids: bool,
    /// Whether the first response waits for the logprobs of the prompt.
    pub prompt_logprobs: bool,
    output_text: bool,
    output_token_ids: bool,
    output_logprobs: bool,
}

impl From<&ResponseOptions> for ReplyOptions {
    fn from(response: &ResponseOptions) -> Self {
        Self {
            prompt_token_ids: response.prompt_token_ids,
            prompt_logprobs: response.prompt_logprobs,
            output_text: response.output_text.unwrap_or(true),
            output_token_ids: response.output_token_ids,
            output_logprobs: response.output_logprobs,
        }
    }
}

/// Answer that is being sent.
#[derive(Debug, Clone, Copy, Default)]
struct Sent {
    n_tokens: u32,
    has_ended: bool,
}

/// Assembles responses. See the [module](self).
pub(super) struct Reply {
    options: ReplyOptions,
    prompt: Vec<u32>,
    /// Stop strings and stop tokens of the request.
    stop: Vec<String>,
    stop_tokens: Vec<u32>,
    answers: Vec<Sent>,
    has_begun: bool,
    /// Parameters for a decode worker.
    kv_transfer: Option<Vec<u8>>,
}

impl Reply {
    pub fn new(
        options: ReplyOptions,
        prompt: Vec<u32>,
        n: usize,
        stop: Vec<String>,
        stop_tokens: Vec<u32>,
    ) -> Self {
        let answers = vec![Sent::default(); n];
        Self { options, prompt, stop, stop_tokens, answers, has_begun: false, kv_transfer: None }
    }

    /// Sets the parameters with which a decode worker fetches the cache of the prompt.
    pub fn set_kv_transfer(&mut self, params: Option<Vec<u8>>) {
        self.kv_transfer = params;
    }

    /// Reports whether all answers have ended.
    pub fn has_ended(&self) -> bool {
        self.answers.iter().all(|answer| answer.has_ended)
    }

    /// Returns the first response, with the prompt, unless the logprobs of the prompt are awaited.
    pub fn begin(&mut self) -> Option<GenerateResponse> {
        (!self.options.prompt_logprobs).then(|| self.prompt_info(&[]))
    }

    /// Returns the response to an event; `None` for an event that is not sent.
    ///
    /// # Errors
    /// A failed request.
    pub fn receive(&mut self, event: Option<Event>) -> Result<Option<GenerateResponse>, ApiError> {
        let outputs = match event {
            Some(Event::Accepted | Event::Prefilled(_) | Event::Pooled(_)) => None,
            Some(Event::Scored(_, logprobs)) => {
                // Once, not for each of several answers.
                return Ok((!self.has_begun).then(|| self.prompt_info(&logprobs)));
            }
            Some(Event::Token(index, TokenOutput { token, text, logprobs })) => {
                Some(self.output(index, text, Some(token), &logprobs))
                    .filter(|output| output.num_tokens > 0 || !output.text.is_empty())
            }
            Some(Event::Ended(index, finish, FinalOutput { text, logprobs }, times)) => {
                let output = self.output(index, text, None, &logprobs);
                let finish_info = Some(self.finish_info(index, Some(finish), times.end_token));
                Some(SequenceOutput { finish_info, ..output })
            }
            Some(Event::Refused(refusal)) => return Err(refusal.into()),
            Some(Event::Failed { why, is_of_request }) => return Err(ApiError::failed(why, is_of_request)),
            None => return Err(ApiError::shutting_down()),
        };
        Ok(outputs.map(|outputs| GenerateResponse { prompt_info: None, outputs: Some(outputs) }))
    }

    /// Ends all answers. Returns the last response of each.
    pub fn abort(&mut self) -> Vec<GenerateResponse> {
        let open: Vec<usize> =
            (0..self.answers.len()).filter(|&index| !self.answers[index].has_ended).collect();
        let last = |index| {
            let finish_info = Some(self.finish_info(index, None, None));
            let outputs = SequenceOutput { index: index as u32, finish_info, ..Default::default() };
            GenerateResponse { prompt_info: None, outputs: Some(outputs) }
        };
        open.into_iter().map(last).collect()
    }

    fn prompt_info(&mut self, scored: &[TokenLogprobs]) -> GenerateResponse {
        self.has_begun = true;
        let mut info = PromptInfo { num_prompt_tokens: self.prompt.len() as u32, ..Default::default() };
        if self.options.prompt_logprobs {
            // Lists are aligned with the tokens, and the first one has no logprob.
            info.logprobs = std::iter::once(0.0).chain(scored.iter().map(|of| of.token.logprob)).collect();
            info.ranks = std::iter::once(0).chain(scored.iter().map(|of| of.rank)).collect();
            let first = CandidateTokenInfo::default();
            info.candidate_tokens = std::iter::once(first).chain(scored.iter().map(candidates)).collect();
        }
        let prompt = std::mem::take(&mut self.prompt);
        info.token_ids = if self.options.prompt_token_ids { prompt } else { Vec::new() };
        GenerateResponse { prompt_info: Some(info), outputs: None }
    }

    /// Returns new output of an answer. With logprobs, a token is sent with its own, once its text
    /// is final: lists of one response are aligned. Tokens of an excluded stop string have none and
    /// are not sent.
    fn output(
        &mut self,
        index: usize,
        text: String,
        token: Option<u32>,
        logprobs: &[TokenLogprobs],
    ) -> SequenceOutput {
        let tokens: Vec<u32> = match self.options.output_logprobs {
            true => logprobs.iter().map(|of| of.token.token).collect(),
            false => token.into_iter().collect(),
        };
        let num_tokens = tokens.len() as u32;
        self.answers[index].n_tokens += num_tokens;
        let text = if self.options.output_text { text } else { String::new() };
        let token_ids = if self.options.output_token_ids { tokens } else { Vec::new() };
        let logprobs = if self.options.output_logprobs { logprobs } else { &[] };
        SequenceOutput {
            index: index as u32,
            text,
            num_tokens,
            token_ids,
            logprobs: logprobs.iter().map(|of| of.token.logprob).collect(),
            ranks: logprobs.iter().map(|of| of.rank).collect(),
            candidate_tokens: logprobs.iter().map(candidates).collect(),
            finish_info: None,
        }
    }

    /// Ends an answer; `None` for one that was aborted.
    fn finish_info(&mut self, index: usize, finish: Option<Finish>, end_token: Option<u32>) -> FinishInfo {
        let answer = &mut self.answers[index];
        answer.has_ended = true;
        let stop_token = end_token.map(|token| match self.stop_tokens.contains(&token) {
            true => StopReason::StopTokenId(token),
            false => StopReason::EosTokenId(token),
        });
        let (finish_reason, stop_reason) = match finish {
            None => (FinishReason::Aborted, None),
            Some(Finish::Length) => (FinishReason::Length, None),
            Some(Finish::Stop) => (FinishReason::Stop, stop_token),
            Some(Finish::Word(at)) => {
                (FinishReason::Stop, self.stop.get(at).cloned().map(StopReason::StopString))
            }
        };
        FinishInfo {
            num_output_tokens: answer.n_tokens,
            finish_reason: finish_reason.into(),
            stop_reason,
            kv_transfer_params: self.kv_transfer.clone(),
        }
    }
}

/// Returns the most probable tokens at a position, without the token there.
fn candidates(logprobs: &TokenLogprobs) -> CandidateTokenInfo {
    let ranked = logprobs.top.iter().zip(1..);
    let others = ranked.filter(|(top, _)| top.token != logprobs.token.token);
    let tokens = others.map(|(top, rank)| TokenInfo { id: top.token, logprob: top.logprob, rank });
    CandidateTokenInfo { tokens: tokens.collect() }
}

/// Joins the responses of one answer.
pub(super) fn joined(responses: Vec<GenerateResponse>) -> GenerateResponse {
    let (mut prompt_info, mut all) = (None, SequenceOutput::default());
    for response in responses {
        prompt_info = prompt_info.or(response.prompt_info);
        if let Some(output) = response.outputs {
            all.text += &output.text;
            all.num_tokens += output.num_tokens;
            all.token_ids.extend(output.token_ids);
            all.logprobs.extend(output.logprobs);
            all.ranks.extend(output.ranks);
            all.candidate_tokens.extend(output.candidate_tokens);
            all.finish_info = all.finish_info.or(output.finish_info);
        }
    }
    GenerateResponse { prompt_info, outputs: Some(all) }
}

#[cfg(test)]
mod tests {
    use kvant::generate::decoding::Logprob;

    use super::*;
    use crate::status::AnswerStats;

    fn reply(response: &ResponseOptions, n: usize) -> Reply {
        Reply::new(response.into(), vec![1, 2, 3], n, vec!["end".to_owned()], vec![9])
    }

    fn logprobs(token: u32, rank: u32) -> TokenLogprobs {
        let top = [(7, -0.5), (8, -1.5)].map(|(token, logprob)| Logprob { token, logprob });
        TokenLogprobs { token: Logprob { token, logprob: -1.5 }, rank, top: top.to_vec() }
    }

    fn token(index: usize, token: u32, text: &str, logprobs: Vec<TokenLogprobs>) -> Option<Event> {
        Some(Event::Token(index, TokenOutput { token, text: text.to_owned(), logprobs }))
    }

    fn ended(index: usize, finish: Finish, end_token: Option<u32>) -> Option<Event> {
        let times = AnswerStats { end_token, ..AnswerStats::default() };
        Some(Event::Ended(index, finish, FinalOutput::default(), times))
    }

    fn output(reply: &mut Reply, event: Option<Event>) -> SequenceOutput {
        reply.receive(event).unwrap().unwrap().outputs.unwrap()
    }

    #[test]
    fn the_first_response_holds_the_prompt() {
        let mut plain = reply(&ResponseOptions::default(), 1);
        let info = PromptInfo { num_prompt_tokens: 3, ..Default::default() };
        assert_eq!(plain.begin().unwrap().prompt_info, Some(info));
        let options = ResponseOptions { prompt_token_ids: true, prompt_logprobs: true, ..Default::default() };
        let mut scored = reply(&options, 2);
        assert_eq!(scored.begin(), None);
        let event = || Some(Event::Scored(0..2, [logprobs(8, 2), logprobs(4, 30)].into()));
        let info = scored.receive(event()).unwrap().unwrap().prompt_info.unwrap();
        assert_eq!((info.token_ids, info.logprobs), (vec![1, 2, 3], vec![0.0, -1.5, -1.5]));
        assert_eq!(info.ranks, [0, 2, 30]);
        let ids = |of: &CandidateTokenInfo| of.tokens.iter().map(|token| token.id).collect::<Vec<_>>();
        assert_eq!(info.candidate_tokens.iter().map(ids).collect::<Vec<_>>(), [vec![], vec![7], vec![7, 8]]);
        assert_eq!(scored.receive(event()).unwrap(), None, "once");
    }

    #[test]
    fn tokens_and_text_are_sent_as_asked() {
        let options = ResponseOptions { output_token_ids: true, ..Default::default() };
        let mut of = reply(&options, 1);
        let first = output(&mut of, token(0, 5, "a", Vec::new()));
        assert_eq!((first.text.as_str(), first.num_tokens, first.token_ids), ("a", 1, vec![5]));
        // A token whose text is not final yet.
        let second = output(&mut of, token(0, 6, "", Vec::new()));
        assert_eq!((second.text.as_str(), second.num_tokens), ("", 1));
        let last = output(&mut of, ended(0, Finish::Length, None));
        assert_eq!(last.finish_info.unwrap().num_output_tokens, 2);
        let mut of = reply(&ResponseOptions { output_text: Some(false), ..Default::default() }, 1);
        let first = output(&mut of, token(0, 5, "a", Vec::new()));
        assert_eq!((first.text.as_str(), first.num_tokens, first.token_ids), ("", 1, vec![]));
    }

    #[test]
    fn a_token_is_sent_with_its_logprob() {
        let options = ResponseOptions { output_token_ids: true, output_logprobs: true, ..Default::default() };
        let mut of = reply(&options, 1);
        assert_eq!(of.receive(token(0, 5, "", Vec::new())).unwrap(), None);
        let two = output(&mut of, token(0, 7, "ab", vec![logprobs(5, 3), logprobs(7, 1)]));
        assert_eq!((two.num_tokens, two.token_ids, two.ranks), (2, vec![5, 7], vec![3, 1]));
        let others = [TokenInfo { id: 8, logprob: -1.5, rank: 2 }];
        assert_eq!(two.candidate_tokens[1].tokens, others);
        // The stop string's tokens are excluded with their logprobs.
        assert_eq!(of.receive(token(0, 6, "", Vec::new())).unwrap(), None);
        let last = output(&mut of, ended(0, Finish::Word(0), None)).finish_info.unwrap();
        assert_eq!(last.num_output_tokens, 2);
        assert_eq!(last.stop_reason, Some(StopReason::StopString("end".to_owned())));
    }

    #[test]
    fn the_reason_of_an_end_is_reported() {
        for (finish, token, reason, stop) in [
            (Finish::Length, None, FinishReason::Length, None),
            (Finish::Stop, Some(2), FinishReason::Stop, Some(StopReason::EosTokenId(2))),
            (Finish::Stop, Some(9), FinishReason::Stop, Some(StopReason::StopTokenId(9))),
            (Finish::Stop, None, FinishReason::Stop, None),
        ] {
            let mut of = reply(&ResponseOptions::default(), 1);
            let info = output(&mut of, ended(0, finish, token)).finish_info.unwrap();
            assert_eq!((info.finish_reason(), info.stop_reason), (reason, stop));
            assert!(of.has_ended());
        }
    }

    #[test]
    fn an_abort_ends_the_open_answers() {
        let mut of = reply(&ResponseOptions::default(), 2);
        output(&mut of, token(1, 5, "a", Vec::new()));
        output(&mut of, ended(0, Finish::Length, None));
        let last = of.abort();
        assert_eq!(last.len(), 1);
        let output = last[0].outputs.as_ref().unwrap();
        let info = output.finish_info.as_ref().unwrap();
        assert_eq!(
            (output.index, info.num_output_tokens, info.finish_reason()),
            (1, 1, FinishReason::Aborted)
        );
        assert!(of.has_ended() && of.abort().is_empty());
    }

    #[test]
    fn joined_responses_are_one_answer() {
        let options = ResponseOptions { output_token_ids: true, ..Default::default() };
        let mut of = reply(&options, 1);
        let events =
            [token(0, 5, "a", Vec::new()), token(0, 6, "b", Vec::new()), ended(0, Finish::Length, None)];
        let first = of.begin();
        let others = events.map(|event| of.receive(event).unwrap());
        let whole = joined(first.into_iter().chain(others.into_iter().flatten()).collect());
        assert_eq!(whole.prompt_info.unwrap().num_prompt_tokens, 3);
        let output = whole.outputs.unwrap();
        assert_eq!((output.text.as_str(), output.token_ids, output.num_tokens), ("ab", vec![5, 6], 2));
        assert_eq!(output.finish_info.unwrap().num_output_tokens, 2);
    }
}
