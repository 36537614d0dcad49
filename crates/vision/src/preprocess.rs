//! Preprocessing: scales and tiles an image, and lays its rows out among marker tokens.
//!
//! Each family has its own scheme: sizes, filters and rounding follow its processor in
//! `transformers`, markers are tokens of its vocabulary.

use std::ops::Range;

use crate::config::{Config, Projector};
use crate::resize::Filter;
use crate::{Image, VisionError};

/// A preprocessed image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageLayout {
    /// Inputs of the encoder, in order.
    pub tiles: Vec<Image>,
    /// The prompt text in place of the image.
    pub pieces: Vec<ImageToken>,
    /// Rows per line, where the text model uses M-RoPE positions in a plane.
    pub columns: Option<usize>,
}

/// A piece of an image's prompt text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ImageToken {
    /// Text that is tokenized with the model's vocabulary, special tokens included.
    Mark(String),
    /// Rows of a tile.
    Rows {
        /// Index in [`ImageLayout::tiles`].
        tile: usize,
        /// Range of the tile's rows.
        rows: Range<usize>,
    },
}

impl ImageLayout {
    /// Preprocesses an image for this encoder.
    ///
    /// # Errors
    /// An image so narrow that scaling leaves no pixel.
    pub fn new(config: &Config, image: &Image) -> Result<Self, VisionError> {
        match config.projector {
            Projector::Idefics3 => idefics3_layout(config, image),
            Projector::InternVl => internvl_layout(config, image),
            Projector::Pixtral => in_raster_order(config, image),
            Projector::Lfm2 => lfm2_layout(config, image),
            Projector::Qwen25 | Projector::Qwen3 => {
                let marks = ["<|vision_start|>", "<|vision_end|>"];
                Ok(whole_layout(config, image, sides_of(image), marks))
            }
            Projector::PaddleOcr => {
                let sides = at_least(config.row_pixels(), sides_of(image));
                Ok(whole_layout(config, image, sides, ["<|IMAGE_START|>", "<|IMAGE_END|>"]))
            }
        }
    }

    /// Returns the number of rows of all tiles.
    pub fn n_rows(&self) -> usize {
        let rows =
            |piece: &ImageToken| if let ImageToken::Rows { rows, .. } = piece { rows.len() } else { 0 };
        self.pieces.iter().map(rows).sum()
    }
}

/// Returns the number of rows of a tile.
fn n_rows(config: &Config, tile: &Image) -> usize {
    (tile.width() / config.row_pixels()) * (tile.height() / config.row_pixels())
}

fn mark(text: impl Into<String>) -> ImageToken {
    ImageToken::Mark(text.into())
}

/// Returns all rows of a tile.
fn rows_of(config: &Config, tiles: &[Image], tile: usize) -> ImageToken {
    ImageToken::Rows { tile, rows: 0..n_rows(config, &tiles[tile]) }
}

/// Cuts an image into tiles, row by row; its sides are multiples of `side`.
fn tiles_of(image: &Image, side: usize) -> Vec<Image> {
    let [columns, rows] = [image.width(), image.height()].map(|pixels| pixels / side);
    let place = |index: usize| [index % columns * side, index / columns * side];
    (0..columns * rows).map(|index| image.crop(place(index), [side, side])).collect()
}

/// Rejects an image with a side of less than one pixel.
fn check_sides(image: &Image, sides: [usize; 2]) -> Result<[usize; 2], VisionError> {
    if sides.contains(&0) {
        let (width, height) = (image.width() as u32, image.height() as u32);
        return Err(VisionError::Size { width, height, expected: "a wider image".to_owned() });
    }
    Ok(sides)
}

