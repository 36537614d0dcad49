//! What adapters add to products.

use std::iter;
use std::ops::Range;

use kvant_backend::{Backend, WeightSource};
use kvant_codec::DType;

use super::Loader;
use crate::lora::Pair;
use crate::{Lora, ModelError};

/// What adapters add to products of one input, all of them together: `y_i += U_i (f * D x)`, f a factor for each adapter and row.
///
/// Each adapter has rows of `D` and columns of every `U_i` to itself, zeros where it adds nothing. So a few calls do what two for each product
/// and adapter would.
pub(crate) struct LowRank<B: Backend> {
    /// D, `[rank, n_in]`.
    pub(crate) down: B::Matrix,
    /// `U_i`, `[n_out, rank]`, of each product; `None` where nothing is added to it.
    pub(crate) ups: Vec<Option<B::Matrix>>,
    /// Which of [`Weights::ranks`](super::Weights::ranks) are its own.
    pub(crate) ranks: usize,
}

/// Whose the ranks are that adapters have in products of one input.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Ranks {
    /// How many of them each has, one after the other: `(adapter, ranks)`.
    pub(crate) of: Vec<(usize, usize)>,
    /// Whether rows that get logits alone go through those products.
    pub(crate) are_of_wanted: bool,
}

impl Ranks {
    /// All of them.
    pub(crate) fn len(&self) -> usize {
        self.of.iter().map(|(_, n)| n).sum()
    }
}

/// Rows of a tensor that a matrix is made of, one range after the other.
#[derive(Debug, Clone)]
pub(super) struct RowsOf {
    pub(super) tensor: String,
    /// Rows of the tensor.
    pub(super) n_rows: usize,
    pub(super) ranges: Vec<Range<usize>>,
}

impl RowsOf {
    /// All of them.
    pub(super) fn all(tensor: impl Into<String>, n_rows: usize) -> Self {
        Self::some(tensor, n_rows, iter::once(0..n_rows))
    }

    pub(super) fn some(
        tensor: impl Into<String>,
        n_rows: usize,
        ranges: impl IntoIterator<Item = Range<usize>>,
    ) -> Self {
        Self { tensor: tensor.into(), n_rows, ranges: ranges.into_iter().collect() }
    }
}

/// Matrices that meet one input, and what adapters add to their products, if anything.
pub(super) type Group<B, const N: usize> = ([<B as Backend>::Matrix; N], Option<LowRank<B>>);

/// Columns of an activation that some kernels take at once.
const STEP: usize = 32;

/// What an adapter adds to a tensor, and where among what all of them add to products of one input.
struct Place {
    adapter: usize,
    tensor: String,
    ranks: Range<usize>,
    pair: Pair,
}

