//! Ledger of blocks: which blocks are held, and the changes since the last publication. Works on
//! hashes only.

use std::collections::HashMap;
use std::sync::Arc;

use kvant::TOKENS_PER_BLOCK;
use xxhash_rust::xxh3::Xxh3;

use super::{KvEvent, Medium};

/// Distinguishes blocks with equal tokens but different cache keys.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct KeySeed {
    pub seed: u64,
    pub extra: Option<Arc<[String]>>,
}

#[derive(Debug)]
struct Block {
    holders: usize,
    is_published: bool,
    parent: Option<u64>,
    /// Number of preceding blocks.
    depth: usize,
    extra: Option<Arc<[String]>>,
    /// Tokens, until published.
    tokens: Box<[u32]>,
}

/// Blocks by medium and by hash, which is chained: it covers all tokens up to the block's end.
#[derive(Debug, Default)]
pub(super) struct Ledger {
    blocks: HashMap<(Medium, u64), Block>,
    /// Blocks that may have been added or removed since the last [`Ledger::changes`], each after
    /// its parent.
    touched: Vec<(Medium, u64)>,
}

impl Ledger {
    /// Adds a holder to the complete blocks of `tokens`. `held` lists those it holds already and
    /// receives the others.
    pub fn hold(&mut self, medium: Medium, root: &KeySeed, held: &mut Vec<u64>, tokens: &[u32]) {
        let (whole, _) = tokens.as_chunks::<TOKENS_PER_BLOCK>();
        for (depth, tokens) in whole.iter().enumerate().skip(held.len()) {
            let parent = held.last().copied();
            let mut hash = Xxh3::new();
            hash.update(&parent.unwrap_or(root.seed).to_le_bytes());
            tokens.iter().for_each(|token| hash.update(&token.to_le_bytes()));
            let name = hash.digest();
            let block = self.blocks.entry((medium, name)).or_insert_with(|| Block {
                holders: 0,
                is_published: false,
                parent,
                depth,
                extra: root.extra.clone(),
                tokens: tokens.as_slice().into(),
            });
            block.holders += 1;
            if block.holders == 1 {
                self.touched.push((medium, name));
            }
            held.push(name);
        }
    }

    /// Removes a holder from these blocks.
    pub fn release(&mut self, medium: Medium, held: &[u64]) {
        for &name in held {
            if let Some(block) = self.blocks.get_mut(&(medium, name)) {
                block.holders -= 1;
                if block.holders == 0 {
                    self.touched.push((medium, name));
                }
            }
        }
    }

