//! What a device must do: op traits, tensor and KV views, parameters and errors.
