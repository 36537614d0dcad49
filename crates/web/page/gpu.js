/* The functions that the module imports as `gpu` (crates/webgpu/src/imports.rs), over the browser's
   WebGPU. Objects have numeric handles, 0 for none. Promises are awaited here, while WebAssembly is
   suspended (JavaScript Promise Integration). */

/** Opens a GPU: { device, name, driver, isSoftware }, or { why } no GPU is usable. A software
    renderer is slower than WebAssembly's SIMD, so it is used only where `mode` is 'any'. */
async function openGpu(mode) {
  if (mode === 'off') return { why: 'not wanted' };
  if (!navigator.gpu) return { why: 'this browser has none' };
  if (!WebAssembly.Suspending) return { why: 'this browser does not let WebAssembly wait (JavaScript Promise Integration)' };
  const packed = 'packed_4x8_integer_dot_product';
  if (!navigator.gpu.wgslLanguageFeatures.has(packed)) return { why: `this browser's WGSL lacks ${packed}` };
  const adapter = await navigator.gpu.requestAdapter({ powerPreference: 'high-performance' });
  if (!adapter) return { why: 'this browser has no adapter' };
  const { vendor, architecture, device: product, description, isFallbackAdapter } = adapter.info;
  const name = description || product || `${vendor} ${architecture}`.trim() || 'a GPU without a name';
  if (isFallbackAdapter && mode !== 'any') return { why: `${name} is a program on the CPU` };
  const requiredLimits = {};
  for (const limit of ['maxBufferSize', 'maxStorageBufferBindingSize', 'maxStorageBuffersPerShaderStage', 'maxComputeWorkgroupStorageSize', 'maxComputeInvocationsPerWorkgroup', 'maxComputeWorkgroupSizeX', 'maxComputeWorkgroupsPerDimension']) requiredLimits[limit] = adapter.limits[limit];
  // Without subgroups: browsers cannot prove that all threads of a subgroup lookup are active, and
  // reject those kernels.
  const requiredFeatures = ['shader-f16'].filter(feature => adapter.features.has(feature));
  const device = await adapter.requestDevice({ requiredLimits, requiredFeatures });
  return { device, name, driver: vendor, isSoftware: isFallbackAdapter };
}

/** Returns the module's imports, for an opened GPU or for { why }; `memory` returns its memory. */
function importsOf(gpu, memory) {
  const { device } = gpu;
  const objects = [null], free = [], failures = [];
  /** Promises for `wait`, buffers to destroy after the next submit, and text for the module. */
  let pending = [], toDestroy = [], textBytes = new Uint8Array();
  const addObject = object => {
    const at = free.pop() ?? objects.length;
    objects[at] = object;
    return at;
  };
  const fail = text => { failures.push(text); };
  const bytes = (at, n) => new Uint8Array(memory().buffer, at >>> 0, n);
  const read = (at, n) => new TextDecoder().decode(bytes(at, n));
  const setResult = text => (textBytes = new TextEncoder().encode(text)).length;
  /** Wraps an async function so that WebAssembly can wait for it, where the browser supports that. */
  const waits = work => WebAssembly.Suspending ? new WebAssembly.Suspending(work) : () => { throw new Error('nothing waits in this browser'); };
  if (device) {
    device.onuncapturederror = ({ error }) => fail(error.message);
    device.lost.then(({ message }) => {
      gpu.isLost = true;
      fail(`lost ${message}`);
    });
  }

  return {
    describe: () => device ? setResult([gpu.name, gpu.driver, gpu.isSoftware ? 'software' : '', ...device.features].join('\n')) : 0,
    text: to => bytes(to, textBytes.length).set(textBytes),
    limit: which => device.limits[['maxBufferSize', 'maxStorageBufferBindingSize', 'minStorageBufferOffsetAlignment'][which]],
    failure: () => failures.length ? setResult(failures.shift()) : 0,
    release(at) {
      const object = objects[at];
      if (!object) return;
      if (object instanceof GPUBuffer) toDestroy.push(object);
      objects[at] = null;
      free.push(at);
    },

    buffer: (size, usage) => addObject(device.createBuffer({ size, usage })),
    buffer_tried: waits(async (size, usage) => {
      device.pushErrorScope('out-of-memory');
      const buffer = device.createBuffer({ size, usage });
      if (!await device.popErrorScope()) return addObject(buffer);
      buffer.destroy();
      return 0;
    }),
    write: (buffer, at, from, n) => device.queue.writeBuffer(objects[buffer], at, memory().buffer, from >>> 0, n),

    module(text, n) {
      device.pushErrorScope('validation');
      const module = device.createShaderModule({ code: read(text, n) });
      return addObject({ module, refused: device.popErrorScope() });
    },
    refusal: waits(async at => {
      const { module, refused } = objects[at];
      const { messages } = await module.getCompilationInfo(), error = await refused;
      const first = messages.find(({ type }) => type === 'error');
      return first ? setResult(`${first.lineNum} ${first.message}`) : error ? setResult(`0 ${error.message}`) : 0;
    }),
    pipeline: waits(async (at, entry, n) => {
      try {
        const compute = { module: objects[at].module, entryPoint: read(entry, n) };
        return addObject(await device.createComputePipelineAsync({ layout: 'auto', compute }));
      } catch (error) {
        fail(error.message);
        return 0;
      }
    }),
    layout: pipeline => pipeline ? addObject(objects[pipeline].getBindGroupLayout(0)) : 0,
    group(layout, at, n) {
      const values = new Float64Array(memory().buffer, at >>> 0, 4 * n), entries = [];
      for (let i = 0; i < 4 * n; i += 4) {
        const [binding, buffer, offset, size] = values.subarray(i, i + 4);
        entries.push({ binding, resource: { buffer: objects[buffer], offset, size } });
      }
      return addObject(device.createBindGroup({ layout: objects[layout], entries }));
    },

    encoder: () => addObject(device.createCommandEncoder()),
    pass: encoder => addObject(objects[encoder].beginComputePass()),
    set_pipeline: (pass, pipeline) => objects[pass].setPipeline(objects[pipeline]),
    set_group: (pass, index, group, offsets, n) => objects[pass].setBindGroup(index, objects[group], new Uint32Array(memory().buffer, offsets >>> 0, n), 0, n),
    dispatch: (pass, x, y, z) => objects[pass].dispatchWorkgroups(x >>> 0, y >>> 0, z >>> 0),
    end: pass => objects[pass].end(),
    copy: (encoder, from, at, to, toAt, n) => objects[encoder].copyBufferToBuffer(objects[from], at, objects[to], toAt, n),
    clear: (encoder, buffer, at, n) => objects[encoder].clearBuffer(objects[buffer], at, n),
    submit(encoder) {
      // Errors of recorded commands appear here.
      device.pushErrorScope('validation');
      device.queue.submit([objects[encoder].finish()]);
      pending.push(device.popErrorScope().then(error => { if (error) fail(error.message); }));
      for (const buffer of toDestroy.splice(0)) buffer.destroy();
    },

    map: (buffer, at, n) => { pending.push(objects[buffer].mapAsync(GPUMapMode.READ, at, n)); },
    wait: waits(async () => {
      const all = pending.splice(0);
      // `mapped` reports failures.
      await Promise.allSettled([...all, device.queue.onSubmittedWorkDone()]);
    }),
    mapped(buffer, at, to, n) {
      if (objects[buffer].mapState !== 'mapped') return false;
      bytes(to, n).set(new Uint8Array(objects[buffer].getMappedRange(at, n)));
      return true;
    },
    unmap: buffer => objects[buffer].unmap(),
  };
}
