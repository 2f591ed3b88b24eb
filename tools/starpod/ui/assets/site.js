// Live pages: when the server says that something changed, or every so often, the parts marked data-live are taken anew.
const {events, poll, here} = document.body.dataset;
const served = new Map([...document.querySelectorAll('[data-live]')].map(part => [part.id, part.innerHTML]));
const parse = text => new DOMParser().parseFromString(text, 'text/html');
const GONE = 'The site does not answer: is it still running?';
function told(text) {  // why a page that asks for the state of a session does not get it
  const problem = document.getElementById('problem');
  if (problem && problem.textContent !== text) problem.textContent = text;
}
let busy = false, acting = false, acted = 0;
async function update() {
  if (busy || acting) return;
  busy = true;
  try {
    const before = acted, reply = await fetch(location.href), page = parse(await reply.text());
    if (before === acted) {
      told(reply.ok ? '' : page.querySelector('main p').textContent);
      if (reply.ok) refresh(page);
    }
  } catch { told(GONE); }  // the next one tries again
  busy = false;
}
if (events) {
  let known = null;
  new EventSource(events).onmessage = event => {
    const news = known !== null && known !== event.data;
    known = event.data;
    if (news) update();
  };
}
const polling = poll && setInterval(() => document.hidden || update(), Number(poll));
function refresh(page, sent) {  // sent: a form that was answered by it
  const news = document.getElementById('news');  // of a list that stays as it is while it is read
  if (news && page.getElementById('news')?.dataset.newest !== news.dataset.newest) news.firstChild.hidden = false;
  for (const part of document.querySelectorAll('[data-live]')) {
    const fresh = page.getElementById(part.id);
    if (!fresh || fresh.innerHTML === served.get(part.id)) continue;
    const active = part.contains(document.activeElement) && document.activeElement;
    if (!sent && active && active.matches('input:not([type=checkbox]), textarea') && active.value) continue;  // being typed
    served.set(part.id, fresh.innerHTML);
    const find = active && place(part, active);
    const open = [...part.querySelectorAll('details')].map(each => each.open);
    const chosen = [...part.querySelectorAll(FIELDS)].filter(changed).map(each => [place(part, each), each])
      .filter(([, each]) => each.form !== sent || each.matches('select'));
    part.innerHTML = fresh.innerHTML;
    part.querySelectorAll('details').forEach((each, at) => { each.open = open[at] ?? each.open; });
    for (const [find, old] of chosen) {
      const each = find(part);
      if (each) { each.value = old.value; each.checked = old.checked; }
    }
    readable(part);
    if (!find) continue;
    find(part)?.focus({preventScroll: true});
    if (part.contains(document.activeElement)) continue;
    part.tabIndex = -1;  // what had the focus is gone
    part.focus({preventScroll: true});
  }
  document.title = page.title;
  if (polling && !page.body.dataset.poll) clearInterval(polling);
}
const FIELDS = 'input:not([type=hidden]), select, textarea';
const changed = each => each.type === 'checkbox' ? each.checked !== each.defaultChecked
  : each.options ? !each.selectedOptions[0]?.defaultSelected : each.value !== each.defaultValue;
// How to find in new content what was there before: by its id, name and value, link or label, or else by its position.
function place(part, each) {
  const keys = [each => [each.tagName, each.id, each.name, each.matches('button, [type=checkbox]') && each.value,
    each.getAttribute('href'), each.getAttribute('aria-label'), each.form?.getAttribute('aria-label')].join('|'),
    each => `${each.tagName}|${each.name}`];
  const alike = (root, key, wanted) => [...root.querySelectorAll(each.tagName)].filter(other => key(other) === wanted);
  const found = keys.map(key => [key, key(each), alike(part, key, key(each)).indexOf(each)]);
  return root => {
    for (const [key, wanted, at] of found) {
      const others = alike(root, key, wanted);
      if (others.length) return others[Math.min(at, others.length - 1)];
    }
  };
}

// A session: what its forms and links ask for is done in place. The focus stays where it is, and the new state is told.
async function follow(url, form, submitter) {
  if (acting) return;
  acting = true;
  acted += 1;
  const main = document.querySelector('main');
  main.setAttribute('aria-busy', 'true');
  try {
    const sent = form && {method: 'POST', body: new URLSearchParams(new FormData(form, submitter))};
    const reply = await fetch(url, sent);
    const page = parse(await reply.text());
    const same = here ? page.body.dataset.here === here : reply.ok;
    told(same || reply.ok ? '' : page.querySelector('main p').textContent);
    if (same) refresh(page, form || true);
    else if (reply.ok) location = reply.url;
  } catch { told(GONE); }
  main.removeAttribute('aria-busy');
  acting = false;
}
const ours = path => here && new URL(path, location).pathname.startsWith(here);
document.addEventListener('submit', event => {
  const url = event.target.getAttribute('action');  // a control may be named action
  if (!url || !ours(url)) return;
  event.preventDefault();
  follow(url, event.target, event.submitter);
});
document.addEventListener('click', event => {
  const link = event.target.closest('a[href]');
  if (!link || !ours(link.href) || event.ctrlKey || event.metaKey || event.shiftKey || event.button) return;
  event.preventDefault();
  follow(link.href);
});

