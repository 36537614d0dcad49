// Answers: requests, their streams, and the views of messages.

/** Returns the options of a request by the current settings. Without a seed a random one is set
    here, so that an answer from another cache samples the same way. */
function requestOptions() {
  const options = {};
  for (const name of [...NUMBERS.split(' '), 'thinking_budget_tokens']) {
    if (settings[name] !== '' && Number.isFinite(+settings[name])) options[name] = +settings[name];
  }
  options.seed ??= crypto.getRandomValues(new Uint32Array(1))[0] >>> 1;
  if (settings.reasoning) options.reasoning = settings.reasoning;
  if (server.models.includes(settings.model)) options.model = settings.model;
  if (settings.system.trim()) options.system = settings.system;
  if (settings.kv) options.kv_type = settings.kv;
  return options;
}

const typeName = options => {
  const [k, v = k] = options.kv_type ? options.kv_type.split('/') : server.types;
  return k === v ? k : `${k}/${v}`;
};

/* ---- Answering ---- */

/** Answers in progress, by node. */
const runs = new Map();

/** Starts an answer, which continues asynchronously. */
function answer(conversation, user, options) {
  const node = conversation.add(user, { role: 'assistant', thought: '', end: '', asked: options, stats: { type: typeName(options) ?? '', ...(options.model && { model: options.model }) } });
  runs.set(node.id, { conversation, abort: new AbortController(), progress: null, n: 0, begun: performance.now(), since: 0, announced: 0, spoken: 0 });
  markUpdated(conversation);
  runRequest(node, runs.get(node.id), conversation.messages(user, options.system));
  return node;
}

async function runRequest(node, run, messages) {
  try {
    for await (const chunk of ask(messages, node.asked, run.abort.signal)) applyChunk(node, run, chunk);
    if (!node.end) throw new Error('the connection ended before the answer did');
  } catch (error) {
    node.end = run.abort.signal.aborted ? 'stopped' : 'error';
    if (node.end === 'error') node.error = why(error);
  }
  runs.delete(node.id);
  markUpdated(run.conversation);
  showList();
  poll();
  if (run.conversation !== current) return;
  paint(node.id);
  paintRest();
  announce(node.error ? `Error: ${node.error}` : splitReasoning(node).text.slice(run.spoken) || 'The answer ends.');
}

/** Announces the whole sentences of an answer as it grows, at most every three seconds: a screen reader
    finishes one announcement before the next. */
function announceGrowth(node, run) {
  if (performance.now() - run.announced < 3000) return;
  const { text } = splitReasoning(node), rest = text.slice(run.spoken);
  const end = /^[^]*[.!?:;\n](?=\s)/.exec(rest)?.[0].length ?? 0;
  if (!end) return;
  announce(rest.slice(0, end));
  run.spoken += end;
  run.announced = performance.now();
}

function applyChunk(node, run, chunk) {
  if (chunk.error) throw new Error(chunk.error.message ?? 'the server reports an error');
  const [choice] = chunk.choices ?? [];
  if (chunk.prompt_progress) run.progress = chunk.prompt_progress;
  if (choice?.delta?.reasoning_content || choice?.delta?.content) {
    node.thought += choice.delta.reasoning_content ?? '';
    node.text += choice.delta.content ?? '';
    if (!run.since) node.stats.ttft = Math.round((run.since = performance.now()) - run.begun);
    run.n++;
    saveSoon(run.conversation);
  }
  if (choice?.finish_reason) node.end = choice.finish_reason;
  const { stats } = node, { kv, timings, usage } = chunk;
  if (kv) Object.assign(stats, { bytes: kv.bytes, f16: kv.bytes_f16 });
  if (timings) Object.assign(stats, { said: timings.predicted_n, rate: timings.predicted_per_second, read: timings.prompt_per_second });
  if (usage) Object.assign(stats, { prompt: usage.prompt_tokens, cached: usage.prompt_tokens_details?.cached_tokens ?? 0 });
  if (stats.bytes && stats.prompt) save('kvant.measured', server.measured = { bytes: stats.bytes, f16: stats.f16, used: stats.prompt + (stats.said ?? 0) });
  run.due ||= requestAnimationFrame(() => {
    run.due = 0;
    if (run.conversation !== current) return;
    const stays = isAtEnd();
    paint(node.id);
    paintHorizon();
    announceGrowth(node, run);
    if (stays) toEnd();
  });
}

/** Splits output into reasoning and text: some models write both tags around their reasoning, some
    only the closing one. */
