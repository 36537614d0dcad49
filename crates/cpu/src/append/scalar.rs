//! The reference: one row at a time, through the codec.

use kvant_backend::{KvStream, Place, Rows};
use kvant_codec::tile::{TILE, TileLayout, prepare_row};

use super::target::Target;

/// Appends `row(0) .. row(rows.n)` `[head_dim]` to one stream.
pub(super) fn append<'a>(
    stream: &KvStream,
    rows: Rows,
    mut target: Target<'_>,
    row: impl Fn(usize) -> &'a [f32],
) {
    let spec = &stream.spec;
    let mut values = vec![vec![0.0; spec.dim()]; TILE];
    for write in spec.writes(rows) {
        if !write.old.is_empty() {
            let (layout, tile) = target.tile(Place::Tail(write.tile % spec.tail_tiles));
            write.old.clone().for_each(|slot| layout.get(tile, slot, &mut values[slot]));
        }
        for (i, slot) in write.new.clone().enumerate() {
            prepare_row(spec.rotates, row(write.first_row + i), &mut values[slot]);
            if spec.tail_tiles > 0 {
                round_to_f16(spec.f16_layout(), &mut values[slot]);
            }
        }
        let all = write.slots();
        if write.in_band {
            let (layout, tile) = target.band_tile(write.tile);
            all.clone().for_each(|slot| layout.put(tile, slot, &values[slot]));
        }
        let is_coded = matches!(write.place, Place::Main(_)) && spec.dtype.code().is_some();
        let (layout, tile) = target.tile(write.place);
        for slot in if matches!(write.place, Place::Main(_)) { all } else { write.new } {
            if is_coded {
                values[slot].iter_mut().for_each(|v| *v *= spec.alpha);
            }
            layout.put(tile, slot, &values[slot]);
        }
    }
}

/// What waits in 16 bit is coded from there, however long it waits.
fn round_to_f16(layout: TileLayout, row: &mut [f32]) {
    let mut tile = vec![0; layout.bytes()];
    layout.put(&mut tile, 0, row);
    layout.get(&tile, 0, row);
}
