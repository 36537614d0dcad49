//! The gate of a gated feed-forward layer: `a(g) * u`, `a(g) = g / (1 + exp(-z))` with the z of the
//! [`Activation`], with bounds where it has some; ReLU; GELU's quotient alone; or SiTU.

use kvant_backend::Activation;

use crate::ops::exp::{exp, tanh_of_half};

/// Computes `u *= a(g)` for each value.
#[inline(always)]
pub(crate) fn gate(activation: Activation, g: &[f32], u: &mut [f32]) {
    match activation {
        Activation::Silu => {
            for (u, g) in u.iter_mut().zip(g) {
                *u *= g / (1.0 + exp(-g));
            }
        }
        Activation::Gelu => {
            let [a, b] = Activation::GELU;
            for (u, g) in u.iter_mut().zip(g) {
                *u *= g / (1.0 + exp(-(g * (a + b * (g * g)))));
            }
        }
        Activation::Bounded => {
            let [rate, limit] = Activation::BOUNDED;
            for (u, g) in u.iter_mut().zip(g) {
                // `clamp` keeps a NaN.
                let g = g.clamp(f32::NEG_INFINITY, limit);
                *u = (1.0 + u.clamp(-limit, limit)) * (g / (1.0 + exp(-(rate * g))));
            }
        }
        Activation::Relu => {
            for (u, g) in u.iter_mut().zip(g) {
                // `max` would turn a NaN into a number.
                *u *= if *g < 0.0 { 0.0 } else { *g };
            }
        }
        Activation::NormalCdf => {
            let [a, b] = Activation::GELU;
            for (u, g) in u.iter_mut().zip(g) {
                *u /= 1.0 + exp(-(g * (a + b * (g * g))));
            }
        }
        Activation::Limited { limit } => {
            for (u, g) in u.iter_mut().zip(g) {
                let gate = (g / (1.0 + exp(-g))).clamp(f32::NEG_INFINITY, limit);
                *u = u.clamp(-limit, limit) * gate;
            }
        }
        Activation::Clamped { limit } => {
            for (u, g) in u.iter_mut().zip(g) {
                let g = g.clamp(f32::NEG_INFINITY, limit);
                *u = u.clamp(-limit, limit) * (g / (1.0 + exp(-g)));
            }
        }
        Activation::Situ { limit, up_limit } => {
            if let Some(limit) = up_limit {
                let rate = 2.0 / limit;
                u.iter_mut().for_each(|u| *u = limit * tanh_of_half(*u * rate));
            }
            let rate = 2.0 / limit;
            for (u, g) in u.iter_mut().zip(g) {
                *u *= limit * tanh_of_half(g * rate) / (1.0 + exp(-g));
            }
        }
    }
}

/// Computes `u *= a(u)` for each value.
pub(super) fn ungated(activation: Activation, u: &mut [f32]) {
    for u in u.chunks_mut(16) {
        let mut g = [0.0; 16];
        g[..u.len()].copy_from_slice(u);
        gate(activation, &g, u);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gates_propagate_nan_and_are_the_identity_or_zero_at_extremes() {
        for activation in [Activation::Silu, Activation::Gelu] {
            let mut u = [1.0; 5];
            gate(activation, &[f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 200.0, -200.0], &mut u);
            assert!(u[0].is_nan() && u[1] == f32::INFINITY && !(u[2].abs() > 1e38 && u[2] > 0.0));
            assert_eq!(u[3], 200.0);
            assert!(u[4].abs() <= 1e-30);
        }
    }

    #[test]
    fn an_ungated_relu_squares_positive_values() {
        let mut u: Vec<f32> = (0..37).map(|i| i as f32 - 18.0).collect();
        u[3] = f32::NAN;
        ungated(Activation::Relu, &mut u);
        for (i, u) in u.into_iter().enumerate() {
            let x = (i as f32 - 18.0).max(0.0);
            assert!(if i == 3 { u.is_nan() } else { u == x * x }, "{i}: {u}");
        }
    }

    #[test]
    fn bounds_hold_and_nan_stays_nan() {
        let (g, max) = ([f32::NAN, 200.0, 7.0, 1.0, 1.0, 1.0, -200.0], 7.0);
        let mut u = [1.0, 200.0, 7.0, -200.0, -7.0, f32::NAN, 1.0];
        gate(Activation::Bounded, &g, &mut u);
        assert!(u[0].is_nan() && u[5].is_nan(), "{u:?}");
        assert!(u[1] == u[2] && (u[1] - 8.0 * max).abs() <= 1e-3, "{u:?}");
        assert!(u[3] == u[4] && u[3] < 0.0 && u[6].abs() <= 1e-30, "{u:?}");
        let mut u = [1.0, 200.0, 7.0, -200.0, -7.0, f32::NAN, 1.0];
        gate(Activation::Limited { limit: max }, &[f32::NAN, 200.0, 8.0, 1.0, 1.0, 1.0, -200.0], &mut u);
        assert!(u[0].is_nan() && u[5].is_nan(), "{u:?}");
        assert!(u[1] == max * max && u[2] == u[1] && u[3] == u[4] && u[6].abs() <= 1e-30, "{u:?}");
        let mut u = [1.0, 200.0, 7.0, -200.0, -7.0, f32::NAN, 1.0];
        gate(Activation::Clamped { limit: max }, &g, &mut u);
        assert!(u[0].is_nan() && u[5].is_nan(), "{u:?}");
        assert!((u[1] - 48.955).abs() <= 1e-3 && u[2] == u[1] && u[3] == u[4], "{u:?}");
        assert!(u[6].abs() <= 1e-30, "{u:?}");
    }

    #[test]
    fn situ_approaches_its_limits_and_nan_stays_nan() {
        let situ = |up_limit| Activation::Situ { limit: 3.0, up_limit };
        let g = [f32::NAN, 1e30, 200.0, 1.0, 1.0, 1.0, -200.0];
        let mut u = [1.0, 1e30, 200.0, -200.0, -1e30, f32::NAN, 1.0];
        gate(situ(Some(2.0)), &g, &mut u);
        assert!(u[0].is_nan() && u[5].is_nan(), "{u:?}");
        assert!(u[1] == 6.0 && u[2] == 6.0 && u[3] == u[4] && u[6].abs() <= 1e-30, "{u:?}");
        let mut u = [f32::NAN, 200.0, -200.0];
        gate(situ(None), &[1.0, 200.0, 200.0], &mut u);
        assert!(u[0].is_nan() && u[1] == 600.0 && u[2] == -600.0, "{u:?}");
    }
}
