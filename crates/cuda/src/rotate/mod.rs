//! The signed Hadamard rotation in kernels, for slices of 128, 64 and 32 values.

use crate::Header;
use crate::constants::Constants;

/// The header; sources that include it also need [`constants`] and [`crate::half::HALF_HEADER`].
pub(crate) const ROTATE_HEADER: Header = Header { name: "rotate.cuh", text: include_str!("rotate.cuh") };

/// Slice sizes that `rotate.cuh` supports.
const SLICES: [usize; 3] = [128, 64, 32];

/// Adds the factors of [`SLICES`].
pub(crate) fn constants(constants: Constants) -> Constants {
    SLICES.into_iter().fold(constants, |constants, n| constants.float(&format!("ROTATION_{n}"), factor(n)))
}

/// Returns the codec's normalization factor of a transformed slice of `n` values.
pub(crate) fn factor(n: usize) -> f32 {
    (1.0 / (n as f64).sqrt()) as f32
}

/// Returns a mask of 128 signs in words.
pub(crate) fn words(mask: u128) -> [u32; 4] {
    std::array::from_fn(|i| (mask >> (32 * i)) as u32)
}

#[cfg(test)]
mod tests {
    use bytemuck::NoUninit;
    use kvant_codec::Rotation;
    use kvant_codec::random::Random;

    use super::*;
    use crate::half::HALF_HEADER;
    use crate::{DevicePtr, Launch, Source, emulator};

    /// Rotates the values of a warp once.
    static SOURCE: Source = Source {
        name: "rotate_test.cu",
        text: "#include \"constants.cuh\"\n#include \"rotate.cuh\"\n\
               struct Params { const float* x; float* y; u32 n; u32 unused; u32 first[4]; u32 last[4]; };\n\
               extern \"C\" __global__ void rotate_test(const __grid_constant__ Params p) {\n\
                   u32 lane = threadIdx.x, at = blockIdx.x * SPAN + 4 * lane;\n\
                   float v[4];\n\
                   for (int i = 0; i < 4; i++) v[i] = p.x[at + i];\n\
                   rotate(v, p.n, p.first, p.last, lane);\n\
                   for (int i = 0; i < 4; i++) p.y[at + i] = v[i];\n\
               }\n",
        headers: &[HALF_HEADER, ROTATE_HEADER],
        constants: || constants(Constants::default()),
        options: &[],
    };

    #[derive(Clone, Copy, NoUninit)]
    #[repr(C)]
    struct Params {
        x: DevicePtr,
        y: DevicePtr,
        n: u32,
        unused: u32,
        first: [u32; 4],
        last: [u32; 4],
    }

    /// Mask bits beyond a slice have no effect; slices of a warp are independent.
    #[test]
    fn slices_of_every_size_have_the_codecs_bits_there_and_back() {
        let Some(cx) = emulator::context(80) else { return };
        let kernel = cx.kernel(&SOURCE, "rotate_test").unwrap();
        let mut x = vec![0.0; 3 * 128];
        Random::new(1).fill_gaussian(&mut x, 1.0);
        (x[5], x[100], x[200]) = (1e4, -0.0, 1e-39);
        for n in SLICES {
            let rotation = Rotation::kv(n);
            let masks = Rotation::kv(128);
            let (before, after) = (words(masks.before()), words(masks.after()));
            let run = |x: &[f32], first, last| {
                let (on_x, on_y) = (emulator::upload(&cx, x), emulator::uninitialized(&cx, x.len()));
                let params = Params { x: on_x.ptr(), y: on_y.ptr(), n: n as u32, unused: 0, first, last };
                cx.launch(kernel, Launch::linear(3, 32), &params).unwrap();
                emulator::download(&cx, &on_y)
            };
            let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
            let mut want = x.clone();
            rotation.forward(&mut want);
            let forward = run(&x, before, after);
            assert_eq!(bits(&forward), bits(&want), "slices of {n}");
            rotation.inverse(&mut want);
            assert_eq!(bits(&run(&forward, after, before)), bits(&want), "slices of {n}, back");
        }
    }
}
