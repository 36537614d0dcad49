/* ---- The thread ---- */

const scroller = $('scroller');
const isAtEnd = () => scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 90;
const toEnd = () => { scroller.scrollTop = scroller.scrollHeight; };

function view(node) {
  if (!views.has(node.id)) views.set(node.id, (node.role === 'user' ? userView : answerView)(current, node));
  const nodeView = views.get(node.id);
  nodeView.paint();
  return nodeView.root;
}

function show(goesToEnd = false) {
  const shown = current.path().map(node => {
    const { beside } = current.parent(node);
    return beside.length ? sideBySide(current.parent(node)) : view(node);
  });
  $('thread').replaceChildren(...(shown.length ? shown : [welcome()]));
  if (goesToEnd) toEnd();
  paintRest();
}

function sideBySide(user) {
  const nodes = current.children(user).filter(child => child.id === user.pick || user.beside.includes(child.id));
  const label = el('p', { class: 'agree' });
  const root = el('section', { class: 'beside', 'aria-label': 'Answers side by side' }, label, el('div', {}, ...nodes.map(view)));
  views.set(`${user.id} beside`, { root, paint: () => { label.textContent = agreement(nodes); } });
  views.get(`${user.id} beside`).paint();
  return root;
}

/** Returns the length of the common prefix of answers, in words. */
function agreement(nodes) {
  if (nodes.some(node => !node.end || node.error)) return '';
  const [first, ...others] = nodes.map(node => node.text.trim().split(/\s+/));
  const commonWords = Math.min(...others.map(words => first.findIndex((word, i) => word !== words[i])).map(at => at < 0 ? first.length : at));
  if (others.every(words => words.join() === first.join())) return 'Word for word the same.';
  return `${commonWords ? `The same for the first ${plural(commonWords, 'word')}` : 'Different from the first word'}.`;
}

function welcome() {
  const tries = ['What is the capital of France?', 'Tell me a story'];
  const types = typeName({});
  return el('div', { class: 'hello' }, el('h3', {}, 'What shall we talk about?'),
    el('p', {}, 'Kvant keeps what it has read in a compressed cache', types ? ` (${types} here)` : '', ': above is what that takes, and what f16 would. Any answer can be given again in another type, side by side.'),
    server.about && el('p', {}, server.about),
    el('div', {}, ...tries.map(text => button(text, () => send(text), { class: 'plain' }))));
}

function paint(id) {
  const nodeView = views.get(id);
  if (!nodeView) return;
  nodeView.paint();
  views.get(`${current.nodes.get(id)?.parent} beside`)?.paint();
}

function paintRest() {
  const title = current.title || 'New conversation', busy = isBusy();
  setText('title', title);
  document.title = current.title ? `${title} · Kvant` : 'Kvant';
  $('send').ariaLabel = busy ? 'Stop' : 'Send';
  draw($('send').firstChild, busy ? 'stop' : 'send');
  $('send').disabled = !busy && !$('input').value.trim();
  const last = current.path().findLast(node => node.stats?.prompt);
  // The last generated token has not been fed.
  const used = last ? Math.min(last.stats.prompt + (last.stats.said ?? 0), server.room) : 0;
  setText('room', server.room ? `${count(used)} / ${count(server.room)} tokens` : '');
  if (last) {
    setText('m-rate', rate(last.stats.rate ?? 0));
    setText('m-read', rate(last.stats.read ?? 0));
    setText('m-cached', `${count(last.stats.cached)} of ${count(last.stats.prompt)}`);
  }
}

/* ---- The list of conversations ---- */

function open(conversation, focus = true) {
  current = conversation;
  views.clear();
  save('kvant.open', conversation.id);
  document.body.classList.remove('open');
  $('menu').ariaExpanded = false;
  showList();
  show(true);
  if (focus) $('input').focus();
}

function showList() {
  const sorted = [...conversations.values()].sort((a, b) => b.updated - a.updated);
  $('list').replaceChildren(...sorted.map(entry));
}

function entry(conversation) {
  const title = conversation.title || 'Untitled';
  const item = el('li', {},
    button(title, () => open(conversation), { class: 'cut', 'aria-current': conversation === current && 'true', title }),
    iconButton('pen', `Rename: ${title}`, () => rename(conversation, item)),
    iconButton('out', `Export: ${title}`, () => exportConversations([conversation], title)),
    iconButton('bin', `Delete: ${title}`, () => remove(conversation)));
  return item;
}

