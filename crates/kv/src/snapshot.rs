//! Saves and restores a cache: its pages, byte for byte.

use std::ops::Range;
use std::sync::Arc;

use kvant_backend::{Backend, Page, PageAllocator, TileLocation};
use kvant_codec::tile::{self, Side, TILE, restore_row};

use crate::block_pool::BlockPool;
use crate::cache::Checkpoint;
use crate::layout::StateLayout;
use crate::{Cache, KvError, Layout};

/// The state of a cache apart from its pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CacheState {
    /// Tokens stored.
    pub len: usize,
    /// Tiles of 16 tokens that are coded.
    pub coded: usize,
    /// Tokens and coded tiles of the checkpoint.
    pub mark: Option<(usize, usize)>,
}

impl CacheState {
    /// Returns whether the tail holds tokens: after truncation to a prefix boundary, or with only a
    /// shared prefix, it holds none.
    pub(crate) fn has_tail(self) -> bool {
        self.coded * TILE < self.len
    }
}

impl<P: Page> Cache<P> {
    /// Returns the state that [`Cache::pages`] does not contain.
    pub fn state(&self) -> CacheState {
        CacheState {
            len: self.len(),
            coded: self.coded(),
            mark: self.marked().map(|mark| (mark.len, mark.coded)),
        }
    }

    /// Returns every page that later steps may read.
    fn live_pages(&self) -> impl Iterator<Item = &P> {
        let pages = self.groups().flat_map(|(group, memory)| {
            let tail = memory.tail().filter(|_| self.state().has_tail());
            let f16 = memory.sink().into_iter().chain(tail);
            // A tail longer than a sliding window holds tokens that are in no block.
            let blocks = memory.blocks().get(group.oldest_block(self.len())..).unwrap_or_default();
            f16.chain(blocks.iter().flatten())
        });
        let states = self.states().now().filter(|_| !self.is_empty());
        let marked =
            self.marked().into_iter().flat_map(|mark| mark.tails.iter().flatten().chain(&mark.states));
        pages.chain(states).chain(marked).map(|page| &***page)
    }

    /// Returns the bytes of each of the [pages](Cache::pages).
    pub fn page_bytes(&self) -> impl Iterator<Item = usize> {
        self.live_pages().map(Page::n_bytes)
    }

    /// Returns the bytes of every page that later steps may read: for each group the sink, the
    /// tail, and the blocks; the states of recurrent layers; then the tails and the states of the
    /// checkpoint.
    pub fn pages<B: Backend<Page = P>>(&self, backend: &B) -> impl Iterator<Item = Result<Vec<u8>, KvError>> {
        self.live_pages().map(|page| {
            let mut bytes = vec![0; page.n_bytes()];
            backend.read_page(page, &mut bytes)?;
            Ok(bytes)
        })
    }

