//! Models split into several files.

use std::path::{Path, PathBuf};

use kvant_codec::DType;
use kvant_gguf::{Gguf, GgufWriter, Item};

use crate::raw::folder;

/// The statements of shard `no` of three, possibly false.
#[derive(Clone, Copy)]
struct Shard<'a> {
    no: u16,
    count: u16,
    tensors: i32,
    tensor: &'a str,
    extra: Option<(&'a str, u32)>,
}

fn valid(no: u16) -> Shard<'static> {
    Shard { no, count: 3, tensors: 3, tensor: ["a", "b", "c"][no as usize], extra: None }
}

fn shard_path(folder: &Path, no: u16) -> PathBuf {
    folder.join(format!("model-{:05}-of-00003.gguf", no + 1))
}

fn bytes_of(shard: Shard<'_>) -> Vec<u8> {
    let mut w = GgufWriter::new();
    if shard.no == 0 {
        w.set("general.architecture", "llama").unwrap();
        w.set("answer", 42u32).unwrap();
    }
    w.set("split.no", shard.no).unwrap();
    w.set("split.count", shard.count).unwrap();
    w.set("split.tensors.count", shard.tensors).unwrap();
    if let Some((key, value)) = shard.extra {
        w.set(key, value).unwrap();
    }
    w.add_tensor(shard.tensor, &[2], DType::F32).unwrap();
    let mut out = Vec::new();
    w.write_to(&mut out, |data| data.bytes(shard.tensor, &[shard.no as u8; 8])).unwrap();
    out
}

/// Writes three shards to a folder of their own; shard `place` is replaced by `changed`.
fn model(name: &str, place: u16, changed: Shard<'_>) -> PathBuf {
    let folder = folder(name);
    for no in 0..3 {
        let shard = if no == place { changed } else { valid(no) };
        std::fs::write(shard_path(&folder, no), bytes_of(shard)).unwrap();
    }
    folder
}

#[test]
fn any_shard_opens_all() {
    let folder = model("split", 0, valid(0));
    for no in 0..3 {
        let gguf = Gguf::open(shard_path(&folder, no)).unwrap();
        assert_eq!(gguf.meta().get::<u32>("answer").unwrap(), 42);
        let names: Vec<_> = gguf.tensors().iter().map(|t| (t.name.as_str(), t.shard)).collect();
        assert_eq!(names, [("a", 0), ("b", 1), ("c", 2)]);
        for (name, fill) in [("a", 0), ("b", 1), ("c", 2)] {
            assert_eq!(*gguf.tensor(name).unwrap().bytes, [fill; 8]);
        }
        let paths: Vec<_> = gguf.shard_paths().flatten().map(Path::to_owned).collect();
        assert_eq!(paths, [0, 1, 2].map(|no| shard_path(&folder, no)));
    }
}

#[test]
fn merged_model_has_no_split_keys() {
    let folder = model("merge", 0, valid(0));
    let gguf = Gguf::open(shard_path(&folder, 0)).unwrap();
    let mut w = GgufWriter::with_meta(gguf.meta()).unwrap();
    gguf.tensors().iter().for_each(|t| w.add_tensor(&t.name, &t.shape, t.dtype).unwrap());
    let target = folder.join("whole.gguf");
    w.save(&target, |data| {
        gguf.tensors().iter().try_for_each(|t| data.bytes(&t.name, &gguf.tensor(&t.name)?.bytes))
    })
    .unwrap();
    let whole = Gguf::open(target).unwrap();
    assert_eq!(whole.meta().iter().map(|(k, _)| k).collect::<Vec<_>>(), ["general.architecture", "answer"]);
    assert_eq!(whole.tensors().len(), 3);
}

