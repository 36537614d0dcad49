//! Attention to selected tokens: their selection by an index, and attention over them.

use kvant_backend::{Backend, BlockSelection, Selection};
use kvant_codec::DType;

use crate::judge::{ROUNDING, roundings};
use crate::kv::{Answer, Batch, Blocks, Row, Scaled, Shape, Tokens};
use crate::reference::{dot, norm};
use crate::skipped::product;
use crate::weights::gaussian;
use crate::{Attention, DeviceUnderTest, Skipped};

/// Tokens of a sequence, and rows of the step among them: within a tile, and across tiles and
/// blocks.
const STEPS: [(usize, usize); 5] = [(2, 1), (40, 7), (150, 1), (170, 40), (300, 20)];

/// Such steps and the tokens that their rows attend to: all, some and most of a sequence.
const SELECTIONS: [((usize, usize), usize); 6] =
    [((2, 1), 1), ((40, 7), 16), ((40, 7), 150), ((150, 1), 1), ((170, 40), 150), ((300, 20), 16)];

/// Compares `select_tokens` and `select_blocks` with their equations, for every type of keys, for a
/// few and many heads, and for more selected tokens or blocks than some rows have.
pub fn select<B: Backend>(subject: &DeviceUnderTest<B>) -> Skipped {
    let mut skipped = subject.skipped();
    if !subject.device().info().selects_tokens {
        selection_is_refused(subject);
        return skipped;
    }
    let indexes = [(128, 9), (64, 1), (40, 4), (32, 64)];
    let cases = product(&indexes, &SELECTIONS);
    for (dtype, ((dim, n_heads), ((n, rows), n_used))) in skipped.combine(&DType::KV, &cases) {
        let shape = Shape { sink_tiles: 1, ..Shape::shared_kv(dtype, dim, dim) };
        let tokens = [Tokens::gaussian(shape, n, 11), Tokens::gaussian(shape, n.div_ceil(2), 12)];
        selects_the_largest(subject, &tokens, rows, Selection { n_heads, n_used });
    }
    let usual = BlockSelection { n_heads: 2, n_used: 3, size: 16, n_local: 1 };
    let selections = [
        usual,
        BlockSelection { n_heads: 4, n_used: 2, size: 7, n_local: 2 },
        BlockSelection { n_heads: 1, n_used: 1, size: 128, n_local: 0 },
    ];
    for (dtype, (selection, (n, rows))) in skipped.combine(&DType::KV, &product(&selections, &STEPS)) {
        let shape = Shape { sink_tiles: 1, ..Shape::shared_kv(dtype, 48, 48) };
        let tokens = [Tokens::gaussian(shape, n, 18), Tokens::gaussian(shape, n.div_ceil(2), 19)];
        selects_the_largest_blocks(subject, &tokens, rows, selection);
    }
    skipped
}

/// Compares `attend_selected` with the equation of attention over some tokens: with shared KV and
/// without, groups of heads that are no multiples of those of a kernel, scales and soft caps.
pub fn attend<B: Backend>(subject: &DeviceUnderTest<B>) -> Skipped {
    let mut skipped = subject.skipped();
    if !subject.device().info().selects_tokens {
        return skipped;
    }
    let shape = Shape::new(DType::F16, DType::F16);
    let latent = Shape { shared_kv: true, ..shape };
    let shapes = [
        Shape { k_head_dim: 576, v_head_dim: 512, group: 16, sink_tiles: 1, ..latent },
        Shape {
            k_head_dim: 224,
            v_head_dim: 192,
            group: 5,
            scaled: Scaled::All,
            sinks: Some([1.0, 0.5]),
            ..latent
        },
        Shape { k_head_dim: 96, v_head_dim: 80, group: 1, n_kv_heads: 2, ..latent },
        Shape { n_kv_heads: 2, group: 3, scaled: Scaled::All, alpha: 1.02, ..shape },
        Shape { k_head_dim: 40, v_head_dim: 64, group: 2, soft_cap: Some(1.0), ..shape },
    ];
    let cases = product(&shapes, &SELECTIONS);
    for (dtype, (shape, ((n, rows), n_used))) in skipped.combine(&DType::KV, &cases) {
        let shape = Shape { k: dtype, v: dtype, ..shape };
        let tokens = [Tokens::gaussian(shape, n, 13), Tokens::gaussian(shape, n.div_ceil(2), 14)];
        let blocks = Blocks { n_used, size: 1, n_lists: 1, with_rest: false };
        attends_to_the_selected(subject, &tokens, rows, blocks);
    }
    let shape = Shape { n_kv_heads: 2, group: 3, scaled: Scaled::All, ..shape };
    let kinds = product(&[[3, 16], [1, 100], [5, 7]], &[(2, false), (1, true)]);
    for (dtype, ((n, rows), ([n_used, size], (n_lists, with_rest)))) in
        skipped.combine(&DType::KV, &product(&STEPS, &kinds))
    {
        let shape = Shape { k: dtype, v: dtype, ..shape };
        let tokens = [Tokens::gaussian(shape, n, 20), Tokens::gaussian(shape, n.div_ceil(2), 21)];
        attends_to_the_selected(subject, &tokens, rows, Blocks { n_used, size, n_lists, with_rest });
    }
    skipped
}

