//! Hyper-parameters, weights, forward passes, tokenizer, chat template and sampler.
