//! Staged and uploaded bytes on a stream that defers all work as long as possible: it fails when
//! memory is refilled too soon.

use super::*;
use crate::staging::fake::Fake;

fn byte(offset: usize) -> u8 {
    (offset / 1000 * 31 + offset) as u8
}

/// Uploads to address 0; returns the sizes of the pieces.
fn upload(fake: &Fake, uploads: &mut Uploads<Fake>, n_bytes: usize, unit: usize) -> Vec<usize> {
    let mut sizes = Vec::new();
    let mut fill = |offset: usize, piece: &mut [u8]| {
        assert_eq!(offset, sizes.iter().sum::<usize>(), "pieces follow each other");
        sizes.push(piece.len());
        piece.iter_mut().zip(offset..).for_each(|(to, at)| *to = byte(at));
    };
    uploads.copy(fake, 0, n_bytes, unit, &mut fill).unwrap();
    fake.synchronize().unwrap();
    assert!(fake.memory(0..n_bytes).into_iter().zip(0..).all(|(got, at)| got == byte(at)));
    sizes
}

#[test]
fn an_upload_arrives_in_pieces_of_whole_units() {
    const MIB: usize = 1 << 20;
    let (fake, mut uploads) = (Fake::default(), Uploads::default());
    assert!(upload(&fake, &mut uploads, 0, 4).is_empty());
    assert_eq!(fake.n_pinned(), 0);
    assert_eq!(upload(&fake, &mut uploads, 12, 4), [12]);
    assert_eq!(fake.n_pinned(), 1);
    assert_eq!(upload(&fake, &mut uploads, 50 * MIB, 5 * MIB), [15 * MIB, 15 * MIB, 15 * MIB, 5 * MIB]);
    // Larger than the default piece: both are reallocated.
    assert_eq!(upload(&fake, &mut uploads, 51 * MIB, 17 * MIB), [17 * MIB; 3]);
    assert_eq!(fake.n_pinned(), 2);
}

#[test]
fn an_upload_waits_for_the_one_before_it() {
    let (fake, mut uploads) = (Fake::default(), Uploads::<Fake>::default());
    for value in 1..4 {
        uploads.copy(&fake, 0, 10, 1, &mut |_, piece| piece.fill(value)).unwrap();
    }
    fake.synchronize().unwrap();
    assert_eq!(fake.memory(0..10), [3; 10]);
}

#[test]
fn staged_ranges_stay_disjoint_until_cleared() {
    let (fake, mut staging) = (Fake::default(), Staging::<Fake>::default());
    // Within a piece, up to its end, beyond it, and larger than one.
    let sizes = [1, 15, 16, 17, STAGING_BYTES - 96, 0, 32, 3 * STAGING_BYTES, 5, STAGING_BYTES];
    for round in 0..2u8 {
        assert!(!staging.is_used());
        let mut at = 0;
        for (i, &size) in sizes.iter().enumerate() {
            staging.copy(&fake, at, &vec![round + 2 * i as u8; size]).unwrap();
            at += size as u64;
        }
        assert!(staging.is_used());
        fake.synchronize().unwrap();
        let mut at = 0;
        for (i, &size) in sizes.iter().enumerate() {
            assert_eq!(
                fake.memory(at..at + size),
                vec![round + 2 * i as u8; size],
                "{size} bytes, round {round}"
            );
            at += size;
        }
        staging.clear();
        // One full piece, one too small for the next data, one for the large data, one for 5 bytes,
        // and one for the last.
        assert_eq!(fake.n_pinned(), 5, "cleared pieces are used again");
    }
}
