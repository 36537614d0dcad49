//! An imitation of a matrix unit for machines without one, stricter than AMX: what was not loaded, or is fetched while it is under way,
//! is a panic.

use std::cell::Cell;

use super::{Products, ROWS, SLOTS, Tiles, Unit};
use crate::matmul::kernels::PAIR;
use crate::matmul::panel::{GROUPS, Line};
use crate::matmul::quantise::Codes;

thread_local! {
    /// Whether the tiles of this thread are configured.
    static IS_OPEN: Cell<bool> = const { Cell::new(false) };
}

/// Stands beside any vectors.
#[derive(Debug, Clone, Copy)]
pub(in crate::matmul) struct SoftUnit;

/// Tiles as memory; `None` until they are loaded.
pub(in crate::matmul) struct SoftTiles {
    groups: usize,
    sums: [Option<[[i32; 16]; ROWS]>; 4],
    rows: [Option<[Codes; ROWS]>; 2],
    panels: [Option<[[i8; 64]; GROUPS]>; 2],
    slots: [Option<Products>; SLOTS],
}

impl Unit for SoftUnit {
    type Tiles = SoftTiles;

    fn open(self, groups: usize) -> SoftTiles {
        assert!((1..=GROUPS).contains(&groups), "{groups} groups");
        assert!(!IS_OPEN.replace(true), "configured twice");
        SoftTiles { groups, sums: [None; 4], rows: [None; 2], panels: [None; 2], slots: [None; SLOTS] }
    }
}

impl Drop for SoftTiles {
    fn drop(&mut self) {
        IS_OPEN.set(false);
    }
}

impl Tiles for SoftTiles {
    fn zero<const C: usize>(&mut self) {
        self.sums[C] = Some([[0; 16]; ROWS]);
    }

    fn load_rows<const A: usize>(&mut self, rows: &[Codes; ROWS], first_group: usize) {
        let groups = first_group..first_group + self.groups;
        self.rows[A - 4] = Some(rows.map(|row| {
            let mut tile = Codes::default();
            tile.0[..groups.len()].copy_from_slice(&row.0[groups.clone()]);
            tile
        }));
    }

    fn load_panel<const B: usize>(
        &mut self,
        codes: &[[Line; PAIR]; GROUPS],
        first_group: usize,
        panel: usize,
    ) {
        let mut tile = [[0; 64]; GROUPS];
        for (tile, lines) in tile.iter_mut().zip(&codes[first_group..first_group + self.groups]) {
            *tile = lines[panel].0.map(|byte| byte as i8);
        }
        self.panels[B - 6] = Some(tile);
    }

    fn dot<const C: usize, const A: usize, const B: usize>(&mut self) {
        let (rows, panel) = (self.rows[A - 4].expect("rows"), self.panels[B - 6].expect("a panel"));
        let sums = self.sums[C].as_mut().expect("sums to add to");
        for (sums, row) in sums.iter_mut().zip(rows) {
            for (g, word) in row.0.into_iter().enumerate() {
                for (j, x) in word.to_le_bytes().into_iter().enumerate() {
                    for (n, sum) in sums.iter_mut().enumerate() {
                        *sum += i32::from(x as i8) * i32::from(panel[g][4 * n + j]);
                    }
                }
            }
        }
    }

    fn store<const C: usize>(&mut self, slot: usize) {
        // What is stored is under way no longer: whoever wants more zeroes first.
        let sums = self.sums[C].take().expect("sums to store");
        self.slots[slot % SLOTS] = Some(sums.map(|row| Line(bytemuck::cast(row))));
    }

    fn stored(&self, slot: usize) -> &Products {
        self.slots[slot % SLOTS].as_ref().expect("a slot that was stored to")
    }
}
