// Live pages: when the server says that something changed, or every so often, the parts marked data-live are taken anew.
const {events, poll} = document.body.dataset;
let busy = false;
async function update() {
  if (busy) return;
  busy = true;
  try {
    const reply = await fetch(location.href);
    if (reply.ok) refresh(new DOMParser().parseFromString(await reply.text(), 'text/html'));
  } catch { /* the next one tries again */ }
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
if (poll) setInterval(() => document.hidden || update(), Number(poll));
function refresh(page) {
  const news = document.getElementById('news');  // of a list that stays as it is while it is read
  if (news && page.getElementById('news')?.dataset.newest !== news.dataset.newest) news.firstChild.hidden = false;
  for (const part of document.querySelectorAll('[data-live]')) {
    const fresh = page.getElementById(part.id);
    if (!fresh || fresh.innerHTML === part.dataset.shown) continue;
    if ([...part.querySelectorAll('input[autocomplete=off]')].some(each => each.value)) continue;  // being typed
    part.dataset.shown = fresh.innerHTML;
    const open = [...part.querySelectorAll('details')].map(each => each.open);
    const marked = new Set([...part.querySelectorAll('input:checked')].map(each => each.value));
    const focused = part.contains(document.activeElement) ? document.activeElement.id : '';
    part.innerHTML = fresh.innerHTML;
    part.querySelectorAll('details').forEach((each, place) => { each.open = open[place] ?? each.open; });
    part.querySelectorAll('input[type=checkbox]').forEach(each => { each.checked = marked.has(each.value); });
    if (focused) document.getElementById(focused)?.focus();
    readable(part);
  }
}

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
  if (event.target.closest('input, select, textarea, pre[tabindex]')) return;
  const button = [...document.querySelectorAll('[data-key]')].find(each => each.dataset.key === event.key && !each.disabled);
  if (button) { event.preventDefault(); button.click(); }
});
for (const text of document.querySelectorAll('textarea'))
  text.addEventListener('keydown', event => {
    if (event.key !== 'Enter' || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    text.form.requestSubmit();
  });
for (const button of document.querySelectorAll('[data-copy]')) {
  button.hidden = !navigator.clipboard;  // which browsers withhold from sites without TLS, but for this machine's
  button.addEventListener('click', async () => {
    const from = document.getElementById(button.dataset.copy);
    await navigator.clipboard.writeText(from.href ?? from.textContent);
    button.textContent = 'Copied';
  });
}
