//! Claims about the offload tiers, on the bundled model.

use std::fs;
use std::path::{Path, PathBuf};

use kvant::{DType, KvOptions, OpenOptions, SessionOptions};
use xxhash_rust::xxh3::xxh3_64;

use super::*;
use crate::cache_key::CacheSpec;

fn folder(name: &str) -> PathBuf {
    let folder = std::env::temp_dir().join(format!("kvant-store-{name}-{}", std::process::id()));
    _ = fs::remove_dir_all(&folder);
    folder
}

/// Returns the paths of all conversations.
fn conversations(folder: &Path) -> impl Iterator<Item = PathBuf> {
    let paths = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    paths.filter(|path| path.extension().is_some_and(|extension| extension == "kvctx"))
}

fn files(folder: &Path) -> usize {
    conversations(folder).count()
}

/// Returns the bytes of all files.
fn on_disk(folder: &Path) -> u64 {
    conversations(folder).map(|path| fs::metadata(path).unwrap().len()).sum()
}

struct Test {
    model: Model,
    kind: CacheKey,
}

impl Test {
    fn new() -> Self {
        let model = Model::bundled(OpenOptions { n_threads: Some(1), ..Default::default() }).unwrap();
        Self {
            model,
            kind: CacheKey { spec: CacheSpec::new(KvOptions::symmetric(DType::Turbo3), None), owner: None },
        }
    }

    fn store(&self, ram: u64, disk: Option<(&Path, u64)>) -> Store {
        let disk = disk.map(|(folder, bytes)| (folder.to_owned(), bytes));
        Store::open(ram, disk, &self.model, Blocks::default()).unwrap()
    }

    fn empty(&self) -> Session {
        let options = SessionOptions { n_ctx: None, kv: self.kind.spec.options.clone() };
        self.model.session(options).unwrap()
    }

    fn read(&self, tokens: &[u32]) -> Session {
        let mut session = self.empty();
        session.feed(tokens, &mut |_| true).unwrap();
        session
    }

    /// Returns the number of tokens of a prompt found in `store`.
    fn found(&self, store: &mut Store, prompt: &[u32]) -> usize {
        let mut session = self.empty();
        store.load(&mut session, &self.kind, prompt);
        assert_eq!(session.tokens(), &prompt[..session.tokens().len()]);
        session.tokens().len()
    }
}

/// Returns the logits after the last token, as bits.
fn bits(session: &mut Session) -> Vec<u32> {
    session.logits().unwrap().iter().map(|logit| logit.to_bits()).collect()
}

fn text(n: u32, seed: u32) -> Vec<u32> {
    (0..n).map(|i| (i * 37 + seed * 11) % 500).collect()
}

/// Returns a prompt that continues [`text`].
fn longer(n: u32, seed: u32) -> Vec<u32> {
    [text(n, seed), vec![1]].concat()
}

/// Checks the usage against a recount, and against the budgets.
fn check(store: &Store) {
    let in_ram = |kept: &OffloadedSession<InRam>| kept.place.saved.n_bytes() + 4 * kept.tokens.len() as u64;
    let ram: u64 = store.ram.iter().map(in_ram).sum();
    let used = store.in_use();
    assert_eq!(ram, used.ram);
    assert!(used.ram <= used.ram_budget, "{used:?}");
    if let Some(disk) = &store.disk {
        let files = disk.tier.iter().map(|kept| fs::metadata(&kept.place).unwrap().len());
        assert_eq!(files.sum::<u64>(), used.disk);
        assert!(used.disk <= used.disk_budget, "{used:?}");
    }
}

#[test]
fn saved_sessions_are_restored_bitwise_after_a_restart() {
    let (test, folder) = (Test::new(), folder("again"));
    let text = text(700, 1);
    let other = CacheKey { owner: Some("alice".into()), ..test.kind.clone() };
    let disk = Some((&*folder, 1 << 30));
    {
        let mut store = test.store(0, disk);
        store.save(&test.kind, &test.read(&text[..600]));
        store.save(&test.kind, &test.read(&text[..60]));
        assert_eq!(files(&folder), 1, "a short one is not worth it");
    }
    let mut store = test.store(0, disk);
    let mut found = test.empty();
    store.load(&mut found, &other, &text);
    assert_eq!(found.tokens().len(), 0, "of another owner");
    store.load(&mut found, &test.kind, &text);
    assert_eq!(found.tokens(), &text[..600]);
    let mut read = test.read(&text);
    found.feed(&text[600..], &mut |_| true).unwrap();
    assert_eq!(bits(&mut found), bits(&mut read));
    // A continuation replaces it.
    store.save(&test.kind, &read);
    assert_eq!(files(&folder), 1);
    fs::remove_dir_all(folder).unwrap();
}

