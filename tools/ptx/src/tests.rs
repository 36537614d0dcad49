//! Hand-written kernels, compared with plain Rust; and a test of every fault.

mod copies;
mod dependent;

use super::*;

/// Returns a kernel `k` with a parameter of three addresses, in %rd1..%rd3, its thread in %r1, and
/// registers of every kind.
fn kernel(declared: &str, body: &str) -> String {
    format!(
        ".version 9.0\n.target sm_80\n.address_size 64\n{declared}\n.visible .entry k(\n\t.param .align 8 .b8 k_param_0[24]\n)\n{{
        .reg .pred %p<8>; .reg .b16 %rs<8>; .reg .b32 %r<40>; .reg .f32 %f<16>; .reg .b64 %rd<24>; .reg .f64 %fd<4>;
        ld.param.u64 %rd1, [k_param_0]; ld.param.u64 %rd2, [k_param_0+8]; ld.param.u64 %rd3, [k_param_0+16];
        mov.u32 %r1, %tid.x;
        {body}
        ret;\n}}\n"
    )
}

/// Runs `k` on `threads` threads over inputs `a` and `b` and `out` words of output.
fn run(ptx: &str, threads: u32, a: &[u32], b: &[u32], out: usize) -> Result<Vec<u32>, Fault> {
    run_with(ptx, threads, a, b, out, 4096)
}

/// As [`run`], with shared memory.
fn run_with(
    ptx: &str,
    threads: u32,
    a: &[u32],
    b: &[u32],
    out: usize,
    shared_bytes: usize,
) -> Result<Vec<u32>, Fault> {
    run_grid(ptx, Grid { blocks: [1, 1, 1], threads: [threads, 1, 1], shared_bytes }, a, b, out)
}

/// As [`run`], on several blocks.
fn run_grid(ptx: &str, grid: Grid, a: &[u32], b: &[u32], out: usize) -> Result<Vec<u32>, Fault> {
    let mut machine = Machine::new();
    let module = machine.load(ptx).unwrap();
    let mut upload = |words: &[u32]| {
        let address = machine.alloc(4 * words.len().max(1));
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        machine.write(address, &bytes).unwrap();
        address
    };
    let (a, b) = (upload(a), upload(b));
    let y = machine.alloc(4 * out);
    let params: Vec<u8> = [a, b, y].iter().flat_map(|address| address.to_le_bytes()).collect();
    machine.launch(&module, "k", grid, &params)?;
    let mut bytes = vec![0; 4 * out];
    machine.read(y, &mut bytes).unwrap();
    Ok(bytes.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)).collect())
}

/// Loads word `tid` of each input to %r2 and %r3; `op` computes %r4, which is stored.
fn each(op: &str, a: &[u32], b: &[u32]) -> Vec<u32> {
    let body = format!(
        "mul.wide.u32 %rd4, %r1, 4; add.s64 %rd5, %rd1, %rd4; add.s64 %rd6, %rd2, %rd4; add.s64 %rd7, %rd3, %rd4;
        ld.global.u32 %r2, [%rd5]; ld.global.nc.u32 %r3, [%rd6]; {op} st.global.u32 [%rd7], %r4;"
    );
    run(&kernel("", &body), a.len() as u32, a, b, a.len()).unwrap()
}

const A: [u32; 8] = [0, 1, 7, 0x8000_0000, 0xffff_ffff, 0x1234_5678, 31, 0x7fff_ffff];
const B: [u32; 8] = [3, 0xffff_ffff, 2, 5, 33, 0x0f0f_0f0f, 40, 1];

fn assert_each(op: &str, want: impl Fn(u32, u32) -> u32) {
    let want: Vec<u32> = A.iter().zip(B).map(|(&a, b)| want(a, b)).collect();
    assert_eq!(each(op, &A, &B), want, "{op}");
}

