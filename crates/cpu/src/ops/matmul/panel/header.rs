//! Writes the scales of a unit and, for single rows, reads them. The table is in [`super`](super).

use half::f16;
use kvant_codec::DType;
use kvant_codec::fields::Fields;
use kvant_codec::grouped::LEN as GROUP_LEN;

use super::Line;
use crate::simd::matmul::format::{BLOCK, PANEL};

/// Writes the scales of block `slot` of row `row` to the zeroed header of its unit.
pub(super) fn put(dtype: DType, header: &mut [Line], row: usize, slot: usize, fields: &Fields) {
    let (scales, mins) = (&fields.sub_scales, &fields.sub_mins);
    match dtype.layout() {
        DType::Q8_0 | DType::Q4_0 | DType::Q5_0 | DType::IQ4NL => {
            header[0].set_half(PANEL * slot + row, fields.scale.to_bits());
        }
        DType::Q4_1 | DType::Q5_1 => {
            header[0].set_half(PANEL * slot + row, fields.scale.to_bits());
            header[1].set_half(PANEL * slot + row, fields.min.to_bits());
        }
        DType::Q2K => {
            for s in 0..16 {
                header[s / 4].0[PANEL * (s % 4) + row] = scales[s] | mins[s] << 4;
            }
            put_units(&mut header[4], row, fields);
        }
        DType::Q4K | DType::Q5K => {
            for s in 0..4 {
                let at = PANEL * s + row;
                header[0].0[at] = scales[s] & 15 | scales[s + 4] << 4;
                header[1].0[at] = mins[s] & 15 | mins[s + 4] << 4;
                let [a, b, c, d] = [scales[s], scales[s + 4], mins[s], mins[s + 4]].map(|v| v >> 4 & 3);
                header[2].0[at] = a | b << 2 | c << 4 | d << 6;
            }
            put_units(&mut header[3], row, fields);
        }
        DType::Q3K => {
            for s in 0..4 {
                let at = PANEL * s + row;
                let [a, b, c, d] = [scales[s], scales[s + 4], scales[s + 8], scales[s + 12]];
                header[0].0[at] = a & 15 | b << 4;
                header[1].0[at] = c & 15 | d << 4;
                let [a, b, c, d] = [a, b, c, d].map(|v| v >> 4 & 3);
                header[2].0[at] = a | b << 2 | c << 4 | d << 6;
            }
            put_units(&mut header[3], row, fields);
        }
        DType::Q6K => {
            for (s, &scale) in scales.iter().enumerate() {
                header[s / 4].0[PANEL * (s % 4) + row] = scale;
            }
            put_units(&mut header[4], row, fields);
        }
        DType::IQ4XS => {
            for (s, &scale) in scales[..8].iter().enumerate() {
                header[s / 4].0[PANEL * (s % 4) + row] = scale;
            }
            put_units(&mut header[2], row, fields);
        }
        DType::Q4G128 => {
            header[0].set_half(row, fields.scale.to_bits());
            header[0].0[2 * PANEL + row] = mins[0];
        }
        DType::MXFP4 => header[0].0[PANEL * slot + row] = scales[0],
        DType::NVFP4 => (0..4).for_each(|s| header[0].0[PANEL * s + row] = scales[s]),
        DType::NVFP4G256 => {
            for (s, &scale) in scales.iter().enumerate() {
                header[s / 4].0[PANEL * (s % 4) + row] = scale;
            }
            header[4].0.as_chunks_mut().0[row] = fields.factor.to_le_bytes();
        }
        DType::TQ3_1S | DType::TQ4_1S => put_units(&mut header[slot], row, fields),
        DType::TQ3T => header[0].set_half(PANEL * slot + row, fields.scale.to_bits()),
        _ => unreachable!("{dtype} has no coded panels"),
    }
}