#[test]
fn a_session_offloaded_to_memory_continues_bitwise() {
    let test = Test::new();
    let text = text(700, 1);
    let mut store = test.store(1 << 30, None);
    let other = CacheKey { owner: Some("alice".into()), ..test.kind.clone() };
    let mut never = test.read(&text[..550]);
    // Saved repeatedly: during prefill, at an alignment boundary and after it.
    for (from, to) in [(0, 130), (130, 512), (512, 550)] {
        let mut session = test.empty();
        store.load(&mut session, &other, &text);
        assert_eq!(session.tokens().len(), 0, "of another owner");
        store.load(&mut session, &test.kind, &text);
        assert_eq!(session.tokens(), &text[..from]);
        assert_eq!(store.in_use().ram, 0, "what is taken up whole is not there twice");
        session.feed(&text[from..to], &mut |_| true).unwrap();
        store.save(&test.kind, &session);
        check(&store);
        // The same session again takes no more room.
        let before = store.in_use();
        store.save(&test.kind, &session);
        assert_eq!(store.in_use(), before);
    }
    let mut resumed = test.empty();
    store.load(&mut resumed, &test.kind, &text);
    assert_eq!(resumed.saved_bytes(), never.saved_bytes());
    resumed.feed(&text[550..], &mut |_| true).unwrap();
    never.feed(&text[550..], &mut |_| true).unwrap();
    assert_eq!(bits(&mut resumed), bits(&mut never));
}

#[test]
fn a_prompt_with_a_common_prefix_leaves_the_session_saved() {
    let test = Test::new();
    let mut store = test.store(1 << 30, None);
    store.save(&test.kind, &test.read(&text(700, 1)));
    let mut edited = text(600, 1);
    edited.extend(text(100, 2));
    // Up to the last alignment boundary before they diverge.
    assert_eq!(test.found(&mut store, &edited), 512);
    assert_eq!(test.found(&mut store, &longer(700, 1)), 700);
    assert_eq!(test.found(&mut store, &longer(700, 1)), 0);
}

#[test]
fn budgets_hold_and_the_oldest_session_is_evicted_first() {
    let (test, folder) = (Test::new(), folder("room"));
    let sessions: Vec<Session> = (0..4).map(|seed| test.read(&text(200, seed))).collect();
    let each = sessions[0].saved_bytes() + 800;
    let disk = Some((&*folder, 3 * each + each / 2));
    fs::create_dir(&folder).unwrap();
    for (ram, disk) in [(0, disk), (3 * each + each / 2, None), (3 * each, None)] {
        let mut store = test.store(ram, disk);
        for session in &sessions {
            store.save(&test.kind, session);
            check(&store);
            assert!(disk.is_none() || on_disk(&folder) == store.in_use().disk);
        }
        assert_eq!(test.found(&mut store, &text(250, 0)), 0, "there is no room for it");
        for seed in 1..4 {
            assert_eq!(test.found(&mut store, &longer(200, seed)), 200);
        }
        check(&store);
    }
    fs::remove_dir_all(folder).unwrap();
}

#[test]
fn sessions_that_exceed_memory_move_to_disk() {
    let (test, folder) = (Test::new(), folder("tiers"));
    let mut sessions: Vec<Session> = (0..5).map(|seed| test.read(&text(200, seed))).collect();
    let each = sessions[0].saved_bytes() + 800;
    {
        let mut store = test.store(2 * each, Some((&folder, 1 << 30)));
        for session in &sessions {
            store.save(&test.kind, session);
            check(&store);
        }
        assert_eq!((store.ram.iter().count(), files(&folder)), (2, 3));
        // The last two come from memory, the others from files: with the same bits.
        for (seed, read) in (0..).zip(&mut sessions) {
            let mut found = test.empty();
            store.load(&mut found, &test.kind, &longer(200, seed));
            assert_eq!(found.tokens(), text(200, seed));
            found.feed(&[1], &mut |_| true).unwrap();
            read.feed(&[1], &mut |_| true).unwrap();
            assert_eq!(bits(&mut found), bits(read), "{seed}");
        }
        assert_eq!((store.ram.iter().count(), files(&folder)), (0, 3), "a file stays for the next start");
        // A continued conversation is in memory until it is moved to disk, where it replaces its
        // prefix.
        store.save(&test.kind, &sessions[0]);
        assert_eq!((store.ram.iter().count(), files(&folder)), (1, 3));
        store.flush_to_disk();
        assert_eq!((store.ram.iter().count(), files(&folder)), (0, 3));
        store.save(&test.kind, &sessions[4]);
        assert_eq!((store.ram.iter().count(), files(&folder)), (0, 4), "there is no memory any more");
    }
    let mut store = test.store(2 * each, Some((&folder, 1 << 30)));
    let found = [0, 1, 2, 4].map(|seed| test.found(&mut store, &[longer(200, seed), vec![2]].concat()));
    assert_eq!(found, [201, 200, 200, 201]);
    fs::remove_dir_all(folder).unwrap();
}

