//! A cache taken down and put up again: each stream as its tiles' bytes in token order, bit for bit.

use kvant_backend::{Backend, Page, Stream, StreamSpec};
use kvant_codec::Rotation;
use kvant_codec::tile::{Side, TILE, restore_row};

use crate::{Cache, KvError, KvShape, Plan};

/// One stream, flattened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StreamImage {
    /// Tokens stored.
    pub len: usize,
    /// Where its main pages end and its f16 tail begins, in tokens.
    pub main_end: usize,
    /// Its tiles, those of the sink first, then the main ones, then those of the tail.
    pub bytes: Vec<u8>,
}

impl StreamImage {
    /// Bytes that the tiles of a stream of `len` tokens take.
    pub fn n_bytes(spec: &StreamSpec, len: usize, main_end: usize) -> usize {
        let n_tiles = len.div_ceil(TILE);
        let f16_tiles = n_tiles.min(spec.sink_tiles) + n_tiles.saturating_sub(main_end.div_ceil(TILE));
        f16_tiles * spec.f16_layout().bytes() + (n_tiles - f16_tiles) * spec.main_layout().bytes()
    }
}

impl<P: Page> Cache<P> {
    /// Every stream: layer by layer, the keys of each head, then the values.
    pub fn images<B: Backend<Page = P>>(
        &self,
        backend: &B,
    ) -> impl Iterator<Item = Result<StreamImage, KvError>> {
        self.streams().map(|stream| take_down(backend, stream))
    }

    /// A cache from the images of another, asked for in the order of [`Cache::images`] with the stream's number.
    ///
    /// # Errors
    /// [`KvError::Image`] when an image does not fit the plan or the other images, [`KvError::Full`] when there are
    /// more tokens than `n_ctx`, a device error, and whatever `next` fails with.
    ///
    /// # Panics
    /// When `plan` was made for another shape.
    pub fn from_images<B: Backend<Page = P>, E: From<KvError>>(
        backend: &B,
        shape: &KvShape,
        plan: Plan,
        n_ctx: usize,
        next: &mut dyn FnMut(usize) -> Result<StreamImage, E>,
    ) -> Result<Self, E> {
        let mut cache = Self::new(backend, shape, plan, n_ctx)?;
        let mut len = None;
        for (index, stream) in cache.streams_mut().enumerate() {
            let image = next(index)?;
            let expected = *len.get_or_insert(image.len);
            if image.len != expected {
                let what = format!("expected {expected} tokens as in the first stream, got {}", image.len);
                return Err(KvError::Image { index, what }.into());
            }
            if image.len > n_ctx {
                return Err(KvError::Full { need: image.len, n_ctx }.into());
            }
            *stream = put_up(backend, *stream.spec(), &image, index)?;
        }
        Ok(cache)
    }

    /// The stored keys or values of one head as numbers, `[len, head_dim]`: decoded and, where the stream is
    /// rotated, rotated back. For measurements.
    ///
    /// # Errors
    /// When the device cannot be read.
    pub fn rows<B: Backend<Page = P>>(
        &self,
        backend: &B,
        layer: usize,
        head: usize,
        side: Side,
    ) -> Result<Vec<f32>, KvError> {
        let streams = match side {
            Side::K => &self.layer(layer).k,
            Side::V => &self.layer(layer).v,
        };
        let (stream, rotation) = (&streams[head], Rotation::kv());
        let spec = stream.spec();
        let rotation = spec.rotates().then_some(&rotation);
        let mut rows = vec![0.0; stream.len() * spec.head_dim];
        let mut padded = vec![0.0; spec.dim()];
        let mut reader = PageReader::new(backend);
        for (token, row) in rows.chunks_exact_mut(spec.head_dim).enumerate() {
            let tile = stream.tile(token / TILE);
            let bytes = &reader.read(tile.page)?[tile.offset..][..tile.layout.bytes()];
            tile.layout.get(bytes, token % TILE, &mut padded);
            restore_row(rotation, &mut padded, row);
        }
        Ok(rows)
    }
}

/// Reads pages from the device, each once while it is asked for again and again.
struct PageReader<'a, B: Backend> {
    backend: &'a B,
    page: Option<&'a B::Page>,
    bytes: Vec<u8>,
}

impl<'a, B: Backend> PageReader<'a, B> {
    fn new(backend: &'a B) -> Self {
        Self { backend, page: None, bytes: Vec::new() }
    }

    fn read(&mut self, page: &'a B::Page) -> Result<&[u8], KvError> {
        if !self.page.is_some_and(|read| std::ptr::eq(read, page)) {
            self.page = None;
            self.bytes.resize(page.n_bytes(), 0);
            self.backend.read_page(page, &mut self.bytes)?;
            self.page = Some(page);
        }
        Ok(&self.bytes)
    }
}

fn take_down<B: Backend>(backend: &B, stream: &Stream<B::Page>) -> Result<StreamImage, KvError> {
    let (len, main_end) = (stream.len(), stream.main_end());
    let mut bytes = Vec::with_capacity(StreamImage::n_bytes(stream.spec(), len, main_end));
    let mut reader = PageReader::new(backend);
    for index in 0..stream.n_tiles() {
        let tile = stream.tile(index);
        bytes.extend_from_slice(&reader.read(tile.page)?[tile.offset..][..tile.layout.bytes()]);
    }
    Ok(StreamImage { len, main_end, bytes })
}

fn put_up<B: Backend>(
    backend: &B,
    spec: StreamSpec,
    image: &StreamImage,
    index: usize,
) -> Result<Stream<B::Page>, KvError> {
    let (len, main_end) = (image.len, image.main_end);
    if !spec.admits(len, main_end) {
        let what = format!("{len} tokens cannot have main pages that end at token {main_end}");
        return Err(KvError::Image { index, what });
    }
    let expected = StreamImage::n_bytes(&spec, len, main_end);
    if image.bytes.len() != expected {
        let what = format!("expected {expected} bytes for {len} tokens, got {}", image.bytes.len());
        return Err(KvError::Image { index, what });
    }
    let mut stream = Stream::restored(spec, len, main_end, &mut |bytes| backend.page(bytes))?;
    let mut host = Vec::new();
    let (mut tile, mut rest) = (0, &image.bytes[..]);
    while tile < stream.n_tiles() {
        // All tiles of one page, then the page as a whole.
        let first = stream.place(tile);
        let (_, page, _) = stream.tile_mut(first);
        let this_page: *const B::Page = page;
        host.clear();
        host.resize(page.n_bytes(), 0);
        while tile < stream.n_tiles() && std::ptr::eq(stream.tile(tile).page, this_page) {
            let at = stream.tile(tile);
            let (bytes, after) = rest.split_at(at.layout.bytes());
            host[at.offset..][..bytes.len()].copy_from_slice(bytes);
            (tile, rest) = (tile + 1, after);
        }
        let (_, page, _) = stream.tile_mut(first);
        backend.write_page(page, &host)?;
    }
    Ok(stream)
}
