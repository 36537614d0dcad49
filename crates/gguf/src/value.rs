//! Metadata values: types, lazily read arrays, conversions.

use std::fmt;

use crate::cursor::Cursor;
use crate::error::Problem;

/// The type of a metadata value or array element.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ValueType {
    /// One byte.
    U8,
    /// One signed byte.
    I8,
    /// 16 bits.
    U16,
    /// 16 bits, signed.
    I16,
    /// 32 bits.
    U32,
    /// 32 bits, signed.
    I32,
    /// IEEE binary32.
    F32,
    /// One byte, 0 or 1.
    Bool,
    /// A length and bytes, UTF-8 by the specification.
    String,
    /// An element type, a count and the elements.
    Array,
    /// 64 bits.
    U64,
    /// 64 bits, signed.
    I64,
    /// IEEE binary64.
    F64,
}

impl ValueType {
    /// Every type, in the order of the ids.
    pub const ALL: [Self; 13] = [
        Self::U8,
        Self::I8,
        Self::U16,
        Self::I16,
        Self::U32,
        Self::I32,
        Self::F32,
        Self::Bool,
        Self::String,
        Self::Array,
        Self::U64,
        Self::I64,
        Self::F64,
    ];

    /// Returns the type of an id in a file.
    pub fn from_id(id: u32) -> Option<Self> {
        Self::ALL.get(id as usize).copied()
    }

    /// Returns the id in a file.
    pub fn id(self) -> u32 {
        self as u32
    }

    /// Returns the name, e.g. `u32` or `string`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::U8 => "u8",
            Self::I8 => "i8",
            Self::U16 => "u16",
            Self::I16 => "i16",
            Self::U32 => "u32",
            Self::I32 => "i32",
            Self::F32 => "f32",
            Self::Bool => "bool",
            Self::String => "string",
            Self::Array => "array",
            Self::U64 => "u64",
            Self::I64 => "i64",
            Self::F64 => "f64",
        }
    }

    /// Returns the bytes per value, `None` where values differ in length.
    pub const fn fixed_size(self) -> Option<usize> {
        match self {
            Self::U8 | Self::I8 | Self::Bool => Some(1),
            Self::U16 | Self::I16 => Some(2),
            Self::U32 | Self::I32 | Self::F32 => Some(4),
            Self::U64 | Self::I64 | Self::F64 => Some(8),
            Self::String | Self::Array => None,
        }
    }

    /// Returns the minimum bytes of a value: its size, a string's length, or an array's element
    /// type and count.
    pub(crate) fn min_size(self) -> usize {
        self.fixed_size().unwrap_or(if self == Self::String { 8 } else { 12 })
    }
}

