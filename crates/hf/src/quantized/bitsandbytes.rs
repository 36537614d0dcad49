//! Reads the tensors of a module that bitsandbytes quantized, and checks them against each other.

use kvant_codec::{DType, nf4};
use serde_json::Value;

use super::module::Module;
use super::row_bytes::RowBytes;
use super::tabled::{CodedScales, Scales, Tabled};
use crate::error::{HfError, TensorFault};
use crate::folder::{Object, shown};
use crate::safetensors::{ElementKind, Stored};

/// Ends of the names of a module's tensors.
pub(super) const ENDS: [&str; 9] = [
    "weight.absmax",
    "weight.quant_map",
    "weight.nested_absmax",
    "weight.nested_quant_map",
    NF4_STATE,
    FP4_STATE,
    "SCB",
    "weight_format",
    "weight",
];
const NF4_STATE: &str = "weight.quant_state.bitsandbytes__nf4";
const FP4_STATE: &str = "weight.quant_state.bitsandbytes__fp4";

/// Values that may share a scale.
const GROUPS: [u32; 8] = [32, 64, 128, 256, 512, 1024, 2048, 4096];
/// Most bytes of a description: JSON with ten short values.
const MAX_STATE: usize = 4096;

impl Module<'_> {
    /// Reads 4-bit codes.
    pub fn tabled(&self) -> Result<Tabled, HfError> {
        let codes = self.part("weight")?;
        let (end, blocks) = match self.parts.contains_key(FP4_STATE) {
            true => (FP4_STATE, DType::FP4G64),
            false => (NF4_STATE, DType::NF4G64),
        };
        let levels = nf4::levels(blocks).expect("codes are indices");
        let text = self.state(end)?;
        let state = text.object(self, end)?;
        let group = match state.size("blocksize")? {
            size if GROUPS.contains(&size) => size as usize,
            other => return Err(state.bad("blocksize", "a power of two from 32 to 4096", other.to_string())),
        };
        let [n_out, n_in] = shape(state)?;
        let n = n_out.saturating_mul(n_in);
        // Any type may be the storage of the bytes.
        if self.shards.data(codes).len() != n.div_ceil(2) {
            return Err(self.wrong("weight", codes, format!("4 bits for each of {n_out} x {n_in} values")));
        }
        let map = self.floats_of("weight.quant_map", levels.len())?;
        if super::floats::scales(map, self.shards) != levels {
            return Err(self.tensor("weight.quant_map", map, TensorFault::Levels));
        }
        let n_scales = n.div_ceil(group);
        let scales = match self.parts.contains_key("weight.nested_absmax") {
            true => Scales::Coded(self.coded_scales(state, n_scales)?),
            false => Scales::Values(self.floats_of("weight.absmax", n_scales)?.clone()),
        };
        let (codes, dtype) = (codes.clone(), self.method.dtype);
        let tabled = Tabled { n_out, n_in, codes, scales, group, levels, dtype, dense_dtype: dtype };
        Ok(tabled.with_blocks(blocks))
    }

    fn coded_scales(&self, state: Object<'_>, n_scales: usize) -> Result<CodedScales, HfError> {
        let codes = self.part("weight.absmax")?;
        if codes.holds != ElementKind::Bytes {
            return Err(self.wrong_type("weight.absmax", codes, "U8"));
        }
        self.expect("weight.absmax", codes, &[n_scales])?;
        let group = state.size("nested_blocksize")? as usize;
        match state.find_str("nested_dtype")? {
            Some("float32") => {}
            other => return Err(state.bad("nested_dtype", "\"float32\"", other.unwrap_or("nothing"))),
        }
        Ok(CodedScales {
            codes: codes.clone(),
            levels: self.floats_of("weight.nested_quant_map", 256)?.clone(),
            factors: self.floats_of("weight.nested_absmax", n_scales.div_ceil(group))?.clone(),
            group,
            offset: state.float("nested_offset")? as f32,
        })
    }

    /// Reads signed bytes.
    pub fn row_bytes(&self) -> Result<RowBytes, HfError> {
        let codes = self.part("weight")?;
        if codes.holds != ElementKind::I8 {
            return Err(self.wrong_type("weight", codes, "I8"));
        }
        let [n_out, n_in] = self.matrix("weight", codes)?;
        // The number of an order; 0 is that of rows. Older versions do not tell it.
        if let Some(format) = self.parts.get("weight_format")
            && (format.holds != ElementKind::Bytes
                || self.shards.data(format).iter().any(|order| *order != 0))
        {
            return Err(HfError::Quantized { method: "bitsandbytes in 8 bits in tiles".to_owned() });
        }
        let (codes, scales) = (codes.clone(), self.floats_of("SCB", n_out)?.clone());
        Ok(RowBytes { n_out, n_in, codes, scales, dtype: self.method.dtype })
    }

    /// Returns a list of `n` floats.
    fn floats_of(&self, end: &str, n: usize) -> Result<&Stored, HfError> {
        let stored = self.scales(end)?;
        self.expect(end, stored, &[n])?;
        Ok(stored)
    }

    /// Reads the description of a matrix, JSON in bytes.
    fn state(&self, end: &str) -> Result<State, HfError> {
        let stored = self.part(end)?;
        if stored.holds != ElementKind::Bytes {
            return Err(self.wrong_type(end, stored, "U8"));
        }
        let bytes = self.shards.data(stored);
        if bytes.len() > MAX_STATE {
            return Err(self.wrong(end, stored, format!("at most {MAX_STATE} bytes")));
        }
        let fault = |why: String| self.tensor(end, stored, TensorFault::Json { why });
        serde_json::from_slice(&bytes).map(State).map_err(|error| fault(error.to_string()))
    }
}

