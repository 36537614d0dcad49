//! Lists in llama-bench's syntax: `1,2,3`, `first-last`, `first-last+step`, `first-last*factor`.

use kvant::DType;

use crate::args::value::kv_type;

/// Numbers of a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Numbers(pub Vec<usize>);

/// Types of a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Types(pub Vec<DType>);

/// Maximum count of numbers in a range.
const LIMIT: usize = 1000;

/// Parses a list of numbers and ranges.
pub fn numbers(text: &str) -> Result<Numbers, String> {
    text.split(',').map(range).collect::<Result<Vec<_>, _>>().map(|ranges| Numbers(ranges.concat()))
}

/// Parses a list of KV types.
pub fn types(text: &str) -> Result<Types, String> {
    text.split(',').map(kv_type).collect::<Result<_, _>>().map(Types)
}

fn range(text: &str) -> Result<Vec<usize>, String> {
    let number = |text: &str| text.parse::<usize>().map_err(|_| format!("expected a number, got '{text}'"));
    let Some((first, rest)) = text.split_once('-') else { return Ok(vec![number(text)?]) };
    let (last, next): (&str, Box<dyn Fn(usize) -> usize>) = if let Some((last, step)) = rest.split_once('+') {
        let step = number(step)?;
        (last, Box::new(move |n| n.saturating_add(step)))
    } else if let Some((last, factor)) = rest.split_once('*') {
        let factor = number(factor)?;
        (last, Box::new(move |n| n.saturating_mul(factor)))
    } else {
        (rest, Box::new(|n| n.saturating_add(1)))
    };
    let (first, last) = (number(first)?, number(last)?);
    let mut numbers = Vec::new();
    let mut n = first;
    while n <= last {
        numbers.push(n);
        if next(n) <= n || numbers.len() > LIMIT {
            return Err(format!("'{text}' is not a range of up to {LIMIT} increasing numbers"));
        }
        n = next(n);
    }
    Ok(numbers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_and_ranges_parse_as_in_llama_bench() {
        assert_eq!(numbers("512").unwrap().0, [512]);
        assert_eq!(numbers("0,4096").unwrap().0, [0, 4096]);
        assert_eq!(numbers("1-4").unwrap().0, [1, 2, 3, 4]);
        assert_eq!(numbers("128-512+128,7").unwrap().0, [128, 256, 384, 512, 7]);
        assert_eq!(numbers("128-1024*2").unwrap().0, [128, 256, 512, 1024]);
        for bad in ["", "x", "1-", "1-5+0", "0-5*2", "1-9999999"] {
            assert!(numbers(bad).is_err(), "{bad:?}");
        }
    }
}
