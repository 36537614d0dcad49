//! The reference: appends one row at a time through the codec.

use kvant_backend::{KvTensor, KvTensorSpec, TileLocation, TileRows, TokenSpan};
use kvant_codec::tile::{TILE, TileLayout, centre, prepare_row, put_centre};

use super::source::Source;
use super::target::Target;

/// Appends `rows.n` rows of `source` `[head_dim]` to one KV tensor.
pub(super) fn append<'a>(
    tensor: &KvTensor,
    rows: TokenSpan,
    mut target: Target<'_>,
    source: Source<'a, impl Fn(usize) -> &'a [f32]>,
) {
    let spec = &tensor.spec;
    for write in spec.writes(rows) {
        let mut values = gather(spec, &mut target, &source, &write.rows());
        let all = write.slots();
        if write.in_step_tiles {
            let (layout, tile) = target.step_tile(write.tile);
            all.clone().for_each(|slot| layout.put(tile, slot, &values[slot]));
        }
        let is_coded = matches!(write.place, TileLocation::Main(_)) && spec.dtype.code().is_some();
        if is_coded && spec.centres {
            if let Some(tiles) = spec.centre_rows(&write, rows) {
                let of_tile = |tile: TileRows| {
                    let rows = gather(spec, &mut target, &source, &tile);
                    rows.into_iter().take(tile.new.end)
                };
                let rows: Vec<_> = tiles.into_iter().flat_map(of_tile).collect();
                put_centre(rows.iter().map(Vec::as_slice), target.centre(write.tile));
            }
            let bytes = target.centre(write.tile);
            for row in &mut values[all.clone()] {
                row.iter_mut().zip(centre(bytes)).for_each(|(v, c)| *v -= c);
            }
        }
        let (layout, tile) = target.tile(write.place);
        for slot in if matches!(write.place, TileLocation::Main(_)) { all } else { write.new } {
            if is_coded {
                values[slot].iter_mut().for_each(|v| *v *= spec.alpha);
            }
            layout.put(tile, slot, &values[slot]);
        }
    }
}

/// Returns the rows of a tile `[16, dim]` as they are encoded, with zeros in empty slots.
fn gather<'a>(
    spec: &KvTensorSpec,
    target: &mut Target<'_>,
    source: &Source<'a, impl Fn(usize) -> &'a [f32]>,
    TileRows { tile, old, new, first_row }: &TileRows,
) -> Vec<Vec<f32>> {
    let (mut values, mut row) = (vec![vec![0.0; spec.stored_dim()]; TILE], vec![0.0; spec.head_dim]);
    if !old.is_empty() {
        let (layout, bytes) = target.tile(TileLocation::Tail(tile % spec.tail_tiles));
        old.clone().for_each(|slot| layout.get(bytes, slot, &mut values[slot]));
    }
    for (i, slot) in new.clone().enumerate() {
        source.read(first_row + i, 0..spec.head_dim, &mut row);
        prepare_row(spec.rotates, &row, &mut values[slot]);
        if spec.tail_tiles > 0 {
            round_to_f16(spec.f16_layout(), &mut values[slot]);
        }
    }
    values
}

/// Rounds a row to f16 where the tensor has an f16 tail: such rows are encoded from f16, however
/// long they stay in the tail.
fn round_to_f16(layout: TileLayout, row: &mut [f32]) {
    let mut tile = vec![0; layout.bytes()];
    layout.put(&mut tile, 0, row);
    layout.get(&tile, 0, row);
}