#[test]
fn a_session_larger_than_memory_goes_to_disk_directly() {
    let (test, folder) = (Test::new(), folder("large"));
    let (small, large) = (test.read(&text(200, 1)), test.read(&text(900, 2)));
    let ram = large.saved_bytes() + 4 * 900 - 1;
    assert!(small.saved_bytes() * 2 < ram);
    let mut store = test.store(ram, Some((&folder, 1 << 30)));
    for session in [&small, &large] {
        store.save(&test.kind, session);
        check(&store);
    }
    assert_eq!((store.ram.iter().count(), files(&folder)), (1, 1));
    assert_eq!(test.found(&mut store, &longer(900, 2)), 900);
    assert_eq!(test.found(&mut store, &longer(200, 1)), 200);
    // Without a disk it is dropped.
    let mut store = test.store(ram, None);
    store.save(&test.kind, &large);
    assert_eq!((test.found(&mut store, &longer(900, 2)), store.in_use().ram), (0, 0));
    // With one more byte of budget it is saved.
    let mut store = test.store(ram + 1, None);
    store.save(&test.kind, &large);
    check(&store);
    assert_eq!((store.in_use().ram, test.found(&mut store, &longer(900, 2))), (ram + 1, 900));
    fs::remove_dir_all(folder).unwrap();
}

#[test]
fn servers_of_one_folder_share_conversations_and_a_budget() {
    let (test, folder) = (Test::new(), folder("shared"));
    let sessions: Vec<Session> = (0..4).map(|seed| test.read(&text(200, seed))).collect();
    let budget = 3 * sessions[0].saved_bytes();
    let disk = Some((&*folder, budget));
    let [mut a, mut b] = [(); 2].map(|()| test.store(0, disk));
    a.save(&test.kind, &sessions[0]);
    b.save(&test.kind, &sessions[1]);
    // Each finds what the other has saved, without a restart, and writes nothing twice.
    assert_eq!([&mut a, &mut b].map(|store| test.found(store, &longer(200, 0))), [200, 200]);
    assert_eq!([&mut a, &mut b].map(|store| test.found(store, &longer(200, 1))), [200, 200]);
    b.save(&test.kind, &sessions[0]);
    assert_eq!((files(&folder), a.in_use().disk), (2, b.in_use().disk));
    // The one that both used last stays.
    a.save(&test.kind, &sessions[2]);
    b.save(&test.kind, &sessions[3]);
    assert_eq!((files(&folder), on_disk(&folder)), (3, budget));
    for store in [&mut a, &mut b] {
        let found = [0, 1, 2, 3].map(|seed| test.found(store, &longer(200, seed)));
        assert_eq!(found, [0, 200, 200, 200]);
        check(store);
    }
    fs::remove_dir_all(folder).unwrap();
}

#[test]
fn room_that_a_server_reserves_is_not_taken_by_others() {
    let (test, folder) = (Test::new(), folder("reserved"));
    let sessions: Vec<Session> = (0..2).map(|seed| test.read(&text(200, seed))).collect();
    let each = sessions[0].saved_bytes();
    let mut store = test.store(0, Some((&folder, 2 * each)));
    store.save(&test.kind, &sessions[0]);
    // Another server writes a file.
    let reserved = folder.join("0123.1.reserved");
    fs::File::create(&reserved).unwrap().set_len(each + 1).unwrap();
    store.save(&test.kind, &sessions[1]);
    assert_eq!((files(&folder), test.found(&mut store, &longer(200, 0))), (1, 200), "there is no room");
    // It was killed long ago.
    let long_ago = std::time::SystemTime::now() - std::time::Duration::from_secs(3600);
    fs::File::open(&reserved).unwrap().set_modified(long_ago).unwrap();
    store.save(&test.kind, &sessions[1]);
    assert_eq!((files(&folder), test.found(&mut store, &longer(200, 1))), (2, 200));
    assert!(!reserved.exists());
    fs::remove_dir_all(folder).unwrap();
}

