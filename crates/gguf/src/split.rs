//! Models split into several files, as written by `gguf-split`.
//!
//! Shard i of N is named `NAME-0000i-of-0000N.gguf`, i from 1. Each shard states `split.no` (from
//! 0), `split.count` and `split.tensors.count` (of all shards together); all other metadata is in
//! the first.

use std::path::{Path, PathBuf};

use crate::error::{GgufError, Problem};
use crate::meta::Meta;
use crate::shard::Shard;
use crate::value::Value;

const NO: &str = "split.no";
const COUNT: &str = "split.count";
const TENSORS: &str = "split.tensors.count";

/// Returns whether a key describes the split rather than the model.
pub(crate) fn is_split_key(key: &str) -> bool {
    [NO, COUNT, TENSORS].contains(&key)
}

/// Opens the file at `path`, or all shards of its model, in order.
pub(crate) fn open_all(path: &Path) -> Result<Vec<Shard>, GgufError> {
    let opened = Shard::open(path.to_owned())?;
    let Some(count) = shard_count(&opened)? else { return Ok(vec![opened]) };
    let meta = Meta::of(&opened);
    let name = ShardName::parse(path).ok_or_else(|| meta.error(COUNT, Problem::ShardName { count }))?;
    agree(&opened, COUNT, count, name.count, "the file's name")?;
    if !(1..=count).contains(&name.number) {
        return Err(meta.error(COUNT, Problem::ShardName { count }));
    }

    // Shards state only their number, no file names, and each number is opened once: cycles are
    // impossible.
    let mut opened = Some(opened);
    let mut shards = Vec::new();
    for number in 1..=count {
        let shard = match opened.take_if(|_| number == name.number) {
            Some(shard) => shard,
            None => Shard::open(name.sibling(number))?,
        };
        let stated = Meta::of(&shard).get::<u64>(NO)?;
        agree(&shard, NO, stated, number - 1, "the file's name")?;
        if let Some(first) = shards.first() {
            agree_with_first(&shard, first)?;
        }
        shards.push(shard);
    }
    let held = shards.iter().map(|s| s.parsed.tensors.len() as u64).sum();
    let stated = Meta::of(&shards[0]).get::<u64>(TENSORS)?;
    agree(&shards[0], TENSORS, stated, held, "the shards' tensors")?;
    Ok(shards)
}

/// Rejects a shard of a split model.
pub(crate) fn refuse_shard(shard: &Shard) -> Result<(), GgufError> {
    match shard_count(shard)? {
        Some(count) => Err(Meta::of(shard).error(COUNT, Problem::ShardName { count })),
        None => Ok(()),
    }
}

/// Returns the number of files of the model, `None` for an unsplit one.
fn shard_count(shard: &Shard) -> Result<Option<u64>, GgufError> {
    Ok(Meta::of(shard).find::<u16>(COUNT)?.filter(|count| *count > 1).map(u64::from))
}

fn agree(shard: &Shard, key: &str, got: u64, want: u64, by: &'static str) -> Result<(), GgufError> {
    if got == want {
        return Ok(());
    }
    let problem = Problem::ShardDisagrees { got: got.to_string(), want: want.to_string(), by };
    Err(Meta::of(shard).error(key, problem))
}

/// Rejects a shard whose value of any key differs from the first shard's, except its number and its
/// own alignment.
fn agree_with_first(shard: &Shard, first: &Shard) -> Result<(), GgufError> {
    for key in [COUNT, TENSORS] {
        agree(shard, key, Meta::of(shard).get(key)?, Meta::of(first).get(key)?, "the first shard")?;
    }
    for (key, value) in Meta::of(shard) {
        let own = is_split_key(key) || key == crate::parse::ALIGNMENT_KEY;
        let other = Meta::of(first).value(key).filter(|other| !own && encoded(other) != encoded(&value));
        if let Some(other) = other {
            let problem = Problem::ShardDisagrees {
                got: value.describe(),
                want: other.describe(),
                by: "the first shard",
            };
            return Err(Meta::of(shard).error(key, problem));
        }
    }
    Ok(())
}

/// Encodes type and bytes: equal for NaN, unequal for the same number in another type.
fn encoded(value: &Value<'_>) -> Vec<u8> {
    let mut bytes = value.value_type().id().to_le_bytes().to_vec();
    value.encode(&mut bytes);
    bytes
}

/// A path `NAME-00001-of-0000N.gguf`.
struct ShardName<'a> {
    path: &'a Path,
    /// `NAME`.
    stem: &'a str,
    /// From 1.
    number: u64,
    count: u64,
}

impl<'a> ShardName<'a> {
    fn parse(path: &'a Path) -> Option<Self> {
        let rest = path.file_name()?.to_str()?.strip_suffix(".gguf")?;
        let (rest, count) = rest.rsplit_once("-of-")?;
        let (stem, number) = rest.rsplit_once('-')?;
        let five_digits = |s: &str| {
            (s.len() == 5 && s.bytes().all(|b| b.is_ascii_digit())).then(|| s.parse().ok()).flatten()
        };
        Some(Self { path, stem, number: five_digits(number)?, count: five_digits(count)? })
    }

    fn sibling(&self, number: u64) -> PathBuf {
        self.path.with_file_name(format!("{}-{number:05}-of-{:05}.gguf", self.stem, self.count))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shard_names_are_parsed_and_formatted() {
        let path = Path::new("dir/a-b-00002-of-00003.gguf");
        let name = ShardName::parse(path).unwrap();
        assert_eq!((name.stem, name.number, name.count), ("a-b", 2, 3));
        assert_eq!(name.sibling(2), path);
        assert_eq!(name.sibling(1), Path::new("dir/a-b-00001-of-00003.gguf"));
        for bad in [
            "a.gguf",
            "a-1-of-3.gguf",
            "a-00001-of-0000x.gguf",
            "a-+0001-of-00003.gguf",
            "a-00001-of-00003.bin",
        ] {
            assert!(ShardName::parse(Path::new(bad)).is_none(), "{bad}");
        }
    }
}
