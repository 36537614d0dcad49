//! Kernels that begin before the end of those before them (programmatic dependent launch).

use super::kernel;
use crate::{Fault, Grid, Machine};

/// Adds 1 to the word of the first address after waiting.
const INCREMENT: &str =
    "griddepcontrol.wait; ld.global.u32 %r2, [%rd1]; add.u32 %r2, %r2, 1; st.global.u32 [%rd1], %r2;";

/// Launches kernels one after the other over a word that the host has written, a constant, and an
/// output; returns the output.
fn run_all(bodies: &[&str]) -> Result<u32, Fault> {
    let mut machine = Machine::new();
    let [word, constant, out] = [(); 3].map(|()| machine.alloc(4));
    machine.write(word, &[5, 0, 0, 0]).unwrap();
    machine.write_constant(constant, &[9, 0, 0, 0]).unwrap();
    let params: Vec<u8> = [word, constant, out].iter().flat_map(|address| address.to_le_bytes()).collect();
    for body in bodies {
        if *body == "finish" {
            machine.finish();
            continue;
        }
        let module = machine.load(&kernel("", body)).unwrap();
        let grid = Grid { blocks: [1, 1, 1], threads: [1, 1, 1], shared_bytes: 0 };
        machine.launch(&module, "k", grid, &params)?;
    }
    let mut bytes = [0; 4];
    machine.read(out, &mut bytes).unwrap();
    Ok(u32::from_le_bytes(bytes))
}

#[test]
fn a_kernel_reads_what_others_wrote_after_it_has_waited() {
    let body = "ld.global.u32 %r3, [%rd2]; griddepcontrol.launch_dependents; griddepcontrol.wait;
        ld.global.u32 %r2, [%rd1]; add.u32 %r2, %r2, %r3; st.global.u32 [%rd3], %r2;";
    assert_eq!(run_all(&[INCREMENT, INCREMENT, body]).unwrap(), 16);
    // Without the instruction a kernel begins after all others.
    let plain = body.replace("griddepcontrol.wait;", "");
    assert_eq!(run_all(&[INCREMENT, &plain]).unwrap(), 15);
}

#[test]
fn reads_before_the_wait_see_finished_kernels_only() {
    let early = "ld.global.u32 %r2, [%rd1]; griddepcontrol.wait; st.global.u32 [%rd3], %r2;";
    let plain = INCREMENT.replace("griddepcontrol.wait;", "");
    let later = "griddepcontrol.wait; mov.u32 %r2, 1;";
    for before in [&[][..], &[INCREMENT], &[INCREMENT, later], &["finish", INCREMENT], &[plain.as_str()]] {
        let fault = run_all(&[before, &[early]].concat()).unwrap_err();
        assert!(fault.what.contains("a read before griddepcontrol.wait"), "{before:?}: {fault}");
    }
    for between in ["finish", "mov.u32 %r2, 1;"] {
        assert_eq!(run_all(&[INCREMENT, between, early]).unwrap(), 6, "{between}");
    }
}

#[test]
fn nothing_is_written_before_the_wait() {
    for early in ["st.global.u32 [%rd3], 7;", "red.global.add.u32 [%rd2], 1;"] {
        let fault = run_all(&[&format!("{early} griddepcontrol.wait;")]).unwrap_err();
        assert!(fault.what.contains("a write before griddepcontrol.wait"), "{early}: {fault}");
    }
}

#[test]
fn every_thread_waits_before_it_returns() {
    let body = "setp.eq.u32 %p1, %r1, 0; @%p1 ret; griddepcontrol.wait;";
    let fault = run_all(&[body]).unwrap_err();
    assert!(fault.what.contains("returns before griddepcontrol.wait"), "{fault}");
    assert!(run_all(&["@%p1 bra $L1; griddepcontrol.wait; $L1: mov.u32 %r2, 1;"]).is_err());
}
