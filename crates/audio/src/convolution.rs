//! Convolutions as matrix products.

/// A convolution whose input is padded with zeros, so that it has an output for each step of its
/// stride.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Convolution {
    /// Lines and columns of the kernel.
    pub kernel: [usize; 2],
    /// Steps between outputs, along lines and columns.
    pub stride: [usize; 2],
    /// Lines and columns of zeros before the first of the input.
    pub before: [usize; 2],
}

impl Convolution {
    /// Returns the lines and columns of the output.
    pub fn output_size(&self, size: [usize; 2]) -> [usize; 2] {
        [0, 1].map(|axis| size[axis].div_ceil(self.stride[axis]))
    }

    /// Returns the inputs of each output, `[outputs, channels, kernel lines, kernel columns]`, of
    /// `x` `[lines, columns, channels]`: the product of these rows and the weights is the
    /// convolution.
    pub fn rows(&self, x: &[f32], size @ [lines, columns]: [usize; 2], channels: usize) -> Vec<f32> {
        let ([kernel_lines, kernel_columns], output) = (self.kernel, self.output_size(size));
        let n_kernel = kernel_lines * kernel_columns;
        let mut rows = vec![0.0; output[0] * output[1] * channels * n_kernel];
        for (index, row) in rows.chunks_exact_mut(channels * n_kernel).enumerate() {
            let place = [index / output[1] * self.stride[0], index % output[1] * self.stride[1]];
            for at in 0..n_kernel {
                // Shifted by the padding.
                let line = place[0] + at / kernel_columns;
                let column = place[1] + at % kernel_columns;
                let inside = line.checked_sub(self.before[0]).filter(|&line| line < lines);
                let inside = inside.zip(column.checked_sub(self.before[1]).filter(|&at| at < columns));
                let Some((line, column)) = inside else { continue };
                let from = &x[(line * columns + column) * channels..][..channels];
                row[at..].iter_mut().step_by(n_kernel).zip(from).for_each(|(to, x)| *to = *x);
            }
        }
        rows
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_hold_the_neighbourhood_of_each_output() {
        // Channels 1 and 10 of three columns.
        let x = [1.0, 10.0, 2.0, 20.0, 3.0, 30.0];
        let convolution = Convolution { kernel: [1, 3], stride: [1, 2], before: [0, 1] };
        assert_eq!(convolution.output_size([1, 3]), [1, 2]);
        let want = [0.0, 1.0, 2.0, 0.0, 10.0, 20.0, 2.0, 3.0, 0.0, 20.0, 30.0, 0.0];
        assert_eq!(convolution.rows(&x, [1, 3], 2), want);
        let plane = Convolution { kernel: [3, 3], stride: [2, 2], before: [1, 1] };
        let corner = &plane.rows(&[1.0, 2.0, 3.0, 4.0], [2, 2], 1)[..];
        assert_eq!(corner, [0.0, 0.0, 0.0, 0.0, 1.0, 2.0, 0.0, 3.0, 4.0]);
    }
}
