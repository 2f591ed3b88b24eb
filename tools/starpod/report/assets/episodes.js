// Episodes are chosen by the form above them, and opened by the links between them.
const form = document.getElementById('choose');
if (form) {
  const episodes = [...document.querySelectorAll('details.episode')];
  const choose = () => {
    const asked = new FormData(form), words = asked.get('words').toLowerCase().split(/\s+/).filter(Boolean);
    let count = 0;
    for (const each of episodes) {
      const fits = ['when', 'outcome', 'environment'].every(name => !asked.get(name) || asked.get(name) === each.dataset[name]);
      const text = words.length ? each.textContent.toLowerCase() : '';
      each.hidden = !(fits && words.every(word => text.includes(word)));
      count += !each.hidden;
    }
    form.querySelector('output').textContent = `${count} of ${episodes.length}`;
  };
  form.hidden = false;
  form.addEventListener('input', choose);
  form.addEventListener('submit', event => event.preventDefault());
  choose();
  const open = () => {
    const target = document.getElementById(location.hash.slice(1));
    if (target?.matches('details')) { target.hidden = false; target.open = true; target.scrollIntoView(); target.querySelector('summary').focus(); }
  };
  addEventListener('hashchange', open);
  open();
}
