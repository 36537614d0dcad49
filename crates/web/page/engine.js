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

// The one script that may become a worker.
const scripts = globalThis.trustedTypes?.createPolicy('kvant', { createScriptURL: () => 'worker.js' });

/** A worker with the built-in model or that of `file`. Usable from `ready` until `over`. */
class Engine {
  constructor(file) {
    Object.assign(this, { file, handlers: new Map(), n: 0, over: '' });
    this.worker = new Worker(scripts ? scripts.createScriptURL('') : 'worker.js');
    this.ready = new Promise((resolve, reject) => this.handlers.set(undefined, data => data.wrong ? reject(new Error(data.wrong)) : resolve(data.opened)));
    this.worker.onmessage = ({ data }) => {
      const onEvent = this.handlers.get(data.id);
      // An answer has several events, any other request has one.
      if (!data.event || data.event.finished) this.handlers.delete(data.id);
      onEvent?.(data);
      if (data.isFault) this.end(data.wrong);
    };
    this.worker.onerror = event => this.end(event.message || 'the engine cannot be loaded');
    this.worker.postMessage({ what: 'open', file, gpu: new URLSearchParams(location.search).get('gpu') });
  }

  /** Sends a request to the worker; `onEvent` receives its events. Returns its cancel function. */
  request(what, fields, onEvent) {
    const id = ++this.n;
    this.handlers.set(id, onEvent);
    this.worker.postMessage({ what, id, ...fields });
    return () => {
      this.handlers.delete(id);
      this.worker.postMessage({ what: 'stop', id });
    };
  }

  /** Terminates the worker. Pending requests receive the reason. */
  end(wrong) {
    if (this.over) return;
    this.over = wrong;
    this.worker.terminate();
    const pending = [...this.handlers.values()];
    this.handlers.clear();
    for (const onEvent of pending) onEvent({ wrong });
  }
}

let engine = new Engine(null);

/** Returns the engine, restarted with the same model after a fault. */
function liveEngine() {
  if (engine.over) engine = new Engine(engine.file);
  return engine;
}

async function get(path) {
  const at = liveEngine(), about = await at.ready;
  if (path === 'kv') return meterOf(about, await new Promise((resolve, reject) =>
    at.request('kv', {}, data => { data.wrong ? reject(new Error(data.wrong)) : resolve(data.kv); })));
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
  const at = liveEngine(), events = [];
  await at.ready;
  if (signal.aborted) throw new Error('stopped');
  let wake = () => {};
  const now = Math.floor(Date.now() / 1000) - new Date().getTimezoneOffset() * 60;
  const receive = data => { events.push(data); wake(); };
  const stop = at.request('ask', { request: { messages, now, ...options } }, receive);
  signal.addEventListener('abort', () => { stop(); receive({ wrong: 'stopped' }); });
  for (;;) {
    while (!events.length) await new Promise(resolve => { wake = resolve; });
    const { wrong, event } = events.shift();
    if (wrong) throw new Error(wrong);
    yield chunkOf(event);
    if (event.finished) return;
  }
}

function chunkOf({ read, said: tokenText, finished }) {
  if (read) return { prompt_progress: { total: read.total, cache: read.cached, processed: read.done } };
  if (tokenText !== undefined) return { choices: [{ delta: { content: tokenText } }] };
  const { text, reason, prompt, cached, bytes, bytes_f16, rate, read_rate } = finished;
  return {
    choices: [{ delta: { content: text }, finish_reason: reason }],
    kv: { bytes, bytes_f16 },
    timings: { predicted_n: finished.said, predicted_per_second: rate, prompt_per_second: read_rate },
    usage: { prompt_tokens: prompt, prompt_tokens_details: { cached_tokens: cached } },
  };
}

/** Replaces the model; the present one stays where loading fails. */
async function change(file) {
  notice(`Opens ${file.name} …`);
  const next = new Engine(file);
  try {
    await next.ready;
  } catch (error) {
    next.end(error.message);
    notice(`${file.name}: ${error.message}`);
    return;
  }
  const last = engine;
  engine = next;
  last.end(`${file.name} was opened`);
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

