//! Memory: what is written is read, where it was written, and nothing is read or written beyond.

use kvant_backend::Backend;

use crate::Subject;
use crate::judge::{Want, assert_close};
use crate::weights::gaussian;

/// Holds a device's memory to its promises.
pub fn run<B: Backend>(subject: &Subject<B>) {
    for len in [0, 1, 15, 16, 17, 1000] {
        a_new_buffer_is_zero(subject, len);
        what_is_written_is_read(subject, len);
        a_copy_starts_where_it_says(subject, len);
    }
    what_does_not_fit_is_refused(subject);
}

fn exactly(values: &[f32]) -> Vec<Want> {
    values.iter().copied().map(Want::exactly).collect()
}

fn a_new_buffer_is_zero<B: Backend>(subject: &Subject<B>, len: usize) {
    let buffer = subject.device().buffer(len).expect("memory for a test");
    let what = || subject.case("buffer", format_args!("{len} values"));
    assert_close(&subject.download(&buffer, len), &vec![Want::exactly(0.0); len], &what);
}

fn what_is_written_is_read<B: Backend>(subject: &Subject<B>, len: usize) {
    let (old, new) = (gaussian(1, len, 1.0), gaussian(2, len / 2, 1.0));
    let mut buffer = subject.guarded(&old);
    subject.device().write(&mut buffer, &new).expect("half of it fits");
    let whole = [&new[..], &old[len / 2..]].concat();
    let what = || subject.case("write", format_args!("{} of {len} values", len / 2));
    subject.expect(&buffer, &exactly(&whole), &what);
    for offset in [0, len / 3, len] {
        let mut got = vec![f32::NAN; len - offset];
        subject.device().read(&buffer, offset, &mut got).expect("it is there");
        let what = || subject.case("read", format_args!("{len} values from {offset}"));
        assert_close(&got, &exactly(&whole[offset..]), &what);
    }
}

fn a_copy_starts_where_it_says<B: Backend>(subject: &Subject<B>, len: usize) {
    let values = gaussian(3, len, 1.0);
    let source = subject.upload(&values);
    for (offset, n) in [(0, len), (len / 3, len / 3), (len, 0)] {
        let mut target = subject.poisoned(n);
        subject.device().copy(&source, offset, &mut target, n).expect("it is there, and fits");
        let what = || subject.case("copy", format_args!("{n} of {len} values from {offset}"));
        subject.expect(&target, &exactly(&values[offset..offset + n]), &what);
    }
}

fn what_does_not_fit_is_refused<B: Backend>(subject: &Subject<B>) {
    let device = subject.device();
    let (source, mut target) = (subject.upload(&[1.0; 8]), subject.upload(&[2.0; 4]));
    let refused = |op, case, result| subject.expect_refusal::<()>(op, case, result);
    refused("write", "5 values to 4", device.write(&mut target, &[0.0; 5]));
    refused("read", "2 values at 7 of 8", device.read(&source, 7, &mut [0.0; 2]));
    refused("read", "at an offset that overflows", device.read(&source, usize::MAX, &mut [0.0; 2]));
    refused("copy", "2 values at 7 of 8", device.copy(&source, 7, &mut target, 2));
    refused("copy", "5 values to 4", device.copy(&source, 0, &mut target, 5));
    refused("copy", "from an offset that overflows", device.copy(&source, usize::MAX, &mut target, 2));
}
