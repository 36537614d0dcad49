//! Multi-head latent attention (MLA); [`Latent`] has the equations.

use kvant_backend::{Backend, Columns, Heads, Input, Output, RopeParams};

use super::{Activations, Branch, Decoder, Product, Residual, StepContext, StepRows, gate_heads, kv_entries};
use crate::weights::LatentAttention;
use crate::{Latent, ModelError};

impl<B: Backend> Decoder<B> {
    /// Computes `x += W_o V attention(K^T p | rope(t), c | r, c)`: projects queries into the latent
    /// space, and the attention output back.
    pub(super) fn attend_mla(
        &self,
        step: &mut StepContext<'_, '_, B>,
        index: usize,
        kv: usize,
        weights: &LatentAttention<B>,
    ) -> Result<(), ModelError> {
        let (layer, spec) = (&self.weights.layers[index], &self.layers()[index]);
        let latent = spec.latent.expect("a layer of latent attention");
        self.project_mla(step, index, latent, weights)?;
        self.select_tokens(step, index, kv, weights)?;
        let (backend, act, rows) = (step.backend, &mut *step.act, step.rows);
        let keys = StepRows { what: "keys", x: &act.k, width: spec.n_k(), n: rows };
        self.check_rows(backend, step.parts, index, keys)?;
        let (params, first_offset) = (spec.attend_params(), act.step_tile_offsets[kv]);
        let entries = &mut kv_entries(step.parts, kv, first_offset);
        backend.kv_append(entries, &act.k, &act.v, act.step_tiles.as_mut())?;
        match spec.index {
            Some(of) => self.attend_to_selected(step, index, kv, of, weights.sinks.as_ref())?,
            None => {
                let (sinks, step_tiles) = (weights.sinks.as_ref(), act.step_tiles.as_ref());
                backend.attend(&params, entries, &act.q, sinks, step_tiles, &mut act.attended)?
            }
        }
        let act = &mut *step.act;
        let heads = &mut act.q_without_rope;
        backend.project_per_expert(&act.attended, rows, &weights.from_latent, heads)?;
        let of_heads = Heads { n: rows * spec.heads.n_heads, dim: latent.v_dim };
        gate_heads(backend, spec.gate, heads, of_heads, &act.gates)?;
        let (w, low_rank) = (&weights.wo, weights.low_rank.output.as_ref());
        let branch = Branch { of: &act.q_without_rope, w, low_rank, bias: None, norm: &layer.attn_after };
        let Activations { x, spare, low, .. } = act;
        self.add(backend, branch, Residual { x, spare, low, rows })
    }

    /// Computes the queries, keys and values of layer `index`.
    fn project_mla(
        &self,
        step: &mut StepContext<'_, '_, B>,
        index: usize,
        latent: Latent,
        weights: &LatentAttention<B>,
    ) -> Result<(), ModelError> {
        let (backend, act, rows) = (step.backend, &mut *step.act, step.rows);
        let (layer, spec) = (&self.weights.layers[index], &self.layers()[index]);
        let (n_heads, Latent { rank, n_rot, .. }) = (spec.heads.n_heads, latent);
        let input =
            self.normed_input(backend, spec.norms.kind, &layer.attn_norm, &act.x, &mut act.spare, rows)?;
        let [plain, q_rope] = &weights.queries;
        let mut of_input =
            vec![output(&weights.latent, &mut act.v), output(&weights.k_rope, &mut act.k_rope)];
        match &weights.of_queries {
            None => {
                of_input.extend([output(plain, &mut act.q_without_rope), output(q_rope, &mut act.q_rope)]);
            }
            Some((w, _)) => of_input.push(output(w, &mut act.q_low_rank)),
        }
        of_input.extend(weights.gate.as_ref().map(|w| output(w, &mut act.gates)));
        if let Some(of) = &weights.index {
            let [key, _] = &mut act.index_k;
            of_input.extend([output(&of.key, key), output(&of.heads, &mut act.index_heads)]);
        }
        let product = Product { input, low_rank: weights.low_rank.input.as_ref() };
        self.project(backend, product, &mut of_input, &mut act.low)?;
        if let Some((_, norm)) = &weights.of_queries {
            let norm = Some(self.normed(norm));
            let input = Input { x: &act.q_low_rank, norm, first_row: 0, rows };
            let product = Product { input, low_rank: weights.low_rank.queries.as_ref() };
            let mut queries = vec![output(plain, &mut act.q_without_rope), output(q_rope, &mut act.q_rope)];
            queries.extend(weights.index.as_ref().map(|of| output(&of.queries, &mut act.index_q)));
            self.project(backend, product, &mut queries, &mut act.low)?;
        }
        let (rope, angles) = (self.config.ropes[spec.rope].params, &act.angles[spec.rope].0);
        let norm = Some(self.normed(&weights.latent_norm));
        // Norm of one head as wide as the latent vector, without rotation.
        backend.rope(
            &mut act.v,
            rows,
            Heads { n: 1, dim: rank },
            norm,
            RopeParams { n_rot: 0, ..rope },
            angles,
        )?;
        let key_norm = weights.k_rope_norm.as_ref().map(|norm| self.normed(norm));
        for (x, n, norm) in [(&mut act.q_rope, n_heads, None), (&mut act.k_rope, 1, key_norm)] {
            backend.rope(x, rows, Heads { n, dim: n_rot }, norm, rope, angles)?;
        }
        backend.project_per_expert(&act.q_without_rope, rows, &weights.to_latent, &mut act.attended)?;
        let [front, behind] = [0, rank].map(|first| Columns { width: rank + n_rot, first });
        backend.copy_columns(&act.v, [rows, rank], &mut act.k, front)?;
        backend.copy_columns(&act.k_rope, [rows, n_rot], &mut act.k, behind)?;
        backend.copy_columns(&act.attended, [rows * n_heads, rank], &mut act.q, front)?;
        backend.copy_columns(&act.q_rope, [rows * n_heads, n_rot], &mut act.q, behind)?;
        if spec.q_rope == spec.rope {
            return Ok(());
        }
        // Scores grow with the position.
        let (grows, angles) = (self.config.ropes[spec.q_rope].params, &act.angles[spec.q_rope].0);
        let heads = Heads { n: n_heads, dim: rank + n_rot };
        Ok(backend.rope(&mut act.q, rows, heads, None, grows, angles)?)
    }
}

/// Describes `y = w x`.
pub(super) fn output<'a, B: Backend>(w: &'a B::Matrix, y: &'a mut B::Buffer) -> Output<'a, B> {
    Output { w, bias: None, y, accumulate: false }
}
