//! Claims about what applies to all handlers.

use axum::body::{Body, to_bytes};
use hyper::service::Service;
use hyper_util::service::TowerToHyperService;
use kvant::{DType, KvOptions, OpenOptions};
use serde_json::Value;

use super::*;

fn server() -> Arc<Server> {
    let kv = KvOptions::symmetric(DType::Turbo3);
    let options = Options {
        n_ctx: Some(64),
        n_running: 1,
        n_waiting: 1,
        kv_budget: 1 << 20,
        ..Options::new("pocket", kv)
    };
    let model = Model::bundled(OpenOptions { n_threads: Some(1), ..Default::default() }).unwrap();
    let pool = Arc::new(ModelRegistry::new(model, options.clone(), channel(1).0).unwrap());
    let (n_requests, is_leaving) = (AtomicU64::new(0), AtomicBool::new(false));
    let bodies = Bodies::default();
    let (work, http_port) = Default::default();
    Arc::new(Server { options, pool, n_requests, bodies, is_shutting_down: is_leaving, work, http_port })
}

#[test]
fn a_panic_in_a_handler_is_an_error_response_only() {
    async fn faulty() -> &'static str {
        panic!("a secret")
    }
    let server = server();
    let routes = Router::new().route("/faulty", get(faulty));
    let service = TowerToHyperService::new(router_with(routes, Arc::clone(&server), cors(&[]).unwrap()));
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let fetch = |path: &str| {
        let request = Request::builder().uri(path).body(Body::empty()).unwrap();
        runtime.block_on(async {
            let response = service.call(request).await.unwrap();
            assert!(response.headers().contains_key("x-request-id"));
            let (head, body) = response.into_parts();
            let body = to_bytes(body, body::MAX_BYTES).await.unwrap();
            (head.status.as_u16(), serde_json::from_slice::<Value>(&body).unwrap())
        })
    };
    let (status, body) = fetch("/faulty");
    assert_eq!(
        (status, &body["error"]["type"], &body["error"]["code"]),
        (500, &"server_error".into(), &500.into())
    );
    assert!(!body.to_string().contains("secret"), "{body}");
    assert_eq!(fetch("/health").0, 200);
    assert_eq!(Arc::strong_count(&server.work), 1, "it is no more in work");
}

#[test]
fn tokenization_ends_with_its_client_and_long_texts_are_refused() {
    let hosted = server().pool.first().unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    runtime.block_on(async {
        let (to, ended) = tokio::sync::oneshot::channel();
        let work = move |_: &Model, client: &ClientAlive| {
            while client.check().is_ok() {
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
            _ = to.send(());
            client.check()
        };
        let minute = std::time::Duration::from_secs(60);
        let given_up = tokio::time::timeout(minute / 1000, hosted.tokenize(1, work)).await;
        assert!(given_up.is_err());
        tokio::time::timeout(minute, ended).await.unwrap().unwrap();
        let error = hosted.tokenize(MAX_TEXT + 1, |_, client| client.check()).await.unwrap_err();
        assert_eq!(error.object()["code"], 413);
        hosted.tokenize(MAX_TEXT, |_, client| client.check()).await.unwrap();
    });
}
