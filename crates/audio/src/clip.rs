//! Audio clips: decoding to mono samples.

use std::io::Cursor;

use symphonia::core::audio::GenericAudioBufferRef;
use symphonia::core::codecs::audio::AudioDecoderOptions;
use symphonia::core::errors::Error as DecoderError;
use symphonia::core::formats::probe::Hint;
use symphonia::core::formats::{FormatOptions, TrackType};
use symphonia::core::io::MediaSourceStream;
use symphonia::core::meta::MetadataOptions;

use crate::AudioError;
use crate::resample::resampled;

/// Samples per second of a clip.
pub const SAMPLE_RATE: usize = 16_000;

/// Supported sampling rates of files, in Hz.
const RATES: std::ops::RangeInclusive<u32> = 4_000..=384_000;
/// Maximum number of channels.
const MAX_CHANNELS: usize = 32;
/// Maximum duration in seconds: the longest audio that Voxtral's authors report (arXiv 2507.13264).
const MAX_SECONDS: usize = 40 * 60;
/// Maximum samples per channel before resampling, which bounds the memory of high rates.
const MAX_SAMPLES: usize = 1 << 27;
/// Maximum magnitude of a sample. Full scale is 1; some writers store the range of 16-bit integers.
const MAX_MAGNITUDE: f32 = 32_768.0;

/// Mono audio at [`SAMPLE_RATE`] in memory.
#[derive(Clone, PartialEq)]
pub struct AudioClip {
    samples: Vec<f32>,
}

impl AudioClip {
    /// Decodes a WAV, MP3, FLAC or Ogg Vorbis file, averages its channels and resamples it to
    /// [`SAMPLE_RATE`].
    ///
    /// # Errors
    /// Bytes that are not audio or are damaged, samples that are not finite, and audio that is
    /// empty, longer than 40 minutes, or of an unsupported rate or number of channels.
    pub fn decode(bytes: &[u8]) -> Result<Self, AudioError> {
        let source = MediaSourceStream::new(Box::new(Cursor::new(bytes)), Default::default());
        let mut reader = symphonia::default::get_probe()
            .probe(&Hint::new(), source, FormatOptions::default(), MetadataOptions::default())
            .map_err(broken)?;
        let no_track = || AudioError::Audio { why: "a file without an audio track".to_owned() };
        let track = reader.default_track(TrackType::Audio).ok_or_else(no_track)?;
        let params = track.codec_params.as_ref().and_then(|params| params.audio()).ok_or_else(no_track)?;
        let mut decoder = symphonia::default::get_codecs()
            .make_audio_decoder(params, &AudioDecoderOptions::default())
            .map_err(broken)?;
        let track = track.id;
        let mut mono = MonoMix::default();
        while let Some(packet) = reader.next_packet().map_err(broken)? {
            if packet.track_id == track {
                mono.add(&decoder.decode(&packet).map_err(broken)?)?;
            }
        }
        Self::from_samples(&mono.samples, mono.rate)
    }

    /// Creates a clip of mono samples, full scale being 1, at `rate` Hz.
    ///
    /// # Errors
    /// As [`decode`](Self::decode).
    pub fn from_samples(samples: &[f32], rate: u32) -> Result<Self, AudioError> {
        check_length(samples.len(), rate)?;
        check_rate(rate)?;
        // NaN fails.
        let is_sound = |x: &f32| x.abs() <= MAX_MAGNITUDE;
        if let Some(sample) = samples.iter().find(|x| !is_sound(x)) {
            let expected = format!("finite ones up to {MAX_MAGNITUDE}");
            return Err(AudioError::Range { what: "samples", expected, got: sample.to_string() });
        }
        Ok(Self { samples: resampled(samples, rate as usize)? })
    }

    /// Returns the samples.
    pub fn samples(&self) -> &[f32] {
        &self.samples
    }

    /// Returns the duration in seconds.
    pub fn seconds(&self) -> f64 {
        self.samples.len() as f64 / SAMPLE_RATE as f64
    }
}

impl std::fmt::Debug for AudioClip {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "AudioClip {{ {:.3} s }}", self.seconds())
    }
}

/// The average of all channels of the packets so far.
#[derive(Default)]
struct MonoMix {
    samples: Vec<f32>,
    /// Samples per second; 0 before the first packet.
    rate: u32,
    /// `[frames, channels]` of one packet.
    interleaved: Vec<f32>,
}

impl MonoMix {
    /// Appends a packet.
    fn add(&mut self, packet: &GenericAudioBufferRef<'_>) -> Result<(), AudioError> {
        let (rate, n_channels) = (packet.spec().rate(), packet.spec().channels().count());
        if self.rate == 0 {
            check_rate(rate)?;
            self.rate = rate;
        }
        if rate != self.rate {
            let (expected, got) = (format!("{} Hz throughout", self.rate), format!("{rate} Hz"));
            return Err(AudioError::Range { what: "rate", expected, got });
        }
        if !(1..=MAX_CHANNELS).contains(&n_channels) {
            let (expected, got) = (format!("1 to {MAX_CHANNELS}"), n_channels.to_string());
            return Err(AudioError::Range { what: "channels", expected, got });
        }
        packet.copy_to_vec_interleaved(&mut self.interleaved);
        let frames = self.interleaved.chunks_exact(n_channels);
        self.samples.extend(frames.map(|frame| frame.iter().sum::<f32>() / n_channels as f32));
        if self.samples.is_empty() { Ok(()) } else { check_length(self.samples.len(), rate) }
    }
}

fn broken(error: DecoderError) -> AudioError {
    AudioError::Audio { why: error.to_string() }
}

fn check_rate(rate: u32) -> Result<(), AudioError> {
    if RATES.contains(&rate) {
        return Ok(());
    }
    let expected = format!("{} to {} Hz", RATES.start(), RATES.end());
    Err(AudioError::Range { what: "rate", expected, got: format!("{rate} Hz") })
}

fn check_length(n_samples: usize, rate: u32) -> Result<(), AudioError> {
    let max = (MAX_SECONDS * rate as usize).min(MAX_SAMPLES);
    if (1..=max).contains(&n_samples) {
        return Ok(());
    }
    let expected = format!("1 to {max} samples per channel ({} minutes at most)", MAX_SECONDS / 60);
    let got = if n_samples == 0 { "0" } else { "more" }.to_owned();
    Err(AudioError::Range { what: "length", expected, got })
}
