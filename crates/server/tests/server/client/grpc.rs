//! Minimal gRPC client: one HTTP/2 connection, calls by path, messages by field number.

use std::future::Future;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::mpsc;
use std::task::{Context, Poll};

use axum::http::{Request, Response, Uri};
use hyper::body::Incoming;
use hyper::client::conn::http2::{SendRequest, handshake};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::TcpStream;
use tonic::body::Body;
use tonic::client::{Grpc, GrpcService};
use tonic::{Status, Streaming};
use tonic_prost::ProstCodec;

#[path = "../../../src/grpc/control_messages.rs"]
pub mod control_messages;
#[path = "../../../src/grpc/messages.rs"]
pub mod messages;

use messages::{FinishInfo, GenerateRequest, GenerateResponse, SequenceOutput};

#[derive(Clone)]
pub struct GrpcClient {
    connection: Connection,
    key: Option<String>,
}

#[derive(Clone)]
struct Connection(SendRequest<Body>);

impl GrpcService<Body> for Connection {
    type ResponseBody = Incoming;
    type Error = hyper::Error;
    type Future = Pin<Box<dyn Future<Output = hyper::Result<Response<Incoming>>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<hyper::Result<()>> {
        self.0.poll_ready(context)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        Box::pin(self.0.send_request(request))
    }
}

/// Streamed responses; dropping it cancels the call.
pub struct Responses<A>(Streaming<A>);

impl<A> Iterator for Responses<A> {
    type Item = Result<A, Status>;

    fn next(&mut self) -> Option<Self::Item> {
        block_on(self.0.message()).transpose()
    }
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
}

impl GrpcClient {
    /// Connects; a thread drives the connection.
    pub fn at(address: SocketAddr) -> Self {
        let (ready, connected) = mpsc::channel();
        std::thread::spawn(move || {
            block_on(async {
                let stream = TokioIo::new(TcpStream::connect(address).await.unwrap());
                let (sender, connection) = handshake(TokioExecutor::new(), stream).await.unwrap();
                ready.send(sender).unwrap();
                _ = connection.await;
            });
        });
        Self { connection: Connection(connected.recv().unwrap()), key: None }
    }

    pub fn with_key(&self, key: &str) -> Self {
        Self { key: Some(key.to_owned()), ..self.clone() }
    }

    fn grpc(&self) -> Grpc<Connection> {
        Grpc::with_origin(self.connection.clone(), Uri::from_static("http://localhost"))
    }

    fn request<Q>(&self, message: Q) -> tonic::Request<Q> {
        let mut request = tonic::Request::new(message);
        if let Some(key) = &self.key {
            request.metadata_mut().insert("authorization", format!("Bearer {key}").parse().unwrap());
        }
        request
    }

    /// Makes a call with one response.
    pub fn call<Q, A>(&self, path: &'static str, message: Q) -> Result<A, Status>
    where
        Q: prost::Message + 'static,
        A: prost::Message + Default + 'static,
    {
        block_on(async {
            let mut grpc = self.grpc();
            grpc.ready().await.unwrap();
            let codec = ProstCodec::<Q, A>::default();
            let response = grpc.unary(self.request(message), path.parse().unwrap(), codec).await?;
            Ok(response.into_inner())
        })
    }

    /// Makes a call with a stream of responses.
    pub fn stream<Q, A>(&self, path: &'static str, message: Q) -> Result<Responses<A>, Status>
    where
        Q: prost::Message + 'static,
        A: prost::Message + Default + 'static,
    {
        block_on(async {
            let mut grpc = self.grpc();
            grpc.ready().await.unwrap();
            let codec = ProstCodec::<Q, A>::default();
            let response = grpc.server_streaming(self.request(message), path.parse().unwrap(), codec).await?;
            Ok(Responses(response.into_inner()))
        })
    }

    pub fn try_generate(&self, request: GenerateRequest) -> Result<GenerateResponse, Status> {
        self.call("/vllm.Inference/Generate", request)
    }

    pub fn generate(&self, request: GenerateRequest) -> SequenceOutput {
        self.try_generate(request).unwrap().outputs.unwrap()
    }

    pub fn generate_stream(&self, request: GenerateRequest) -> Responses<GenerateResponse> {
        self.stream("/vllm.Inference/GenerateStream", request).unwrap()
    }

    /// Sends these bytes as the body of a call and returns the HTTP status.
    pub fn raw(&self, path: &str, body: Vec<u8>) -> u16 {
        let request = Request::post(format!("http://localhost{path}"))
            .header("content-type", "application/grpc")
            .body(Body::new(axum::body::Body::from(body)))
            .unwrap();
        let mut connection = self.connection.clone();
        block_on(connection.0.send_request(request)).unwrap().status().as_u16()
    }
}

/// Joins the streamed output of the answer at this index.
pub fn joined(responses: &[GenerateResponse], index: u32) -> (String, Vec<u32>, FinishInfo) {
    let outputs = responses.iter().filter_map(|response| response.outputs.as_ref());
    let (mut text, mut tokens, mut finish) = (String::new(), Vec::new(), None);
    for output in outputs.filter(|output| output.index == index) {
        assert_eq!(finish, None, "nothing follows the end");
        text += &output.text;
        tokens.extend(&output.token_ids);
        finish.clone_from(&output.finish_info);
    }
    (text, tokens, finish.unwrap())
}
