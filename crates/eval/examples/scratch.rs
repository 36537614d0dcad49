//! Scratch.
use kvant::*;
use kvant_eval::*;
fn main() {
    let args: Vec<String> = std::env::args().collect();
    let model = if args[1] == "-" {
        Model::bundled(OpenOptions::default()).unwrap()
    } else {
        Model::open(&args[1]).unwrap()
    };
    let text = std::fs::read_to_string(&args[2]).unwrap();
    let n_ctx: usize = args[3].parse().unwrap();
    let n: usize = args[4].parse().unwrap();
    let tail = args[5] == "tail";
    let step = args.get(6).map(|s| s.parse().unwrap());
    let t = std::time::Instant::now();
    let chunks = Chunks::new(&model, &text, n_ctx, Some(n)).unwrap();
    println!(
        "{:?} {} tokens {} chunks {:?}",
        model.device(),
        chunks.tokens().len(),
        chunks.len(),
        t.elapsed()
    );
    let p = ppl(&model, &chunks, &PplOptions::default(), None, &mut |p| eprint!("{},", p.note)).unwrap();
    println!("\n{} {:?}", p.final_line(), t.elapsed());
    let configs: Vec<KvOptions> = [
        "q8_0/q8_0",
        "q4_0/q4_0",
        "turbo4/turbo4",
        "turbo3/turbo3",
        "turbo2/turbo2",
        "q8_0/turbo4",
        "q8_0/turbo3",
        "q8_0/turbo2",
        "turbo3/q8_0",
    ]
    .iter()
    .map(|s| {
        let (k, v) = s.split_once('/').unwrap();
        KvOptions { k: k.parse().unwrap(), v: v.parse().unwrap(), policies: Policies::none(), tail }
    })
    .collect();
    let r =
        kld(&model, &chunks, Base::F16, &KldOptions { configs, step }, None, &mut |p| eprint!("{} ", p.done))
            .unwrap();
    for k in &r {
        let s = k.stats();
        println!(
            "{:14} {:.3} kld {:.6} same-top {:.2}% ppl {:.3} base {:.3} max {:.4}",
            k.kv.name(),
            k.kv.bpv(),
            s.mean_kld.value,
            100.0 * s.same_top.value,
            s.ppl.value,
            s.ppl_base.value,
            s.kld.max
        );
    }
    println!("{:?}", t.elapsed());
}
