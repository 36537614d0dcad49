//! Measurements of the bundled model on a text of this repository: results that must hold on every
//! machine.

use std::path::PathBuf;

use kvant::{KvOptions, KvPlan, Model, OpenOptions, Policies};
use kvant_eval::distortion::captured;
use kvant_eval::{
    AgreeOptions, Base, Chunks, EvalError, Goal, Kld, KldOptions, MemoryBudget, MemoryCosts, NeedleForm,
    NiahOptions, PlanOptions, Planned, PplOptions, WeightChoice, agree, kld, kld_by_layer, niah, plan, ppl,
    ppl_saving_base, question_prompts, text_prompts,
};

const TEXT: &str = include_str!("../../../LICENSE-APACHE");

fn model() -> Model {
    Model::bundled(OpenOptions::default()).unwrap()
}

fn file(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("kvant-eval-{}-{name}", std::process::id()))
}

fn kv(k: &str, v: &str, tail: bool) -> KvOptions {
    KvOptions {
        k: k.parse().unwrap(),
        v: v.parse().unwrap(),
        policies: Policies::none(),
        tail,
        ..Default::default()
    }
}

fn measure(model: &Model, chunks: &Chunks, configs: &[KvOptions], step: Option<usize>) -> Vec<Kld> {
    let options = KldOptions { configs: configs.to_vec(), step };
    kld(model, chunks, Base::F16, &options, None, &mut |_| ()).unwrap()
}

fn means(results: &[Kld]) -> Vec<f64> {
    results.iter().map(|result| result.stats().mean_kld.value).collect()
}

#[test]
fn divergence_grows_with_fewer_bits_and_f16_is_zero() {
    let model = model();
    let chunks = Chunks::new(&model, TEXT, 256, Some(2)).unwrap();
    let types = ["f16", "q8_0", "turbo4", "turbo3", "turbo2"];
    let configs = types.map(|dtype| kv(dtype, dtype, false));
    let results = measure(&model, &chunks, &configs, None);
    let means = means(&results);
    assert_eq!(means[0], 0.0);
    assert!(means.windows(2).all(|pair| pair[1] > 2.0 * pair[0]), "{means:?}");
    // The model's weights are q8_0. Kernels with 8-bit activations round differently after any
    // change, which alone contributes 1e-4 to 3e-4 nats (llama.cpp: 1.7e-4); with f32 activations
    // q8_0 is at 1e-5.
    assert!(means[1] < 1e-3 && means[4] < 0.5, "{means:?}");
    for result in &results {
        let stats = result.stats();
        assert_eq!(stats.tokens, 2 * 127);
        assert!(stats.kld.max >= stats.kld.p99 && stats.kld.p99 >= stats.kld.median);
        // The bins cover every scored token once.
        let bins = result.by_position(8);
        assert_eq!((bins.len(), bins[0].0), (8, 128));
    }
}

#[test]
fn the_f16_tail_is_independent_of_the_batch_size() {
    let model = model();
    let chunks = Chunks::new(&model, TEXT, 128, Some(1)).unwrap();
    let at = |tail, step| means(&measure(&model, &chunks, &[kv("turbo2", "turbo2", tail)], Some(step)))[0];
    let (off, all_at_once, one_by_one) = (at(false, 128), at(true, 128), at(true, 1));
    assert_eq!(all_at_once.to_bits(), one_by_one.to_bits(), "what a query sees depends on positions alone");
    assert!(2.0 * all_at_once < off, "{all_at_once} {off}");
}

