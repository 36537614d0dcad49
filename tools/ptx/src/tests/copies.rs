//! `mbarrier` and bulk copies, matrices that move, and registers of warpgroups.

use super::{kernel, run, run_grid, run_with};
use crate::{Fault, Grid};

const INIT: &str =
    "mbarrier.init.shared::cta.b64 [%r2+1024], 1; mbarrier.init.shared::cta.b64 [%r2+1032], 32;";
const FENCE: &str = "fence.proxy.async.shared::cta;";
const WAIT_EMPTY: &str = "$W1: mbarrier.try_wait.parity.shared::cta.b64 %p4, [%r2+1032], %r4; @!%p4 bra $W1;";
const EXPECT: &str = "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2+1024], 128;";
const COPY: &str =
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%rd5], 128, [%r2+1024];";
const WAIT_FULL: &str = "$W2: mbarrier.try_wait.parity.shared::cta.b64 %p4, [%r2+1024], %r4; @!%p4 bra $W2;";
const ARRIVE: &str = "mbarrier.arrive.shared::cta.b64 _, [%r2+1032];";

/// A thread of warp 1 copies 32 words twice to the same place, and warp 0 joins them.
fn ring() -> String {
    let body = format!(
        "mov.u32 %r2, buffer; setp.ne.u32 %p1, %r1, 0; @%p1 bra $L0; {INIT} {FENCE} $L0: bar.sync 0;
        mov.u32 %r3, 0; mov.u32 %r9, 0; mul.wide.u32 %rd6, %r1, 4; add.s64 %rd6, %rd3, %rd6;
        setp.lt.u32 %p2, %r1, 32; @%p2 bra $L2; setp.ne.u32 %p3, %r1, 32; @%p3 ret;
        $L1: and.b32 %r4, %r3, 1; xor.b32 %r4, %r4, 1; {WAIT_EMPTY} {EXPECT}
        mul.wide.u32 %rd4, %r3, 128; add.s64 %rd5, %rd1, %rd4; {COPY}
        add.u32 %r3, %r3, 1; setp.lt.u32 %p5, %r3, 2; @%p5 bra $L1; ret;
        $L2: and.b32 %r4, %r3, 1; {WAIT_FULL} mad.lo.u32 %r5, %r1, 4, %r2; ld.shared.u32 %r6, [%r5];
        mad.lo.u32 %r9, %r9, 100, %r6; {ARRIVE}
        add.u32 %r3, %r3, 1; setp.lt.u32 %p6, %r3, 2; @%p6 bra $L2; st.global.u32 [%rd6], %r9;"
    );
    kernel(".extern .shared .align 128 .b8 buffer[];", &body)
}

fn run_ring(ptx: &str) -> Result<Vec<u32>, Fault> {
    let words: Vec<u32> = (0..64).collect();
    run(ptx, 64, &words, &[], 32)
}

#[test]
fn bulk_copies_arrive_with_the_phase_that_counts_them() {
    let got = run_ring(&ring()).unwrap();
    assert!((0..32).all(|i| got[i] as usize == 100 * i + i + 32), "{got:?}");
}

#[test]
fn a_ring_that_forgets_something_is_found_out() {
    let cases = [
        (WAIT_FULL, "", "byte 0 of shared memory"),
        (" @!%p4 bra $W2;", "", "byte 0 of shared memory"),
        (WAIT_EMPTY, "", "phase lacks 0"),
        (ARRIVE, "", "another waits at line"),
        (ARRIVE, "mbarrier.arrive.shared::cta.b64 _, [%r2+1032], 33;", "33 arrivals"),
        (EXPECT, "mbarrier.arrive.shared::cta.b64 _, [%r2+1024];", "being copied"),
        (FENCE, "", "since mbarrier.init"),
        ("bar.sync 0;", "", "initialized"),
        (INIT, "", "no mbarrier is initialized"),
        ("[%r2+1032], 32;", "[%r2+1036], 32;", "an mbarrier at"),
        (COPY, "", "lacks 0 arrivals and 128 bytes"),
        ("[%rd5], 128,", "[%rd5], 120,", "not multiples of 16"),
        ("[%rd5], 128,", "[%rd5+8], 128,", "not multiples of 16"),
        ("bytes [%r2],", "bytes [%r2+8],", "not multiples of 16"),
        ("[%rd5], 128,", "[%rd5+4096], 128,", "nearest allocation"),
        ("_, [%r2+1024], 128;", "_, [%r2+1024], 64;", "expects 64 bytes, and copies of 128"),
        ("_, [%r2+1024], 128;", "_, [%r2+1024], 256;", "lacks 0 arrivals and 256 bytes"),
        ("@%p6 bra $L2;", "", "the block ends while"),
        (COPY, &format!("st.shared.u32 [%r2], %r3; {COPY}"), "fence.proxy.async of its writer"),
        (COPY, &format!("{COPY} {COPY}"), "being copied"),
        (ARRIVE, &format!("ld.shared.u32 %r7, [%r2+1024]; {ARRIVE}"), "is of an mbarrier"),
    ];
    for (what, instead, fault) in cases {
        let ptx = ring();
        assert!(ptx.contains(what), "{what}");
        let found = run_ring(&ptx.replacen(what, instead, 1)).expect_err(what);
        assert!(found.what.contains(fault), "{what}: {found}");
    }
    // A fence makes a store to the place of a copy harmless, though another warp may read it.
    let fenced = format!("st.shared.u32 [%r2], %r3; {FENCE} {COPY}");
    assert!(run_ring(&ring().replacen(COPY, &fenced, 1)).is_ok());
}

