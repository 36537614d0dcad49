//! The cache of one sequence.

use std::sync::Arc;

use kvant_backend::{Backend, Held, KvMemory, KvPart, Page, Pages, Rows, StatePart, TOKENS_PER_BLOCK};
use kvant_codec::tile::TILE;

use crate::layout::Group;
use crate::pool::{BlockKey, Entry, Pool};
use crate::states::States;
use crate::{CacheState, KvError, Layout};

/// The keys and values of one sequence: blocks of 128 tokens, a sink and a tail for each group of layers.
///
/// A fork shares all of them; either side copies what it is about to write.
#[derive(Debug)]
pub struct Cache<P: Page> {
    layout: Arc<Layout>,
    /// `[groups]`
    memory: Vec<KvMemory<P>>,
    states: States<P>,
    /// What each layer's rows are multiplied by, `[layers]`; empty where nothing is, or nothing has been fed.
    balance: Vec<Arc<Held<P>>>,
    len: usize,
    /// Tiles before this one are in the sink or the blocks.
    coded: usize,
    n_ctx: usize,
    /// Keys of the blocks that have been made known, behind what the first one follows on.
    keys: Vec<BlockKey>,
    mark: Option<Mark<P>>,
}

/// Tokens from which on a tail of two f16 tiles is no more than a quarter of what f16 takes. Without a mark up to 511 tokens are read
/// again where an answer is given anew or a thought is left out, which takes a laptop ten seconds with a model of 8B.
const LEAST_MARKED: usize = 8 * TILE;

/// A place to go back to: the tails and the states as they were.
#[derive(Debug)]
pub(crate) struct Mark<P: Page> {
    pub(crate) len: usize,
    pub(crate) coded: usize,
    /// `[groups]`
    pub(crate) tails: Vec<Option<Arc<Held<P>>>>,
    pub(crate) states: Option<Arc<Held<P>>>,
}

impl<P: Page> Clone for Mark<P> {
    fn clone(&self) -> Self {
        Self { tails: self.tails.clone(), states: self.states.clone(), ..*self }
    }
}

impl<P: Page> Clone for Cache<P> {
    fn clone(&self) -> Self {
        let Self { layout, memory, states, balance, len, coded, n_ctx, keys, mark } = self;
        let (layout, memory, states) = (Arc::clone(layout), memory.clone(), states.clone());
        let (balance, keys, mark) = (balance.clone(), keys.clone(), mark.clone());
        Self { layout, memory, states, balance, len: *len, coded: *coded, n_ctx: *n_ctx, keys, mark }
    }
}

impl<P: Page> Cache<P> {
    /// An empty cache for at most `n_ctx` tokens. Nothing is allocated before tokens come.
    pub fn new(layout: Arc<Layout>, n_ctx: usize) -> Self {
        let memory = layout.groups().iter().map(|group| KvMemory::new(group.sizes)).collect();
        let coded = layout.coded_tiles(0);
        let (states, balance, keys) = (States::default(), Vec::new(), Vec::new());
        Self { layout, memory, states, balance, len: 0, coded, n_ctx, keys, mark: None }
    }

    /// What is stored, and where.
    pub fn layout(&self) -> &Arc<Layout> {
        &self.layout
    }

    /// Tokens stored.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether no token is stored.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Tokens that fit.
    pub fn n_ctx(&self) -> usize {
        self.n_ctx
    }

    /// Changes how many tokens fit; at least those that are stored do.
    pub fn set_n_ctx(&mut self, n_ctx: usize) {
        self.n_ctx = n_ctx.max(self.len());
    }