// A comparison is drawn anew in place. Dragging over a chart zooms all of them in, a double click out.
const draw = from => {
  history.pushState(null, '', '?' + new URLSearchParams(new FormData(from)));
  follow(location.href);
};
document.addEventListener('submit', event => {
  if (event.target.id !== 'draw') return;
  event.preventDefault();
  draw(event.target);
});
addEventListener('popstate', () => document.getElementById('draw') && follow(location.href));
function zoom(low, high) {
  const form = document.getElementById('draw');
  [form.elements.from.value, form.elements.to.value] = [low, high];
  draw(form);
}
let drag = null;
document.addEventListener('pointerdown', event => {
  const svg = event.target.closest('.zoomable svg[data-hover]');
  if (!svg || event.button || !event.isPrimary) return;
  const {across: [left, right, low, high, log], edges} = JSON.parse(svg.dataset.hover), box = svg.getBoundingClientRect();
  const x = event => Math.max(left, Math.min(right, (event.clientX - box.left) * svg.viewBox.baseVal.width / box.width));
  const value = x => { const part = (x - left) / (right - left);
    return Number((log ? low * (high / low) ** part : low + part * (high - low)).toPrecision(4)); };
  const shade = document.createElementNS(NS, 'rect');
  svg.append(shade);
  drag = {shade, from: x(event), at: x(event), x, value};
  for (const [name, each] of Object.entries({class: 'zoom', y: edges[0], height: edges[1] - edges[0]})) shade.setAttribute(name, each);
});
document.addEventListener('pointermove', event => {
  if (!drag) return;
  drag.at = drag.x(event);
  drag.shade.setAttribute('x', Math.min(drag.from, drag.at));
  drag.shade.setAttribute('width', Math.abs(drag.at - drag.from));
});
for (const name of ['pointerup', 'pointercancel']) document.addEventListener(name, () => {
  if (!drag) return;
  const {shade, value, from, at} = drag, [low, high] = [from, at].sort((a, b) => a - b).map(value);
  shade.remove();
  drag = null;
  if (name === 'pointerup' && Math.abs(at - from) > 8 && low < high) zoom(low, high);
});
document.addEventListener('dblclick', event => event.target.closest('.zoomable svg[data-hover]') && zoom('', ''));

// Turns of an episode: arrow keys go from one to the next, and the address says which one is shown.
const turns = [...document.querySelectorAll('.turnbox')];
if (turns.length) {
  const marks = [...document.querySelectorAll('.strip a')];
  let here = Math.max(0, turns.findIndex(turn => '#' + turn.id === location.hash));
  const show = (place, move) => {
    here = Math.max(0, Math.min(turns.length - 1, place));
    turns.forEach((turn, each) => turn.classList.toggle('here', each === here));
    marks.forEach((mark, each) => {
      mark.classList.toggle('here', each === here);
      each === here ? mark.setAttribute('aria-current', 'step') : mark.removeAttribute('aria-current');
    });
    if (!move) return;
    history.replaceState(null, '', '#' + turns[here].id);
    turns[here].focus({preventScroll: true});
    turns[here].scrollIntoView({block: 'nearest'});
    const strip = marks[here]?.parentElement;
    if (strip) strip.scrollLeft = marks[here].offsetLeft - strip.clientWidth / 2;
  };
  show(here, false);
  document.addEventListener('keydown', event => {
    if (event.defaultPrevented || event.altKey || event.ctrlKey || event.metaKey) return;
    if (event.target.closest('input, select, textarea, pre[tabindex]')) return;
    const move = {ArrowLeft: -1, ArrowRight: 1}[event.key];
    if (move) { event.preventDefault(); show(here + move, true); }
  });
  addEventListener('hashchange', () => show(turns.findIndex(turn => '#' + turn.id === location.hash), false));
}

// Pictures that the server cannot draw again are left out.
for (const image of document.querySelectorAll('.strip img, .seen img, .partings img')) {
  if (image.complete && !image.naturalWidth) image.remove();
  else image.addEventListener('error', () => image.remove());
}

// Keys of a game, and copying.
document.addEventListener('keydown', event => {
  if (event.defaultPrevented || event.altKey || event.ctrlKey || event.metaKey) return;
  if (event.repeat || event.target.closest('input, select, textarea, pre[tabindex]')) return;
  const button = [...document.querySelectorAll('[data-key]')].find(each => each.dataset.key === event.key && !each.disabled);
  if (button) { event.preventDefault(); button.click(); }
});
document.addEventListener('keydown', event => {
  if (!event.target.matches('textarea[name=action]') || event.key !== 'Enter' || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  event.target.form.requestSubmit();
});
// Browsers withhold the clipboard from sites without TLS, but for this machine's.
document.documentElement.classList.toggle('no-clipboard', !navigator.clipboard);
document.addEventListener('click', async event => {
  const button = event.target.closest('[data-copy]');
  if (!button) return;
  const from = document.getElementById(button.dataset.copy);
  await navigator.clipboard.writeText(from.href ?? from.textContent);
  button.textContent = 'Copied';
});