/// The description of a matrix.
struct State(Value);

impl State {
    fn object<'a>(&'a self, of: &'a Module<'_>, end: &str) -> Result<Object<'a>, HfError> {
        let stored = of.part(end)?;
        match &self.0 {
            Value::Object(map) => Ok(Object { path: of.shards.path(stored), map }),
            other => Err(of.tensor(
                end,
                stored,
                TensorFault::Json { why: format!("{}, not an object", shown(other)) },
            )),
        }
    }
}

/// Returns outputs and inputs.
fn shape(state: Object<'_>) -> Result<[usize; 2], HfError> {
    const KEY: &str = "shape";
    let sizes = state.find_array(KEY)?.unwrap_or_default();
    let size = |i: usize| sizes.get(i)?.as_u64().filter(|size| (1..1 << 31).contains(size));
    match (size(0), size(1), sizes.len()) {
        (Some(n_out), Some(n_in), 2) => Ok([n_out as usize, n_in as usize]),
        _ => {
            let got: Vec<String> = sizes.iter().take(4).map(shown).collect();
            Err(state.bad(KEY, "outputs and inputs", format!("[{}]", got.join(", "))))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use crate::folder::Folder;
    use crate::quantized::{Method, join};
    use crate::safetensors::Shards;

    /// Returns the error of a folder whose weights have one text replaced by another as long.
    fn fault(name: &str, from: &str, to: &str) -> String {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../engine/tests/quantized").join(name);
        let mut weights = std::fs::read(folder.join("model.safetensors")).unwrap();
        assert_eq!(from.len(), to.len());
        let at = weights.windows(from.len()).position(|bytes| bytes == from.as_bytes()).unwrap();
        weights[at..][..to.len()].copy_from_slice(to.as_bytes());
        let dir = std::env::temp_dir().join(format!("kvant-hf-bnb-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        std::fs::write(dir.join("model.safetensors"), weights).unwrap();
        std::fs::copy(folder.join("config.json"), dir.join("config.json")).unwrap();
        let mut files = Folder::new(&dir);
        let config = files.json("config.json").unwrap().unwrap();
        let method = Method::of(config.object().unwrap()).unwrap().unwrap();
        let error = Shards::open(&mut files).and_then(|mut shards| join(&mut shards, method)).unwrap_err();
        std::fs::remove_dir_all(dir).unwrap();
        error.to_string()
    }

    #[test]
    fn contradictions_name_the_tensor_and_what_is_expected() {
        // The description of the first module in the file: a matrix of 64 or of 128 rows.
        for (from, to, expected) in [
            ("\"blocksize\": 64", "\"blocksize\": 65", "expected a power of two from 32 to 4096, got 65"),
            ("\"blocksize\": 64", "\"blocksize\": 32", "weight.absmax' has the shape"),
            ("\"nested_blocksize\": 256", "\"nested_blocksize\": 000", "not a sound description"),
            ("\"nested_blocksize\": 256", "\"nested_blocksize\": 128", "weight.nested_absmax' has the shape"),
            (
                "\"nested_dtype\": \"float32\"",
                "\"nested_dtype\": \"float16\"",
                "expected \"float32\", got float16",
            ),
            ("\"nested_offset\"", "\"nested_offsex\"", "'nested_offset': expected a number, got nothing"),
            ("\"shape\": [", "\"shape\": {", "not a sound description"),
            ("\"shape\": ", "\"shap_\": ", "'shape': expected outputs and inputs, got []"),
            ("weight.absmax", "weight.absmix", "weight.absmax' is missing"),
            ("weight.quant_map", "weight.quant_mop", "weight.quant_map' is missing"),
            (
                "bitsandbytes__nf4",
                "bitsandbytes__fp4",
                "holds other levels than those that bitsandbytes names",
            ),
            ("bitsandbytes__nf4", "bitsandbytes__nf5", "bitsandbytes__nf4' is missing"),
            ("weight.nested_quant_map", "weight.nested_quant_mop", "nested_quant_map' is missing"),
        ] {
            let error = fault("bnb-nf4-double", from, to);
            assert!(error.contains(expected) && error.lines().count() == 1, "{from}: {error}");
        }
        let error = fault("bnb-int8", "\"I8\"", "\"U8\"");
        assert!(error.contains("holds U8; it is read in I8"), "{error}");
    }
}