#[test]
fn integers_wrap_shift_and_divide_per_the_isa() {
    assert_each("add.s32 %r4, %r2, %r3;", u32::wrapping_add);
    assert_each("sub.s32 %r4, %r2, -5;", |a, _| a.wrapping_add(5));
    assert_each("mul.lo.s32 %r4, %r2, %r3;", u32::wrapping_mul);
    assert_each("mul.hi.u32 %r4, %r2, %r3;", |a, b| ((u64::from(a) * u64::from(b)) >> 32) as u32);
    assert_each("mul.hi.s32 %r4, %r2, %r3;", |a, b| {
        ((i64::from(a as i32) * i64::from(b as i32)) >> 32) as u32
    });
    assert_each("mad.lo.s32 %r4, %r2, %r3, 9;", |a, b| a.wrapping_mul(b).wrapping_add(9));
    assert_each("div.s32 %r4, %r2, %r3;", |a, b| (i64::from(a as i32) / i64::from(b as i32)) as u32);
    assert_each("rem.u32 %r4, %r2, %r3;", |a, b| a % b);
    assert_each("shl.b32 %r4, %r2, %r3;", |a, b| a.checked_shl(b).unwrap_or(0));
    assert_each("shr.u32 %r4, %r2, %r3;", |a, b| a.checked_shr(b).unwrap_or(0));
    assert_each("shr.s32 %r4, %r2, %r3;", |a, b| (a as i32 >> b.min(31)) as u32);
    assert_each("min.s32 %r4, %r2, %r3;", |a, b| (a as i32).min(b as i32) as u32);
    assert_each("add.sat.s32 %r4, %r2, %r3;", |a, b| (a as i32).saturating_add(b as i32) as u32);
    assert_each("dp2a.hi.s32.u32 %r4, %r2, %r3, 5;", |a, b| {
        let byte = |i: u32| (b >> (8 * i) & 0xff) as i32;
        (i32::from(a as i16) * byte(2) + i32::from((a >> 16) as i16) * byte(3) + 5) as u32
    });
    assert_each("neg.s32 %r4, %r2;", u32_neg);
    assert_each("not.b32 %r4, %r2;", |a, _| !a);
    assert_each("clz.b32 %r4, %r2;", |a, _| a.leading_zeros());
    assert_each("popc.b32 %r4, %r2;", |a, _| a.count_ones());
    assert_each("brev.b32 %r4, %r2;", |a, _| a.reverse_bits());
    assert_each("bfe.u32 %r4, %r2, 4, 8;", |a, _| a >> 4 & 0xff);
    assert_each("bfe.s32 %r4, %r2, 24, 8;", |a, _| (a as i32 >> 24) as u32);
    assert_each("bfi.b32 %r4, %r2, %r3, 4, 8;", |a, b| b & !0xff0 | (a & 0xff) << 4);
    assert_each("shf.l.wrap.b32 %r4, %r2, %r3, 9;", |a, b| b << 9 | a >> 23);
    assert_each("shf.r.wrap.b32 %r4, %r2, %r3, 9;", |a, b| a >> 9 | b << 23);
    assert_each("lop3.b32 %r4, %r2, %r3, %r1, 0xe8;", |a, b| {
        let c = A.iter().zip(B).position(|pair| pair == (&a, b)).unwrap() as u32;
        a & b | a & c | b & c
    });
    assert_each("prmt.b32 %r4, %r2, %r3, 29296;", |a, b| {
        let bytes: Vec<u8> = [a.to_le_bytes(), b.to_le_bytes()].concat();
        u32::from_le_bytes([bytes[0], bytes[7], bytes[2], bytes[7]])
    });
    // A selector with its top bit set replicates the sign.
    assert_each("prmt.b32 %r4, %r2, 0, 0xbbbb;", |a, _| if a >> 31 == 1 { u32::MAX } else { 0 });
    assert_each("dp4a.s32.u32 %r4, %r2, %r3, 100;", |a, b| {
        let dot: i32 = a
            .to_le_bytes()
            .iter()
            .zip(b.to_le_bytes())
            .map(|(&a, b)| i32::from(a as i8) * i32::from(b))
            .sum();
        (dot + 100) as u32
    });
    assert_each(
        "setp.lt.s32 %p1|%p2, %r2, %r3; selp.b32 %r4, 1, 2, %p1; @%p2 add.s32 %r4, %r4, 16;",
        |a, b| {
            if (a as i32) < b as i32 { 1 } else { 18 }
        },
    );
    assert_each(
        "mul.wide.s32 %rd8, %r2, %r3; mul.hi.u64 %rd9, %rd8, %rd8; mov.b64 {%r5, %r4}, %rd9;",
        |a, b| {
            let product = i64::from(a as i32) * i64::from(b as i32);
            (((u128::from(product as u64) * u128::from(product as u64)) >> 64) as u64 >> 32) as u32
        },
    );
}

fn u32_neg(a: u32, _: u32) -> u32 {
    a.wrapping_neg()
}

#[test]
fn floats_round_convert_and_compare_per_the_isa() {
    let a = [1.5_f32, -0.0, f32::NAN, 3e38, 1e-40, -2.5, 65520.0, 0.1].map(f32::to_bits);
    let b = [0.25_f32, 0.0, 1.0, 3e38, 1.0, 3.0, 1.0, 3.0].map(f32::to_bits);
    let check = |op: &str, want: &dyn Fn(f32, f32) -> u32| {
        let op = format!("mov.b32 %f1, %r2; mov.b32 %f2, %r3; {op}");
        let got = each(&op, &a, &b);
        for (i, got) in got.into_iter().enumerate() {
            let want = want(f32::from_bits(a[i]), f32::from_bits(b[i]));
            let both_nan = f32::from_bits(got).is_nan() && f32::from_bits(want).is_nan();
            assert!(got == want || both_nan, "{op} {i}: {got:#x}, want {want:#x}");
        }
    };
    check("add.f32 %f3, %f1, %f2; mov.b32 %r4, %f3;", &|a, b| (a + b).to_bits());
    check("fma.rn.f32 %f3, %f1, %f2, %f1; mov.b32 %r4, %f3;", &|a, b| a.mul_add(b, a).to_bits());
    check("mul.ftz.f32 %f3, %f1, %f2; mov.b32 %r4, %f3;", &|a, b| {
        if a.is_subnormal() { 0 } else { (a * b).to_bits() }
    });
    check("max.f32 %f3, %f1, %f2; mov.b32 %r4, %f3;", &|a, b| if a == 0.0 { 0 } else { a.max(b).to_bits() });
    check("max.NaN.f32 %f3, %f1, %f2; mov.b32 %r4, %f3;", &|a, b| {
        if a.is_nan() {
            f32::NAN.to_bits()
        } else if a == 0.0 {
            0
        } else {
            a.max(b).to_bits()
        }
    });
    check("cvt.rni.s32.f32 %r4, %f1;", &|a, _| a.round_ties_even() as i32 as u32);
    check("cvt.rzi.u32.f32 %r4, %f1;", &|a, _| a as u32);
    check("cvt.sat.f32.f32 %f3, %f1; mov.b32 %r4, %f3;", &|a, _| {
        if a.is_nan() { 0 } else { (a.clamp(0.0, 1.0) + 0.0).to_bits() }
    });
    // NaN has a single bit pattern in f16.
    let f16 = |x: f32| u32::from(if x.is_nan() { 0x7fff } else { half::f16::from_f32(x).to_bits() });
    let bf16 = |x: f32| u32::from(if x.is_nan() { 0x7fff } else { half::bf16::from_f32(x).to_bits() });
    check("cvt.rn.f16x2.f32 %r4, %f1, %f2;", &|a, b| f16(a) << 16 | f16(b));
    check("cvt.rn.bf16.f32 %rs1, %f1; cvt.u32.u16 %r4, %rs1;", &|a, _| bf16(a));
    check("cvt.rz.bf16.f32 %rs1, %f1; cvt.u32.u16 %r4, %rs1;", &|a, _| {
        if a.is_nan() { 0x7fff } else { a.to_bits() >> 16 }
    });
    check("cvt.u16.u32 %rs1, %r2; cvt.f32.f16 %f3, %rs1; mov.b32 %r4, %f3;", &|a, _| {
        half::f16::from_bits(a.to_bits() as u16).to_f32().to_bits()
    });
    check("setp.ltu.f32 %p1, %f1, %f2; selp.u32 %r4, 1, 0, %p1;", &|a, b| (a < b || a.is_nan()).into());
    check(
        "setp.neu.f32 %p1, %f1, %f1; setp.lt.or.f32 %p2, %f1, %f2, %p1; selp.u32 %r4, 1, 0, %p2;",
        &|a, b| (a.is_nan() || a < b).into(),
    );
    check("cvt.rn.f32.s32 %f3, %r2; mov.b32 %r4, %f3;", &|a, _| (a.to_bits() as i32 as f32).to_bits());
    check("cvt.s8.s32 %r4, %r2; cvt.s32.s8 %r4, %r4;", &|a, _| a.to_bits() as i8 as i32 as u32);
}

