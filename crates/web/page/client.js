// A model in a worker of its own. The page without a server runs on it, and it is the module of the
// package `kvant-web`, where ../package/index.d.ts documents it.

// Trusted Types: the one script that may become a worker.
const scripts = globalThis.trustedTypes?.createPolicy('kvant', { createScriptURL: () => new URL('./worker.js', import.meta.url).href });

/** A model on WebAssembly, or on the browser's GPU. Usable until `over` has a reason. */
export class Kvant {
  /** Opens a model: `model` is a GGUF file as a Blob or its URL; without one, the built-in model. */
  static async open({ model, gpu = 'auto', signal, onDownload } = {}) {
    const kvant = new Kvant(typeof model === 'string' || model instanceof URL ? await fetchModel(model, signal, onDownload) : model, gpu);
    try {
      await kvant.ready;
    } catch (error) {
      kvant.close(error.message);
      throw error;
    }
    return kvant;
  }

  /** Begins to open `file`; usable once `ready` has resolved. */
  constructor(file = null, gpu = 'auto') {
    Object.assign(this, { file, handlers: new Map(), n: 0, over: '', about: null });
    // Bundlers know the second expression.
    this.worker = scripts ? new Worker(scripts.createScriptURL('')) : new Worker(new URL('./worker.js', import.meta.url));
    this.ready = new Promise((resolve, reject) => this.handlers.set(undefined, data => data.wrong ? reject(new Error(data.wrong)) : resolve(this.about = data.opened)));
    this.worker.onmessage = ({ data }) => {
      const onEvent = this.handlers.get(data.id);
      // An answer has several events, any other request has one.
      if (!data.event || data.event.finished) this.handlers.delete(data.id);
      onEvent?.(data);
      if (data.isFault) this.close(data.wrong);
    };
    this.worker.onerror = event => this.close(event.message || 'the engine cannot be loaded');
    this.worker.postMessage({ what: 'open', file, gpu });
  }

  /** Yields the events of the answer to `messages`; `signal` or leaving the loop stops it. */
  async *chat(messages, { signal, ...options } = {}) {
    await this.ready;
    signal?.throwIfAborted();
    const events = [];
    let wake = () => {};
    const receive = data => { events.push(data); wake(); };
    const now = Math.floor(Date.now() / 1000) - new Date().getTimezoneOffset() * 60;
    const stop = this.#request('ask', { request: { messages, now, ...options } }, receive);
    const abort = () => receive({ wrong: 'stopped' });
    signal?.addEventListener('abort', abort);
    let isFinished = false;
    try {
      while (!isFinished) {
        while (!events.length) await new Promise(resolve => { wake = resolve; });
        const { wrong, event } = events.shift();
        if (wrong) throw new Error(wrong);
        isFinished = Boolean(event.finished);
        yield* eventsOf(event);
      }
    } finally {
      signal?.removeEventListener('abort', abort);
      if (!isFinished) stop();
    }
  }

  /** Returns the whole answer to `messages`: its text, and the figures of the last event. */
  async complete(messages, options) {
    let text = '';
    for await (const event of this.chat(messages, options)) {
      text += event.text ?? '';
      if (event.finished) return { text, ...event.finished };
    }
  }

  /** Returns the sizes of the KV caches in bytes. */
  async kv() {
    await this.ready;
    return new Promise((resolve, reject) => this.#request('kv', {}, ({ wrong, kv }) => wrong ? reject(new Error(wrong)) : resolve(kv)));
  }

  /** Ends the worker and frees its memory. Pending requests fail with the reason. */
  close(reason = 'closed') {
    if (this.over) return;
    this.over = reason;
    this.worker.terminate();
    const pending = [...this.handlers.values()];
    this.handlers.clear();
    for (const onEvent of pending) onEvent({ wrong: reason });
  }

  /** Sends a request to the worker; `onEvent` receives its events. Returns its cancel function. */
  #request(what, fields, onEvent) {
    if (this.over) throw new Error(this.over);
    const id = ++this.n;
    this.handlers.set(id, onEvent);
    this.worker.postMessage({ what, id, ...fields });
    return () => {
      this.handlers.delete(id);
      this.worker.postMessage({ what: 'stop', id });
    };
  }
}

/** Yields an event of the worker under the names of the API. */
function* eventsOf({ read, said, finished }) {
  if (read) yield { prefill: read };
  const text = said ?? finished?.text;
  if (text) yield { text };
  if (finished) {
    yield {
      finished: {
        finish_reason: finished.reason, prompt_tokens: finished.prompt, cached_tokens: finished.cached, completion_tokens: finished.said,
        kv_bytes: finished.bytes, kv_bytes_f16: finished.bytes_f16, prefill_per_second: finished.read_rate, decode_per_second: finished.rate,
      },
    };
  }
}

/** Returns the file at `url`; browsers keep large ones on disk. `onDownload` receives bytes and total (0 if unknown). */
async function fetchModel(url, signal, onDownload) {
  const response = await fetch(url, { signal });
  if (!response.ok) throw new Error(`${url}: HTTP ${response.status}`);
  let loaded = 0;
  const total = Number(response.headers.get('content-length') ?? 0);
  const counter = new TransformStream({
    transform(chunk, controller) {
      loaded += chunk.length;
      onDownload?.(loaded, total);
      controller.enqueue(chunk);
    },
  });
  return new Response(response.body.pipeThrough(counter)).blob();
}
