//! Commands recorded for the device until a result is read, and the data that moves between it and
//! the host.
//!
//! Launch parameters, and rows that the host writes, wait in host memory and go to the device in
//! one piece with the commands that use them (the *ring*), so that commands see earlier writes
//! without any wait.

use std::collections::HashMap;
use std::ops::Range;

use kvant_backend::KernelTime;

use crate::WgpuError;
use crate::gpu::{Binding, new_buffer};
use crate::shader::Kernel;
use crate::timer::Timer;

/// Bytes of the ring: a recording that needs more is submitted in parts.
const RING: usize = 4 << 20;

/// Multiply-adds of a submission, unless one launch has more: 0.7 s at 200 GFLOP/s, the speed of
/// slow GPUs. A system resets a GPU that does not respond, Windows after 2 s, and the device is
/// lost. Splitting a large step costs a fast GPU less than a hundredth of its time.
pub(crate) const MAX_WORK: u64 = 1 << 36;

/// Launches of a submission: the device runs them while the host records those that follow, 3 us
/// each.
const MAX_LAUNCHES: u32 = 64;

/// Submissions without use after which a bind group is dropped, and the buffers in it.
const IDLE_SUBMISSIONS: u64 = 64;
/// Submissions between two searches for such groups.
const SUBMISSIONS_OF_SEARCH: u64 = 16;

/// Work submitted to a device, and data moved.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Traffic {
    /// Submissions of command buffers.
    pub submissions: u64,
    /// Compute passes in them: launches without a copy or a clear between them share one.
    pub passes: u64,
    /// Kernels launched in them.
    pub launches: u64,
    /// Launches of another kernel than the one before in the pass.
    pub kernel_switches: u64,
    /// Bytes copied to the device, including launch parameters.
    pub to_device: u64,
    /// Bytes copied back.
    pub from_device: u64,
    /// Bind groups created. A step with the same bindings as the last one reuses its groups.
    pub groups: u64,
    /// Buffers created, likewise.
    pub allocations: u64,
}

impl Traffic {
    /// Returns the work after `before`, an earlier value of the same device.
    pub fn since(self, before: Self) -> Self {
        Self {
            submissions: self.submissions - before.submissions,
            passes: self.passes - before.passes,
            launches: self.launches - before.launches,
            kernel_switches: self.kernel_switches - before.kernel_switches,
            to_device: self.to_device - before.to_device,
            from_device: self.from_device - before.from_device,
            groups: self.groups - before.groups,
            allocations: self.allocations - before.allocations,
        }
    }
}

/// The bindings of a launch: the address of its kernel, the range of its parameters in the ring,
/// and the buffers.
type BindingKey = (usize, [u64; 2], Vec<(u32, wgpu::Buffer)>);

/// A compute pass, and the address of the kernel of its last launch.
#[derive(Debug)]
struct Pass {
    commands: wgpu::ComputePass<'static>,
    kernel: usize,
}

#[derive(Debug)]
pub(crate) struct Recording {
    queue: wgpu::Queue,
    encoder: Option<wgpu::CommandEncoder>,
    /// The pass that launches join until another command ends it, as beginning and ending one costs
    /// the host more than a launch.
    pass: Option<Pass>,
    ring: wgpu::Buffer,
    /// Data of the ring, copied at submission.
    pending: Vec<u8>,
    /// The last launch parameters in it, which the next launch shares if its own are equal.
    last_params: Range<usize>,
    /// Multiply-adds recorded since the last submission.
    work: u64,
    /// Launches, likewise.
    launches: u32,
    /// Alignment of binding offsets.
    align: usize,
    /// Staging buffer of reads; as large as the largest read so far.
    read_buffer: wgpu::Buffer,
    /// Bind groups, and the submission count of their last use.
    groups: HashMap<BindingKey, (wgpu::BindGroup, u64)>,
    traffic: Traffic,
    timer: Option<Timer>,
    /// Why times of a submission could not be read.
    timer_failure: Option<WgpuError>,
}

impl Recording {
    pub fn new(device: &wgpu::Device, queue: wgpu::Queue, limits: &wgpu::Limits) -> Self {
        let usage = wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC | wgpu::BufferUsages::COPY_DST;
        Self {
            queue,
            encoder: None,
            pass: None,
            ring: new_buffer(device, RING as u64, usage),
            pending: Vec::new(),
            last_params: 0..0,
            work: 0,
            launches: 0,
            align: limits.min_storage_buffer_offset_alignment as usize,
            read_buffer: new_read_buffer(device, 4096),
            groups: HashMap::new(),
            traffic: Traffic::default(),
            timer: None,
            timer_failure: None,
        }
    }

    pub fn traffic(&self) -> Traffic {
        self.traffic
    }

    /// Starts timing kernels, or stops; returns whether the device can.
    pub fn time_kernels(&mut self, device: &wgpu::Device, is_on: bool) -> bool {
        self.submit();
        self.timer = if is_on { Timer::new(device, &self.queue) } else { None };
        self.timer.is_some() || !is_on
    }

