//! The cache of one sequence: a stream per (layer, KV head, K or V).

use kvant_backend::{Backend, KvLayer, Page, Stream};
use kvant_codec::tile::Side;

use crate::{KvError, KvShape, Plan};

/// The keys and values of one sequence.
///
/// A fork shares the full pages of the common prefix; either side copies a page before it writes to it.
#[derive(Debug)]
pub struct Cache<P: Page> {
    shape: KvShape,
    plan: Plan,
    layers: Vec<KvLayer<P>>,
    n_ctx: usize,
}

impl<P: Page> Cache<P> {
    /// An empty cache for at most `n_ctx` tokens. Pages are allocated as the context grows.
    ///
    /// # Errors
    /// When the device has no memory left.
    ///
    /// # Panics
    /// When `plan` was made for another shape.
    pub fn new<B: Backend<Page = P>>(
        backend: &B,
        shape: &KvShape,
        plan: Plan,
        n_ctx: usize,
    ) -> Result<Self, KvError> {
        assert_eq!(plan.types.len(), shape.n_layers, "the plan belongs to another model");
        let stream = |layer, head, side| {
            Stream::new(plan.stream(shape, layer, head, side), &mut |bytes| backend.page(bytes))
        };
        let heads = |layer, side| (0..shape.n_kv_heads).map(move |head| stream(layer, head, side));
        let layers = (0..shape.n_layers).map(|layer| {
            Ok(KvLayer {
                k: heads(layer, Side::K).collect::<Result<_, _>>()?,
                v: heads(layer, Side::V).collect::<Result<_, _>>()?,
            })
        });
        let layers = layers.collect::<Result<_, KvError>>()?;
        Ok(Self { shape: shape.clone(), plan, layers, n_ctx })
    }

    /// A second cache with the same tokens, which shares the full pages.
    ///
    /// # Errors
    /// When the device has no memory left.
    pub fn fork(&self) -> Result<Self, KvError> {
        let layers = self.layers.iter().map(KvLayer::fork).collect::<Result<_, _>>()?;
        Ok(Self { shape: self.shape.clone(), plan: self.plan.clone(), layers, n_ctx: self.n_ctx })
    }

    /// What is stored, and how.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The model's KV heads.
    pub fn shape(&self) -> &KvShape {
        &self.shape
    }

    /// Tokens stored.
    pub fn len(&self) -> usize {
        self.layers.first().map_or(0, KvLayer::len)
    }

    /// Whether no token is stored.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Tokens that fit.
    pub fn n_ctx(&self) -> usize {
        self.n_ctx
    }

    /// Changes how many tokens fit; at least those that are stored do.
    pub fn set_n_ctx(&mut self, n_ctx: usize) {
        self.n_ctx = n_ctx.max(self.len());
    }

    /// The streams of a layer, for the device.
    pub fn layer(&self, index: usize) -> &KvLayer<P> {
        &self.layers[index]
    }

    /// The streams of a layer, for the device to append to.
    pub fn layer_mut(&mut self, index: usize) -> &mut KvLayer<P> {
        &mut self.layers[index]
    }

    /// Bytes allocated for this cache: pages, sink and tail, padding included.
    pub fn n_bytes(&self) -> usize {
        self.streams().map(Stream::n_bytes).sum()
    }

    /// Bytes that a cache of the same tokens would have allocated in f16.
    pub fn f16_bytes(&self) -> usize {
        self.shape.f16_bytes(self.len())
    }

    /// Makes room for `n` more tokens in every layer.
    ///
    /// # Errors
    /// [`KvError::Full`] when they do not fit in the context; a device error when memory runs out. Nothing that was
    /// stored is lost.
    pub fn reserve<B: Backend<Page = P>>(&mut self, backend: &B, n: usize) -> Result<(), KvError> {
        let need = self.len() + n;
        if need > self.n_ctx {
            return Err(KvError::Full { need, n_ctx: self.n_ctx });
        }
        for stream in self.streams_mut() {
            stream.reserve(n, &mut |bytes| backend.page(bytes))?;
        }
        Ok(())
    }

    /// Forgets every token and gives the pages back.
    pub fn clear(&mut self) {
        self.streams_mut().for_each(Stream::clear);
    }

    /// Forgets every token but the first `n`. Encoded tokens of a tile that is cut through return to the f16 tail
    /// with the values the codes stand for, so nothing is encoded from a rounded value twice over: decoding and
    /// encoding again gives the same codes.
    ///
    /// # Errors
    /// When the device cannot be read or written.
    ///
    /// # Panics
    /// When `n > len()`.
    pub fn truncate<B: Backend<Page = P>>(&mut self, backend: &B, n: usize) -> Result<(), KvError> {
        self.streams_mut().try_for_each(|stream| truncate_stream(backend, stream, n))
    }

    pub(crate) fn streams(&self) -> impl Iterator<Item = &Stream<P>> {
        self.layers.iter().flat_map(|layer| layer.k.iter().chain(&layer.v))
    }

    pub(crate) fn streams_mut(&mut self) -> impl Iterator<Item = &mut Stream<P>> {
        self.layers.iter_mut().flat_map(|layer| layer.k.iter_mut().chain(&mut layer.v))
    }
}

fn truncate_stream<B: Backend>(backend: &B, stream: &mut Stream<B::Page>, n: usize) -> Result<(), KvError> {
    let Some((torn, slots)) = stream.truncate(n) else { return Ok(()) };
    let alpha = stream.spec().alpha;
    let (main, tail) = (stream.spec().main_layout(), stream.spec().f16_layout());

    let from = stream.tile_at(torn);
    let mut page = vec![0; from.page.n_bytes()];
    backend.read_page(from.page, &mut page)?;
    let codes = &page[from.offset..][..main.bytes()];

    let to = stream.place(n / kvant_codec::tile::TILE);
    let (_, tail_page, offset) = stream.tile_mut(to);
    let mut bytes = vec![0; tail_page.n_bytes()];
    backend.read_page(tail_page, &mut bytes)?;
    let mut row = vec![0.0; main.dim()];
    for slot in slots {
        main.get(codes, slot, &mut row);
        row.iter_mut().for_each(|value| *value /= alpha);
        tail.put(&mut bytes[offset..][..tail.bytes()], slot, &row);
    }
    backend.write_page(tail_page, &bytes)?;
    Ok(())
}
