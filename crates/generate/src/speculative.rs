//! Prompt-lookup drafter: proposes the tokens that followed the longest earlier match.
//!
//! Text repeats itself: edited code, quoted documents, names, JSON keys. *Prompt lookup* (Saxena
//! 2023; Yang et al., arXiv 2304.04487) finds the longest suffix of the text that occurred before
//! and proposes the tokens that followed it. Memory-bound decoding verifies several draft tokens in
//! hardly more time than it takes to decode one: *speculative decoding* (Leviathan et al., arXiv
//! 2211.17192) without a draft model.
//!
//! A model may also have a layer for multi-token prediction (MTP, DeepSeek-V3, arXiv 2412.19437).
//! Its predictions are draft tokens too. They take time to compute, so they are requested only
//! where prompt lookup has a lower expected speedup.
//!
//! Tokens are sampled from the model's own logits one by one, so drafting changes the speed of a
//! response but never its content. The draft length adapts during generation: a draft token with
//! acceptance probability p, given that all before it are accepted, yields p tokens and costs one
//! more token in the batch.

use std::time::Duration;

/// Maximum draft tokens per step: with the token before them eight rows, beyond which matrix
/// products of few rows slow down.
pub const MAX_DRAFT_TOKENS: usize = 7;

/// Longer matches predict no better than this length.
const MAX_MATCH: usize = 32;

/// Prior acceptance rates by match length: up to 1, 2, 4, 8, 16 tokens, and more.
const PRIOR_ACCEPTANCE: [f32; 6] = [0.05, 0.2, 0.4, 0.6, 0.8, 0.9];

/// Prior acceptance rates of MTP tokens by logit margin: up to 0.5, 1.5, 3, 6, and more.
const PRIOR_MTP_ACCEPTANCE: [f32; 5] = [0.4, 0.55, 0.7, 0.85, 0.95];
const LOGIT_MARGINS: [f32; 4] = [0.5, 1.5, 3.0, 6.0];
/// Prior acceptance rate over all MTP tokens.
const PRIOR_MTP_ACCEPTANCE_ANY: f32 = 0.7;

/// Number of acceptance classes.
const N_CLASSES: usize = PRIOR_ACCEPTANCE.len() + PRIOR_MTP_ACCEPTANCE.len();

/// Weight of the latest observation in the acceptance estimates.
const ACCEPTANCE_EMA: f32 = 1.0 / 16.0;

/// Prior costs of a further row and of a prediction, relative to a step of one row.
const ROW_COST: f32 = 0.1;
const PREDICTION_COST: f32 = 0.15;

/// Number of steps without predictions after which one is requested regardless of its expected
/// speedup.
const MAX_STEPS_WITHOUT_PREDICTION: usize = 32;

/// Draft tokens of one sequence, with estimates of acceptance and cost.
#[derive(Debug, Clone)]
pub struct Drafter {
    /// Estimated acceptance rate of each class.
    acceptance: [f32; N_CLASSES],
    /// Estimated acceptance rate over all predictions.
    prediction_acceptance: f32,
    /// Seconds of a step of one row.
    base_step_seconds: Option<f32>,
    /// Cost of each further row and of a prediction, relative to a step of one row.
    row_cost: f32,
    prediction_cost: f32,
    /// Current draft tokens and the class of each.
    draft_tokens: Vec<u32>,
    classes: Vec<usize>,
    n_scored: usize,
    /// Steps since the last prediction.
    steps_since_prediction: usize,
    /// Time of predictions since the last step.
    predicting: Duration,
}

impl Default for Drafter {
    fn default() -> Self {
        let mut came_true = [0.0; N_CLASSES];
        came_true[..PRIOR_ACCEPTANCE.len()].copy_from_slice(&PRIOR_ACCEPTANCE);
        came_true[PRIOR_ACCEPTANCE.len()..].copy_from_slice(&PRIOR_MTP_ACCEPTANCE);
        Self {
            acceptance: came_true,
            prediction_acceptance: PRIOR_MTP_ACCEPTANCE_ANY,
            base_step_seconds: None,
            row_cost: ROW_COST,
            prediction_cost: PREDICTION_COST,
            draft_tokens: Vec::with_capacity(MAX_DRAFT_TOKENS),
            classes: Vec::with_capacity(MAX_DRAFT_TOKENS),
            n_scored: 0,
            steps_since_prediction: 0,
            predicting: Duration::ZERO,
        }
    }
}

impl Drafter {
    /// Drafts continuations of `tokens` and `next`. Returns the prefix with the best expected
    /// throughput, at most `max_tokens` or [`MAX_DRAFT_TOKENS`] tokens, often none.
    pub fn draft(&mut self, tokens: &[u32], next: u32, max_tokens: usize) -> &[u32] {
        self.draft_from_lookup(tokens, next);
        self.draft_tokens(max_tokens)
    }

