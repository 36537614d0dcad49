//! The NVIDIA driver as a [`Gpu`](crate::Gpu).
