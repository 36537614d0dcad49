//! Claims about the events of a worker.

use kvant::generate::constraint::Constraints;
use kvant::generate::decoding::DecodingOptions;
use kvant::{DType, KvOptions, OpenOptions};
use tokio::sync::mpsc::channel;

use super::*;
use crate::models::ModelRegistry;
use crate::options::Options;
use crate::trace::Trace;

/// Channel capacity beside the events that answers may emit at once.
const AHEAD: usize = 8;

#[test]
fn a_slow_client_of_several_prompts_receives_every_event() {
    let (n_jobs, max_tokens) = (8, 40);
    let options = Options { n_ctx: Some(64), ..Options::new("pocket", KvOptions::symmetric(DType::Turbo3)) };
    let model = Model::bundled(OpenOptions { n_threads: Some(1), ..Default::default() }).unwrap();
    let pool = Arc::new(ModelRegistry::new(model, options, channel(1).0).unwrap());
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let hosted = runtime.block_on(pool.get(None)).unwrap();
    let answer = Arc::new(DecodingOptions { max_tokens, ignore_eos: true, ..DecodingOptions::default() });
    let (events, mut received) = channel(AHEAD + EVENTS_OF_ANSWER * n_jobs);
    for first in 0..n_jobs {
        let job = Job {
            prompt: [1, 2 + first as u32].into(),
            kind: CacheKey { spec: Arc::clone(&hosted.defaults), owner: None },
            owner: None,
            n: 1,
            first,
            n_answers: n_jobs,
            answer: Arc::clone(&answer),
            media: Vec::new(),
            guides: Constraints::default(),
            reports_progress: true,
            prompt_logprobs: None,
            bypasses_prefix_cache: false,
            keeps: None,
            fetched: None.into(),
            pooled: None,
            id: "".into(),
            trace: Trace::here("pocket", "text_completion"),
            events: events.clone(),
        };
        hosted.jobs.send(job).unwrap();
    }
    drop(events);
    let mut n_generated = vec![0; n_jobs];
    while let Some(event) = received.blocking_recv() {
        // Receives more slowly than the worker sends.
        std::thread::sleep(Duration::from_millis(2));
        match event {
            Event::Token(index, _) => n_generated[index] += 1,
            Event::Ended(index, _, _, times) => {
                assert_eq!((n_generated[index], times.n_generated), (max_tokens, max_tokens))
            }
            Event::Failed { why, .. } => panic!("{why}"),
            _ => {}
        }
    }
    assert_eq!(n_generated, vec![max_tokens; n_jobs]);
}