function splitReasoning({ thought = '', text }) {
  const found = /^\s*(?:<think>)?([^]*?)(?:<\/think>\s*|$)/.exec(text);
  const isReasoning = /^\s*<think>/.test(text) || text.includes('</think>');
  return isReasoning ? { thought: thought + found[1].trim(), text: text.slice(found[0].length) } : { thought, text };
}

function send(text, files = []) {
  conversations.set(current.id, current);
  current.title ||= (text.trim() || files[0]?.name || '').split('\n')[0].slice(0, 60);
  const last = current.path().at(-1) ?? current.root;
  // Roles alternate: an unanswered message is replaced by the new one, and remains as its sibling.
  sendUserMessage(current, last.role === 'user' ? current.parent(last) : last, text, files);
}

function sendUserMessage(conversation, parent, text, files = []) {
  const user = conversation.add(parent, { role: 'user', text, ...(files.length && { files }) });
  [parent.pick, parent.beside] = [user.id, []];
  answer(conversation, user, requestOptions());
  showList();
  show(true);
}

function regenerate(conversation, node, inType) {
  const user = conversation.parent(node);
  const { id } = answer(conversation, user, inType ? { ...node.asked, kv_type: inType } : requestOptions());
  selectVersions(conversation, user, inType ? [user.pick, ...user.beside, id] : [id]);
  const { root } = views.get(id);
  (root.closest('.beside') ?? root).scrollIntoView({ block: inType ? 'start' : 'nearest' });
}

const isBusy = () => [...runs.values()].some(run => run.conversation === current);

function stop() {
  for (const run of runs.values()) if (run.conversation === current) run.abort.abort();
}

/* ---- The view of a message ---- */

/** Views of the open conversation, by node: { root, paint }. */
const views = new Map();

/** Selects the first of the children and shows the others beside it. */
function selectVersions(conversation, parent, children) {
  [parent.pick, ...parent.beside] = children;
  saveConversation(conversation);
  show();
}

function versionButtons(conversation, node) {
  const { children } = conversation.parent(node);
  if (children.length < 2) return null;
  const at = children.indexOf(node.id);
  const go = (to, side) => {
    selectVersions(conversation, conversation.parent(node), [children[to]]);
    // The focus stays on the arrow, or moves to the other one at the first or last version.
    const step = views.get(children[to]).root.querySelectorAll('.step button');
    (step[side].disabled ? step[1 - side] : step[side]).focus();
  };
  return el('span', { class: 'step', role: 'group', 'aria-label': `Version ${at + 1} of ${children.length}` },
    iconButton('left', 'Version before', () => go(at - 1, 0), { disabled: at === 0 }),
    `${at + 1}/${children.length}`,
    iconButton('right', 'Version after', () => go(at + 1, 1), { disabled: at === children.length - 1 }));
}

function userView(conversation, node) {
  const tools = el('div', { class: 'tools' });
  const files = node.files?.length && el('div', { class: 'files' }, node.files.map(file => fileView(file)));
  const bubble = el('div', { class: 'bubble', hidden: !node.text, tabindex: node.text.length > 2000 && 0 }, node.text);
  const shown = [files, bubble, tools].filter(Boolean);
  const root = el('article', { class: 'user', 'aria-label': 'You' }, ...shown);
  const paint = () => {
    const copyButton = iconButton('copy', 'Copy', () => copy(node.text, copyButton));
    tools.replaceChildren(...[versionButtons(conversation, node), copyButton, iconButton('pen', 'Edit', edit)].filter(Boolean));
  };
  const edit = () => root.replaceChildren(editor(node.text, text => {
    root.replaceChildren(...shown);
    if (text === null) tools.lastChild.focus();
    else sendUserMessage(conversation, conversation.parent(node), text, node.files);
  }));
  root.addEventListener('edit', edit);
  return { root, paint };
}

/** Returns the editor of a message; `done` receives the new text, or null. */
function editor(text, done) {
  const area = el('textarea', { 'aria-label': 'Edit the message', rows: 1, oninput: () => grow(area) });
  area.value = text;
  const submit = () => area.value.trim() && !isBusy() && done(area.value);
  area.addEventListener('keydown', event => {
    if (event.key === 'Escape') { event.stopPropagation(); done(null); }
    if (isEnter(event)) { event.preventDefault(); submit(); }
  });
  queueMicrotask(() => { grow(area); area.focus(); area.setSelectionRange(text.length, text.length); });
  const buttons = [button('Cancel', () => done(null), { class: 'plain' }), button('Send', submit, { class: 'plain strong' })];
  return el('div', { class: 'edit' }, area, el('div', { class: 'row' }, ...buttons));
}

