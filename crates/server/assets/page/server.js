// The server: backend of the page. The page with a built-in engine (crates/web) replaces this file by
// another one with the same `server`, `why`, `get` and `ask`.

/** Properties of the server, once known, and its texts. */
const server = {
  types: [], room: 0, isKnown: false, models: [], vision: undefined, measured: load('kvant.measured', null), about: '',
  waitingLabel: 'Waits for the server', defaultLabel: 'as served', dropLabel: 'Drop text files and images to attach them',
};
const headers = () => ({ 'Content-Type': 'application/json', ...(settings.key && { Authorization: `Bearer ${settings.key}` }) });

async function refusal(response) {
  let text = await response.text();
  try { text = JSON.parse(text).error.message; } catch { text = text.slice(0, 300); }
  const wait = response.headers.get('Retry-After');
  return new Error((text || `the server answers ${response.status}`) + (wait ? ` (try again in ${wait} s)` : ''));
}

const why = error => error instanceof TypeError ? 'the server cannot be reached' : error.message;

async function get(path) {
  const response = await fetch(path, { headers: headers(), cache: 'no-store' });
  if (!response.ok) throw await refusal(response);
  return response.json();
}

/** Returns the fields that set whether, and how much, a model reasons. */
const reasoningFields = choice => choice === 'off' || choice === 'on' ? { enable_thinking: choice === 'on' } : choice ? { reasoning_effort: choice } : {};

/** Yields the chunks of an answer. */
async function* ask(messages, { system, reasoning, ...options }, signal) {
  Object.assign(options, reasoningFields(reasoning));
  const body = { messages, stream: true, stream_options: { include_usage: true }, return_progress: true, ...options };
  const response = await fetch('v1/chat/completions', { method: 'POST', headers: headers(), body: JSON.stringify(body), signal });
  if (!response.ok) throw await refusal(response);
  let rest = '';
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    const lines = (rest + part.value).split('\n');
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith('data:') && line.slice(5).trim() !== '[DONE]') yield JSON.parse(line.slice(5));
    }
  }
}

