//! The KV cache of one sequence.

use std::collections::HashSet;
use std::ops::Range;
use std::sync::Arc;

use kvant_backend::{
    Backend, CountedPage, KvBatchEntry, KvMemory, Page, PageAllocator, PooledBatchEntry, StateBatchEntry,
    TOKENS_PER_BLOCK, TokenSpan,
};
use kvant_codec::tile::TILE;

use crate::block_pool::{BlockKey, BlockPool, Entry, Life, PrefixHit};
use crate::guard::Shadow;
use crate::layout::{LayerGroup, PooledLayer, pooled_rows};
use crate::recurrent_states::{KeptBlocks, RecurrentStates};
use crate::{CacheState, KvError, Layout};

/// The keys and values of one sequence: blocks of 128 tokens, a sink and a tail for each group of
/// layers.
///
/// Forks share all pages; each side copies a page before writing to it.
#[derive(Debug)]
pub struct Cache<P: Page> {
    layout: Arc<Layout>,
    /// `[groups]`
    memory: Vec<KvMemory<P>>,
    states: RecurrentStates<P>,
    /// Channel scales of each layer, `[layers]`; empty without scales, and before the first token.
    channel_scales: Vec<Arc<CountedPage<P>>>,
    len: usize,
    /// Tiles before this one are in the sink or the blocks.
    coded: usize,
    n_ctx: usize,
    /// Keys of the registered blocks, preceded by the root key.
    keys: Vec<BlockKey>,
    /// Its own life, and those of the sequences whose prefixes it began with.
    lives: Vec<Arc<Life>>,
    mark: Option<Checkpoint<P>>,
    /// Rows of one head as they were appended, if a guard follows the sequence.
    pub(crate) shadow: Option<Shadow>,
}

/// Shortest checkpointed length, from which a tail of two f16 tiles is at most a quarter of the f16
/// size. Without a checkpoint, up to 511 tokens are recomputed when an answer is regenerated or its
/// reasoning is dropped: ten seconds on a laptop with an 8B model.
const MIN_MARKED: usize = 8 * TILE;

/// A checkpoint to truncate to: the tails and the states at that length.
#[derive(Debug)]
pub(crate) struct Checkpoint<P: Page> {
    pub(crate) len: usize,
    pub(crate) coded: usize,
    /// `[groups]`
    pub(crate) tails: Vec<Option<Arc<CountedPage<P>>>>,
    pub(crate) states: Option<Arc<CountedPage<P>>>,
    /// With states, the blocks that it holds.
    pub(crate) kept: KeptBlocks<P>,
}

impl<P: Page> Clone for Checkpoint<P> {
    fn clone(&self) -> Self {
        let (tails, states, kept) = (self.tails.clone(), self.states.clone(), self.kept.clone());
        Self { tails, states, kept, ..*self }
    }
}

impl<P: Page> Clone for Cache<P> {
    fn clone(&self) -> Self {
        let Self { layout, memory, states, channel_scales: balance, len, coded, n_ctx, keys, mark, .. } =
            self;
        let (layout, memory, states) = (Arc::clone(layout), memory.clone(), states.clone());
        let (balance, keys, mark) = (balance.clone(), keys.clone(), mark.clone());
        Self {
            layout,
            memory,
            states,
            channel_scales: balance,
            len: *len,
            coded: *coded,
            n_ctx: *n_ctx,
            keys,
            lives: self.lives.clone(),
            mark,
            // A guard follows each sequence from its own steps on.
            shadow: None,
        }
    }
}

impl<P: Page> Cache<P> {
    /// Creates an empty cache for at most `n_ctx` tokens. Allocates no memory before the first
    /// token.
    pub fn new(layout: Arc<Layout>, n_ctx: usize) -> Self {
        let memory = layout.groups().iter().map(|group| KvMemory::new(group.sizes)).collect();
        let coded = layout.first_tail_tile(0);
        let (states, balance, keys) = (RecurrentStates::default(), Vec::new(), Vec::new());
        Self {
            layout,
            memory,
            states,
            channel_scales: balance,
            len: 0,
            coded,
            n_ctx,
            keys,
            lives: vec![Arc::new(Life)],
            mark: None,
            shadow: None,
        }
    }

    /// Returns what is stored, and where.
    pub fn layout(&self) -> &Arc<Layout> {
        &self.layout
    }

    /// Returns the number of tokens stored.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether no token is stored.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the maximum number of tokens.
    pub fn n_ctx(&self) -> usize {
        self.n_ctx
    }

