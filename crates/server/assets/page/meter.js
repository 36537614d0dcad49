// The KV meter. The horizon below the title is the cache of the open conversation: its width is tokens,
// its height is bits, so that its area is bytes; behind it stands what f16 would take. The panel has
// the figures of the whole server, once a second while the page is visible.

/** Returns the figures of the open conversation: those of its last answer that has any, and those of
    an answer in progress as far as they are known. */
function figures() {
  const path = current.path(), turns = [];
  let used = 0, known, live = null, cached = 0;
  for (const node of path) {
    const run = runs.get(node.id), { prompt = 0, said = 0 } = node.stats ?? {};
    if (node.role !== 'assistant' || !(prompt || run)) continue;
    const read = run ? run.progress?.total ?? used : prompt, done = run?.progress && !run.n ? Math.max(run.progress.processed, used) : read;
    turns.push({ node: current.parent(node), tokens: Math.max(0, Math.min(done, read) - used) }, { node, tokens: run ? run.n : said });
    used = Math.max(done, used) + (run ? run.n : said);
    cached = run ? run.progress?.cache ?? 0 : node.stats.cached ?? 0;
    if (node.stats?.bytes) known = { ...node.stats, used };
    if (run) live = run;
  }
  return { turns: turns.filter(turn => turn.tokens > 0), used, known, live, cached };
}

/** Returns the bytes of `used` tokens: measured, or in proportion to the last measurement, which is a
    second old if the conversation is the only one that runs. */
function sizeOf({ used, known, live }) {
  const measured = live && server.live?.run === live ? server.live : known ?? server.measured;
  if (!measured?.used || !used) return null;
  const grown = used / measured.used;
  return { bytes: measured.bytes * grown, f16: measured.f16 * grown, isEstimate: !!live || !known };
}

function paintHorizon() {
  const now = figures(), size = sizeOf(now), { used } = now;
  const scale = Math.max(256, 2 ** Math.ceil(Math.log2(Math.max(1, used))));
  const width = Math.min(scale, Math.max(server.room, used) || scale);
  const horizon = $('horizon');
  horizon.hidden = !used;
  horizon.classList.toggle('live', !!now.live);
  while (horizon.children.length > now.turns.length + 2) horizon.firstChild.remove();
  while (horizon.children.length < now.turns.length + 2) horizon.prepend(el('i', {}, el('i')));
  now.turns.forEach(({ node, tokens }, i) => {
    const turn = horizon.children[i];
    turn.className = node.role === 'user' ? 'turn read' : 'turn';
    turn.style.width = share(tokens, width);
    turn.firstChild.style.height = size ? share(size.bytes, size.f16) : '0';
    turn.title = `${node.role === 'user' ? 'Prompt' : 'Answer'}: ${plural(tokens, 'token')}`;
    turn.onclick = () => views.get(node.id)?.root.scrollIntoView({ block: 'start' });
  });
  const [kept, end] = [...horizon.children].slice(-2);
  kept.className = 'kept';
  kept.style.width = share(now.cached, width);
  kept.title = `${plural(now.cached, 'token')} of the last prompt were found in the cache`;
  end.className = 'end';
  end.textContent = plural(width, 'token');
  paintFigures(now, size);
}

function paintFigures({ used, live, known }, size) {
  const about = size?.isEstimate ? '≈ ' : '';
  setText('now-bytes', size ? about + bytes(size.bytes) : 'KV cache');
  setText('now-f16', size ? `of ${bytes(size.f16)} in f16` : '');
  setText('now-times', size ? times(size.f16 / size.bytes) : '');
  const seconds = live?.n ? (performance.now() - live.since) / 1000 : 0;
  setText('now-rate', seconds > .3 ? rate(live.n / seconds) : known?.rate ? rate(known.rate) : '');
  if (size) $('horizon').ariaLabel = `KV cache of this conversation: ${plural(used, 'token')}, ${bytes(size.bytes)}; f16 would take ${bytes(size.f16)}.`;
}

async function poll() {
  clearTimeout(poll.timer);
  if (document.hidden) return;
  try {
    meter(await get('kv'));
    if (!server.isKnown) await loadModelInfo();
    setText('status', '');
  } catch (error) {
    server.isKnown = false; // The server may return with another model.
    $('cache').classList.add('off');
    setText('status', why(error));
  }
  clearTimeout(poll.timer);
  poll.timer = setTimeout(poll, 1000);
}

/** Paints the panel. `bytes` counts shared blocks once, running_bytes and idle_bytes once per
    sharer: shared_bytes is the difference. */
function meter(kv) {
  server.types = kv.types;
  const { live, used } = figures();
  server.live = live && kv.running === 1 && kv.running_bytes_f16 ? { run: live, used, bytes: kv.running_bytes, f16: kv.running_bytes_f16 } : null;
  const f16 = kv.running_bytes_f16 + kv.idle_bytes_f16, whole = Math.max(f16, kv.bytes);
  const shared = Math.min(kv.shared_bytes, kv.bytes);
  const own = Math.min(Math.max(kv.running_bytes - shared, 0), kv.bytes - shared);
  const parts = { shared, own, idle: kv.bytes - shared - own };
  for (const [name, n] of Object.entries(parts)) {
    $('m-bar').querySelector(`.${name}`).style.width = share(n, whole);
    $(`m-${name}`).textContent = `${name} ${bytes(n)}`;
  }
  $('cache').classList.remove('off');
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