#[test]
fn lanes_shuffle_vote_and_reduce() {
    let a: Vec<u32> = (0..64).map(|i| i * i).collect();
    let lanes = |op: &str| each(op, &a, &a);
    let got = lanes("shfl.sync.bfly.b32 %r4|%p1, %r2, 5, 31, -1;");
    assert!((0..64).all(|i| got[i] == a[i ^ 5]));
    let got = lanes("shfl.sync.down.b32 %r4|%p1, %r2, 3, 31, -1; @!%p1 mov.u32 %r4, 7;");
    assert!((0..64).all(|i| got[i] == if i % 32 < 29 { a[i + 3] } else { 7 }));
    let got = lanes("shfl.sync.up.b32 %r4, %r2, 2, 0, -1;");
    assert!((0..64).all(|i| got[i] == if i % 32 < 2 { a[i] } else { a[i - 2] }));
    // Segments of 8: the upper bits of the lane are unchanged.
    let got = lanes("shfl.sync.idx.b32 %r4|%p1, %r2, 1, 6175, -1;");
    assert!((0..64).all(|i| got[i] == a[i / 8 * 8 + 1]), "{got:?}");
    let got = lanes("setp.gt.u32 %p1, %r2, 100; vote.sync.ballot.b32 %r4, %p1, -1;");
    assert!((0..64).all(|i| got[i] == if i < 32 { !0 << 11 } else { !0 }));
    let got = lanes("redux.sync.max.u32 %r4, %r2, -1;");
    assert!((0..64).all(|i| got[i] == if i < 32 { 31 * 31 } else { 63 * 63 }));
}

/// Every thread copies 16 bytes to shared memory and reads its neighbour's.
fn neighbours(before: &str) -> String {
    let body = format!(
        "shl.b32 %r2, %r1, 4; mov.u32 %r3, buffer; add.s32 %r4, %r3, %r2; cvt.u64.u32 %rd4, %r2; add.s64 %rd5, %rd1, %rd4;
        cp.async.cg.shared.global [%r4], [%rd5], 16; cp.async.commit_group; {before}
        xor.b32 %r5, %r2, 16; add.s32 %r6, %r3, %r5; ld.shared.v4.u32 {{%r7, %r8, %r9, %r10}}, [%r6];
        add.s64 %rd6, %rd3, %rd4; st.global.v4.u32 [%rd6], {{%r7, %r8, %r9, %r10}};"
    );
    kernel(".extern .shared .align 16 .b8 buffer[];", &body)
}

#[test]
fn copies_arrive_when_they_are_waited_for_and_not_before() {
    let a: Vec<u32> = (0..256).collect();
    let got = run(&neighbours("cp.async.wait_group 0; bar.sync 0;"), 64, &a, &[], 256).unwrap();
    assert!((0..256).all(|i| got[i] == (i as u32 ^ 4)));
    let got = run(&neighbours("cp.async.wait_all; bar.sync 0;"), 64, &a, &[], 256).unwrap();
    assert!((0..256).all(|i| got[i] == (i as u32 ^ 4)));
    for forgotten in ["bar.sync 0;", "cp.async.wait_group 1; bar.sync 0;"] {
        let fault = run(&neighbours(forgotten), 64, &a, &[], 256).unwrap_err();
        assert!(fault.what.contains("has not waited for it"), "{fault}");
    }
    let fault = run(&neighbours("cp.async.wait_all;"), 64, &a, &[], 256).unwrap_err();
    assert!(fault.what.contains("race") || fault.what.contains("never written"), "{fault}");
    // A copy over data that a neighbour may still read.
    let again = "cp.async.wait_all; bar.sync 0; xor.b32 %r5, %r2, 16; add.s32 %r6, %r3, %r5; ld.shared.u32 %r7, [%r6];
        cp.async.cg.shared.global [%r4], [%rd5], 16; cp.async.wait_all; bar.sync 0;";
    let fault = run(&neighbours(again), 64, &a, &[], 256).unwrap_err();
    assert!(fault.what.contains("race") || fault.what.contains("being copied"), "{fault}");
}