    /// Bytes allocated for this cache, padding included; what others share is counted too.
    pub fn n_bytes(&self) -> usize {
        let marked = self.mark.iter().flat_map(|mark| mark.tails.iter().flatten().chain(&mark.states));
        let is_there = |page: &&Arc<Held<P>>| {
            let tails = self.memory.iter().filter_map(KvMemory::tail);
            tails.chain(self.states.pages()).any(|there| Arc::ptr_eq(there, page))
        };
        let marked = marked.filter(|page| !is_there(page));
        // The youngest snapshot may still be what is there.
        let states = self.states.pages().skip(usize::from(self.states.is_remembered()));
        let pages =
            self.memory.iter().flat_map(KvMemory::pages).chain(states).chain(marked).chain(&self.balance);
        pages.map(|page| page.n_bytes()).sum()
    }

    /// The memory of the group that `layer` belongs to.
    pub fn memory(&self, layer: usize) -> &KvMemory<P> {
        &self.memory[self.layout.group_of(layer)]
    }

    /// `n` more rows, the first of them row `first` of a step.
    pub fn rows(&self, first: usize, n: usize) -> Rows {
        Rows { first, n, start: self.len, coded: self.coded }
    }

    /// The last `n` of the tokens that are stored as rows of a step, to attend once more.
    ///
    /// # Panics
    /// When there are not as many.
    pub fn last_rows(&self, n: usize) -> Rows {
        Rows { first: 0, n, start: self.len - n, coded: self.coded }
    }

