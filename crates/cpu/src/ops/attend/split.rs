//! Schedules attention (split-KV, as in flash-decoding): assigns queries and KV splits to threads,
//! and merges the splits.
//!
//! Attention is batch-invariant. The tokens before a query's window are split at multiples of
//! [`SHARE`], each KV split is processed in blocks of 128 from a fresh softmax, splits merge in
//! token order, and the window comes last as a split of its own. Queries processed together may
//! have different visible ranges: a token masked for a query has weight exactly zero, and so has a
//! block or a split of such tokens. Which thread processes which splits, one or all of them,
//! changes no bit either.

use std::f32::consts::LOG2_E;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use kvant_backend::KvBatchEntry;
use kvant_codec::tile::{TILE, slices};

use super::AttendArgs;
use super::codes::Coding;
use super::matrix_unit::MatrixPath;
use super::selection::{JobRows, Masks, RowSpan};
use super::shape::{BLOCK, Lane, MASKED_SCORE, QUERY_GROUP, SLICE};
use super::softmax::{AddSplit, MergeSoftmax, RescaleOutputs};
use super::stage::Stage;
use super::thread_state::ThreadState;
use super::view::{Block, TokenForm, View};
use crate::host::disjoint::DisjointMut;
use crate::host::page::CpuPage;
use crate::host::pool::Pool;
use crate::ops::channel_scales::HeadScales;
use crate::simd::vec16::{Direction, Lanes, Rotate};

/// Minimum queries of a pass over the KV cache: below it, passes are not divided further for more
/// jobs, since jobs with several KV splits hold the outputs of all their queries for every split.
const MIN_QUERIES_PER_JOB: usize = 48;

/// Tokens of a KV split.
const SPLIT_TOKENS: usize = 1024;

/// Jobs per thread below which jobs are divided into KV splits.
const JOBS_PER_THREAD: usize = 4;

/// Scratch memory, reused between calls so that decode does not allocate.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    /// `[threads]`
    threads: Vec<ThreadState>,
    /// One per item where jobs are divided into splits, else two per thread.
    shares: Vec<KvSplit>,
    jobs: Vec<WorkItem>,
    /// Number of finished splits, `[jobs]`.
    done: Vec<AtomicUsize>,
}

/// A block of queries of one KV head of a sequence.
#[derive(Debug, Clone)]
struct WorkItem {
    part: usize,
    head: usize,
    /// Query i is head `i mod group` of the group, of token `i / group` of the sequence.
    queries: Range<usize>,
    /// Its KV splits, as a range of those of all jobs.
    shares: Range<usize>,
}

/// Partial softmax state: `out / sum` is the mean of the values so far, weighted by 2^(score -
/// max).
#[derive(Debug, Default)]
struct KvSplit {
    queries: usize,
    /// `value_dim / 16`
    width: usize,
    /// `[queries]`, in sixteens.
    max: Vec<[f32; 16]>,
    /// `[queries]`, in sixteens.
    sum: Vec<[f32; 16]>,
    /// `[queries][width]`
    out: Vec<Lane>,
}

/// What all threads of a call share.
struct Call<'a, B: MatrixPath> {
    /// The matrix path for the codes of many queries, if the set has one.
    proof: Option<B::Proof>,
    args: AttendArgs<'a>,
}

