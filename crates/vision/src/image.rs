//! Images: decoding and pixels.

use std::io::Cursor;

use image::{DynamicImage, ImageDecoder, ImageReader, Limits};

use crate::VisionError;
use crate::resize::{Filter, resize};

/// Maximum pixels of a side, and of a whole image.
const MAX_SIDE: u32 = 1 << 15;
const MAX_PIXELS: u64 = 1 << 26;

/// An image in memory.
#[derive(Clone, PartialEq, Eq)]
pub struct Image {
    width: u32,
    height: u32,
    /// `[height, width, 3]`
    rgb: Vec<u8>,
}

impl Image {
    /// Decodes a PNG, JPEG, WebP, GIF or BMP file, applies its EXIF orientation, and composites
    /// transparent pixels on white. Of an animation, decodes the first frame.
    ///
    /// # Errors
    /// Bytes that are not an image, and an image of more than 64 million pixels, which is not
    /// decoded.
    pub fn decode(bytes: &[u8]) -> Result<Self, VisionError> {
        let broken = |error: image::ImageError| VisionError::Image { why: error.to_string() };
        let reader = ImageReader::new(Cursor::new(bytes)).with_guessed_format();
        let reader = reader.map_err(|error| VisionError::Image { why: error.to_string() })?;
        let mut decoder = reader.into_decoder().map_err(broken)?;
        let (width, height) = decoder.dimensions();
        let is_small =
            width <= MAX_SIDE && height <= MAX_SIDE && u64::from(width) * u64::from(height) <= MAX_PIXELS;
        if !is_small {
            let expected = format!("{MAX_PIXELS} pixels at most, {MAX_SIDE} a side");
            return Err(VisionError::Size { width, height, expected });
        }
        let mut limits = Limits::default();
        limits.max_alloc = Some(16 * MAX_PIXELS);
        decoder.set_limits(limits).map_err(broken)?;
        let orientation = decoder.orientation().map_err(broken)?;
        let mut image = DynamicImage::from_decoder(decoder).map_err(broken)?;
        image.apply_orientation(orientation);
        let (width, height) = (image.width(), image.height());
        let rgb = match image.color().has_alpha() {
            false => image.into_rgb8().into_raw(),
            true => image.into_rgba8().pixels().flat_map(|pixel| on_white(pixel.0)).collect(),
        };
        Self::from_rgb(width, height, rgb)
    }

    /// Creates an image from pixels `[height, width, 3]`.
    ///
    /// # Errors
    /// No pixels, or a number other than `width * height`.
    pub fn from_rgb(width: u32, height: u32, rgb: Vec<u8>) -> Result<Self, VisionError> {
        let n_bytes = 3 * u64::from(width) * u64::from(height);
        if n_bytes == 0 || n_bytes != rgb.len() as u64 {
            let expected = format!("{n_bytes} bytes, more than 0, got {}", rgb.len());
            return Err(VisionError::Size { width, height, expected });
        }
        Ok(Self { width, height, rgb })
    }

    /// Returns the width in pixels.
    pub fn width(&self) -> usize {
        self.width as usize
    }

    /// Returns the height in pixels.
    pub fn height(&self) -> usize {
        self.height as usize
    }

    /// Returns the pixels, `[height, width, 3]`.
    pub fn rgb(&self) -> &[u8] {
        &self.rgb
    }

    /// Resizes the image.
    pub(crate) fn resized(&self, width: usize, height: usize, filter: Filter) -> Self {
        let rgb = resize(&self.rgb, [self.width(), self.height()], [width, height], filter);
        Self { width: width as u32, height: height as u32, rgb }
    }

    /// Crops the image.
    pub(crate) fn crop(&self, [x, y]: [usize; 2], [width, height]: [usize; 2]) -> Self {
        let row = 3 * self.width();
        let rows = self.rgb.chunks_exact(row).skip(y).take(height);
        let rgb = rows.flat_map(|row| &row[3 * x..][..3 * width]).copied().collect();
        Self { width: width as u32, height: height as u32, rgb }
    }
}

/// Composites a colour on white.
fn on_white([r, g, b, alpha]: [u8; 4]) -> [u8; 3] {
    let alpha = u16::from(alpha);
    [r, g, b].map(|colour| ((u16::from(colour) * alpha + 255 * (255 - alpha) + 127) / 255) as u8)
}

impl std::fmt::Debug for Image {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Image {{ {} x {} }}", self.width, self.height)
    }
}
