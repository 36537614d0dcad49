//! Times of kernels on the device, by timestamps around each launch.

use std::collections::BTreeMap;

use kvant_backend::KernelTime;

use crate::WgpuError;
use crate::gpu::new_buffer;
use crate::recording::{map_and_wait, new_read_buffer};

/// Launches of a submission; a recording with more is submitted in parts.
const MAX_LAUNCHES: u32 = 2048;

/// Bytes of a timestamp.
const STAMP: u64 = wgpu::QUERY_SIZE as u64;

/// Timestamps before and after each launch, which has a pass of its own for them.
#[derive(Debug)]
pub(crate) struct Timer {
    device: wgpu::Device,
    stamps: wgpu::QuerySet,
    resolved: wgpu::Buffer,
    read_buffer: wgpu::Buffer,
    /// Seconds per tick.
    tick: f64,
    /// The kernels launched since the last submission.
    launched: Vec<String>,
    /// Launches and ticks of each kernel.
    totals: BTreeMap<String, (u64, u64)>,
}

impl Timer {
    /// Returns the features that a timer needs, as far as the adapter has them.
    pub fn features(adapter: &wgpu::Adapter) -> wgpu::Features {
        adapter.features() & wgpu::Features::TIMESTAMP_QUERY
    }

    /// Creates a timer; `None` for a device without timestamps.
    pub fn new(device: &wgpu::Device, queue: &wgpu::Queue) -> Option<Self> {
        if !device.features().contains(wgpu::Features::TIMESTAMP_QUERY) {
            return None;
        }
        let count = 2 * MAX_LAUNCHES;
        let descriptor = wgpu::QuerySetDescriptor { label: None, ty: wgpu::QueryType::Timestamp, count };
        let bytes = u64::from(count) * STAMP;
        let usage = wgpu::BufferUsages::QUERY_RESOLVE | wgpu::BufferUsages::COPY_SRC;
        Some(Self {
            device: device.clone(),
            stamps: device.create_query_set(&descriptor),
            resolved: new_buffer(device, bytes, usage),
            read_buffer: new_read_buffer(device, bytes),
            tick: f64::from(queue.get_timestamp_period()) * 1e-9,
            launched: Vec::new(),
            totals: BTreeMap::new(),
        })
    }

    /// Returns whether the submission holds as many launches as there are timestamps for.
    pub fn is_full(&self) -> bool {
        self.launched.len() as u32 >= MAX_LAUNCHES
    }

    /// Begins the pass of the next launch, of the kernel of this name.
    pub fn begin_pass(
        &mut self,
        encoder: &mut wgpu::CommandEncoder,
        kernel: &str,
    ) -> wgpu::ComputePass<'static> {
        let first = 2 * self.launched.len() as u32;
        self.launched.push(kernel.to_owned());
        let timestamp_writes = Some(wgpu::ComputePassTimestampWrites {
            query_set: &self.stamps,
            beginning_of_pass_write_index: Some(first),
            end_of_pass_write_index: Some(first + 1),
        });
        let descriptor = wgpu::ComputePassDescriptor { label: None, timestamp_writes };
        encoder.begin_compute_pass(&descriptor).forget_lifetime()
    }

    /// Records the commands that make the timestamps readable, at the end of a submission.
    pub fn resolve(&self, encoder: &mut wgpu::CommandEncoder) {
        let n = 2 * self.launched.len() as u32;
        if n > 0 {
            encoder.resolve_query_set(&self.stamps, 0..n, &self.resolved, 0);
            encoder.copy_buffer_to_buffer(
                &self.resolved,
                0,
                &self.read_buffer,
                0,
                Some(u64::from(n) * STAMP),
            );
        }
    }

    /// Waits for the submission and adds its times.
    pub fn collect(&mut self) -> Result<(), WgpuError> {
        if self.launched.is_empty() {
            return Ok(());
        }
        let mut stamps = vec![0_u64; 2 * self.launched.len()];
        map_and_wait(&self.device, &self.read_buffer, bytemuck::cast_slice_mut(&mut stamps))?;
        for (kernel, stamps) in self.launched.drain(..).zip(stamps.chunks_exact(2)) {
            let (launches, ticks) = self.totals.entry(kernel).or_default();
            *launches += 1;
            *ticks += stamps[1].saturating_sub(stamps[0]);
        }
        Ok(())
    }

    /// Returns the time of each kernel so far, the longest first.
    pub fn times(&self) -> Vec<KernelTime> {
        let time = |(kernel, &(launches, ticks)): (&String, &(u64, u64))| KernelTime {
            kernel: kernel.clone(),
            launches,
            seconds: ticks as f64 * self.tick,
        };
        let mut times: Vec<KernelTime> = self.totals.iter().map(time).collect();
        times.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
        times
    }
}