/// See [`super::attend`]. `proof` is that of the matrix path for the codes of many queries, if the
/// set has one.
pub(super) fn attend<L: Lanes, B: MatrixPath>(
    lanes: L,
    proof: Option<B::Proof>,
    pool: &Pool,
    scratch: &mut Scratch,
    stage: Stage,
    args: AttendArgs<'_>,
    out: &mut [f32],
) {
    let call = &Call::<B> { proof, args };
    let n_threads = pool.n_threads();
    call.cut(n_threads, &mut scratch.jobs);
    let jobs = &scratch.jobs;
    let n_shares = jobs.last().map_or(0, |job| job.shares.end);
    let cuts = n_threads > 1 && jobs.len() < JOBS_PER_THREAD * n_threads;
    let n_items = if cuts { n_shares } else { jobs.len() };
    scratch.threads.resize_with(n_threads.max(scratch.threads.len()), ThreadState::default);
    let n_kept = if cuts { n_shares } else { 2 * n_threads };
    scratch.shares.resize_with(n_kept.max(scratch.shares.len()), KvSplit::default);
    scratch.done.clear();
    scratch.done.resize_with(jobs.len(), AtomicUsize::default);

    let (locals, shares) = (DisjointMut::new(&mut scratch.threads), DisjointMut::new(&mut scratch.shares));
    let (done, out, next) = (&scratch.done, DisjointMut::new(out), AtomicUsize::new(0));
    // Neighbouring splits go to one thread, which prefetches the next while it works on one, but
    // not so many that a delayed thread delays the others.
    let together = if cuts { (n_items / (JOBS_PER_THREAD * n_threads)).max(1) } else { 1 };
    let work = |thread: usize| {
        // SAFETY: each thread of the region has its own number.
        let local = unsafe { &mut locals.part(thread..thread + 1)[0] };
        local.begin(stage);
        loop {
            let first = next.fetch_add(together, Ordering::Relaxed);
            if first >= n_items {
                return;
            }
            let items = first..n_items.min(first + together);
            for item in items.clone() {
                if !cuts {
                    // SAFETY: these two splits belong to this thread.
                    let own = unsafe { shares.part(2 * thread..2 * thread + 2) };
                    let [all, more] = own else { unreachable!("two splits") };
                    let task = call.task(&jobs[item]);
                    task.attend_split(lanes, local, all, item, 0, true);
                    for number in 1..task.n_splits() {
                        task.attend_split(lanes, local, more, item, number, true);
                        all.merge_split(lanes, more, local);
                    }
                    task.finish(lanes, all, local, &out);
                    continue;
                }
                let index = jobs.partition_point(|job| job.shares.end <= item);
                let (job, task) = (&jobs[index], call.task(&jobs[index]));
                // SAFETY: this split belongs to this item.
                let share = unsafe { &mut shares.part(item..item + 1)[0] };
                task.attend_split(lanes, local, share, index, item - job.shares.start, item + 1 < items.end);
                if done[index].fetch_add(1, Ordering::AcqRel) + 1 == job.shares.len() {
                    // SAFETY: all splits of this job are done, and the counter's ordering makes
                    // them visible; no other thread accesses them.
                    let parts = unsafe { shares.part(job.shares.clone()) };
                    let (first, rest) = parts.split_first_mut().expect("at least one share");
                    rest.iter().for_each(|other| first.merge_split(lanes, other, local));
                    task.finish(lanes, first, local, &out);
                }
            }
        }
    };
    if n_items <= 1 { work(0) } else { pool.region().run(&work) }
}

impl<'a, B: MatrixPath> Call<'a, B> {
    fn group(&self) -> usize {
        self.args.p.n_heads / self.args.p.n_kv_heads.max(1)
    }

    /// Divides the step into jobs. The last queries of a sequence see the most tokens: they come
    /// first, so that the threads finish together.
    fn cut(&self, n_threads: usize, jobs: &mut Vec<WorkItem>) {
        jobs.clear();
        let n_jobs = |queries_per_job: usize| {
            let blocks = self.spans().map(|span| (span.rows.len() * self.group()).div_ceil(queries_per_job));
            blocks.sum::<usize>() * self.args.p.n_kv_heads
        };
        let mut queries_per_job = B::QUERIES;
        while n_threads > 1
            && queries_per_job > MIN_QUERIES_PER_JOB
            && n_jobs(queries_per_job) < JOBS_PER_THREAD * n_threads
        {
            queries_per_job = (queries_per_job / 2).max(MIN_QUERIES_PER_JOB);
        }
        let mut first_share = 0;
        for RowSpan { part, rows } in self.spans() {
            let (first, n_queries) = (rows.start * self.group(), rows.len() * self.group());
            for block in (0..n_queries.div_ceil(queries_per_job)).rev() {
                for head in 0..self.args.p.n_kv_heads {
                    let queries = queries_per_job * block..n_queries.min(queries_per_job * (block + 1));
                    let queries = first + queries.start..first + queries.end;
                    let mut job = WorkItem { part, head, queries, shares: 0..0 };
                    job.shares = first_share..first_share + self.task(&job).n_splits();
                    first_share = job.shares.end;
                    jobs.push(job);
                }
            }
        }
    }

