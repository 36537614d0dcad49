//! Block formats, codebooks and rotations of the Kvant inference engine: pure maths, no I/O, no unsafe.
