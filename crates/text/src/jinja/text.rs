//! Text that tracks which bytes come from the template and which from its input.

use std::ops::Range;
use std::rc::Rc;

use super::Fault;
use super::limits::{Budget, ByteReservation};

/// Bytes of a text besides its characters: its counters and allocator overhead.
const OVERHEAD: usize = 96;

/// Text in which every byte is either template text or input text (`is_input`): part of a message,
/// a tool or any other input. Every operation preserves this, so it holds for the rendered output.
#[derive(Debug, Clone)]
pub(super) struct Text(Rc<Buf>);

#[derive(Debug)]
struct Buf {
    text: String,
    /// Offsets that alternate from template to input text and back, in ascending order; the first
    /// change is to input.
    flips: Vec<usize>,
    buffer: ByteReservation,
}

impl Text {
    /// Copies `text`, as input or template text.
    pub(super) fn new(meter: &Rc<Budget>, text: &str, is_input: bool) -> Result<Self, Fault> {
        let mut draft = TextBuilder::new(meter);
        draft.push(text, is_input)?;
        draft.finish()
    }

    pub(super) fn as_str(&self) -> &str {
        &self.0.text
    }

    pub(super) fn len(&self) -> usize {
        self.0.text.len()
    }

    /// Whether both are the same allocation, not merely equal.
    pub(super) fn is(&self, other: &Text) -> bool {
        Rc::ptr_eq(&self.0, &other.0)
    }

    pub(super) fn meter(&self) -> &Rc<Budget> {
        self.0.buffer.meter()
    }

    /// Returns the pieces of `range` in order, each with whether it is input.
    pub(super) fn pieces(&self, range: Range<usize>) -> impl Iterator<Item = (&str, bool)> {
        let Buf { text, flips, .. } = &*self.0;
        let mut at = range.start;
        let mut next = flips.partition_point(|&flip| flip <= at);
        std::iter::from_fn(move || {
            let end = flips.get(next).map_or(range.end, |&flip| flip.min(range.end));
            let piece = text.get(at..end).filter(|piece| !piece.is_empty())?;
            let is_input = next % 2 == 1;
            (at, next) = (end, next + 1);
            Some((piece, is_input))
        })
    }

    /// Returns the part `range`, which must lie on character boundaries.
    pub(super) fn slice(&self, range: Range<usize>) -> Result<Self, Fault> {
        if range == (0..self.len()) {
            return Ok(self.clone());
        }
        let mut draft = TextBuilder::new(self.meter());
        draft.push_part(self, range)?;
        draft.finish()
    }

    /// Returns `part`, which must be a slice of this text, with its tracking.
    pub(super) fn part(&self, part: &str) -> Result<Self, Fault> {
        let start = (part.as_ptr() as usize).wrapping_sub(self.as_str().as_ptr() as usize);
        // An empty part may be a literal. Any other foreign slice would be a bug and yields empty
        // text.
        let end = start.saturating_add(part.len());
        if self.as_str().get(start..end).is_some() { self.slice(start..end) } else { self.slice(0..0) }
    }

    /// Applies `change` to each piece.
    pub(super) fn map(&self, mut change: impl FnMut(&str) -> String) -> Result<Self, Fault> {
        let mut draft = TextBuilder::new(self.meter());
        for (piece, is_input) in self.pieces(0..self.len()) {
            self.meter().read(piece.len())?;
            draft.push(&change(piece), is_input)?;
        }
        draft.finish()
    }

    /// Returns the characters, each with whether it is input.
    pub(super) fn chars(&self) -> impl Iterator<Item = (char, bool)> {
        self.pieces(0..self.len()).flat_map(|(piece, is_input)| piece.chars().map(move |c| (c, is_input)))
    }

    /// Replaces every `old` by `new`, at most `limit` times. An empty `old` matches between all
    /// characters.
    pub(super) fn replace(&self, old: &str, new: &Text, limit: usize) -> Result<Self, Fault> {
        let mut draft = TextBuilder::new(self.meter());
        self.meter().read(self.len())?;
        let mut at = 0;
        for (found, _) in self.as_str().match_indices(old).take(limit) {
            draft.push_part(self, at..found)?;
            draft.push_text(new)?;
            at = found + old.len();
        }
        draft.push_part(self, at..self.len())?;
        draft.finish()
    }

    /// Returns the text and the ranges of template text.
    pub(super) fn into_trusted(self) -> (String, Vec<Range<usize>>) {
        let mut own = Vec::new();
        let mut at = 0;
        for (piece, is_input) in self.pieces(0..self.len()) {
            if !is_input {
                own.push(at..at + piece.len());
            }
            at += piece.len();
        }
        let text = Rc::try_unwrap(self.0).map_or_else(|shared| shared.text.clone(), |buf| buf.text);
        (text, own)
    }
}

/// A text under construction.
#[derive(Debug)]
pub(super) struct TextBuilder(Buf);

impl TextBuilder {
    pub(super) fn new(meter: &Rc<Budget>) -> Self {
        TextBuilder(Buf { text: String::new(), flips: Vec::new(), buffer: ByteReservation::none(meter) })
    }

    /// Continues a text: `text` itself if not shared, else a copy.
    pub(super) fn of(text: Text) -> Result<Self, Fault> {
        match Rc::try_unwrap(text.0) {
            Ok(mut buf) => {
                // `finish` reserves it again.
                buf.buffer.shrink(OVERHEAD);
                Ok(TextBuilder(buf))
            }
            Err(shared) => {
                let mut draft = TextBuilder::new(shared.buffer.meter());
                draft.0.buffer.grow(shared.text.len() + shared.flips.len() * size_of::<usize>())?;
                draft.0.text.push_str(&shared.text);
                draft.0.flips.extend_from_slice(&shared.flips);
                Ok(draft)
            }
        }
    }

    /// Appends a piece.
    pub(super) fn push(&mut self, piece: &str, is_input: bool) -> Result<(), Fault> {
        let Buf { text, flips, buffer: held } = &mut self.0;
        if piece.is_empty() {
            return Ok(());
        }
        if (flips.len() % 2 == 1) != is_input {
            held.grow(size_of::<usize>())?;
            flips.push(text.len());
        }
        held.grow(piece.len())?;
        text.push_str(piece);
        Ok(())
    }

    /// Appends template text.
    pub(super) fn own(&mut self, piece: &str) -> Result<(), Fault> {
        self.push(piece, false)
    }

    /// Appends a text.
    pub(super) fn push_text(&mut self, text: &Text) -> Result<(), Fault> {
        self.push_part(text, 0..text.len())
    }

    /// Appends a part of a text.
    pub(super) fn push_part(&mut self, text: &Text, range: Range<usize>) -> Result<(), Fault> {
        for (piece, is_input) in text.pieces(range) {
            self.push(piece, is_input)?;
        }
        Ok(())
    }

    /// Completes the text.
    pub(super) fn finish(mut self) -> Result<Text, Fault> {
        self.0.buffer.grow(OVERHEAD)?;
        Ok(Text(Rc::new(self.0)))
    }
}