#[test]
fn shards_that_disagree_are_refused() {
    let b = valid(1);
    // Opened from shard 0, except where shard 0 itself is wrong.
    let cases = [
        ("number", 1, Shard { no: 2, ..b }, 1, "split.no", "is 2 here, but 1 by the file's name"),
        ("loop", 2, valid(0), 2, "split.no", "is 0 here, but 2 by the file's name"),
        ("count", 1, Shard { count: 4, ..b }, 1, "split.count", "is 4 here, but 3 by the first shard"),
        ("name", 0, Shard { count: 4, ..valid(0) }, 0, "split.count", "is 4 here, but 3 by the file's name"),
        ("endless", 0, Shard { count: 65_535, ..valid(0) }, 0, "split.count", "is 65535 here, but 3 by"),
        ("total", 1, Shard { tensors: 4, ..b }, 1, "split.tensors.count", "is 4 here, but 3 by the first"),
        (
            "key",
            1,
            Shard { extra: Some(("answer", 43)), ..b },
            1,
            "answer",
            "is u32 43 here, but u32 42 by the first",
        ),
    ];
    for (name, place, shard, faulty, key, message) in cases {
        let folder = model(&format!("split-{name}"), place, shard);
        let error = Gguf::open(shard_path(&folder, 0)).err().unwrap_or_else(|| panic!("{name} was accepted"));
        assert_eq!(error.item(), Some(&Item::Key(key.to_owned())), "{name}: {error}");
        assert_eq!(error.file(), Some(&*shard_path(&folder, faulty)), "{name}: {error}");
        assert!(error.offset().is_some() && error.to_string().contains(message), "{name}: {error}");
    }
}

#[test]
fn tensors_missing_or_doubled_between_shards_are_refused() {
    let folder = model("split-double", 2, Shard { tensor: "a", ..valid(2) });
    let error = Gguf::open(shard_path(&folder, 1)).err().unwrap();
    assert_eq!(error.item(), Some(&Item::Tensor("a".to_owned())));
    assert_eq!(error.file(), Some(&*shard_path(&folder, 2)));
    assert!(
        error.to_string().contains("occurs twice; first at byte") && error.to_string().contains("-00001-of-")
    );

    let folder = super::raw::folder("split-few");
    (0..3).for_each(|no| {
        std::fs::write(shard_path(&folder, no), bytes_of(Shard { tensors: 5, ..valid(no) })).unwrap();
    });
    let error = Gguf::open(shard_path(&folder, 0)).err().unwrap().to_string();
    assert!(error.contains("is 5 here, but 3 by the shards' tensors"), "{error}");
}

#[test]
fn shards_that_are_absent_or_broken_are_named() {
    let folder = model("split-absent", 0, valid(0));
    let fail = || Gguf::open(shard_path(&folder, 0)).err().unwrap();
    let third = shard_path(&folder, 2);
    let whole = std::fs::read(&third).unwrap();
    std::fs::write(&third, &whole[..40]).unwrap();
    assert_eq!(fail().file(), Some(&*third));
    std::fs::remove_file(&third).unwrap();
    assert!(fail().to_string().contains("model-00003-of-00003.gguf: No such file"), "{}", fail());
    std::fs::create_dir(&third).unwrap();
    assert!(
        fail().to_string().contains("model-00003-of-00003.gguf: is a folder, not a regular file"),
        "{}",
        fail()
    );
}

#[test]
fn shard_without_its_name_is_refused() {
    let folder = folder("split-renamed");
    for name in ["model.gguf", "model-00000-of-00003.gguf", "model-00004-of-00003.gguf"] {
        std::fs::write(folder.join(name), bytes_of(valid(0))).unwrap();
        let error = Gguf::open(folder.join(name)).err().unwrap().to_string();
        assert!(error.contains("named NAME-00001-of-00003.gguf"), "{error}");
    }
    let error = Gguf::from_bytes(bytes_of(valid(0))).err().unwrap().to_string();
    assert!(error.starts_with("key \"split.count\" at byte") && error.contains("opened by path"), "{error}");
}

#[test]
fn single_shard_of_one_is_a_whole_file() {
    let one = Shard { count: 1, tensors: 1, ..valid(0) };
    assert_eq!(Gguf::from_bytes(bytes_of(one)).unwrap().tensors().len(), 1);
}