#[test]
fn a_corrupt_file_is_not_used_and_is_removed() {
    let (test, folder) = (Test::new(), folder("changed"));
    let text = text(400, 2);
    let disk = Some((&*folder, 1 << 30));
    test.store(0, disk).save(&test.kind, &test.read(&text[..300]));
    let path = conversations(&folder).next().unwrap();
    let mut bytes = fs::read(&path).unwrap();
    let last = bytes.len() - 70;
    bytes[last] ^= 1;
    fs::write(&path, bytes).unwrap();
    fs::write(folder.join("0123-4567.kvctx"), b"KVANTCTX, but no more").unwrap();
    fs::write(folder.join("notes.txt"), b"of a user").unwrap();
    let mut store = test.store(0, disk);
    let n_kept = |store: &Store| store.disk.iter().flat_map(|disk| disk.tier.iter()).count();
    assert_eq!(n_kept(&store), 1);
    assert_eq!((test.found(&mut store, &text), n_kept(&store)), (0, 0));
    assert!(!path.exists() && folder.join("notes.txt").exists());
    fs::remove_dir_all(folder).unwrap();
}

#[test]
fn files_of_an_older_key_are_ignored_until_room_is_needed() {
    let (test, folder) = (Test::new(), folder("older"));
    let (text, other) = (text(400, 2), text(400, 3));
    let session = test.read(&text[..300]);
    let disk = Some((&*folder, session.saved_bytes() * 3 / 2));
    test.store(0, disk).save(&test.kind, &session);
    let path = conversations(&folder).next().unwrap();
    // The hash before it had versions: of what `Debug` prints.
    let spec = xxh3_64(format!("{:?}", test.kind.spec.options).as_bytes());
    let hash = xxh3_64(format!("{} {:?}", test.model.compute_fingerprint(), (spec, "")).as_bytes());
    let name = path.file_name().unwrap().to_str().unwrap();
    let older = folder.join(format!("{hash:016x}{}", &name[16..]));
    fs::rename(&path, &older).unwrap();
    let mut store = test.store(0, disk);
    assert_eq!(test.found(&mut store, &text), 0);
    assert!(older.exists() && store.in_use().disk > 0, "it counts against the budget");
    store.save(&test.kind, &test.read(&other[..300]));
    check(&store);
    assert!(!older.exists());
    assert_eq!((test.found(&mut store, &other), files(&folder)), (300, 1));
    fs::remove_dir_all(folder).unwrap();
}

/// Pseudo-random numbers.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % n
    }
}

/// Conversations with common prefixes come and go at random, with room for a few in each tier.
#[test]
fn logits_have_the_same_bits_for_prefixes_of_every_tier() {
    let (test, folder) = (Test::new(), folder("random"));
    let texts: Vec<Vec<u32>> = (0..6).map(|i| [text(300, i % 3), text(500, i)].concat()).collect();
    let each = test.read(&texts[0][..500]).saved_bytes();
    let mut places = [0; 3];
    for (seed, ram, disk) in [(1, 3 * each, None), (2, 0, Some(3 * each)), (3, 2 * each, Some(4 * each))] {
        _ = fs::remove_dir_all(&folder);
        let mut store = test.store(ram, disk.map(|bytes| (&*folder, bytes)));
        let mut dice = Dice(seed);
        for _ in 0..25 {
            let prompt = &texts[dice.roll(6)][..130 + dice.roll(640)];
            let mut session = test.empty();
            let longest = |found: Option<(usize, usize)>| found.map_or(0, |(n, _)| n);
            let hash = store.hash(&test.kind);
            let on_disk = store.disk.as_ref().and_then(|disk| disk.tier.longest(hash, prompt));
            let is_in_ram = longest(store.ram.longest(hash, prompt)) >= longest(on_disk);
            store.load(&mut session, &test.kind, prompt);
            let found = session.tokens().len();
            places[if found == 0 { 0 } else { 1 + usize::from(is_in_ram) }] += 1;
            session.feed(&prompt[found..], &mut |_| true).unwrap();
            assert_eq!(bits(&mut session), bits(&mut test.read(prompt)), "{found} of {}", prompt.len());
            store.save(&test.kind, &session);
            check(&store);
        }
    }
    assert!(places.iter().all(|&n| n > 5), "read, from the disk, from memory: {places:?}");
    fs::remove_dir_all(folder).unwrap();
}