    /// Sets the maximum number of tokens, at least the number stored.
    pub fn set_n_ctx(&mut self, n_ctx: usize) {
        self.n_ctx = n_ctx.max(self.len());
    }

    /// Returns the bytes allocated for this cache, padding and shared pages included.
    pub fn n_bytes(&self) -> usize {
        let marked = self.mark.iter().flat_map(|mark| {
            mark.tails.iter().flatten().chain(&mark.states).chain(mark.kept.iter().flatten())
        });
        let states = self.states.pages().chain(self.states.kept_blocks());
        let pages = self.memory.iter().flat_map(KvMemory::pages).chain(states);
        let mut counted = HashSet::new();
        // Snapshots and the checkpoint may share pages with what is stored now.
        let pages = pages.chain(marked).chain(&self.channel_scales);
        pages.filter(|page| counted.insert(Arc::as_ptr(page))).map(|page| page.n_bytes()).sum()
    }

    /// Returns the memory of the group of `layer`.
    pub fn memory(&self, layer: usize) -> &KvMemory<P> {
        &self.memory[self.layout.group_of(layer)]
    }

    /// Describes the next `n` tokens, at indices from `first` of the batch.
    pub fn rows(&self, first: usize, n: usize) -> TokenSpan {
        TokenSpan { first, n, start: self.len, first_tail_tile: self.coded }
    }

    /// Describes the last `n` stored tokens as tokens of a batch, to repeat their attention.
    ///
    /// # Panics
    /// When fewer than `n` tokens are stored.
    pub fn last_rows(&self, n: usize) -> TokenSpan {
        TokenSpan { first: 0, n, start: self.len - n, first_tail_tile: self.coded }
    }

