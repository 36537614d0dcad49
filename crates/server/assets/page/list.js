// The list of conversations: by date, searched in titles and texts, with the actions of each.

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

/** Returns the name of the time of a conversation. */
function period(time) {
  const midnight = new Date().setHours(0, 0, 0, 0), days = Math.ceil((midnight - time) / 86_400_000);
  if (days <= 1) return days <= 0 ? 'Today' : 'Yesterday';
  if (days <= 7) return 'Last seven days';
  return new Date(time).toLocaleDateString('en', { month: 'long', year: 'numeric' });
}

/** Returns where a conversation has the searched words: '' in its title, else the text around them,
    or nothing. */
function found(conversation, query) {
  if (!query || conversation.title.toLowerCase().includes(query)) return '';
  for (const { text } of conversation.nodes.values()) {
    const at = text?.toLowerCase().indexOf(query) ?? -1;
    if (at >= 0) return `${at > 24 ? '…' : ''}${text.slice(Math.max(0, at - 24), at + 60)}`.replace(/\s+/g, ' ');
  }
}

function showList() {
  const query = $('search').value.trim().toLowerCase(), groups = new Map();
  for (const conversation of [...conversations.values()].sort((a, b) => b.updated - a.updated)) {
    const excerpt = found(conversation, query), name = period(conversation.updated);
    if (excerpt === undefined) continue;
    if (!groups.has(name)) groups.set(name, []);
    groups.get(name).push(entry(conversation, excerpt, query));
  }
  const sections = [...groups].map(([name, entries]) => el('section', {}, el('h3', {}, name), el('ul', {}, entries)));
  if (!sections.length && query) sections.push(el('p', { class: 'none' }, 'Nothing found.'));
  $('list').replaceChildren(...sections);
}

/** Returns the excerpt of a text with the searched words marked. */
function marked(text, query) {
  const at = text.toLowerCase().indexOf(query);
  return at < 0 || !query ? [text] : [text.slice(0, at), el('mark', {}, text.slice(at, at + query.length)), text.slice(at + query.length)];
}

function entry(conversation, excerpt, query) {
  const title = conversation.title || 'Untitled';
  const more = iconButton('more', `Actions: ${title}`, () => popAt($('actions'), more, [
    ['pen', 'Rename', () => rename(conversation, item)],
    ['out', 'Export', () => exportConversations([conversation], title)],
    ['page', 'Export as Markdown', () => exportMarkdown(conversation)],
    ['bin', 'Delete', () => remove(conversation)],
  ].map(([name, label, act]) => button(label, () => { $('actions').hidePopover(); act(); }, {}, icon(name)))));
  const names = [el('span', { class: 'cut' }, marked(title, query)), excerpt && el('small', { class: 'cut' }, marked(excerpt, query))];
  const item = el('li', {}, button('', () => open(conversation), { class: 'entry', 'aria-current': conversation === current && 'true', title }, ...names), more);
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
  eraseConversation(conversation.id);
  if (conversation === current) open(new Conversation(), false);
  showList();
  notice(`Deleted: ${conversation.title}`, 'Undo', () => {
    conversations.set(conversation.id, conversation);
    saveConversation(conversation);
    open(conversation);
  });
}

/** Opens or closes the list where it is a drawer. */
function drawer(isOpen) {
  document.body.classList.toggle('open', isOpen);
  $('menu').ariaExpanded = isOpen;
  (isOpen ? $('new') : $('menu')).focus();
}

function wireList() {
  $('menu').addEventListener('click', () => drawer(!document.body.classList.contains('open')));
  $('shade').addEventListener('click', () => drawer(false));
  $('new').addEventListener('click', () => open(new Conversation()));
  $('file').addEventListener('change', async () => { await importFiles($('file').files); $('file').value = ''; });
  $('search').addEventListener('input', () => {
    showList();
    const n = document.querySelectorAll('.entry').length;
    announce($('search').value ? plural(n, 'conversation') : '');
  });
  // The arrows move from the search through the list.
  document.querySelector('aside').addEventListener('keydown', event => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!step || event.target.matches('li input')) return;
    const stops = [$('search'), ...document.querySelectorAll('.entry')];
    const at = stops.indexOf(event.target.closest('li')?.querySelector('.entry') ?? event.target);
    if (at < 0) return;
    event.preventDefault();
    stops[at + step]?.focus();
  });
  $('foot').append(
    iconButton('in', 'Import conversations', () => $('file').click()),
    iconButton('out', 'Export all conversations', exportAll),
    iconButton('keys', 'Keys (?)', () => $('keys').showModal()),
    iconButton('dark', 'Light or dark', nextTheme),
    iconButton('gear', 'Settings', () => $('settings').showModal()));
}