function answerView(conversation, node) {
  const head = el('div', { class: 'head' });
  const reasoning = el('div', { class: 'text' });
  const summary = el('summary');
  const details = el('details', {}, summary, reasoning);
  const text = el('div', { class: 'text' });
  const footer = el('div');
  const root = el('article', { class: 'answer', 'aria-label': 'Kvant' }, head, details, text, footer);
  const paint = () => {
    const run = runs.get(node.id), output = splitReasoning(node);
    root.classList.toggle('busy', !!run && !!(output.text || output.thought));
    root.ariaBusy = !!run;
    details.hidden = !output.thought;
    summary.textContent = run && !output.text ? 'Thinking …' : 'Thoughts';
    render(reasoning, output.thought);
    render(text, output.text);
    paintHead(conversation, node, head, root);
    footer.replaceChildren(...answerFooter(conversation, node, run, output));
  };
  return { root, paint };
}

/** Paints the head of an answer that is shown beside others: its KV type, and whether the
    conversation continues from it. */
function paintHead(conversation, node, head, root) {
  const user = conversation.parent(node), isPicked = user.pick === node.id;
  head.hidden = !user.beside.length;
  root.classList.toggle('picked', isPicked && !head.hidden);
  if (head.hidden) return;
  const rest = [user.pick, ...user.beside].filter(id => id !== node.id);
  const pick = () => selectVersions(conversation, user, [node.id, ...rest]);
  const close = () => selectVersions(conversation, user, rest);
  head.replaceChildren(node.stats?.type || 'answer', el('small', {}, node.stats?.bytes ? bytes(node.stats.bytes) : ''),
    isPicked ? el('span', { class: 'tag' }, 'goes on from here') : button('Go on from here', pick, { class: 'tag' }),
    iconButton('close', 'Put aside', close));
}

function answerFooter(conversation, node, run, output) {
  if (run) return [running(node, run)];
  const failed = node.error && el('p', { class: 'wrong', role: 'alert' }, node.error);
  const copyButton = iconButton('copy', 'Copy', () => copy(output.text, copyButton));
  const besideButton = button('Again in …', () => chooseType(besideButton, type => regenerate(conversation, node, type)),
    { class: 'icon', title: 'Answer again in another KV type' }, icon('beside'));
  const tools = el('div', { class: 'tools' }, conversation.parent(node).beside.length ? null : versionButtons(conversation, node),
    copyButton, iconButton('again', 'Answer again', () => regenerate(conversation, node)), besideButton);
  return [failed, cost(node), tools].filter(Boolean);
}

function running(node, { progress, n, since }) {
  if (n) {
    const seconds = (performance.now() - since) / 1000;
    return el('p', { class: 'cost' }, `${plural(n, 'token')}${seconds > .5 ? ` · ${rate(n / seconds)}` : ''}`);
  }
  const { total = 0, cache = 0, processed = 0 } = progress ?? {};
  const status = total ? `Reads ${count(processed)} of ${plural(total, 'token')}${cache ? `, ${count(cache)} were cached` : ''}` : server.waitingLabel;
  return el('div', { class: 'reading' }, el('progress', total ? { max: total, value: processed, 'aria-label': 'Reading the prompt' } : { 'aria-label': 'Waiting' }), status);
}

const ENDS = { stopped: 'stopped', length: 'cut at the token limit' };

/** Returns the cost of an answer: "turbo3: 1.2 MiB (f16 5.9 MiB, 4.9×)". */
function cost({ stats, end }) {
  const parts = [];
  if (stats?.model) parts.push(stats.model);
  if (ENDS[end]) parts.push(ENDS[end]);
  if (stats?.rate) parts.push(rate(stats.rate));
  if (stats?.ttft && stats.prompt) parts.push(`TTFT ${seconds(stats.ttft)}`);
  if (stats?.prompt) parts.push(`${count(stats.cached ?? 0)} of ${plural(stats.prompt, 'prompt token')} cached`);
  if (!stats?.bytes) return parts.length ? el('p', { class: 'cost' }, parts.join(' · ')) : null;
  const bar = el('span', { class: 'bar', 'aria-hidden': 'true' }, el('i'));
  bar.firstChild.style.width = share(stats.bytes, stats.f16);
  return el('p', { class: 'cost', 'data-bytes': stats.bytes }, bar, el('b', {}, `${stats.type ?? 'KV'}: ${bytes(stats.bytes)}`),
    [` (f16 ${bytes(stats.f16)}, ${times(stats.f16 / stats.bytes)})`, ...parts].join(' · '));
}