#[test]
fn a_base_file_equals_the_base_in_memory() {
    let (model, path) = (model(), file("base"));
    let chunks = Chunks::new(&model, TEXT, 128, Some(3)).unwrap();
    let saved = ppl_saving_base(
        &model,
        &chunks,
        &PplOptions { kv: kv("f16", "f16", true), step: None },
        &path,
        &mut |_| (),
    );
    let saved = saved.unwrap();
    let configs = [kv("f16", "f16", true), kv("turbo3", "turbo3", true)];
    let in_memory = measure(&model, &chunks, &configs, None);
    let base = Base::open(&path, &model).unwrap();
    let from_file = base.chunks(&model, None).unwrap().unwrap();
    assert_eq!(from_file, chunks);
    let options = KldOptions { configs: configs.to_vec(), step: None };
    let results = kld(&model, &chunks, base, &options, None, &mut |_| ()).unwrap();
    // A row's resolution is 16/65,535 nats, its mean error near zero: the file's floor is below
    // 1e-6 nats.
    assert!(means(&results)[0].abs() <= 1e-6, "{:?}", means(&results));
    let (got, want) = (means(&results)[1], means(&in_memory)[1]);
    assert!((got / want - 1.0).abs() <= 0.002, "{got} {want}");
    let stats = results[0].stats();
    // Tokens more than 16 nats below the top are raised to that: a licence appears less surprising
    // than it is.
    let ratio = stats.ppl_base.value / saved.ppl;
    assert!((0.5..=1.0).contains(&ratio), "{ratio}");
    assert_eq!(stats.ppl.value, saved.ppl);

    let other = Chunks::new(&model, &TEXT[100..], 128, Some(3)).unwrap();
    let base = Base::open(&path, &model).unwrap();
    let error = kld(&model, &other, base, &options, None, &mut |_| ()).unwrap_err();
    assert!(matches!(error, EvalError::File { .. }), "{error}");
    std::fs::remove_file(&path).unwrap();
}

#[test]
fn a_resumed_run_equals_an_uninterrupted_one() {
    let (model, path) = (model(), file("state"));
    let whole = Chunks::new(&model, TEXT, 64, Some(5)).unwrap();
    let options = PplOptions { kv: kv("turbo3", "turbo3", true), step: None };
    let uninterrupted = ppl(&model, &whole, &options, Some(&path), &mut |_| ()).unwrap();
    // The state after a kill in the middle of the third chunk.
    let text = std::fs::read_to_string(&path).unwrap();
    let ends: Vec<usize> = text.match_indices('\n').map(|(end, _)| end + 1).collect();
    std::fs::write(&path, &text[..ends[2] + 10]).unwrap();
    let mut steps = Vec::new();
    let resumed =
        ppl(&model, &whole, &options, Some(&path), &mut |step| steps.push((step.done, step.resumed)));
    assert_eq!(resumed.unwrap(), uninterrupted);
    assert_eq!(steps, [(2, 2), (3, 2), (4, 2), (5, 2)]);
    assert_eq!(std::fs::read_to_string(&path).unwrap(), text);

    let other = PplOptions { kv: kv("turbo2", "turbo3", true), step: None };
    let error = ppl(&model, &whole, &other, Some(&path), &mut |_| ()).unwrap_err().to_string();
    assert!(error.contains("kv: expected") && error.contains("turbo2/turbo3"), "{error}");
    std::fs::remove_file(&path).unwrap();
}

#[test]
fn a_run_resumes_only_with_the_same_weights() {
    let coarse = OpenOptions { weights: Some("q4_0".parse().unwrap()), ..Default::default() };
    let (model, coarse, path) = (model(), Model::bundled(coarse).unwrap(), file("weights-state"));
    let refused = |error: EvalError| {
        let error = error.to_string();
        assert!(error.contains("the state of another run: model: expected"), "{error}");
        std::fs::remove_file(&path).unwrap();
    };
    let of = |model: &Model| {
        let chunks = Chunks::new(model, TEXT, 64, Some(1)).unwrap();
        ppl(model, &chunks, &PplOptions::default(), Some(&path), &mut |_| ())
    };
    of(&model).unwrap();
    refused(of(&coarse).unwrap_err());
    let goal = Goal::Bits(3.4);
    let options = PlanOptions { goal, n_ctx: 64, reach: 64, tail: true };
    let of = |model: &Model| plan(model, TEXT, options, Some(&path), &mut |_| ());
    of(&model).unwrap();
    refused(of(&coarse).unwrap_err());
}