/// Creates sequences of these tokens, the last of which were appended in one step.
fn stepped<'a, B: Backend>(
    subject: &'a DeviceUnderTest<B>,
    tokens: &'a [Tokens; 2],
    rows: usize,
    what: &dyn Fn() -> String,
) -> Batch<'a, B> {
    let mut batch = Batch::new(subject, &tokens.each_ref());
    let last = tokens.each_ref().map(|tokens| rows.min(tokens.len()));
    let before = [tokens[0].len() - last[0], tokens[1].len() - last[1]];
    let fed = batch.feed(&before, 100).and_then(|()| batch.append(&last));
    fed.unwrap_or_else(|error| panic!("{}: {error}", what()));
    batch
}

fn selects_the_largest<B: Backend>(
    subject: &DeviceUnderTest<B>,
    tokens: &[Tokens; 2],
    rows: usize,
    selection: Selection,
) {
    let (shape, Selection { n_heads, n_used }) = (tokens[0].shape, selection);
    let what = || {
        let n = tokens.each_ref().map(Tokens::len);
        subject.case("select_tokens", format_args!("{shape:?}, {n:?} tokens, {rows} rows, {selection:?}"))
    };
    let mut batch = stepped(subject, tokens, rows, &what);
    let positions = batch.positions();
    let dim = shape.k_head_dim;
    let q = gaussian(15, positions.len() * n_heads * dim, 1.0);
    let weights = gaussian(16, positions.len() * n_heads, 1.0);
    let mut selected = subject.poisoned(positions.len() * n_used);
    let result = batch.select(selection, [&q, &weights], &mut selected);
    result.unwrap_or_else(|error| panic!("{}: {error}", what()));
    let selected = subject.results(&selected, positions.len() * n_used, &what);
    let of_rows = positions.iter().zip(selected.chunks_exact(n_used)).zip(q.chunks_exact(n_heads * dim));
    for ((((tokens, position), selected), q), weights) in of_rows.zip(weights.chunks_exact(n_heads)) {
        let what = || format!("{}: position {position}: {selected:?}", what());
        if *position < n_used {
            assert!(selected.iter().all(|token| token.is_nan()), "{}", what());
            continue;
        }
        let scores: Vec<[f64; 2]> = (0..=*position)
            .map(|token| score(tokens.keys[0].read_at(*position, token).0, q, weights))
            .collect();
        check_selection(&scores, selected, &what);
    }
}

/// Checks that the selected ones have the largest scores, each given with its error.
pub(super) fn check_selection(scores: &[[f64; 2]], selected: &[f32], what: &dyn Fn() -> String) {
    assert!(selected.is_sorted_by(|a, b| a < b), "{}", what());
    let mut largest: Vec<f64> = scores.iter().map(|[score, _]| *score).collect();
    largest.sort_by(|a, b| b.total_cmp(a));
    let last = largest[selected.len() - 1];
    // A score that is off by its error may change places with the last selected one.
    let off = 2.0 * scores.iter().fold(0.0f64, |max, [_, error]| max.max(*error));
    for (token, [score, _]) in scores.iter().enumerate() {
        let is_selected = selected.contains(&(token as f32));
        assert!(!is_selected || *score >= last - off, "{}: {token} is less", what());
        assert!(is_selected || *score <= last + off, "{}: {token} is more", what());
    }
}