/// `a [16, 32]` of signed bytes times `b [32, 8]`, from fragments loaded by the ISA's tables.
#[test]
fn matrices_of_bytes_multiply() {
    let a: Vec<i8> = (0..512).map(|i| (i * 37 % 251) as u8 as i8).collect();
    let b: Vec<i8> = (0..256).map(|i| (i * 91 % 253) as u8 as i8).collect();
    let words = |bytes: &[i8]| -> Vec<u32> {
        bytes
            .chunks(4)
            .map(|c| u32::from_le_bytes([c[0] as u8, c[1] as u8, c[2] as u8, c[3] as u8]))
            .collect()
    };
    // b is stored by columns: byte 32 n + k.
    let body = "shr.u32 %r2, %r1, 2; and.b32 %r3, %r1, 3; mad.lo.s32 %r4, %r2, 32, 0; mad.lo.s32 %r4, %r3, 4, %r4;
        cvt.u64.u32 %rd4, %r4; add.s64 %rd5, %rd1, %rd4; add.s64 %rd6, %rd2, %rd4;
        ld.global.u32 %r10, [%rd5]; ld.global.u32 %r11, [%rd5+256]; ld.global.u32 %r12, [%rd5+16]; ld.global.u32 %r13, [%rd5+272];
        ld.global.u32 %r14, [%rd6]; ld.global.u32 %r15, [%rd6+16];
        mov.u32 %r16, 1; mov.u32 %r17, 2; mov.u32 %r18, 3; mov.u32 %r19, 4;
        mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%r20, %r21, %r22, %r23}, {%r10, %r11, %r12, %r13}, {%r14, %r15}, {%r16, %r17, %r18, %r19};
        mad.lo.s32 %r5, %r2, 8, 0; mad.lo.s32 %r5, %r3, 2, %r5; mul.wide.u32 %rd7, %r5, 4; add.s64 %rd8, %rd3, %rd7;
        st.global.v2.u32 [%rd8], {%r20, %r21}; st.global.v2.u32 [%rd8+256], {%r22, %r23};";
    let got = run(&kernel("", body), 32, &words(&a), &words(&b), 128).unwrap();
    for m in 0..16 {
        for n in 0..8 {
            let dot: i32 = (0..32).map(|k| i32::from(a[32 * m + k]) * i32::from(b[32 * n + k])).sum();
            let start = 1 + (n % 2) as i32 + 2 * i32::from(m >= 8);
            assert_eq!(got[8 * m + n] as i32, dot + start, "{m} {n}");
        }
    }
}

/// `a [16, 16] x b [16, 8]` in f16: a through `ldmatrix.x4`, b (stored `[k, n]`) through
/// `ldmatrix.x2.trans`.
#[test]
fn matrices_of_halves_multiply_and_load() {
    let values = |n: usize, seed: usize| -> Vec<half::f16> {
        (0..n).map(|i| half::f16::from_f32(((i * seed) % 17) as f32 - 8.0)).collect()
    };
    let (a, b) = (values(256, 5), values(128, 7));
    let words = |halves: &[half::f16]| -> Vec<u32> {
        halves.chunks(2).map(|c| u32::from(c[1].to_bits()) << 16 | u32::from(c[0].to_bits())).collect()
    };
    let body = "mov.u32 %r3, buffer; shl.b32 %r2, %r1, 4; cvt.u64.u32 %rd4, %r2; add.s64 %rd5, %rd1, %rd4; add.s64 %rd6, %rd2, %rd4;
        add.s32 %r4, %r3, %r2; ld.global.v4.u32 {%r5, %r6, %r7, %r8}, [%rd5]; st.shared.v4.u32 [%r4], {%r5, %r6, %r7, %r8};
        setp.gt.u32 %p1, %r1, 15; @%p1 bra $L0; ld.global.v4.u32 {%r5, %r6, %r7, %r8}, [%rd6]; st.shared.v4.u32 [%r4+512], {%r5, %r6, %r7, %r8};
        $L0: bar.warp.sync -1;
        and.b32 %r5, %r1, 15; shr.u32 %r6, %r1, 4; shl.b32 %r7, %r5, 5; mad.lo.s32 %r7, %r6, 16, %r7; add.s32 %r8, %r3, %r7;
        ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r10, %r11, %r12, %r13}, [%r8];
        shl.b32 %r7, %r5, 4; add.s32 %r9, %r3, %r7;
        ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%r14, %r15}, [%r9+512];
        mov.f32 %f1, 0f00000000;
        mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%f2, %f3, %f4, %f5}, {%r10, %r11, %r12, %r13}, {%r14, %r15}, {%f1, %f1, %f1, %f1};
        shr.u32 %r2, %r1, 2; and.b32 %r5, %r1, 3; mad.lo.s32 %r6, %r2, 8, 0; mad.lo.s32 %r6, %r5, 2, %r6; mul.wide.u32 %rd7, %r6, 4; add.s64 %rd8, %rd3, %rd7;
        st.global.v2.f32 [%rd8], {%f2, %f3}; st.global.v2.f32 [%rd8+256], {%f4, %f5};";
    let ptx = kernel(".extern .shared .align 16 .b8 buffer[];", body);
    let got = run(&ptx, 32, &words(&a), &words(&b), 128).unwrap();
    for m in 0..16 {
        for n in 0..8 {
            let dot: f32 = (0..16).map(|k| a[16 * m + k].to_f32() * b[8 * k + n].to_f32()).sum();
            assert_eq!(f32::from_bits(got[8 * m + n]), dot, "{m} {n}");
        }
    }
}

