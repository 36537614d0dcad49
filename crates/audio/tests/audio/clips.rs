//! Decoding of audio files.

use kvant_audio::AudioClip;

use super::clip_file;

#[test]
fn lossless_formats_decode_to_equal_samples() {
    let [wav, flac] = ["clip.wav", "clip.flac"].map(|name| AudioClip::decode(&clip_file(name)).unwrap());
    assert_eq!(wav.samples().len(), 11_701);
    assert!(wav == flac);
    let largest = wav.samples().iter().fold(0f32, |max, x| max.max(x.abs()));
    assert!(0.3 < largest && largest < 0.6, "{largest}");
}

/// The other channel is half as loud: mono has three quarters of the amplitude.
#[test]
fn lossy_formats_are_mixed_and_resampled() {
    let clip = AudioClip::decode(&clip_file("clip.wav")).unwrap();
    for (name, max_error) in [("stereo.mp3", 0.15), ("stereo.ogg", 0.25)] {
        let lossy = AudioClip::decode(&clip_file(name)).unwrap();
        assert!(lossy.samples().len().abs_diff(11_701) <= 16, "{name}: {} samples", lossy.samples().len());
        let energy = |x: &dyn Fn(usize) -> f32| (500..11_000).map(|i| x(i).powi(2)).sum::<f32>().sqrt();
        let off = energy(&|i| lossy.samples()[i] - 0.75 * clip.samples()[i]);
        let error = off / energy(&|i| 0.75 * clip.samples()[i]);
        eprintln!("{name}: {error}");
        assert!(error <= max_error, "{name}: {error}");
    }
}