    /// Drafts the tokens that followed the longest earlier match of the text ending in `next`.
    pub fn draft_from_lookup(&mut self, tokens: &[u32], next: u32) {
        self.clear_draft();
        let Some((at, length)) = longest_match(tokens, next) else { return };
        let class = (length.ilog2() as usize + usize::from(!length.is_power_of_two()))
            .min(PRIOR_ACCEPTANCE.len() - 1);
        // Past the end of the text, the draft continues from itself, so that repetitions extend to
        // any length.
        let text = |draft_tokens: &[u32], at: usize| match at.checked_sub(tokens.len()) {
            None => tokens[at],
            Some(0) => next,
            Some(beyond) => draft_tokens[beyond - 1],
        };
        for i in 0..MAX_DRAFT_TOKENS {
            let draft_token = text(&self.draft_tokens, at + 1 + i);
            self.draft_tokens.push(draft_token);
            self.classes.push(class);
        }
    }

    /// Whether MTP has a higher expected speedup than the [prompt lookup](Self::draft_from_lookup)
    /// draft. If so, discards that draft.
    pub fn should_predict(&mut self, max_tokens: usize) -> bool {
        let speed = |n: usize| {
            let (tokens, _) = expected_tokens(std::iter::repeat_n(self.prediction_acceptance, n));
            tokens / (1.0 + (self.row_cost + self.prediction_cost) * n as f32)
        };
        let of_predictions = (1..=max_tokens.min(MAX_DRAFT_TOKENS)).map(speed).fold(0.0, f32::max);
        self.steps_since_prediction += 1;
        let should_predict = of_predictions > self.best_length(max_tokens).1
            || max_tokens > 0 && self.steps_since_prediction > MAX_STEPS_WITHOUT_PREDICTION;
        if should_predict {
            self.clear_draft();
            self.steps_since_prediction = 0;
        }
        should_predict
    }

    /// Appends a predicted token with logit margin `lead`. Returns whether a further prediction
    /// pays.
    pub fn push_prediction(&mut self, token: u32, lead: f32, max_tokens: usize) -> bool {
        let class = LOGIT_MARGINS.iter().filter(|&&margin| lead >= margin).count();
        self.draft_tokens.push(token);
        self.classes.push(PRIOR_ACCEPTANCE.len() + class);
        let (tokens, chance) = expected_tokens(self.classes.iter().map(|&class| self.acceptance[class]));
        let n = self.draft_tokens.len();
        let cost = 1.0 + (self.row_cost + self.prediction_cost) * n as f32;
        let more = chance * self.prediction_acceptance / (self.row_cost + self.prediction_cost);
        n < max_tokens.min(MAX_DRAFT_TOKENS) && more > tokens / cost
    }

    /// Returns the draft prefix with the best expected throughput, at most `max_tokens` tokens.
    pub fn draft_tokens(&self, max_tokens: usize) -> &[u32] {
        &self.draft_tokens[..self.best_length(max_tokens).0]
    }

    fn clear_draft(&mut self) {
        self.draft_tokens.clear();
        self.classes.clear();
        self.n_scored = 0;
    }

    /// Records the token sampled at the next draft position, and updates the acceptance estimates.
    pub fn observe(&mut self, token: u32) {
        let Some(&draft_token) = self.draft_tokens.get(self.n_scored) else { return };
        let came_true = f32::from(draft_token == token);
        let class = self.classes[self.n_scored];
        let learn = |known: &mut f32| *known += ACCEPTANCE_EMA * (came_true - *known);
        learn(&mut self.acceptance[class]);
        if class >= PRIOR_ACCEPTANCE.len() {
            learn(&mut self.prediction_acceptance);
        }
        self.n_scored += 1;
        if draft_token != token {
            self.clear_draft();
        }
    }

    /// Records the duration of a step of `rows` rows, including the predictions before it. Ignores
    /// a zero duration, as on platforms without a clock.
    pub fn observe_step_time(&mut self, rows: usize, time: Duration) {
        let seconds = time.saturating_sub(std::mem::take(&mut self.predicting)).as_secs_f32();
        if rows == 0 || seconds == 0.0 {
            return;
        }
        let Some(alone) = &mut self.base_step_seconds else {
            self.base_step_seconds = (rows == 1).then_some(seconds);
            return;
        };
        if rows == 1 {
            return approach(alone, seconds);
        }
        let cost = (seconds / *alone - 1.0) / (rows - 1) as f32;
        approach(&mut self.row_cost, cost.clamp(0.01, 1.0));
    }

