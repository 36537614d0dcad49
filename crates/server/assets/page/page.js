/* ---- The thread ---- */

const scroller = $('scroller');
const isAtEnd = () => scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 90;
const toEnd = () => { scroller.scrollTop = scroller.scrollHeight; };

function view(node) {
  if (!views.has(node.id)) views.set(node.id, (node.role === 'user' ? userView : answerView)(current, node));
  const made = views.get(node.id);
  made.paint();
  return made.root;
}

function show(goesToEnd = false) {
  const shown = current.path().map(node => {
    const { beside } = current.parent(node);
    return beside.length ? sideBySide(current.parent(node)) : view(node);
  });
  $('thread').replaceChildren(...(shown.length ? shown : [hello()]));
  if (goesToEnd) toEnd();
  paintRest();
}

function sideBySide(user) {
  const nodes = current.kids(user).filter(kid => kid.id === user.pick || user.beside.includes(kid.id));
  const told = el('p', { class: 'agree' });
  const root = el('section', { class: 'beside', 'aria-label': 'Answers side by side' }, told, el('div', {}, ...nodes.map(view)));
  views.set(`${user.id} beside`, { root, paint: () => { told.textContent = agreement(nodes); } });
  views.get(`${user.id} beside`).paint();
  return root;
}

/** Returns the length of the common prefix of answers, in words. */
function agreement(nodes) {
  if (nodes.some(node => !node.end || node.error)) return '';
  const [first, ...others] = nodes.map(node => node.text.trim().split(/\s+/));
  const least = Math.min(...others.map(words => first.findIndex((word, i) => word !== words[i])).map(at => at < 0 ? first.length : at));
  if (others.every(words => words.join() === first.join())) return 'Word for word the same.';
  return `${least ? `The same for the first ${plural(least, 'word')}` : 'Different from the first word'}.`;
}

function hello() {
  const tries = ['What is the capital of France?', 'Tell me a story'];
  const types = typeName({});
  return el('div', { class: 'hello' }, el('h3', {}, 'What shall we talk about?'),
    el('p', {}, 'Kvant keeps what it has read in a compressed cache', types ? ` (${types} here)` : '', ': above is what that takes, and what f16 would. Any answer can be given again in another type, side by side.'),
    server.about && el('p', {}, server.about),
    el('div', {}, ...tries.map(text => button(text, () => send(text), { class: 'plain' }))));
}

function paint(id) {
  const made = views.get(id);
  if (!made) return;
  made.paint();
  views.get(`${current.nodes.get(id)?.parent} beside`)?.paint();
}

function paintRest() {
  const title = current.title || 'New conversation', busy = isBusy();
  tell('title', title);
  document.title = current.title ? `${title} · Kvant` : 'Kvant';
  $('send').ariaLabel = busy ? 'Stop' : 'Send';
  draw($('send').firstChild, busy ? 'stop' : 'send');
  $('send').disabled = !busy && !$('input').value.trim();
  const last = current.path().findLast(node => node.stats?.prompt);
  // The last generated token has not been fed.
  const used = last ? Math.min(last.stats.prompt + (last.stats.said ?? 0), server.room) : 0;
  tell('room', server.room ? `${count(used)} / ${count(server.room)} tokens` : '');
  if (last) {
    tell('m-rate', rate(last.stats.rate ?? 0));
    tell('m-read', rate(last.stats.read ?? 0));
    tell('m-cached', `${count(last.stats.cached)} of ${count(last.stats.prompt)}`);
  }
}

/* ---- The list of conversations ---- */

function open(talk, focus = true) {
  current = talk;
  views.clear();
  keep('kvant.open', talk.id);
  document.body.classList.remove('open');
  $('menu').ariaExpanded = false;
  showList();
  show(true);
  if (focus) $('input').focus();
}

function showList() {
  const sorted = [...talks.values()].sort((a, b) => b.updated - a.updated);
  $('list').replaceChildren(...sorted.map(entry));
}

function entry(talk) {
  const title = talk.title || 'Untitled';
  const item = el('li', {},
    button(title, () => open(talk), { class: 'cut', 'aria-current': talk === current && 'true', title }),
    iconButton('pen', `Rename: ${title}`, () => rename(talk, item)),
    iconButton('out', `Export: ${title}`, () => exportTalks([talk], title)),
    iconButton('bin', `Delete: ${title}`, () => remove(talk)));
  return item;
}

