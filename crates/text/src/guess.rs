//! Which tokens may come next: those that came the last time.
//!
//! Texts repeat themselves: code that is edited, documents that are quoted, names, keys of JSON. *Prompt lookup* (Saxena 2023; Yang et al.,
//! arXiv 2304.04487) takes the longest end of a text that has occurred in it before and guesses what followed there. A model
//! that reads several tokens in hardly more time than one checks such guesses for next to nothing: *speculative decoding* (Leviathan et
//! al., arXiv 2211.17192) without a second model.
//!
//! A model may have a layer that predicts the token after the next (multi-token prediction, DeepSeek-V3, arXiv 2412.19437). Its predictions are guesses
//! too, which take time to make; they are asked for where the text promises less.
//!
//! Tokens are drawn from the model's logits whatever was guessed, one after the other, so that guesses change how long an answer takes and nothing
//! else. How many pay is found while it is made: a guess that comes true with probability p, after others that did, is worth a token p times, and
//! costs a row of a step.

use std::time::Duration;

/// The most tokens that are guessed at once: with the one before them eight rows, beyond which products of few rows slow down.
pub const MOST_GUESSES: usize = 7;

/// Longer matches say no more than this one.
const LONGEST_MATCH: usize = 32;

/// By the length of a match, up to 1, 2, 4, 8, 16 tokens and more: how often a guess comes true before any was seen.
const EXPECTED: [f32; 6] = [0.05, 0.2, 0.4, 0.6, 0.8, 0.9];

/// By how far the logit of a predicted token leads, up to 0.5, 1.5, 3, 6 and more: how often the prediction comes true before any was seen.
const EXPECTED_OF_LEADS: [f32; 5] = [0.4, 0.55, 0.7, 0.85, 0.95];
const LEADS: [f32; 4] = [0.5, 1.5, 3.0, 6.0];
/// The same of any prediction.
const EXPECTED_OF_ANY: f32 = 0.7;

/// Classes of guesses.
const N_CLASSES: usize = EXPECTED.len() + EXPECTED_OF_LEADS.len();

/// Share of what is known that the latest guess replaces.
const LEARNING: f32 = 1.0 / 16.0;

/// What a further row takes, in times of one, before any was measured, and what a prediction takes.
const ROW_COST: f32 = 0.1;
const PREDICTION_COST: f32 = 0.15;

/// Steps after which a prediction is asked for that may not pay.
const PATIENCE: usize = 32;

/// Guesses for one text, and what has come of them.
#[derive(Debug, Clone)]
pub struct Guesser {
    /// How often a guess comes true, by its class.
    came_true: [f32; N_CLASSES],
    /// The same of predictions of all classes.
    predicted_true: f32,
    /// Seconds of a step of one row.
    alone: Option<f32>,
    /// What each further row takes, in times of one alone, and what a prediction does.
    row_cost: f32,
    prediction_cost: f32,
    /// What may follow, as far as it has not been drawn yet, and the class of each.
    guesses: Vec<u32>,
    classes: Vec<usize>,
    n_drawn: usize,
    /// Steps since something was predicted.
    n_unasked: usize,
    /// What predictions took since a step was taken.
    predicting: Duration,
}

impl Default for Guesser {
    fn default() -> Self {
        let mut came_true = [0.0; N_CLASSES];
        came_true[..EXPECTED.len()].copy_from_slice(&EXPECTED);
        came_true[EXPECTED.len()..].copy_from_slice(&EXPECTED_OF_LEADS);
        Self {
            came_true,
            predicted_true: EXPECTED_OF_ANY,
            alone: None,
            row_cost: ROW_COST,
            prediction_cost: PREDICTION_COST,
            guesses: Vec::with_capacity(MOST_GUESSES),
            classes: Vec::with_capacity(MOST_GUESSES),
            n_drawn: 0,
            n_unasked: 0,
            predicting: Duration::ZERO,
        }
    }
}

impl Guesser {
    /// What may follow `tokens` and then `next`: as many tokens as pay, `most` or [`MOST_GUESSES`] at most, often none.
    pub fn guess(&mut self, tokens: &[u32], next: u32, most: usize) -> &[u32] {
        self.look_up(tokens, next);
        self.guesses(most)
    }

