//! Conversations on disk: what there is no memory for, kept for whoever comes back, also after a restart.
//!
//! Each is a context file (checksummed, versioned, replaced whole or not at all) whose name begins with a hash of its model, its
//! types and its owner: only those find it again. What is wrong with a file is told in the log, and the file is taken away.

use std::collections::VecDeque;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use kvant::{Model, Session};
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use crate::ServeError;
use crate::events::{Blocks, Held, Medium};
use crate::shelf::Kind;

/// How file names end.
const ENDING: &str = "kvctx";
/// It is not worth it to keep or to fetch fewer tokens than these.
const LEAST: usize = 128;

/// A conversation in a file.
struct Kept {
    path: PathBuf,
    kind: u64,
    tokens: Vec<u32>,
    bytes: u64,
    /// Whoever wants to know is told that its blocks are here, once it is known whose they are.
    held: Option<Held>,
}

/// The files, the one used longest ago first.
pub(crate) struct Store {
    folder: PathBuf,
    model: Model,
    budget: u64,
    kept: VecDeque<Kept>,
    blocks: Blocks,
}

impl Store {
    /// The store in a folder, which is made where there is none, with what an earlier process has left there.
    ///
    /// # Errors
    /// When the folder cannot be made or read.
    pub fn open(folder: PathBuf, budget: u64, model: &Model, blocks: Blocks) -> Result<Self, ServeError> {
        let failed = |source| ServeError::Folder { folder: folder.clone(), source };
        make(&folder).map_err(failed)?;
        let mut found: Vec<(SystemTime, Kept)> = Vec::new();
        for entry in fs::read_dir(&folder).map_err(failed)? {
            let path = entry.map_err(failed)?.path();
            if let Some(kept) = Kept::read(&path, model) {
                let used = fs::metadata(&path).and_then(|there| there.modified());
                found.push((used.unwrap_or(SystemTime::UNIX_EPOCH), kept));
            }
        }
        found.sort_by_key(|(used, _)| *used);
        let kept = found.into_iter().map(|(_, kept)| kept).collect();
        let mut store = Self { folder, model: model.clone(), budget, kept, blocks };
        store.make_room(0);
        if let Some(usual) = store.blocks.usual() {
            let kind = store.hash(usual);
            let own = store.kept.iter_mut().filter(|kept| kept.kind == kind);
            own.for_each(|kept| kept.tell(&store.blocks, usual));
        }
        Ok(store)
    }

    /// Keeps a conversation, if it is worth it and there is room for it.
    pub fn save(&mut self, kind: &Kind, session: &Session) {
        let (tokens, needed) = (session.tokens(), session.kv().bytes as u64);
        let hash = self.hash(kind);
        let is_kept = |kept: &Kept| kept.kind == hash && kept.tokens.starts_with(tokens);
        if tokens.len() < LEAST || needed > self.budget || self.kept.iter().any(is_kept) {
            return;
        }
        // What is its beginning and no more will not be missed.
        let is_beginning = |kept: &Kept| kept.kind == hash && tokens.starts_with(&kept.tokens);
        while let Some(index) = self.kept.iter().position(is_beginning) {
            self.remove(index);
        }
        self.make_room(needed);
        let mut text = Xxh3::new();
        tokens.iter().for_each(|token| text.update(&token.to_le_bytes()));
        let path = self.folder.join(format!("{hash:016x}-{:016x}.{ENDING}", text.digest()));
        match session.save(&path) {
            Ok(bytes) => {
                let mut kept = Kept { path, kind: hash, tokens: tokens.to_vec(), bytes, held: None };
                kept.tell(&self.blocks, kind);
                self.kept.push_back(kept);
            }
            // It will be read again, then.
            Err(error) => tracing::warn!(%error, "a conversation is not kept"),
        }
    }