    /// Returns the changes since the last call. A stored block follows its parent; a removed one
    /// precedes it.
    pub fn changes(&mut self) -> Vec<KvEvent> {
        let touched = std::mem::take(&mut self.touched);
        let mut gone = Vec::new();
        let mut events = Vec::new();
        for key in &touched {
            if let Some(block) = self.blocks.get(key).filter(|block| block.holders == 0) {
                if block.is_published {
                    gone.push((block.depth, *key));
                }
                self.blocks.remove(key);
            }
        }
        gone.sort_by_key(|&(depth, _)| std::cmp::Reverse(depth));
        for medium in [Medium::Device, Medium::Ram, Medium::Disk] {
            let of_medium = gone.iter().filter(|(_, (of, _))| *of == medium);
            let blocks: Vec<u64> = of_medium.map(|(_, (_, name))| *name).collect();
            if !blocks.is_empty() {
                events.push(KvEvent::Removed { blocks, medium });
            }
        }
        for (medium, name) in touched {
            let Some(block) = self.blocks.get_mut(&(medium, name)).filter(|block| !block.is_published) else {
                continue;
            };
            block.is_published = true;
            let new = std::mem::take(&mut block.tokens);
            match events.last_mut() {
                // Same conversation, directly after the previous block.
                Some(KvEvent::Stored { blocks, tokens, medium: of, .. })
                    if *of == medium && blocks.last().copied() == block.parent =>
                {
                    blocks.push(name);
                    tokens.extend_from_slice(&new);
                }
                _ => events.push(KvEvent::Stored {
                    blocks: vec![name],
                    parent: block.parent,
                    tokens: new.into(),
                    medium,
                    extra: block.extra.clone(),
                }),
            }
        }
        events
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use super::*;

    /// Pseudo-random numbers.
    struct Dice(u64);

    impl Dice {
        fn roll(&mut self, n: usize) -> usize {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (self.0 >> 33) as usize % n
        }
    }

    /// Router model that sees events only.
    #[derive(Default)]
    struct RouterModel(BTreeMap<(Medium, u64), (Option<u64>, Vec<u32>)>);

    impl RouterModel {
        fn apply(&mut self, event: KvEvent) {
            match event {
                KvEvent::Stored { blocks, mut parent, tokens, medium, .. } => {
                    assert_eq!(tokens.len(), blocks.len() * TOKENS_PER_BLOCK);
                    for (&block, tokens) in blocks.iter().zip(tokens.chunks(TOKENS_PER_BLOCK)) {
                        assert!(
                            parent.is_none_or(|parent| self.0.contains_key(&(medium, parent))),
                            "an orphan"
                        );
                        let old = self.0.insert((medium, block), (parent, tokens.to_vec()));
                        assert!(old.is_none(), "told twice");
                        parent = Some(block);
                    }
                }
                KvEvent::Removed { blocks, medium } => {
                    for block in blocks {
                        let mut there = self.0.iter();
                        let has_child =
                            there.any(|((of, _), (parent, _))| *of == medium && *parent == Some(block));
                        assert!(!has_child, "its child is still there");
                        assert!(self.0.remove(&(medium, block)).is_some(), "gone twice");
                    }
                }
                KvEvent::Cleared => self.0.clear(),
            }
        }

        /// Returns all tokens up to the end of each block.
        fn prefixes(&self) -> BTreeSet<(Medium, Vec<u32>)> {
            let prefix = |&(medium, block): &(Medium, u64)| {
                let (mut parts, mut at) = (Vec::new(), Some(block));
                while let Some(block) = at {
                    let (parent, tokens) = &self.0[&(medium, block)];
                    parts.push(tokens.clone());
                    at = *parent;
                }
                parts.reverse();
                (medium, parts.concat())
            };
            self.0.keys().map(prefix).collect()
        }
    }

    /// Returns texts with many common prefixes, of whole blocks and a rest.
    fn text(dice: &mut Dice) -> Vec<u32> {
        let n_blocks = dice.roll(5);
        let mut text: Vec<u32> =
            (0..n_blocks).flat_map(|_| vec![dice.roll(2) as u32; TOKENS_PER_BLOCK]).collect();
        text.resize(text.len() + dice.roll(TOKENS_PER_BLOCK), 7);
        text
    }

    fn whole(text: &[u32]) -> impl Iterator<Item = &[u32]> {
        (1..=text.len() / TOKENS_PER_BLOCK).map(|n| &text[..n * TOKENS_PER_BLOCK])
    }

    #[test]
    fn events_reconstruct_exactly_the_blocks_that_are_held() {
        let root = KeySeed { seed: 1, extra: None };
        for seed in 0..200 {
            let mut dice = Dice(seed);
            let (mut ledger, mut router) = (Ledger::default(), RouterModel::default());
            let mut holders: Vec<(Medium, Vec<u32>, Vec<u64>)> = Vec::new();
            for _ in 0..60 {
                match dice.roll(5) {
                    0 | 1 => {
                        let medium = [Medium::Device, Medium::Ram, Medium::Disk][dice.roll(3)];
                        let (text, mut held) = (text(&mut dice), Vec::new());
                        ledger.hold(medium, &root, &mut held, &text);
                        holders.push((medium, text, held));
                    }
                    2 if !holders.is_empty() => {
                        let at = dice.roll(holders.len());
                        let more = text(&mut dice);
                        let (medium, text, held) = &mut holders[at];
                        text.extend(more);
                        ledger.hold(*medium, &root, held, text);
                    }
                    3 if !holders.is_empty() => {
                        let (medium, _, held) = holders.swap_remove(dice.roll(holders.len()));
                        ledger.release(medium, &held);
                    }
                    _ => {
                        ledger.changes().into_iter().for_each(|event| router.apply(event));
                        let held = holders
                            .iter()
                            .flat_map(|(medium, text, _)| whole(text).map(|text| (*medium, text.to_vec())));
                        assert_eq!(router.prefixes(), held.collect(), "seed {seed}");
                        assert_eq!(ledger.changes(), []);
                    }
                }
            }
            for (medium, _, held) in holders {
                ledger.release(medium, &held);
            }
            ledger.changes().into_iter().for_each(|event| router.apply(event));
            assert!(router.0.is_empty() && ledger.blocks.is_empty(), "seed {seed}");
        }
    }

    #[test]
    fn consecutive_blocks_are_one_event_and_owners_differ_in_hash() {
        let text: Vec<u32> = (0..300).collect();
        let mut ledger = Ledger::default();
        let roots = [
            KeySeed { seed: 1, extra: None },
            KeySeed { seed: 2, extra: Some(Arc::from(["owner".to_owned()])) },
        ];
        let mut names = Vec::new();
        for root in &roots {
            let mut held = Vec::new();
            ledger.hold(Medium::Device, root, &mut held, &text);
            let event = KvEvent::Stored {
                blocks: held.clone(),
                parent: None,
                tokens: text[..256].to_vec(),
                medium: Medium::Device,
                extra: root.extra.clone(),
            };
            assert_eq!(ledger.changes(), [event]);
            names.extend(held);
        }
        assert_eq!(names.iter().collect::<BTreeSet<_>>().len(), 4);
        // A block that is released and held again between publications causes no event.
        ledger.release(Medium::Device, &names[..2]);
        ledger.hold(Medium::Device, &roots[0], &mut Vec::new(), &text);
        assert_eq!(ledger.changes(), []);
    }
}
