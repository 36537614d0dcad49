//! LoRA weights of GEMMs.

use std::iter;
use std::ops::Range;

use kvant_backend::{Backend, WeightSource};
use kvant_codec::DType;
use kvant_codec::fields::FieldSpec;

use super::Loader;
use crate::lora::Pair;
use crate::{Lora, ModelError};

/// LoRA weights of all adapters for GEMMs of one input: `y_i += U_i (f * D x)`, f a factor per
/// adapter and row.
///
/// Each adapter owns rows of `D` and columns of every `U_i`, zeros where it changes nothing. So a
/// few calls replace two per GEMM and adapter.
pub(crate) struct LowRank<B: Backend> {
    /// D, `[rank, n_in]`.
    pub(crate) down: B::Matrix,
    /// What D makes of the bias of the norm before the GEMMs, `[rank]`, if it has one.
    pub(crate) bias: Option<B::Buffer>,
    /// `U_i`, `[n_out, rank]`, of each GEMM; `None` if no adapter changes it.
    pub(crate) ups: Vec<Option<B::Matrix>>,
    /// Index into [`Weights::ranks`](super::Weights::ranks).
    pub(crate) ranks: usize,
}

/// Assignment of LoRA ranks to adapters, for GEMMs of one input.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RankAssignment {
    /// Consecutive `(adapter, number of ranks)`.
    pub(crate) of: Vec<(usize, usize)>,
    /// Whether the GEMMs process only the rows with requested logits.
    pub(crate) is_for_logit_rows: bool,
}

impl RankAssignment {
    /// Returns the total number of ranks.
    pub(crate) fn len(&self) -> usize {
        self.of.iter().map(|(_, n)| n).sum()
    }
}

/// Consecutive ranges of a tensor's rows that form a matrix.
#[derive(Debug, Clone)]
pub(super) struct RowsOf {
    pub(super) tensor: String,
    /// Number of rows of the tensor.
    pub(super) n_rows: usize,
    pub(super) ranges: Vec<Range<usize>>,
}

impl RowsOf {
    /// Returns all rows.
    pub(super) fn all(tensor: impl Into<String>, n_rows: usize) -> Self {
        Self::some(tensor, n_rows, iter::once(0..n_rows))
    }

    /// Returns the rows of these ranges, of which neighbours become one: one alone is not copied.
    pub(super) fn some(
        tensor: impl Into<String>,
        n_rows: usize,
        ranges: impl IntoIterator<Item = Range<usize>>,
    ) -> Self {
        let mut joined: Vec<Range<usize>> = Vec::new();
        for range in ranges {
            match joined.last_mut() {
                Some(last) if last.end == range.start => last.end = range.end,
                _ => joined.push(range),
            }
        }
        Self { tensor: tensor.into(), n_rows, ranges: joined }
    }
}

/// Matrices of one input, and the LoRA weights of their GEMMs, if any.
pub(super) type Group<B, const N: usize> = ([<B as Backend>::Matrix; N], Option<LowRank<B>>);

/// The same for any number of matrices.
pub(super) type AnyGroup<B> = (Vec<<B as Backend>::Matrix>, Option<LowRank<B>>);

/// Columns of an activation that some kernels process together.
const STEP: usize = 32;

/// An adapter's change of a tensor, and its range of ranks.
struct Place {
    adapter: usize,
    tensor: String,
    ranks: Range<usize>,
    pair: Pair,
}

impl<B: Backend> Loader<'_, B> {
    /// Loads matrices of these rows with one input of `n_in` values.
    pub(super) fn group<const N: usize>(
        &mut self,
        n_in: usize,
        rows: [RowsOf; N],
    ) -> Result<Group<B, N>, ModelError> {
        let (matrices, low_rank) = self.group_of(n_in, &rows)?;
        Ok((matrices.try_into().unwrap_or_else(|_| unreachable!("a matrix for each")), low_rank))
    }

    /// Loads the same for any number of matrices.
    pub(super) fn group_of(&mut self, n_in: usize, rows: &[RowsOf]) -> Result<AnyGroup<B>, ModelError> {
        let mut matrices = Vec::with_capacity(rows.len());
        let mut dtype = DType::F16;
        for rows in rows {
            let source = self.source_of(rows, n_in)?;
            // GEMMs of quantized weights round activations to 8 bits anyway.
            let is_coded = FieldSpec::of(source.dtype).is_some();
            if is_coded && n_in.is_multiple_of(DType::Q8_0.block_len()) {
                dtype = DType::Q8_0;
            }
            let mut matrix = self.backend.upload_matrix(source)?;
            self.watch(&rows.tensor, &mut matrix)?;
            matrices.push(matrix);
        }
        let low_rank = self.added(n_in, rows, dtype)?;
        Ok((matrices, low_rank))
    }

    /// Loads the LoRA weights for matrices of these rows, in `dtype`.
    fn added(
        &mut self,
        n_in: usize,
        rows: &[RowsOf],
        dtype: DType,
    ) -> Result<Option<LowRank<B>>, ModelError> {
        let places = self.rank_slots(rows)?;
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
        Ok(Some(LowRank { down, bias: None, ups, ranks }))
    }

    /// Returns the changes of the tensors of these rows, with consecutive ranks.
    fn rank_slots(&self, rows: &[RowsOf]) -> Result<Vec<Place>, ModelError> {
        let mut places: Vec<Place> = Vec::new();
        for (adapter, lora) in self.part.loras().iter().enumerate() {
            let first = places.len();
            for RowsOf { tensor, .. } in rows {
                // Several matrices may come from one tensor.
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

    /// Returns the index of the rank assignment of these changes, padded with zeros to `rank`.
    fn ranks_of(&mut self, places: &[Place], rank: usize) -> usize {
        let of = places.iter().map(|place| (place.adapter, place.ranks.len())).collect();
        let mut ranks = RankAssignment { of, is_for_logit_rows: false };
        let filled = rank - ranks.len();
        ranks.of.extend(places.last().map(|last| (last.adapter, filled)));
        self.ranks.iter().position(|other| *other == ranks).unwrap_or_else(|| {
            self.ranks.push(ranks);
            self.ranks.len() - 1
        })
    }

    /// Returns the same for a GEMM on the rows with requested logits.
    pub(super) fn for_logit_rows(&mut self, low_rank: LowRank<B>) -> LowRank<B> {
        let ranks = RankAssignment { is_for_logit_rows: true, ..self.ranks[low_rank.ranks].clone() };
        self.ranks.push(ranks);
        LowRank { ranks: self.ranks.len() - 1, ..low_rank }
    }

    /// Creates a matrix of these values, which fit the type.
    pub(super) fn small(
        &mut self,
        values: &[f32],
        n_in: usize,
        dtype: DType,
    ) -> Result<B::Matrix, ModelError> {
        let mut bytes = vec![0; values.len() / dtype.block_len() * dtype.block_bytes()];
        kvant_codec::encode(dtype, values, &mut bytes).expect("as many bytes as there are values");
        self.n_bytes += bytes.len();
        let source = WeightSource { dtype, n_out: values.len() / n_in, n_in, bytes: bytes.into() };
        Ok(self.backend.upload_matrix(source)?)
    }

    /// Rejects adapters that change a tensor of this part without LoRA support.
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

/// Returns U `[n_out, rank]` for these rows of a tensor: each adapter's B in its own columns.
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
