//! Times attention on an adapter over a filled cache, for each type.
//!
//! `cargo run --release -p kvant-wgpu --example attend -- [adapter] [tokens] [rows] [rounds]
//! [LOOK-UPS,QUERIES,WORDS] [TYPE or K:V ...]`
//!
//! The workload is [`AttendWork`]. Types take turns, so that other load on the machine affects all
//! of them alike; figures are medians of the rounds. With one row each *stage* is timed, with parts
//! of attention left out: see `Backend::stages`.

use kvant_backend::autotune::median;
use kvant_backend::{Backend, Result};
use kvant_codec::DType;
use kvant_wgpu::{AttendVariant, AttendWork, CodebookLookup, TypeClass, WgpuDevice};

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let adapter = args.next().map_or(Ok(0), |text| text.parse())?;
    let tokens: usize = args.next().map_or(Ok(16_384), |text| text.parse())?;
    let rows: usize = args.next().map_or(Ok(1), |text| text.parse())?;
    let rounds: usize = args.next().map_or(Ok(7), |text| text.parse())?;
    let mut args = args.peekable();
    let variant = args.next_if(|text| text.contains(',')).map(|text| variant(&text)).transpose()?;
    let mut types = args.map(|text| pair(&text)).collect::<std::result::Result<Vec<_>, _>>()?;
    if types.is_empty() {
        let all = [DType::F16, DType::Q8_0, DType::Turbo4, DType::Turbo3, DType::Turbo2];
        types = all.map(|dtype| [dtype; 2]).into();
    }
    let mut device = WgpuDevice::open(adapter)?;
    if let Some(variant) = variant {
        device = device.with_attend_variant(&TypeClass::ALL, variant)?;
    }
    println!("{tokens} tokens, {rows} rows, {}", device.info().kernels);
    let workloads = types.iter().map(|&types| AttendWork::new(&device, types, tokens, rows));
    let mut workloads = workloads.collect::<Result<Vec<_>>>()?;
    let stages = if rows == 1 { device.attend_stages() } else { &[] };
    let mut seconds = vec![vec![Vec::new(); stages.len().max(1)]; types.len()];
    for round in 0..=rounds {
        for (workload, seconds) in workloads.iter_mut().zip(&mut seconds) {
            for (stage, seconds) in seconds.iter_mut().enumerate() {
                let elapsed = workload.seconds(&device, (!stages.is_empty()).then_some(stage), 1)?;
                // Kernels are compiled in the first round.
                if round > 0 {
                    seconds.push(elapsed);
                }
            }
        }
    }
    println!("{:>18} {:>22} {:>10} {:>16}", "K/V", "stage", "ms", "ns/(q head,key)");
    for (([k, v], workload), seconds) in types.iter().zip(&workloads).zip(seconds) {
        for (stage, seconds) in seconds.into_iter().enumerate() {
            let seconds = median(seconds);
            let (name, ms) = (format!("{k}/{v}"), seconds * 1e3);
            let stage = stages.get(stage).copied().unwrap_or("attention");
            println!("{name:>18} {stage:>22} {ms:>10.2} {:>16.3}", seconds * 1e9 / workload.pairs() as f64);
        }
    }
    Ok(())
}

/// Parses an attention variant, as `select,8,1`.
fn variant(text: &str) -> std::result::Result<AttendVariant, Box<dyn std::error::Error>> {
    let parts: Vec<_> = text.split(',').collect();
    let [look_ups, queries, words] = parts[..] else { return Err("expected LOOK-UPS,QUERIES,WORDS".into()) };
    let known = CodebookLookup::ALL.into_iter().find(|known| known.name() == look_ups);
    let look_ups = known.ok_or_else(|| {
        format!("look-ups are {}", CodebookLookup::ALL.map(CodebookLookup::name).join(", "))
    })?;
    Ok(AttendVariant { look_ups, queries: queries.parse()?, words: words.parse()? })
}

/// Parses the types of keys and of values, or one for both.
fn pair(text: &str) -> std::result::Result<[DType; 2], Box<dyn std::error::Error>> {
    let (k, v) = text.split_once(':').unwrap_or((text, text));
    Ok([k.parse()?, v.parse()?])
}