/// Returns the scales of block `slot` of row `row`; the codes are left empty.
pub(super) fn get(dtype: DType, header: &[Line], row: usize, slot: usize) -> Fields {
    let mut fields = Fields::EMPTY;
    let (scales, mins) = (&mut fields.sub_scales, &mut fields.sub_mins);
    let byte = |line: usize, s: usize| header[line].0[PANEL * s + row];
    match dtype.layout() {
        DType::Q8_0 | DType::Q4_0 | DType::Q5_0 | DType::IQ4NL => {
            fields.scale = f16::from_bits(header[0].half(PANEL * slot + row));
        }
        DType::Q4_1 | DType::Q5_1 => {
            fields.scale = f16::from_bits(header[0].half(PANEL * slot + row));
            fields.min = f16::from_bits(header[1].half(PANEL * slot + row));
        }
        DType::Q2K => {
            for s in 0..16 {
                (scales[s], mins[s]) = (byte(s / 4, s % 4) & 15, byte(s / 4, s % 4) >> 4);
            }
            get_units(&header[4], row, &mut fields);
        }
        DType::Q4K | DType::Q5K => {
            for s in 0..4 {
                let (sc, sm, top) = (byte(0, s), byte(1, s), byte(2, s));
                (scales[s], scales[s + 4]) = (sc & 15 | (top & 3) << 4, sc >> 4 | (top >> 2 & 3) << 4);
                (mins[s], mins[s + 4]) = (sm & 15 | (top >> 4 & 3) << 4, sm >> 4 | top >> 6 << 4);
            }
            get_units(&header[3], row, &mut fields);
        }
        DType::Q3K => {
            for s in 0..4 {
                let (a, b, top) = (byte(0, s), byte(1, s), byte(2, s));
                (scales[s], scales[s + 4]) = (a & 15 | (top & 3) << 4, a >> 4 | (top >> 2 & 3) << 4);
                (scales[s + 8], scales[s + 12]) = (b & 15 | (top >> 4 & 3) << 4, b >> 4 | top >> 6 << 4);
            }
            get_units(&header[3], row, &mut fields);
        }
        DType::Q6K => {
            for (s, scale) in scales.iter_mut().enumerate() {
                *scale = byte(s / 4, s % 4);
            }
            get_units(&header[4], row, &mut fields);
        }
        DType::IQ4XS => {
            for (s, scale) in scales[..8].iter_mut().enumerate() {
                *scale = byte(s / 4, s % 4);
            }
            get_units(&header[2], row, &mut fields);
        }
        DType::Q4G128 => {
            fields.scale = f16::from_bits(header[0].half(row));
            fields.min = fields.scale;
            let n_runs = GROUP_LEN / BLOCK;
            scales[..n_runs].fill(1);
            mins[..n_runs].fill(byte(0, 2));
        }
        DType::MXFP4 => scales[0] = byte(0, slot),
        DType::NVFP4 => (0..4).for_each(|s| scales[s] = byte(0, s)),
        DType::NVFP4G256 => {
            for (s, scale) in scales.iter_mut().enumerate() {
                *scale = byte(s / 4, s % 4);
            }
            fields.factor = f32::from_le_bytes(header[4].0.as_chunks().0[row]);
        }
        DType::TQ3_1S | DType::TQ4_1S => get_units(&header[slot], row, &mut fields),
        DType::TQ3T => fields.scale = f16::from_bits(header[0].half(PANEL * slot + row)),
        _ => unreachable!("{dtype} has no coded panels"),
    }
    fields
}

/// Writes `d` and, if there is one, `dmin` of a super-block; or `d` of both halves of a block.
fn put_units(line: &mut Line, row: usize, fields: &Fields) {
    line.set_half(row, fields.scale.to_bits());
    line.set_half(PANEL + row, fields.min.to_bits());
}

fn get_units(line: &Line, row: usize, fields: &mut Fields) {
    fields.scale = f16::from_bits(line.half(row));
    fields.min = f16::from_bits(line.half(PANEL + row));
}
