// Markdown: text becomes nodes, never markup. The first parser that recognizes a block consumes its
// lines: it returns the line after the block and a function that builds it, or nothing.

// Endless repetition, which models produce, stays cheap: every lookahead is bounded.
const INLINE = new RegExp([
  /\\\((?<round>[^]{1,999}?)\\\)/,
  /\\\[(?<square>[^]{1,999}?)\\\]/,
  /(?<![\w$])\$\$(?<dollars>[^]{1,999}?)\$\$/,
  /(?<![\w$])\$(?![\s$])(?<dollar>(?:\\[^\n]|[^\\$\n]){1,500})(?<!\s)\$(?![\w$])/,
  /<(?<br>br)\s*\/?>/,
  /\\(?<escaped>[!-\/:-@[-`{-~])/,
  /(?<!`)(?<tick>`+)(?!`)(?<code>[^]{1,4000}?)(?<!`)\k<tick>(?!`)/,
  /!?\[(?<label>[^[\]]*)\]\(\s*<?(?<href>[^\s()<>]*(?:\([^\s()<>]*\)[^\s()<>]*)*)>?(?:\s+"[^"]*")?\s*\)/,
  /<(?<auto>https?:\/\/[^\s<>]+)>/,
  /(?<bare>https?:\/\/[^\s<>"'`]*[^\s<>"'`.,;:!?)\]*_~])/,
  /\*\*(?=\S)(?!\*\*)(?<bold>[^]{1,999}?)(?<!\s)\*\*(?!\*)/,
  /(?<!\w)__(?=[^\s_])(?<bold2>[^]{1,999}?)(?<!\s)__(?!\w)/,
  /~~(?=\S)(?<struck>[^~]{1,999}?)(?<!\s)~~/,
  /\*(?=[^\s*])(?<italic>[^*]+?)(?<!\s)\*(?!\*)/,
  /(?<!\w)_(?=[^\s_])(?<italic2>[^_]+?)(?<!\s)_(?!\w)/,
].map(part => part.source).join('|'), 'g');

/** Returns the texts and elements of a line, neighbouring texts as one. */
function inline(text) {
  const out = [];
  let [at, plain] = [0, ''];
  const flush = () => { if (plain) out.push(plain); plain = ''; };
  for (const match of text.matchAll(INLINE)) {
    plain += text.slice(at, match.index);
    at = match.index + match[0].length;
    const node = inlineNode(match);
    if (typeof node === 'string') plain += node;
    else { flush(); out.push(node); }
  }
  plain += text.slice(at);
  flush();
  return out;
}

function inlineNode({ 0: whole, groups: g }) {
  if (g.escaped) return g.escaped;
  if (g.round ?? g.dollar) return math(g.round ?? g.dollar, false, whole);
  if (g.square ?? g.dollars) return math(g.square ?? g.dollars, true, whole);
  if (g.br) return el('br');
  if (g.struck) return el('del', {}, inline(g.struck));
  if (g.code) return el('code', {}, g.code.replace(/^ (.+) $/, '$1'));
  if (g.label !== undefined) return link(g.href, g.label ? inline(g.label) : [g.href], whole);
  if (g.auto ?? g.bare) return link(g.auto ?? g.bare, [g.auto ?? g.bare], whole);
  if (g.bold ?? g.bold2) return el('strong', {}, inline(g.bold ?? g.bold2));
  return el('em', {}, inline(g.italic ?? g.italic2));
}

/** Returns a web link; other schemes (javascript:, data:) stay text. Images become links too: none
    is fetched. */
function link(href, label, whole) {
  if (!/^https?:\/\//i.test(href)) return whole;
  return el('a', { href, target: '_blank', rel: 'noopener noreferrer' }, label);
}

const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(\s+|$)/;
const RULE = /^ {0,3}([-*_])( *\1){2,} *$/;
const isBlank = line => line === undefined || !line.trim();

function fence(lines, at) {
  const open = /^ {0,3}(`{3,}|~{3,})\s*([^\s`]*)/.exec(lines[at]);
  if (!open) return;
  const close = new RegExp(`^ {0,3}${open[1][0]}{${open[1].length},}\\s*$`);
  let end = at + 1;
  while (end < lines.length && !close.test(lines[end])) end++;
  const code = lines.slice(at + 1, end).join('\n');
  return { end: end + 1, build: () => open[2] === 'math' ? math(code, true) : codeBlock(code, open[2]) };
}

/** Parses a formula on lines of its own; one that is not closed yet is text. */
function formula(lines, at) {
  const open = /^ {0,3}(?:(\$\$)|(\\\[)|\\begin\{((?:align|aligned|equation|gather|cases|[pbv]?matrix)\*?)\})/.exec(lines[at]);
  if (!open) return;
  const close = open[1] ?? (open[2] ? '\\]' : `\\end{${open[3]}}`);
  const rest = [lines[at].slice(open[0].length), ...lines.slice(at + 1, at + 60)];
  const end = rest.findIndex(line => line.includes(close));
  const [last, ...after] = rest[end]?.split(close) ?? [];
  if (end < 0 || after.join('').trim()) return;
  const source = [...rest.slice(0, end), last].join('\n');
  return { end: at + end + 1, build: () => el('div', { class: 'scroll', tabindex: 0 }, math(open[3] ? open[0] + source + close : source, true)) };
}

function heading(lines, at) {
  const found = /^ {0,3}(#{1,6})\s+(.*)/.exec(lines[at]);
  return found && { end: at + 1, build: () => el(`h${Math.min(found[1].length + 2, 6)}`, {}, inline(found[2].trim().replace(/ #+$/, ''))) };
}

const rule = (lines, at) => RULE.test(lines[at]) && { end: at + 1, build: () => el('hr') };

function quote(lines, at) {
  let end = at;
  while (/^ {0,3}>/.test(lines[end])) end++;
  const within = () => lines.slice(at, end).map(line => line.replace(/^ {0,3}> ?/, '')).join('\n');
  return end > at && { end, build: () => render(el('blockquote'), within()) };
}

const cells = row => row.trim().replace(/^\||(?<!\\)\|$/g, '').split(/(?<!\\)\|/).map(cell => cell.trim().replaceAll('\\|', '|'));

function table(lines, at) {
  if (!lines[at].includes('|') || !/^ *\|? *:?-+:? *(\| *:?-+:? *)*\|? *$/.test(lines[at + 1] ?? '')) return;
  const [head, marks] = [cells(lines[at]), cells(lines[at + 1])];
  if (head.length !== marks.length || head.length > 99) return;
  let end = at + 2;
  while (!isBlank(lines[end]) && lines[end].includes('|')) end++;
  const row = (tag, given) => el('tr', {}, marks.map((mark, i) =>
    el(tag, { class: mark.endsWith(':') && (mark.startsWith(':') ? 'centre' : 'right'), scope: tag === 'th' && 'col' }, inline(given[i] ?? ''))));
  const body = () => lines.slice(at + 2, end).map(line => row('td', cells(line)));
  const whole = () => el('table', {}, el('thead', {}, row('th', head)), el('tbody', {}, body()));
  return { end, build: () => el('div', { class: 'scroll', tabindex: 0 }, whole()) };
}

/** Parses a list; lines indented by two or more belong to the item before. */
function list(lines, at) {
  const first = ITEM.exec(lines[at]);
  if (!first || RULE.test(lines[at])) return;
  const [base, ordered] = [first[1].length, /\d/.test(first[2])];
  const items = [];
  let end = at, indent = 0;
  for (; end < lines.length; end++) {
    const line = lines[end].replace(/^\t+/, tabs => '    '.repeat(tabs.length));
    const [item, lead] = [ITEM.exec(line), line.search(/\S/)];
    if (lead < 0 ? !isBlank(lines[end + 1]) && (ITEM.test(lines[end + 1]) || /^\s{2}/.test(lines[end + 1])) : items.length && lead >= base + 2) {
      items.at(-1).push(line.slice(Math.min(lead, indent)));
    } else if (item && /\d/.test(item[2]) === ordered && !RULE.test(line)) {
      items.push([line.slice(item[0].length)]);
      indent = item[0].length;
    } else if (lead >= 0 && !item && !isBlank(lines[end - 1]) && !startsBlock(lines, end)) {
      items.at(-1).push(line);
    } else break;
  }
  const build = () => el(ordered ? 'ol' : 'ul', { start: ordered && parseInt(first[2]) !== 1 && parseInt(first[2]) },
    items.map(listItem));
  return { end, build };
}

/** Returns an item; one that begins with "[ ]" or "[x]" is a task. */
function listItem(lines) {
  const task = /^\[([ xX])\]\s+/.exec(lines[0]);
  if (!task) return render(el('li'), lines.join('\n'));
  const box = el('span', { class: 'task', role: 'img', 'aria-label': task[1] === ' ' ? 'to do' : 'done' }, task[1] === ' ' ? '☐' : '☑');
  const item = render(el('li', { class: 'has-task' }), [lines[0].slice(task[0].length), ...lines.slice(1)].join('\n'));
  item.prepend(box);
  return item;
}

function paragraph(lines, at) {
  let end = at + 1;
  while (!isBlank(lines[end]) && !startsBlock(lines, end)) end++;
  return { end, build: () => el('p', {}, inline(lines.slice(at, end).map(line => line.trim()).join('\n'))) };
}

const BLOCK_PARSERS = [fence, formula, heading, rule, quote, table, list];
const startsBlock = (lines, at) => BLOCK_PARSERS.some(parse => parse(lines, at));

/** Source of each block: while an answer grows, all blocks but the last are retained, and with them
    a selection. */
const built = new WeakMap();
let depth = 0;

function render(into, text) {
  const lines = text.split('\n');
  let old = into.firstChild;
  for (let at = 0; at < lines.length;) {
    if (isBlank(lines[at])) { at++; continue; }
    // Limits the nesting of quotes.
    const block = depth < 9 && BLOCK_PARSERS.reduce((found, parse) => found || parse(lines, at), null) || paragraph(lines, at);
    const source = lines.slice(at, block.end).join('\n');
    if (!old || built.get(old) !== source) {
      depth++;
      const node = block.build();
      depth--;
      built.set(node, source);
      old ? old.replaceWith(node) : into.append(node);
      old = node;
    }
    old = old.nextSibling;
    at = block.end;
  }
  while (old) {
    const next = old.nextSibling;
    old.remove();
    old = next;
  }
  return into;
}

function codeBlock(code, language) {
  const copies = button(' Copy', () => copy(code, copies), {}, icon('copy'));
  const text = el('code', {}, highlight(code, language));
  return el('figure', {}, el('figcaption', {}, el('span', {}, language || 'text'), copies), el('pre', { tabindex: 0 }, text));
}