    /// Submits the recorded commands and returns the time of each kernel.
    pub fn kernel_times(&mut self) -> Result<Vec<KernelTime>, WgpuError> {
        self.submit();
        match self.timer_failure.take() {
            Some(failure) => Err(failure),
            None => Ok(self.timer.as_ref().map(Timer::times).unwrap_or_default()),
        }
    }

    /// Counts the multiply-adds of the next launch. The commands before it are submitted if they
    /// would exceed [`MAX_WORK`] with it.
    pub fn count_work(&mut self, multiply_adds: u64) {
        if self.work.saturating_add(multiply_adds) > MAX_WORK {
            self.submit();
        }
        self.work = self.work.saturating_add(multiply_adds);
    }

    pub fn launch(
        &mut self,
        device: &wgpu::Device,
        kernel: &Kernel,
        [x, y, z]: [u32; 3],
        params: &[u8],
        bindings: &[Binding<'_>],
    ) {
        if self.launches == MAX_LAUNCHES || self.timer.as_ref().is_some_and(Timer::is_full) {
            self.submit();
        }
        self.launches += 1;
        let offset = self.stage_params(params) as u64;
        let group = self.group(device, kernel, [offset, params.len() as u64], bindings);
        let is_same_kernel = self.timer.is_none()
            && self.pass.as_ref().is_some_and(|pass| pass.kernel == std::ptr::from_ref(kernel) as usize);
        let commands = &mut self.pass(device, kernel).commands;
        if !is_same_kernel {
            commands.set_pipeline(&kernel.pipeline);
        }
        commands.set_bind_group(0, &group, &[]);
        commands.dispatch_workgroups(x, y, z);
        self.traffic.kernel_switches += u64::from(!is_same_kernel);
        self.traffic.launches += 1;
    }

    /// Returns the current pass, or begins one, for this kernel. While kernels are timed, each
    /// launch has its own.
    fn pass(&mut self, device: &wgpu::Device, of: &Kernel) -> &mut Pass {
        let kernel = std::ptr::from_ref(of) as usize;
        let pass = match self.pass.take().filter(|_| self.timer.is_none()) {
            Some(pass) => Pass { kernel, ..pass },
            None => {
                self.traffic.passes += 1;
                let encoder = self.encoder.get_or_insert_with(|| new_encoder(device));
                let commands = match &mut self.timer {
                    Some(timer) => timer.begin_pass(encoder, &of.name),
                    None => encoder.begin_compute_pass(&Default::default()).forget_lifetime(),
                };
                Pass { commands, kernel }
            }
        };
        self.pass.insert(pass)
    }

    /// Returns the group of these bindings, with `len` bytes of the ring from `offset` on in
    /// binding 0.
    fn group(
        &mut self,
        device: &wgpu::Device,
        kernel: &Kernel,
        [offset, len]: [u64; 2],
        bindings: &[Binding<'_>],
    ) -> wgpu::BindGroup {
        let buffers = bindings.iter().map(|(binding, buffer)| (*binding, (*buffer).clone())).collect();
        let key = (std::ptr::from_ref(kernel) as usize, [offset, len], buffers);
        let now = self.traffic.submissions;
        if let Some((group, last_used)) = self.groups.get_mut(&key) {
            *last_used = now;
            return group.clone();
        }
        let params = wgpu::BufferBinding { buffer: &self.ring, offset, size: wgpu::BufferSize::new(len) };
        let entry = |binding, resource| wgpu::BindGroupEntry { binding, resource };
        let mut entries = vec![entry(0, wgpu::BindingResource::Buffer(params))];
        entries.extend(bindings.iter().map(|(binding, buffer)| entry(*binding, buffer.as_entire_binding())));
        let layout = &kernel.layout;
        let group =
            device.create_bind_group(&wgpu::BindGroupDescriptor { label: None, layout, entries: &entries });
        self.groups.insert(key, (group.clone(), now));
        self.traffic.groups += 1;
        group
    }

    /// Drops the bind groups, and so the buffers that only they hold.
    pub fn drop_bind_groups(&mut self) {
        self.groups.clear();
    }

    #[cfg(test)]
    pub fn groups(&self) -> usize {
        self.groups.len()
    }

    pub fn count_allocation(&mut self) {
        self.traffic.allocations += 1;
    }

    pub fn write(&mut self, device: &wgpu::Device, to: &wgpu::Buffer, at: u64, bytes: &[u8]) {
        if bytes.is_empty() {
            return;
        }
        if bytes.len() <= RING / 4 {
            let from = self.stage(bytes) as u64;
            let ring = self.ring.clone();
            self.encoder(device).copy_buffer_to_buffer(&ring, from, to, at, Some(bytes.len() as u64));
            return;
        }
        self.submit();
        self.queue.write_buffer(to, at, bytes);
        self.traffic.to_device += bytes.len() as u64;
        // Bounds the data that waits in host memory.
        self.encoder(device);
        self.submit();
    }

    pub fn copy(
        &mut self,
        device: &wgpu::Device,
        from: &wgpu::Buffer,
        from_at: usize,
        to: &wgpu::Buffer,
        to_at: usize,
        len: usize,
    ) {
        if len > 0 {
            let [from_at, to_at, len] = [from_at, to_at, len].map(|n| n as u64);
            self.encoder(device).copy_buffer_to_buffer(from, from_at, to, to_at, Some(len));
        }
    }

    pub fn clear(&mut self, device: &wgpu::Device, buffer: &wgpu::Buffer, at: usize, len: usize) {
        if len > 0 {
            self.encoder(device).clear_buffer(buffer, at as u64, Some(len as u64));
        }
    }

    pub fn read(
        &mut self,
        device: &wgpu::Device,
        from: &wgpu::Buffer,
        at: usize,
        bytes: &mut [u8],
    ) -> Result<(), WgpuError> {
        if bytes.is_empty() {
            return Ok(());
        }
        let len = bytes.len() as u64;
        if self.read_buffer.size() < len {
            self.read_buffer = new_read_buffer(device, len);
        }
        let to = self.read_buffer.clone();
        self.encoder(device).copy_buffer_to_buffer(from, at as u64, &to, 0, Some(len));
        self.submit();
        map_and_wait(device, &self.read_buffer, bytes)?;
        self.traffic.from_device += len;
        Ok(())
    }

    pub fn finish(&mut self, device: &wgpu::Device) -> Result<(), WgpuError> {
        self.submit();
        wait(device)
    }

    /// Returns the encoder for other commands than launches.
    fn encoder(&mut self, device: &wgpu::Device) -> &mut wgpu::CommandEncoder {
        self.pass = None;
        self.encoder.get_or_insert_with(|| new_encoder(device))
    }

    /// Adds bytes to the ring; returns their offset.
    fn stage(&mut self, bytes: &[u8]) -> usize {
        debug_assert!(bytes.len() <= RING, "{} bytes for a ring of {RING}", bytes.len());
        let at = self.pending.len().next_multiple_of(self.align);
        if at + bytes.len() > RING {
            self.submit();
            return self.stage(bytes);
        }
        self.pending.resize(at, 0);
        self.pending.extend_from_slice(bytes);
        self.pending.resize(self.pending.len().next_multiple_of(4), 0);
        at
    }

    /// Adds launch parameters to the ring, unless they are those of the last launch; returns their
    /// offset.
    fn stage_params(&mut self, params: &[u8]) -> usize {
        if self.pending.get(self.last_params.clone()) != Some(params) {
            let at = self.stage(params);
            self.last_params = at..at + params.len();
        }
        self.last_params.start
    }

    /// Submits the recorded commands.
    fn submit(&mut self) {
        self.pass = None;
        let Some(mut encoder) = self.encoder.take() else { return };
        if let Some(timer) = &self.timer {
            timer.resolve(&mut encoder);
        }
        self.queue.write_buffer(&self.ring, 0, &self.pending);
        self.queue.submit([encoder.finish()]);
        if let Some(timer) = &mut self.timer {
            self.timer_failure = self.timer_failure.take().or(timer.collect().err());
        }
        self.traffic.submissions += 1;
        self.traffic.to_device += self.pending.len() as u64;
        self.pending.clear();
        self.last_params = 0..0;
        self.work = 0;
        self.launches = 0;
        let now = self.traffic.submissions;
        if now.is_multiple_of(SUBMISSIONS_OF_SEARCH) {
            self.groups.retain(|_, (_, last_used)| now - *last_used <= IDLE_SUBMISSIONS);
        }
    }
}

fn new_encoder(device: &wgpu::Device) -> wgpu::CommandEncoder {
    device.create_command_encoder(&Default::default())
}

/// Waits for what is submitted, and reads the start of a buffer to the host.
pub(crate) fn map_and_wait(
    device: &wgpu::Device,
    from: &wgpu::Buffer,
    bytes: &mut [u8],
) -> Result<(), WgpuError> {
    let slice = from.slice(..bytes.len() as u64);
    // An error shows when the range is read.
    slice.map_async(wgpu::MapMode::Read, |_| ());
    wait(device)?;
    let refused = |error: wgpu::MapRangeError| WgpuError::Refused(error.to_string());
    bytes.copy_from_slice(&slice.get_mapped_range().map_err(refused)?);
    from.unmap();
    Ok(())
}

pub(crate) fn new_read_buffer(device: &wgpu::Device, size: u64) -> wgpu::Buffer {
    new_buffer(device, size, wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST)
}

fn wait(device: &wgpu::Device) -> Result<(), WgpuError> {
    let poll = device.poll(wgpu::PollType::wait_indefinitely());
    poll.map(drop).map_err(|error| WgpuError::Refused(error.to_string()))
}