    /// The streams and the memory of a layer, for a step of `rows`; its share of the band begins at byte `band`.
    pub fn part(&mut self, layer: usize, rows: Rows, band: usize) -> KvPart<'_, P> {
        let memory = &mut self.memory[self.layout.group_of(layer)];
        let balance = self.balance.get(layer).map(|page| &***page);
        KvPart { rows, layer: self.layout.layer(layer), memory, band, balance }
    }

    /// The state of recurrent layer `index`, for a step of `rows`.
    ///
    /// # Panics
    /// When the model has no such layer, or nothing was reserved.
    pub fn state_part(&mut self, index: usize, rows: Rows) -> StatePart<'_, P> {
        let layout = self.layout.states().expect("a model with recurrent layers");
        self.states.part(layout, index, rows)
    }

    /// The most tokens that the next step may add: it must not step over a place where the states are remembered.
    pub fn most_rows(&self) -> usize {
        self.layout.states().map_or(usize::MAX, |states| states.until_snapshot(self.len))
    }

    /// How many tokens behind the next `known` ones the next step may store on trial, `most` at most: a [cut](Cache::cut) to any of them, or
    /// to the known ones alone, leaves what is there without feeding anything again, and they take no memory that those do not. Where
    /// there are states, such a cut leaves what is there now: they are remembered.
    pub fn try_on<B: Backend<Page = P>>(
        &mut self,
        backend: &B,
        pool: &Pool<P>,
        known: usize,
        most: usize,
    ) -> usize {
        let n = self.most_on_trial(known, most);
        if n == 0 || self.layout.states().is_none() {
            return n;
        }
        // Without memory nothing is tried.
        if self.states.remember(self.len, &pool.on(backend)).is_ok() { n } else { 0 }
    }

    /// Gives back memory that only tokens on trial need.
    pub fn rest(&mut self) {
        self.states.forget();
    }

    fn most_on_trial(&self, known: usize, most: usize) -> usize {
        let next = self.len + known;
        let is_free = |n: &usize| {
            let (len, layout) = (next + n, &self.layout);
            let coded = layout.coded_tiles(len);
            let same_blocks = |group: &Group| {
                group.n_blocks(len, coded) == group.n_blocks(next, layout.coded_tiles(next))
                    && group.oldest_block(len) == group.oldest_block(next)
            };
            // States are not cut: the way back is one to where they are.
            let finds_back = layout.states().is_none_or(|_| {
                let keeps = |group: &Group| group.oldest_block(len) == group.oldest_block(self.len);
                layout.exact_cut(self.len, coded) == self.len && layout.groups().iter().all(keeps)
            });
            len <= self.n_ctx
                && len - self.len <= self.most_rows()
                && finds_back
                && layout.exact_cut(next, coded) == next
                && layout.groups().iter().all(same_blocks)
        };
        // Before the first token there are none, and without a tail what is stored depends on the steps.
        let has_none = self.layout.states().is_some() && self.states.now().is_none();
        if has_none || !self.layout.plan().tail { 0 } else { (1..=most).take_while(is_free).count() }
    }

    /// Makes room for `n` more tokens, in memory that nobody else has.
    ///
    /// # Errors
    /// [`KvError::Full`] when they do not fit in the context; a device error when memory runs out. Nothing that was
    /// stored is lost, and [`Cache::unreserve`] gives back what had been found until then.
    ///
    /// # Panics
    /// When `n` is more than [`Cache::most_rows`].
    pub fn reserve<B: Backend<Page = P>>(
        &mut self,
        backend: &B,
        pool: &Pool<P>,
        n: usize,
    ) -> Result<(), KvError> {
        let need = self.len + n;
        if need > self.n_ctx {
            return Err(KvError::Full { need, n_ctx: self.n_ctx });
        }
        assert!(n <= self.most_rows(), "a step of {n} tokens steps over a snapshot");
        let rows = self.rows(0, n);
        let coded = self.layout.coded_tiles(rows.end());
        for (group, memory) in self.layout.groups().iter().zip(&mut self.memory) {
            let end = group.n_blocks(rows.end(), coded);
            let first = group.first_block(rows).unwrap_or(end).min(end);
            memory.reserve(first..end, group.writes_sink(rows), &pool.on(backend))?;
        }
        if let Some(states) = self.layout.states() {
            self.states.reserve(states, &pool.on(backend))?;
        }
        self.bring_balance(backend, pool)
    }

    /// Brings the balance of the plan to the device, if it is not there.
    pub(crate) fn bring_balance<B: Backend<Page = P>>(
        &mut self,
        backend: &B,
        pool: &Pool<P>,
    ) -> Result<(), KvError> {
        let Some(balance) = self.layout.plan().balance.as_ref().filter(|_| self.balance.is_empty()) else {
            return Ok(());
        };
        let on_device = |index| {
            let bytes = balance.bytes(index);
            let mut page = pool.on(backend).page(bytes.len())?;
            backend.write_page(&mut page, &bytes)?;
            Ok(Arc::new(page))
        };
        self.balance = (0..balance.layers.len()).map(on_device).collect::<Result<_, KvError>>()?;
        Ok(())
    }

    /// Gives back what was [reserved](Cache::reserve) for a step that did not come.
    pub fn unreserve(&mut self) {
        for (group, memory) in self.layout.groups().iter().zip(&mut self.memory) {
            memory.truncate(group.n_blocks(self.len, self.coded));
            if self.len == 0 {
                memory.set_sink(None);
                memory.set_tail(None);
            }
        }
        if self.len == 0 {
            self.states = States::default();
            self.balance.clear();
        }
    }

    /// Counts `n` more tokens as stored, once every layer has written them, and lets go of blocks that no query will see.
    pub fn commit(&mut self, n: usize) {
        self.len += n;
        self.coded = self.layout.coded_tiles(self.len);
        for (group, memory) in self.layout.groups().iter().zip(&mut self.memory) {
            memory.forget(group.oldest_block(self.len));
        }
        if let Some(states) = self.layout.states() {
            self.states.commit(states, self.len);
        }
    }

    /// Forgets every token and gives the memory back.
    pub fn clear(&mut self) {
        let n_ctx = self.n_ctx;
        let root = self.keys.first().copied();
        *self = Self::new(Arc::clone(&self.layout), n_ctx);
        self.keys.extend(root);
    }

    /// Remembers this place, in place of the one before: [`Cache::cut`] finds back to it, or to the tokens just before it,
    /// without feeding any again. Costs a copy of the tails and states once more tokens come; of fewer than 128 tokens nothing is
    /// remembered, unless there are states: the way back to these is long.
    pub fn mark(&mut self) {
        let is_worth_it = match self.states.now() {
            Some(_) => self.len > 0,
            None => self.len >= LEAST_MARKED && self.state().has_tail(),
        };
        self.mark = is_worth_it.then(|| Mark {
            len: self.len,
            coded: self.coded,
            tails: self.memory.iter().map(|memory| memory.tail().cloned()).collect(),
            states: self.states.now().cloned(),
        });
    }

    /// Forgets every token but the first `n`, or fewer: where what comes next would see in 16 bit what is there in codes only,
    /// the cut goes back to where it would not. Returns the tokens that are left; feeding the others again gives the cache
    /// that feeding `n` tokens gives, bit for bit.
    ///
    /// # Panics
    /// When `n > len()`.
    pub fn cut(&mut self, n: usize) -> usize {
        assert!(n <= self.len, "cannot cut {} tokens to {n}", self.len);
        if n == self.len {
            return n;
        }
        let now = self.way_back(n, self.coded);
        let marked = self.mark.as_ref().map_or(0, |mark| match n >= mark.len {
            true => mark.len,
            false => self.way_back(n, mark.coded),
        });
        let n = now.max(marked);
        if n == 0 || !self.is_there(n) {
            self.clear();
            return 0;
        }
        let mut states = self.states.after(n).cloned();
        // It is there for the next cut as well: an answer may be given again and again.
        if let Some(mark) = self.mark.as_ref().filter(|_| now < marked).cloned() {
            self.coded = mark.coded;
            self.memory.iter_mut().zip(mark.tails).for_each(|(memory, tail)| memory.set_tail(tail));
            states = states.or(mark.states.filter(|_| mark.len == n));
        }
        self.states.go_back(n, states);
        self.mark.take_if(|mark| mark.len > n);
        (self.len, self.coded) = (n, self.coded.min(n.div_ceil(TILE)).max(self.layout.coded_tiles(0)));
        for (group, memory) in self.layout.groups().iter().zip(&mut self.memory) {
            memory.truncate(group.n_blocks(self.len, self.coded));
        }
        self.keys.truncate(1 + n / TOKENS_PER_BLOCK);
        n
    }

    /// The longest place up to `n` that can be gone on from as if no more had ever been fed, while tiles before `coded` are
    /// coded.
    fn way_back(&self, n: usize, coded: usize) -> usize {
        let is_exact = |at: &usize| *at <= n && self.layout.exact_cut(*at, coded) == *at;
        match self.layout.states() {
            None => self.layout.exact_cut(n, coded),
            Some(_) => self.states.places().filter(is_exact).max().unwrap_or(0),
        }
    }

    /// Whether no block has been let go of that a query after `n` tokens may see.
    fn is_there(&self, n: usize) -> bool {
        self.groups().all(|(group, memory)| {
            let coded = self.coded.min(n.div_ceil(TILE));
            let blocks = group.oldest_block(n)..group.n_blocks(n, coded);
            memory.blocks().get(blocks).is_none_or(|blocks| blocks.iter().all(Option::is_some))
        })
    }

    /// After a step that failed: nothing of it is kept. The tail may have been written over, so that more may have to go: see
    /// [`Cache::cut`]. Returns the tokens that are left.
    pub fn undo_step(&mut self) -> usize {
        // As if everything had been coded: only a cut that needs nothing of the tail will do.
        self.coded = usize::MAX;
        let len = self.len;
        self.len += 1;
        self.cut(len)
    }

    /// Tiles that are coded.
    pub(crate) fn coded(&self) -> usize {
        self.coded
    }

    pub(crate) fn set_state(
        &mut self,
        state: CacheState,
        states: Option<Arc<Held<P>>>,
        mark: Option<Mark<P>>,
    ) {
        (self.len, self.coded, self.mark) = (state.len, state.coded, mark);
        self.states.go_back(state.len, states);
    }

    pub(crate) fn states(&self) -> &States<P> {
        &self.states
    }

    pub(crate) fn marked(&self) -> Option<&Mark<P>> {
        self.mark.as_ref()
    }

    /// Each group with its memory.
    pub(crate) fn groups(&self) -> impl Iterator<Item = (&Group, &KvMemory<P>)> {
        self.layout.groups().iter().zip(&self.memory)
    }

    pub(crate) fn memory_mut(&mut self) -> &mut [KvMemory<P>] {
        &mut self.memory
    }

    /// Says what the first block follows on; without, blocks are neither made known nor looked for. Of a sequence whose blocks
    /// are known already, it stays as it is.
    pub fn set_root(&mut self, root: BlockKey) {
        if self.keys.len() <= 1 || self.is_empty() {
            self.keys = vec![root];
        }
    }

    /// Makes the blocks known that are complete, so that other sequences can begin with them. `tokens` are those that are
    /// stored, but for what is on trial.
    pub fn publish(&mut self, pool: &Pool<P>, tokens: &[u32]) {
        let groups = self.layout.groups().iter();
        let complete = groups.map(|group| group.complete_blocks(self.len, self.coded)).min().unwrap_or(0);
        let (known, _) = tokens.as_chunks();
        let complete = complete.min(known.len());
        while let Some(&parent) = self.keys.last().filter(|_| self.keys.len() <= complete) {
            let index = self.keys.len() - 1;
            let weak = |page: &Arc<_>| Arc::downgrade(page);
            let block = |memory: &KvMemory<P>| memory.blocks()[index].as_ref().map(weak);
            let blocks = self.memory.iter().map(block).collect();
            let sinks = self.memory.iter().map(|memory| memory.sink().map(weak)).collect();
            let states = self.states.after((index + 1) * TOKENS_PER_BLOCK).map(weak);
            self.keys.push(pool.publish(parent, &known[index], Entry { blocks, sinks, states }));
        }
    }

    /// Begins with the longest prefix of `tokens` that other sequences hold, all but the last token at most: bit for bit what
    /// feeding it gives. Returns its length.
    ///
    /// # Panics
    /// When tokens are stored already.
    pub fn attach(&mut self, pool: &Pool<P>, tokens: &[u32]) -> usize {
        assert!(self.is_empty(), "a sequence that holds tokens cannot begin anew");
        let most = tokens.len().saturating_sub(1).min(self.n_ctx);
        let (Some(&root), (blocks, _)) = (self.keys.first(), tokens[..most].as_chunks::<TOKENS_PER_BLOCK>())
        else {
            return 0;
        };
        let (mut keys, mut found) = (vec![root], Vec::new());
        for tokens in blocks {
            let Some((key, block)) = pool.find(*keys.last().expect("the root"), tokens) else { break };
            keys.push(key);
            found.push(block);
        }
        let is_whole = |n: usize| {
            self.layout.is_attachable(n * TOKENS_PER_BLOCK)
                && (self.layout.states().is_none() || found[n - 1].states.is_some())
                && self.layout.groups().iter().enumerate().all(|(g, group)| {
                    let seen = group.oldest_block(n * TOKENS_PER_BLOCK)..n;
                    found[seen].iter().all(|block| block.blocks[g].is_some())
                })
        };
        let n = (0..=found.len()).rev().find(|&n| n == 0 || is_whole(n)).unwrap_or(0);
        for (g, memory) in self.memory.iter_mut().enumerate() {
            found[..n].iter().for_each(|block| memory.push(block.blocks[g].clone()));
            memory.set_sink(found[..n].last().and_then(|block| block.sinks[g].clone()));
        }
        if let Some(states) = found[..n].last().and_then(|block| block.states.clone()) {
            self.states.attach(n * TOKENS_PER_BLOCK, states);
        }
        keys.truncate(1 + n);
        self.keys = keys;
        self.len = n * TOKENS_PER_BLOCK;
        self.coded = (self.len / TILE).max(self.layout.coded_tiles(0));
        self.len
    }
}