#[test]
fn copies_of_a_phase_that_a_warp_has_not_waited_for_are_a_race() {
    // Warp 0 waits and passes on nothing but its arrival at a barrier that warp 1 does not wait at.
    let body = format!(
        "mov.u32 %r2, buffer; setp.ne.u32 %p1, %r1, 0; @%p1 bra $L0; {INIT} {FENCE} {EXPECT} mov.u64 %rd5, %rd1; {COPY}
        $L0: bar.sync 0; mov.u32 %r4, 0; setp.gt.u32 %p2, %r1, 31; @%p2 bra $L1; {WAIT_FULL} $L1: ORDER
        ld.shared.u32 %r6, [%r2]; st.global.u32 [%rd3], %r6;"
    );
    let ptx = kernel(".extern .shared .align 128 .b8 buffer[];", &body);
    assert_eq!(run(&ptx.replace("ORDER", "bar.sync 1;"), 64, &[7; 32], &[], 1).unwrap(), [7]);
    let fault = run(&ptx.replace("ORDER", ""), 64, &[7; 32], &[], 1).unwrap_err();
    assert!(fault.what.contains("being copied") || fault.what.contains("a bulk copy"), "{fault}");
}

#[test]
fn matrices_move_to_their_transposes() {
    let body = "mul.wide.u32 %rd4, %r1, 4; add.s64 %rd5, %rd1, %rd4; add.s64 %rd6, %rd3, %rd4; ld.global.u32 %r2, [%rd5];
        movmatrix.sync.aligned.m8n8.trans.b16 %r3, %r2; st.global.u32 [%rd6], %r3;";
    let half = |row: u32, col: u32| 100 * row + col;
    let rows: Vec<u32> = (0..32).map(|i| half(i / 4, i % 4 * 2) | half(i / 4, i % 4 * 2 + 1) << 16).collect();
    let got = run(&kernel("", body), 32, &rows, &[], 32).unwrap();
    for (i, got) in (0..).zip(got) {
        assert_eq!(got, half(i % 4 * 2, i / 4) | half(i % 4 * 2 + 1, i / 4) << 16, "{i}");
    }
}

#[test]
fn warpgroups_share_the_registers_of_a_multiprocessor() {
    let run = |raised: u32, lowered: u32, bounds: &str| {
        let body = format!(
            "setp.gt.u32 %p1, %r1, 127; @%p1 bra $L1; setmaxnreg.inc.sync.aligned.u32 {raised}; bra $L2;
            $L1: setmaxnreg.dec.sync.aligned.u32 {lowered}; $L2: mov.u32 %r2, 1;"
        );
        let ptx = kernel("", &body).replace(")\n{", &format!(")\n{bounds}\n{{"));
        run_with(&ptx, 256, &[], &[], 0, 0).map(drop).map_err(|fault| fault.what)
    };
    // 128 registers of each thread are the pool.
    let bounds = ".maxntid 256, 1, 1\n.minnctapersm 2";
    assert_eq!(run(152, 104, bounds), Ok(()));
    for (raised, lowered, bounds, what) in [
        (160, 104, bounds, "warpgroups have [128, 104] registers"),
        (152, 136, bounds, "setmaxnreg.dec from 128 to 136"),
        (156, 104, bounds, "156 registers"),
        (152, 104, "", "launch bounds"),
    ] {
        let fault = run(raised, lowered, bounds).unwrap_err();
        assert!(fault.contains(what), "{what}: {fault}");
    }
}

#[test]
fn barriers_are_sixteen_of_whole_warps() {
    for body in ["bar.sync 16;", "bar.sync 1, 40;", "bar.arrive 2, 0;"] {
        let grid = Grid { blocks: [1, 1, 1], threads: [64, 1, 1], shared_bytes: 0 };
        let fault = run_grid(&kernel("", body), grid, &[], &[], 0).unwrap_err();
        assert!(fault.what.contains("of whole warps"), "{body}: {fault}");
    }
}
