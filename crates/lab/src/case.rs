//! Cases: an op and its sizes, in one line of text that the judge sends to a worker and shows in
//! messages: `attend k=turbo3 v=turbo3 kv_heads=2 group=6 dim=128 depth=4096 rows=1`.

use std::fmt;
use std::str::FromStr;

use kvant_codec::DType;

/// An op and its sizes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Case {
    /// Attention over a KV cache.
    Attend(Attend),
    /// Products of rows with a weight matrix.
    Product(Product),
    /// Appending to a KV cache.
    Append(Append),
    /// Steps of a whole model.
    Model(Model),
}

/// Attention of the last `rows` of `depth` tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Attend {
    /// Type of K.
    pub k: DType,
    /// Type of V.
    pub v: DType,
    /// KV heads.
    pub kv_heads: usize,
    /// Query heads per KV head.
    pub group: usize,
    /// Size of a head of K and of V.
    pub dim: usize,
    /// Tokens in the cache, those of the step included.
    pub depth: usize,
    /// Rows of the step.
    pub rows: usize,
}

/// Products of `rows` rows with a matrix `[n_out, n_in]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Product {
    /// Type of the weights.
    pub dtype: DType,
    /// Rows of the matrix.
    pub n_out: usize,
    /// Columns of the matrix.
    pub n_in: usize,
    /// Rows of activations.
    pub rows: usize,
    /// Copies of the matrix that take turns, so that it is read from memory as in a model.
    pub copies: usize,
}

/// Appending steps of `rows` tokens after the first `start`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Append {
    /// Type of K and of V.
    pub dtype: DType,
    /// KV heads.
    pub kv_heads: usize,
    /// Size of a head.
    pub dim: usize,
    /// Tokens in the cache before.
    pub start: usize,
    /// Tokens of a step.
    pub rows: usize,
    /// What is answered.
    pub read: Read,
}

/// What appending answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Read {
    /// All bytes of the cache.
    Bytes,
    /// The appended tokens, decoded.
    Rows,
}

/// Steps of `rows` tokens of a model, after `depth` others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Model {
    /// `bundled`, or random weights in a real shape: `SHAPE:TYPE`.
    pub name: String,
    /// Type of K and of V.
    pub kv: DType,
    /// Tokens in the cache before.
    pub depth: usize,
    /// Tokens of a step: 1 decodes, more are prefill.
    pub rows: usize,
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Attend(Attend { k, v, kv_heads, group, dim, depth, rows }) => write!(
                f,
                "attend k={k} v={v} kv_heads={kv_heads} group={group} dim={dim} depth={depth} rows={rows}"
            ),
            Self::Product(Product { dtype, n_out, n_in, rows, copies }) => {
                write!(f, "product type={dtype} out={n_out} in={n_in} rows={rows} copies={copies}")
            }
            Self::Append(Append { dtype, kv_heads, dim, start, rows, read }) => {
                let read = if *read == Read::Bytes { "bytes" } else { "rows" };
                write!(
                    f,
                    "append type={dtype} kv_heads={kv_heads} dim={dim} start={start} rows={rows} read={read}"
                )
            }
            Self::Model(Model { name, kv, depth, rows }) => {
                write!(f, "model name={name} kv={kv} depth={depth} rows={rows}")
            }
        }
    }
}

/// A text that is no case.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("case: expected {expected}, got '{got}'")]
pub struct CaseError {
    expected: String,
    got: String,
}

impl FromStr for Case {
    type Err = CaseError;

    fn from_str(text: &str) -> Result<Self, CaseError> {
        let mut fields = Fields { text, words: text.split(' ') };
        let case = match fields.words.next() {
            Some("attend") => Self::Attend(Attend {
                k: fields.take("k")?,
                v: fields.take("v")?,
                kv_heads: fields.take("kv_heads")?,
                group: fields.take("group")?,
                dim: fields.take("dim")?,
                depth: fields.take("depth")?,
                rows: fields.take("rows")?,
            }),
            Some("product") => Self::Product(Product {
                dtype: fields.take("type")?,
                n_out: fields.take("out")?,
                n_in: fields.take("in")?,
                rows: fields.take("rows")?,
                copies: fields.take("copies")?,
            }),
            Some("append") => Self::Append(Append {
                dtype: fields.take("type")?,
                kv_heads: fields.take("kv_heads")?,
                dim: fields.take("dim")?,
                start: fields.take("start")?,
                rows: fields.take("rows")?,
                read: match fields.take::<String>("read")?.as_str() {
                    "bytes" => Read::Bytes,
                    "rows" => Read::Rows,
                    _ => return Err(fields.expected("read=bytes or read=rows")),
                },
            }),
            Some("model") => Self::Model(Model {
                name: fields.take("name")?,
                kv: fields.take("kv")?,
                depth: fields.take("depth")?,
                rows: fields.take("rows")?,
            }),
            _ => return Err(fields.expected("attend, product, append or model")),
        };
        match fields.words.next() {
            None => Ok(case),
            Some(_) => Err(fields.expected("no more fields")),
        }
    }
}

/// The fields of a case in order.
struct Fields<'a> {
    text: &'a str,
    words: std::str::Split<'a, char>,
}

impl Fields<'_> {
    fn take<T: FromStr>(&mut self, name: &str) -> Result<T, CaseError> {
        let value = self.words.next().and_then(|word| word.strip_prefix(name)?.strip_prefix('='));
        let parsed = value.and_then(|value| value.parse().ok());
        parsed.ok_or_else(|| self.expected(&format!("{name}=.. in its place")))
    }

    fn expected(&self, expected: &str) -> CaseError {
        CaseError { expected: expected.to_owned(), got: self.text.to_owned() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cases_are_read_as_they_are_written() {
        for text in [
            "attend k=turbo3 v=q8_0 kv_heads=2 group=6 dim=128 depth=4096 rows=1",
            "product type=q4_K out=8960 in=1536 rows=1 copies=16",
            "append type=turbo3t kv_heads=2 dim=128 start=0 rows=512 read=bytes",
            "model name=tiny:q4_0 kv=turbo3 depth=512 rows=1",
        ] {
            assert_eq!(text.parse::<Case>().unwrap().to_string(), text);
        }
        for text in [
            "",
            "attend",
            "append type=turbo3t kv_heads=2 dim=128 start=0 rows=512 read=all",
            "model name=a kv=turbo9 depth=1 rows=1",
            "model name=a kv=turbo3 depth=1 rows=1 more",
        ] {
            let error = text.parse::<Case>().unwrap_err().to_string();
            assert!(error.contains("expected") && error.ends_with(&format!("'{text}'")), "{error}");
        }
    }
}
