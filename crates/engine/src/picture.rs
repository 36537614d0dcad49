//! Pictures in prompts.
//!
//! A picture is rows, made by a tower that stands beside the model, and the rows are [tokens](kvant_model::ExtraTokens) with numbers beyond the vocabulary.
//! The same picture has the same numbers for as long as the model is loaded: a conversation that comes again finds its beginning in the cache, and
//! the tower does not look at the picture again.

use std::collections::hash_map::RandomState;
use std::collections::{HashMap, VecDeque};
use std::hash::BuildHasher;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvant_cpu::{CpuDevice, PromptMath};
use kvant_gguf::Gguf;
use kvant_model::{Config, ExtraRows, ExtraTokens, Given};
use kvant_text::chat::{Message, RenderOptions, Rendered};
use kvant_text::tokenizer::{Special, Tokenizer};
use kvant_vision::{Layout, Piece, Tower};

use crate::{Error, Model, tuning};

/// Bytes of rows that are kept for when a picture comes again.
const KEPT: usize = 256 << 20;

/// A picture as tokens of a model: they may be fed as any others.
#[derive(Debug, Clone)]
pub struct Picture {
    tokens: Arc<[u32]>,
    rows: Arc<ExtraRows>,
}

/// The same tokens of a model are the same picture.
impl PartialEq for Picture {
    fn eq(&self, other: &Self) -> bool {
        self.tokens == other.tokens
    }
}

impl Picture {
    /// What stands for it in a prompt: marks of the vocabulary, and the numbers of its rows. A session that has been fed them keeps the rows; before that, this does.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }
}

/// What looks at pictures.
pub(crate) struct Sight {
    tower: Tower<CpuDevice>,
    /// Bytes of its weights, in the file's types.
    n_bytes: usize,
    hashes: [RandomState; 2],
    seen: Mutex<Seen>,
    /// Held while the tower looks.
    looking: Mutex<()>,
}

/// What of a picture's bytes tells it from others; nobody outside can make two that are alike.
type Hash = [u64; 2];

#[derive(Default)]
struct Seen {
    /// The first number of the rows of every picture that there was.
    numbers: HashMap<Hash, u32>,
    /// Those that came last, the latest at the end.
    recent: VecDeque<(Hash, Picture)>,
}

impl Seen {
    /// One of those that came last.
    fn find(&mut self, hash: Hash) -> Option<Picture> {
        let at = self.recent.iter().position(|(known, _)| *known == hash)?;
        let found = self.recent.remove(at)?;
        let picture = found.1.clone();
        self.recent.push_back(found);
        Some(picture)
    }

    /// Keeps one, and of those before it as many as there is room for: whoever looks at one and reads its tokens then has it.
    fn keep(&mut self, hash: Hash, picture: &Picture) {
        self.numbers.insert(hash, picture.rows.tokens().start);
        self.recent.push_back((hash, picture.clone()));
        let mut n_bytes: usize = self.recent.iter().map(|(_, picture)| picture.rows.n_bytes()).sum();
        while n_bytes > KEPT
            && self.recent.len() > 1
            && let Some((_, oldest)) = self.recent.pop_front()
        {
            n_bytes -= oldest.rows.n_bytes();
        }
    }
}

impl Sight {
    /// The tower in a file, for a model of this configuration.
    pub fn load(gguf: &Gguf, n_threads: Option<usize>, config: &Config) -> Result<Self, Error> {
        let tower = Tower::load(gguf, Arc::new(tuning::open_cpu(n_threads, PromptMath::Exact)?))?;
        check_width(tower.config().n_embd_text, config.n_embd)?;
        let hashes = [RandomState::new(), RandomState::new()];
        let n_bytes = gguf.tensors().iter().map(|info| info.n_bytes).sum();
        Ok(Self { tower, n_bytes, hashes, seen: Mutex::default(), looking: Mutex::default() })
    }

    /// Bytes of its weights, in the file's types.
    pub fn weight_bytes(&self) -> usize {
        self.n_bytes
    }

    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The picture in the bytes of a file.
    fn look(
        &self,
        owner: Option<&str>,
        file: &[u8],
        tokenizer: &Tokenizer,
        extra: &ExtraTokens,
    ) -> Result<Picture, Error> {
        let hash = self.hashes.each_ref().map(|state| state.hash_one((owner, file)));
        if let Some(known) = self.seen().find(hash) {
            return Ok(known);
        }
        // One after the other: they share the threads.
        let _looking = self.looking.lock().unwrap_or_else(PoisonError::into_inner);
        // What came twice at once has been looked at meanwhile.
        if let Some(known) = self.seen().find(hash) {
            return Ok(known);
        }
        let picture = kvant_vision::Picture::decode(file)?;
        let layout = Layout::new(self.tower.config(), &picture)?;
        let tiles = layout.tiles.iter().map(|tile| self.tower.rows(tile)).collect::<Result<Vec<_>, _>>()?;
        let mut seen = self.seen();
        let again = seen.numbers.get(&hash).copied();
        let picture = self.tokens(&layout, &tiles, tokenizer, |given| extra.add(given, again))?;
        seen.keep(hash, &picture);
        Ok(picture)
    }