    /// Returns the rows that attend.
    fn spans(&self) -> impl Iterator<Item = RowSpan> {
        let AttendArgs { parts, selected, .. } = self.args;
        let of_part = move |part: usize| RowSpan { part, rows: 0..parts[part].rows.n };
        let whole = (0..if selected.is_some() { 0 } else { parts.len() }).map(of_part);
        let selected = selected.map_or(&[][..], |selected| selected.spans);
        whole.chain(selected.iter().cloned())
    }

    fn task(&'a self, job: &'a WorkItem) -> Task<'a, B> {
        let (part, group) = (&self.args.parts[job.part], self.group());
        let position = |query: usize| part.rows.start + query / group;
        let positions = position(job.queries.start)..position(job.queries.end - 1) + 1;
        let window = |position: usize| TILE * part.layer.head_f16_window_start(job.head, position / TILE);
        let oldest = part.layer.window_start(positions.start);
        Task {
            call: self,
            part,
            group,
            job,
            main: oldest..window(positions.end - 1).min(positions.end),
            window: window(positions.start).max(oldest)..positions.end,
            keys: View::new(part, &part.layer.k[job.head], self.args.step_tiles),
            values: View::new(part, part.layer.values(job.head), self.args.step_tiles),
            balance: HeadScales::of(part, job.head),
        }
    }
}

/// Maxima and sums of some queries, in sixteens.
struct SoftmaxState<'a> {
    max: &'a [[f32; 16]],
    sum: &'a [[f32; 16]],
}

impl KvSplit {
    fn reset(&mut self, queries: usize, width: usize) {
        (self.queries, self.width) = (queries, width);
        self.max.clear();
        // As of tokens that are all masked: finite, as a split may have no others.
        self.max.resize(queries.div_ceil(16), [MASKED_SCORE; 16]);
        self.sum.clear();
        self.sum.resize(queries.div_ceil(16), [0.0; 16]);
        self.out.clear();
        self.out.resize(queries * width, Lane([0.0; 16]));
    }

    /// Returns the outputs of some queries.
    fn out(&mut self, some: &Range<usize>) -> &mut [Lane] {
        &mut self.out[some.start * self.width..some.end * self.width]
    }

    /// Merges maxima and sums of some queries, and rescales their outputs to the new maxima. Leaves
    /// in `rescale_new` the factors for the outputs that belong to the merged state.
    fn join<L: Lanes>(
        &mut self,
        lanes: L,
        some: &Range<usize>,
        more: SoftmaxState<'_>,
        rescale_old: &mut [[f32; 16]],
        rescale_new: &mut [[f32; 16]],
    ) {
        let (max, sum) = (&mut self.max[vector_range(some)], &mut self.sum[vector_range(some)]);
        let SoftmaxState { max: more_max, sum: more_sum } = more;
        lanes.run(MergeSoftmax { max, sum, more_max, more_sum, rescale_old: &mut *rescale_old, rescale_new });
        let width = self.width;
        lanes.run(RescaleOutputs { out: self.out(some), width, rescale_old: rescale_old.as_flattened() });
    }

    /// Merges a later split of the same queries.
    fn merge_split<L: Lanes>(&mut self, lanes: L, other: &Self, local: &mut ThreadState) {
        for some in query_groups(self.queries) {
            local.select_queries(some.clone());
            let [max, sum] = [&other.max, &other.sum].map(|of| &of[vector_range(&some)]);
            let more = SoftmaxState { max, sum };
            self.join(lanes, &some, more, &mut local.rescale_old, &mut local.rescale_new);
            let (width, more) = (self.width, &other.out[some.start * self.width..some.end * self.width]);
            lanes.run(AddSplit {
                out: self.out(&some),
                more,
                width,
                rescale_new: local.rescale_new.as_flattened(),
            });
        }
    }
}

/// Returns the groups of queries that are processed together. Each begins at a multiple of sixteen.
fn query_groups(queries: usize) -> impl Iterator<Item = Range<usize>> {
    (0..queries).step_by(QUERY_GROUP).map(move |first| first..queries.min(first + QUERY_GROUP))
}

/// Returns the range of some queries, in sixteens.
fn vector_range(some: &Range<usize>) -> Range<usize> {
    some.start / 16..some.end.div_ceil(16)
}