    /// Restores a cache from the pages of another. `next` is called in the order of
    /// [`Cache::pages`] with the expected number of bytes.
    ///
    /// # Errors
    /// [`KvError::Image`] when the state or a page does not fit the layout, [`KvError::Full`] when
    /// there are more tokens than `n_ctx`, a device error, and errors of `next`.
    pub fn from_pages<B: Backend<Page = P>, E: From<KvError>>(
        backend: &B,
        pool: &BlockPool<P>,
        layout: Arc<Layout>,
        n_ctx: usize,
        state: CacheState,
        next: &mut dyn FnMut(usize) -> Result<Vec<u8>, E>,
    ) -> Result<Self, E> {
        // When a model is split into parts, one part may code tokens that another does not.
        let coded_here = |coded| if layout.has_tail() { coded } else { layout.first_tail_tile(0) };
        let mark = state.mark.map(|(len, coded)| (len, coded_here(coded)));
        let state = CacheState { coded: coded_here(state.coded), mark, ..state };
        let CacheState { len, coded, mark } = state;
        if len > n_ctx {
            return Err(KvError::Full { need: len, n_ctx }.into());
        }
        let mut cache = Self::new(Arc::clone(&layout), n_ctx);
        for (len, coded) in std::iter::once((len, coded)).chain(mark) {
            // The lengths that a cache of so many tokens can reach: by feeding, or by truncation
            // after that.
            let min_coded = layout.first_tail_tile(len);
            if len > state.len || coded < min_coded || (coded > min_coded && coded > len.div_ceil(TILE)) {
                let what = format!("{coded} coded tiles cannot be those of {len} tokens");
                return Err(KvError::Image { index: 0, what }.into());
            }
        }
        let mut index = 0;
        let mut read = |n_bytes: usize| {
            let bytes = next(index)?;
            if bytes.len() != n_bytes {
                let what = format!("expected {n_bytes} bytes, got {}", bytes.len());
                return Err(KvError::Image { index, what }.into());
            }
            index += 1;
            let mut page = pool.allocator(backend).page(n_bytes).map_err(KvError::from)?;
            backend.write_page(&mut page, &bytes).map_err(KvError::from)?;
            Ok::<_, E>(Arc::new(page))
        };
        for (group, memory) in layout.groups().iter().zip(cache.memory_mut()) {
            let sizes = group.sizes;
            if sizes.sink > 0 && len > 0 {
                memory.set_sink(Some(read(sizes.sink)?));
            }
            if sizes.tail > 0 && state.has_tail() {
                memory.set_tail(Some(read(sizes.tail)?));
            }
            let oldest = group.oldest_block(len);
            for block in 0..group.n_blocks(len, coded) {
                memory.push(if block < oldest { None } else { Some(read(sizes.block)?) });
            }
        }
        let state_bytes = layout.states().filter(|_| len > 0).map(StateLayout::n_bytes);
        let states = state_bytes.map(&mut read).transpose()?;
        let mark = match mark {
            None => None,
            Some((len, coded)) => {
                let sizes = layout.groups().iter().map(|group| group.sizes.tail);
                let tails =
                    sizes.map(|tail| (tail > 0).then(|| read(tail)).transpose()).collect::<Result<_, _>>()?;
                let states = state_bytes.map(&mut read).transpose()?;
                // Without the blocks that it held: it cannot be returned to beyond a window.
                Some(Checkpoint { len, coded, tails, states, kept: Vec::new() })
            }
        };
        cache.set_state(state, states, mark);
        if len > 0 {
            cache.upload_scales(backend, pool)?;
        }
        Ok(cache)
    }

    /// Returns the stored keys or values of one head, `[tokens, head_dim]` from the oldest token of
    /// the window on: decoded, un-rotated and unscaled. For measurements.
    ///
    /// # Errors
    /// When the device cannot be read.
    pub fn decoded_rows<B: Backend<Page = P>>(
        &self,
        backend: &B,
        layer: usize,
        head: usize,
        side: Side,
    ) -> Result<Vec<f32>, KvError> {
        let first = self.layout().layer(layer).window_start(self.len());
        self.decoded_tokens(backend, layer, head, side, first..self.len())
    }

    /// Returns the stored keys or values of these tokens, as [`Cache::decoded_rows`] does.
    pub(crate) fn decoded_tokens<B: Backend<Page = P>>(
        &self,
        backend: &B,
        layer: usize,
        head: usize,
        side: Side,
        tokens: Range<usize>,
    ) -> Result<Vec<f32>, KvError> {
        let tensors = self.layout().layer(layer);
        let tensor = match side {
            Side::K => &tensors.k[head],
            Side::V => tensors.values(head),
        };
        let (spec, memory) = (&tensor.spec, self.memory(layer));
        let dim = if side == Side::V { spec.v_head_dim() } else { spec.head_dim };
        let mut rows = vec![0.0; tokens.len() * dim];
        let (mut padded, mut whole) = (vec![0.0; spec.stored_dim()], vec![0.0; spec.head_dim]);
        let mut read: (Option<&P>, Vec<u8>) = (None, Vec::new());
        for (token, row) in tokens.zip(rows.chunks_exact_mut(dim)) {
            let place = spec.location(token / TILE, self.coded());
            let stored = memory.tile(tensor, place);
            if !read.0.is_some_and(|page| std::ptr::eq(page, stored.page)) {
                read = (None, vec![0; stored.page.n_bytes()]);
                backend.read_page(stored.page, &mut read.1)?;
                read.0 = Some(stored.page);
            }
            stored.layout.get(&read.1[stored.offset..][..stored.layout.bytes()], token % TILE, &mut padded);
            if spec.centres && matches!(place, TileLocation::Main(_)) {
                let centre = &read.1[tensor.centre..][..spec.centre_bytes()];
                padded.iter_mut().zip(tile::centre(centre)).for_each(|(v, c)| *v += c);
            }
            restore_row(spec.rotates, &mut padded, &mut whole);
            if let Some(balance) = &self.layout().plan().channel_scales {
                balance.layers[layer].undo(
                    head,
                    if spec.shared_kv.is_some() { Side::K } else { side },
                    &mut whole,
                );
            }
            row.copy_from_slice(&whole[..dim]);
        }
        Ok(rows)
    }
}