    /// Fetches into `session` the beginning of `tokens` that is longest, where that is worth it.
    pub fn load(&mut self, session: &mut Session, kind: &Kind, tokens: &[u32]) {
        let there = session.tokens().len() + LEAST;
        let hash = self.hash(kind);
        let common = |kept: &Kept| kept.tokens.iter().zip(tokens).take_while(|(a, b)| a == b).count();
        let of_kind = self.kept.iter().enumerate().filter(|(_, kept)| kept.kind == hash);
        let longest = of_kind.map(|(index, kept)| (common(kept), index)).max();
        let Some((_, index)) = longest.filter(|(n, _)| *n >= there) else { return };
        let Some(mut kept) = self.kept.remove(index) else { return };
        match session.load_prefix(&kept.path, tokens) {
            Ok(_) => {
                _ = fs::File::open(&kept.path).and_then(|file| file.set_modified(SystemTime::now()));
                kept.tell(&self.blocks, kind);
                self.kept.push_back(kept);
            }
            Err(error) if error.is_out_of_memory() => self.kept.push_back(kept),
            Err(error) => {
                tracing::warn!(%error, "a conversation that was kept is of no use");
                _ = fs::remove_file(&kept.path);
            }
        }
    }

    fn hash(&self, kind: &Kind) -> u64 {
        xxh3_64(format!("{} {:?}", self.model.computed_by(), kind.names()).as_bytes())
    }

    fn make_room(&mut self, needed: u64) {
        while self.kept.iter().map(|kept| kept.bytes).sum::<u64>() + needed > self.budget
            && !self.kept.is_empty()
        {
            self.remove(0);
        }
    }

    fn remove(&mut self, index: usize) {
        if let Some(kept) = self.kept.remove(index) {
            // Somebody may have taken it away already.
            _ = fs::remove_file(kept.path);
        }
    }
}

impl Kept {
    /// It is known to be of `kind`.
    fn tell(&mut self, blocks: &Blocks, kind: &Kind) {
        let Self { tokens, held, .. } = self;
        held.get_or_insert_with(|| {
            let mut held = blocks.hold(Medium::Disk, kind);
            held.grow(tokens);
            held
        });
    }

    /// A file that an earlier process has left, if it is one of this model.
    fn read(path: &Path, model: &Model) -> Option<Self> {
        let name = path.file_name()?.to_str()?.strip_suffix(ENDING)?.strip_suffix('.')?;
        let kind = u64::from_str_radix(name.split_once('-')?.0, 16).ok()?;
        let bytes = fs::metadata(path).ok()?.len();
        match model.saved_tokens(path) {
            Ok(tokens) => Some(Self { path: path.to_owned(), kind, tokens, bytes, held: None }),
            Err(error) => {
                tracing::info!(%error, "left alone");
                None
            }
        }
    }
}

/// Makes a folder that nobody else may look into: it will hold what was said.
fn make(folder: &Path) -> std::io::Result<()> {
    let mut builder = fs::DirBuilder::new();
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.recursive(true).create(folder)
}

#[cfg(test)]
mod tests {
    use kvant::{DType, KvOptions, OpenOptions, SessionOptions};

    use super::*;
    use crate::shelf::Stored;

