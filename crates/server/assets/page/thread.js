// The thread: the messages of the open conversation, and what follows from them on the page.

const scroller = $('scroller');
const isAtEnd = () => scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 90;
const paintDown = () => { $('down').hidden = isAtEnd(); };
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
    el('p', {}, 'Kvant keeps a conversation in a compressed KV cache', types ? ` (${types} here)` : '', '. The strip above it is that cache, drawn to scale within what f16 would take. Any answer can be given again in another type, side by side.'),
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
  $('send').disabled = !busy && !$('input').value.trim() && !attached.length;
  paintHorizon();
  const last = current.path().findLast(node => node.stats?.prompt);
  // The last generated token has not been fed.
  const used = last ? Math.min(last.stats.prompt + (last.stats.said ?? 0), server.room) : 0;
  setText('room', server.room ? `${count(used)} / ${count(server.room)}` : '');
  const { rate: decode = 0, read = 0, cached = 0, prompt = 0, ttft } = last?.stats ?? {};
  setText('m-rate', last ? rate(decode) : '–');
  setText('m-read', last ? rate(read) : '–');
  setText('m-cached', last ? `${count(cached)} of ${count(prompt)}` : '–');
  setText('m-ttft', ttft ? seconds(ttft) : '–');
}
