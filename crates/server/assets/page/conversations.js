// Conversations, their export and import. A conversation is a tree: an edited message or another
// answer adds a sibling, nothing is overwritten. Each node records which of its children is selected,
// and which are shown beside that one.

const NUMBERS = 'temperature top_p top_k min_p repeat_penalty presence_penalty max_tokens seed';
const IMAGE = /^data:image\/(?:png|jpeg|webp|gif|bmp);base64,[A-Za-z0-9+/=]+$/;

const isFile = ({ name, text, image }) => name && (image === undefined ? text !== undefined : text === undefined && IMAGE.test(image));

/** Returns the content of a message as a request has it: files are texts before its own. */
function contentOf({ text, files = [] }) {
  const fences = (text.match(/`{3,}/g) ?? []).concat(files.flatMap(file => file.text?.match(/`{3,}/g) ?? []), '``');
  const fence = `${fences.reduce((a, b) => a.length > b.length ? a : b)}\``;
  const texts = files.filter(file => file.text !== undefined).map(file => `${file.name}:\n${fence}\n${file.text}\n${fence}\n\n`);
  const images = files.filter(file => file.image).map(file => ({ type: 'image_url', image_url: { url: file.image } }));
  const whole = texts.join('') + text;
  return images.length ? [...images, { type: 'text', text: whole }] : whole;
}

class Conversation {
  constructor({ id = newId(), title = '', created = Date.now(), updated = created } = {}) {
    Object.assign(this, { id, title, created, updated });
    this.root = { id: '', children: [], pick: '', beside: [] };
    this.nodes = new Map([['', this.root]]);
  }

  add(parent, fields) {
    const node = { id: newId(), parent: parent.id, text: '', at: Date.now(), ...fields, children: [], pick: '', beside: [] };
    this.nodes.set(node.id, node);
    parent.children.push(node.id);
    if (!parent.pick) parent.pick = node.id;
    return node;
  }

  parent(node) { return this.nodes.get(node.parent); }
  children(node) { return node.children.map(id => this.nodes.get(id)); }

  /** Returns the nodes that are shown, in order. */
  path() {
    const path = [];
    for (let node = this.root; node.pick;) path.push(node = this.nodes.get(node.pick));
    return path;
  }

  /** Returns the messages that a request to answer `node` contains. */
  messages(node, system) {
    const messages = [];
    for (let at = node; at !== this.root; at = this.parent(at)) {
      if (at.role === 'user' || at.text) messages.unshift({ role: at.role, content: contentOf(at), ...(at.thought && { reasoning_content: at.thought }) });
    }
    return system ? [{ role: 'system', content: system }, ...messages] : messages;
  }

  toJSON() {
    const { id, title, created, updated, root } = this;
    const nodes = [...this.nodes.values()].slice(1).map(({ children, beside, ...node }) => ({ ...node, ...(beside.length && { beside }) }));
    return { id, title, created, updated, pick: root.pick, nodes };
  }

  /** Reads the output of `toJSON` and validates all of it. Throws if it is invalid. */
  static from(json) {
    const given = typed(json, 'id title', 'created updated');
    if (!/^[\w-]{1,64}$/.test(given.id ?? '') || !Array.isArray(json.nodes)) throw new Error('a conversation has an id and nodes');
    const conversation = new Conversation(given);
    for (const node of json.nodes) conversation.read(node);
    for (const node of [json, ...json.nodes]) {
      const here = conversation.nodes.get(node === json ? '' : node.id);
      if (here.children.includes(node.pick)) here.pick = node.pick;
      if (Array.isArray(node.beside)) here.beside = node.beside.filter(id => here.children.includes(id) && id !== here.pick);
    }
    return conversation;
  }

  read(json) {
    const node = typed(json, 'id parent text role thought end error', 'at');
    const parent = this.nodes.get(node.parent);
    if (!node.id || this.nodes.has(node.id) || !parent) throw new Error('a message lacks an id, or what it answers');
    if (node.role !== (parent.role === 'user' ? 'assistant' : 'user')) throw new Error('user and assistant take turns');
    if (json.asked) node.asked = typed(json.asked, 'system kv_type model reasoning', `${NUMBERS} thinking_budget_tokens`);
    if (json.stats) node.stats = typed(json.stats, 'type model', 'bytes f16 prompt cached said rate read ttft');
    if (Array.isArray(json.files)) node.files = json.files.map(file => typed(file, 'name text image')).filter(isFile);
    this.add(parent, node);
  }
}

/** Returns the named fields of an object that are strings, and those that are numbers. */
function typed(object, texts, numbers = '') {
  const those = (names, fits) => names.split(' ').filter(name => fits(object?.[name])).map(name => [name, object[name]]);
  return Object.fromEntries([...those(texts, value => typeof value === 'string'), ...those(numbers, Number.isFinite)]);
}

/* ---- Export and import ---- */

function download(text, name, type) {
  const href = URL.createObjectURL(new Blob([text]));
  el('a', { href, download: `${name.replace(/[^\p{L}\p{N}]+/gu, '-').slice(0, 40) || 'conversation'}.${type}` }).click();
  setTimeout(() => URL.revokeObjectURL(href), 10000);
}

const exportConversations = (selected, name) =>
  download(JSON.stringify({ format: 'kvant-conversations', version: 1, conversations: selected }, null, 1), name, 'json');

/** Exports what is shown of a conversation as Markdown. */
function exportMarkdown(conversation) {
  const turns = conversation.path().map(node => `## ${node.role === 'user' ? 'You' : 'Kvant'}\n\n${(node.files ?? []).map(({ name }) => `(${name})\n\n`).join('')}${splitReasoning(node).text.trim()}\n`);
  download([`# ${conversation.title}\n`, ...turns].join('\n'), conversation.title, 'md');
}

const exportAll = () => exportConversations([...conversations.values()], 'kvant-conversations');

/** Imports a conversation. An identical one is skipped; a different one with the same id gets a new
    id. */
function importConversation(conversation) {
  const existing = conversations.get(conversation.id);
  if (existing && JSON.stringify(Conversation.from(existing.toJSON())) === JSON.stringify(conversation)) return existing;
  if (existing) conversation.id = newId();
  conversations.set(conversation.id, conversation);
  saveConversation(conversation);
  return conversation;
}

async function importFiles(files) {
  for (const file of files) {
    try {
      const { format, conversations } = JSON.parse(await file.text());
      if (format !== 'kvant-conversations' || !Array.isArray(conversations)) throw new Error('no conversations of Kvant');
      const read = conversations.map(Conversation.from).map(importConversation);
      if (read.length) open(read[0]);
      notice(`${plural(read.length, 'conversation')} imported.`);
    } catch (error) {
      notice(`${file.name}: ${error.message}`);
    }
  }
  showList();
}