#[test]
fn variables_atomics_loops_and_local_memory_work() {
    let body = "mul.wide.u32 %rd4, %r1, 4; add.s64 %rd7, %rd3, %rd4; mov.u64 %rd8, book; add.s64 %rd9, %rd8, %rd4;
        ld.const.f32 %f1, [%rd9]; { .reg .b64 %SP; .local .align 8 .b8 depot[16]; mov.u64 %SP, depot; st.local.f32 [%SP+4], %f1; ld.local.f32 %f2, [%SP+4]; }
        mov.u32 %r2, 0; mov.f32 %f3, 0f00000000;
        $L1: add.f32 %f3, %f3, %f2; add.s32 %r2, %r2, 1; setp.lt.u32 %p1, %r2, %r1; @%p1 bra $L1;
        st.global.f32 [%rd7], %f3; cvta.to.global.u64 %rd10, %rd1; atom.global.add.u32 %r5, [%rd10], 2; red.global.max.u32 [%rd10+4], %r1;";
    let ptx =
        kernel(".const .align 4 .f32 book[4] = {0f3F800000, 0f40000000, 0f40400000, 0f40800000};", body);
    let got = run(&ptx, 4, &[0, 0], &[], 4).unwrap();
    assert_eq!(got.into_iter().map(f32::from_bits).collect::<Vec<_>>(), [1.0, 2.0, 6.0, 12.0]);
}

/// Blocks pass numbers on: each adds its own, and the last to arrive, found by a counter, reads all
/// of them.
fn exchange_sums(fence: &str, cache: &str) -> Result<Vec<u32>, Fault> {
    let body = format!(
        "mov.u32 %r2, %ctaid.x; mul.wide.u32 %rd4, %r2, 4; add.s64 %rd7, %rd3, %rd4; st.global.u32 [%rd7], %r2; {fence}
         atom.global.inc.u32 %r3, [%rd1], 2; setp.ne.u32 %p1, %r3, 2; @%p1 bra $L9; {fence}
         ld.global{cache}.u32 %r4, [%rd3]; ld.global{cache}.u32 %r5, [%rd3+4]; ld.global{cache}.u32 %r6, [%rd3+8];
         add.s32 %r4, %r4, %r5; add.s32 %r4, %r4, %r6; st.global.u32 [%rd3+12], %r4; $L9: mov.u32 %r7, 0;"
    );
    run_grid(
        &kernel("", &body),
        Grid { blocks: [3, 1, 1], threads: [1, 1, 1], shared_bytes: 0 },
        &[0],
        &[],
        4,
    )
}

#[test]
fn fenced_writes_are_visible_after_an_atomic() {
    assert_eq!(exchange_sums("membar.gl;", ".cg").unwrap(), [0, 1, 2, 3]);
    for (fence, cache) in [("", ".cg"), ("membar.cta;", ".cg"), ("membar.gl;", "")] {
        let fault = exchange_sums(fence, cache).unwrap_err();
        assert!(fault.what.contains("written in this launch"), "{fence} {cache}: {fault}");
    }
}

#[test]
fn every_kind_of_fault_is_raised() {
    let shared = ".shared .align 4 .b8 word[128];";
    let cases = [
        ("", "ld.global.u32 %r2, [%rd1+4096];", "nearest allocation"),
        ("", "ld.global.u32 %r2, [%rd3];", "never written"),
        ("", "ld.global.u32 %r2, [%rd1+2];", "not aligned"),
        ("", "mov.u32 %r2, 0; div.u32 %r3, %r1, %r2;", "division by zero"),
        ("", "trap;", "trap"),
        ("", "ld.param.u64 %rd4, [k_param_0+24];", "the parameters"),
        (shared, "mov.u32 %r2, word; ld.shared.u32 %r3, [%r2];", "never written"),
        (shared, "mov.u32 %r2, word; st.shared.u32 [%r2], %r1;", "race"),
        (shared, "mov.u32 %r2, word; st.shared.u32 [%r2+8192], %r1;", "shared memory, which has"),
        (
            shared,
            "mov.u32 %r2, word; mad.lo.s32 %r3, %r1, 4, %r2; setp.gt.u32 %p1, %r1, 31; @%p1 bra $L9; st.shared.u32 [%r3], %r1; xor.b32 %r4, %r3, 4; ld.shared.u32 %r5, [%r4]; $L9: mov.u32 %r6, 0;",
            "never written",
        ),
        (
            "",
            "setp.eq.u32 %p1, %r1, 3; @%p1 bra $L2; bar.warp.sync -1; bra $L3; $L2: bar.sync 0; $L3: mov.u32 %r2, 0;",
            "divergence",
        ),
        ("", "shfl.sync.idx.b32 %r2, %r1, 1, 31, 65534;", "leaves out"),
        ("", "st.global.u32 [%rd1], 7; ld.global.nc.u32 %r2, [%rd1];", "written in this launch"),
    ];
    for (declared, body, what) in cases {
        let fault = run(&kernel("", &format!("{declared} {body}")), 64, &[1], &[1], 1).unwrap_err();
        assert!(fault.what.contains(what), "{body}: {fault}");
        assert!(fault.line > 0, "{fault}");
    }
    // With a barrier between, the accesses are not a race.
    let body = "mov.u32 %r2, word; mad.lo.s32 %r3, %r1, 4, %r2; st.shared.u32 [%r3], %r1; bar.warp.sync -1; xor.b32 %r4, %r3, 4; ld.shared.u32 %r5, [%r4];
        mul.wide.u32 %rd4, %r1, 4; add.s64 %rd7, %rd3, %rd4; st.global.u32 [%rd7], %r5;";
    let got = run(&kernel("", &format!("{shared} {body}")), 32, &[1], &[1], 32).unwrap();
    assert!((0..32).all(|i| got[i] == i as u32 ^ 1));
}

