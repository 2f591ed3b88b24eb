// Light or dark: as the system has it, until the button in the bar chooses.
const root = document.documentElement;
const dark = matchMedia('(prefers-color-scheme: dark)');
const remember = write => { try { return write(); } catch { return null; } };  // a browser may refuse to store anything
const redrawn = () => dispatchEvent(new Event('themechange'));
root.dataset.theme = remember(() => localStorage.getItem('theme')) ?? '';
dark.addEventListener('change', redrawn);
addEventListener('click', event => {
  if (!event.target.closest('#theme')) return;
  root.dataset.theme = (root.dataset.theme || (dark.matches ? 'dark' : 'light')) === 'dark' ? 'light' : 'dark';
  remember(() => localStorage.setItem('theme', root.dataset.theme));
  redrawn();
});