function rename(conversation, item) {
  const done = () => {
    conversation.title = input.value.trim() || conversation.title;
    saveConversation(conversation);
    showList();
    paintRest();
  };
  const input = el('input', { 'aria-label': 'Title', onblur: done, onkeydown: event => {
    if (event.key === 'Escape') { event.stopPropagation(); input.value = ''; }
    if (/^(Escape|Enter)$/.test(event.key)) input.blur();
  } });
  input.value = conversation.title;
  item.replaceChildren(input);
  input.select();
}

function remove(conversation) {
  for (const run of runs.values()) if (run.conversation === conversation) run.abort.abort();
  conversations.delete(conversation.id);
  localStorage.removeItem(KEY + conversation.id);
  if (conversation === current) open(new Conversation(), false);
  showList();
  notice(`Deleted: ${conversation.title}`, 'Undo', () => {
    conversations.set(conversation.id, conversation);
    saveConversation(conversation);
    open(conversation);
  });
}

/* ---- KV types ---- */

const TYPES = ['f16', 'q8_0', 'turbo4', 'turbo3', 'turbo3t', 'turbo2', 'q8_0/turbo4', 'q8_0/turbo3', 'turbo4/turbo3', 'turbo4/turbo2'];
let chosen = () => {};

function chooseType(from, then) {
  const menu = $('types'), at = from.getBoundingClientRect();
  chosen = then;
  menu.showPopover();
  const { width, height } = menu.getBoundingClientRect();
  menu.style.left = `${Math.max(8, Math.min(at.left, innerWidth - width - 8))}px`;
  menu.style.top = `${Math.max(8, at.bottom + height + 8 < innerHeight ? at.bottom + 4 : at.top - height - 4)}px`;
  menu.querySelector('button').focus();
}

function buildTypes() {
  const item = type => button(type, () => { $('types').hidePopover(); chosen(type); });
  $('types').lastElementChild.append(...TYPES.map(item));
  const option = type => el('option', { value: type }, type);
  $('kv').append(el('option', { value: '' }, server.defaultLabel), ...TYPES.map(option));
  $('kv').addEventListener('change', () => { settings.kv = $('kv').value; save('kvant.settings', settings); });
}

/* ---- The meter: size of all caches of the server, once a second while the page is visible ---- */

async function poll() {
  clearTimeout(poll.timer);
  if (document.hidden) return;
  try {
    meter(await get('kv'));
    if (!server.room) await loadModelInfo();
  } catch (error) {
    server.room = 0; // The server may return with another model.
    $('meter').classList.add('off');
    setText('m-saved', why(error));
  }
  clearTimeout(poll.timer);
  poll.timer = setTimeout(poll, 1000);
}

/** Paints the meter. `bytes` counts shared blocks once, running_bytes and idle_bytes once per
    sharer: shared_bytes is the difference. */
function meter(kv) {
  server.types = kv.types;
  const f16 = kv.running_bytes_f16 + kv.idle_bytes_f16, whole = Math.max(f16, kv.bytes);
  const shared = Math.min(kv.shared_bytes, kv.bytes);
  const own = Math.min(Math.max(kv.running_bytes - shared, 0), kv.bytes - shared);
  const parts = { shared, own, idle: kv.bytes - shared - own };
  for (const [name, n] of Object.entries(parts)) {
    $('m-bar').querySelector(`.${name}`).style.width = share(n, whole);
    $(`m-${name}`).textContent = `${name} ${bytes(n)}`;
  }
  $('meter').classList.remove('off');
  setText('m-type', typeName({}));
  setText('m-bytes', bytes(kv.bytes));
  $('m-bytes').title = `${count(kv.bytes)} bytes of ${bytes(kv.budget)} that there is room for`;
  setText('m-f16', f16 ? `${bytes(f16)}${kv.bytes ? ` · ${times(f16 / kv.bytes)}` : ''}` : '–');
  $('m-now').textContent = [[kv.running, 'run'], [kv.waiting, 'wait'], [kv.parked, 'parked'], [kv.idle, 'idle']]
    .filter(([n]) => n).map(([n, what]) => `${n} ${what}`).join(', ') || 'none';
  const away = kv.ram_bytes + kv.disk_bytes;
  setText('m-saved', [kv.shared_bytes && `sharing saves ${bytes(kv.shared_bytes)}`, away && `parked ${bytes(away)}`].filter(Boolean).join(' · '));
  $('m-saved').title = `parked: ${bytes(kv.ram_bytes)} in memory, ${bytes(kv.disk_bytes)} on disk`;
  Object.assign($('m-bar'), { ariaValueMax: Math.round(whole), ariaValueNow: kv.bytes, ariaValueText: `${bytes(kv.bytes)}; f16 would take ${bytes(f16)}` });
}