    /// Takes what followed `next` the last time for guesses.
    pub fn look_up(&mut self, tokens: &[u32], next: u32) {
        self.forget();
        let Some((at, length)) = longest_match(tokens, next) else { return };
        let class =
            (length.ilog2() as usize + usize::from(!length.is_power_of_two())).min(EXPECTED.len() - 1);
        // Where the text ends, it goes on as guessed: what repeats itself does so at any length.
        let text = |guesses: &[u32], at: usize| match at.checked_sub(tokens.len()) {
            None => tokens[at],
            Some(0) => next,
            Some(beyond) => guesses[beyond - 1],
        };
        for i in 0..MOST_GUESSES {
            let guess = text(&self.guesses, at + 1 + i);
            self.guesses.push(guess);
            self.classes.push(class);
        }
    }

    /// Whether predictions promise more than what was [looked up](Self::look_up), which is forgotten then.
    pub fn wants_predictions(&mut self, most: usize) -> bool {
        let speed = |n: usize| {
            let (tokens, _) = expected_tokens(std::iter::repeat_n(self.predicted_true, n));
            tokens / (1.0 + (self.row_cost + self.prediction_cost) * n as f32)
        };
        let of_predictions = (1..=most.min(MOST_GUESSES)).map(speed).fold(0.0, f32::max);
        self.n_unasked += 1;
        let is_wanted = of_predictions > self.most_paying(most).1 || most > 0 && self.n_unasked > PATIENCE;
        if is_wanted {
            self.forget();
            self.n_unasked = 0;
        }
        is_wanted
    }

    /// Takes a prediction whose logit leads by so much for the next guess. Whether another one pays.
    pub fn predicted(&mut self, token: u32, lead: f32, most: usize) -> bool {
        let class = LEADS.iter().filter(|&&least| lead >= least).count();
        self.guesses.push(token);
        self.classes.push(EXPECTED.len() + class);
        let (tokens, chance) = expected_tokens(self.classes.iter().map(|&class| self.came_true[class]));
        let n = self.guesses.len();
        let cost = 1.0 + (self.row_cost + self.prediction_cost) * n as f32;
        let more = chance * self.predicted_true / (self.row_cost + self.prediction_cost);
        n < most.min(MOST_GUESSES) && more > tokens / cost
    }

    /// As many guesses as pay, `most` at most.
    pub fn guesses(&self, most: usize) -> &[u32] {
        &self.guesses[..self.most_paying(most).0]
    }

    fn forget(&mut self) {
        self.guesses.clear();
        self.classes.clear();
        self.n_drawn = 0;
    }

    /// Takes note of the token that was drawn after those that were guessed from, and of each one after it.
    pub fn drawn(&mut self, token: u32) {
        let Some(&guess) = self.guesses.get(self.n_drawn) else { return };
        let came_true = f32::from(guess == token);
        let class = self.classes[self.n_drawn];
        let learn = |known: &mut f32| *known += LEARNING * (came_true - *known);
        learn(&mut self.came_true[class]);
        if class >= EXPECTED.len() {
            learn(&mut self.predicted_true);
        }
        self.n_drawn += 1;
        if guess != token {
            self.forget();
        }
    }

    /// Takes note of what a step of so many rows took, with the predictions before it. A time of zero, as where there is no clock, says nothing.
    pub fn took(&mut self, rows: usize, time: Duration) {
        let seconds = time.saturating_sub(std::mem::take(&mut self.predicting)).as_secs_f32();
        if rows == 0 || seconds == 0.0 {
            return;
        }
        let Some(alone) = &mut self.alone else {
            self.alone = (rows == 1).then_some(seconds);
            return;
        };
        if rows == 1 {
            return approach(alone, seconds);
        }
        let cost = (seconds / *alone - 1.0) / (rows - 1) as f32;
        approach(&mut self.row_cost, cost.clamp(0.01, 1.0));
    }

    /// Takes note of what the predictions took that have just been made.
    pub fn predictions_took(&mut self, time: Duration) {
        self.predicting = time;
        let seconds = time.as_secs_f32();
        if let Some(alone) = self.alone.filter(|_| seconds > 0.0 && !self.guesses.is_empty()) {
            let cost = seconds / alone / self.guesses.len() as f32;
            approach(&mut self.prediction_cost, cost.clamp(0.01, 1.0));
        }
    }

