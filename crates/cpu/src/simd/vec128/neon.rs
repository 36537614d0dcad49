//! [`Quad`] on NEON.
//!
//! Sets differ in the products of unsigned bytes with signed ones. `usdot` computes them; `sdot`
//! takes signed bytes alone, so that 128 is subtracted from each code and the missing products are
//! added afterwards. Beside `usdot` there are `smmla` and `usmmla`, which compute 2x2 matrix
//! products, and perhaps `bfmmla`, which does so in bf16. All five are inline assembly, as are
//! conversions from and to f16: the oldest supported compiler has no intrinsics for them.

use std::arch::aarch64::*;
use std::arch::asm;

use super::{Bf16MatrixProducts, MatrixProducts, Quad, Task};
use crate::simd::tokens::{Bf16, I8mm, Neon};
use crate::simd::tokens::{bf16, i8mm, neon};

/// Wraps an intrinsic: the token proves its instructions.
macro_rules! intrinsic {
    ($($body:tt)*) => {
        // SAFETY: tokens that are `Sdot` exist only on a CPU with NEON and dot products; memory is
        // read and written through array references of the full width, without any need for
        // alignment.
        unsafe { $($body)* }
    };
}

/// Defines operations of an intrinsic or two.
macro_rules! operations {
    ($(fn $name:ident($($x:ident: $X:ty),+) -> $Y:ty = $body:expr;)+) => {$(
        #[inline(always)]
        fn $name(self, $($x: $X),+) -> $Y {
            intrinsic!($body)
        }
    )+};
}

/// Emits an instruction on three registers that adds to the first.
macro_rules! add_products {
    ($text:literal, $sum:expr, $a:expr, $b:expr) => {{
        let mut sum = $sum;
        intrinsic!(asm!(
            $text,
            sum = inout(vreg) sum,
            a = in(vreg) $a,
            b = in(vreg) $b,
            options(pure, nomem, nostack, preserves_flags)
        ));
        sum
    }};
}

/// A token that proves at least NEON and `sdot`, and the byte products of its set.
pub(crate) trait Sdot: Copy + Send + Sync {
    /// [`Quad::run`]
    fn run_task<T: Task>(self, task: T) -> T::Output;
    /// [`Quad::dot`]
    fn dot_unsigned(self, sum: int32x4_t, a: int32x4_t, bytes: [i8; 4]) -> int32x4_t;
}

neon! {
    fn run_neon<T: Task>(task: T) -> T::Output {
        task.run()
    }
}

impl Sdot for Neon {
    #[inline(always)]
    fn run_task<T: Task>(self, task: T) -> T::Output {
        intrinsic!(run_neon(task))
    }

    #[inline(always)]
    fn dot_unsigned(self, sum: int32x4_t, a: int32x4_t, bytes: [i8; 4]) -> int32x4_t {
        let missing = 128 * bytes.into_iter().map(i32::from).sum::<i32>();
        let sum = self.add_i(sum, self.splat_i(missing));
        self.dot_signed(sum, self.xor_i(a, self.splat_bytes(128)), self.splat_i(word(bytes)))
    }
}

i8mm! {
    fn run_i8mm<T: Task>(task: T) -> T::Output {
        task.run()
    }
}

impl Sdot for I8mm {
    #[inline(always)]
    fn run_task<T: Task>(self, task: T) -> T::Output {
        // SAFETY: this token proves I8MM beside the rest.
        unsafe { run_i8mm(task) }
    }

    #[inline(always)]
    fn dot_unsigned(self, sum: int32x4_t, a: int32x4_t, bytes: [i8; 4]) -> int32x4_t {
        // Sound for an I8MM token: it has the instruction.
        add_products!("usdot {sum:v}.4s, {a:v}.16b, {b:v}.16b", sum, a, self.splat_i(word(bytes)))
    }
}

bf16! {
    fn run_bf16<T: Task>(task: T) -> T::Output {
        task.run()
    }
}

impl Sdot for Bf16 {
    #[inline(always)]
    fn run_task<T: Task>(self, task: T) -> T::Output {
        // SAFETY: this token proves products of bf16 beside the rest.
        unsafe { run_bf16(task) }
    }