/// Scales the longer side to `longest_edge` and both sides to whole tiles; adds a thumbnail of the
/// whole image as the last tile.
fn idefics3_layout(config: &Config, image: &Image) -> Result<ImageLayout, VisionError> {
    const MARK: &str = "<fake_token_around_image>";
    const MAX_SIDE: usize = 4096;
    let (side, longest) = (config.image_size, config.longest_edge.min(MAX_SIDE));
    let ratio = image.width() as f64 / image.height() as f64;
    let even = |pixels: f64| (pixels as usize).next_multiple_of(2).max(1);
    let is_wide = image.width() >= image.height();
    let scaled = if is_wide {
        [longest, even(longest as f64 / ratio)]
    } else {
        [even(longest as f64 * ratio), longest]
    };
    let image = image.resized(scaled[0], scaled[1], Filter::Lanczos);
    let ratio = scaled[0] as f64 / scaled[1] as f64;
    let whole = longest.next_multiple_of(side);
    let other = if is_wide { whole as f64 / ratio } else { whole as f64 * ratio };
    let other = (other as usize).max(1).next_multiple_of(side);
    let [width, height] = if is_wide { [whole, other] } else { [other, whole] };
    let image = image.resized(width, height, Filter::Lanczos);
    let mut tiles = tiles_of(&image, side);
    let mut pieces = Vec::new();
    let columns = width / side;
    if tiles.len() > 1 {
        for tile in 0..tiles.len() {
            let (row, column) = (tile / columns, tile % columns);
            let line = if column == 0 && row > 0 { "\n" } else { "" };
            pieces.push(mark(format!("{line}{MARK}<row_{}_col_{}>", row + 1, column + 1)));
            pieces.push(rows_of(config, &tiles, tile));
        }
        pieces.push(mark(format!("\n\n{MARK}<global-img>")));
        tiles.push(image.resized(side, side, Filter::Lanczos));
    } else {
        pieces.push(mark(format!("{MARK}<global-img>")));
    }
    pieces.push(rows_of(config, &tiles, tiles.len() - 1));
    pieces.push(mark(MARK));
    Ok(ImageLayout { tiles, pieces, columns: None })
}

/// Scales the image to the grid of tiles with the closest aspect ratio; adds a thumbnail where
/// there are several tiles.
fn internvl_layout(config: &Config, image: &Image) -> Result<ImageLayout, VisionError> {
    let side = config.image_size;
    let [columns, rows] = best_grid(image, side, config.tiles);
    let mut tiles = tiles_of(&image.resized(columns * side, rows * side, Filter::Bicubic), side);
    if tiles.len() > 1 {
        tiles.push(image.resized(side, side, Filter::Bicubic));
    }
    let mut pieces = vec![mark("<img>")];
    pieces.extend((0..tiles.len()).map(|tile| rows_of(config, &tiles, tile)));
    pieces.push(mark("</img>"));
    Ok(ImageLayout { tiles, pieces, columns: None })
}

/// Returns the grid within the tile limits whose aspect ratio is closest to the image's. Among
/// equals, returns the largest with at most twice the image's pixels.
fn best_grid(image: &Image, side: usize, [min_tiles, max_tiles]: [usize; 2]) -> [usize; 2] {
    let ratio = image.width() as f64 / image.height() as f64;
    let pixels = (image.width() * image.height()) as f64;
    let grids =
        (1..=max_tiles).flat_map(|columns| (1..=max_tiles / columns).map(move |rows| [columns, rows]));
    let mut grids: Vec<_> = grids.filter(|[columns, rows]| columns * rows >= min_tiles).collect();
    grids.sort_by_key(|[columns, rows]| columns * rows);
    let (mut best, mut min_difference) = ([1, 1], f64::INFINITY);
    for grid @ [columns, rows] in grids {
        let difference = (ratio - columns as f64 / rows as f64).abs();
        if difference < min_difference
            || (difference == min_difference && pixels > 0.5 * (side * side * columns * rows) as f64)
        {
            (best, min_difference) = (grid, difference);
        }
    }
    best
}

/// Scales the image down to the maximum side and up to whole patches, with a marker behind each
/// line of rows.
fn in_raster_order(config: &Config, image: &Image) -> Result<ImageLayout, VisionError> {
    let (unit, max_side) = (config.row_pixels(), config.image_size as f64);
    let sides = sides_of(image);
    let ratio = sides.iter().fold(1.0, |ratio, &side| f64::max(ratio, side as f64 / max_side));
    let sides = check_sides(image, sides.map(|side| (side as f64 / ratio) as usize))?;
    let [width, height] = sides.map(|side| side.next_multiple_of(unit));
    let tiles = vec![image.resized(width, height, Filter::Bicubic)];
    let (columns, lines) = (width / unit, height / unit);
    let mut pieces = Vec::with_capacity(2 * lines);
    for line in 0..lines {
        pieces.push(ImageToken::Rows { tile: 0, rows: line * columns..(line + 1) * columns });
        pieces.push(mark(if line + 1 < lines { "[IMG_BREAK]" } else { "[IMG_END]" }));
    }
    Ok(ImageLayout { tiles, pieces, columns: None })
}

fn sides_of(image: &Image) -> [usize; 2] {
    [image.width(), image.height()]
}

