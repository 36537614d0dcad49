//! Wire format of events, as in vLLM since its 0.24: MessagePack, a batch as an array, each event
//! as a map of its fields.
//!
//! ```text
//! [ts, [event, ...], data_parallel_rank]
//! {type: "BlockStored", block_hashes, parent_block_hash, token_ids, block_size, lora_id, medium,
//!  lora_name, extra_keys}
//! {type: "BlockRemoved", block_hashes, medium}
//! {type: "AllBlocksCleared"}
//! ```
//!
//! A field at its default (`extra_keys`: none) is left out. vLLM's router refuses events as arrays,
//! which vLLM sent before.

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
                self.map("BlockStored", if extra.is_some() { 8 } else { 7 });
                self.text("block_hashes");
                self.ints(blocks.iter().copied());
                self.text("parent_block_hash");
                match parent {
                    Some(parent) => self.int(*parent),
                    None => self.nil(),
                }
                self.text("token_ids");
                self.ints(tokens.iter().map(|&token| token.into()));
                self.text("block_size");
                self.int(TOKENS_PER_BLOCK as u64);
                self.text("lora_id");
                self.nil();
                self.medium(*medium);
                self.text("lora_name");
                self.nil();
                if let Some(extra) = extra {
                    self.text("extra_keys");
                    self.array(blocks.len());
                    for _ in blocks {
                        self.array(extra.len());
                        extra.iter().for_each(|key| self.text(key));
                    }
                }
            }
            KvEvent::Removed { blocks, medium } => {
                self.map("BlockRemoved", 2);
                self.text("block_hashes");
                self.ints(blocks.iter().copied());
                self.medium(*medium);
            }
            KvEvent::Cleared => self.map("AllBlocksCleared", 0),
        }
    }

    /// Begins an event of `n` fields.
    fn map(&mut self, kind: &str, n: u8) {
        self.0.push(0x80 | (n + 1));
        self.text("type");
        self.text(kind);
    }

    /// Routers call the device's memory GPU, for every device.
    fn medium(&mut self, medium: Medium) {
        self.text("medium");
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
        let expected = "93cb3ff80000000000009488a474797065ab426c6f636b53746f726564ac626c6f636b5f686173\
            68657392cf010203040506070805b1706172656e745f626c6f636b5f68617368cd012ca9746f6b\
            656e5f6964739201ce00011170aa626c6f636b5f73697a65cc80a76c6f72615f6964c0a66d6564\
            69756da3475055a96c6f72615f6e616d65c089a474797065ab426c6f636b53746f726564ac626c\
            6f636b5f6861736865739106b1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f69\
            6473dc0010cc80cc80cc80cc80cc80cc80cc80cc80cc80cc80cc80cc80cc80cc80cc80cc80aa62\
            6c6f636b5f73697a65cc80a76c6f72615f6964c0a66d656469756da44449534ba96c6f72615f6e\
            616d65c0aa65787472615f6b6579739191a2616283a474797065ac426c6f636b52656d6f766564\
            ac626c6f636b5f6861736865739105a66d656469756da44449534b81a474797065b0416c6c426c\
            6f636b73436c656172656400";
        let written = batch(1.5, &[stored, salted, removed, KvEvent::Cleared]);
        let hex: String = written.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hex, expected);
    }
}