    /// What stands for a picture of these tiles.
    fn tokens(
        &self,
        layout: &Layout,
        tiles: &[Vec<Vec<f32>>],
        tokenizer: &Tokenizer,
        add: impl FnOnce(Given) -> Option<Arc<ExtraRows>>,
    ) -> Result<Picture, Error> {
        let width = self.tower.config().n_embd_text;
        let firsts: Vec<u32> = tiles
            .iter()
            .scan(0, |next, tile| Some(std::mem::replace(next, *next + (tile[0].len() / width) as u32)))
            .collect();
        let depth = 1 + self.tower.config().deep.len();
        let part = |part: usize| tiles.iter().flat_map(|tile| &tile[part]).copied().collect();
        let given = Given { rows: (0..depth).map(part).collect(), columns: layout.columns };
        let rows = add(given).ok_or_else(|| Error::Setting {
            name: "picture",
            expected: "one of the first 4 billion parts of pictures".to_owned(),
            got: "another one".to_owned(),
        })?;
        let mut tokens = Vec::with_capacity(layout.n_rows() + 4 * layout.pieces.len());
        for piece in &layout.pieces {
            match piece {
                Piece::Mark(text) => tokens.extend(tokenizer.encode(text, Special::Parse, false)?),
                Piece::Rows { tile, rows: of_tile } => {
                    let first = rows.tokens().start + firsts[*tile];
                    tokens.extend(first + of_tile.start as u32..first + of_tile.end as u32);
                }
            }
        }
        Ok(Picture { tokens: tokens.into(), rows })
    }
}

/// Whether a tower can make rows for a model, by what their files say: see [`OpenOptions::mmproj`](crate::OpenOptions::mmproj).
///
/// # Errors
/// A file of another kind, a tower that is not known, or one of another model.
pub fn check_mmproj(mmproj: &Gguf, model: &Gguf) -> Result<(), Error> {
    check_width(kvant_vision::Config::from_gguf(mmproj)?.n_embd_text, Config::from_gguf(model)?.n_embd)
}

fn check_width(got: usize, n_embd: usize) -> Result<(), Error> {
    if got == n_embd {
        return Ok(());
    }
    let expected = format!("the tower of this model, with rows of {n_embd} values");
    Err(Error::Setting { name: "mmproj", expected, got: format!("rows of {got}") })
}

impl Model {
    /// Whether it takes pictures: see [`OpenOptions::mmproj`](crate::OpenOptions::mmproj).
    pub fn sees(&self) -> bool {
        self.sight().is_some()
    }

    /// The picture in the bytes of a PNG, JPEG, WebP, GIF or BMP file. The tower takes its time for one that has not come before, or not lately.
    ///
    /// # Errors
    /// A model that sees nothing, bytes that are no picture, or one that is too large.
    pub fn look(&self, file: &[u8]) -> Result<Picture, Error> {
        self.look_for(None, file)
    }

    /// As [`look`](Self::look), for an [owner](crate::Session::owned_by): others cannot find out by the time it takes which pictures this one has shown.
    ///
    /// # Errors
    /// As there.
    pub fn look_for(&self, owner: Option<&str>, file: &[u8]) -> Result<Picture, Error> {
        let sight = self.sight().ok_or_else(|| Error::Setting {
            name: "picture",
            expected: "a model that sees (opened with the file of its tower, mmproj-*.gguf)".to_owned(),
            got: "one that reads text only".to_owned(),
        })?;
        sight.look(owner, file, self.tokenizer()?, self.loaded().extra())
    }

    /// The text and the tokens of a conversation with pictures in the model's own chat format. Messages are as templates read them: a picture is a part
    /// `{"type": "image"}` of the content, and `pictures` has them in the order of the conversation.
    ///
    /// # Errors
    /// When there is no template, it refuses the conversation or loses pictures, or there is another number of them.
    pub fn picture_prompt(
        &self,
        messages: &[serde_json::Value],
        options: &RenderOptions,
        pictures: &[Picture],
    ) -> Result<(Rendered, Vec<u32>), Error> {
        let mark = self.sight().map_or("", |sight| sight.tower.config().projector.mark());
        let (text, parts) = self.chat_template()?.render_pictures(messages, options, mark)?;
        if parts.len() != pictures.len() + 1 {
            let (expected, got) = (format!("{} of them", parts.len() - 1), pictures.len().to_string());
            return Err(Error::Setting { name: "pictures", expected, got });
        }
        let mut tokens = Vec::new();
        for (index, part) in parts.iter().enumerate() {
            let tokenizer = self.tokenizer()?;
            tokens.extend(match index {
                0 => tokenizer.encode_prompt(part.as_str(), part.special())?,
                _ => tokenizer.encode(part.as_str(), part.special(), false)?,
            });
            tokens.extend(pictures.get(index).into_iter().flat_map(Picture::tokens));
        }
        Ok((text, tokens))
    }

    /// As [`chat_prompt`](Self::chat_prompt), of messages [with pictures](Message::with_pictures).
    ///
    /// # Errors
    /// As [`picture_prompt`](Self::picture_prompt).
    pub fn chat_prompt_with(&self, messages: &[Message], pictures: &[Picture]) -> Result<Vec<u32>, Error> {
        let options = RenderOptions { add_generation_prompt: true, ..Default::default() };
        let messages: Vec<_> = messages.iter().map(|message| serde_json::json!(message)).collect();
        Ok(self.picture_prompt(&messages, &options, pictures)?.1)
    }
}