#[test]
fn a_text_shorter_than_a_chunk_is_rejected() {
    let error = Chunks::new(&model(), "Too short.", 512, None).unwrap_err();
    assert!(matches!(error, EvalError::ShortText { n_ctx: 512, .. }), "{error}");
    assert!(Chunks::new(&model(), TEXT, 2, None).is_err());
    assert!(Chunks::new(&model(), TEXT, 1 << 20, None).is_err());
}

#[test]
fn a_needle_is_found_at_every_depth() {
    let model = model();
    let options = NiahOptions {
        lengths: vec![192],
        depths: 5,
        needles: 1,
        form: NeedleForm::built_in("secret-word").unwrap(),
        chat: false,
        configs: vec![kv("f16", "f16", true), kv("turbo3", "turbo3", true)],
    };
    // The haystack is prose as in the model's training data: licences are too far from it.
    let haystack = "The old man walked along the river. He was tired, but he did not stop. \
                    A dog came out of the house and looked at him. \"Good day,\" said the boy at the gate. \
                    It was cold in the village that morning. Nobody knew what had happened to the horse. ";
    let cells = niah(&model, &haystack.repeat(4), &options, None, &mut |_| ()).unwrap();
    assert_eq!(cells.len(), 10);
    assert!(cells.iter().all(|cell| cell.exact == 1.0 && cell.token_accuracy == 1.0), "{cells:?}");
    let too_many = NiahOptions { needles: 99, ..options };
    assert!(matches!(
        niah(&model, &haystack.repeat(4), &too_many, None, &mut |_| ()),
        Err(EvalError::Setting { name: "needles", .. })
    ));
}

#[test]
fn model_kv_distortion_matches_gaussian_vectors() {
    let model = model();
    let tokens = model.text_prompt(TEXT, kvant::Special::AsText).unwrap();
    let rows = captured(&model, &tokens[..256], 1, &mut |_| ()).unwrap();
    // The cache's types, and KVarN of 2 to 4 bits on values.
    assert_eq!(rows.len(), model.config().layers.len() * (2 * kvant::DType::KV.len() + 3));
    // 256 vectors of a layer resemble each other: twice the spread of independent ones.
    for (codec, theory) in
        [("turbo2", 0.1178), ("turbo3", 0.0320), ("turbo4", 0.0079), ("turbo2t", 0.0802), ("turbo3t", 0.0216)]
    {
        for row in rows.iter().filter(|row| row.codec == codec) {
            // Codes of keys are of their difference from the centre: a smaller error.
            let min = if row.law.starts_with('K') { 0.0 } else { 0.90 };
            assert!((min..=1.10).contains(&(row.mse / theory)), "{row:?}");
        }
    }
    assert!(rows.iter().filter(|row| row.codec == "f32").all(|row| row.mse == 0.0));
}

#[test]
fn each_layer_alone_costs_less_than_all_together() {
    let model = model();
    let chunks = Chunks::new(&model, TEXT, 128, Some(1)).unwrap();
    let turbo2 = kv("turbo2", "turbo2", false);
    let all = means(&measure(&model, &chunks, std::slice::from_ref(&turbo2), None))[0];
    let layers = kld_by_layer(&model, &chunks, &turbo2, None, &mut |_| ()).unwrap();
    assert_eq!(layers.len(), model.config().layers.len());
    assert!(layers.iter().all(|l| 0.0 < l.k && l.k < all && 0.0 < l.v && l.v < all), "{layers:?} {all}");
    // Types from a table or a plan are treated like named types.
    let policies = Policies::none().with_table("* * KV turbo2").unwrap();
    let table = KvOptions { policies, ..kv("f16", "f16", false) };
    assert_eq!(kld_by_layer(&model, &chunks, &table, None, &mut |_| ()).unwrap(), layers);
}