    /// Records the duration of the predictions just made.
    pub fn observe_prediction_time(&mut self, time: Duration) {
        self.predicting = time;
        let seconds = time.as_secs_f32();
        if let Some(alone) = self.base_step_seconds.filter(|_| seconds > 0.0 && !self.draft_tokens.is_empty())
        {
            let cost = seconds / alone / self.draft_tokens.len() as f32;
            approach(&mut self.prediction_cost, cost.clamp(0.01, 1.0));
        }
    }

    /// Returns the draft length with the highest throughput, at most `max_tokens`, and its speedup
    /// over a step without draft tokens.
    fn best_length(&self, max_tokens: usize) -> (usize, f32) {
        let mut best = (0, 1.0_f32);
        let (mut tokens, mut chance) = (1.0, 1.0);
        for (index, &class) in self.classes.iter().take(max_tokens).enumerate() {
            let n = index + 1;
            chance *= self.acceptance[class];
            tokens += chance;
            let speed = tokens / (1.0 + self.row_cost * n as f32);
            if speed > best.1 {
                best = (n, speed);
            }
        }
        best
    }
}

/// Returns the expected number of tokens of a step and the probability that all draft tokens are
/// accepted, given each token's acceptance probability conditional on those before it.
fn expected_tokens(come_true: impl Iterator<Item = f32>) -> (f32, f32) {
    come_true.fold((1.0, 1.0), |(tokens, chance), p| (tokens + chance * p, chance * p))
}

/// Moves an estimate towards a sample by at most 5 %. It converges to the median of the samples, so
/// outliers have bounded influence.
fn approach(estimate: &mut f32, sample: f32) {
    const STEP: f32 = 1.05;
    *estimate = if sample > *estimate { sample.min(*estimate * STEP) } else { sample.max(*estimate / STEP) };
}

