//! Top-k of a row of logits: devices select these candidates, samplers sample from them.

use std::cmp::Ordering;

/// A token and its logit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Candidate {
    /// Token id.
    pub id: u32,
    /// Its logit.
    pub logit: f32,
}

impl Candidate {
    /// Orders by descending logit, then by ascending id; 0.0 and -0.0 are equal. NaN and positive
    /// infinity, which no model should produce, come first, so that callers notice them.
    pub fn rank(a: &Self, b: &Self) -> Ordering {
        // Adding zero turns -0.0 into 0.0; total_cmp would order them apart.
        let by_logit = || (b.logit + 0.0).total_cmp(&(a.logit + 0.0));
        match (a.is_bad(), b.is_bad()) {
            (false, false) => by_logit().then(a.id.cmp(&b.id)),
            (true, true) => a.id.cmp(&b.id),
            (a, b) => b.cmp(&a),
        }
    }

    /// Returns whether the logit is NaN or positive infinity.
    pub fn is_bad(&self) -> bool {
        self.logit.is_nan() || self.logit == f32::INFINITY
    }
}

/// Logits compared in one vectorizable step.
const CHUNK: usize = 16;

/// Writes the `k` largest of `logits` (all of them when there are fewer) to `out`, in the order of
/// [`Candidate::rank`]. Clears `out` first and reuses its memory.
pub fn top_k(logits: &[f32], k: usize, out: &mut Vec<Candidate>) {
    out.clear();
    if k == 0 {
        return;
    }
    // Collects up to 2k candidates before each selection of the better half, so selection costs
    // little per token.
    let capacity = 2 * k.min(logits.len());
    out.reserve(capacity);
    // No logit up to this value is among the top k; as ids ascend, equal logits come too late.
    let mut threshold = None;
    for (index, chunk) in logits.chunks(CHUNK).enumerate() {
        if threshold
            .is_some_and(|threshold| chunk.iter().all(|&logit| logit <= threshold && logit < f32::INFINITY))
        {
            continue;
        }
        for (i, &logit) in chunk.iter().enumerate() {
            out.push(Candidate { id: (index * CHUNK + i) as u32, logit });
            if out.len() == capacity {
                out.select_nth_unstable_by(k - 1, Candidate::rank);
                out.truncate(k);
                threshold = Some(out[k - 1].logit);
            }
        }
    }
    out.sort_unstable_by(Candidate::rank);
    out.truncate(k);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    #[test]
    fn top_k_equals_the_head_of_a_sorted_list() {
        let mut random = Random::new(1);
        let mut out = Vec::new();
        for n in [0, 1, 15, 16, 17, 1000, 5000] {
            let mut logits = vec![0.0; n];
            random.fill_gaussian(&mut logits, 3.0);
            for (i, logit) in logits.iter_mut().enumerate() {
                match i % 11 {
                    // Ties, including both zeros, and masked tokens.
                    0 => *logit = 2.0,
                    1 => *logit = 0.0,
                    2 => *logit = -0.0,
                    3 => *logit = f32::NEG_INFINITY,
                    _ => {}
                }
            }
            for bad in [&[][..], &[f32::NAN], &[f32::INFINITY, f32::NAN]] {
                bad.iter()
                    .enumerate()
                    .filter(|(i, _)| 7 * i < n)
                    .for_each(|(i, &bad)| logits[n - 1 - 7 * i] = bad);
                let all = logits.iter().enumerate().map(|(id, &logit)| Candidate { id: id as u32, logit });
                let mut want: Vec<_> = all.collect();
                want.sort_by(Candidate::rank);
                for k in [0, 1, 2, 40, 999, 1000, usize::MAX] {
                    top_k(&logits, k, &mut out);
                    let bits = |list: &[Candidate]| {
                        list.iter().map(|c| (c.id, c.logit.to_bits())).collect::<Vec<_>>()
                    };
                    assert_eq!(bits(&out), bits(&want[..n.min(k)]), "{k} of {n}, bad {bad:?}");
                }
            }
        }
    }
}
