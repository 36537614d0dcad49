// Helpers: elements, icons, numbers as text, the clipboard, short notices.

const $ = id => document.getElementById(id);
const SVG = 'http://www.w3.org/2000/svg';

/** Creates an element; a property whose name starts with "on" is an event listener, the others are
    attributes. */
function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (name.startsWith('on')) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, '');
    else if (value !== false && value != null) node.setAttribute(name, value);
  }
  // One by one: a call takes some 100,000 arguments at most, and an answer may have more pieces.
  for (const child of children.flat()) if (child != null && child !== false) node.append(child);
  return node;
}

const ICONS = {
  plus: 'M8 3v10M3 8h10', menu: 'M2.5 4.5h11M2.5 8h11M2.5 11.5h11', close: 'm4 4 8 8m0-8-8 8', tick: 'm3 8.5 3.5 3.5L13 4.5',
  left: 'M10 3.5 5.5 8l4.5 4.5', right: 'M6 3.5 10.5 8 6 12.5', send: 'M8 13V3.5m-4 4 4-4 4 4', stop: 'M5 5h6v6H5z',
  copy: 'M5.5 5.5h8v8h-8zM3 10.5h-.5v-8h8V3', pen: 'M10.5 3 13 5.5 5.5 13l-3 .5.5-3z', again: 'M13 8a5 5 0 1 1-1.5-3.6M13 2.5v3h-3',
  beside: 'M2 3h5v10H2zm7 0h5v10H9z', bin: 'M2.5 4.5h11M6 4.5v-2h4v2m-6 0 .7 9h6.6l.7-9m-5.3 3v3.5m2.6-3.5V11',
  out: 'M8 2.5V10m-3-3 3 3 3-3m-8 6.5h10', in: 'M8 10.5V3M5 6l3-3 3 3m-8 7.5h10',
  search: 'M7 2.5a4.5 4.5 0 1 1 0 9 4.5 4.5 0 0 1 0-9zm3.3 7.8 3.2 3.2', more: 'M3.5 8h.1m4.3 0h.1m4.3 0h.1', down: 'M8 3v9.5m-4-4 4 4 4-4',
  clip: 'M4.5 7v3.5a3.5 3.5 0 0 0 7 0V4.5a2.3 2.3 0 0 0-4.6 0v6a1.1 1.1 0 0 0 2.2 0V6', page: 'M3.5 1.8h6l3 3v9.4h-9zm2 5h5m-5 3h5',
  gear: 'M2.5 5H8m3 0h2.5M2.5 11H5m3 0h5.5M9.5 3.5v3m-3 3v3', dark: 'M13 9.5A5.5 5.5 0 1 1 6.5 3 4.5 4.5 0 0 0 13 9.5z',
  keys: 'M1.5 4h13v8.5h-13zm2.7 2.8h.1m2.4 0h.1m2.4 0h.1m2.4 0h.1M5 9.7h6',
};

function draw(svg, name) {
  for (const [key, value] of Object.entries({ class: `i i-${name}`, viewBox: '0 0 16 16', 'aria-hidden': 'true' })) svg.setAttribute(key, value);
  svg.replaceChildren(document.createElementNS(SVG, 'path'));
  svg.firstChild.setAttribute('d', ICONS[name]);
  return svg;
}

const icon = name => draw(document.createElementNS(SVG, 'svg'), name);

const button = (label, onclick, props, ...children) => el('button', { type: 'button', onclick, ...props }, ...children, label);
const iconButton = (name, label, onclick, props) => button('', onclick, { class: 'icon', title: label, 'aria-label': label, ...props }, icon(name));

function bytes(n) {
  const units = ['B', 'KiB', 'MiB', 'GiB'];
  let unit = 0;
  for (; n >= 1024 && unit < 3; unit++) n /= 1024;
  return `${unit === 0 || n >= 99.95 ? Math.round(n) : n.toFixed(1)} ${units[unit]}`;
}

const count = n => Math.round(n).toLocaleString('en');
const rate = n => `${n >= 100 ? count(n) : n.toFixed(1)} tok/s`;
const seconds = ms => `${(ms / 1000).toFixed(2)} s`;
const times = n => `${n.toFixed(1)}×`;
const share = (part, whole) => `${whole > 0 ? Math.min(100, part / whole * 100) : 0}%`;
const plural = (n, one) => `${count(n)} ${one}${n === 1 ? '' : 's'}`;

// crypto.randomUUID exists only if the page was loaded over TLS or from this machine.
const newId = () => [...crypto.getRandomValues(new Uint32Array(2))].map(n => n.toString(36)).join('');

async function copy(text, from) {
  try {
    await navigator.clipboard.writeText(text);
  } catch { // Without TLS only this clipboard is available.
    const area = el('textarea', { class: 'unseen' });
    area.value = text;
    from.after(area);
    area.select();
    document.execCommand('copy');
    area.remove();
  }
  const svg = from.querySelector('svg');
  draw(svg, 'tick');
  setTimeout(draw, 1200, svg, 'copy');
  announce('Copied.');
}

const setText = (id, text) => { $(id).textContent = text; };

/** Announces a text to screen readers. */
const announce = text => setText('live', text);

/** Shows a transient line, with an optional action. */
function notice(text, label, action) {
  const hide = () => { $('notice').hidden = true; };
  $('notice').replaceChildren(text, label ? button(label, () => { hide(); action(); }) : '');
  $('notice').hidden = false;
  clearTimeout(notice.timer);
  notice.timer = setTimeout(hide, label ? 9000 : 5000);
}


/** Shows a menu of buttons at the one that opened it. */
function popAt(menu, from, items) {
  const at = from.getBoundingClientRect();
  if (items) menu.replaceChildren(...items);
  menu.showPopover();
  const { width, height } = menu.getBoundingClientRect();
  menu.style.left = `${Math.max(8, Math.min(at.left, innerWidth - width - 8))}px`;
  menu.style.top = `${Math.max(8, at.bottom + height + 8 < innerHeight ? at.bottom + 4 : at.top - height - 4)}px`;
  menu.querySelector('button').focus();
}