/// Returns the position of the latest longest match of the text ending in `next`, and the match
/// length in tokens.
fn longest_match(tokens: &[u32], next: u32) -> Option<(usize, usize)> {
    let mut best = None;
    let mut length = 0;
    for at in (0..tokens.len()).rev().filter(|&at| tokens[at] == next) {
        let before = tokens[..at].iter().rev().zip(tokens.iter().rev());
        let match_len = 1 + before.take(MAX_MATCH - 1).take_while(|(a, b)| a == b).count();
        if match_len > length {
            (best, length) = (Some(at), match_len);
        }
        if match_len == MAX_MATCH {
            break;
        }
    }
    best.map(|at| (at, length))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn draft(text: &[u32]) -> Vec<u32> {
        let (next, tokens) = text.split_last().unwrap();
        let mut drafter = Drafter { acceptance: [1.0; N_CLASSES], ..Drafter::default() };
        drafter.draft(tokens, *next, usize::MAX).to_vec()
    }

    #[test]
    fn the_continuation_of_the_longest_match_is_drafted() {
        assert!(draft(&[1, 2, 3]).is_empty());
        assert!(draft(&[7]).is_empty());
        // 2 was followed by 3 and 9; 1 2 only by 3.
        assert_eq!(draft(&[1, 2, 3, 4, 5, 6, 7, 8, 2, 9, 1, 2])[..4], [3, 4, 5, 6]);
        // Of two matches of equal length, the later one.
        assert_eq!(draft(&[5, 6, 1, 5, 7, 2, 5])[..2], [7, 2]);
        // A match may reach back to the first token.
        assert_eq!(draft(&[4, 8, 3, 4])[..2], [8, 3]);
    }

    #[test]
    fn repetitions_are_drafted_at_any_length() {
        assert_eq!(draft(&[3, 1, 2, 1, 2, 1]), [2, 1, 2, 1, 2, 1, 2]);
        assert_eq!(draft(&[9, 9]), [9; MAX_DRAFT_TOKENS]);
        let long: Vec<u32> = (0..50).chain(0..50).chain(0..10).collect();
        assert_eq!(draft(&long), [10, 11, 12, 13, 14, 15, 16]);
    }

    /// One-token matches that are never accepted stop being drafted, are still scored, and resume
    /// once accepted.
    #[test]
    fn lookup_drafts_stop_when_they_do_not_pay() {
        let mut drafter = Drafter::default();
        let tokens = [7, 1, 2, 3, 7];
        let n_draft_tokens = |drafter: &mut Drafter, drawn: u32| {
            let n = drafter.draft(&tokens, 1, usize::MAX).len();
            drafter.observe(drawn);
            n
        };
        assert!(n_draft_tokens(&mut drafter, 9) > 0);
        (0..40).for_each(|_| _ = n_draft_tokens(&mut drafter, 9));
        assert_eq!(n_draft_tokens(&mut drafter, 9), 0);
        (0..60).for_each(|_| _ = n_draft_tokens(&mut drafter, 2));
        assert_eq!(n_draft_tokens(&mut drafter, 2), MAX_DRAFT_TOKENS);
        assert_eq!(drafter.draft(&tokens, 1, 3).len(), 3);
    }

    /// If a row costs half a step, a draft token needs a higher acceptance rate than if it costs
    /// nothing.
    #[test]
    fn row_cost_limits_the_draft_length() {
        let ms = Duration::from_millis;
        let mut drafter = Drafter::default();
        (0..300).for_each(|_| {
            drafter.observe_step_time(1, ms(10));
            drafter.observe_step_time(5, ms(30));
        });
        assert!((drafter.row_cost - 0.5).abs() < 0.03, "{}", drafter.row_cost);
        drafter.acceptance = [0.3; N_CLASSES];
        assert!(drafter.draft(&[1, 2], 1, usize::MAX).is_empty());
        // A single delayed step changes the estimate little.
        drafter.observe_step_time(1, ms(1000));
        assert!(drafter.base_step_seconds.unwrap() < 0.011);
        (0..300).for_each(|_| drafter.observe_step_time(5, ms(10)));
        assert!(!drafter.draft(&[1, 2], 1, usize::MAX).is_empty());
        // Zero durations change no estimate.
        let mut timeless = Drafter::default();
        timeless.observe_step_time(1, Duration::ZERO);
        timeless.observe_step_time(3, Duration::ZERO);
        assert_eq!((timeless.base_step_seconds, timeless.row_cost), (None, ROW_COST));
    }

    /// Predictions are requested while they beat prompt lookup, stop where the next one does not
    /// pay, and are retried after a while.
    #[test]
    fn predictions_stop_when_they_do_not_pay() {
        // Requests predictions with this margin until they end. Returns how many were made and how
        // many pay.
        fn draft_counts(drafter: &mut Drafter, text: &[u32], lead: f32, max_tokens: usize) -> [usize; 2] {
            let (next, tokens) = text.split_last().unwrap();
            drafter.draft_from_lookup(tokens, *next);
            let mut n = 0;
            if drafter.should_predict(max_tokens) {
                n = 1;
                while drafter.push_prediction(7, lead, max_tokens) {
                    n += 1;
                }
            }
            [n, drafter.draft_tokens(max_tokens).len()]
        }
        let mut drafter = Drafter::default();
        assert_eq!(draft_counts(&mut drafter, &[1, 2], 9.0, 3), [3, 3]);
        assert_eq!(draft_counts(&mut drafter, &[1, 2], 9.0, 0), [0, 0]);
        // A low-margin prediction is the last.
        assert_eq!(draft_counts(&mut drafter, &[1, 2], 0.1, 7)[0], 1);
        // Repetitive text favours prompt lookup.
        let repeated: Vec<u32> = (0..20).chain(0..20).collect();
        assert_eq!(draft_counts(&mut drafter, &repeated, 9.0, 7), [0, 7]);
        // Predictions that are never accepted stop and are retried.
        let mut predicted = Vec::new();
        for _ in 0..200 {
            predicted.push(draft_counts(&mut drafter, &[1, 2], 9.0, 7)[0] > 0);
            drafter.observe(8);
        }
        assert!(!predicted[100..].iter().all(|&predicted| predicted) && predicted[100..].contains(&true));
        // A prediction that takes as long as a step never pays.
        let mut slow = Drafter::default();
        slow.observe_step_time(1, Duration::from_millis(10));
        for _ in 0..200 {
            slow.draft_from_lookup(&[1], 2);
            slow.push_prediction(7, 9.0, 1);
            slow.observe_prediction_time(Duration::from_millis(10));
            // Its time is not part of the step's.
            slow.observe_step_time(1, Duration::from_millis(20));
        }
        assert!(slow.prediction_cost > 0.9 && slow.base_step_seconds.unwrap() < 0.0101, "{slow:?}");
        assert_eq!(draft_counts(&mut slow, &[1, 2], 9.0, 7), [0, 0]);
    }

    /// Draft tokens that were not used are still scored, token by token up to the first mismatch.
    #[test]
    fn draft_tokens_are_scored_up_to_the_first_mismatch() {
        let mut drafter = Drafter::default();
        drafter.draft(&[1, 2, 3, 4], 1, 0);
        let before = drafter.acceptance[0];
        drafter.observe(2);
        let once = drafter.acceptance[0];
        drafter.observe(9);
        let wrong = drafter.acceptance[0];
        drafter.observe(4);
        assert!(once > before && wrong < once && drafter.acceptance[0] == wrong);
    }
}