fn area([width, height]: [usize; 2]) -> usize {
    width * height
}

/// Returns the sides rounded to whole rows, at least `min_side`.
fn rounded(config: &Config, sides: [usize; 2], min_side: usize) -> [usize; 2] {
    let unit = config.row_pixels();
    let whole = |side: usize| (side as f64 / unit as f64).round_ties_even() as usize * unit;
    sides.map(|side| whole(side).max(min_side))
}

/// Returns the sides scaled up until both are at least `min_side`.
fn at_least(min_side: usize, [width, height]: [usize; 2]) -> [usize; 2] {
    let scaled =
        |side: usize, other: usize| ((side * min_side) as f64 / other as f64).round_ties_even() as usize;
    let [width, height] = if height < min_side { [scaled(width, height), min_side] } else { [width, height] };
    if width < min_side { [min_side, scaled(height, width)] } else { [width, height] }
}

/// Returns the sides rounded, and scaled to the pixel limits of untiled images.
fn within_bounds(config: &Config, sides: [usize; 2]) -> [usize; 2] {
    let (unit, [min_pixels, max_pixels]) = (config.row_pixels(), config.pixels);
    let small = rounded(config, sides, unit);
    if area(small) > max_pixels {
        let by = (area(sides) as f64 / max_pixels as f64).sqrt();
        sides.map(|side| ((side as f64 / by / unit as f64).floor() as usize).max(1) * unit)
    } else if area(small) < min_pixels {
        let by = (min_pixels as f64 / area(sides) as f64).sqrt();
        sides.map(|side| (side as f64 * by / unit as f64).ceil() as usize * unit)
    } else {
        small
    }
}

/// Encodes the whole image without tiles between two marks, with M-RoPE positions in a plane.
/// `sides` are the image's before rounding and limits.
fn whole_layout(config: &Config, image: &Image, sides: [usize; 2], [start, end]: [&str; 2]) -> ImageLayout {
    let [width, height] = within_bounds(config, sides);
    let tiles = vec![image.resized(width, height, Filter::Bicubic)];
    let pieces = vec![mark(start), rows_of(config, &tiles, 0), mark(end)];
    ImageLayout { tiles, pieces, columns: Some(width / config.row_pixels()) }
}

/// Encodes a small image whole, and a larger one in tiles with a thumbnail.
fn lfm2_layout(config: &Config, image: &Image) -> Result<ImageLayout, VisionError> {
    let small = within_bounds(config, sides_of(image));
    let whole = image.resized(small[0], small[1], Filter::Bilinear);
    let (mut tiles, mut pieces) = (Vec::new(), vec![mark("<|image_start|>")]);
    if area(rounded(config, sides_of(image), config.patch_size)) > 2 * config.pixels[1] {
        let side = config.longest_edge;
        let [columns, rows] = best_grid(image, side, config.tiles);
        tiles = tiles_of(&image.resized(columns * side, rows * side, Filter::Bilinear), side);
        for tile in 0..tiles.len() {
            pieces.push(mark(format!("<|img_row_{}_col_{}|>", tile / columns + 1, tile % columns + 1)));
            pieces.push(rows_of(config, &tiles, tile));
        }
        pieces.push(mark("<|img_thumbnail|>"));
    }
    tiles.push(whole);
    pieces.push(rows_of(config, &tiles, tiles.len() - 1));
    pieces.push(mark("<|image_end|>"));
    Ok(ImageLayout { tiles, pieces, columns: None })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `smart_resize` of PaddleOCR-VL in `transformers`, with the published limits: roundings that
    /// depend on the order of operations, and sides of less than a row.
    #[test]
    fn sides_are_those_of_the_processor() {
        let file = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/models/paddleocr/mmproj.gguf");
        let config = Config::from_gguf(&kvant_gguf::Gguf::open(file).unwrap()).unwrap();
        let config = Config { patch_size: 14, pixels: [147_384, 2_822_400], ..config };
        let cases = [
            ([640, 480], [644, 476]),
            ([2000, 2000], [1680, 1680]),
            ([3589, 3589], [1652, 1652]),
            ([2736, 1539], [2240, 1260]),
            ([9, 9], [392, 392]),
            ([3, 22], [168, 1036]),
            ([14, 2676], [28, 5348]),
            ([2676, 14], [5348, 28]),
        ];
        for (sides, want) in cases {
            assert_eq!(within_bounds(&config, at_least(config.row_pixels(), sides)), want, "{sides:?}");
        }
    }
}