function rename(talk, item) {
  const done = () => {
    talk.title = input.value.trim() || talk.title;
    keepTalk(talk);
    showList();
    paintRest();
  };
  const input = el('input', { 'aria-label': 'Title', onblur: done, onkeydown: event => {
    if (event.key === 'Escape') { event.stopPropagation(); input.value = ''; }
    if (/^(Escape|Enter)$/.test(event.key)) input.blur();
  } });
  input.value = talk.title;
  item.replaceChildren(input);
  input.select();
}

function remove(talk) {
  for (const run of runs.values()) if (run.talk === talk) run.abort.abort();
  talks.delete(talk.id);
  localStorage.removeItem(KEY + talk.id);
  if (talk === current) open(new Conversation(), false);
  showList();
  notice(`Deleted: ${talk.title}`, 'Undo', () => {
    talks.set(talk.id, talk);
    keepTalk(talk);
    open(talk);
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
  $('kv').append(el('option', { value: '' }, server.unsaid), ...TYPES.map(option));
  $('kv').addEventListener('change', () => { settings.kv = $('kv').value; keep('kvant.settings', settings); });
}

/* ---- The meter: size of all caches of the server, once a second while the page is visible ---- */

async function poll() {
  clearTimeout(poll.timer);
  if (document.hidden) return;
  try {
    meter(await get('kv'));
    if (!server.room) await meet();
  } catch (error) {
    server.room = 0; // The server may return with another model.
    $('meter').classList.add('off');
    tell('m-saved', why(error));
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
  tell('m-type', typeName({}));
  tell('m-bytes', bytes(kv.bytes));
  $('m-bytes').title = `${count(kv.bytes)} bytes of ${bytes(kv.budget)} that there is room for`;
  tell('m-f16', f16 ? `${bytes(f16)}${kv.bytes ? ` · ${times(f16 / kv.bytes)}` : ''}` : '–');
  $('m-now').textContent = [[kv.running, 'run'], [kv.waiting, 'wait'], [kv.parked, 'parked'], [kv.idle, 'idle']]
    .filter(([n]) => n).map(([n, what]) => `${n} ${what}`).join(', ') || 'none';
  const away = kv.ram_bytes + kv.disk_bytes;
  tell('m-saved', [kv.shared_bytes && `sharing saves ${bytes(kv.shared_bytes)}`, away && `parked ${bytes(away)}`].filter(Boolean).join(' · '));
  $('m-saved').title = `parked: ${bytes(kv.ram_bytes)} in memory, ${bytes(kv.disk_bytes)} on disk`;
  Object.assign($('m-bar'), { ariaValueMax: Math.round(whole), ariaValueNow: kv.bytes, ariaValueText: `${bytes(kv.bytes)}; f16 would take ${bytes(f16)}` });
}

async function meet() {
  const { id, meta } = (await get('v1/models')).data[0];
  server.room = meta.n_ctx;
  $('model').textContent = $('model').title = id;
  $('kv').firstElementChild.textContent = `${typeName({})}, ${server.unsaid}`;
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
  keep('kvant.settings', settings);
  notice(`Colours: ${settings.theme || 'as the system'}`);
}

function wireSettings() {
  Object.assign(settings, typed(recall('kvant.settings'), Object.keys(settings).join(' ')));
  for (const field of $('settings').querySelectorAll('[name]')) {
    field.value = settings[field.name];
    field.addEventListener('input', () => {
      settings[field.name] = field.value;
      keep('kvant.settings', settings);
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
  const changed = () => { grow(input); paintRest(); keep('kvant.draft', input.value); };
  const submit = () => {
    if (isBusy() || !input.value.trim()) return;
    const text = input.value;
    input.value = '';
    changed();
    send(text);
  };
  input.value = recall('kvant.draft', '');
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
  try { Object.keys(localStorage).filter(key => key.startsWith(KEY)).forEach(loadTalk); } catch { /* No local storage. */ }
  for (const svg of document.querySelectorAll('[data-icon]')) draw(svg, svg.dataset.icon);
  buildTypes();
  wireSettings();
  wireComposer();
  wireKeys(wireList());
  document.addEventListener('visibilitychange', poll);
  addEventListener('pagehide', () => runs.forEach(run => keepTalk(run.talk)));
  addEventListener('storage', changedElsewhere);
  open(talks.get(recall('kvant.open')) ?? new Conversation(), matchMedia('(pointer: fine)').matches);
  grow($('input'));
  poll();
}

start();