impl<B: Backend> Loader<'_, B> {
    /// Matrices of these rows that meet one input of `n_in` values.
    pub(super) fn group<const N: usize>(
        &mut self,
        n_in: usize,
        rows: [RowsOf; N],
    ) -> Result<Group<B, N>, ModelError> {
        let mut matrices = Vec::with_capacity(N);
        let mut dtype = DType::F16;
        for rows in &rows {
            let source = self.source_of(rows, n_in)?;
            // Activations are rounded to bytes for codes anyway.
            if source.dtype.block_len() > 1 && n_in.is_multiple_of(DType::Q8_0.block_len()) {
                dtype = DType::Q8_0;
            }
            matrices.push(self.backend.matrix(source)?);
        }
        let low_rank = self.added(n_in, &rows, dtype)?;
        Ok((matrices.try_into().unwrap_or_else(|_| unreachable!("a matrix for each")), low_rank))
    }

    /// What adapters add to matrices of these rows, in `dtype`.
    fn added(
        &mut self,
        n_in: usize,
        rows: &[RowsOf],
        dtype: DType,
    ) -> Result<Option<LowRank<B>>, ModelError> {
        let places = self.places(rows)?;
        let Some(last) = places.last() else { return Ok(None) };
        let rank = last.ranks.end.next_multiple_of(STEP);
        let mut down: Vec<f32> = places.iter().flat_map(|place| &place.pair.a).copied().collect();
        down.resize(rank * n_in, 0.0);
        let down = self.small(&down, n_in, dtype)?;
        let mut ups = Vec::with_capacity(rows.len());
        for rows in rows {
            let mut own = places.iter().filter(|place| place.tensor == rows.tensor).peekable();
            ups.push(match own.peek() {
                Some(_) => Some(self.small(&up(rows, own, rank), rank, dtype)?),
                None => None,
            });
        }
        let ranks = self.ranks_of(&places, rank);
        self.adapted.extend(places.into_iter().map(|place| place.tensor));
        Ok(Some(LowRank { down, ups, ranks }))
    }

    /// What adapters add to tensors that these rows are of, one after the other.
    fn places(&self, rows: &[RowsOf]) -> Result<Vec<Place>, ModelError> {
        let mut places: Vec<Place> = Vec::new();
        for (adapter, lora) in self.part.loras().iter().enumerate() {
            let first = places.len();
            for RowsOf { tensor, .. } in rows {
                // Some matrices are of one tensor.
                if places[first..].iter().any(|place| place.tensor == *tensor) {
                    continue;
                }
                let Some((rank, pair)) = lora.pair(tensor)? else { continue };
                let end = places.last().map_or(0, |place| place.ranks.end);
                places.push(Place { adapter, tensor: tensor.clone(), ranks: end..end + rank, pair });
            }
        }
        Ok(places)
    }

    /// Where among all there are the ranks of these places are, filled up to `rank` with what is zero.
    fn ranks_of(&mut self, places: &[Place], rank: usize) -> usize {
        let of = places.iter().map(|place| (place.adapter, place.ranks.len())).collect();
        let mut ranks = Ranks { of, are_of_wanted: false };
        let filled = rank - ranks.len();
        ranks.of.extend(places.last().map(|last| (last.adapter, filled)));
        self.ranks.iter().position(|other| *other == ranks).unwrap_or_else(|| {
            self.ranks.push(ranks);
            self.ranks.len() - 1
        })
    }

    /// The same for a product that rows that get logits alone go through.
    pub(super) fn of_wanted(&mut self, low_rank: LowRank<B>) -> LowRank<B> {
        let ranks = Ranks { are_of_wanted: true, ..self.ranks[low_rank.ranks].clone() };
        self.ranks.push(ranks);
        LowRank { ranks: self.ranks.len() - 1, ..low_rank }
    }

    /// A matrix of these values, which f16 holds.
    fn small(&mut self, values: &[f32], n_in: usize, dtype: DType) -> Result<B::Matrix, ModelError> {
        let mut bytes = vec![0; values.len() / dtype.block_len() * dtype.block_bytes()];
        kvant_codec::encode(dtype, values, &mut bytes).expect("as many bytes as there are values");
        self.n_bytes += bytes.len();
        let source = WeightSource { dtype, n_out: values.len() / n_in, n_in, bytes: bytes.into() };
        Ok(self.backend.matrix(source)?)
    }

    /// Refuses adapters that change a tensor of ours where nothing has been added.
    pub(super) fn refuse_unadapted(&self, is_ours: impl Fn(&str) -> bool) -> Result<(), ModelError> {
        let mut tensors = self.part.loras().iter().flat_map(Lora::tensors);
        match tensors.find(|&tensor| is_ours(tensor) && !self.adapted.contains(tensor)) {
            Some(tensor) => {
                Err(ModelError::Unsupported { what: format!("an adapter that changes '{tensor}'") })
            }
            None => Ok(()),
        }
    }
}

/// U `[n_out, rank]` for these rows of a tensor: what each adapter has for it in columns of its own.
fn up<'a>(rows: &RowsOf, places: impl Iterator<Item = &'a Place>, rank: usize) -> Vec<f32> {
    let picked: Vec<usize> = rows.ranges.iter().cloned().flatten().collect();
    let mut up = vec![0.0; picked.len() * rank];
    for Place { ranks, pair, .. } in places {
        for (to, row) in up.chunks_exact_mut(rank).zip(&picked) {
            to[ranks.clone()].copy_from_slice(&pair.b[row * ranks.len()..][..ranks.len()]);
        }
    }
    up
}