impl fmt::Display for ValueType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A metadata value. Strings and arrays borrow the file's bytes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Value<'a> {
    /// A [`ValueType::U8`].
    U8(u8),
    /// A [`ValueType::I8`].
    I8(i8),
    /// A [`ValueType::U16`].
    U16(u16),
    /// A [`ValueType::I16`].
    I16(i16),
    /// A [`ValueType::U32`].
    U32(u32),
    /// A [`ValueType::I32`].
    I32(i32),
    /// A [`ValueType::F32`].
    F32(f32),
    /// A [`ValueType::Bool`].
    Bool(bool),
    /// A [`ValueType::String`]; may be invalid UTF-8, as tokens need not be UTF-8.
    String(&'a [u8]),
    /// A [`ValueType::Array`].
    Array(Array<'a>),
    /// A [`ValueType::U64`].
    U64(u64),
    /// A [`ValueType::I64`].
    I64(i64),
    /// A [`ValueType::F64`].
    F64(f64),
}

impl<'a> Value<'a> {
    /// Returns the type.
    pub fn value_type(&self) -> ValueType {
        match self {
            Self::U8(_) => ValueType::U8,
            Self::I8(_) => ValueType::I8,
            Self::U16(_) => ValueType::U16,
            Self::I16(_) => ValueType::I16,
            Self::U32(_) => ValueType::U32,
            Self::I32(_) => ValueType::I32,
            Self::F32(_) => ValueType::F32,
            Self::Bool(_) => ValueType::Bool,
            Self::String(_) => ValueType::String,
            Self::Array(_) => ValueType::Array,
            Self::U64(_) => ValueType::U64,
            Self::I64(_) => ValueType::I64,
            Self::F64(_) => ValueType::F64,
        }
    }

    /// Returns the value as an integer, if it is of an integer type.
    pub fn as_integer(&self) -> Option<i128> {
        Some(match *self {
            Self::U8(v) => v.into(),
            Self::I8(v) => v.into(),
            Self::U16(v) => v.into(),
            Self::I16(v) => v.into(),
            Self::U32(v) => v.into(),
            Self::I32(v) => v.into(),
            Self::U64(v) => v.into(),
            Self::I64(v) => v.into(),
            _ => return None,
        })
    }

    /// Appends the encoding of the value in files, without its type.
    pub fn encode(&self, out: &mut Vec<u8>) {
        match self {
            Self::U8(v) => out.push(*v),
            Self::I8(v) => out.extend(v.to_le_bytes()),
            Self::U16(v) => out.extend(v.to_le_bytes()),
            Self::I16(v) => out.extend(v.to_le_bytes()),
            Self::U32(v) => out.extend(v.to_le_bytes()),
            Self::I32(v) => out.extend(v.to_le_bytes()),
            Self::F32(v) => out.extend(v.to_le_bytes()),
            Self::Bool(v) => out.push((*v).into()),
            Self::String(v) => {
                out.extend((v.len() as u64).to_le_bytes());
                out.extend(*v);
            }
            Self::Array(v) => {
                out.extend(v.element.id().to_le_bytes());
                out.extend((v.len as u64).to_le_bytes());
                out.extend(v.payload);
            }
            Self::U64(v) => out.extend(v.to_le_bytes()),
            Self::I64(v) => out.extend(v.to_le_bytes()),
            Self::F64(v) => out.extend(v.to_le_bytes()),
        }
    }

    /// Reads a value of `value_type` at the cursor; `None` if the bytes are no such value.
    fn read(value_type: ValueType, cursor: &mut Cursor<'a>) -> Option<Self> {
        Some(match value_type {
            ValueType::U8 => Self::U8(u8::from_le_bytes(cursor.array().ok()?)),
            ValueType::I8 => Self::I8(i8::from_le_bytes(cursor.array().ok()?)),
            ValueType::U16 => Self::U16(u16::from_le_bytes(cursor.array().ok()?)),
            ValueType::I16 => Self::I16(i16::from_le_bytes(cursor.array().ok()?)),
            ValueType::U32 => Self::U32(u32::from_le_bytes(cursor.array().ok()?)),
            ValueType::I32 => Self::I32(i32::from_le_bytes(cursor.array().ok()?)),
            ValueType::F32 => Self::F32(f32::from_le_bytes(cursor.array().ok()?)),
            ValueType::Bool => Self::Bool(cursor.array::<1>().ok()? != [0]),
            ValueType::String => Self::String(cursor.string().ok()?),
            ValueType::Array => Self::Array(Array::read(cursor)?),
            ValueType::U64 => Self::U64(u64::from_le_bytes(cursor.array().ok()?)),
            ValueType::I64 => Self::I64(i64::from_le_bytes(cursor.array().ok()?)),
            ValueType::F64 => Self::F64(f64::from_le_bytes(cursor.array().ok()?)),
        })
    }

    /// Reads the value whose encoding is exactly `payload`, which `parse` has validated. An array
    /// is not traversed again.
    pub(crate) fn read_checked(value_type: ValueType, payload: &'a [u8]) -> Self {
        let mut cursor = Cursor::new(payload);
        let value = match value_type {
            ValueType::Array => Array::read_header(&mut cursor).map(|(element, len)| {
                Self::Array(Array { element, len, payload: &payload[cursor.index()..] })
            }),
            _ => Self::read(value_type, &mut cursor),
        };
        // Reached only with unvalidated bytes, when a file changes under its mapping.
        value.unwrap_or(Self::String(&[]))
    }

    /// Returns the type and, for a single number or bool, the value; for messages.
    pub(crate) fn describe(&self) -> String {
        match self {
            Self::F32(v) => format!("f32 {v}"),
            Self::F64(v) => format!("f64 {v}"),
            Self::Bool(v) => format!("bool {v}"),
            Self::String(_) => "a string".to_owned(),
            Self::Array(array) => format!("an array of {} {}", array.len, array.element),
            _ => format!("{} {}", self.value_type(), self.as_integer().unwrap_or_default()),
        }
    }
}

/// An array in a file's metadata: only its location; elements are decoded on iteration.
#[derive(Clone, Copy, PartialEq)]
pub struct Array<'a> {
    element: ValueType,
    len: usize,
    payload: &'a [u8],
}

impl fmt::Debug for Array<'_> {
    /// Prints type and count only; the elements may be a vocabulary.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "[{}; {}]", self.element, self.len)
    }
}