fn selects_the_largest_blocks<B: Backend>(
    subject: &DeviceUnderTest<B>,
    tokens: &[Tokens; 2],
    rows: usize,
    selection: BlockSelection,
) {
    let (shape, BlockSelection { n_heads, n_used, size, n_local }) = (tokens[0].shape, selection);
    let what = || {
        let n = tokens.each_ref().map(Tokens::len);
        subject.case("select_blocks", format_args!("{shape:?}, {n:?} tokens, {rows} rows, {selection:?}"))
    };
    let mut batch = stepped(subject, tokens, rows, &what);
    let positions = batch.positions();
    let q = gaussian(22, positions.len() * n_heads * shape.k_head_dim, 1.0);
    let n_numbers = positions.len() * n_heads * n_used;
    let mut selected = subject.poisoned(n_numbers);
    let result = batch.select_blocks(selection, &q, &mut selected);
    result.unwrap_or_else(|error| panic!("{}: {error}", what()));
    let selected = subject.results(&selected, n_numbers, &what);
    let mut of_heads = selected.chunks_exact(n_used).zip(q.chunks_exact(shape.k_head_dim));
    for (tokens, position) in positions {
        for (selected, q) in of_heads.by_ref().take(n_heads) {
            let what = || format!("{}: position {position}: {selected:?}", what());
            if position < n_used * size {
                assert!(selected.iter().all(|block| block.is_nan()), "{}", what());
                continue;
            }
            assert!(selected.is_sorted_by(|a, b| a < b), "{}", what());
            let scores: Vec<[f64; 2]> =
                (0..=position).map(|t| similarity(tokens.keys[0].read_at(position, t).0, q)).collect();
            let mut of_blocks: Vec<f64> = scores
                .chunks(size)
                .map(|block| block.iter().map(|[score, _]| *score).fold(f64::NEG_INFINITY, f64::max))
                .collect();
            let n_others = of_blocks.len() - n_local;
            of_blocks[n_others..].fill(f64::INFINITY);
            let mut largest = of_blocks.clone();
            largest.sort_by(|a, b| b.total_cmp(a));
            // A score that is off by its error may change places with the last selected one.
            let off = 2.0 * scores.iter().fold(0.0f64, |max, [_, error]| max.max(*error));
            for (block, score) in of_blocks.iter().enumerate() {
                let is_selected = selected.contains(&(block as f32));
                assert!(!is_selected || *score >= largest[n_used - 1] - off, "{}: {block} is less", what());
                assert!(is_selected || *score <= largest[n_used - 1] + off, "{}: {block} is more", what());
            }
        }
    }
}

/// Returns the product of a query and a key, and the largest error of a device.
fn similarity(key: &Row, q: &[f32]) -> [f64; 2] {
    let plain: Vec<f64> = key.plain.iter().map(|&k| f64::from(k)).collect();
    let query: Vec<f64> = q.iter().map(|&q| f64::from(q)).collect();
    let reach = norm(&key.stored) + norm(&key.centre);
    [dot(&query, &plain), (roundings(20 + key.stored.len()) + ROUNDING) * norm(q) * reach]
}

/// Returns the score of a token, and the largest error of a device: of the rotations of the query
/// and the key, the products and their sums.
pub(super) fn score(key: &Row, q: &[f32], weights: &[f32]) -> [f64; 2] {
    let plain: Vec<f64> = key.plain.iter().map(|&k| f64::from(k)).collect();
    let reach = norm(&key.stored) + norm(&key.centre);
    let e = roundings(20 + key.stored.len() + weights.len()) + ROUNDING;
    let mut total = [0.0; 2];
    for (q, &weight) in q.chunks_exact(plain.len()).zip(weights) {
        let query: Vec<f64> = q.iter().map(|&q| f64::from(q)).collect();
        total[0] += f64::from(weight) * dot(&query, &plain).max(0.0);
        total[1] += f64::from(weight.abs()) * e * norm(q) * reach;
    }
    total
}

