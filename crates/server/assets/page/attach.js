// Files of a message: chosen, dropped or pasted. Texts are sent as text, images as `data:` URLs; large
// images are scaled down, since they are stored with the conversation.

const MAX_TEXT = 1 << 20, MAX_SIDE = 1536, MAX_IMAGE = 400_000;

/** Files of the message that is being written. */
let attached = [];

async function attach(files) {
  for (const file of files) {
    try {
      if (server.opens?.(file)) return;
      if (await isExport(file)) await importFiles([file]);
      else attached.push(file.type.startsWith('image/') ? await readImage(file) : await readText(file));
    } catch (error) {
      notice(`${file.name}: ${error.message}`);
    }
  }
  showAttached();
  $('input').focus();
}

const isExport = async file => file.name.endsWith('.json') && (await file.slice(0, 60).text()).includes('"kvant-conversations"');

async function readText(file) {
  if (file.size > MAX_TEXT) throw new Error(`at most ${bytes(MAX_TEXT)} of text, got ${bytes(file.size)}`);
  try {
    const text = new TextDecoder('utf-8', { fatal: true }).decode(await file.arrayBuffer());
    if (text.includes('\0')) throw new Error();
    return { name: file.name, text };
  } catch {
    throw new Error('neither text nor an image');
  }
}

async function readImage(file) {
  if (server.vision === false) throw new Error('this model reads no images');
  const image = await createImageBitmap(file).catch(() => { throw new Error('not an image'); });
  const scale = Math.min(1, MAX_SIDE / Math.max(image.width, image.height));
  if (scale === 1 && file.size <= MAX_IMAGE && /^image\/(png|jpeg|webp|gif|bmp)$/.test(file.type)) return { name: file.name, image: await dataUrl(file) };
  const canvas = el('canvas', { width: Math.max(1, Math.round(image.width * scale)), height: Math.max(1, Math.round(image.height * scale)) });
  const context = canvas.getContext('2d');
  context.fillStyle = '#fff'; // JPEG has no transparency.
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(image, 0, 0, canvas.width, canvas.height);
  return { name: file.name, image: canvas.toDataURL('image/jpeg', .88) };
}

const dataUrl = file => new Promise((resolve, reject) => {
  const reader = new FileReader();
  reader.onload = () => resolve(reader.result);
  reader.onerror = () => reject(new Error('cannot be read'));
  reader.readAsDataURL(file);
});

/** Returns the view of a file, with a button that removes it where `remove` is given. */
function fileView(file, remove) {
  const shown = file.image ? el('img', { src: file.image, alt: file.name }) : [icon('page'), el('span', { class: 'cut' }, file.name)];
  return el('span', { class: file.image ? 'file image' : 'file', title: file.name }, shown, remove && iconButton('close', `Remove ${file.name}`, remove));
}

function showAttached() {
  const remove = file => () => { attached = attached.filter(other => other !== file); showAttached(); $('input').focus(); };
  $('files').replaceChildren(...attached.map(file => fileView(file, remove(file))));
  $('files').hidden = !attached.length;
  paintRest();
}

function wireFiles() {
  const drop = $('drop'), hasFiles = event => event.dataTransfer?.types.includes('Files');
  drop.textContent = server.dropLabel;
  $('attach').addEventListener('click', () => $('upload').click());
  $('upload').addEventListener('change', async () => { await attach([...$('upload').files]); $('upload').value = ''; });
  addEventListener('dragover', event => { if (hasFiles(event)) { event.preventDefault(); drop.hidden = false; } });
  addEventListener('dragleave', event => { if (!event.relatedTarget) drop.hidden = true; });
  addEventListener('drop', event => {
    drop.hidden = true;
    if (!hasFiles(event)) return;
    event.preventDefault();
    attach([...event.dataTransfer.files]);
  });
  addEventListener('paste', event => {
    // A copied table or page is text first, with an image of it.
    const { files, types } = event.clipboardData ?? {};
    if (!files?.length || types.includes('text/plain') || document.querySelector('dialog[open]')) return;
    event.preventDefault();
    attach([...files]);
  });
}