#[test]
fn non_finite_logits_are_rejected_with_their_position() {
    let good = model();
    let norm = good.gguf().tensor("output_norm.weight").unwrap().bytes.to_vec();
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/../engine/assets/pocket-q8_0.gguf");
    let mut bytes = std::fs::read(source).unwrap();
    let at = bytes.windows(norm.len()).position(|window| window == norm).unwrap();
    // Finite weights, as files require, whose products are not finite.
    bytes[at..at + norm.len()].chunks_exact_mut(4).for_each(|v| v.copy_from_slice(&f32::MAX.to_le_bytes()));
    let path = file("infinite.gguf");
    std::fs::write(&path, bytes).unwrap();
    let model = Model::open(&path).unwrap();
    let chunks = Chunks::new(&model, TEXT, 64, Some(1)).unwrap();
    let refused = |error: EvalError| {
        let sound =
            matches!(error, EvalError::NotFinite { chunk: 0, position: 32, value } if !value.is_finite());
        assert!(sound, "{error}");
    };
    refused(ppl(&model, &chunks, &PplOptions::default(), None, &mut |_| ()).unwrap_err());
    let options = KldOptions { configs: vec![kv("turbo3", "turbo3", true)], step: None };
    refused(kld(&model, &chunks, Base::F16, &options, None, &mut |_| ()).unwrap_err());
    std::fs::remove_file(&path).unwrap();
}

/// Less memory means fewer bits of a cache beside the same weights, then other weights, then
/// nothing that fits; what is promised fits.
#[test]
fn a_budget_of_memory_is_shared_by_weights_and_cache() {
    let model = model();
    let options = PlanOptions { goal: Goal::Bits(0.0), n_ctx: 256, reach: 256, tail: true };
    let (of_file, tokens) = (model.weight_bytes(), 8192);
    let open = |dtype| {
        Model::bundled(OpenOptions { weights: Some(dtype), ..OpenOptions::default() })
            .map_err(EvalError::from)
    };
    let costs = MemoryCosts::measure(&model, TEXT, options, open, &mut |_| ()).unwrap();
    let choices = |bytes: usize| costs.choices(MemoryBudget { bytes, tokens });
    let f16 = model.config().kv_shape().f16_bytes(tokens);
    let roomy = choices(of_file + f16);
    let first = roomy[0].weights;
    assert_eq!((first.weights, first.bytes, first.kld), (None, of_file, 0.0));
    // Weights of fewer bits lose more, each is smaller than those of the file, and beside all of
    // them there is room for the finest cache.
    assert!(roomy.len() >= 4 && roomy[1..].iter().all(|choice| choice.weights.bytes < of_file), "{roomy:?}");
    let loses_more = |pair: &[WeightChoice]| pair[1].weights.kld > pair[0].weights.kld;
    assert!(roomy.windows(2).all(loses_more), "{roomy:?}");
    assert!(roomy.iter().all(|choice| choice.cache == roomy[0].cache && choice.cache.is_some()), "{roomy:?}");
    let tight = choices(of_file + f16 / 4);
    let bits = |choice: &WeightChoice| choice.cache.map(|(bits, _)| bits);
    assert!(bits(&tight[0]) < bits(&roomy[0]) && bits(&tight[0]) < bits(&tight[3]), "{tight:?}");
    for (choice, bits) in tight.iter().filter_map(|choice| Some((choice, bits(choice)?))) {
        let found = plan(&model, TEXT, PlanOptions { goal: Goal::Bits(bits), ..options }, None, &mut |_| ());
        let cache = found.unwrap().plan.kv_options().unwrap().plan(&model.config().kv_shape()).unwrap();
        let used = choice.weights.bytes + model.kv_bytes_for(&cache, tokens);
        assert!(used <= of_file + f16 / 4, "{choice:?}: {used}");
    }
    // Too little beside the weights of the file, enough beside smaller ones.
    let small = choices(of_file + f16 / 16);
    assert!(small[0].cache.is_none() && small.last().unwrap().cache.is_some(), "{small:?}");
    assert!(choices(1).iter().all(|choice| choice.cache.is_none()));
}

