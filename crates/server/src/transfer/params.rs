//! `kv_transfer_params` of requests and responses, under the names that routers of vLLM pass on.

use std::net::SocketAddr;

use serde_json::{Value, json};

use super::TransferId;
use crate::address::Address;
use crate::http::{ApiError, Fields};

/// Transfer that a request asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum KvTransfer {
    /// Keeps the cache of the prompt for a decode worker.
    Keep(TransferId),
    /// Fetches the cache of the prompt from a prefill worker.
    Fetch(RemoteCache),
}

/// Cache that a prefill worker keeps.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RemoteCache {
    pub peer: Address,
    pub id: TransferId,
}

impl KvTransfer {
    /// Reads `kv_transfer_params`.
    pub fn read(fields: &Fields) -> Result<Option<Self>, ApiError> {
        let params = fields.object("kv_transfer_params")?;
        match (params.flag("do_remote_decode")?, params.flag("do_remote_prefill")?) {
            (false, false) => Ok(None),
            (true, false) => Ok(Some(Self::Keep(TransferId::random()))),
            (false, true) => {
                let host = params.need("remote_host", "a host")?;
                let port = params.need("remote_port", "a port")?;
                let id: String = params.need("remote_transfer_id", "an id")?;
                let wrong = |()| ApiError::field("remote_transfer_id", "32 hexadecimal digits", &id);
                let (id, peer) = (id.parse().map_err(wrong)?, Address { host, port });
                Ok(Some(Self::Fetch(RemoteCache { peer, id })))
            }
            (true, true) => {
                let expected = "do_remote_decode or do_remote_prefill";
                Err(ApiError::field("kv_transfer_params", expected, "both"))
            }
        }
    }
}

/// Returns the parameters with which a decode worker fetches a cache that is kept here.
pub(super) fn to_fetch(id: TransferId, server: SocketAddr) -> Value {
    json!({
        "do_remote_prefill": true,
        "do_remote_decode": false,
        "remote_engine_id": format!("kvant-{server}"),
        "remote_host": server.ip().to_string(),
        "remote_port": server.port(),
        "remote_transfer_id": id.to_string(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(params: Value) -> Result<Option<KvTransfer>, ApiError> {
        let body = json!({ "kv_transfer_params": params });
        KvTransfer::read(&Fields::new(body.as_object().unwrap().clone()))
    }

    #[test]
    fn a_response_names_what_a_decode_worker_fetches() {
        let asked = json!({ "do_remote_decode": true, "do_remote_prefill": false, "remote_host": null });
        let Some(KvTransfer::Keep(id)) = read(asked).unwrap() else { panic!("a cache to keep") };
        let server = "[::1]:8080".parse().unwrap();
        let peer = Address { host: "::1".to_owned(), port: 8080 };
        let expected = KvTransfer::Fetch(RemoteCache { peer, id });
        assert_eq!(read(to_fetch(id, server)).unwrap(), Some(expected));
        assert_ne!(id, TransferId::random());
    }

    #[test]
    fn wrong_transfers_are_errors_and_others_none() {
        for none in [Value::Null, json!({}), json!({ "do_remote_decode": false, "other": [1] })] {
            assert_eq!(read(none).unwrap(), None);
        }
        let id = "0".repeat(32);
        for wrong in [
            json!("text"),
            json!({ "do_remote_decode": "yes" }),
            json!({ "do_remote_decode": true, "do_remote_prefill": true }),
            json!({ "do_remote_prefill": true, "remote_port": 1, "remote_transfer_id": id }),
            json!({ "do_remote_prefill": true, "remote_host": "a", "remote_port": 65536, "remote_transfer_id": id }),
            json!({ "do_remote_prefill": true, "remote_host": "a", "remote_port": 1, "remote_transfer_id": "+0" }),
        ] {
            assert!(read(wrong.clone()).is_err(), "{wrong}");
        }
    }
}
