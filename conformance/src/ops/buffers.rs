//! Memory: reads return what was written, at the same offsets, and other bytes stay unchanged.

use kvant_backend::Backend;

use crate::DeviceUnderTest;
use crate::judge::{Expected, assert_close};
use crate::weights::gaussian;

/// Checks a device's buffers.
pub fn run<B: Backend>(subject: &DeviceUnderTest<B>) {
    for len in [0, 1, 15, 16, 17, 1000] {
        a_new_buffer_is_zero(subject, len);
        what_is_written_is_read(subject, len);
        a_copy_lands_where_it_says_and_nowhere_else(subject, len);
    }
    what_does_not_fit_is_refused(subject);
}

fn exactly(values: &[f32]) -> Vec<Expected> {
    values.iter().copied().map(Expected::exactly).collect()
}

fn a_new_buffer_is_zero<B: Backend>(subject: &DeviceUnderTest<B>, len: usize) {
    let buffer = subject.device().buffer(len).expect("memory for a test");
    let what = || subject.case("buffer", format_args!("{len} values"));
    assert_close(&subject.download(&buffer, len), &vec![Expected::exactly(0.0); len], &what);
}

fn what_is_written_is_read<B: Backend>(subject: &DeviceUnderTest<B>, len: usize) {
    let (old, new) = (gaussian(1, len, 1.0), gaussian(2, len / 2, 1.0));
    let mut buffer = subject.guarded(&old);
    subject.device().write(&mut buffer, &new).expect("half of it fits");
    let expected = [&new[..], &old[len / 2..]].concat();
    let what = || subject.case("write", format_args!("{} of {len} values", len / 2));
    subject.expect(&buffer, &exactly(&expected), &what);
    for offset in [0, len / 3, len] {
        let mut got = vec![f32::NAN; len - offset];
        subject.device().read(&buffer, offset, &mut got).expect("it is there");
        let what = || subject.case("read", format_args!("{len} values from {offset}"));
        assert_close(&got, &exactly(&expected[offset..]), &what);
    }
}

fn a_copy_lands_where_it_says_and_nowhere_else<B: Backend>(subject: &DeviceUnderTest<B>, len: usize) {
    let (values, old) = (gaussian(3, len, 1.0), gaussian(4, len, 1.0));
    let source = subject.upload(&values);
    for (from, to, n) in
        [(0, 0, len), (len / 3, 0, len / 3), (0, len / 2, len / 3), (len / 3, len / 2, len / 3)]
            .into_iter()
            .chain([(len, 0, 0), (0, len, 0), (len, len, 0)])
    {
        let mut target = subject.guarded(&old);
        subject.device().copy(&source, from, &mut target, to, n).expect("it is there, and fits");
        let want = [&old[..to], &values[from..from + n], &old[to + n..]].concat();
        let what = || subject.case("copy", format_args!("{n} of {len} values from {from} to {to}"));
        subject.expect(&target, &exactly(&want), &what);
        assert_close(&subject.download(&source, len), &exactly(&values), &what);
    }
}

fn what_does_not_fit_is_refused<B: Backend>(subject: &DeviceUnderTest<B>) {
    let device = subject.device();
    let (source, mut target) = (subject.upload(&[1.0; 8]), subject.upload(&[2.0; 4]));
    let refused = |op, case, result| subject.expect_refusal::<()>(op, case, result);
    refused("write", "5 values to 4", device.write(&mut target, &[0.0; 5]));
    refused("read", "2 values at 7 of 8", device.read(&source, 7, &mut [0.0; 2]));
    refused("read", "at an offset that overflows", device.read(&source, usize::MAX, &mut [0.0; 2]));
    refused("copy", "2 values from 7 of 8", device.copy(&source, 7, &mut target, 0, 2));
    refused("copy", "5 values to 4", device.copy(&source, 0, &mut target, 0, 5));
    refused("copy", "2 values to 3 of 4", device.copy(&source, 0, &mut target, 3, 2));
    refused("copy", "from an offset that overflows", device.copy(&source, usize::MAX, &mut target, 0, 2));
    refused("copy", "to an offset that overflows", device.copy(&source, 0, &mut target, usize::MAX, 2));
}
