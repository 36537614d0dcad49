//! Embeddings of n-grams: of the last tokens together, in a table that hashes index (Qwen4-Exp).

use kvant_backend::NgramInjection;

use super::{Keys, PER_LAYER, ResidualStreams};
use crate::ModelError;

/// Embeddings of n-grams. With `t[i]` the token i positions before, or the end token where one is
/// between or the text begins, the row of head h of the n-grams of n tokens is
///
/// ```text
/// (xor of t[i] multiplier[i], i = 0 .. n) mod rows[h] + first[h]                    n = 2 ..= size
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ngrams {
    /// The layer before which their values are added to the residual streams.
    pub layer: usize,
    /// Tokens of the longest.
    pub size: usize,
    /// Values of a head.
    pub dim: usize,
    /// Rows of the kernel of the convolution, which are `size` tokens apart.
    pub taps: usize,
    /// The token that ends a text.
    pub end: u32,
    /// The token that stands for soft tokens.
    pub soft: u32,
    /// Factors of tokens, `[size]`.
    multipliers: Vec<u64>,
    /// Heads of n-grams of two tokens, then those of three and so on.
    heads: Vec<NgramHead>,
}

/// Rows of a head of n-grams.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct NgramHead {
    first: u32,
    n_rows: u32,
}

/// Longest n-grams, most heads and longest kernel: several times those of any model.
const MAX_SIZE: usize = 16;
const MAX_HEADS: usize = 1024;
const MAX_TAPS: usize = 64;

impl Ngrams {
    /// Returns the tokens before a token that its n-grams read.
    pub fn n_before(&self) -> usize {
        self.size - 1
    }

    /// Returns the values of a token.
    pub fn width(&self) -> usize {
        self.heads.len() * self.dim
    }

    /// Returns the rows that the table needs.
    pub fn n_rows(&self) -> usize {
        self.heads.iter().map(|head| head.first as usize + head.n_rows as usize).max().unwrap_or(0)
    }

    /// Returns the values of the state of the convolution over `width` values.
    pub fn n_state(&self, width: usize) -> usize {
        NgramInjection::n_state(self.taps, self.size, width)
    }

    /// Appends the rows of each head of the last of `tokens`, of which those before are at least
    /// [`n_before`](Self::n_before) or all of the text.
    pub fn rows(&self, tokens: &[u32], rows: &mut Vec<u32>) {
        let mut context = tokens.iter().rev();
        let mut hash = context.next().map_or(0, |&token| self.factor(0, token));
        let mut context = context.copied().take_while(|&token| token != self.end);
        for (heads, i) in self.heads.chunks(self.heads.len() / self.n_before()).zip(1..) {
            hash ^= self.factor(i, context.next().unwrap_or(self.end));
            rows.extend(heads.iter().map(|head| head.first + (hash % u64::from(head.n_rows)) as u32));
        }
    }

    fn factor(&self, i: usize, token: u32) -> u64 {
        u64::from(token).wrapping_mul(self.multipliers[i])
    }
}

/// Reads the embeddings of n-grams, if the model has any.
pub(super) fn read(
    keys: &Keys,
    streams: ResidualStreams,
    n_layers: usize,
) -> Result<Option<Ngrams>, ModelError> {
    const LAYERS: &str = "ple.layers";
    const SIZE: &str = "ple.ngram_size";
    const HEADS: &str = "ple.heads_per_ngram";
    const TAPS: &str = "ple.conv_kernel";
    const END: &str = "ple.eos_token_id";
    const SOFT: &str = "ple.image_token_id";
    const MULTIPLIERS: &str = "ple.layer_multipliers";
    const FIRST: &str = "ple.head_offsets";
    const ROWS: &str = "ple.head_vocab_sizes";
    if !matches!(streams, ResidualStreams::Gated { .. }) || !keys.has(LAYERS) {
        return Ok(None);
    }
    let layers: Vec<u64> = keys.gguf.meta().get(&keys.key(LAYERS))?;
    let layer = match layers[..] {
        [] => return Ok(None),
        [layer] => usize::try_from(layer).ok().filter(|&layer| layer < n_layers),
        _ => None,
    };
    let layer = layer
        .ok_or_else(|| keys.bad(LAYERS, &format!("one of {n_layers} layers"), format_args!("{layers:?}")))?;
    let at_most = |key: &str, least: usize, most: usize| match keys.size(key)? {
        n if (least..=most).contains(&n) => Ok(n),
        n => Err(keys.bad(key, &format!("{least} to {most}"), n)),
    };
    let (size, taps) = (at_most(SIZE, 2, MAX_SIZE)?, at_most(TAPS, 1, MAX_TAPS)?);
    let n_heads = (size - 1) * at_most(HEADS, 1, MAX_HEADS)?;
    let numbers = |key: &str, n: usize| {
        let all: Vec<u64> = keys.gguf.meta().get(&keys.key(key))?;
        match all.len() >= n {
            true => Ok(all),
            false => Err(keys.bad(key, &format!("{n} numbers"), all.len())),
        }
    };
    let mut multipliers = numbers(MULTIPLIERS, size)?;
    multipliers.truncate(size);
    let of_heads = numbers(FIRST, n_heads)?.into_iter().zip(numbers(ROWS, n_heads)?);
    let head = |(first, n_rows): (u64, u64)| {
        let end = first.checked_add(n_rows).filter(|&end| n_rows > 0 && u32::try_from(end).is_ok());
        match end {
            Some(_) => Ok(NgramHead { first: first as u32, n_rows: n_rows as u32 }),
            None => Err(keys.bad(ROWS, "ranges of rows whose numbers are below 2^32", n_rows)),
        }
    };
    let heads = of_heads.take(n_heads).map(head).collect::<Result<_, _>>()?;
    let end = keys.gguf.meta().get(&keys.key(END))?;
    let soft = keys.gguf.meta().find(&keys.key(SOFT))?.unwrap_or(end);
    Ok(Some(Ngrams { layer, size, dim: keys.size(PER_LAYER)?, taps, end, soft, multipliers, heads }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_token_hides_those_before_it() {
        let heads = [0, 100, 200, 300].map(|first| NgramHead { first, n_rows: 97 }).to_vec();
        let multipliers = vec![3, 5, 7];
        let of = Ngrams { layer: 0, size: 3, dim: 1, taps: 1, end: 9, soft: 1, multipliers, heads };
        let rows = |tokens: &[u32]| {
            let mut rows = Vec::new();
            of.rows(tokens, &mut rows);
            rows
        };
        let expected = |t: [u32; 3]| {
            let (two, three) = ((3 * t[0]) ^ (5 * t[1]), (3 * t[0]) ^ (5 * t[1]) ^ (7 * t[2]));
            vec![two % 97, 100 + two % 97, 200 + three % 97, 300 + three % 97]
        };
        for (tokens, context) in [
            (&[2, 4, 6][..], [6, 4, 2]),
            (&[8, 2, 4, 6], [6, 4, 2]),
            (&[4, 6], [6, 4, 9]),
            (&[6], [6, 9, 9]),
            (&[2, 9, 6], [6, 9, 9]),
            (&[9, 4, 6], [6, 4, 9]),
            (&[2, 4, 9], [9, 4, 2]),
        ] {
            assert_eq!(rows(tokens), expected(context), "{tokens:?}");
        }
    }
}