/// Runs two launches, so that the blocks run in either order.
fn run_blocks(body: &str) -> Result<u32, Fault> {
    let mut machine = Machine::new();
    let module = machine.load(&kernel("", &format!("mov.u32 %r2, %ctaid.x; {body}"))).unwrap();
    let word = machine.alloc(4);
    machine.write(word, &[0; 4]).unwrap();
    let params = [word.to_le_bytes(); 3].concat();
    for _ in 0..2 {
        let grid = Grid { blocks: [2, 1, 1], threads: [1, 1, 1], shared_bytes: 0 };
        machine.launch(&module, "k", grid, &params)?;
    }
    let mut bytes = [0; 4];
    machine.read(word, &mut bytes).unwrap();
    Ok(u32::from_le_bytes(bytes))
}

#[test]
fn blocks_of_a_launch_know_nothing_of_each_other() {
    let one_writes =
        "setp.eq.u32 %p1, %r2, 0; @%p1 st.global.u32 [%rd1], 5; @!%p1 ld.global.u32 %r3, [%rd1];";
    let other_writes =
        "setp.eq.u32 %p1, %r2, 1; @%p1 st.global.u32 [%rd1], 5; @!%p1 ld.global.u32 %r3, [%rd1];";
    for body in ["st.global.u32 [%rd1], %r2;", one_writes, other_writes] {
        let fault = run_blocks(body).unwrap_err();
        assert!(fault.what.contains("written in this launch, by its block"), "{fault}");
    }
    assert_eq!(run_blocks("st.global.u32 [%rd1], 7;").unwrap(), 7);
    assert_eq!(run_blocks("red.global.add.u32 [%rd1], 3;").unwrap(), 12);
}

#[test]
fn launches_that_no_device_takes_are_refused() {
    let launch = |declared: &str, blocks: [u32; 3], threads: [u32; 3]| {
        let mut machine = Machine::new();
        let ptx = kernel("", declared).replace(")\n{", ")\n.maxntid 128, 1, 1\n.minnctapersm 2\n{");
        let module = machine.load(&ptx).unwrap();
        machine.launch(&module, "k", Grid { blocks, threads, shared_bytes: 0 }, &[0; 24])
    };
    launch("", [1, 1, 65_535], [1, 1, 1]).unwrap();
    launch(".shared .align 4 .b8 most[49152];", [1, 1, 1], [2, 1, 64]).unwrap();
    for (declared, blocks, threads) in [
        ("", [1, 65_536, 1], [1, 1, 1]),
        ("", [1, 1, 0], [1, 1, 1]),
        ("", [1, 1, 1], [1, 1, 65]),
        ("", [1, 1, 1], [129, 1, 1]),
        (".shared .align 4 .b8 more[49156];", [1, 1, 1], [1, 1, 1]),
    ] {
        launch(declared, blocks, threads).unwrap_err();
    }
}

#[test]
fn registers_start_undefined_and_shared_memory_is_aligned() {
    assert_ne!(run(&kernel("", "st.global.u32 [%rd3], %r30;"), 1, &[], &[], 1).unwrap(), [0]);
    let body = ".shared .align 4 .b8 word[4]; mov.u32 %r2, buffer; st.shared.v2.u32 [%r2], {%r1, %r1};";
    let fault = run(&kernel(".extern .shared .align 4 .b8 buffer[];", body), 1, &[], &[], 1).unwrap_err();
    assert!(fault.what.contains("not aligned"), "{fault}");
    run(&kernel(".extern .shared .align 8 .b8 buffer[];", body), 1, &[], &[], 0).unwrap();
}

#[test]
fn tensor_cores_cut_sums_off() {
    let sum = |before: f32, each: f64| block::tensor_sum(before, [each; 8]);
    let bit = f64::from(f32::EPSILON);
    assert_eq!(sum(1.0, bit / 4.0), 1.0, "too small beside the largest, all of them");
    assert_eq!(sum(1.0, bit / 2.0), 1.0 + 4.0 * f32::EPSILON);
    assert_eq!(sum(0.0, 1.5), 12.0);
    let one =
        |before: f32, product: f64| block::tensor_sum(before, [product, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]);
    assert_eq!((one(1.0, bit * 0.99), one(-1.0, bit * -0.99)), (1.0, -1.0), "not to the nearest");
    assert_eq!(one(1.0, bit / -2.0), 1.0 - f32::EPSILON / 2.0);
    assert_eq!(one(f32::INFINITY, 1.0), f32::INFINITY);
}

#[test]
fn unsupported_ptx_is_rejected_with_its_line() {
    for (text, what) in [
        ("activemask.b32 %r2;", "not known"),
        ("fma.rn.relu.f16 %rs1, %rs1, %rs1, %rs1;", ".relu"),
        ("add.rz.f64 %fd1, %fd1, %fd1;", "nearest"),
        ("add.s32 %r2, %r99, 1;", "operand"),
        ("bra $L7;", "no label"),
    ] {
        let error = Machine::new().load(&kernel("", text)).unwrap_err();
        assert!(error.what.contains(what) && error.line > 5, "{error}");
    }
}

/// Inputs of `wgmma`: f16 values whose sums of a few dozen are exact in f32.
fn halves(n: usize, seed: usize) -> Vec<half::f16> {
    (0..n).map(|i| half::f16::from_f32(((i * seed) % 23) as f32 - 11.0)).collect()
}

fn pairs(halves: &[half::f16]) -> Vec<u32> {
    halves.chunks(2).map(|c| u32::from(c[1].to_bits()) << 16 | u32::from(c[0].to_bits())).collect()
}

/// Returns rows of `width` bytes in the order of `wgmma`: units of 16 bytes are swizzled by the
/// row.
fn swizzled(rows: &[half::f16], width: usize) -> Vec<half::f16> {
    let mut swizzled = rows.to_vec();
    for (i, &half) in rows.iter().enumerate() {
        let byte = 2 * i;
        swizzled[(byte ^ (byte >> 7 & (width / 16 - 1)) << 4) / 2] = half;
    }
    swizzled
}

