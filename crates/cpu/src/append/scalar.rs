//! The reference: one row at a time, through the codec.

use kvant_backend::{Place, Stream};
use kvant_codec::Rotation;
use kvant_codec::tile::prepare_row;

use super::is_coded;
use crate::CpuPage;

/// Appends `row(0) .. row(rows)` `[head_dim]` to one stream.
pub(super) fn append<'a>(stream: &mut Stream<CpuPage>, rows: usize, row: impl Fn(usize) -> &'a [f32]) {
    let spec = *stream.spec();
    let rotation = spec.rotates().then(Rotation::kv);
    let mut value = vec![0.0; spec.dim()];
    let plan = stream.plan(rows);
    for write in plan.writes() {
        let alpha = match write.place {
            Place::Main(_) if is_coded(spec.dtype) => spec.alpha,
            _ => 1.0,
        };
        if let Some((tail, slots)) = write.from_tail {
            for slot in slots {
                let from = stream.tile_at(tail);
                let tile = &from.page.as_bytes()[from.offset..][..from.layout.bytes()];
                from.layout.get(tile, slot, &mut value);
                put(stream, write.place, slot, alpha, &mut value);
            }
        }
        for (i, slot) in write.from_rows.enumerate() {
            prepare_row(rotation.as_ref(), row(write.first_row + i), &mut value);
            put(stream, write.place, slot, alpha, &mut value);
        }
    }
    stream.commit(plan);
}

fn put(stream: &mut Stream<CpuPage>, place: Place, slot: usize, alpha: f32, value: &mut [f32]) {
    value.iter_mut().for_each(|v| *v *= alpha);
    let (layout, page, offset) = stream.tile_mut(place);
    layout.put(&mut page.as_mut_bytes()[offset..][..layout.bytes()], slot, value);
}