#[test]
fn a_model_without_attention_has_nothing_to_plan() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../model/tests/fixtures/mamba2-space.gguf");
    let model = Model::open(path).unwrap();
    let options = PlanOptions { goal: Goal::Bits(3.4), n_ctx: 64, reach: 64, tail: true };
    let error = plan(&model, TEXT, options, None, &mut |_| ()).unwrap_err().to_string();
    assert!(error.contains("expected layers that attend") && error.contains("none in mamba2"), "{error}");
}

#[test]
fn plans_meet_their_budget_and_certificates_are_reproducible() {
    let model = model();
    let options = |goal| PlanOptions { goal, n_ctx: 256, reach: 256, tail: true };
    let state = file("plan-state");
    let of = |goal| plan(&model, TEXT, options(goal), Some(&state), &mut |_| ()).map(|planned| planned.plan);
    let found = of(Goal::Bits(3.4)).unwrap();
    let certificate = &found.certificate;
    assert!(certificate.bits <= 3.4 && certificate.bits > 3.0, "{certificate:?}");
    assert_eq!((found.model.as_str(), found.sink), (model.fingerprint(), 16));
    found.channel_scales.check(&model.config().kv_shape()).unwrap();
    // The same from the complete state, from a part of it and without one.
    assert_eq!(of(Goal::Bits(3.4)).unwrap(), found);
    let saved = std::fs::read_to_string(&state).unwrap();
    let cut = saved.lines().take(3).map(|line| format!("{line}\n")).collect::<String>() + "00";
    std::fs::write(&state, cut).unwrap();
    assert_eq!(of(Goal::Bits(3.4)).unwrap(), found);
    assert_eq!(std::fs::read_to_string(&state).unwrap(), saved);
    assert_eq!(plan(&model, TEXT, options(Goal::Bits(3.4)), None, &mut |_| ()).unwrap().plan, found);
    // With recent tokens quantized too, the divergence is at least as large; that is another run.
    let coded = PlanOptions { tail: false, ..options(Goal::Bits(3.4)) };
    let error = plan(&model, TEXT, coded, Some(&state), &mut |_| ()).unwrap_err().to_string();
    assert!(error.contains("the state of another run: kv"), "{error}");
    let Planned { plan: coded, frontier } = plan(&model, TEXT, coded, None, &mut |_| ()).unwrap();
    let coded = coded.certificate;
    assert!(frontier.windows(2).all(|pair| pair[0].0 < pair[1].0 && pair[0].1 > pair[1].1), "{frontier:?}");
    assert!(!coded.tail && certificate.tail && coded.added_kld() > certificate.added_kld(), "{coded:?}");
    let KvPlan { types: widest, certificate: wider, .. } = of(Goal::Bits(8.6)).unwrap();
    assert!(0.0 < wider.mean_kld && wider.mean_kld < 0.5 * certificate.mean_kld, "{wider:?} {certificate:?}");
    // A tensor without a measurable cost gets the finest type too, given enough bits.
    let q8_0 = kvant::DType::Q8_0;
    assert!(widest.iter().flatten().all(|heads| (heads.k, heads.v) == (q8_0, q8_0)));
    // The noise of the arithmetic is the same for every plan.
    assert!(0.0 < wider.noise_kld && wider.noise_kld == certificate.noise_kld, "{wider:?} {certificate:?}");
    // A goal that the wide plan easily meets takes fewer bits, and an unreachable one takes all of
    // them.
    let max_kld = 0.5 * (wider.added_kld() + certificate.added_kld());
    let between = of(Goal::Kld(max_kld)).unwrap().certificate;
    assert!(between.added_kld() <= max_kld && between.bits < wider.bits, "{between:?}");
    assert_eq!(of(Goal::Kld(1e-12)).unwrap().certificate.bits, wider.bits);
    // The minimum of bits follows from the types alone, without a measurement.
    let mut measured = |_: &kvant_eval::Progress| panic!("no measurement is needed");
    let error = plan(&model, TEXT, options(Goal::Bits(1.0)), None, &mut measured).unwrap_err().to_string();
    assert!(error.starts_with("budget: expected 2.") && error.ends_with("got 1"), "{error}");
    let short = plan(&model, "Too short.", options(Goal::Bits(4.0)), None, &mut |_| ());
    assert!(matches!(short, Err(EvalError::ShortText { .. })));
    std::fs::remove_file(&state).unwrap();
}