/// Computes `a [64, 32] x b [16, 32]` with two `wgmma` in two groups: `a` from registers or from
/// shared memory, `b` in rows of `width` bytes. `between` comes between the `wgmma` and the wait,
/// `before` before the `wgmma`.
fn warpgroup(width: usize, a_in_shared: bool, before: &str, between: &str) -> String {
    let (layout, stride) = ([(128, 1_u64), (64, 2), (32, 3)], 8 * width as u64);
    let bits = layout.iter().find(|(bytes, _)| *bytes == width).unwrap().1 << 62 | (stride >> 4) << 32;
    // A row of 32 bytes has the 16 dims of one `wgmma`, and those of the next follow the matrix.
    let next = if width == 32 { 16 * 32 / 16 } else { 2 };
    let next_a = if width == 32 { 64 * 32 / 16 } else { 2 };
    let copy = "mov.u32 %r2, buffer; mov.u32 %r3, %r1;
        $L1: mad.lo.u32 %r4, %r3, 4, %r2; mul.wide.u32 %rd4, %r3, 4; add.s64 %rd5, %rd1, %rd4; add.s64 %rd6, %rd2, %rd4;
        ld.global.u32 %r5, [%rd5]; st.shared.u32 [%r4], %r5; add.u32 %r3, %r3, 128; setp.lt.u32 %p1, %r3, 2048; @%p1 bra $L1;
        mov.u32 %r3, %r1;
        $L2: mad.lo.u32 %r4, %r3, 4, %r2; mul.wide.u32 %rd4, %r3, 4; add.s64 %rd6, %rd2, %rd4;
        ld.global.u32 %r5, [%rd6]; st.shared.u32 [%r4+8192], %r5; add.u32 %r3, %r3, 128; setp.lt.u32 %p1, %r3, 512; @%p1 bra $L2;";
    let (from_a, a_of) = match a_in_shared {
        true => (String::new(), ["%rd10", "%rd11"]),
        // From the input itself, whose rows have 32 f16: lane l of warp w has row 16 w + l / 4.
        false => {
            let load = "shr.u32 %r6, %r1, 5; and.b32 %r7, %r1, 31; shr.u32 %r8, %r7, 2; mad.lo.u32 %r8, %r6, 16, %r8; and.b32 %r9, %r7, 3;
        mad.lo.u32 %r8, %r8, 64, 0; mad.lo.u32 %r8, %r9, 4, %r8; cvt.u64.u32 %rd7, %r8; add.s64 %rd7, %rd1, %rd7;
        ld.global.u32 %r10, [%rd7]; ld.global.u32 %r11, [%rd7+512]; ld.global.u32 %r12, [%rd7+16]; ld.global.u32 %r13, [%rd7+528];
        ld.global.u32 %r14, [%rd7+32]; ld.global.u32 %r15, [%rd7+544]; ld.global.u32 %r16, [%rd7+48]; ld.global.u32 %r17, [%rd7+560];";
            (load.to_owned(), ["{%r10, %r11, %r12, %r13}", "{%r14, %r15, %r16, %r17}"])
        }
    };
    let trans = if a_in_shared { "0, 0" } else { "0" };
    let d = "{%f0, %f1, %f2, %f3, %f4, %f5, %f6, %f7}";
    let body = format!(
        "{copy} {from_a}
        cvt.u64.u32 %rd8, %r2; shr.u64 %rd8, %rd8, 4; and.b64 %rd8, %rd8, 16383; or.b64 %rd10, %rd8, {bits};
        add.s64 %rd11, %rd10, {next_a}; add.s64 %rd12, %rd10, 512; add.s64 %rd13, %rd12, {next};
        {before}
        setp.ne.b32 %p2, %r1, %r1; setp.eq.b32 %p3, %r1, %r1;
        wgmma.fence.sync.aligned;
        wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {d}, {}, %rd12, %p2, 1, 1, {trans};
        wgmma.commit_group.sync.aligned;
        wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {d}, {}, %rd13, %p3, 1, 1, {trans};
        wgmma.commit_group.sync.aligned;
        {between}
        wgmma.wait_group.sync.aligned 0;
        shr.u32 %r6, %r1, 5; and.b32 %r7, %r1, 31; shr.u32 %r8, %r7, 2; mad.lo.u32 %r8, %r6, 16, %r8; and.b32 %r9, %r7, 3;
        mad.lo.u32 %r8, %r8, 64, 0; mad.lo.u32 %r8, %r9, 8, %r8; cvt.u64.u32 %rd7, %r8; add.s64 %rd7, %rd3, %rd7;
        st.global.v2.f32 [%rd7], {{%f0, %f1}}; st.global.v2.f32 [%rd7+512], {{%f2, %f3}};
        st.global.v2.f32 [%rd7+32], {{%f4, %f5}}; st.global.v2.f32 [%rd7+544], {{%f6, %f7}};",
        a_of[0], a_of[1]
    );
    kernel(".extern .shared .align 1024 .b8 buffer[];", &body)
}

/// Returns rows `[rows, 32]` in rows of `width` bytes as `wgmma` reads them, padded to `len` f16.
fn laid_out(rows: &[half::f16], width: usize, len: usize) -> Vec<u32> {
    let per_row = width / 2;
    let mut all = vec![half::f16::ZERO; len];
    for (i, &half) in rows.iter().enumerate() {
        let (row, col, n_rows) = (i / 32, i % 32, rows.len() / 32);
        // With 32 bytes the groups of 16 follow each other as separate matrices.
        let at = if width == 32 { col / 16 * n_rows * 16 + row * 16 + col % 16 } else { row * per_row + col };
        all[at] = half;
    }
    pairs(&swizzled(&all, width))
}