impl<'a> Array<'a> {
    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the type of the elements.
    pub fn element_type(&self) -> ValueType {
        self.element
    }

    /// Returns the elements in order.
    pub fn iter(&self) -> Elements<'a> {
        Elements { element: self.element, left: self.len, cursor: Cursor::new(self.payload) }
    }

    /// Reads the array at the cursor; traverses its payload to find the end.
    fn read(cursor: &mut Cursor<'a>) -> Option<Self> {
        let (element, len) = Self::read_header(cursor)?;
        let mut end = *cursor;
        match element.fixed_size() {
            Some(size) => drop(end.take(size.checked_mul(len)? as u64).ok()?),
            None => (0..len).try_for_each(|_| Value::read(element, &mut end).map(drop))?,
        }
        let payload = cursor.take(end.offset() - cursor.offset()).ok()?;
        Some(Self { element, len, payload })
    }

    fn read_header(cursor: &mut Cursor<'_>) -> Option<(ValueType, usize)> {
        Some((ValueType::from_id(cursor.u32().ok()?)?, usize::try_from(cursor.u64().ok()?).ok()?))
    }
}

impl<'a> IntoIterator for Array<'a> {
    type Item = Value<'a>;
    type IntoIter = Elements<'a>;

    fn into_iter(self) -> Elements<'a> {
        self.iter()
    }
}

/// The elements of an [`Array`].
#[derive(Clone, Copy)]
pub struct Elements<'a> {
    element: ValueType,
    left: usize,
    cursor: Cursor<'a>,
}

impl<'a> Iterator for Elements<'a> {
    type Item = Value<'a>;

    fn next(&mut self) -> Option<Value<'a>> {
        self.left = self.left.checked_sub(1)?;
        Value::read(self.element, &mut self.cursor)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.left, Some(self.left))
    }
}

/// The elements of an array of strings, as bytes: tokens need not be UTF-8.
#[derive(Clone, Copy)]
pub struct Strings<'a>(Elements<'a>);

impl<'a> Iterator for Strings<'a> {
    type Item = &'a [u8];

    fn next(&mut self) -> Option<&'a [u8]> {
        match self.0.next()? {
            Value::String(bytes) => Some(bytes),
            _ => None,
        }
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.0.size_hint()
    }
}

/// A type that metadata values convert to: see [`crate::Meta::get`].
///
/// Integers convert from every integer type whose value fits; `f32` and `f64` from both float
/// types; `&str` from a string of UTF-8, `&[u8]` from any string; [`Array`] from any array,
/// [`Strings`] from one of strings, and `Vec<T>` from one whose every element converts to `T`.
pub trait FromValue<'a>: Sized {
    /// Returns the name of the requested type, for messages.
    fn expected() -> String;

    /// Converts the value, if possible.
    fn from_value(value: Value<'a>) -> Option<Self>;
}

/// Returns [`FromValue`] as a result.
pub(crate) fn convert<'a, T: FromValue<'a>>(value: Value<'a>) -> Result<T, Problem> {
    T::from_value(value).ok_or_else(|| Problem::WrongType { expected: T::expected(), got: value.describe() })
}

macro_rules! integer_from_value {
    ($($t:ty),*) => {$(
        impl FromValue<'_> for $t {
            fn expected() -> String {
                stringify!($t).to_owned()
            }

            fn from_value(value: Value<'_>) -> Option<Self> {
                value.as_integer()?.try_into().ok()
            }
        }
    )*};
}
integer_from_value!(u8, i8, u16, i16, u32, i32, u64, i64, usize);

impl FromValue<'_> for f64 {
    fn expected() -> String {
        "f64".to_owned()
    }

    fn from_value(value: Value<'_>) -> Option<Self> {
        match value {
            Value::F32(v) => Some(v.into()),
            Value::F64(v) => Some(v),
            _ => None,
        }
    }
}

impl FromValue<'_> for f32 {
    fn expected() -> String {
        "f32".to_owned()
    }

    fn from_value(value: Value<'_>) -> Option<Self> {
        match value {
            Value::F32(v) => Some(v),
            Value::F64(v) => Some(v as f32),
            _ => None,
        }
    }
}

impl FromValue<'_> for bool {
    fn expected() -> String {
        "bool".to_owned()
    }

    fn from_value(value: Value<'_>) -> Option<Self> {
        match value {
            Value::Bool(v) => Some(v),
            _ => None,
        }
    }
}

