// Storage: conversations in IndexedDB, one record each, so that windows do not overwrite each other;
// settings in the local storage.

const STORE = 'conversations';
const conversations = new Map();
const settings = {
  temperature: '', top_p: '', top_k: '', min_p: '', repeat_penalty: '', presence_penalty: '', max_tokens: '', seed: '', reasoning: '',
  thinking_budget_tokens: '', model: '', system: '', key: '', theme: '', kv: '',
};
let current = new Conversation();

function load(key, otherwise) {
  try { return JSON.parse(localStorage.getItem(key)) ?? otherwise; } catch { return otherwise; }
}

function save(key, value) {
  try { localStorage.setItem(key, JSON.stringify(value)); } catch { /* No local storage: settings last as long as this window. */ }
}

const saveSettings = () => save('kvant.settings', settings);

const database = new Promise((resolve, reject) => {
  const request = indexedDB.open('kvant', 1);
  request.onupgradeneeded = () => request.result.createObjectStore(STORE);
  request.onsuccess = () => {
    request.result.onversionchange = () => request.result.close();
    resolve(request.result);
  };
  request.onerror = () => reject(request.error);
});
const channel = new BroadcastChannel('kvant');

/** Runs a request on the stored conversations and returns its result. */
async function stored(mode, ask) {
  const transaction = (await database).transaction(STORE, mode);
  return new Promise((resolve, reject) => {
    const request = ask(transaction.objectStore(STORE));
    transaction.oncomplete = () => resolve(request.result);
    transaction.onabort = () => reject(transaction.error);
  });
}

async function write(id, ask) {
  try {
    await stored('readwrite', ask);
    channel.postMessage(id);
  } catch {
    notice('This browser stores no more: export and delete some.', 'Export', exportAll);
  }
}

function saveConversation(conversation) {
  const { id } = conversation;
  if (conversations.has(id)) write(id, store => store.put(JSON.stringify(conversation), id));
}

const eraseConversation = id => write(id, store => store.delete(id));

function markUpdated(conversation) {
  conversation.updated = Date.now();
  saveConversation(conversation);
}

/** Saves a growing conversation at most once a second. */
function saveSoon(conversation) {
  conversation.due ||= setTimeout(() => { conversation.due = 0; saveConversation(conversation); }, 1000);
}

function readConversation(text) {
  try {
    const conversation = Conversation.from(JSON.parse(text));
    // An answer without a request was interrupted.
    for (const node of conversation.nodes.values()) {
      if (node.role === 'assistant') node.end ||= 'stopped';
    }
    conversations.set(conversation.id, conversation);
  } catch { /* Of another program or version: it is left as it is. */ }
}

async function loadConversations() {
  try {
    (await stored('readonly', store => store.getAll())).forEach(readConversation);
    // Earlier versions kept conversations in the local storage.
    for (const key of Object.keys(localStorage).filter(key => key.startsWith('kvant.talk.'))) {
      readConversation(localStorage.getItem(key));
      const id = key.slice('kvant.talk.'.length);
      if (!conversations.has(id)) continue;
      await stored('readwrite', store => store.put(localStorage.getItem(key), id));
      localStorage.removeItem(key);
    }
  } catch {
    notice('This browser stores nothing: conversations last as long as this window.');
  }
}

/** Reloads a conversation that another window has changed, so that this one does not overwrite it. */
async function changedElsewhere({ data: id }) {
  if ([...runs.values()].some(run => run.conversation.id === id)) return;
  const text = await stored('readonly', store => store.get(id));
  text ? readConversation(text) : conversations.delete(id);
  if (id === current.id) open(conversations.get(id) ?? new Conversation(), false);
  showList();
}
