//! Encoders of images beside `transformers`, and with hostile files.

mod golden;
mod hostile;
