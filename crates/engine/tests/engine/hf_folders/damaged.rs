//! Damaged folders: refused in one line, or read whole.

use std::fs;

use kvant::open_file;

use super::saved::{Scratch, saved, write_folder};

/// Returns a file with one to four bytes changed, mostly to other bytes of JSON.
fn mutated(bytes: &[u8], state: &mut u64) -> Vec<u8> {
    let mut below = |n: usize| {
        // Knuth's MMIX generator: its high bits are good enough here.
        *state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (*state >> 33) as usize % n
    };
    let mut bytes = bytes.to_vec();
    for _ in 0..1 + below(4) {
        let at = below(bytes.len());
        match below(4) {
            0 => bytes[at] = below(256) as u8,
            1 => _ = bytes.remove(at),
            2 => bytes.insert(at, b"0123456789-.\"[]{},"[below(18)]),
            _ => bytes[at] = b"0123456789-.\"[]{},"[below(18)],
        }
    }
    bytes
}

#[test]
fn a_damaged_folder_is_refused_in_a_line_or_read_whole() {
    for name in [
        "mixtral-h64-g2",
        "gptoss-h64-g4-window24-sinks",
        "qwen35-h64-g2-delta",
        "deepseek3-latent192-yarn",
        "deepseek4-h64",
        "dots3note-latent128-swa1024-window20",
        "kimik3-latent128-streams",
        "qwen4exp-h64-g2-ngrams",
    ] {
        damage(name);
    }
}

fn damage(name: &str) {
    let scratch = Scratch::new("damaged");
    let (config, tensors) = saved(name);
    write_folder(&scratch.0, &config, &tensors);
    let [config, weights] = ["config.json", "model.safetensors"].map(|name| scratch.0.join(name));
    let (config_bytes, weight_bytes) = (fs::read(&config).unwrap(), fs::read(&weights).unwrap());
    let header = 8 + u64::from_le_bytes(weight_bytes[..8].try_into().unwrap()) as usize;
    let (mut state, mut n_read) = (1, 0);
    for round in 0..200 {
        let damaged = if round % 2 == 0 { (&config, &config_bytes) } else { (&weights, &weight_bytes) };
        let front = damaged.1.len().min(header);
        let bytes = [&mutated(&damaged.1[..front], &mut state)[..], &damaged.1[front..]].concat();
        fs::write(damaged.0, bytes).unwrap();
        match open_file(&scratch.0) {
            Ok(gguf) => {
                gguf.tensors().iter().for_each(|info| assert_eq!(gguf.data(info).len(), info.n_bytes));
                n_read += 1;
            }
            Err(error) => {
                let message = error.to_string();
                assert!(!message.contains('\n') && message.len() < 1000, "{message}");
            }
        }
        fs::write(&config, &config_bytes).unwrap();
        fs::write(&weights, &weight_bytes).unwrap();
    }
    assert!((5..190).contains(&n_read), "{name}: {n_read} of 200 were read");
}