    #[inline(always)]
    fn dot_unsigned(self, sum: int32x4_t, a: int32x4_t, bytes: [i8; 4]) -> int32x4_t {
        I8mm::from(self).dot_unsigned(sum, a, bytes)
    }
}

/// A token that proves at least I8MM.
pub(crate) trait Smmla: Sdot {}

impl Smmla for I8mm {}
impl Smmla for Bf16 {}

impl Bf16MatrixProducts for Bf16 {
    #[inline(always)]
    fn dot_halves(self, sum: float32x4_t, a: int32x4_t, b: int32x4_t) -> float32x4_t {
        // Sound for a bf16 token: it has the instruction.
        add_products!("bfmmla {sum:v}.4s, {a:v}.8h, {b:v}.8h", sum, a, b)
    }
}

impl<S: Smmla> MatrixProducts for S {
    #[inline(always)]
    fn dot_square(self, sum: int32x4_t, a: int32x4_t, b: int32x4_t) -> int32x4_t {
        // Sound for an I8MM token: it has the instruction.
        add_products!("smmla {sum:v}.4s, {a:v}.16b, {b:v}.16b", sum, a, b)
    }

    #[inline(always)]
    fn dot_square_unsigned(self, sum: int32x4_t, a: int32x4_t, b: int32x4_t) -> int32x4_t {
        // Sound for an I8MM token: it has the instruction.
        add_products!("usmmla {sum:v}.4s, {a:v}.16b, {b:v}.16b", sum, a, b)
    }

    #[inline(always)]
    fn load_rows(self, [a, b]: [&[u8; 8]; 2]) -> int32x4_t {
        intrinsic!(of_u8(vcombine_u8(vld1_u8(a.as_ptr()), vld1_u8(b.as_ptr()))))
    }

    #[inline(always)]
    fn deinterleave(self, a: int32x4_t, b: int32x4_t) -> [int32x4_t; 2] {
        intrinsic!([vuzp1q_s32(a, b), vuzp2q_s32(a, b)])
    }

    #[inline(always)]
    fn interleave(self, a: int32x4_t, b: int32x4_t) -> [int32x4_t; 2] {
        intrinsic!([vzip1q_s32(a, b), vzip2q_s32(a, b)])
    }

    #[inline(always)]
    fn halves(self, a: int32x4_t, b: int32x4_t) -> [int32x4_t; 2] {
        intrinsic!({
            let (a, b) = (vreinterpretq_s64_s32(a), vreinterpretq_s64_s32(b));
            [vzip1q_s64(a, b), vzip2q_s64(a, b)].map(|x| vreinterpretq_s32_s64(x))
        })
    }
}

/// Packs four bytes into a lane.
#[inline(always)]
fn word(bytes: [i8; 4]) -> i32 {
    i32::from_le_bytes(bytes.map(|byte| byte as u8))
}

#[inline(always)]
fn of_u8(a: uint8x16_t) -> int32x4_t {
    intrinsic!(vreinterpretq_s32_u8(a))
}

#[inline(always)]
fn to_u8(a: int32x4_t) -> uint8x16_t {
    intrinsic!(vreinterpretq_u8_s32(a))
}

#[inline(always)]
fn of_u32(a: uint32x4_t) -> int32x4_t {
    intrinsic!(vreinterpretq_s32_u32(a))
}

#[inline(always)]
fn to_u32(a: int32x4_t) -> uint32x4_t {
    intrinsic!(vreinterpretq_u32_s32(a))
}

#[inline(always)]
fn to_s16(a: int32x4_t) -> int16x8_t {
    intrinsic!(vreinterpretq_s16_s32(a))
}

impl<S: Sdot> Quad for S {
    type Ints = int32x4_t;
    type Floats = float32x4_t;

    #[inline(always)]
    fn run<T: Task>(self, task: T) -> T::Output {
        self.run_task(task)
    }