impl<'a> FromValue<'a> for &'a [u8] {
    fn expected() -> String {
        "a string".to_owned()
    }

    fn from_value(value: Value<'a>) -> Option<Self> {
        match value {
            Value::String(v) => Some(v),
            _ => None,
        }
    }
}

impl<'a> FromValue<'a> for &'a str {
    fn expected() -> String {
        "a string of UTF-8".to_owned()
    }

    fn from_value(value: Value<'a>) -> Option<Self> {
        <&[u8]>::from_value(value).and_then(|v| std::str::from_utf8(v).ok())
    }
}

impl<'a> FromValue<'a> for Array<'a> {
    fn expected() -> String {
        "an array".to_owned()
    }

    fn from_value(value: Value<'a>) -> Option<Self> {
        match value {
            Value::Array(v) => Some(v),
            _ => None,
        }
    }
}

impl<'a> FromValue<'a> for Strings<'a> {
    fn expected() -> String {
        "an array of string".to_owned()
    }

    fn from_value(value: Value<'a>) -> Option<Self> {
        let array = Array::from_value(value)?;
        (array.element == ValueType::String).then(|| Self(array.iter()))
    }
}

impl<'a, T: FromValue<'a>> FromValue<'a> for Vec<T> {
    fn expected() -> String {
        format!("an array of {}", T::expected())
    }

    fn from_value(value: Value<'a>) -> Option<Self> {
        Array::from_value(value)?.into_iter().map(T::from_value).collect()
    }
}

/// A Rust type for elements of written metadata arrays: see [`crate::GgufWriter::set_array`].
pub trait Element<'a>: Into<Value<'a>> {
    /// The element type in the file.
    const TYPE: ValueType;
}

macro_rules! element {
    ($($t:ty: $variant:ident),*) => {$(
        impl<'a> From<$t> for Value<'a> {
            fn from(v: $t) -> Self {
                Self::$variant(v)
            }
        }

        impl<'a> Element<'a> for $t {
            const TYPE: ValueType = ValueType::$variant;
        }
    )*};
}
element!(u8: U8, i8: I8, u16: U16, i16: I16, u32: U32, i32: I32, f32: F32, bool: Bool, u64: U64, i64: I64, f64: F64);
element!(&'a [u8]: String);

impl<'a> From<&'a str> for Value<'a> {
    fn from(v: &'a str) -> Self {
        Self::String(v.as_bytes())
    }
}

impl<'a> Element<'a> for &'a str {
    const TYPE: ValueType = ValueType::String;
}

impl<'a> From<Array<'a>> for Value<'a> {
    fn from(v: Array<'a>) -> Self {
        Self::Array(v)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn type_ids_are_the_published_ones() {
        let names = ValueType::ALL.map(ValueType::name);
        let published =
            ["u8", "i8", "u16", "i16", "u32", "i32", "f32", "bool", "string", "array", "u64", "i64", "f64"];
        assert_eq!(names, published);
        for (id, t) in (0u32..).zip(ValueType::ALL) {
            assert_eq!((t.id(), ValueType::from_id(id)), (id, Some(t)));
        }
        assert_eq!(ValueType::from_id(13), None);
        assert_eq!(ValueType::from_id(u32::MAX), None);
    }

    #[test]
    fn integers_convert_exactly_when_they_fit() {
        assert_eq!(u32::from_value(Value::I8(7)), Some(7));
        assert_eq!(u32::from_value(Value::I8(-7)), None);
        assert_eq!(u8::from_value(Value::U64(255)), Some(255));
        assert_eq!(u8::from_value(Value::U64(256)), None);
        assert_eq!(i64::from_value(Value::U64(u64::MAX)), None);
        assert_eq!(u64::from_value(Value::U64(u64::MAX)), Some(u64::MAX));
        assert_eq!(u32::from_value(Value::F32(1.0)), None);
        assert_eq!(u32::from_value(Value::Bool(true)), None);
    }

    #[test]
    fn conversion_errors_name_what_was_expected_and_found() {
        let message = |e: Problem| e.to_string();
        assert_eq!(message(convert::<u32>(Value::I32(-3)).unwrap_err()), "expected u32, got i32 -3");
        assert_eq!(
            message(convert::<&str>(Value::F32(0.5)).unwrap_err()),
            "expected a string of UTF-8, got f32 0.5"
        );
        let array = Array { element: ValueType::F32, len: 2, payload: &[0; 8] };
        assert_eq!(
            message(convert::<Vec<u32>>(array.into()).unwrap_err()),
            "expected an array of u32, got an array of 2 f32"
        );
    }
}