    /// Returns the KV tensors and the memory of a layer, for a step of `rows`; its share of the
    /// step tiles starts at byte `step_tiles`.
    pub fn part(&mut self, layer: usize, rows: TokenSpan, step_tiles: usize) -> KvBatchEntry<'_, P> {
        let memory = &mut self.memory[self.layout.group_of(layer)];
        let balance = self.channel_scales.get(layer).map(|page| &***page);
        KvBatchEntry {
            rows,
            layer: self.layout.layer(layer),
            memory,
            step_offset: step_tiles,
            channel_scales: balance,
        }
    }

    /// Returns the pooled keys of a layer, for a step of the tokens `tokens`, whose keys are rows
    /// from `first_key` on; `None` if it has none.
    pub fn pooled_part(
        &mut self,
        layer: usize,
        tokens: TokenSpan,
        first_key: usize,
    ) -> Option<PooledBatchEntry<'_, P>> {
        let PooledLayer { tensors, group, stride, of_index } = self.layout.pooled(layer)?;
        let channel_scales = self.channel_scales.get(layer).filter(|_| !of_index).map(|page| &***page);
        let (rows, memory) = (pooled_rows(*stride, tokens, first_key), &mut self.memory[*group]);
        let keys = KvBatchEntry { rows, layer: tensors, memory, step_offset: 0, channel_scales };
        Some(PooledBatchEntry { tokens, stride: *stride, keys })
    }

    /// Returns [`Cache::part`] and [`Cache::pooled_part`] of a layer with both, as attention reads
    /// them.
    pub fn parts(
        &mut self,
        layer: usize,
        tokens: TokenSpan,
        step_tiles: usize,
    ) -> Option<(KvBatchEntry<'_, P>, PooledBatchEntry<'_, P>)> {
        let PooledLayer { tensors, group, stride, .. } = self.layout.pooled(layer)?;
        let groups = [self.layout.group_of(layer), *group];
        let [own, of_keys] = self.memory.get_disjoint_mut(groups).expect("two groups of the layout");
        let channel_scales = self.channel_scales.get(layer).map(|page| &***page);
        let of = |rows, layer, memory, step_offset| KvBatchEntry {
            rows,
            layer,
            memory,
            step_offset,
            channel_scales,
        };
        let keys = of(pooled_rows(*stride, tokens, 0), tensors, of_keys, 0);
        let own = of(tokens, self.layout.layer(layer), own, step_tiles);
        Some((own, PooledBatchEntry { tokens, stride: *stride, keys }))
    }

    /// Returns the state of recurrent layer `index`, for a step of `rows`.
    ///
    /// # Panics
    /// When the model has no such layer, or nothing was reserved.
    pub fn state_part(&mut self, index: usize, rows: TokenSpan) -> StateBatchEntry<'_, P> {
        let layout = self.layout.states().expect("a model with recurrent layers");
        self.states.part(layout, index, rows)
    }

    /// Returns the maximum number of tokens of the next step, which must not pass a snapshot of the
    /// states.
    pub fn max_rows(&self) -> usize {
        self.layout.states().map_or(usize::MAX, |states| states.tokens_to_snapshot(self.len))
    }

    /// Reserves capacity for draft tokens: returns how many of them, up to `max_tokens`, the next
    /// step may store behind the next `known` tokens.
    ///
    /// [Truncation](Cache::truncate) to any of them, or to the known tokens alone, is exact without
    /// recomputation, and they take no memory beyond that of the known tokens. With recurrent
    /// states such a truncation restores the current states, which this call saves.
    pub fn reserve_draft<B: Backend<Page = P>>(
        &mut self,
        backend: &B,
        pool: &BlockPool<P>,
        known: usize,
        max_tokens: usize,
    ) -> usize {
        let n = self.max_draft_rows(known, max_tokens);
        if n == 0 || self.layout.states().is_none() {
            return n;
        }
        // Without memory there are no draft tokens.
        if self.states.remember(self.len, &pool.allocator(backend)).is_ok() { n } else { 0 }
    }

    /// Releases memory that only draft tokens need.
    pub fn release_scratch(&mut self) {
        self.states.discard_saved();
    }

    fn max_draft_rows(&self, known: usize, max_tokens: usize) -> usize {
        let next = self.len + known;
        let is_free = |n: &usize| {
            let (len, layout) = (next + n, &self.layout);
            let coded = layout.first_tail_tile(len);
            let same_blocks = |group: &LayerGroup| {
                group.n_blocks(len, coded) == group.n_blocks(next, layout.first_tail_tile(next))
                    && group.oldest_block(len) == group.oldest_block(next)
            };
            // States cannot be truncated, so rejection must restore the current ones.
            let finds_back = layout.states().is_none_or(|_| {
                let keeps = |group: &LayerGroup| group.oldest_block(len) == group.oldest_block(self.len);
                layout.exact_truncation(self.len, coded) == self.len && layout.groups().iter().all(keeps)
            });
            len <= self.n_ctx
                && len - self.len <= self.max_rows()
                && finds_back
                && layout.exact_truncation(next, coded) == next
                && layout.groups().iter().all(same_blocks)
        };
        // Before the first token there are no states, and without a tail the stored bits depend on
        // the step sizes.
        let has_none = self.layout.states().is_some() && self.states.now().is_none();
        if has_none || !self.layout.plan().tail { 0 } else { (1..=max_tokens).take_while(is_free).count() }
    }

    /// Reserves exclusively owned memory for `n` more tokens.
    ///
    /// # Errors
    /// [`KvError::Full`] when they do not fit in the context; a device error when memory runs out.
    /// Stored tokens are unchanged, and [`Cache::unreserve`] releases what was allocated so far.
    ///
    /// # Panics
    /// When `n` is more than [`Cache::max_rows`].
    pub fn reserve<B: Backend<Page = P>>(
        &mut self,
        backend: &B,
        pool: &BlockPool<P>,
        n: usize,
    ) -> Result<(), KvError> {
        let need = self.len + n;
        if need > self.n_ctx {
            return Err(KvError::Full { need, n_ctx: self.n_ctx });
        }
        assert!(n <= self.max_rows(), "a step of {n} tokens steps over a snapshot");
        let rows = self.rows(0, n);
        let coded = self.layout.first_tail_tile(rows.end());
        for (group, memory) in self.layout.groups().iter().zip(&mut self.memory) {
            let end = group.n_blocks(rows.end(), coded);
            let first = group.first_block(rows).unwrap_or(end).min(end);
            memory.reserve(first..end, group.writes_sink(rows), &pool.allocator(backend))?;
        }
        if let Some(states) = self.layout.states() {
            self.states.reserve(states, &pool.allocator(backend))?;
        }
        self.upload_scales(backend, pool)
    }

    /// Uploads the plan's channel scales to the device, once.
    pub(crate) fn upload_scales<B: Backend<Page = P>>(
        &mut self,
        backend: &B,
        pool: &BlockPool<P>,
    ) -> Result<(), KvError> {
        let Some(balance) =
            self.layout.plan().channel_scales.as_ref().filter(|_| self.channel_scales.is_empty())
        else {
            return Ok(());
        };
        let on_device = |index| {
            let bytes = balance.bytes(index);
            let mut page = pool.allocator(backend).page(bytes.len())?;
            backend.write_page(&mut page, &bytes)?;
            Ok(Arc::new(page))
        };
        self.channel_scales = (0..balance.layers.len()).map(on_device).collect::<Result<_, KvError>>()?;
        Ok(())
    }

    /// Releases the memory [reserved](Cache::reserve) for a step that did not take place.
    pub fn unreserve(&mut self) {
        for (group, memory) in self.layout.groups().iter().zip(&mut self.memory) {
            memory.truncate(group.n_blocks(self.len, self.coded));
            if self.len == 0 {
                memory.set_sink(None);
                memory.set_tail(None);
            }
        }
        if self.len == 0 {
            self.states = RecurrentStates::default();
            self.channel_scales.clear();
        }
    }

    /// Counts `n` more tokens as stored, after every layer has written them, and releases blocks
    /// outside every window.
    pub fn commit(&mut self, n: usize) {
        self.len += n;
        self.coded = self.layout.first_tail_tile(self.len);
        self.keep_windows();
        for (group, memory) in self.layout.groups().iter().zip(&mut self.memory) {
            memory.release_before(group.oldest_block(self.len));
        }
        let Some(states) = self.layout.states() else { return };
        if states.tokens_to_snapshot(self.len) == states.snapshot_interval() {
            let kept = self.kept_blocks(self.len, |group| !group.has_window());
            self.states.save_snapshot(self.len, kept);
            self.keep_windows();
        }
    }

    /// Lets the youngest snapshot hold the blocks of its windows, as soon as they are complete.
    fn keep_windows(&mut self) {
        let Some((at, kept)) = self.states.youngest() else { return };
        let windowed = || self.layout.groups().iter().enumerate().filter(|(_, group)| group.has_window());
        let is_complete =
            |group: &LayerGroup| group.complete_blocks(self.len, self.coded) * TOKENS_PER_BLOCK >= at;
        if windowed().any(|(g, group)| kept[g].is_empty() && is_complete(group)) {
            let windows = self.kept_blocks(at, LayerGroup::has_window);
            self.states.keep(windows);
        }
    }

    /// Returns the blocks of some groups that a snapshot after `at` tokens keeps; none of a group
    /// of which some are released.
    fn kept_blocks(&self, at: usize, is_one: impl Fn(&LayerGroup) -> bool) -> KeptBlocks<P> {
        let kept = |(group, memory): (&LayerGroup, &KvMemory<P>)| {
            let Range { start, end } = group.kept_blocks(at);
            let blocks = memory.blocks().get(start..end.min(memory.blocks().len()));
            blocks.filter(|_| is_one(group)).and_then(|blocks| blocks.iter().cloned().collect())
        };
        self.groups().map(|of| kept(of).unwrap_or_default()).collect()
    }

    /// Removes every token and releases the memory.
    pub fn clear(&mut self) {
        let n_ctx = self.n_ctx;
        let root = self.keys.first().copied();
        *self = Self::new(Arc::clone(&self.layout), n_ctx);
        self.keys.extend(root);
    }

    /// Takes a checkpoint of the current length, which replaces the previous one:
    /// [`Cache::truncate`] can truncate to it, or to the tokens just before it, without
    /// recomputation.
    ///
    /// It costs a copy of the tails and states once more tokens follow. Fewer than 128 tokens are
    /// not checkpointed, unless there are states: recomputing these takes long.
    pub fn set_checkpoint(&mut self) {
        let is_worth_it = match self.states.now() {
            Some(_) => self.len > 0,
            None => self.len >= MIN_MARKED && self.state().has_tail(),
        };
        self.mark = is_worth_it.then(|| Checkpoint {
            len: self.len,
            coded: self.coded,
            tails: self.memory.iter().map(|memory| memory.tail().cloned()).collect(),
            states: self.states.now().cloned(),
            kept: match self.states.now() {
                Some(_) => self.kept_blocks(self.len, |_| true),
                None => Vec::new(),
            },
        });
    }

    /// Truncates the cache to its first `n` tokens, or fewer: where the next token would read in
    /// f16 what is stored as codes only, truncation goes back to the nearest exact length. Returns
    /// the tokens left; feeding the others again gives the cache of feeding `n` tokens, bit for
    /// bit.
    ///
    /// # Panics
    /// When `n > len()`.
    pub fn truncate(&mut self, n: usize) -> usize {
        assert!(n <= self.len, "cannot cut {} tokens to {n}", self.len);
        if n == self.len {
            return n;
        }
        let now = self.rewind_point(n, self.coded);
        let marked = self.mark.as_ref().map_or(0, |mark| match n >= mark.len {
            true => mark.len,
            false => self.rewind_point(n, mark.coded),
        });
        let n = now.max(marked);
        // Of a checkpoint some tokens may be in its tail alone.
        let kept = match &self.mark {
            Some(mark) if now < marked => Some(&mark.kept),
            _ => self.states.kept_after(n),
        };
        let kept = kept.cloned().unwrap_or_default();
        if n == 0 || !self.has_blocks(n, &kept) {
            self.clear();
            return 0;
        }
        let mut states = self.states.after(n).cloned();
        // The checkpoint stays for later truncations: an answer may be regenerated repeatedly.
        if let Some(mark) = self.mark.as_ref().filter(|_| now < marked).cloned() {
            self.coded = mark.coded;
            self.memory.iter_mut().zip(mark.tails).for_each(|(memory, tail)| memory.set_tail(tail));
            states = states.or(mark.states.filter(|_| mark.len == n));
        }
        self.states.go_back(n, states);
        self.mark.take_if(|mark| mark.len > n);
        (self.len, self.coded) = (n, self.coded.min(n.div_ceil(TILE)).max(self.layout.first_tail_tile(0)));
        for (group, memory) in self.layout.groups().iter().zip(&mut self.memory) {
            memory.truncate(group.n_blocks(self.len, self.coded));
        }
        self.restore_blocks(&kept);
        self.keys.truncate(1 + n / self.layout.prefix_unit());
        n
    }

    /// Puts back the blocks that a snapshot of the current length keeps.
    fn restore_blocks(&mut self, kept: &KeptBlocks<P>) {
        let groups = self.layout.groups().iter().zip(&mut self.memory);
        for ((group, memory), kept) in groups.zip(kept) {
            group.kept_blocks(self.len).zip(kept).for_each(|(index, block)| memory.restore(index, block));
        }
    }

    /// Returns the longest length up to `n` to which truncation is exact, while tiles before
    /// `coded` are coded.
    fn rewind_point(&self, n: usize, coded: usize) -> usize {
        let is_exact = |at: &usize| *at <= n && self.layout.exact_truncation(*at, coded) == *at;
        match self.layout.states() {
            None => self.layout.exact_truncation(n, coded),
            Some(_) => self.states.places().filter(is_exact).max().unwrap_or(0),
        }
    }

    /// Returns whether every block that a query after `n` tokens reads is still present, or kept.
    fn has_blocks(&self, n: usize, kept: &KeptBlocks<P>) -> bool {
        self.groups().enumerate().all(|(g, (group, memory))| {
            let coded = self.coded.min(n.div_ceil(TILE));
            let blocks = group.oldest_block(n)..group.n_blocks(n, coded);
            let is_kept = kept.get(g).is_some_and(|kept| !kept.is_empty() && group.has_window());
            is_kept || memory.blocks().get(blocks).is_none_or(|blocks| blocks.iter().all(Option::is_some))
        })
    }

    /// Discards a failed step. The tail may have been overwritten, so that more tokens may be lost:
    /// see [`Cache::truncate`]. Returns the tokens left.
    pub fn undo_step(&mut self) -> usize {
        // Treats everything as coded, so that only a length which needs nothing of the tail is
        // exact.
        self.coded = usize::MAX;
        let len = self.len;
        self.len += 1;
        self.truncate(len)
    }

    /// Returns the number of coded tiles.
    pub(crate) fn coded(&self) -> usize {
        self.coded
    }

    pub(crate) fn set_state(
        &mut self,
        state: CacheState,
        states: Option<Arc<CountedPage<P>>>,
        mark: Option<Checkpoint<P>>,
    ) {
        (self.len, self.coded, self.mark) = (state.len, state.coded, mark);
        self.states.go_back(state.len, states);
    }

    pub(crate) fn states(&self) -> &RecurrentStates<P> {
        &self.states
    }

    pub(crate) fn marked(&self) -> Option<&Checkpoint<P>> {
        self.mark.as_ref()
    }

    /// Returns each group with its memory.
    pub(crate) fn groups(&self) -> impl Iterator<Item = (&LayerGroup, &KvMemory<P>)> {
        self.layout.groups().iter().zip(&self.memory)
    }

    pub(crate) fn memory_mut(&mut self) -> &mut [KvMemory<P>] {
        &mut self.memory
    }

    /// Sets the parent key of the first block; without it, blocks are neither registered nor looked
    /// up. A sequence with registered blocks keeps its root.
    pub fn set_prefix_root(&mut self, root: BlockKey) {
        if self.keys.len() <= 1 || self.is_empty() {
            self.keys = vec![root];
        }
    }

    /// Registers the complete blocks, so that other sequences can share them. `tokens` are the
    /// stored tokens without draft tokens.
    pub fn register_prefix(&mut self, pool: &BlockPool<P>, tokens: &[u32]) {
        let (groups, unit) = (self.layout.groups().iter(), self.layout.prefix_unit());
        let groups = groups.filter(|group| !group.is_pooled());
        let complete = groups.map(|group| group.complete_blocks(self.len, self.coded)).min();
        let complete = complete.unwrap_or(self.len / unit).min(tokens.len() / unit);
        while let Some(&parent) = self.keys.last().filter(|_| self.keys.len() <= complete) {
            let index = self.keys.len() - 1;
            let weak = |page: &Arc<_>| Arc::downgrade(page);
            let block = |(group, memory): (&LayerGroup, &KvMemory<P>)| {
                memory.blocks()[group.completed_block(index)?].as_ref().map(weak)
            };
            let blocks = self.groups().map(block).collect();
            let sinks = self.memory.iter().map(|memory| memory.sink().map(weak)).collect();
            let end = (index + 1) * unit;
            let states = self.states.after(end).map(weak);
            let kept = self.states.kept_after(end).into_iter().flatten();
            let kept = kept.map(|of| of.iter().map(weak).collect()).collect();
            let tokens = &tokens[index * unit..][..unit];
            let life = Arc::downgrade(&self.lives[0]);
            let entry = Entry { blocks, sinks, states, kept, life };
            self.keys.push(pool.register_prefix(parent, tokens, entry));
        }
    }

    /// Attaches the longest registered prefix of `tokens`, all but the last token at most:
    /// bit-identical to feeding it. Returns its length.
    ///
    /// # Panics
    /// When tokens are stored already.
    pub fn attach_prefix(&mut self, pool: &BlockPool<P>, tokens: &[u32]) -> usize {
        assert!(self.is_empty(), "a sequence that holds tokens cannot begin anew");
        let (max_len, unit) = (tokens.len().saturating_sub(1).min(self.n_ctx), self.layout.prefix_unit());
        let Some(&root) = self.keys.first() else { return 0 };
        let (mut keys, mut found) = (vec![root], Vec::new());
        for tokens in tokens[..max_len].chunks_exact(unit) {
            let Some((key, block)) = pool.find(*keys.last().expect("the root"), tokens) else { break };
            keys.push(key);
            found.push(block);
        }
        let is_whole = |n: usize| {
            self.layout.is_attachable(n * unit)
                && (self.layout.states().is_none() || found[n - 1].states.is_some())
                && self.layout.groups().iter().enumerate().all(|(g, group)| {
                    let is_there = |index: usize| found[index].blocks[g].is_some();
                    // The snapshot holds those of a window.
                    match &found[n - 1].states {
                        Some((_, kept)) if group.has_window() => !kept[g].is_empty(),
                        _ => group.blocks_of_prefix(n).all(is_there),
                    }
                })
        };
        let n = (0..=found.len()).rev().find(|&n| n == 0 || is_whole(n)).unwrap_or(0);
        for (g, (group, memory)) in self.layout.groups().iter().zip(&mut self.memory).enumerate() {
            let completed = (0..n).filter(|&index| group.completed_block(index).is_some());
            completed.for_each(|index| memory.push(found[index].blocks[g].clone()));
            memory.set_sink(found[..n].last().and_then(|block| block.sinks[g].clone()));
        }
        keys.truncate(1 + n);
        self.keys = keys;
        self.len = n * unit;
        for life in found[..n].iter().filter_map(|block| block.life.as_ref()) {
            if !self.lives.iter().any(|known| Arc::ptr_eq(known, life)) {
                self.lives.push(Arc::clone(life));
            }
        }
        if let Some(PrefixHit { states: Some((states, kept)), .. }) = found[..n].last() {
            self.restore_blocks(kept);
            self.states.attach_prefix(self.len, Arc::clone(states), kept.clone());
        }
        self.coded = (self.len / TILE).max(self.layout.first_tail_tile(0));
        self.len
    }
}
