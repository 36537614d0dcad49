// The engine: WebAssembly in a worker of this page instead of a server. Has the interface of
// crates/server/assets/page/server.js: `server`, `why`, `get` and `ask`.

/** The engine's properties, once it is ready, and its labels on the page. */
const server = {
  types: [], room: 0, isKnown: false, models: [], vision: false, measured: load('kvant.measured', null), about: '',
  waitingLabel: 'Waits for the engine', defaultLabel: 'by default', dropLabel: 'Drop a GGUF file to run it, or texts to attach them',
  opens(file) {
    const isModel = file.name.endsWith('.gguf');
    if (isModel) change(file);
    return isModel;
  },
};
const why = error => error.message;

const gpuMode = new URLSearchParams(location.search).get('gpu');
let engine = new Kvant(null, gpuMode);

/** Returns the engine, restarted with the same model after a fault. */
function liveEngine() {
  if (engine.over) engine = new Kvant(engine.file, gpuMode);
  return engine;
}

async function get(path) {
  const at = liveEngine(), about = await at.ready;
  if (path === 'kv') return meterOf(about, await at.kv());
  if (path === 'props') return { default_generation_settings: { params: { temperature: about.temperature, top_p: about.top_p } } };
  const runs = about.gpu ? `webgpu: ${about.gpu}` : `CPU, ${about.kernels} kernels in WebAssembly; no WebGPU: ${about.without}`;
  setText('runs', `No server: this browser runs the model (${runs}).`);
  server.about = `Chats stay in this browser, which runs the model itself: ${runs}. For another model, drop a GGUF file anywhere.`;
  return { data: [{ id: at.file?.name ?? about.name ?? 'built in', meta: { n_ctx: about.n_ctx } }] };
}

/** Returns the memory figures in the server's format. */
function meterOf({ types }, kv) {
  const shared_bytes = Math.max(0, kv.running_bytes + kv.idle_bytes - kv.bytes);
  return { ...kv, types, shared_bytes, running: +(kv.running_bytes > 0), parked: 0, ram_bytes: 0, disk_bytes: 0 };
}

/** Yields the chunks of an answer in the server's format. */
async function* ask(messages, { system, reasoning, ...options }, signal) {
  for await (const event of liveEngine().chat(messages, { signal, ...options })) yield chunkOf(event);
}

function chunkOf({ prefill, text, finished }) {
  if (prefill) return { prompt_progress: { total: prefill.total, cache: prefill.cached, processed: prefill.done } };
  if (!finished) return { choices: [{ delta: { content: text } }] };
  return {
    choices: [{ delta: {}, finish_reason: finished.finish_reason }],
    kv: { bytes: finished.kv_bytes, bytes_f16: finished.kv_bytes_f16 },
    timings: { predicted_n: finished.completion_tokens, predicted_per_second: finished.decode_per_second, prompt_per_second: finished.prefill_per_second },
    usage: { prompt_tokens: finished.prompt_tokens, prompt_tokens_details: { cached_tokens: finished.cached_tokens } },
  };
}

/** Replaces the model; the present one stays where loading fails. */
async function change(file) {
  notice(`Opens ${file.name} …`);
  const next = new Kvant(file, gpuMode);
  try {
    await next.ready;
  } catch (error) {
    next.close(error.message);
    notice(`${file.name}: ${error.message}`);
    return;
  }
  const last = engine;
  engine = next;
  last.close(`${file.name} was opened`);
  server.isKnown = false;
  notice(`${file.name} is open.`);
  poll();
}

function wireModels() {
  const input = el('input', { type: 'file', id: 'gguf', accept: '.gguf', hidden: true, onchange: () => { if (input.files[0]) change(input.files[0]); input.value = ''; } });
  document.body.append(input);
  ICONS.model = 'm8 1.8 5.5 3v6.4L8 14.2l-5.5-3V4.8zm0 6 5.5-3M8 7.8l-5.5-3M8 7.8v6.4';
  $('foot').before(el('p', { class: 'runs', id: 'runs' }));
  $('foot').append(iconButton('model', 'Open a GGUF file', () => input.click()));
  // Only servers have API keys and these samplers.
  for (const name of ['key', 'top_k', 'min_p', 'repeat_penalty', 'presence_penalty']) $('settings').querySelector(`[name=${name}]`).closest('label').remove();
}

wireModels();

