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
    curves.readable(part);
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

// A comparison of other metrics, or over another quantity, takes the place of the one that is shown.
document.addEventListener('submit', event => {
  if (event.target.id !== 'draw') return;
  event.preventDefault();
  history.pushState(null, '', '?' + curves.viewed(new URLSearchParams(new FormData(event.target))));
  follow(location.href);
});
addEventListener('popstate', () => document.getElementById('draw') && follow(location.href));
document.addEventListener('click', ({target}) => { if (target.id === 'file') target.search = location.search; });

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
  await navigator.clipboard.writeText(document.getElementById(button.dataset.copy)?.textContent ?? location.href);
  button.textContent = 'Copied';
});
