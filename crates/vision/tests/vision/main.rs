//! Vision encoders against `transformers`, and hostile files.

mod golden;
mod hostile;