    operations! {
        fn load_i(x: &[u8; 16]) -> int32x4_t = of_u8(vld1q_u8(x.as_ptr()));
        fn store_i(a: int32x4_t, x: &mut [u8; 16]) -> () = vst1q_u8(x.as_mut_ptr(), to_u8(a));
        fn splat_i(x: i32) -> int32x4_t = vdupq_n_s32(x);
        fn add_i(a: int32x4_t, b: int32x4_t) -> int32x4_t = vaddq_s32(a, b);
        fn min_i(a: int32x4_t, b: int32x4_t) -> int32x4_t = vminq_s32(a, b);
        fn max_i(a: int32x4_t, b: int32x4_t) -> int32x4_t = vmaxq_s32(a, b);
        fn and_i(a: int32x4_t, b: int32x4_t) -> int32x4_t = vandq_s32(a, b);
        fn or_i(a: int32x4_t, b: int32x4_t) -> int32x4_t = vorrq_s32(a, b);
        fn xor_i(a: int32x4_t, b: int32x4_t) -> int32x4_t = veorq_s32(a, b);
        fn shift_left(a: int32x4_t, by: int32x4_t) -> int32x4_t = vshlq_s32(a, by);
        fn shift_right(a: int32x4_t, by: int32x4_t) -> int32x4_t = of_u32(vshlq_u32(to_u32(a), vnegq_s32(by)));
        fn sum_i(a: int32x4_t) -> i32 = vaddvq_s32(a);
        fn largest_i(a: int32x4_t) -> i32 = vmaxvq_s32(a);

        fn splat_bytes(x: u8) -> int32x4_t = of_u8(vdupq_n_u8(x));
        fn sub_bytes(a: int32x4_t, b: int32x4_t) -> int32x4_t = of_u8(vsubq_u8(to_u8(a), to_u8(b)));
        fn shift_bytes(a: int32x4_t, by: i32) -> int32x4_t = of_u8(vshlq_u8(to_u8(a), vdupq_n_s8(by as i8)));
        fn has_bits(a: int32x4_t, bits: int32x4_t) -> int32x4_t = of_u8(vtstq_u8(to_u8(a), to_u8(bits)));
        fn pick(a: int32x4_t, at: int32x4_t) -> int32x4_t = of_u8(vqtbl1q_u8(to_u8(a), to_u8(at)));
        fn look_up_64(codes: int32x4_t, table: &[u8; 64]) -> int32x4_t =
            of_u8(vqtbl4q_u8(vld1q_u8_x4(table.as_ptr()), to_u8(codes)));

        fn splat(x: f32) -> float32x4_t = vdupq_n_f32(x);
        fn load(x: &[f32; 4]) -> float32x4_t = vld1q_f32(x.as_ptr());
        fn store(a: float32x4_t, x: &mut [f32; 4]) -> () = vst1q_f32(x.as_mut_ptr(), a);
        fn add(a: float32x4_t, b: float32x4_t) -> float32x4_t = vaddq_f32(a, b);
        fn sub(a: float32x4_t, b: float32x4_t) -> float32x4_t = vsubq_f32(a, b);
        fn mul(a: float32x4_t, b: float32x4_t) -> float32x4_t = vmulq_f32(a, b);
        fn div(a: float32x4_t, b: float32x4_t) -> float32x4_t = vdivq_f32(a, b);
        fn mul_add(a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t = vfmaq_f32(c, a, b);
        fn abs(a: float32x4_t) -> float32x4_t = vabsq_f32(a);
        fn floor(a: float32x4_t) -> float32x4_t = vrndmq_f32(a);
        fn max(a: float32x4_t, b: float32x4_t) -> float32x4_t = vbslq_f32(vcgtq_f32(a, b), a, b);
        fn less(a: float32x4_t, b: float32x4_t) -> int32x4_t = of_u32(vcltq_f32(a, b));
        fn select(mask: int32x4_t, a: float32x4_t, b: float32x4_t) -> float32x4_t = vbslq_f32(to_u32(mask), a, b);
        fn first(a: float32x4_t) -> f32 = vgetq_lane_f32::<0>(a);
        fn round(a: float32x4_t) -> int32x4_t = vcvtnq_s32_f32(a);
        fn to_floats(a: int32x4_t) -> float32x4_t = vcvtq_f32_s32(a);
        fn bits(a: float32x4_t) -> int32x4_t = vreinterpretq_s32_f32(a);
        fn of_bits(a: int32x4_t) -> float32x4_t = vreinterpretq_f32_s32(a);
    }

    #[inline(always)]
    fn left<const BY: i32>(self, a: int32x4_t) -> int32x4_t {
        intrinsic!(vshlq_n_s32::<BY>(a))
    }

    #[inline(always)]
    fn right<const BY: i32>(self, a: int32x4_t) -> int32x4_t {
        of_u32(intrinsic!(vshrq_n_u32::<BY>(to_u32(a))))
    }

    #[inline(always)]
    fn right_signed<const BY: i32>(self, a: int32x4_t) -> int32x4_t {
        intrinsic!(vshrq_n_s32::<BY>(a))
    }

    #[inline(always)]
    fn dot_pairs(self, sum: int32x4_t, a: int32x4_t, b: int32x4_t) -> int32x4_t {
        let (a, b) = (to_s16(a), to_s16(b));
        intrinsic!({
            let low = vmull_s16(vget_low_s16(a), vget_low_s16(b));
            vaddq_s32(sum, vpaddq_s32(low, vmull_high_s16(a, b)))
        })
    }

    #[inline(always)]
    fn dot_signed(self, sum: int32x4_t, a: int32x4_t, b: int32x4_t) -> int32x4_t {
        add_products!("sdot {sum:v}.4s, {a:v}.16b, {b:v}.16b", sum, a, b)
    }

    #[inline(always)]
    fn dot(self, sum: int32x4_t, a: int32x4_t, bytes: [i8; 4]) -> int32x4_t {
        self.dot_unsigned(sum, a, bytes)
    }

    #[inline(always)]
    fn low_bytes(self, [a, b, c, d]: [int32x4_t; 4]) -> int32x4_t {
        intrinsic!({
            let low = vuzp1q_s16(to_s16(a), to_s16(b));
            let high = vuzp1q_s16(to_s16(c), to_s16(d));
            of_u8(vuzp1q_u8(vreinterpretq_u8_s16(low), vreinterpretq_u8_s16(high)))
        })
    }

    #[inline(always)]
    fn widen(self, x: &[u8; 4]) -> int32x4_t {
        intrinsic!({
            let bytes = vcreate_u8(u32::from_le_bytes(*x).into());
            of_u32(vmovl_u16(vget_low_u16(vmovl_u8(bytes))))
        })
    }

    #[inline(always)]
    fn swap<const BY: usize>(self, a: float32x4_t) -> float32x4_t {
        match BY {
            1 => intrinsic!(vrev64q_f32(a)),
            2 => intrinsic!(vextq_f32::<2>(a, a)),
            _ => unreachable!("lanes {BY} apart"),
        }
    }

    #[inline(always)]
    fn load_f16(self, x: &[u8; 8]) -> float32x4_t {
        let halves = intrinsic!(vld1_u8(x.as_ptr()));
        let floats: float32x4_t;
        intrinsic!(asm!(
            "fcvtl {floats:v}.4s, {halves:v}.4h",
            floats = lateout(vreg) floats,
            halves = in(vreg) halves,
            options(pure, nomem, nostack, preserves_flags)
        ));
        floats
    }

    #[inline(always)]
    fn load_bf16(self, x: &[u8; 8]) -> float32x4_t {
        // A bf16 is the upper half of an f32.
        intrinsic!(vreinterpretq_f32_u32(vshll_n_u16::<16>(vreinterpret_u16_u8(vld1_u8(x.as_ptr())))))
    }

    #[inline(always)]
    fn to_f16(self, a: float32x4_t) -> [u8; 8] {
        let halves: uint8x8_t;
        intrinsic!(asm!(
            "fcvtn {halves:v}.4h, {a:v}.4s",
            halves = lateout(vreg) halves,
            a = in(vreg) a,
            options(pure, nomem, nostack, preserves_flags)
        ));
        let mut bytes = [0; 8];
        intrinsic!(vst1_u8(bytes.as_mut_ptr(), halves));
        bytes
    }
}
