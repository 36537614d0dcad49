//! Reads the tensors of a quantized module and checks them against each other.

use kvant_codec::{DType, factored_fp4};

use super::floats::Floats;
use super::fp4::{Fp4, Fp4Kind, NV_BLOCK};
use super::integers::{Integers, Packing, Zeros};
use super::{Method, Parts, order};
use crate::error::{HfError, TensorFault};
use crate::safetensors::{ElementKind, Shards, Stored};

/// A quantized module of a folder.
pub(super) struct Module<'a> {
    pub name: &'a str,
    pub parts: &'a Parts,
    pub shards: &'a Shards,
    pub method: Method,
}

impl Module<'_> {
    pub fn gptq(&self, bits: usize, zero_offset: u8) -> Result<Integers, HfError> {
        let per_word = 32 / bits;
        let codes = self.words("qweight")?;
        let [words, n_out] = self.matrix("qweight", codes)?;
        let n_in = words.saturating_mul(per_word);
        let groups = self.scale_shape("scales", 1, n_out)?;
        let zeros = self.words("qzeros")?;
        self.expect("qzeros", zeros, &[groups, n_out.div_ceil(per_word)])?;
        Ok(Integers {
            codes: codes.clone(),
            packing: Packing::Inputs { bits },
            scales: self.scales("scales")?.clone(),
            groups_first: true,
            zeros: Zeros::Words {
                stored: zeros.clone(),
                packing: Packing::Outputs { bits, order: &order::IN_ORDER },
                offset: zero_offset,
            },
            group_of: self.group_of("g_idx", n_in, groups)?,
            ..Integers::new(n_out, n_in, groups)
        })
    }

    pub fn awq(&self, bits: usize) -> Result<Integers, HfError> {
        if bits != 4 {
            return Err(HfError::Quantized { method: format!("awq in {bits} bits") });
        }
        let per_word = 32 / bits;
        let codes = self.words("qweight")?;
        let [n_in, words] = self.matrix("qweight", codes)?;
        let n_out = words.saturating_mul(per_word);
        let groups = self.scale_shape("scales", 1, n_out)?;
        let zeros = self.words("qzeros")?;
        self.expect("qzeros", zeros, &[groups, words])?;
        let packing = Packing::Outputs { bits, order: &order::AWQ };
        Ok(Integers {
            codes: codes.clone(),
            packing,
            scales: self.scales("scales")?.clone(),
            groups_first: true,
            zeros: Zeros::Words { stored: zeros.clone(), packing, offset: 0 },
            group_of: self.group_of("g_idx", n_in, groups)?,
            ..Integers::new(n_out, n_in, groups)
        })
    }

    /// Reads the packed integers of compressed-tensors.
    pub fn packed(&self) -> Result<Integers, HfError> {
        let codes = self.words("weight_packed")?;
        let [n_out, words] = self.matrix("weight_packed", codes)?;
        let n_in = self.columns(n_out)?;
        let bits = match [4, 8].into_iter().find(|bits| (n_in * bits).div_ceil(32) == words) {
            Some(bits) => bits,
            None => {
                return Err(self.wrong(
                    "weight_packed",
                    codes,
                    format!("{n_in} values of 4 or 8 bits a row"),
                ));
            }
        };
        let groups = self.scale_shape("weight_scale", 0, n_out)?;
        let middle = 1 << (bits - 1);
        let zeros = match self.parts.get("weight_zero_point") {
            None => Zeros::All(middle),
            Some(_) => {
                let zeros = self.words("weight_zero_point")?;
                self.expect("weight_zero_point", zeros, &[n_out.div_ceil(32 / bits), groups])?;
                Zeros::Words { stored: zeros.clone(), packing: Packing::Inputs { bits }, offset: 0 }
            }
        };
        Ok(Integers {
            codes: codes.clone(),
            packing: Packing::Rows { bits },
            scales: self.scales("weight_scale")?.clone(),
            zeros,
            group_of: self.group_of("weight_g_idx", n_in, groups)?,
            ..Integers::new(n_out, n_in, groups)
        })
    }

    /// Returns the codes of floats, bytes, or packed integers.
    pub fn codes(&self) -> Result<&Stored, HfError> {
        self.part(if self.parts.contains_key("weight_packed") { "weight_packed" } else { "weight" })
    }

    /// Returns the name of the scales, for which DeepSeek-V3 and V4 have others.
    fn scale_end(&self) -> &'static str {
        let others = ["weight_scale_inv", "scale"];
        others.into_iter().find(|end| self.parts.contains_key(end)).unwrap_or("weight_scale")
    }

    /// Whether scales are powers of two.
    pub fn has_powers(&self) -> bool {
        self.parts.get(self.scale_end()).is_some_and(|scales| scales.holds == ElementKind::E8M0)
    }

    /// Reads 4-bit floats.
    pub fn fp4(&self) -> Result<Fp4, HfError> {
        let codes = self.codes()?;
        let [n_out, bytes] = self.matrix("weight", codes)?;
        let n_in = 2 * bytes;
        let end = self.scale_end();
        let scales = self.part(end)?;
        let (kind, block) = match scales.holds {
            ElementKind::E4M3 => {
                let divides = self.parts.contains_key("weight_global_scale");
                let end = if divides { "weight_global_scale" } else { "weight_scale_2" };
                let global = self.scales(end)?;
                self.expect(end, global, &[1])?;
                (Fp4Kind::Nv { global: global.clone(), divides }, NV_BLOCK)
            }
            ElementKind::Bytes | ElementKind::E8M0 => (Fp4Kind::Mx, 32),
            _ => return Err(self.wrong_type(end, scales, "F8_E4M3, F8_E8M0 or U8")),
        };
        if !n_in.is_multiple_of(32) {
            return Err(self.wrong("weight", codes, "rows of blocks of 32".to_owned()));
        }
        self.expect(end, scales, &[n_out, n_in / block])?;
        let dtype = match kind {
            Fp4Kind::Mx => DType::MXFP4,
            Fp4Kind::Nv { .. } if n_in.is_multiple_of(factored_fp4::LEN) => DType::NVFP4G256,
            Fp4Kind::Nv { .. } => DType::Q8_0,
        };
        let (codes, scales) = (codes.clone(), scales.clone());
        Ok(Fp4 { n_out, n_in, codes, scales, kind, dtype, dense_dtype: self.method.dtype })
    }

    /// Reads signed bytes.
    pub fn bytes(&self) -> Result<Integers, HfError> {
        let codes = self.part("weight")?;
        if self.parts.contains_key("weight_zero_point") {
            let method = "compressed-tensors in I8 with zero points".to_owned();
            return Err(HfError::Quantized { method });
        }
        let [n_out, n_in] = self.matrix("weight", codes)?;
        let groups = self.scale_shape("weight_scale", 0, n_out)?;
        Ok(Integers {
            codes: codes.clone(),
            packing: Packing::Bytes,
            scales: self.scales("weight_scale")?.clone(),
            zeros: Zeros::All(128),
            group_of: self.group_of("weight_g_idx", n_in, groups)?,
            ..Integers::new(n_out, n_in, groups)
        })
    }

    /// Reads 8-bit floats with a scale for the matrix, for each output, or for each block.
    pub fn floats(&self) -> Result<Floats, HfError> {
        let codes = self.part("weight")?;
        if codes.holds != ElementKind::E4M3 {
            return Err(self.wrong_type("weight", codes, "F8_E4M3 or I8"));
        }
        let [n_out, n_in] = self.matrix("weight", codes)?;
        let end = self.scale_end();
        let scales = self.part(end)?;
        if !matches!(scales.holds, ElementKind::Values(_) | ElementKind::E8M0) {
            return Err(self.wrong_type(end, scales, "F32, F16, BF16 or F8_E8M0"));
        }
        let [rows, columns] = self.method.block;
        let block = match scales.shape[..] {
            [1] | [1, 1] => [n_out, n_in],
            [n] | [n, 1] if n == n_out => [1, n_in],
            [a, b] if [a, b] == [n_out.div_ceil(rows), n_in.div_ceil(columns)] => [rows, columns],
            _ => {
                let expected = format!("1, {n_out}, or one for each block of {rows} x {columns}");
                return Err(self.wrong(end, scales, expected));
            }
        };
        Ok(Floats {
            n_out,
            n_in,
            codes: codes.clone(),
            scales: scales.clone(),
            block,
            dtype: self.method.dtype,
            dense_dtype: self.method.dtype,
        }
        .with_dtype())
    }

    /// Returns the inputs that `weight_shape` tells, which are not always a whole word.
    fn columns(&self, n_out: usize) -> Result<usize, HfError> {
        let stored = self.part("weight_shape")?;
        let values: Vec<u64> = match stored.holds {
            ElementKind::I64 => {
                self.shards.data(stored).as_chunks().0.iter().map(|v| u64::from_le_bytes(*v)).collect()
            }
            ElementKind::I32 => order::words(&self.shards.data(stored)).map(u64::from).collect(),
            _ => return Err(self.wrong("weight_shape", stored, "two numbers".to_owned())),
        };
        match values[..] {
            [rows, columns] if rows == n_out as u64 && (1..=1 << 31).contains(&columns) => {
                Ok(columns as usize)
            }
            _ => Err(HfError::Shape {
                name: self.full("weight_packed"),
                expected: format!("{values:?}, as weight_shape tells"),
                got: vec![n_out],
            }),
        }
    }

    fn full(&self, end: &str) -> String {
        format!("{}.{end}", self.name)
    }

    pub fn part(&self, end: &str) -> Result<&Stored, HfError> {
        let of = || Some(format!("'{}' is quantized", self.name));
        self.parts.get(end).ok_or_else(|| HfError::Missing { name: self.full(end), of: of() })
    }

    fn words(&self, end: &str) -> Result<&Stored, HfError> {
        let stored = self.part(end)?;
        match stored.holds {
            ElementKind::I32 => Ok(stored),
            _ => Err(self.wrong_type(end, stored, "I32")),
        }
    }

    pub fn scales(&self, end: &str) -> Result<&Stored, HfError> {
        let stored = self.part(end)?;
        match stored.holds {
            ElementKind::Values(_) => Ok(stored),
            _ => Err(self.wrong_type(end, stored, "F32, F16 or BF16")),
        }
    }

    /// Returns the number of groups of scales whose dimension `out` has `n_out`.
    fn scale_shape(&self, end: &str, out: usize, n_out: usize) -> Result<usize, HfError> {
        let stored = self.part(end)?;
        match stored.shape[..] {
            [n] if out == 0 && n == n_out => Ok(1),
            [a, b] if [a, b][out] == n_out => Ok([a, b][1 - out]),
            _ => Err(self.wrong(end, stored, format!("one for each group of {n_out} outputs"))),
        }
    }

    /// Returns the group of each input that tensor `end` tells; `None` if it is absent, and groups
    /// are in order.
    fn group_of(&self, end: &str, n_in: usize, groups: usize) -> Result<Option<Vec<u32>>, HfError> {
        if !self.parts.contains_key(end) {
            return match n_in.is_multiple_of(groups) {
                true => Ok(None),
                false => Err(HfError::Shape {
                    name: self.full("weight"),
                    expected: format!("inputs in {groups} groups"),
                    got: vec![n_in],
                }),
            };
        }
        let stored = self.words(end)?;
        self.expect(end, stored, &[n_in])?;
        let group_of: Vec<u32> = order::words(&self.shards.data(stored)).collect();
        match group_of.iter().find(|group| **group as usize >= groups) {
            Some(group) => {
                let got = (*group as i32).to_string();
                Err(self.tensor(end, stored, TensorFault::Group { got, groups }))
            }
            None => Ok(Some(group_of)),
        }
    }

    pub fn matrix(&self, end: &str, stored: &Stored) -> Result<[usize; 2], HfError> {
        match stored.shape[..] {
            [a, b] => Ok([a, b]),
            _ => Err(self.wrong(end, stored, "a matrix".to_owned())),
        }
    }

    pub fn expect(&self, end: &str, stored: &Stored, shape: &[usize]) -> Result<(), HfError> {
        match stored.shape == shape {
            true => Ok(()),
            false => Err(self.wrong(end, stored, format!("{shape:?}"))),
        }
    }

    pub fn wrong(&self, end: &str, stored: &Stored, expected: String) -> HfError {
        HfError::Shape { name: self.full(end), expected, got: stored.shape.clone() }
    }

    pub fn wrong_type(&self, end: &str, stored: &Stored, expected: &'static str) -> HfError {
        let got = stored.holds.to_string();
        self.tensor(end, stored, TensorFault::Part { expected, got })
    }

    pub fn tensor(&self, end: &str, stored: &Stored, what: TensorFault) -> HfError {
        HfError::Tensor { path: self.shards.path(stored).to_owned(), name: self.full(end), what }
    }
}