const FENCED: &str = "fence.proxy.async.shared::cta; bar.sync 0;";

#[test]
fn warpgroups_multiply_what_descriptors_name() {
    let (a, b) = (halves(64 * 32, 5), halves(16 * 32, 7));
    for width in [128, 64, 32] {
        for a_in_shared in [true, false] {
            let left =
                if a_in_shared { laid_out(&a, width, 4096) } else { [pairs(&a), vec![0; 1024]].concat() };
            let ptx = warpgroup(width, a_in_shared, FENCED, "");
            let got = run_with(&ptx, 128, &left, &laid_out(&b, width, 1024), 1024, 10240).unwrap();
            for (i, got) in got.into_iter().enumerate() {
                let (m, n) = (i / 16, i % 16);
                let dot: f32 = (0..32).map(|k| a[32 * m + k].to_f32() * b[32 * n + k].to_f32()).sum();
                assert_eq!(f32::from_bits(got), dot, "{width} {a_in_shared}: {m} {n}");
            }
        }
    }
}

#[test]
fn warpgroups_that_forget_a_fence_or_a_wait_are_found_out() {
    let run = |ptx: &str| run_with(ptx, 128, &[0; 2048], &[0; 512], 1024, 10240).map(|got| got[0]);
    let fault = |ptx: &str| run(ptx).unwrap_err().what;
    assert_eq!(run(&warpgroup(128, true, FENCED, "")).unwrap(), 0);
    let cases = [
        (warpgroup(128, true, "bar.sync 0;", ""), "fence.proxy.async"),
        (warpgroup(128, true, "fence.proxy.async.shared::cta;", ""), "race"),
        (warpgroup(128, false, FENCED, "mov.u32 %r12, 7;"), "wrote an operand"),
        (warpgroup(128, true, FENCED, "mov.f32 %f1, 0f00000000;"), "wrote a result"),
        (warpgroup(128, true, FENCED, "bar.sync 0; st.shared.u32 [%r4+8192], %r5;"), "not been waited for"),
        (warpgroup(128, true, FENCED, "").replace("wgmma.fence.sync.aligned;", ""), "since wgmma.fence"),
        (warpgroup(128, true, &format!("{FENCED} add.s64 %rd12, %rd12, 8;"), ""), "descriptor"),
        (warpgroup(128, true, &format!("{FENCED} setp.gt.u32 %p4, %r1, 95; @%p4 ret;"), ""), "divergence"),
    ];
    for (ptx, what) in cases {
        let fault = fault(&ptx);
        assert!(fault.contains(what), "{what}: {fault}");
    }
    let early = "wgmma.wait_group.sync.aligned 1; st.global.f32 [%rd3], %f0; ret;";
    assert!(f32::from_bits(run_early(&warpgroup(128, true, FENCED, early))).is_nan());
}

/// Returns the first word of the output alone.
fn run_early(ptx: &str) -> u32 {
    run_with(ptx, 128, &[0; 2048], &[0; 512], 1, 10240).unwrap()[0]
}

/// Warp 1 produces two words, one after the other, and warp 0 consumes them.
fn run_handover(full: &str, empty: &str) -> Result<Vec<u32>, Fault> {
    let body = format!(
        "mov.u32 %r2, buffer; mad.lo.u32 %r2, %r1, 4, %r2; mov.u32 %r3, 0; mul.wide.u32 %rd4, %r1, 4; add.s64 %rd5, %rd3, %rd4;
        setp.lt.u32 %p1, %r1, 32; @%p1 bra $L3;
        $L1: add.u32 %r4, %r1, %r3; st.shared.u32 [%r2+-128], %r4; {full} {empty} add.u32 %r3, %r3, 1;
        setp.lt.u32 %p2, %r3, 2; @%p2 bra $L1; ret;
        $L3: bar.sync 1, 64; ld.shared.u32 %r4, [%r2]; bar.arrive 2, 64; bar.sync 1, 64; ld.shared.u32 %r5, [%r2]; bar.arrive 2, 64;
        mad.lo.u32 %r4, %r4, 100, %r5; st.global.u32 [%rd5], %r4;"
    );
    run(&kernel(".extern .shared .align 16 .b8 buffer[];", &body), 64, &[], &[], 32)
}

#[test]
fn warps_hand_over_at_barriers_that_only_one_side_waits_at() {
    let got = run_handover("bar.arrive 1, 64;", "bar.sync 2, 64;").unwrap();
    assert!((0..32).all(|i| got[i] == (i as u32 + 32) * 101 + 1), "{got:?}");
    let fault = run_handover("bar.arrive 1, 64;", "").unwrap_err();
    assert!(fault.what.contains("race") || fault.what.contains("disagree"), "{fault}");
    let fault = run_handover("bar.arrive 1, 96;", "bar.sync 2, 64;").unwrap_err();
    assert!(fault.what.contains("disagree"), "{fault}");
}

#[test]
fn a_barrier_counts_the_predicates_of_all_threads() {
    let counted = |operands: &str| {
        let body = format!(
            "and.b32 %r2, %r1, 7; setp.lt.u32 %p1, %r2, 3; bar.red.popc.u32 %r3, {operands};
            mul.wide.u32 %rd4, %r1, 4; add.s64 %rd5, %rd3, %rd4; st.global.u32 [%rd5], %r3;"
        );
        run(&kernel("", &body), 96, &[], &[], 96)
    };
    assert_eq!(counted("0, %p1").unwrap(), [36; 96]);
    assert_eq!(counted("0, !%p1").unwrap(), [60; 96]);
    assert_eq!(counted("1, 96, %p1").unwrap(), [36; 96]);
    assert!(counted("1, 64, %p1").unwrap_err().what.contains("disagree"));
}
