//! Finds the fastest attention variants of an adapter by measurement.
//!
//! The workload is attention of one token over 8,192 others, as in decoding, for a type of each
//! class. First combinations of look-ups and words are timed, since both need registers; then the
//! fastest of these with more queries, whose kernels take long to compile.

use kvant_backend::Result;
use kvant_backend::autotune::{fastest, median};
use kvant_codec::DType;

use super::work::AttendWork;
use super::{AttendVariant, CodebookLookup, TypeClass};
use crate::WgpuDevice;

/// A timed variant.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttendTrial {
    /// The class of types it was timed for.
    pub class: TypeClass,
    /// The variant.
    pub variant: AttendVariant,
    /// Seconds of attention in one layer: the median of the rounds.
    pub seconds: f64,
    /// Whether it was selected.
    pub is_taken: bool,
}

/// Size of the measurement.
#[derive(Debug, Clone, Copy)]
struct Effort {
    tokens: usize,
    /// Rounds, in which candidates take turns.
    rounds: usize,
    /// Layers per measurement, so that submission has as little weight as in a model.
    layers: usize,
}

const EFFORT: Effort = Effort { tokens: 8192, rounds: 7, layers: 4 };

impl WgpuDevice {
    /// Times the attention variants that this adapter supports, and selects the fastest of each
    /// class; another than the default only if it is clearly faster. Takes a minute or more.
    /// `progress` receives the completed fraction.
    ///
    /// # Errors
    /// Too little memory, or a kernel that the driver does not compile.
    pub fn tune(&mut self, progress: &mut dyn FnMut(f32)) -> Result<Vec<AttendTrial>> {
        let counts = TypeClass::ALL.map(|class| self.candidates(class).len() + AttendVariant::QUERIES.len());
        let (mut trials, mut done, total) = (Vec::new(), 0.0, counts.iter().sum::<usize>() as f32);
        for class in TypeClass::ALL {
            let mut compiled = || {
                done += 1.0;
                progress(done / total);
            };
            let candidates = self.candidates(class);
            trials.extend(self.try_ways(class, &candidates, EFFORT, &mut compiled)?);
            let best = self.way(class);
            let others = AttendVariant::QUERIES.into_iter().filter(|&queries| queries != best.queries);
            let candidates: Vec<_> =
                [best].into_iter().chain(others.map(|queries| AttendVariant { queries, ..best })).collect();
            // The best one so far already has an entry.
            let trials_of_others =
                self.try_ways(class, &candidates, EFFORT, &mut compiled)?.into_iter().skip(1);
            trials.extend(trials_of_others);
        }
        for trial in &mut trials {
            trial.is_taken = trial.variant == self.way(trial.class);
        }
        Ok(trials)
    }

    /// Returns the current variant, then every other with the same number of queries. Floats and
    /// integers have no look-ups.
    fn candidates(&self, class: TypeClass) -> Vec<AttendVariant> {
        let selected = self.way(class);
        let look_ups = CodebookLookup::ALL
            .into_iter()
            .filter(|look_ups| class == TypeClass::Codebooks || *look_ups == selected.look_ups);
        let all = look_ups.flat_map(|look_ups| {
            AttendVariant::WORDS.into_iter().map(move |words| AttendVariant { look_ups, words, ..selected })
        });
        let others = all.filter(|way| *way != selected && way.check(self.report()).is_ok());
        [selected].into_iter().chain(others).collect()
    }

    /// Times candidates, the first of which is the default, and selects the fastest. `compiled` is
    /// called after the first round of each.
    fn try_ways(
        &mut self,
        class: TypeClass,
        candidates: &[AttendVariant],
        Effort { tokens, rounds, layers }: Effort,
        compiled: &mut dyn FnMut(),
    ) -> Result<Vec<AttendTrial>> {
        let dtype = match class {
            TypeClass::Floats => DType::F16,
            TypeClass::Integers => DType::Q8_0,
            TypeClass::Codebooks => DType::Turbo3,
        };
        let mut work = AttendWork::new(self, [dtype; 2], tokens, 1)?;
        for way in candidates {
            self.set_way(class, *way)?;
            work.seconds(self, None, 1)?;
            compiled();
        }
        let mut seconds = vec![Vec::new(); candidates.len()];
        for _ in 0..rounds {
            for (index, way) in candidates.iter().enumerate() {
                self.set_way(class, *way)?;
                seconds[index].push(work.seconds(self, None, layers)? / layers as f64);
            }
        }
        let selected = candidates[fastest(&seconds, 0)];
        self.set_way(class, selected)?;
        let trials = candidates.iter().zip(seconds).map(|(&way, seconds)| AttendTrial {
            class,
            variant: way,
            seconds: median(seconds),
            is_taken: way == selected,
        });
        Ok(trials.collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::device;

    #[test]
    fn candidates_are_supported_variants_default_first() {
        let Some(device) = device() else { return };
        for class in TypeClass::ALL {
            let candidates = device.candidates(class);
            assert_eq!(candidates[0], device.way(class));
            assert!(candidates.iter().all(|way| way.check(device.report()).is_ok()), "{candidates:?}");
            let n_look_ups = match class {
                TypeClass::Codebooks => {
                    CodebookLookup::ALL.len() - usize::from(!device.report().has_subgroups)
                }
                _ => 1,
            };
            assert_eq!(candidates.len(), n_look_ups * AttendVariant::WORDS.len());
            let again = (1..).zip(&candidates).any(|(next, way)| candidates[next..].contains(way));
            assert!(!again, "a candidate twice: {candidates:?}");
        }
    }

    #[test]
    fn the_fastest_trial_is_selected_for_its_class_only() {
        let Some(mut device) = device() else { return };
        let before = TypeClass::ALL.map(|class| device.way(class));
        let default = device.way(TypeClass::Codebooks);
        let candidates = AttendVariant::WORDS.map(|words| AttendVariant { words, ..default });
        let effort = Effort { tokens: 256, rounds: 3, layers: 2 };
        let mut compiled = 0;
        let trials =
            device.try_ways(TypeClass::Codebooks, &candidates, effort, &mut || compiled += 1).unwrap();
        assert_eq!(compiled, candidates.len());
        assert_eq!(trials.iter().map(|trial| trial.variant).collect::<Vec<_>>(), candidates);
        assert!(
            trials.iter().all(|trial| trial.seconds > 0.0 && trial.class == TypeClass::Codebooks),
            "{trials:?}"
        );
        let selected: Vec<_> =
            trials.iter().filter(|trial| trial.is_taken).map(|trial| trial.variant).collect();
        assert_eq!(selected, [device.way(TypeClass::Codebooks)]);
        assert_eq!(
            TypeClass::ALL[..2].iter().map(|&class| device.way(class)).collect::<Vec<_>>(),
            before[..2]
        );
    }
}
