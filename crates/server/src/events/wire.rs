//! Wire format of events, as in vLLM: MessagePack, each structure an array of its fields in order.
//!
//! ```text
//! [ts, [event, ...], data_parallel_rank]
//! ["BlockStored", hashes, parent, tokens, block_size, lora_id, medium, lora_name, extra_keys]
//! ["BlockRemoved", hashes, medium]
//! ["AllBlocksCleared"]
//! ```
//!
//! Readers skip fields that were added later.

use kvant::TOKENS_PER_BLOCK;

use super::{KvEvent, Medium};

/// Encodes a batch of events; `seconds` is the time since 1970.
pub(super) fn batch(seconds: f64, events: &[KvEvent]) -> Vec<u8> {
    let mut out = Writer(Vec::new());
    out.array(3);
    out.float(seconds);
    out.array(events.len());
    events.iter().for_each(|event| out.event(event));
    // Data-parallel rank: there is only one.
    out.int(0);
    out.0
}

struct Writer(Vec<u8>);

impl Writer {
    fn event(&mut self, event: &KvEvent) {
        match event {
            KvEvent::Stored { blocks, parent, tokens, medium, extra } => {
                self.array(9);
                self.text("BlockStored");
                self.ints(blocks.iter().copied());
                match parent {
                    Some(parent) => self.int(*parent),
                    None => self.nil(),
                }
                self.ints(tokens.iter().map(|&token| token.into()));
                self.int(TOKENS_PER_BLOCK as u64);
                self.nil();
                self.medium(*medium);
                self.nil();
                match extra {
                    Some(extra) => {
                        self.array(blocks.len());
                        for _ in blocks {
                            self.array(extra.len());
                            extra.iter().for_each(|key| self.text(key));
                        }
                    }
                    None => self.nil(),
                }
            }
            KvEvent::Removed { blocks, medium } => {
                self.array(3);
                self.text("BlockRemoved");
                self.ints(blocks.iter().copied());
                self.medium(*medium);
            }
            KvEvent::Cleared => {
                self.array(1);
                self.text("AllBlocksCleared");
            }
        }
    }

    /// Routers call the device's memory GPU, for every device.
    fn medium(&mut self, medium: Medium) {
        self.text(match medium {
            Medium::Device => "GPU",
            Medium::Ram => "CPU",
            Medium::Disk => "DISK",
        });
    }

    fn nil(&mut self) {
        self.0.push(0xc0);
    }

    fn float(&mut self, value: f64) {
        self.0.push(0xcb);
        self.0.extend(value.to_be_bytes());
    }

    fn int(&mut self, value: u64) {
        match value {
            0..=0x7f => self.0.push(value as u8),
            0x80..=0xff => self.tagged(0xcc, &[value as u8]),
            0x100..=0xffff => self.tagged(0xcd, &(value as u16).to_be_bytes()),
            0x1_0000..=0xffff_ffff => self.tagged(0xce, &(value as u32).to_be_bytes()),
            _ => self.tagged(0xcf, &value.to_be_bytes()),
        }
    }

    /// Texts are names, and short.
    fn text(&mut self, text: &str) {
        match text.len() {
            length @ 0..=31 => self.0.push(0xa0 | length as u8),
            length => self.tagged(0xdb, &(length as u32).to_be_bytes()),
        }
        self.0.extend(text.as_bytes());
    }

    fn array(&mut self, length: usize) {
        match length {
            0..=15 => self.0.push(0x90 | length as u8),
            16..=0xffff => self.tagged(0xdc, &(length as u16).to_be_bytes()),
            _ => self.tagged(0xdd, &(length as u32).to_be_bytes()),
        }
    }

    fn ints(&mut self, values: impl ExactSizeIterator<Item = u64>) {
        self.array(values.len());
        values.for_each(|value| self.int(value));
    }

    fn tagged(&mut self, tag: u8, bytes: &[u8]) {
        self.0.push(tag);
        self.0.extend(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_encoded_like_vllms() {
        let stored = KvEvent::Stored {
            blocks: vec![0x0102_0304_0506_0708, 5],
            parent: Some(300),
            tokens: vec![1, 70_000],
            medium: Medium::Device,
            extra: None,
        };
        let salted = KvEvent::Stored {
            blocks: vec![6],
            parent: None,
            tokens: vec![128; 16],
            medium: Medium::Disk,
            extra: Some(["ab".to_owned()].into()),
        };
        let removed = KvEvent::Removed { blocks: vec![5], medium: Medium::Disk };
        // Encoded by msgspec from vLLM's structures.
        let expected = "93cb3ff80000000000009499ab426c6f636b53746f72656492cf010203040506070805cd012c9201ce00011170cc80c0a3475055c0c099\
            ab426c6f636b53746f7265649106c0dc0010cc80cc80cc80cc80cc80cc80cc80cc80cc80cc80cc80cc80cc80cc80cc80cc80cc80c0a444\
            49534bc09191a2616293ac426c6f636b52656d6f7665649105a44449534b91b0416c6c426c6f636b73436c656172656400";
        let written = batch(1.5, &[stored, salted, removed, KvEvent::Cleared]);
        let hex: String = written.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hex, expected);
    }
}