fn attends_to_the_selected<B: Backend>(
    subject: &DeviceUnderTest<B>,
    tokens: &[Tokens; 2],
    rows: usize,
    blocks: Blocks,
) {
    let Blocks { n_used, size, n_lists, with_rest } = blocks;
    let shape = tokens[0].shape;
    let what = || {
        let n = tokens.each_ref().map(Tokens::len);
        let of_them = format_args!("{shape:?}, {n:?} tokens, {rows} rows, {blocks:?}");
        subject.case("attend_selected", of_them)
    };
    let mut batch = stepped(subject, tokens, rows, &what);
    let positions = batch.positions();
    // Those that rows select from, up to the last: whole ones, or up to that of the row.
    let n_blocks = |position: usize| if with_rest { (position + 1) / size } else { position / size + 1 };
    let selects = |position: usize| match with_rest {
        true => n_blocks(position) > n_used,
        false => position >= n_used * size,
    };
    // Every few blocks, a whole number of steps before the last; in another list those before them.
    let blocks_of = |position: usize, list: usize| {
        let last = n_blocks(position) - 1;
        let step = last / n_used;
        (0..n_used).map(move |i| {
            let shift = usize::from(step > 1 && list > 0 && i + 1 < n_used);
            last - (n_used - 1 - i) * step - shift
        })
    };
    let numbers = |position: usize, list: usize| -> Vec<f32> {
        match selects(position) {
            true => blocks_of(position, list).map(|block| block as f32).collect(),
            false => vec![f32::NAN; n_used],
        }
    };
    let selected: Vec<f32> = positions
        .iter()
        .flat_map(|&(_, position)| (0..n_lists).flat_map(move |list| numbers(position, list)))
        .collect();
    let q = gaussian(17, positions.len() * shape.n_heads() * shape.k_head_dim, 1.0);
    let got = batch.attend_selected(&q, &selected, blocks, &what);
    let got = got.unwrap_or_else(|error| panic!("{}: {error}", what()));
    let mut heads = q.chunks_exact(shape.k_head_dim).zip(got.chunks_exact(shape.v_head_dim));
    for (tokens, position) in positions {
        for (head, (q, got)) in (0..shape.n_heads()).zip(&mut heads) {
            if !selects(position) {
                assert!(got.iter().all(|value| value.is_nan()), "{}: position {position}", what());
                continue;
            }
            let list = if n_lists > 1 { head / shape.group } else { 0 };
            let rest = if with_rest { n_blocks(position) * size } else { position + 1 };
            let attended = blocks_of(position, list)
                .flat_map(|number| number * size..(number * size + size).min(position + 1))
                .chain(rest..=position);
            // A device may read all tokens and mask some, or decode the selected ones.
            let arithmetic = match subject.attention() {
                Attention::Exact => Attention::Floats,
                of_all_tokens => of_all_tokens,
            };
            let answer = Answer::new(tokens, attended, position, head, q, arithmetic);
            if let Some(fault) = answer.fault(got) {
                panic!("{}: position {position}, head {head}: {fault}", what());
            }
        }
    }
}

fn selection_is_refused<B: Backend>(subject: &DeviceUnderTest<B>) {
    let (x, mut selected) = (subject.upload(&[1.0; 8]), subject.upload(&[0.0; 8]));
    let selection = Selection { n_heads: 1, n_used: 1 };
    let result = subject.device().select_tokens(selection, &[], &x, &x, None, &mut selected);
    subject.expect_refusal("select_tokens", "any selection", result);
    let selection = BlockSelection { n_heads: 1, n_used: 1, size: 1, n_local: 0 };
    let result = subject.device().select_blocks(selection, &[], &x, None, &mut selected);
    subject.expect_refusal("select_blocks", "any selection", result);
}