    /// The number of guesses that gives most tokens for the time, `most` at most, and how many it gives in the time of a step that guesses nothing.
    fn most_paying(&self, most: usize) -> (usize, f32) {
        let mut best = (0, 1.0_f32);
        let (mut tokens, mut chance) = (1.0, 1.0);
        for (index, &class) in self.classes.iter().take(most).enumerate() {
            let n = index + 1;
            chance *= self.came_true[class];
            tokens += chance;
            let speed = tokens / (1.0 + self.row_cost * n as f32);
            if speed > best.1 {
                best = (n, speed);
            }
        }
        best
    }
}

/// How many tokens a step gives whose guesses come true with these probabilities, each if those before it do; and how likely all of them do.
fn expected_tokens(come_true: impl Iterator<Item = f32>) -> (f32, f32) {
    come_true.fold((1.0, 1.0), |(tokens, chance), p| (tokens + chance * p, chance * p))
}

/// Moves an estimate towards a sample, and so in the end to the median of what is seen: one that is far off counts as much as any.
fn approach(estimate: &mut f32, sample: f32) {
    const STEP: f32 = 1.05;
    *estimate = if sample > *estimate { sample.min(*estimate * STEP) } else { sample.max(*estimate / STEP) };
}

/// The last of the places in `tokens` that are most like their end and `next` behind it, and how many tokens are alike.
fn longest_match(tokens: &[u32], next: u32) -> Option<(usize, usize)> {
    let mut best = None;
    let mut length = 0;
    for at in (0..tokens.len()).rev().filter(|&at| tokens[at] == next) {
        let before = tokens[..at].iter().rev().zip(tokens.iter().rev());
        let alike = 1 + before.take(LONGEST_MATCH - 1).take_while(|(a, b)| a == b).count();
        if alike > length {
            (best, length) = (Some(at), alike);
        }
        if alike == LONGEST_MATCH {
            break;
        }
    }
    best.map(|at| (at, length))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn guess(text: &[u32]) -> Vec<u32> {
        let (next, tokens) = text.split_last().unwrap();
        let mut guesser = Guesser { came_true: [1.0; N_CLASSES], ..Guesser::default() };
        guesser.guess(tokens, *next, usize::MAX).to_vec()
    }

    #[test]
    fn what_followed_the_longest_match_is_guessed() {
        assert!(guess(&[1, 2, 3]).is_empty());
        assert!(guess(&[7]).is_empty());
        // After 2 came 3 and 9; after 1 2, 3 alone.
        assert_eq!(guess(&[1, 2, 3, 4, 5, 6, 7, 8, 2, 9, 1, 2])[..4], [3, 4, 5, 6]);
        // Of two matches alike in length, the later one.
        assert_eq!(guess(&[5, 6, 1, 5, 7, 2, 5])[..2], [7, 2]);
        // A match may reach to the first token, and no further.
        assert_eq!(guess(&[4, 8, 3, 4])[..2], [8, 3]);
    }

    #[test]
    fn what_repeats_itself_is_guessed_at_any_length() {
        assert_eq!(guess(&[3, 1, 2, 1, 2, 1]), [2, 1, 2, 1, 2, 1, 2]);
        assert_eq!(guess(&[9, 9]), [9; MOST_GUESSES]);
        let long: Vec<u32> = (0..50).chain(0..50).chain(0..10).collect();
        assert_eq!(guess(&long), [10, 11, 12, 13, 14, 15, 16]);
    }

    /// Matches of one token that never come true stop being followed, are still looked at, and are followed again once they do.
    #[test]
    fn guesses_are_made_while_they_pay() {
        let mut guesser = Guesser::default();
        let tokens = [7, 1, 2, 3, 7];
        let n_guesses = |guesser: &mut Guesser, drawn: u32| {
            let n = guesser.guess(&tokens, 1, usize::MAX).len();
            guesser.drawn(drawn);
            n
        };
        assert!(n_guesses(&mut guesser, 9) > 0);
        (0..40).for_each(|_| _ = n_guesses(&mut guesser, 9));
        assert_eq!(n_guesses(&mut guesser, 9), 0);
        (0..60).for_each(|_| _ = n_guesses(&mut guesser, 2));
        assert_eq!(n_guesses(&mut guesser, 2), MOST_GUESSES);
        assert_eq!(guesser.guess(&tokens, 1, 3).len(), 3);
    }

    /// Where a row takes half the time of a step, a guess has to come true more often than where it takes nothing.
    #[test]
    fn what_rows_take_is_weighed() {
        let ms = Duration::from_millis;
        let mut guesser = Guesser::default();
        (0..300).for_each(|_| {
            guesser.took(1, ms(10));
            guesser.took(5, ms(30));
        });
        assert!((guesser.row_cost - 0.5).abs() < 0.03, "{}", guesser.row_cost);
        guesser.came_true = [0.3; N_CLASSES];
        assert!(guesser.guess(&[1, 2], 1, usize::MAX).is_empty());
        // One step that something else delayed changes little.
        guesser.took(1, ms(1000));
        assert!(guesser.alone.unwrap() < 0.011);
        (0..300).for_each(|_| guesser.took(5, ms(10)));
        assert!(!guesser.guess(&[1, 2], 1, usize::MAX).is_empty());
        // No clock, no opinion.
        let mut timeless = Guesser::default();
        timeless.took(1, Duration::ZERO);
        timeless.took(3, Duration::ZERO);
        assert_eq!((timeless.alone, timeless.row_cost), (None, ROW_COST));
    }

    /// Predictions are asked for while they pay more than what was looked up, end where the next is not worth its time, and are tried again
    /// after a while.
    #[test]
    fn predictions_are_made_while_they_pay() {
        // Asks for predictions with this lead as far as they go; gives how many were made, and how many pay.
        fn ask(guesser: &mut Guesser, text: &[u32], lead: f32, most: usize) -> [usize; 2] {
            let (next, tokens) = text.split_last().unwrap();
            guesser.look_up(tokens, *next);
            let mut n = 0;
            if guesser.wants_predictions(most) {
                n = 1;
                while guesser.predicted(7, lead, most) {
                    n += 1;
                }
            }
            [n, guesser.guesses(most).len()]
        }
        let mut guesser = Guesser::default();
        assert_eq!(ask(&mut guesser, &[1, 2], 9.0, 3), [3, 3]);
        assert_eq!(ask(&mut guesser, &[1, 2], 9.0, 0), [0, 0]);
        // One that is not sure of itself is the last.
        assert_eq!(ask(&mut guesser, &[1, 2], 0.1, 7)[0], 1);
        // Text that repeats itself promises more.
        let repeated: Vec<u32> = (0..20).chain(0..20).collect();
        assert_eq!(ask(&mut guesser, &repeated, 9.0, 7), [0, 7]);
        // What never comes true is left, and tried again.
        let mut asked = Vec::new();
        for _ in 0..200 {
            asked.push(ask(&mut guesser, &[1, 2], 9.0, 7)[0] > 0);
            guesser.drawn(8);
        }
        assert!(!asked[100..].iter().all(|&asked| asked) && asked[100..].contains(&true));
        // What takes as long as a step does not pay, however sure it is.
        let mut slow = Guesser::default();
        slow.took(1, Duration::from_millis(10));
        for _ in 0..200 {
            slow.look_up(&[1], 2);
            slow.predicted(7, 9.0, 1);
            slow.predictions_took(Duration::from_millis(10));
            // Its time is none of the step's.
            slow.took(1, Duration::from_millis(20));
        }
        assert!(slow.prediction_cost > 0.9 && slow.alone.unwrap() < 0.0101, "{slow:?}");
        assert_eq!(ask(&mut slow, &[1, 2], 9.0, 7), [0, 0]);
    }

    /// Of a guess that was not made because it does not pay, it is still found out whether it would have come true, token by token until it does not.
    #[test]
    fn each_token_of_a_guess_is_judged_until_one_is_wrong() {
        let mut guesser = Guesser::default();
        guesser.guess(&[1, 2, 3, 4], 1, 0);
        let before = guesser.came_true[0];
        guesser.drawn(2);
        let once = guesser.came_true[0];
        guesser.drawn(9);
        let wrong = guesser.came_true[0];
        guesser.drawn(4);
        assert!(once > before && wrong < once && guesser.came_true[0] == wrong);
    }
}