#[test]
fn agreement_decreases_with_coarser_caches() {
    let model = model();
    let prompts = text_prompts(&Chunks::new(&model, TEXT, 128, Some(4)).unwrap());
    let configs = ["f16", "q8_0", "turbo2"].map(|types| kv(types, types, true)).to_vec();
    let options = AgreeOptions { configs, max_tokens: 48 };
    let [f16, q8_0, turbo2] = &agree(&model, &prompts, &options, &mut |_| ()).unwrap()[..] else {
        panic!("three configurations")
    };
    assert_eq!((f16.unchanged(), f16.same()), (1.0, 1.0));
    assert_eq!(f16.alike(), f16.answers.iter().map(|answer| answer.tokens as f64).sum::<f64>() / 4.0);
    assert!(turbo2.alike() < q8_0.alike() && turbo2.same() < q8_0.same(), "{q8_0:?} {turbo2:?}");
    assert!(turbo2.answers.iter().all(|answer| answer.alike <= answer.same && answer.same <= answer.tokens));
    let questions = question_prompts(&model, "What is the capital of France?\n\n").unwrap();
    let options = AgreeOptions { max_tokens: 64, ..options };
    let results = agree(&model, &questions, &options, &mut |_| ()).unwrap();
    // The answer ends by itself.
    assert!((2..64).contains(&results[0].answers[0].tokens), "{results:?}");
    for (prompts, max_tokens, what) in [(&[][..], 1, "prompts"), (&prompts[..], 0, "tokens of an answer")] {
        let options = AgreeOptions { configs: Vec::new(), max_tokens };
        let error = agree(&model, prompts, &options, &mut |_| ()).unwrap_err().to_string();
        assert_eq!(error, format!("{what}: expected 1 or more, got 0"));
    }
}

#[test]
fn a_model_is_compared_with_another_of_its_vocabulary() {
    let model = model();
    let other = |weights| Model::bundled(OpenOptions { weights, ..Default::default() }).unwrap();
    let chunks = Chunks::new(&model, TEXT, 128, Some(2)).unwrap();
    let options = KldOptions { configs: vec![kv("f16", "f16", true)], step: None };
    let from = |base: Base| {
        kld(&model, &chunks, base, &options, None, &mut |_| ()).unwrap()[0].stats().mean_kld.value
    };
    assert_eq!(from(Base::model(other(None), &model).unwrap()), 0.0);
    let coarse = |weights: &str| other(Some(weights.parse().unwrap()));
    // Equal to a file of its logits, to the file's resolution.
    let path = file("against.base");
    ppl_saving_base(&coarse("q4_0"), &chunks, &PplOptions::default(), &path, &mut |_| ()).unwrap();
    let of_file = from(Base::open(&path, &model).unwrap());
    std::fs::remove_file(&path).unwrap();
    let got = from(Base::model(coarse("q4_0"), &model).unwrap());
    assert!(got > 0.0 && (got - of_file).abs() < 1e-6, "{got} {of_file}");
    assert!(from(Base::model(coarse("q2_K"), &model).unwrap()) > got);
}