    fn folder(name: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("kvant-store-{name}-{}", std::process::id()));
        _ = fs::remove_dir_all(&folder);
        folder
    }

    fn files(folder: &Path) -> usize {
        fs::read_dir(folder).unwrap().count()
    }

    struct Test {
        model: Model,
        kind: Kind,
    }

    impl Test {
        fn new() -> Self {
            let model = Model::bundled(OpenOptions { n_threads: Some(1), ..Default::default() }).unwrap();
            Self {
                model,
                kind: Kind { stored: Stored::new(KvOptions::symmetric(DType::Turbo3)), owner: None },
            }
        }

        fn empty(&self) -> Session {
            let options = SessionOptions { n_ctx: None, kv: self.kind.stored.options.clone() };
            self.model.session(options).unwrap()
        }

        fn read(&self, tokens: &[u32]) -> Session {
            let mut session = self.empty();
            session.feed(tokens, &mut |_| true).unwrap();
            session
        }
    }

    fn text(n: u32, seed: u32) -> Vec<u32> {
        (0..n).map(|i| (i * 37 + seed * 11) % 500).collect()
    }

    #[test]
    fn what_was_kept_is_found_again_bit_for_bit_also_after_a_restart() {
        let (test, folder) = (Test::new(), folder("again"));
        let text = text(700, 1);
        let other = Kind { owner: Some("somebody".into()), ..test.kind.clone() };
        {
            let mut store = Store::open(folder.clone(), 1 << 30, &test.model, Blocks::default()).unwrap();
            store.save(&test.kind, &test.read(&text[..600]));
            store.save(&test.kind, &test.read(&text[..60]));
            assert_eq!(files(&folder), 1, "a short one is not worth it");
        }
        let mut store = Store::open(folder.clone(), 1 << 30, &test.model, Blocks::default()).unwrap();
        let mut found = test.empty();
        store.load(&mut found, &other, &text);
        assert_eq!(found.tokens().len(), 0, "of somebody else");
        store.load(&mut found, &test.kind, &text);
        assert_eq!(found.tokens(), &text[..600]);
        let mut read = test.read(&text);
        found.feed(&text[600..], &mut |_| true).unwrap();
        let bits = |session: &mut Session| -> Vec<u32> {
            session.logits().unwrap().iter().map(|logit| logit.to_bits()).collect()
        };
        assert_eq!(bits(&mut found), bits(&mut read));
        // What goes on from it takes its place.
        store.save(&test.kind, &read);
        assert_eq!(files(&folder), 1);
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn no_more_is_kept_than_there_is_room_for_and_the_oldest_goes_first() {
        let (test, folder) = (Test::new(), folder("room"));
        let sessions: Vec<Session> = (0..4).map(|seed| test.read(&text(200, seed))).collect();
        let each = sessions[0].kv().bytes as u64;
        let mut store =
            Store::open(folder.clone(), 3 * each + each / 2, &test.model, Blocks::default()).unwrap();
        for session in &sessions {
            store.save(&test.kind, session);
            let bytes: u64 = store.kept.iter().map(|kept| fs::metadata(&kept.path).unwrap().len()).sum();
            assert!(bytes <= store.budget, "{bytes} of {}", store.budget);
        }
        let mut oldest = test.empty();
        store.load(&mut oldest, &test.kind, &text(250, 0));
        assert_eq!(oldest.tokens().len(), 0);
        let mut youngest = test.empty();
        let mut longer = text(200, 3);
        longer.push(1);
        store.load(&mut youngest, &test.kind, &longer);
        assert_eq!(youngest.tokens().len(), 200);
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_file_that_was_changed_is_not_used_and_taken_away() {
        let (test, folder) = (Test::new(), folder("changed"));
        let text = text(400, 2);
        let mut store = Store::open(folder.clone(), 1 << 30, &test.model, Blocks::default()).unwrap();
        store.save(&test.kind, &test.read(&text[..300]));
        let path = store.kept[0].path.clone();
        let mut bytes = fs::read(&path).unwrap();
        let last = bytes.len() - 70;
        bytes[last] ^= 1;
        fs::write(&path, bytes).unwrap();
        fs::write(folder.join("0123-4567.kvctx"), b"KVANTCTX, but no more").unwrap();
        fs::write(folder.join("notes.txt"), b"of somebody").unwrap();
        let mut store = Store::open(folder.clone(), 1 << 30, &test.model, Blocks::default()).unwrap();
        assert_eq!(store.kept.len(), 1);
        let mut session = test.empty();
        store.load(&mut session, &test.kind, &text);
        assert_eq!((session.tokens().len(), store.kept.len()), (0, 0));
        assert!(!path.exists() && folder.join("notes.txt").exists());
        fs::remove_dir_all(folder).unwrap();
    }
}
