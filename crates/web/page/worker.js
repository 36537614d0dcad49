/* The engine's worker thread, so that the page stays responsive: WebAssembly blocks, except while it
   waits for a GPU. crates/web/src/abi.rs documents the module's functions. */

let wasm, gpu;
/** Queued requests, of which the first is running: { id, request }. */
const queue = [];
let isStopped = false;
/** Promise of all calls so far: calls are serialized, as one may be waiting for the GPU. */
let turn = Promise.resolve();

/** Calls the module and returns its output. Throws its error message, with `isFault` where the
    instance is unusable. */
function call(name, ...args) {
  const result = turn.then(() => enter(name, args));
  turn = result.catch(() => {});
  return result;
}

async function enter(name, [input, ...flags]) {
  if (input) new Uint8Array(wasm.memory.buffer).set(input, inputAddress(input.length));
  let isDone;
  try {
    isDone = await wasm[name](...flags);
  } catch (error) {
    // Errors of the page's own functions have a message; WebAssembly traps have little text.
    if (!(error instanceof WebAssembly.RuntimeError)) throw fault(error.message);
    const text = output();
    throw fault(text.startsWith('a fault') ? text : `the engine has stopped (${error.message}): the 4 GiB of memory that a page has are most likely full`);
  }
  const text = output();
  if (isDone) return JSON.parse(text);
  throw gpu.isLost ? fault(text) : new Error(text);
}

const fault = line => Object.assign(new Error(line), { isFault: true });

function output() {
  const [at, n] = [wasm.kvant_output() >>> 0, wasm.kvant_output_len() >>> 0];
  return new TextDecoder().decode(new Uint8Array(wasm.memory.buffer, at, n));
}

/** Returns the address for `n` bytes of input. */
function inputAddress(n) {
  const at = wasm.kvant_input(n) >>> 0;
  if (!at) throw new Error(`${n} bytes do not fit`);
  return at;
}

const json = value => new TextEncoder().encode(JSON.stringify(value));

/** Bytes of a file copied to the module's memory at a time. */
const PIECE = 16 << 20;

/** Returns the module's imports `file`: a dropped file, read in parts on request. */
function importsOfFile(file) {
  const reader = new FileReaderSync();
  return {
    size: () => file?.size ?? 0,
    read(at, to, n) {
      const [address, end] = [to >>> 0, n >>> 0];
      for (let done = 0; done < end; done += PIECE) {
        const piece = reader.readAsArrayBuffer(file.slice(at + done, at + Math.min(done + PIECE, end)));
        new Uint8Array(wasm.memory.buffer).set(new Uint8Array(piece), address + done);
      }
    },
  };
}

/** Returns the exports of a new instance; with a GPU, some of them are async. */
async function instance(module, file) {
  const imports = { gpu: importsOf(gpu, () => wasm.memory), file: importsOfFile(file) };
  const instantiated = await WebAssembly.instantiate(module, imports);
  if (!gpu.device) return instantiated.exports;
  const suspending = ['kvant_open', 'kvant_begin', 'kvant_go_on'].map(name => [name, WebAssembly.promising(instantiated.exports[name])]);
  return { ...instantiated.exports, ...Object.fromEntries(suspending) };
}

/** Opens a model on a GPU, or on the CPU without a usable GPU, and reports the reason. */
async function open(file, gpuMode) {
  if (file && await file.slice(0, 4).text() !== 'GGUF') throw new Error('not a GGUF file');
  const unpacked = (await fetch('kvant.packed')).body.pipeThrough(new DecompressionStream('gzip'));
  const module = await WebAssembly.compileStreaming(new Response(unpacked, { headers: { 'content-type': 'application/wasm' } }));
  gpu = await openGpu(gpuMode).catch(error => ({ why: error.message }));
  for (;;) {
    wasm = await instance(module, file);
    wasm.kvant_start();
    try {
      const about = await call('kvant_open', null, Boolean(gpu.device));
      return postMessage({ opened: { ...about, gpu: gpu.name, without: gpu.why } });
    } catch (error) {
      if (!gpu.device) throw error;
      gpu.device.destroy();
      gpu = { why: error.message };
    }
  }
}

/** Yields to pending messages. */
const yieldToMessages = () => new Promise(resolve => {
  const { port1, port2 } = new MessageChannel();
  port1.onmessage = resolve;
  port2.postMessage(0);
});

async function answer({ id, request }) {
  const began = performance.now();
  let [firstTokenAt, n] = [0, 0];
  await call('kvant_begin', json(request));
  while (!isStopped) {
    const event = await call('kvant_go_on');
    if (event.said !== undefined && n++ === 0) firstTokenAt = performance.now();
    if (event.finished) {
      const { prompt, cached } = event.finished, rate = (count, ms) => count > 0 && ms > 0 ? count / ms * 1000 : 0;
      Object.assign(event.finished, { read_rate: rate(prompt - cached, (firstTokenAt || performance.now()) - began), rate: rate(n - 1, performance.now() - firstTokenAt) });
    }
    postMessage({ id, event });
    if (event.finished) return;
    await yieldToMessages();
  }
  await call('kvant_stop');
}

async function work() {
  while (queue.length) {
    isStopped = false;
    try {
      await answer(queue[0]);
    } catch (error) {
      postMessage({ id: queue[0].id, wrong: error.message, isFault: error.isFault });
    }
    queue.shift();
  }
}

const HANDLERS = {
  open({ file, gpu: gpuMode }) {
    open(file, gpuMode).catch(error => postMessage({ wrong: error.message, isFault: true }));
  },
  ask(message) {
    if (queue.push(message) === 1) work();
  },
  stop({ id }) {
    const at = queue.findIndex(ask => ask.id === id);
    if (at === 0) isStopped = true;
    else if (at > 0) queue.splice(at, 1);
  },
  async kv({ id }) {
    try {
      postMessage({ id, kv: { ...await call('kvant_kv'), waiting: Math.max(0, queue.length - 1) } });
    } catch (error) {
      postMessage({ id, wrong: error.message, isFault: error.isFault });
    }
  },
};

onmessage = ({ data }) => HANDLERS[data.what](data);
