//! Tests of the referee: frauds, statistics, the files of the judge, and workers.

mod fake;
mod frauds;
mod races;
mod trees;
mod workers;