/// A job with the visible ranges of its queries.
struct Task<'a, B: MatrixPath> {
    call: &'a Call<'a, B>,
    part: &'a KvBatchEntry<'a, CpuPage>,
    group: usize,
    job: &'a WorkItem,
    /// Tokens that some of the queries read from the blocks.
    main: Range<usize>,
    /// Tokens that some of the queries read from their window; empty without a tail.
    window: Range<usize>,
    keys: View<'a>,
    values: View<'a>,
    balance: Option<HeadScales<'a>>,
}

impl<B: MatrixPath> Task<'_, B> {
    /// Returns (token of the batch, query head) of each query.
    fn rows(&self) -> impl Iterator<Item = (usize, usize)> {
        let (group, head, first) = (self.group, self.job.head, self.part.rows.first);
        self.job.queries.clone().map(move |i| (first + i / group, head * group + i % group))
    }

    /// Returns the KV splits of the tokens in the blocks.
    fn main_splits(&self) -> Range<usize> {
        if self.main.is_empty() {
            0..0
        } else {
            self.main.start / SPLIT_TOKENS..self.main.end.div_ceil(SPLIT_TOKENS)
        }
    }

    fn n_splits(&self) -> usize {
        self.main_splits().len() + usize::from(!self.window.is_empty())
    }

    /// Prepares the queries, and the buffers for their keys and values.
    fn prepare<L: Lanes>(&self, lanes: L, local: &mut ThreadState) {
        let AttendArgs { p, q, .. } = self.call.args;
        let query = |(row, head)| &q[(row * p.n_heads + head) * p.k_head_dim..][..p.k_head_dim];
        let balance = self.balance.as_ref().map(|balance| balance.query);
        let queries = self.rows().map(query);
        local.queries.prepare(lanes, &self.keys.tensor.spec, p.scale * LOG2_E, balance, queries);
        local.reset([&self.keys, &self.values].map(|view| &view.tensor.spec));
    }

    /// Returns the tokens of KV split `number`, and the form in which they are read.
    fn split_tokens(&self, number: usize) -> (TokenForm, Range<usize>) {
        let main_splits = self.main_splits();
        if number >= main_splits.len() {
            return (TokenForm::Window, self.window.clone());
        }
        let first = (main_splits.start + number) * SPLIT_TOKENS;
        (TokenForm::Main, first.max(self.main.start)..self.main.end.min(first + SPLIT_TOKENS))
    }

    /// Attends over one KV split, block by block. Codes go to the matrix path, if there is one. The
    /// task is that of job `index`; `goes_on` states whether this thread takes the next split too.
    fn attend_split<L: Lanes>(
        &self,
        lanes: L,
        local: &mut ThreadState,
        share: &mut KvSplit,
        index: usize,
        number: usize,
        goes_on: bool,
    ) {
        let n = self.job.queries.len();
        if local.replace_job(index) {
            self.prepare(lanes, local);
        }
        share.reset(n, self.values.tensor.spec.stored_value_dim() / 16);
        let (form, tokens) = self.split_tokens(number);
        let (blocks, rows) = (tokens.start / BLOCK * BLOCK..tokens.end, self.job_rows());
        // Taken from the thread, which the loops change.
        let mut masks = std::mem::take(&mut local.masks);
        masks.set(self.call.args.selected, rows, &blocks);
        let mut firsts = blocks.step_by(BLOCK).filter(|&first| masks.any(first, 0..rows.n)).peekable();
        let Some(&start) = firsts.peek() else {
            drop(firsts);
            local.masks = masks;
            return;
        };
        // End of the tokens to prefetch.
        let end = if goes_on && form == TokenForm::Main { self.main.end } else { tokens.end };
        let block = |view, first: usize| {
            let within = |token: usize| token.clamp(first, first + BLOCK) - first;
            let (tiles, read) = (within(tokens.start) / TILE..within(end).div_ceil(TILE), masks.tiles(first));
            let start = tiles.start.max(read.start);
            Block::new(view, first / TILE, start..tiles.end.min(read.end).max(start), form)
        };
        let mut path = self.call.proof.filter(|_| n >= B::MIN_QUERIES).map(B::new);
        let both = |first: usize| [block(&self.keys, first), block(&self.values, first)];
        let mut next = both(start);
        // The first values are not prefetched yet, unless this thread had the previous split.
        local.prefetcher(lanes, &path, n, &next[1..]).finish();
        while let Some(first) = firsts.next() {
            let [keys, values] =
                std::mem::replace(&mut next, both(*firsts.peek().unwrap_or(&(first + BLOCK))));
            self.keys.prefetch_block((first + 2 * BLOCK) / TILE);
            let prefetcher = &mut local.prefetcher(lanes, &path, n, &next);
            if path.is_some() {
                local.unpack(lanes, &keys, &values);
            }
            for some in query_groups(n) {
                let seen = self.visible_to_any(&some, form);
                if seen.start >= first + BLOCK || seen.end <= first || !masks.any(first, self.rows_of(&some))
                {
                    continue;
                }
                local.select_queries(some.clone());
                for run in keys.runs() {
                    match (Coding::of(run.layout.dtype()), &mut path) {
                        (Some(coding), Some(path)) => {
                            local.score_panels(lanes, path, coding, &run, prefetcher)
                        }
                        (Some(coding), None) => local.score_codes(lanes, coding, &run, prefetcher),
                        (None, _) => local.score_floats(lanes, &run, prefetcher),
                    }
                }
                self.weigh(lanes, local, &masks, &keys, &values.tiles);
                let more = SoftmaxState { max: &local.max, sum: &local.sum };
                share.join(lanes, &some, more, &mut local.rescale_old, &mut local.rescale_new);
                let out = share.out(&some);
                for run in values.runs() {
                    match (Coding::of(run.layout.dtype()), &mut path) {
                        (Some(_), Some(path)) => local.accumulate_panels(lanes, path, &run, prefetcher, out),
                        (Some(coding), None) => local.accumulate_codes(lanes, coding, &run, prefetcher, out),
                        (None, _) => local.accumulate_floats(lanes, &run, prefetcher, out),
                    }
                }
                if self.part.layer.is_shared_kv()
                    && let Some(centre) = keys.centre()
                {
                    let tiles = centre.first.max(keys.tiles.start)..keys.tiles.end;
                    local.accumulate_centre(lanes, centre.bytes, tiles, out);
                }
            }
            prefetcher.finish();
        }
        drop(firsts);
        local.masks = masks;
    }

    /// Returns the rows of the job.
    fn job_rows(&self) -> JobRows {
        let (first, kv_head) = (self.job.queries.start / self.group, self.job.head);
        let n = self.job.queries.end.div_ceil(self.group) - first;
        JobRows { first: self.part.rows.first + first, position: self.part.rows.start + first, n, kv_head }
    }

    /// Returns the rows of some queries, counted from the first of the job.
    fn rows_of(&self, some: &Range<usize>) -> Range<usize> {
        let (queries, first) = (&self.job.queries, self.job.queries.start / self.group);
        let row = |query: usize| (queries.start + query) / self.group - first;
        row(some.start)..row(some.end - 1) + 1
    }

    /// Turns the scores of the active queries against a block of keys, of which tiles `tiles` are
    /// attended to, into weights relative to their maxima.
    fn weigh<L: Lanes>(
        &self,
        lanes: L,
        local: &mut ThreadState,
        masks: &Masks,
        keys: &Block,
        tiles: &Range<usize>,
    ) {
        // Where `q · centre` applies to all scores of a block, adding it to their maximum suffices;
        // with a soft cap it must be added to the scores.
        let (centre, soft_cap) = (keys.centre(), self.call.args.p.soft_cap);
        let is_even = centre.is_some_and(|centre| centre.first == 0) && soft_cap.is_none();
        if let Some(centre) = centre {
            local.dot_centre(lanes, centre.bytes);
            if !is_even {
                local.add_centre_dot(lanes, centre.first.max(keys.tiles.start)..keys.tiles.end);
            }
        }
        if let Some(cap) = soft_cap {
            local.soft_cap(lanes, cap * LOG2_E, tiles.clone());
        }
        let (first, sure) = (TILE * keys.first, self.visible_to_all(&local.active, keys.form));
        if first < sure.start || first + TILE * tiles.end > sure.end {
            self.mask(local, first, tiles, keys.form);
        }
        if masks.are_set() {
            let rows = self.rows_of(&local.active).start;
            let skipped = (self.job.queries.start + local.active.start) % self.group;
            for (i, scores) in local.scores.iter_mut().enumerate() {
                masks.apply(first, rows + (skipped + i) / self.group, tiles, scores);
            }
        }
        local.softmax(lanes, tiles.clone());
        if is_even {
            local.add_centre_dot_to_max();
        }
    }

    /// Returns the tokens that a query at `position` sees in this form.
    fn visible_range(&self, position: usize, form: TokenForm) -> Range<usize> {
        let layer = self.part.layer;
        let (oldest, window) = (
            layer.window_start(position),
            TILE * layer.head_f16_window_start(self.job.head, position / TILE),
        );
        match form {
            TokenForm::Main => oldest..window.min(position + 1),
            TokenForm::Window => window.max(oldest)..position + 1,
        }
    }

    /// Returns the visible ranges of the first and the last of some queries in this form.
    fn visible_to_ends(&self, some: &Range<usize>, form: TokenForm) -> [Range<usize>; 2] {
        let position = |query: usize| self.part.rows.start + (self.job.queries.start + query) / self.group;
        [some.start, some.end - 1].map(|query| self.visible_range(position(query), form))
    }

    /// Returns the tokens visible to every one of some queries in this form: from the start of the
    /// last query's range to the end of the first one's.
    fn visible_to_all(&self, some: &Range<usize>, form: TokenForm) -> Range<usize> {
        let [first, last] = self.visible_to_ends(some, form);
        last.start..first.end
    }

    /// Returns the range that contains all tokens visible to any of some queries in this form.
    fn visible_to_any(&self, some: &Range<usize>, form: TokenForm) -> Range<usize> {
        let [first, last] = self.visible_to_ends(some, form);
        first.start..last.end
    }

    /// Masks for each query the tokens that it does not see, or not in this form. The block begins
    /// with token `first`.
    fn mask(&self, local: &mut ThreadState, first: usize, tiles: &Range<usize>, form: TokenForm) {
        let (begin, end) = (tiles.start * TILE, tiles.end * TILE);
        let queries = self.job.queries.start + local.active.start..;
        for (query, scores) in queries.zip(&mut local.scores) {
            let seen = self.visible_range(self.part.rows.start + query / self.group, form);
            let within = |token: usize| token.saturating_sub(first).clamp(begin, end);
            let scores = scores.0.as_flattened_mut();
            scores[begin..within(seen.start)].fill(MASKED_SCORE);
            scores[within(seen.end)..end].fill(MASKED_SCORE);
        }
    }

    /// Divides by the sums (sinks included), un-rotates, undoes the channel scales and writes the
    /// outputs.
    fn finish<L: Lanes>(&self, lanes: L, share: &KvSplit, local: &mut ThreadState, out: &DisjointMut<f32>) {
        let AttendArgs { p, .. } = self.call.args;
        let (spec, row) = (&self.values.tensor.spec, &mut local.row);
        let (dim, width) = (spec.stored_value_dim(), spec.stored_value_dim() / 16);
        for (i, (query_row, head)) in self.rows().enumerate() {
            let [max, sum] = [&share.max, &share.sum].map(|of| of.as_flattened()[i]);
            let by = self.call.args.sinks.map_or(1.0 / sum, |sinks| with_sink(max, sum, sinks[head]));
            row.clear();
            for lane in &share.out[i * width..(i + 1) * width] {
                row.extend_from_slice(&lane.0.map(|x| x * by));
            }
            if spec.rotates {
                for slice in slices(dim, SLICE) {
                    lanes.run(Rotate { rows: row, width: dim, slice, way: Direction::Inverse });
                }
            }
            let at = (query_row * p.n_heads + head) * p.v_head_dim;
            // SAFETY: each (row, query head) is finished once, by the thread that completes its
            // job.
            let (out, row) = (unsafe { out.part(at..at + p.v_head_dim) }, &row[..p.v_head_dim]);
            match self.balance.as_ref().and_then(|balance| balance.out) {
                None => out.copy_from_slice(row),
                Some(of_out) => of_out.apply(0..row.len(), row, out),
            }
        }
    }
}

/// Returns the factor on the outputs when a sink joins the softmax of these scores (in log2 units,
/// the sink in natural ones): 1 / sum, relative to the larger of both maxima.
fn with_sink(max: f32, sum: f32, sink: f32) -> f32 {
    let sink = sink * LOG2_E;
    let top = max.max(sink);
    let rescale = (max - top).exp2();
    rescale / (sum * rescale + (sink - top).exp2())
}
