// Controls of the page: settings, models and KV types, the composer, keys, and the start.

/* ---- KV types ---- */

const TYPES = ['f16', 'q8_0', 'turbo4', 'turbo3', 'turbo3t', 'turbo2', 'q8_0/turbo4', 'q8_0/turbo3', 'turbo4/turbo3', 'turbo4/turbo2'];
let chosen = () => {};

function chooseType(from, then) {
  chosen = then;
  popAt($('types'), from);
}

function buildTypes() {
  const item = type => button(type, () => { $('types').hidePopover(); chosen(type); });
  $('types').lastElementChild.append(...TYPES.map(item));
  const option = type => el('option', { value: type }, type);
  $('kv').append(el('option', { value: '' }, server.defaultLabel), ...TYPES.map(option));
  $('kv').addEventListener('change', () => { settings.kv = $('kv').value; saveSettings(); });
}

/* ---- The model ---- */

/** Loads what the server has: its models, and the defaults of sampling. */
async function loadModelInfo() {
  const { data } = await get('v1/models'), { default_generation_settings: { params }, modalities, chat_template: template = '' } = await get('props');
  const at = data.find(({ id }) => id === settings.model) ?? data[0], isFirst = at === data[0];
  Object.assign(server, { isKnown: true, room: at.meta?.n_ctx ?? 0, models: data.length > 1 ? data.map(({ id }) => id) : [], vision: isFirst ? modalities?.vision ?? false : undefined });
  $('model').textContent = $('model').title = at.id;
  $('kv').firstElementChild.textContent = `${typeName({})}, ${server.defaultLabel}`;
  for (const select of [$('models'), field('model')]) {
    select.replaceChildren(...data.map(({ id }) => el('option', { value: id, selected: id === at.id }, id)));
    select.closest('.several, #models').hidden = data.length < 2;
  }
  for (const [name, value] of Object.entries(params)) if (field(name)) field(name).placeholder = +value.toFixed(3);
  field('seed').placeholder = 'random';
  // Only templates that name reasoning have it; those of other models than the first are unknown.
  for (const name of ['reasoning', 'thinking_budget_tokens']) field(name).closest('label').hidden = isFirst && !/think|reasoning/.test(template);
  if (!current.path().length) show();
  paintRest();
}

const field = name => $('settings').querySelector(`[name=${name}]`);

function chooseModel(id) {
  settings.model = id;
  saveSettings();
  server.isKnown = false;
  poll();
}

/* ---- Settings, keys, and start ---- */

const THEMES = ['', 'light', 'dark'];

function applyTheme() {
  document.documentElement.style.colorScheme = settings.theme || 'light dark';
}

function nextTheme() {
  settings.theme = THEMES[(THEMES.indexOf(settings.theme) + 1) % 3];
  applyTheme();
  saveSettings();
  notice(`Colours: ${settings.theme || 'as the system'}`);
}

function wireSettings() {
  Object.assign(settings, typed(load('kvant.settings'), Object.keys(settings).join(' ')));
  const fields = [...$('settings').querySelectorAll('[name]')];
  for (const field of fields) {
    field.value = settings[field.name];
    field.addEventListener('input', () => {
      settings[field.name] = field.value;
      saveSettings();
      if (field.name === 'key') server.isKnown = false;
    });
  }
  $('reset').addEventListener('click', () => {
    for (const field of fields.filter(({ name }) => !/^(model|system|key)$/.test(name))) field.value = settings[field.name] = '';
    saveSettings();
  });
  for (const select of [$('models'), field('model')]) select.addEventListener('change', () => chooseModel(select.value));
  if (TYPES.includes(settings.kv)) $('kv').value = settings.kv;
  else settings.kv = '';
  applyTheme();
}

function grow(area) {
  area.style.height = 'auto';
  area.style.height = `${area.scrollHeight + 2}px`;
}

// The Enter of a touch keyboard begins a new line.
const isEnter = event => event.key === 'Enter' && !event.shiftKey && !event.isComposing && !matchMedia('(pointer: coarse)').matches;

function wireComposer() {
  const input = $('input');
  const changed = () => { grow(input); paintRest(); save('kvant.draft', input.value); };
  const submit = () => {
    if (isBusy() || !input.value.trim() && !attached.length) return;
    const text = input.value, files = attached;
    input.value = '';
    attached = [];
    changed();
    showAttached();
    send(text, files);
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

const isTyping = node => node.matches('textarea, select, input, [contenteditable]');

function wireKeys() {
  const chords = {
    '/': () => $('keys').showModal(), ',': () => $('settings').showModal(),
    k: () => { if (getComputedStyle($('menu')).display !== 'none') drawer(true); $('search').select(); },
  };
  document.addEventListener('keydown', event => {
    const isOver = document.querySelector('dialog[open]'), isChord = event.ctrlKey || event.metaKey, key = event.key.toLowerCase();
    if (event.key === 'Escape' && !document.querySelector('dialog[open], :popover-open')) {
      document.body.classList.contains('open') ? drawer(false) : stop();
    }
    if (isOver) return;
    const act = isChord && event.shiftKey && key === 'o' ? () => open(new Conversation())
      : isChord && !event.shiftKey && Object.hasOwn(chords, key) ? chords[key]
      : key === '?' && !isTyping(event.target) ? chords['/'] : null;
    if (act) { event.preventDefault(); act(); }
  });
}

async function start() {
  for (const svg of document.querySelectorAll('[data-icon]')) draw(svg, svg.dataset.icon);
  findMathFont();
  buildTypes();
  wireSettings();
  wireComposer();
  wireList();
  wireFiles();
  wireKeys();
  scroller.addEventListener('scroll', paintDown, { passive: true });
  $('down').addEventListener('click', () => { toEnd(); $('input').focus(); });
  document.addEventListener('visibilitychange', poll);
  addEventListener('pagehide', () => runs.forEach(run => saveConversation(run.conversation)));
  await loadConversations();
  channel.addEventListener('message', changedElsewhere);
  open(conversations.get(load('kvant.open')) ?? new Conversation(), matchMedia('(pointer: fine)').matches);
  grow($('input'));
  poll();
}

start();