async function loadModelInfo() {
  const { id, meta } = (await get('v1/models')).data[0];
  server.room = meta.n_ctx;
  $('model').textContent = $('model').title = id;
  $('kv').firstElementChild.textContent = `${typeName({})}, ${server.defaultLabel}`;
  const { params } = (await get('props')).default_generation_settings;
  for (const name of ['temperature', 'top_p']) $('settings').querySelector(`[name=${name}]`).placeholder = +params[name].toFixed(3);
  if (!current.path().length) show();
  paintRest();
}

/* ---- Settings, keys, and start ---- */

const THEMES = ['', 'light', 'dark'];

function applyTheme() {
  document.documentElement.style.colorScheme = settings.theme || 'light dark';
}

function nextTheme() {
  settings.theme = THEMES[(THEMES.indexOf(settings.theme) + 1) % 3];
  applyTheme();
  save('kvant.settings', settings);
  notice(`Colours: ${settings.theme || 'as the system'}`);
}

function wireSettings() {
  Object.assign(settings, typed(load('kvant.settings'), Object.keys(settings).join(' ')));
  for (const field of $('settings').querySelectorAll('[name]')) {
    field.value = settings[field.name];
    field.addEventListener('input', () => {
      settings[field.name] = field.value;
      save('kvant.settings', settings);
    });
  }
  if (TYPES.includes(settings.kv)) $('kv').value = settings.kv;
  else settings.kv = '';
  applyTheme();
}

function grow(area) {
  area.style.height = 'auto';
  area.style.height = `${area.scrollHeight + 2}px`;
}

const isEnter = event => event.key === 'Enter' && !event.shiftKey && !event.isComposing;

function wireComposer() {
  const input = $('input');
  const changed = () => { grow(input); paintRest(); save('kvant.draft', input.value); };
  const submit = () => {
    if (isBusy() || !input.value.trim()) return;
    const text = input.value;
    input.value = '';
    changed();
    send(text);
  };
  input.value = load('kvant.draft', '');
  input.addEventListener('input', changed);
  input.addEventListener('keydown', event => {
    if (isEnter(event)) { event.preventDefault(); submit(); }
    const last = event.key === 'ArrowUp' && !input.value && current.path().findLast(node => node.role === 'user');
    if (last && !isBusy()) { event.preventDefault(); views.get(last.id)?.root.dispatchEvent(new Event('edit')); }
  });
  $('composer').addEventListener('submit', event => { event.preventDefault(); isBusy() ? stop() : submit(); });
}

function wireList() {
  const drawer = isOpen => {
    document.body.classList.toggle('open', isOpen);
    $('menu').ariaExpanded = isOpen;
    (isOpen ? $('new') : $('menu')).focus();
  };
  $('menu').addEventListener('click', () => drawer(!document.body.classList.contains('open')));
  $('shade').addEventListener('click', () => drawer(false));
  $('new').addEventListener('click', () => open(new Conversation()));
  $('file').addEventListener('change', async () => { await importFiles($('file').files); $('file').value = ''; });
  $('foot').append(
    iconButton('in', 'Import conversations', () => $('file').click()),
    iconButton('out', 'Export all conversations', exportAll),
    iconButton('keys', 'Keys (Ctrl+/)', () => $('keys').showModal()),
    iconButton('dark', 'Light or dark', nextTheme),
    iconButton('gear', 'Settings', () => $('settings').showModal()));
  return drawer;
}

function wireKeys(drawer) {
  document.addEventListener('keydown', event => {
    if (event.key === '/' && (event.ctrlKey || event.metaKey)) { event.preventDefault(); $('keys').open || $('keys').showModal(); }
    if (event.key !== 'Escape' || document.querySelector('dialog[open], :popover-open')) return;
    document.body.classList.contains('open') ? drawer(false) : stop();
  });
}

function start() {
  try { Object.keys(localStorage).filter(key => key.startsWith(KEY)).forEach(loadConversation); } catch { /* No local storage. */ }
  for (const svg of document.querySelectorAll('[data-icon]')) draw(svg, svg.dataset.icon);
  buildTypes();
  wireSettings();
  wireComposer();
  wireKeys(wireList());
  document.addEventListener('visibilitychange', poll);
  addEventListener('pagehide', () => runs.forEach(run => saveConversation(run.conversation)));
  addEventListener('storage', changedElsewhere);
  open(conversations.get(load('kvant.open')) ?? new Conversation(), matchMedia('(pointer: fine)').matches);
  grow($('input'));
  poll();
}

start();
